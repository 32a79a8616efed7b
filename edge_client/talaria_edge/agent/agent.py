"""The agent of one device: its own connection, identity and private store. The only edge file that starts tasks.

Several agents may run in one process; they share one worker thread, so that one model is trained at a time. All
of an agent's decisions are the protocol machine's; this file carries them out and feeds back what came of them, and
`rounds.py` those that are a round's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from talaria import time
from talaria.errors import BudgetError, ConfigError, StateError, TalariaError, said
from talaria.federated.run import Run
from talaria.plugins import NotAllowedError, has_torch
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.driver import Driver
from talaria.training.batching import CalledOff
from talaria.wire.mqtt import LinkDown, LinkUp, NotTaken, Will
from talaria.wire.validity import validities, warnings, watch
from talaria_edge import training_policy
from talaria_edge.agent.goodbye import Parting
from talaria_edge.agent.incoming import Incoming
from talaria_edge.agent.misfits import misfits
from talaria_edge.agent.planning import planned
from talaria_edge.agent.rounds import Rounds, log_unforeseen, tell_of_deployment
from talaria_edge.agent.training import Learner, Narrow, equipped
from talaria_edge.agent.training_window import TrainingWindow
from talaria_edge.agent.worker import learning_thread
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData
from talaria_edge.deployment import gate
from talaria_edge.identity.connection import Open, keys_of, machine_of, over_mqtt, reach, unheard
from talaria_edge.storage import tensor_files
from talaria_edge.storage.state import SECURE, DeviceStore
from talaria_edge.training_policy import Reading

Report = Callable[[dict[str, Any]], None]
INBOX = 256
WARN_AGAIN_S = 3600.0
UNHEARD_S = 60.0
"""Seconds after which a device whose broker has no word of a coordinator says so."""
FINISH_AGAIN_S = 300.0
"""Seconds until a device that stays tries again to write the personal model that a full disk refused."""
FAREWELL_S = 30.0
"""Seconds for which a device that is done repeats its goodbye to a coordinator that does not answer."""


class Agent:
    """One device in a fleet. :meth:`run` returns after the last round with what came of it."""

    def __init__(
        self,
        config: DeviceConfig,
        *,
        report: Report = lambda event: None,
        worker: ThreadPoolExecutor | None = None,
        open_transport: Open = over_mqtt,
        read: Callable[[], Reading] = training_policy.read,
        process: bytes = b"",
        looked: DeviceData | None = None,
        learn: Callable[[DeviceConfig, DeviceStore, Run], Learner] = Learner,
    ) -> None:
        """``process`` are bytes that no other program has, by which the fleet sees that two have one name; ``looked``
        are the device's samples as they are now, if somebody has read them already."""
        self.config = config
        self._report, self._open = report, open_transport
        self._leave = TrainingWindow(config.guard, config.guard_every_s, read)
        self._worker = worker or learning_thread()
        own = keys_of(config)
        self._half = machine_of(config, own, process)
        self._warned = "", 0.0
        self._looked = looked
        self._tls = None if own is None or config.username is not None else own.tls
        self._driver = Driver(lambda cut: self._rounds.upload, lambda size: self._rounds.count("up", size), inbox=INBOX)
        self._learner_of = learn
        self._learner: Learner | None = None
        self._for_kit: Run
        """The run that a kit was asked for."""
        self._has_learned = False
        """Whether this agent has taken up a run."""
        self._planning: Run | None = None
        """The run that widths are planned for now, or that no widths here keep their budget in."""
        self._called: a.Train | None = None
        self._cannot = ""
        """Why the run cannot be learned here; empty where it can, or is not known yet."""
        self._met: tuple[int, bytes] | None = None
        """The coordinator's epoch and run that were told last."""
        self._heard = False
        """Whether a coordinator of this fleet was heard."""
        self.was_up = False
        self._served: tuple[str, bytes] | None = None  # the run and the global model that were personalized last
        self._result: dict[str, Any] | None = None
        self._finished: Run | None = None
        """The run that ``_result`` is of."""
        self._parting = Parting(config.retry_s, FAREWELL_S)

    @property
    def left_s(self) -> float | None:
        """Seconds that the round at work leaves; None where it has no end, or none is at work."""
        job = self._state.job
        return None if job is None or job.deadline is None else job.deadline - time.monotonic()

    async def run(self) -> dict[str, Any]:
        """Take part until the last round; then personalize, write the bundle, and leave (unless told to stay).

        Raises :class:`~talaria.errors.StateError` where the private state is damaged or the disk is full, and
        :class:`~talaria.errors.TransportError` where the broker does not answer within ``patience_s``.
        """
        with DeviceStore(self.config.state, self.config.fleet, self.config.device) as self._store:
            private = self._store.private()
            round, traffic = 1 if private is None else private.round + 1, self._store.traffic()
            self._state = self._store.protocol()
            put = self._driver.inbox.put
            self._rounds = Rounds(
                self.config, self._store, self._state, self._leave, self._worker, put, self._tell, self._vote,
                round=round, traffic=traffic,
            )  # fmt: skip
            self._incoming = Incoming(self.config, self._store, self._state, put, self._tell)
            self._settle()
            try:
                await self._driver.run(self._live())
            finally:
                self._incoming.close()
        if self._result is None:
            raise StateError(f"{self.config.device}: left before the last round")
        return self._result

    def _settle(self) -> bool:
        """After a cut while a bundle was put in force: one of the two is, and lies where predictors look. False where
        the disk refuses that."""
        try:
            if self.config.bundle is not None:
                gate.settle(self.config.state, self.config.bundle)
        except StateError as error:
            self._tell("error", error=str(error))
            return not isinstance(error, tensor_files.DiskError)
        return True

    # -- life

    async def _live(self) -> None:
        self._boot()
        transport = self._transport = self._open(self.config, self._will)
        self._driver.last_word = lambda: self._half.will(self._state) if self._state.linked else None
        async with self._driver.linked(transport, reach(transport, self.config.patience_s, self._tell), self._linked):
            self._driver.beside(self._tick())
            self._driver.beside(watch(self._ending, lambda text: self._tell("certificate", reason=text)))
            while self._result is None or self.config.stay or not self._parting.over(time.monotonic()):
                self._feed(await self._driver.inbox.get())
                self._finish_if_over()
                if self._has_all() and self._parting.due(time.monotonic()):
                    # The coordinator learns that this member has all it came for, and need not wait for it.
                    self._feed(e.SayGoodbye(time.monotonic()))

    def _boot(self) -> None:
        chunks = self._incoming.resume()
        done = self._store.trained()
        job, secure = self._state.job, (self.config.state / SECURE).exists()
        masked = self._rounds.part.upload(job.attempt) if job is not None and secure else b""
        # Bare, an update is not even offered again where its owner wants secure rounds by now: the round is declined.
        bare = done.update if done is not None and not self.config.secure else b""
        self._rounds.upload = upload = masked or bare
        digest = hashlib.sha256(upload).digest() if upload else b""
        model, held = self._store.model_digests()
        self._feed(e.Boot(time.monotonic(), model, chunks, digest, held))

    def _will(self) -> Will:
        """Called before each attempt to connect: counts the boot, so that births and deaths pair up."""
        self._feed(e.Connecting(time.monotonic()))
        return Will(*self._half.will(self._state))

    def _linked(self, change: LinkUp | LinkDown | NotTaken) -> None:
        if isinstance(change, NotTaken):
            self._tell("error", error=change.reason)
        elif isinstance(change, LinkUp):
            self.was_up = True
            self._rounds.largest = self._transport.largest
            self._tell("connected", broker=self.config.broker)
        else:
            self._tell("disconnected", error=change.reason)

    def _warn(self, reason: str) -> None:
        """What is wrong with this device, as its coordinator finds, or with its way there, once an hour."""
        if reason != self._warned[0] or time.monotonic() - self._warned[1] >= WARN_AGAIN_S:
            self._warned = reason, time.monotonic()
            self._tell("error", error=reason)

    def _ending(self, now: float) -> list[str]:
        """The certificates of this device's link that end within 30 days, or have ended."""
        return [] if self._tls is None else warnings(validities(self._tls), now)

    async def _tick(self) -> None:
        begun = time.monotonic()
        while True:
            await asyncio.sleep(self.config.retry_s / 2)
            await self._driver.inbox.put(e.Tick(time.monotonic()))
            if not self._heard and time.monotonic() - begun >= UNHEARD_S:
                self._warn(unheard(self.config.fleet, UNHEARD_S))

    # -- the machine

    def _feed(self, event: object) -> None:
        if isinstance(event, e.Received):
            self._rounds.count("down", event.size)
        before = self._state.job
        _, actions = self._half.step(self._state, event)
        for action in actions:
            self._carry_out(action)
        if self._state.job is not None and self._state.job is not before:
            self._rounds.asked(self._state.job.spec)
        if self._cannot and isinstance(event, e.Received):
            self._decline()

    def _decline(self) -> None:
        """Say no to what is asked, at once, where the run cannot be learned: a round would wait for this device."""
        job = self._state.job
        if job is not None and job.phase in ("fetching", "training"):
            self._called = None
            self._tell("declined", attempt=job.attempt, reason=self._cannot)
            self._feed(e.DeclineRound(time.monotonic(), job.attempt, self._cannot[:300]))

    def _carry_out(self, action: a.Action) -> None:
        match action:
            case a.Save():
                self._store.save_protocol(self._state)
            case a.Publish() | a.SendChunks():
                self._driver.say(action)
            case a.KeepChunk():
                if (work := self._incoming.keep(action)) is not None:
                    self._driver.spawn(work)
            case a.ModelComplete():
                self._driver.spawn(self._incoming.assemble(action))
            case a.Discard():
                self._incoming.drop(action.xfer)
            case a.KitBegun():
                self._feed(self._incoming.kit_found(action.xfer, action.cut))
            case a.KitComplete():
                self._driver.spawn(self._equip(action))
            case a.KitRefused():
                self._cannot = f"this device has no torch, and no kit to learn the run from: {action.reason}"
                self._tell("error", error=self._cannot)
                self._decline()
            case a.CoordinatorSeen():
                self._meet(action)
            case a.CoordinatorOutrun():
                self._show(follows=action.follows)
            case a.Train():
                self._called, self._served = action, None
                self._begin()
            case a.WordCame() if self._learner is not None and self._state.job is not None:
                answer = partial(self._rounds.part.answer, self._learner.run, action.attempt, action.data)
                self._driver.spawn(self._rounds.say(action.attempt, self._state.job.version, answer))
            case a.CutAnew() if self._rounds.upload:
                self._driver.spawn(self._rounds.offer(action.attempt, action.base_version, self._rounds.upload))
            case a.Reconnect():
                self._tell("catching-up", reason=action.reason)
                self._transport.renew(action.reason)
            case a.Released():
                self._parting.answered = True
            case a.Receipted():
                self._received(action.attempt, action.outcome, action.reason)
            case a.Told():
                self._warn(action.reason)
            case a.Cancel():
                self._received(action.attempt, "late", action.reason)
            case a.Noticed():
                self._tell("notice", reason=action.text)
            case a.FrameRefused():
                self._tell("refused", topic=action.topic, reason=action.reason)

    def _meet(self, seen: a.CoordinatorSeen) -> None:
        self._heard = True
        if not seen.online:
            self._met = None
            self._tell("coordinator-away", epoch=seen.epoch)
            return
        # Its state comes again each minute, and is told only where it says something else.
        new, self._met = self._met != (seen.epoch, seen.spec), (seen.epoch, seen.spec)
        try:
            run = Run.from_json(seen.spec.decode("utf-8", "replace"), self.config.allow)
        except ConfigError as error:
            self._learner, self._planning = None, None
            self._cannot = f"the coordinator's run cannot be learned here: {error}"
            mend = "" if isinstance(error, NotAllowedError) else "; update this device"
            if new:
                self._tell("error", error=f"{self._cannot}{mend}")
            self._decline()
            return
        if self._planning == run:
            return
        self._planning, self._cannot, self._rounds.identity = None, "", run.identity
        if new:
            self._tell("coordinator", epoch=seen.epoch, algorithm=run.algorithm, rounds=run.rounds)
        if self._learner is not None and self._learner.run == run:
            if new:  # which has not heard this device's goodbye
                self._parting = Parting(self.config.retry_s, FAREWELL_S)
            self._begin()
        elif self._builds_nothing() and not equipped(self._store, run):
            self._learner, self._for_kit = None, run
            self._tell("kit-wanted")
            self._feed(e.NeedKit(time.monotonic()))
        else:
            self._take_up(run)

    def _know_what_it_keeps(self, last: bool = False) -> None:
        """Of the next global model a part is enough where this device keeps a part of the channels; ``last`` of the one
        after the last round."""
        if self._learner is not None:
            self._feed(e.Keeps(time.monotonic(), self._learner.keeps(last)))

    def _builds_nothing(self) -> bool:
        """Whether this device has no file with programs, nor what makes them; who plans by one needs it in any case."""
        makes = has_torch() and self.config.budget is None
        return self.config.engine == "onnx" and self.config.kit is None and not makes

    def _take_up(self, run: Run) -> None:
        """From now on this is what is learned here, once its widths are planned where they are to be."""
        if self.config.budget is None:
            self._learn_by(self.config, run)
        else:
            self._learner, self._planning = None, run
            self._driver.spawn(self._plan(run))

    async def _plan(self, run: Run) -> None:
        found = await planned(self.config, self._store, run, self._worker, self._tell)
        if self._planning != run:  # another one is to be learned by now
            return
        if isinstance(found, Exception):
            if not isinstance(found, BudgetError):  # of which the next plan, a minute later, would say the same
                self._planning = None
            self._cannot = f"no plan can be made here: {said(found)}"
            self._tell("error", error=self._cannot)
            self._decline()
        else:
            self._planning = None
            self._learn_by(found, run)

    def _learn_by(self, config: DeviceConfig, run: Run) -> None:
        try:
            learner = self._learner_of(config, self._store, run)
            learner.private()
        except TalariaError as error:
            if not self._has_learned or isinstance(error, tensor_files.DiskError):
                raise
            # Whoever began another run in the fleet's name, perhaps by mistake, ends no device that learned another.
            self._learner, self._cannot = None, f"the coordinator's run cannot be learned here: {error}"
            self._tell("error", error=self._cannot)
            self._decline()
            return
        self._learner, self._has_learned = learner, True
        self._know_what_it_keeps()
        looked, self._looked = self._looked, None
        for event, facts in misfits(config, run, looked):
            self._tell(event, **facts)
        self._begin()

    # -- the run's kit

    async def _equip(self, action: a.KitComplete) -> None:
        """A whole kit: check it, put it on flash, and learn from it."""
        run = self._for_kit
        if not await self._incoming.finish_kit(action):
            return
        self._feed(e.KitStored(time.monotonic()))
        if not equipped(self._store, run):
            self._carry_out(a.KitRefused("the one that came is damaged, or of another run or version of Talaria"))
            return
        self._tell("kit", bytes=action.cut.size)
        self._take_up(run)

    def _begin(self) -> None:
        """Learn what was asked for, once the run is known (after a reboot the request may come first)."""
        if self._called is not None and self._learner is not None:
            action, self._called = self._called, None
            self._driver.spawn(self._rounds.learn(self._learner, action))

    def _vote(self, run: Run, passes: bool) -> None:
        """Say in this device's birth whether it would serve ``run``, which counts while the fleet tries it."""
        self._show(gate={"run": run.identity[:16], "deployed": passes})

    def _show(self, **facts: Any) -> None:
        """Say these in this device's birth, at once where they are new."""
        profile = json.dumps({**json.loads(self._half.profile), **facts}).encode()
        if profile == self._half.profile:
            return
        self._half = replace(self._half, profile=profile)
        if self._state.linked:
            self._feed(e.Connected(time.monotonic()))

    def _received(self, number: int, outcome: str, reason: str) -> None:
        self._rounds.received(self._learner, number, outcome, reason)
        self._know_what_it_keeps()

    # -- the end

    def _has_all(self) -> bool:
        """Whether this device has all that it came for; one that stays, of the run that is learned by now."""
        learned = None if self._learner is None else self._learner.run
        return self._result is not None and (not self.config.stay or learned == self._finished)

    def _finish_if_over(self) -> None:
        state, learner = self._state, self._learner
        if learner is None or state.busy or state.version < learner.run.rounds:
            return
        if state.fetch is not None and not state.wanted:
            self._know_what_it_keeps(last=True)
            self._feed(e.FetchModel(time.monotonic()))
        elif state.fetch is None and state.model_digest and self._served != (learner.digest, state.model_digest):
            self._served = learner.digest, state.model_digest
            self._driver.spawn(self._finish(learner, state.model_digest))

    async def _finish(self, learner: Learner, model_digest: bytes) -> None:
        await self._leave.wait(self._tell, lambda: math.inf)
        if self._learner is not None and self._learner is not learner:  # the run goes on, or another one is learned
            self._let_go(learner.digest, model_digest)
            return
        self._tell("personalizing")
        try:
            found = await self._rounds.learned(learner, partial(learner.finish, model_digest))
        except CalledOff as error:
            self._tell("error", error=str(error))
            self._let_go(learner.digest, model_digest)
            return
        except Narrow:
            self._served = None
            await self._driver.inbox.put(e.TooNarrow(time.monotonic()))
            return
        except Exception as error:  # noqa: BLE001 - what was learned is on flash, and other agents share the process
            log_unforeseen(self.config.device, error, "personalizing")
            self._tell("error", error=said(error))
            found = {"error": said(error)}
            if self.config.stay and isinstance(error.__context__, OSError):
                self._driver.beside(self._finish_again(learner.digest, model_digest))
        tell_of_deployment(self._tell, found)
        self._store.save_traffic(self._rounds.traffic)
        traffic = {str(round): dict(bytes_) for round, bytes_ in sorted(self._rounds.traffic.items())}
        self._result, self._finished = {"device": self.config.device, **found, "traffic": traffic}, learner.run
        self._parting = Parting(self.config.retry_s, FAREWELL_S)
        path = self.config.state / "result.json"
        tensor_files.write(path, json.dumps(self._result, indent=2).encode())
        self._tell("done", **self._result, result=str(path))
        await self._driver.inbox.put(e.Tick(time.monotonic()))

    def _let_go(self, *served: Any) -> None:
        """This model was not personalized; its run may come back."""
        if self._served == served:
            self._served = None

    async def _finish_again(self, *served: Any) -> None:
        """What a full disk refused may be written later; who does not stay ends, and is started again."""
        await asyncio.sleep(FINISH_AGAIN_S)
        while self._served == served and not self._settle():
            await asyncio.sleep(FINISH_AGAIN_S)
        if self._served == served:
            self._served = None
            await self._driver.inbox.put(e.Tick(time.monotonic()))

    def _tell(self, event: str, **facts: Any) -> None:
        self._report({"at": time.time(), "device": self.config.device, "event": event, **facts})
