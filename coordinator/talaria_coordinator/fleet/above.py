""":class:`Above`: what passes between a site's coordinator and the member that it is of the fleet above: rounds and
global models come down, partial sums go up.

The two work in threads of their own. Neither remembers anything here: after a crash each says again what it wants.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from functools import cached_property

from talaria import time
from talaria.errors import WireError


@dataclass(frozen=True)
class Wanted:
    """The round that the fleet above asks for, and the global model that it begins from, as it travels. With ``final``,
    the one after the run's last: nothing more is to be learned, until the run goes on for longer and this very round is
    asked for. The round ends above ``seconds`` after it was ``asked`` for (None: it waits)."""

    round: int
    model: bytes = field(repr=False)
    seconds: float | None = None
    final: bool = False
    asked: float = field(default_factory=time.monotonic)

    @cached_property
    def digest(self) -> str:
        """The hex sha256 of the model."""
        return hashlib.sha256(self.model).hexdigest()


class Above:
    """The fleet above, in which this site is the member ``client``."""

    def __init__(self, client: str) -> None:
        self.client = client
        self._turn = threading.Condition()
        self._wanted: Wanted | None = None
        self._asking: object = None
        self._answer: tuple[tuple[int, str, bool], bytes | str] | None = None

    @property
    def wanted(self) -> Wanted | None:
        """What was asked for last; None before anything was."""
        return self._wanted

    # -- the member's side, in threads that may wait

    def ask(self, wanted: Wanted) -> bytes:
        """The site's partial sum of this round, as it travels, once it is there. Of what is ``final``: nothing, once
        the site's record has that model.

        Raises :class:`~talaria.errors.WireError` where the site cannot make it, or something else is asked for
        meanwhile.
        """
        mine, asking = (wanted.round, wanted.digest, wanted.final), object()
        with self._turn:
            self._wanted, self._asking = wanted, asking
            self._turn.notify_all()
            while self._answer is None or self._answer[0] != mine:
                if self._asking is not asking:
                    raise WireError(f"round {wanted.round} of this site is not wanted any more")
                self._turn.wait()
            said = self._answer[1]
        if isinstance(said, str):
            raise WireError(said)
        return said

    def end(self) -> None:
        """Nothing is waited for any more."""
        with self._turn:
            self._asking = None
            self._turn.notify_all()

    # -- the site's side

    def answer(self, round: int, digest: str, said: bytes | str, final: bool = False) -> None:
        """The partial sum of ``round``, which began from the model ``digest``; or, as text, why there is none. With
        ``final``, that the site's record has the model."""
        with self._turn:
            self._answer = (round, digest, final), said
            self._turn.notify_all()
