""":class:`Rounds`: what a device does for a round, from the request for work until it hears what came of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from talaria import time
from talaria.errors import BundleError, ConfigError, ModelError, TalariaError, said
from talaria.federated.run import Run
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.device.machine import DeviceState
from talaria.protocol.words import UPLOAD
from talaria.recorded import QuotesSamplesError
from talaria.training.batching import while_wanted
from talaria.wire.chunks import chunk_within, describe
from talaria_edge.agent.asked import asked_of
from talaria_edge.agent.incoming import Put
from talaria_edge.agent.training import Diverged, Learner, Narrow
from talaria_edge.agent.training_window import Left, TrainingWindow
from talaria_edge.config import DeviceConfig
from talaria_edge.storage.state import DeviceStore

if TYPE_CHECKING:
    from talaria_edge.agent.secure import Part, Said

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Rounds:
    """The rounds of one device. ``put`` gives its machine an event, ``tell`` its journal; ``vote`` says in its birth
    whether it would serve a run that the fleet tries."""

    def __init__(
        self, config: DeviceConfig, store: DeviceStore, state: DeviceState, window: TrainingWindow,
        worker: ThreadPoolExecutor, put: Put, tell: Callable[..., None], vote: Callable[[Run, bool], None],
        *, round: int, traffic: dict[int, dict[str, int]],
    ) -> None:  # fmt: skip
        self.config, self._store, self._state, self._window = config, store, state, window
        self._worker, self._put, self._tell, self._vote = worker, put, tell, vote
        self._round = round
        """The round that traffic is counted for: the one trained, or the next."""
        self.traffic = traffic
        self.upload = b""
        self.identity = ""
        """Of the run that is to be learned, where it is known."""
        self.largest: int | None = None
        """Of the messages that the broker takes."""
        self._took = 0.0
        """Seconds that the latest training took."""

    @cached_property
    def part(self) -> Part:
        """This device's part in secure rounds. What it takes, a tenth of an agent, is loaded with the first of them."""
        from talaria_edge.agent.secure import Part

        return Part(self.config)

    def asked(self, spec: bytes) -> None:
        """This is what the fleet asks of the device now."""
        with suppress(ConfigError):  # the round is declined for it
            self._round = asked_of(spec).round

    async def learn(self, learner: Learner, action: a.Train) -> None:
        """Train when it is allowed, and offer what was learned, or decline."""
        try:
            asked = asked_of(action.spec)
            round = asked.round
            if self.config.secure and not asked.terms:
                raise ConfigError("this device's owner wants secure rounds ([privacy] secure), and this is none")
            if asked.terms:
                self.part.require_wanted(asked.terms)
            if not await self._may_learn(action):
                return
            self._tell("training", attempt=action.attempt, round=round)
            if asked.tries:
                await self._try_out(learner, action.model_digest)
            begun = time.monotonic()
            self._store.keep_spent(asked.spent)
            work = partial(learner.learn, round, action.model_digest, asked.after, action.epoch)
            trained, metrics = await self.learned(learner, work)
            self._took = time.monotonic() - begun
        except Narrow as error:
            logger.info("%s: round %s: %s", self.config.device, action.attempt, error)
            await self._put(e.TooNarrow(time.monotonic()))
            return
        except Exception as error:  # noqa: BLE001 - see _give_up
            if isinstance(error, Diverged):
                self._vote(learner.run, False)
            await self._give_up(action.attempt, error)
            return
        job = self._state.job
        if job is None or (job.attempt, job.model_digest) != (action.attempt, action.model_digest):
            return  # another round began meanwhile
        self._tell("trained", attempt=action.attempt, round=round, update_bytes=len(trained.update), metrics=metrics)
        if not asked.terms:
            await self.offer(action.attempt, action.version, trained.update)
            return
        bring, base = partial(learner.contribution, action.model_digest, trained.update), action.model_digest.hex()
        begin = partial(self.part.begin, learner.run, asked.terms, action.attempt, round, base, bring)
        await self.say(action.attempt, action.version, begin)

    async def learned(self, learner: Learner, work: Callable[[], T]) -> T:
        """What ``work`` of this learner gives, in the worker's thread. Raises
        :class:`~talaria.training.batching.CalledOff` once another run is to be learned, which would wait for it, and
        whose private state it would take for called off."""
        own = learner.run.identity

        def wanted() -> bool:
            return self.identity in ("", own)

        def working() -> T:
            with while_wanted(wanted):
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._worker, working)

    async def _may_learn(self, action: a.Train) -> bool:
        """Wait for the guard's leave while the round leaves time to train after it; decline where it does not come."""

        def left() -> Left | None:
            job = self._state.job
            asked = job is not None and job.attempt == action.attempt and job.phase == "training"
            return Left(None if job is None else job.deadline, self._took) if asked else None

        decision = await self._window.within(partial(self._tell, attempt=action.attempt), left)
        if decision is not None and not decision:
            self._tell("declined", attempt=action.attempt, reason=decision.reason)
            await self._put(e.DeclineRound(time.monotonic(), action.attempt, decision.reason))
        return decision is not None and decision.ok

    async def _try_out(self, learner: Learner, model_digest: bytes) -> None:
        """Serve the model of a run that this device tries for others, if its gate lets it. Whether it does no worse
        than what runs is all that is told, in the device's next birth, which is said at once; a device that cannot tell
        has no voice, as one that can make no bundle."""
        try:
            found = await self.learned(learner, partial(learner.finish, model_digest))
        except (BundleError, ConfigError, ModelError) as error:
            self._tell("error", error=f"this device has no voice in the trial: {error}")
            return
        tell_of_deployment(self._tell, found)
        if found.get("worse") is not None:
            self._vote(learner.run, not found["worse"])

    async def offer(self, attempt: int, version: int, update: bytes) -> None:
        """This is our update of ``attempt``, made from ``version`` of the global model; in chunks that the coordinator
        takes, and our broker. Where these are too small for it, the round is declined."""
        self.upload = update
        try:
            cut = describe(update, chunk_within(self.largest, self._state.chunk))
        except TalariaError as error:
            await self._give_up(attempt, error)
            return
        await self._put(e.UpdateReady(time.monotonic(), attempt, version, cut))

    async def say(self, attempt: int, version: int, word: Callable[[], Said | None]) -> None:
        """This device's next word in a secure round, or its masked update; without, it takes part no more."""
        try:
            spoken = await asyncio.to_thread(word)
        except Narrow:
            await self._put(e.TooNarrow(time.monotonic()))
            return
        except Exception as error:  # noqa: BLE001 - see _give_up
            await self._give_up(attempt, error)
            return
        if spoken is not None and spoken.step == UPLOAD:
            await self.offer(attempt, version, spoken.data)
        elif spoken is not None:
            await self._put(e.SayWord(time.monotonic(), attempt, spoken.step, spoken.data))

    async def _give_up(self, attempt: int, error: Exception) -> None:
        """Whatever it is, it is this round's, and not the agent's end."""
        log_unforeseen(self.config.device, error, f"attempt {attempt}")
        self._tell("error", attempt=attempt, error=said(error))
        await self._put(e.DeclineRound(time.monotonic(), attempt, _said_above(error)[:300]))

    def received(self, learner: Learner | None, number: int, outcome: str, reason: str) -> None:
        """What the coordinator said to our update: unless it refused it, the new private state comes into force."""
        if outcome in ("rejected", "equivocation"):
            self._store.discard()
        elif outcome == "stored" or learner is None or not learner.run.asynchronous:
            # Asynchronously a late one may have counted, its receipt lost: the next request for work tells.
            self._store.publish()
        self._store.save_traffic(self.traffic)
        facts = {"attempt": number, "round": self._round, "outcome": outcome, "reason": reason}
        self._tell("received", **facts, traffic=self.traffic.get(self._round))
        self._round += 1

    def count(self, way: Literal["up", "down"], size: int) -> None:
        """So many bytes went up or came down."""
        self.traffic.setdefault(self._round, {"up": 0, "down": 0})[way] += size


def _said_above(error: Exception) -> str:
    """What the fleet hears of an error: the words of code that is not ours may quote what a device learns from."""
    if isinstance(error, QuotesSamplesError) or not isinstance(error, TalariaError):
        return f"{type(error.__cause__ or error).__name__}, whose words stay on the device: see its own journal"
    return said(error)


def tell_of_deployment(tell: Callable[..., None], found: Mapping[str, Any]) -> None:
    """Whether the personal model that was made keeps its budget, and is in force."""
    accuracy = found.get("plan", {}).get("accuracy")
    if accuracy is not None and accuracy["kept"] is False:
        tell("budget-broken", reason=accuracy["reason"])
    if "deployed" in found:
        tell("deployed" if found["deployed"] else "kept", reason=found["why"])


def log_unforeseen(device: str, error: Exception, where: str) -> None:
    """The trace of an error that is none of ours, for whoever mends it."""
    if not isinstance(error, TalariaError):
        logger.error("%s: %s: not foreseen", device, where, exc_info=error)
