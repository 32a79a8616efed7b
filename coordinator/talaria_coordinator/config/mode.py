"""``[rounds] mode``: rounds in step, or asynchronously, and what goes with which."""

from __future__ import annotations

from talaria.config import Section
from talaria.errors import ConfigError
from talaria.federated.fedbuff_run import Buffering
from talaria.federated.rounds import Run

MODES = ("synchronous", "asynchronous")
_STEP = ("quorum", "over")
_BUFFER = ("buffer", "max_staleness", "damping")


def buffering_of(section: Section) -> Buffering | None:
    """The buffer that a ``[rounds]`` table asks for; None for rounds in step. Raises :class:`ConfigError` for an option
    of the other mode."""
    mode = section.text("mode", "synchronous")
    if mode not in MODES:
        raise section.bad("mode", f"must be one of {', '.join(MODES)}")
    for name in _STEP if mode == "asynchronous" else _BUFFER:
        if name in section.values:
            other = "synchronous" if mode == "asynchronous" else "asynchronous"
            raise section.bad(name, f'needs mode = "{other}"; leave it out, or change the mode')
    if mode == "synchronous":
        return None
    return Buffering(
        buffer=section.whole("buffer", Buffering.buffer, low=1),
        max_staleness=section.whole("max_staleness", Buffering.max_staleness),
        damping=section.number("damping", Buffering.damping, high=10.0),
    )


def require_mode(run: Run, buffering: Buffering | None, members: int, deadline_s: float) -> None:
    """Raise :class:`ConfigError` where run, buffer and fleet do not fit."""
    if run.asynchronous != (buffering is not None):
        raise ConfigError("rounds: an asynchronous run has a buffer, and one in step has none; give both or neither")
    if buffering is None:
        return
    buffering.require(members)
    if deadline_s == 0:
        raise ConfigError(
            "rounds: deadline_s=0 never asks those again who could not take part; give the seconds after which a "
            "buffer that is not full asks everybody idle once more"
        )
