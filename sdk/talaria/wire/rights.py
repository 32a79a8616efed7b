"""What a broker says of messages that it does not take, as one of MQTT 5 does where rights are missing."""

from __future__ import annotations

import re
from math import inf

AGAIN_S = 3600.0
"""Seconds until the same is told again."""
KINDS = 16
"""Topics that differ in more than a transfer or a chunk, of which a connection tells."""
_TRANSFER = re.compile(r"/[0-9a-f]{8,16}(/\d+)?$")


class Rights:
    """The topics of messages on their way over one connection, and what was told of those that were refused."""

    def __init__(self) -> None:
        self._topics: dict[int, str] = {}
        self._told: dict[str, float] = {}

    def asked(self, number: int, topic: str) -> None:
        """Message ``number`` was handed to the link."""
        self._topics[number] = topic

    def answered(self, number: int, refused: str, now: float) -> str:
        """What to tell of it: nothing where it was taken (``refused`` is empty then), or it was told of late."""
        topic = self._topics.pop(number, "")
        if not refused or not topic:
            return ""
        kind = _TRANSFER.sub("/#", topic)
        if now - self._told.get(kind, -inf) < AGAIN_S:
            return ""
        if kind not in self._told and len(self._told) >= KINDS:
            return ""
        self._told[kind] = now
        mend = "; correct its access list (ACL), or the user name here" if "uthori" in refused else ""
        return f"the broker refuses what is published on {kind}: {refused}{mend}"
