"""The device's half of a round: fetch the global model, train when asked, deliver the update once.

It owes nothing to memory: after a reboot or a cut it says again what still waits for an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256

from talaria.bitmaps import indices_of
from talaria.errors import ConfigError, StateError, WireError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol import words
from talaria.protocol.device import kit
from talaria.protocol.device.download import Download
from talaria.protocol.device.state import DeviceLimits, DeviceState, Job, Saying
from talaria.protocol.transfer import transfer_of
from talaria.wire import messages as m
from talaria.wire.frames import Frame, Header, decode_frame, encode_frame, signed_by
from talaria.wire.signing import Signer
from talaria.wire.topics import Topic, parse

__all__ = ["DeviceLimits", "DeviceMachine", "DeviceState"]


@dataclass(frozen=True)
class DeviceMachine:
    """One device of one fleet. With ``coordinator_key`` nothing that the coordinator did not sign is heard."""

    fleet: str
    device: str
    limits: DeviceLimits = field(default_factory=DeviceLimits)
    profile: bytes = b""
    signer: Signer | None = None
    coordinator_key: bytes | None = None
    process: bytes = b""
    """Some bytes that no other program has: by them the coordinator sees that two have one name."""

    def __post_init__(self) -> None:
        Topic(self.fleet, "state", self.device)
        if len(self.profile) > m.MAX_PROFILE:
            raise ConfigError(f"profile has {len(self.profile)} bytes; at most {m.MAX_PROFILE}")

    @cached_property
    def _model(self) -> Download:
        return Download(self.device, self.limits, self._say)

    def will(self, state: DeviceState) -> tuple[str, bytes]:
        """Topic and payload of the last will of the present boot. Give it to the transport, retained."""
        return str(Topic(self.fleet, "state", self.device)), self._birth(state, online=False)

    def step(self, state: DeviceState, event: object) -> tuple[DeviceState, list[a.Action]]:
        """The state after ``event`` (changed in place) and what to do, in order."""
        out: list[a.Action] = []
        now: float = getattr(event, "now", state.clock)
        match event:
            case e.Boot():
                self._boot(state, event, out)
            case e.Connecting():
                state.boot, state.said, state.linked = state.boot + 1, 0, False
                out.append(a.Save())
            case e.Connected():
                state.linked = True
                self._greet(state, now, out)
                self._again(state, now, out)
            case e.Received():
                self._received(state, event, out)
            case e.Tick():
                self._tick(state, now, out)
            case e.ModelStored():
                self._model_stored(state, event, out)
            case e.ModelDamaged():
                if state.fetch is not None and state.fetch.cut.sha256 == event.sha256:
                    state.fetch.have, state.fetch.asked = set(event.chunks), set()
                    if state.fetch.whole:  # nothing is missing: the disk only refused to make it durable
                        out.append(self._model.complete(state))
                    self._model.want(state, now, out, again=True)
            case e.ChangesUnfit():
                self._model.unfit(state, event.sha256, out)
            case e.UpdateReady():
                self._ready(state, event, out)
            case e.DeclineRound():
                if (
                    state.job is not None
                    and state.job.attempt == event.attempt
                    and state.job.phase in ("fetching", "training")
                ):
                    self._refuse(state, state.job, event.reason[: m.MAX_TEXT], out)
            case e.SayWord():
                if state.job is not None and state.job.attempt == event.attempt:
                    state.saying = Saying(event.attempt, event.step, event.data)
                    self._speak(state, now, out)
            case e.NeedKit():
                state.kit = state.kit or kit.KitFetch()
                kit.ask(state.kit, now, state.credit, partial(self._say, state, out=out), again=True)
            case e.KitFound() if state.kit is not None:
                out.extend(kit.found(state.kit, event, state.credit, partial(self._say, state, out=out)))
            case e.KitStored() | e.KitFound():
                state.kit = None
            case e.FetchModel():
                state.wanted = state.fetch is not None
                if self._model.overdue(state, now):
                    self._model.want(state, now, out)
            case e.Keeps():
                state.keeps = event.mask
            case e.TooNarrow():
                self._model.whole(state, now, out)
            case e.SayGoodbye():
                self._say(state, m.Leave() if event.for_good else m.Goodbye(version=max(0, state.version)), out)
            case _:
                raise StateError(f"device: {type(event).__name__} is not an event of this half")
        state.clock = now
        return state, out

    # ---- what the program says -------------------------------------------------------------------------

    def _boot(self, state: DeviceState, event: e.Boot, out: list[a.Action]) -> None:
        shift = event.now - state.clock
        state.linked, state.model_digest, state.kit = False, event.model_digest, None
        state.held = event.held
        self._model.bound(state, out)
        if state.fetch is not None:
            state.fetch.have, state.fetch.asked = set(event.chunks), set()
            state.fetch.touched = state.fetch.since = event.now
            if state.fetched == event.model_digest:
                state.fetch = None
            elif state.fetch.whole:
                out.append(self._model.complete(state))
        job = state.job
        if job is None:
            return
        job.said = -1e18
        if job.deadline is not None:
            job.deadline += shift
        if event.update is not None and job.cut is not None and job.cut.sha256 != event.update:
            # What was offered is not on flash any more: it is trained again, or the job is as good as not begun.
            job.cut, job.phase = None, "fetching" if job.phase == "offering" else job.phase
        if job.phase in ("fetching", "training"):
            job.phase = "fetching"
            self._begin(state, event.now, out)

    def _model_stored(self, state: DeviceState, event: e.ModelStored, out: list[a.Action]) -> None:
        state.model_digest, state.held = event.of or event.sha256, event.held
        if state.fetch is not None and state.fetch.cut.sha256 == event.sha256:
            state.fetch, state.wanted = None, False
        out.append(a.Save())
        self._begin(state, event.now, out)

    def _begin(self, state: DeviceState, now: float, out: list[a.Action]) -> None:
        """Train where the global model that the job starts from is here."""
        job = state.job
        if job is not None and job.phase == "fetching" and job.model_digest == state.model_digest:
            job.phase = "training"
            seconds = 0.0 if job.deadline is None else max(0.0, job.deadline - now)
            out.append(a.Train(job.attempt, job.version, job.model_digest, job.spec, seconds, job.epoch))

    def _ready(self, state: DeviceState, event: e.UpdateReady, out: list[a.Action]) -> None:
        job = state.job
        known = job is not None and (job.attempt, job.version) == (event.attempt, event.base_version)
        anew = job is not None and job.cut is not None and job.cut.sha256 == event.cut.sha256
        if job is None or not known or (job.phase not in ("training", "fetching") and not anew):
            return  # the round is over, or this update is on its way already
        job.phase = job.phase if anew else "offering"
        job.cut, job.base_version = event.cut, event.base_version
        out.append(a.Save())
        self._offer(state, event.now, out)

    # ---- what arrives ----------------------------------------------------------------------------------

    def _received(self, state: DeviceState, event: e.Received, out: list[a.Action]) -> None:
        try:
            topic = parse(event.topic)
            if topic.fleet != self.fleet or topic.kind not in ("co/state", "co/model", "m", "cmd", "dn"):
                raise WireError(f"topic {event.topic[:80]!r} is not for this device")
            if topic.device not in ("", self.device):
                raise WireError(f"topic {event.topic[:80]!r} is another device's")
            if event.retained and topic.kind in ("m", "cmd", "dn"):
                raise WireError("a retained message on a topic that never retains; someone planted it")
            if not event.payload and topic.kind in ("co/state", "co/model"):
                return  # a retained message was cleared, or a coordinator looks whether another one is there
            frame = decode_frame(event.payload)
            if frame.header.fleet != self.fleet or frame.header.device != topic.device:
                raise WireError(f"frame for {frame.header.device!r} on the topic of {topic.device!r}")
            if topic.kind in ("m", "dn"):
                self._chunk(state, frame, event.now, out, multicast=topic.kind == "m")
            else:
                self._heard(state, topic, frame, event.now, out, event.retained)
        except WireError as why:
            out.append(a.FrameRefused(event.topic[:160], self.device, str(why)))

    def _heard(
        self, state: DeviceState, topic: Topic, frame: Frame, now: float, out: list[a.Action], retained: bool
    ) -> None:
        key, epoch = self.coordinator_key, frame.header.boot
        if key is not None and not signed_by(frame, key):
            raise WireError(f"{frame.header.type!r} is not signed by the coordinator's key; refused")
        if epoch < state.epoch:
            if topic.kind == "co/state" and getattr(m.decode_message(frame), "online", False):
                out.append(a.CoordinatorOutrun(state.epoch))
            raise WireError(f"{frame.header.type!r} of epoch {epoch}; a coordinator of epoch {state.epoch} took over")
        message = m.decode_message(frame)
        if epoch > state.epoch:
            state.epoch, state.version, state.online = epoch, -1, False
            out.append(a.Save())
        if topic.kind == "co/state":
            if not isinstance(message, m.CoordinatorBirth):
                raise WireError(f"{message.TYPE!r} on the coordinator's topic")
            state.chunk, state.credit = message.chunk, min(message.credit, self.limits.credit)
            state.retry, state.max_update = message.retry, message.max_update
            out.append(a.CoordinatorSeen(message.online, epoch, message.spec))
            came, state.online = message.online and not state.online, message.online
            if came:
                self._again(state, now, out)
        elif topic.kind == "co/model":
            self._model.announced(state, message, now, out, at_once=retained)
        elif state.guard.fresh(epoch, frame.header.seq):
            self._command(state, message, now, out)

    def _command(self, state: DeviceState, message: m.Message, now: float, out: list[a.Action]) -> None:
        job = state.job
        match message:
            case m.Work():
                self._work(state, message, now, out)
            case m.ModelManifest():
                self._model.announced(state, message, now, out, at_once=True, alone=True)
            case m.CompactManifest():
                self._model.narrowed(state, message, now, out)
            case m.KitManifest() if state.kit is not None:
                if message.size > self.limits.max_model:
                    state.kit, why = None, f"of {message.size} bytes is above this device's {self.limits.max_model}"
                    out.append(a.KitRefused(f"the run's kit {why}; raise [fleet] max_model"))
                else:
                    out.extend(kit.announced(state.kit, self.device, message, now))
            case m.NoKit() if state.kit is not None:
                state.kit = None
                out.append(a.KitRefused(message.reason))
            case m.KitManifest() | m.NoKit():
                pass  # said twice, and it is here by now
            case m.Rebirth():
                if state.boot <= message.above:
                    # Our memory was lost or is an older one; the next connection counts on from there.
                    state.boot = message.above
                    out.extend((a.Save(), a.Reconnect(f"boot {message.above} of this device was heard before")))
                else:
                    self._greet(state, now, out)
            case m.Farewell():
                out.append(a.Released())
            case m.Notice():
                out.append(a.Noticed(message.text))
            case m.Grant() | m.Need():
                if job is None or job.attempt != message.attempt or job.phase != "offering" or job.cut is None:
                    return
                name = transfer_of(job.cut.sha256)
                if message.xfer == name:
                    wanted = tuple(sorted(indices_of(message.bitmap, job.cut.count)))[: message.credit]
                    job.said, about = now, (self.fleet, self.device, name, state.boot, job.attempt)
                    out.append(a.SendChunks(*about, job.cut, wanted, "up"))
            case m.Told():
                self._told(state, message, out)
            case m.Heard():
                said = state.saying
                if said is not None and (said.attempt, said.step) == (message.attempt, message.step):
                    state.saying = None
            case m.Receipt():
                self._receipt(state, message, out)
            case m.Trouble():
                out.append(a.Told(message.reason))
            case m.Abort():
                if state.saying is not None and state.saying.attempt == message.attempt:
                    state.saying = None
                if job is not None and job.attempt == message.attempt and job.phase != "done":
                    job.phase, job.outcome, job.reason = "done", "late", message.reason
                    out.extend((a.Save(), a.Cancel(job.attempt, message.reason)))
            case _:
                raise WireError(f"{message.TYPE!r} is not for a coordinator to say")

    def _work(self, state: DeviceState, work: m.Work, now: float, out: list[a.Action]) -> None:
        job = state.job
        # A coordinator that began since may go on from an older record of the fleet, and count rounds from there.
        newer = job is not None and job.epoch < state.epoch
        deadline = None if work.seconds == 0 else now + work.seconds
        if job is not None and work.attempt == job.attempt:
            same = (work.version, work.model_digest) == (job.version, job.model_digest)
            if same and not (newer and (job.spent() or work.spec != job.spec)):
                if newer and job.phase == "done":
                    job.phase = "offering"  # its record of our update may be gone; if not, it says so
                job.epoch, job.deadline = state.epoch, deadline
                self._repeat(state, job, now, out)
                return
            if not newer:
                raise WireError(
                    f"attempt {work.attempt} is asked again, from global model {work.version} and not {job.version}"
                )
        if job is not None and work.attempt < job.attempt and not newer:
            raise WireError(
                f"attempt {work.attempt} is older than {job.attempt}, which this device was asked for already"
            )
        if job is not None and job.phase != "done":
            out.append(a.Cancel(job.attempt, f"attempt {work.attempt} began"))
        state.job = Job(work.attempt, work.version, work.model_digest, work.spec, deadline, state.epoch)
        state.saying = None
        out.append(a.Save())
        self._say(state, m.Accept(attempt=work.attempt), out)
        self._begin(state, now, out)
        state.job.said = now
        if state.job.phase == "fetching":  # what came by multicast came before; the rest is asked for
            self._model.want(state, now, out)

    def _repeat(self, state: DeviceState, job: Job, now: float, out: list[a.Action]) -> None:
        """Say again what the coordinator has not heard."""
        match job.phase:
            case "fetching" | "training":
                self._say(state, m.Accept(attempt=job.attempt), out)
            case "refused":
                self._say(state, m.Decline(attempt=job.attempt, reason=job.reason), out)
            case "offering":
                self._offer(state, now, out)
            case "done" if job.cut is not None:
                self._offer(state, now, out)

    def _told(self, state: DeviceState, word: m.Told, out: list[a.Action]) -> None:
        if state.job is None or word.attempt != state.job.attempt:
            return
        whole = state.gathered.take(word)
        if whole is not None:
            if state.saying is not None and state.saying.step < word.step:
                state.saying = None  # it was heard, or there would be nothing to answer
            out.append(a.WordCame(word.attempt, word.step, whole))

    def _speak(self, state: DeviceState, now: float, out: list[a.Action]) -> None:
        """Say this device's word in a secure round."""
        saying = state.saying
        if saying is not None:
            saying.said = now
            for word in words.cut(m.Word, saying.attempt, saying.step, saying.data, state.chunk):
                self._say(state, word, out)

    def _receipt(self, state: DeviceState, receipt: m.Receipt, out: list[a.Action]) -> None:
        job = state.job
        if job is None or job.cut is None or job.phase != "offering":
            return
        if job.attempt != receipt.attempt or job.cut.sha256 != receipt.sha256:
            return
        job.phase, job.outcome, job.reason = "done", receipt.outcome, receipt.reason
        # In this order: after a cut between the two the update is offered once more, and answered alike.
        out.extend((a.Receipted(job.attempt, receipt.outcome, receipt.reason), a.Save()))

    def _chunk(self, state: DeviceState, frame: Frame, now: float, out: list[a.Action], *, multicast: bool) -> None:
        if frame.header.type != m.CHUNK:
            raise WireError(f"{frame.header.type!r} on a topic of chunks")
        if state.kit is not None and frame.header.xfer == state.kit.transfer:
            say = partial(self._say, state, out=out)
            out.extend(kit.took(state.kit, self.device, frame, now, state.credit, say))
            return
        self._model.chunk(state, frame, now, out, multicast=multicast)

    # ---- time ------------------------------------------------------------------------------------------

    def _tick(self, state: DeviceState, now: float, out: list[a.Action]) -> None:
        if not state.linked:
            return
        job, wait = state.job, self._model.patience(state)
        if state.kit is not None:
            kit.tick(state.kit, now, wait, state.credit, partial(self._say, state, out=out))
        if (job is None or job.phase in ("done", "refused")) and now - state.greeted >= self.limits.hello:
            self._greet(state, now, out)
            if job is not None and job.phase == "refused":
                self._repeat(state, job, now, out)  # nothing answers it, so nobody else would learn that it was lost
        if job is not None and job.phase == "offering" and now - job.said >= wait:
            self._offer(state, now, out)
        if state.saying is not None and now - state.saying.said >= wait:
            self._speak(state, now, out)
        if state.fetch is not None and self._model.needed(state):
            if self._model.overdue(state, now):
                self._model.want(state, now, out, again=True)
        elif job is not None and job.phase == "fetching" and now - job.said >= wait:
            job.said = now
            self._model.want(state, now, out)

    def _again(self, state: DeviceState, now: float, out: list[a.Action]) -> None:
        """After a new link or a new coordinator: say what still waits for an answer."""
        job = state.job
        if job is not None and job.phase in ("fetching", "training", "offering", "refused"):
            self._repeat(state, job, now, out)
        self._speak(state, now, out)
        state.compact_asks = 0
        if state.fetch is not None and state.fetch.asked:
            state.fetch.since = now
            self._model.want(state, now, out, again=True)
        if state.kit is not None:
            kit.ask(state.kit, now, state.credit, partial(self._say, state, out=out), again=True)

    # ---- what is said ----------------------------------------------------------------------------------

    def _offer(self, state: DeviceState, now: float, out: list[a.Action]) -> None:
        job = state.job
        if job is None or job.cut is None:
            return
        job.said, cut = now, job.cut
        if cut.size > state.max_update:  # also where its operator has changed that since it was offered first
            bound = f"at most {state.max_update} ([rounds] max_update of its fleet)"
            self._refuse(state, job, f"update of {cut.size} bytes; {bound}", out)
            return
        if cut.chunk > state.chunk:
            out.append(a.CutAnew(job.attempt, job.base_version))
            return
        tag = f"{self.fleet}/{self.device}/{job.attempt}/".encode()
        offer = m.Offer(
            attempt=job.attempt,
            base_version=job.base_version,
            base_digest=job.model_digest,
            size=cut.size,
            chunk=cut.chunk,
            sha256=cut.sha256,
            hashes=cut.hashes,
            nonce=sha256(tag + cut.sha256).digest()[:16],
        )
        self._say(state, offer, out)

    def _refuse(self, state: DeviceState, job: Job, reason: str, out: list[a.Action]) -> None:
        job.phase, job.reason = "refused", reason
        out.append(a.Save())
        self._say(state, m.Decline(attempt=job.attempt, reason=reason), out)

    def _greet(self, state: DeviceState, now: float, out: list[a.Action]) -> None:
        state.greeted = now
        out.append(
            a.Publish(str(Topic(self.fleet, "state", self.device)), self._birth(state, online=True), retain=True)
        )

    def _say(self, state: DeviceState, message: m.Message, out: list[a.Action]) -> None:
        if not state.linked:
            return
        state.said += 1
        header = Header(message.TYPE, self.fleet, self.device, boot=state.boot, seq=state.said)
        payload = encode_frame(header, m.encode_message(message), self.signer)
        out.append(a.Publish(str(Topic(self.fleet, "evt", self.device)), payload))

    def _birth(self, state: DeviceState, online: bool) -> bytes:
        key = b"" if self.signer is None else self.signer.public
        birth = m.DeviceBirth(online=online, key=key, profile=self.profile, process=self.process)
        return encode_frame(
            Header(birth.TYPE, self.fleet, self.device, boot=state.boot), m.encode_message(birth), self.signer
        )
