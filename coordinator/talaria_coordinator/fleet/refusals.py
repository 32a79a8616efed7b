""":class:`Refusals`: reports each kind of refusal once and counts its repeats, so that a flood makes few lines."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from talaria.protocol.actions import FrameRefused

_NUMBER = re.compile("[0-9]+")
EVERY_S = 60.0
KINDS = 256
"""So many kinds of refusals are told apart; strangers think of new ones."""


@dataclass
class _Kind:
    last: FrameRefused
    told: float
    more: int = 0


@dataclass
class Refusals:
    """The first refusal of a kind (device, kind of topic, the reason's beginning without its numbers) is told at once;
    those that follow are counted, and told with their number at most every :data:`EVERY_S` seconds."""

    tell: Callable[..., None]
    _kinds: dict[tuple[str, str, str], _Kind] = field(default_factory=dict, init=False)

    def heard(self, refused: FrameRefused, now: float) -> None:
        """Something was refused at ``now``, a clock that only goes on."""
        topic = refused.topic.split("/")
        key = (refused.device, "/".join(topic[5:6]), _NUMBER.sub("", refused.reason)[:24])
        if key not in self._kinds and len(self._kinds) >= KINDS:
            key = ("", "", "")
        kind = self._kinds.get(key)
        if kind is None:
            self._kinds[key] = _Kind(refused, now)
            self.tell("refused", device=refused.device, topic=refused.topic, reason=refused.reason)
            return
        kind.last, kind.more = refused, kind.more + 1
        self.due(now)

    def due(self, now: float) -> None:
        """Tell the counts whose time has come; forget what did not come again."""
        for key, kind in list(self._kinds.items()):
            if now - kind.told < EVERY_S:
                continue
            if not kind.more:
                del self._kinds[key]
                continue
            last = kind.last
            self.tell("refused", device=last.device, topic=last.topic, reason=last.reason, more=kind.more)
            kind.told, kind.more = now, 0
