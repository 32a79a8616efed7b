"""The coordinator's half of a round: from what arrives to what is said, kept and counted.

An update counts exactly once by (fleet, round, device): offer -> grant -> chunks -> need -> receipt, and the
receipt is said only after the store has it. Whatever is lost is asked for again; whatever comes twice,
late, or from an older boot changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from talaria.bitmaps import indices_of
from talaria.errors import StateError, WireError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator import async_rounds, calls, compacts, kits, presence, secure_rounds, uploads
from talaria.protocol.coordinator.kits import KitOffer
from talaria.protocol.coordinator.outbox import Voice
from talaria.protocol.coordinator.state import LIVE, Attempt, CoordinatorState, GlobalModel, Participant, Peer, Rules
from talaria.protocol.coordinator.step_context import IgnoredError, Turn
from talaria.protocol.transfer import transfer_of
from talaria.protocol.words import STEPS
from talaria.wire import messages as m
from talaria.wire.frames import Frame, decode_frame, signed_by
from talaria.wire.signing import Signer
from talaria.wire.topics import Topic, parse

__all__ = ["CoordinatorMachine", "CoordinatorState", "Rules"]

Keys = Callable[[str], bytes | None]
REPEAT_SECONDS = 60.0
"""The coordinator repeats its birth after this long, in case the broker lost it for someone."""
KEEP_SECONDS = 10.0
"""While a deadline runs the state is saved this often: after a crash, the time that had gone is known so well."""


@dataclass(frozen=True)
class CoordinatorMachine:
    """The coordinator of one fleet. ``spec`` is told to every device; ``keys`` gives a device's public key.

    Where a device's key is known, every message of it must be signed. With ``enrolled`` a device without a
    key is refused altogether. ``apart``: the broker lets nobody but a device itself speak on its topics; without that,
    and with keys, what is not signed is nobody's offence.
    """

    fleet: str
    rules: Rules = field(default_factory=Rules)
    spec: bytes = b""
    signer: Signer | None = None
    keys: Mapping[str, bytes] | Keys = field(default_factory=dict)
    enrolled: bool = False
    apart: bool = True
    kit: KitOffer = field(default_factory=KitOffer)
    """What a device without torch is given."""
    relayed: bool = False
    """Whether chunks of updates come to ingest workers, which tell of them."""

    def __post_init__(self) -> None:
        Topic(self.fleet, "co/state")

    def will(self, state: CoordinatorState) -> tuple[str, bytes]:
        """Topic and payload of the last will: offline, in this epoch. Give it to the transport, retained."""
        return str(Topic(self.fleet, "co/state")), self._voice.birth(state.epoch, online=False)

    def step(self, state: CoordinatorState, event: object) -> tuple[CoordinatorState, list[a.Action]]:
        """The state after ``event`` (changed in place) and what to do, in order."""
        t = Turn(self._voice, state, getattr(event, "now", state.clock), self.relayed)
        if state.fenced:
            return state, []
        match event:
            case e.Start():
                self._start(t, event)
            case e.Connected():
                t.announce()
            case e.Received():
                self._received(t, event)
            case e.Tick():
                self._tick(t)
            case e.PublishModel():
                self._publish(t, event)
            case e.OpenRound():
                self._open(t, event)
            case e.Enlist():
                self._enlist(t, event)
            case e.Stored() | e.UpdateRejected() | e.Damaged():
                uploads.answered(t, event)
                self._settle(t)
            case e.Listening():
                uploads.listening(t, event)
            case e.ChunksCame():
                uploads.came(t, event)
            case e.WordKept():
                secure_rounds.kept(t, event)
                self._settle(t)
            case e.WordRefused():
                secure_rounds.refused(t, event)
                self._settle(t)
            case e.CompactMade():
                compacts.made(t, event)
            case e.NextStep():
                if secure_rounds.go_on(t, event):
                    self._finish(t, event.attempt, "closed", "the sum is open")
                self._settle(t)
            case e.Committed():
                self._committed(t, event.attempt)
            case e.AbortRound():
                self._call_off(t, event)
            case e.Amend():
                calls.amend(t, event)
                self._settle(t)
            case e.Dismiss():
                async_rounds.dismiss_all(t, event.reason)
            case e.Release():
                self._release(t, event.device)
            case e.Tell():
                t.say(event.device, m.Notice(text=event.text[: m.MAX_TEXT]))
            case e.Revoke():
                t.peer(event.device)
                uploads.quarantine(t, event.device, event.reason)
                self._settle(t)
            case _:
                raise StateError(f"coordinator: {type(event).__name__} is not an event of this half")
        state.clock = t.now
        if any(isinstance(action, a.Save) for action in t.out):
            state.kept = t.now
        return state, t.out

    # ---- what the program asks for ---------------------------------------------------------------------

    def _start(self, t: Turn, event: e.Start) -> None:
        state = t.state
        if event.epoch <= state.epoch:
            raise StateError(f"epoch={event.epoch} must be above the last one, {state.epoch}; count it up in the store")
        shift, state.epoch, state.announced = event.now - state.clock, event.epoch, event.now
        for peer in state.peers.values():
            peer.online, peer.said, peer.left = False, 0, event.now
            peer.births, peer.comings = [], []
            peer.reminded = peer.doubled = -1e18
            peer.idle, peer.heard, peer.told = 0.0, event.now, -1e18
        for attempt in state.attempts.values():
            attempt.deadline = None if attempt.deadline is None else attempt.deadline + shift
            attempt.due = None if attempt.due is None else attempt.due + shift
            attempt.between = bool(attempt.secure)  # the program says where it is
            for device, member in attempt.cohort.items():
                member.asked, member.sought = -1e18, None
                member.boot = 0  # it may have done the round again since, where this record is an older one
                if (attempt.number, device) in event.stored and member.phase in LIVE and uploads.countable(t, attempt):
                    uploads.withdraw(t, attempt.number, device, member.xfer)  # whichever it was when this was saved
                    member.sha256 = event.stored[attempt.number, device]
                    member.xfer = transfer_of(member.sha256)
                    member.base_version = attempt.version
                    uploads.counted(t, attempt, device, member)
                elif member.phase == "storing":
                    member.phase = "receiving"
            if attempt.phase == "closed":
                t.act(_closed(attempt))
        uploads.recover(t, event.chunks)
        t.act(a.Save())
        self._settle(t)

    def _publish(self, t: Turn, event: e.PublishModel) -> None:
        t.state.model, t.state.compacts = GlobalModel(event.version, event.cut), {}
        for peer in t.state.peers.values():
            peer.served = peer.masks = 0
        t.act(a.Save())
        t.announce_model()
        if event.multicast:
            everything = tuple(range(event.cut.count))
            name = transfer_of(event.cut.sha256)
            t.act(a.SendChunks(self.fleet, "", name, t.state.epoch, 0, event.cut, everything, "m"))

    def _open(self, t: Turn, event: e.OpenRound) -> None:
        state = t.state
        if state.model is None:
            raise StateError(
                f"attempt {event.attempt}: there is no global model to start from; give PublishModel first"
            )
        if event.attempt in state.attempts or event.attempt <= max(state.attempts, default=-1):
            raise StateError(f"attempt {event.attempt} is not after {max(state.attempts)}; count attempts upward")
        if state.current is not None and state.attempts[state.current].phase in ("open", "closed"):
            raise StateError(f"attempt {state.current} is still {state.attempts[state.current].phase}; commit it first")
        target = len(event.cohort) if event.target is None else event.target
        if not event.cohort or not 1 <= event.quorum <= target:
            raise StateError(
                f"attempt {event.attempt}: quorum={event.quorum} and target={target} do not fit "
                f"{len(event.cohort)} devices"
            )
        self._forget(t)
        deadline = None if event.seconds is None else event.now + event.seconds
        before = None if state.current is None else state.attempts[state.current]
        state.attempts[event.attempt] = attempt = Attempt(
            event.attempt, state.model.version, state.model.cut.sha256, deadline, event.quorum, target, event.stale, {},
            secure=event.secure,
        )  # fmt: skip
        state.current = event.attempt
        if event.stale:
            async_rounds.fill(t, attempt, before, event.since)
        self._enlist(t, e.Enlist(event.now, event.attempt, event.cohort))

    def _enlist(self, t: Turn, event: e.Enlist) -> None:
        attempt = t.state.attempts.get(event.attempt)
        if attempt is None or attempt.phase != "open":
            raise StateError(f"attempt {event.attempt} is not open; devices can be added to the open attempt only")
        for device in sorted(event.cohort):
            Topic(self.fleet, "cmd", device)
            attempt.cohort.setdefault(device, Participant(event.cohort[device]))
            if t.peer(device).out:
                attempt.cohort[device].phase, attempt.cohort[device].reason = "dropped", t.peer(device).out
        t.act(a.Save())
        for device in sorted(event.cohort):
            calls.call(t, attempt, device)
        self._settle(t)

    def _committed(self, t: Turn, number: int) -> None:
        attempt = t.state.attempts.get(number)
        if attempt is None or attempt.phase not in ("closed", "committed"):
            raise StateError(f"attempt {number} is not closed; only a closed attempt can be committed")
        attempt.phase = "committed"
        self._forget(t)
        t.act(a.Save())

    def _forget(self, t: Turn) -> None:
        """Let go of what is over, but for the last rounds: a fleet that only declines must not fill the memory."""
        over = sorted(n for n, r in t.state.attempts.items() if r.idle() and n != t.state.current)
        parts = sum(len(t.state.attempts[n].cohort) for n in over)
        while len(over) >= self.rules.keep or parts > self.rules.keep_parts:
            parts -= len(t.state.attempts.pop(over.pop(0)).cohort)
        t.state.nonces = {k: v for k, v in t.state.nonces.items() if v[0] in t.state.attempts}

    # ---- the round's end -------------------------------------------------------------------------------

    def _settle(self, t: Turn) -> None:
        attempt = t.state.attempt
        if attempt is None or attempt.phase != "open":
            return
        if attempt.secure:
            self._settle_step(t, attempt)
            return
        verdict = attempt.verdict(t.now, lambda device: t.peer(device).away(t.now, self.rules.grace))
        if verdict == "closed":
            self._finish(t, attempt.number, verdict, "the round is closed")
        elif verdict != "open":
            least = attempt.target if attempt.stale else attempt.quorum
            self._finish(t, attempt.number, verdict, f"{len(attempt.counted)} of at least {least} updates came")

    def _settle_step(self, t: Turn, attempt: Attempt) -> None:
        match secure_rounds.verdict(t, attempt):
            case "over":
                attempt.between = True
                t.act(a.Save(), a.StepOver(attempt.number, attempt.step))
            case "failed":
                said = sum(member.step > attempt.step for member in attempt.cohort.values())
                self._finish(
                    t,
                    attempt.number,
                    "failed",
                    f"step {attempt.step + 1} of {STEPS}: {said} of at least {attempt.quorum} devices answered",
                )

    def _call_off(self, t: Turn, event: e.AbortRound) -> None:
        """Fail a round, also one that is closed already but could not be committed."""
        attempt = t.state.attempts.get(event.attempt)
        if attempt is not None and attempt.phase == "closed":
            attempt.phase = "open"
        self._finish(t, event.attempt, "failed", event.reason)

    def _finish(self, t: Turn, number: int, phase: str, reason: str) -> None:
        attempt = t.state.attempts.get(number)
        if attempt is None or attempt.phase != "open":
            return
        attempt.phase = phase
        t.act(a.Save())
        if phase == "closed":
            t.act(_closed(attempt))
        else:
            t.act(a.RoundFailed(number, len(attempt.counted), reason + attempt.declines(), attempt.opened()))
        async_rounds.end(t, attempt, reason)

    # ---- what arrives ----------------------------------------------------------------------------------

    def _received(self, t: Turn, event: e.Received) -> None:
        device, proven = "", self.apart or not self.enrolled
        try:
            topic = parse(event.topic)
            if topic.fleet != self.fleet or topic.kind not in ("co/state", "state", "evt", "up"):
                raise WireError(f"topic {event.topic[:80]!r} is not for this coordinator")
            device = topic.device
            if not event.payload:
                return  # the broker tells that a retained message was cleared
            if device:
                self._admissible(t, topic, event)
            frame = decode_frame(event.payload)
            if frame.header.fleet != self.fleet or frame.header.device != device:
                raise WireError(f"frame of {frame.header.device!r} on the topic of {device!r}; each device has its own")
            if topic.kind == "co/state":
                self._rival(t, frame)
                return
            key = None if frame.header.type == m.CHUNK else self._authentic(device, frame)
            if not t.known(device) and len(t.state.peers) >= self.rules.max_peers:
                raise IgnoredError(f"{self.rules.max_peers} devices are known; raise max_peers")
            if key is not None:
                proven = True
                t.bind(device, key)
            if proven and t.known(device) and not event.retained:  # what is retained may be of somebody who is gone
                t.peer(device).heard = t.now
            self._from_device(t, topic, frame, proven)
            if any(isinstance(action, a.KeepChunk | a.SendChunks) for action in t.out):
                uploads.useful(t, device)
        except IgnoredError as why:
            t.act(a.FrameRefused(event.topic[:160], device, str(why)))
        except WireError as why:
            t.act(a.FrameRefused(event.topic[:160], device, str(why)))
            if proven and device and (t.known(device) or self._answers(device)):
                uploads.strike(t, device, str(why))
        self._settle(t)

    def _admissible(self, t: Turn, topic: Topic, event: e.Received) -> None:
        """Refuse, unread, what no device may say; nothing of it stays at the broker."""
        device, out = topic.device, t.peer(topic.device).out if t.known(topic.device) else ""
        stays = topic.kind in ("evt", "up")
        if event.retained and (stays or out):
            t.act(a.Publish(event.topic, b"", retain=True))
        if out:
            if topic.kind == "state":
                uploads.tell_out(t, device)
            raise IgnoredError(f"quarantined: {out}")
        if self._answers(device):
            uploads.heard(t, device)
        if event.retained and stays:
            text = "a retained message on a topic that never retains; it is cleared"
            raise WireError(text) if self._answers(device) else IgnoredError(f"{text}: someone planted it")

    def _answers(self, device: str) -> bool:
        """Whether what comes on the topics of ``device`` is its own doing."""
        return self.enrolled and self.apart and self._key_of(device) is not None

    def _key_of(self, device: str) -> bytes | None:
        return self.keys(device) if callable(self.keys) else self.keys.get(device)

    def _release(self, t: Turn, device: str) -> None:
        peer = t.peer(device)
        peer.out, peer.strikes, peer.idle, peer.told = "", 0, 0.0, -1e18
        t.act(a.Save())
        t.say(device, m.Rebirth(above=0))

    def _authentic(self, device: str, frame: Frame) -> bytes | None:
        """The key that signed the frame, where the device has one."""
        key = self._key_of(device)
        if key is None and self.enrolled:
            raise IgnoredError(f"device {device!r} is not enrolled; give it a key first")
        if key is not None and not signed_by(frame, key):
            raise IgnoredError(f"message of {device!r} is not signed by its key; refused")
        return key

    def _rival(self, t: Turn, frame: Frame) -> None:
        if self.signer is not None and not signed_by(frame, self.signer.public):
            raise IgnoredError("a coordinator's birth that the fleet's key did not sign")
        birth = m.decode_message(frame)
        if not isinstance(birth, m.CoordinatorBirth):
            raise WireError(f"{birth.TYPE!r} on the coordinator's topic")
        if frame.header.boot > t.state.epoch:
            # Though it be gone: devices have heard of it, and hear nothing that is older.
            t.state.fenced = True
            t.act(a.Fenced(frame.header.boot, birth.online))
        elif frame.header.boot == t.state.epoch and not birth.online:
            t.announce()

    def _from_device(self, t: Turn, topic: Topic, frame: Frame, proven: bool) -> None:
        device, header = topic.device, frame.header
        if topic.kind == "up":
            if header.type != m.CHUNK or header.xfer != topic.xfer:
                raise WireError(f"{header.type!r} of transfer {header.xfer!r} on the topic of upload {topic.xfer!r}")
            uploads.chunk(t, device, frame, proven)
            return
        message = m.decode_message(frame)
        peer = t.peer(device)
        if topic.kind == "state":
            if not isinstance(message, m.DeviceBirth):
                raise WireError(f"{message.TYPE!r} on a device's state topic")
            presence.lifecycle(t, device, peer, header.boot, message)
            return
        if header.boot < peer.boot:
            presence.remind(t, device, peer, header.boot)
            return
        if not peer.guard.fresh(header.boot, header.seq):
            return
        anew = header.boot > peer.boot
        if anew:
            peer.boot, peer.process = header.boot, b""
            t.say(device, m.Rebirth(above=header.boot - 1))
        # A last will may overtake what was said before it; and one that was cut off without a will is still online.
        if (anew or not peer.online) and header.boot > peer.dead:
            presence.came(t, device, peer)
        match message:
            case m.Offer():
                uploads.offer(t, device, message)
            case m.Want():
                self._serve(t, device, peer, message)
            case m.WantCompact() | m.WantChanges():
                compacts.serve(t, device, message)
            case m.Word():
                secure_rounds.heard(t, device, message)
            case m.WantKit():
                kits.serve(t, self.fleet, device, self.kit, message)
            case m.Accept() | m.Decline() | m.Trouble():
                self._heard(t, device, message)
            case m.Goodbye():
                t.act(a.Departed(device))
                t.say(device, m.Farewell())
            case m.Leave():
                presence.left(t, device)
                t.say(device, m.Farewell())
            case _:
                raise WireError(f"{message.TYPE!r} is not for a device to say")

    def _heard(self, t: Turn, device: str, message: m.Accept | m.Decline | m.Trouble) -> None:
        attempt = t.state.attempts.get(message.attempt)
        member = None if attempt is None else attempt.cohort.get(device)
        if member is None or attempt is None or secure_rounds.is_over(attempt, member):
            if isinstance(message, m.Accept):
                secure_rounds.call_off(t, device, message.attempt)
            raise IgnoredError(f"attempt {message.attempt} did not ask {device!r}, or is over for it")
        if isinstance(message, m.Accept | m.Decline) and calls.unconfirmed(t, device, member):
            uploads.drop(t, attempt, device, "called", "its device has forgotten this update")
        match message:
            case m.Accept():
                if member.phase == "called":
                    member.phase = "working"
                    t.act(a.Progressed(device, attempt.number, "working"))
            case m.Decline():
                if member.phase in ("called", "working"):
                    member.phase, member.reason = "declined", message.reason
                    t.act(a.Progressed(device, attempt.number, "declined", reason=message.reason), a.Save(soon=True))
            case m.Trouble():
                t.act(a.Progressed(device, attempt.number, "trouble", reason=message.reason))

    def _serve(self, t: Turn, device: str, peer: Peer, want: m.Want) -> None:
        model = t.state.model
        if model is None:
            return
        if peer.served > self.rules.serve * (model.cut.size + self.kit.size) + self.rules.credit * self.rules.chunk:
            # Not an offence: what a broker loses, or drops as too large, is asked for again by whoever is honest.
            raise IgnoredError(
                f"asked for more than {self.rules.serve} times the model; it gets one more each minute. What is sent "
                "to it may be lost on the way: look at its link, and at the broker's bound on packets"
            )
        cut = compacts.cut_named(t, want.model_digest)
        if cut is None or not want.bitmap:
            peer.served += len(model.cut.hashes)  # a manifest of a large global model is large itself
            t.say_where(device)
            return
        try:
            indices = sorted(indices_of(want.bitmap, cut.count))[: self.rules.credit]
        except WireError as why:  # it may know the same global model by another cut, from before we began
            peer.served += len(model.cut.hashes)
            t.say_where(device)
            raise IgnoredError(str(why)) from None
        peer.served += sum(cut.place(i)[1] for i in indices)
        name = transfer_of(cut.sha256)
        t.act(a.SendChunks(self.fleet, device, name, t.state.epoch, 0, cut, tuple(indices), "dn"))

    # ---- time ------------------------------------------------------------------------------------------

    def _tick(self, t: Turn) -> None:
        uploads.tick(t)
        if t.now - t.state.announced >= REPEAT_SECONDS:
            t.announce()
            whole = self.kit.size + (0 if t.state.model is None else t.state.model.cut.size)
            for peer in t.state.peers.values():
                peer.served = max(0, peer.served - whole)
        attempt = t.state.attempt
        if attempt is not None and attempt.phase == "open":
            calls.seek(t, attempt)
            for one in t.state.attempts.values():  # of buffers also those before it, which somebody works on still
                if uploads.countable(t, one):
                    for device in one.cohort:
                        calls.call(t, one, device)
            secure_rounds.tick(t, attempt)
            if attempt.deadline is not None and t.now - t.state.kept >= KEEP_SECONDS:
                t.act(a.Save(soon=True))
        self._settle(t)

    @cached_property
    def _voice(self) -> Voice:
        # Built once: every event needs it. It is written past the frozen fields, straight into __dict__.
        return Voice(self.fleet, self.rules, self.spec, self.signer)


def _closed(attempt: Attempt) -> a.RoundClosed:
    return a.RoundClosed(attempt.number, attempt.roll(), attempt.missing(), bool(attempt.secure))
