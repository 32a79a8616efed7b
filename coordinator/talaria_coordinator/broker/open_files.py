"""The limit on open files: a broker needs one for each device."""

from __future__ import annotations

import resource
from contextlib import suppress

from talaria.errors import ConfigError

SPARE = 128
"""Open files beside those of the devices: the store, uploads, readers of the API."""


def make_room(devices: int) -> None:
    """Raise the limit of this process as far as ``devices`` need it; a child has it too. Raises
    :class:`ConfigError` where that is not allowed: the last devices could never come, and nobody would learn why."""
    need = devices + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard == resource.RLIM_INFINITY or hard >= need:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
            return
    raise ConfigError(
        f"fleet: {devices} devices need {need} open files for the broker, and this program may have {hard} "
        f"(`ulimit -Hn`). Allow more: LimitNOFILE={2 * need} in [Service] of its systemd unit, or "
        f"`ulimit -Hn {2 * need}` by root before it starts; or expect fewer devices"
    )
