"""The rounds of a site whose global model is made above: its coordinator opens the round that the fleet above asks for,
adds up what its devices learned, and goes on once the next model has come.

Towards its devices it is a coordinator like any other. Of a round it keeps what any keeps: which updates counted in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from talaria import time
from talaria.errors import StateError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator.machine import CoordinatorState
from talaria.wire import codec
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet.above import Above, Wanted
from talaria_coordinator.fleet.aggregation import Learning, Made
from talaria_coordinator.fleet.hands import Hands, insist, leaves_within
from talaria_coordinator.fleet.notices import CaughtUp
from talaria_coordinator.fleet.scheduler import Conductor
from talaria_coordinator.storage.records import Fleet
from talaria_coordinator.storage.store import Store

SHARE = 0.8
"""Of the time that the fleet above leaves, a site's round may take so much: its sum must still get there."""


@dataclass(frozen=True)
class SiteLearning(Learning):
    """A :class:`Learning` whose global models come from ``above``."""

    above: Above = field(kw_only=True)

    def first(self) -> tuple[str, str]:
        """The model that the fleet above began its round from, and no server state: the server is above."""
        if self.above.wanted is None:
            raise StateError("gateway: no global model has come from above yet")
        return self.blobs.put(self.above.wanted.model), self.blobs.put(codec.encode_tensors({}))


class SiteConductor(Conductor):
    """A :class:`Conductor` whose rounds come from ``above``. A round that is closed is committed when the next global
    model has come; until then a start announces it again, with the same updates, and so the same partial sum."""

    def __init__(
        self, above: Above, config: FleetConfig, store: Store, learning: Learning, hands: Hands, grace: float, *_: Any
    ) -> None:
        """As a :class:`Conductor`, but for secure sums and folding by others, which no site has."""
        super().__init__(config, store, learning, hands, grace, None, self._summed)
        self._above, self._catching_up = above, False

    def advance(self, state: CoordinatorState) -> None:
        """Open the round that is asked for above, once this site is where that begins."""
        wanted = self._above.wanted
        if wanted is None or self._catching_up:
            return
        here = self.fleet.round + 1, self.fleet.model_digest
        if here == (wanted.round, wanted.digest):
            told = state.model is not None and state.model.version == self.fleet.round  # what devices know of is it
            if wanted.final:
                self._above.answer(wanted.round, wanted.digest, b"", final=True)
            elif told and not self.over:  # where it is over, the run goes on for longer: a start of the site follows
                super().advance(state)
            return
        current = state.attempt
        if wanted.round <= here[0]:
            self._above.answer(
                wanted.round, wanted.digest,
                f"this site has learned {self.fleet.round} rounds, and round {wanted.round} is asked for from another "
                "global model than it has; where the fleet above was taken back, give gateway and devices new folders",
                wanted.final,
            )  # fmt: skip
        elif current is not None and current.phase == "open":
            reason = f"the fleet above went on to round {wanted.round}"
            if self.call_off(current.number, reason):
                self._hands.feed(e.AbortRound(time.monotonic(), current.number, reason))
        elif current is None or current.phase != "closed":  # one that is closed goes on by itself
            self._catching_up = True
            self._hands.spawn(self._catch_up(wanted))

    def _seconds(self) -> float | None:
        own, wanted = super()._seconds(), self._above.wanted
        if wanted is None or wanted.seconds is None:
            return own
        left = max(1.0, SHARE * (wanted.asked + wanted.seconds - time.monotonic()))
        return left if own is None else min(own, left)

    async def _catch_up(self, wanted: Wanted) -> None:
        """Enter the rounds that were learned above without this site."""
        began = self.fleet.round

        def pass_by() -> None:
            name, digest = self.config.name, self._learning.blobs.put(wanted.model)
            while (now := self.store.fleets.get(name)) is not None and now.round < wanted.round - 1:
                row = self.store.attempts.open(name, now.round + 1, (), now.model_digest)
                self.store.attempts.commit(
                    name, row.attempt, epoch=self.fleet.epoch, counted=(), model_digest=digest, server=now.server,
                )  # fmt: skip

        await insist(pass_by, lambda error: self._hands.tell("error", error=error), self._hands.leaving)
        await self._hands.put(CaughtUp(began))

    def caught_up(self) -> None:
        super().caught_up()
        self._catching_up = False

    async def _summed(self, fleet: Fleet, counted: Sequence[a.Counted]) -> Made:
        """Send the partial sum up, and wait for what comes of it."""
        round = fleet.round + 1
        total = await asyncio.to_thread(self._learning.added_up, fleet, counted, self._above.client)
        self._hands.tell("summed", round=round, counted=len(total.counted), bytes=len(total.data))
        self._above.answer(round, fleet.model_digest, total.data)
        while (wanted := self._above.wanted) is None or wanted.round <= round:
            if await leaves_within(self._hands.leaving, self.config.retry_s / 2):
                raise asyncio.CancelledError  # a start announces the round again, to the same sum
        digest = await asyncio.to_thread(self._learning.blobs.put, wanted.model)
        return Made(digest, fleet.server, total.counted, total.left)


def site(above: Above) -> dict[str, Callable[..., Any]]:
    """What a :class:`~talaria_coordinator.fleet.service.Service` is given where its rounds come from ``above``."""
    return {"learn": partial(SiteLearning, above=above), "conduct": partial(SiteConductor, above)}
