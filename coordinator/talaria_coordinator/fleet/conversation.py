""":class:`Conversation`: what the service does with the words of a secure round. Each is kept before it is answered."""

from __future__ import annotations

import asyncio
from functools import partial

from talaria import time
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator.machine import CoordinatorState
from talaria_coordinator.fleet.hands import Hands, insist
from talaria_coordinator.fleet.secure import Secure, secured


class Conversation:
    """The secure rounds of a service; of one without, nothing is ever said."""

    def __init__(self, secure: Secure | None, hands: Hands) -> None:
        self._secure, self._hands = secure, hands
        self._heard: list[a.WordSaid] = []
        self._line = asyncio.Lock()

    def resume(self, state: CoordinatorState) -> None:
        """After a start: go on with a round that was open."""
        attempt = state.attempt
        if attempt is not None and attempt.phase == "open" and attempt.secure:
            self._hands.feed(secured(self._secure).resume(attempt.number, tuple(attempt.cohort)))

    async def listen(self, said: a.WordSaid) -> None:
        """A device's word: check it and keep it, and only then let it be heard. Those that come while others are
        written are written together: one transaction, and one wait for the disk."""
        secure = secured(self._secure)
        self._heard.append(said)
        async with self._line:
            heard, self._heard = self._heard, []
            if not heard:
                return  # it was taken along
            answers = await insist(lambda: secure.said(heard), self._complaint(said.attempt), self._hands.leaving)
            for word, answer in zip(heard, answers, strict=True):
                if isinstance(answer, e.WordRefused):
                    self._hands.tell("refused-word", attempt=word.attempt, device=word.device, reason=answer.reason)
                await self._hands.put(answer)

    async def go_on(self, over: a.StepOver) -> None:
        """A step is over."""
        secure = secured(self._secure)
        answer, liars = await insist(lambda: secure.step_over(over), self._complaint(over.attempt), self._hands.leaving)
        if isinstance(answer, e.NextStep):
            self._hands.tell("step", attempt=over.attempt, step=over.step + 1, devices=len(answer.members))
        await self._hands.put(answer)
        for device, reason in liars.items():
            await self._hands.put(e.Revoke(time.monotonic(), device, reason))

    def _complaint(self, attempt: int) -> partial[None]:
        return partial(_complain, self._hands, attempt)


def _complain(hands: Hands, attempt: int, error: str) -> None:
    hands.tell("error", attempt=attempt, error=error)
