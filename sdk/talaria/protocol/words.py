"""Words of a secure round, cut into messages and put together again. What they mean is not known here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from talaria.errors import TooLarge, WireError
from talaria.wire import messages as m

MOST = m.MAX_PARTS * m.MAX_WORD
"""Bytes of a word at most."""
STEPS = 5
"""Keys, shares, masked updates (which travel as uploads do), agreement, opening."""
UPLOAD, OPENING = 2, 4
OPENED = "secure: this device has helped to open a sum"
"""How a device begins to say that it declines a round for that: it will decline each other try at it."""


P = TypeVar("P", m.Word, m.Told)


def cut(kind: type[P], attempt: int, step: int, data: bytes, chunk: int) -> Iterator[P]:
    """The messages of this kind that carry ``data``, each of at most ``chunk`` bytes of it.

    Raises :class:`TooLarge` where they would be more than a receiver takes.
    """
    size = max(1, min(chunk, m.MAX_WORD))
    parts = -(-len(data) // size)
    if parts > m.MAX_PARTS:
        raise TooLarge(
            f"secure: a word of {len(data)} bytes needs {parts} messages of {size}, {m.MAX_PARTS} are taken at most; "
            "raise the broker's bound on packets, or ask fewer devices at once"
        )
    for part in range(parts):
        yield kind(attempt=attempt, step=step, part=part, parts=parts, data=data[part * size : (part + 1) * size])


@dataclass
class Gathered:
    """The parts of one word that have come. Plain data."""

    attempt: int = -1
    step: int = 0
    parts: list[bytes] = field(default_factory=list)

    def take(self, word: m.Word | m.Told) -> bytes | None:
        """The whole word once its last part is here. A word of another round or step, or cut otherwise, begins anew.

        Raises :class:`WireError` for a part beyond those that there are.
        """
        if word.part >= word.parts:
            raise WireError(f"word: part {word.part} of {word.parts}")
        if (self.attempt, self.step, len(self.parts)) != (word.attempt, word.step, word.parts):
            self.attempt, self.step, self.parts = word.attempt, word.step, [b""] * word.parts
        self.parts[word.part] = word.data
        if not all(self.parts):
            return None
        whole, self.parts = b"".join(self.parts), []
        return whole
