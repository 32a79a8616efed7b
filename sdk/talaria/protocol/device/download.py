"""How a device gets the global model: it hears which one there is, asks for it when a round or the program needs it,
and takes it a window at a time. Where it keeps a part of the channels alone, it asks for these; and where it has an
older model, for what changed since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from talaria.errors import StateError, WireError
from talaria.protocol import actions as a
from talaria.protocol.device.state import DeviceLimits, DeviceState
from talaria.protocol.transfer import Receiver, transfer_of
from talaria.wire import messages as m
from talaria.wire.chunks import cut_of
from talaria.wire.frames import Frame

ASKS = 3
"""So often a device asks for its part without an answer, until it takes the whole model."""

Actions = list[a.Action]
Say = Callable[[DeviceState, m.Message, Actions], None]


@dataclass(frozen=True)
class Download:
    """The download of one device; ``say`` puts a message into the actions."""

    device: str
    limits: DeviceLimits
    say: Say

    def announced(
        self, state: DeviceState, message: m.Message, now: float, out: Actions, *, at_once: bool, alone: bool = False
    ) -> None:
        """There is this global model; ``alone`` where that was said to this device alone, which had asked. Raises
        :class:`~talaria.errors.WireError` for one that is older than what was announced, or too large."""
        if not isinstance(message, m.ModelManifest):
            raise WireError(f"{message.TYPE!r} on the model's topic")
        if message.version < state.version:
            raise WireError(
                f"global model {message.version} is older than {state.version}, which was announced already"
            )
        self._require_size(message)
        state.version = message.version
        # Who is told where the whole one is, while a part of it is on its way, asked a coordinator that began since.
        part = state.fetch_of == message.sha256 and not alone
        if message.sha256 == state.model_digest:
            self._let_go(state, out)  # as where a run that others tried is called off
            return
        if state.fetch is not None and state.fetch.cut == cut_of(message):
            return
        if state.fetch is not None and part:
            return
        # What is announced live may come by multicast: to ask for it too would double it.
        touched = -1e18 if at_once else now
        self._begin(state, Receiver(cut_of(message), touched=touched, moved=now, slowest=state.pace), b"", out)
        state.fetch_version, state.wanted, state.compact_asks = message.version, False, 0
        if at_once:
            self.want(state, now, out)

    def narrowed(self, state: DeviceState, message: m.CompactManifest, now: float, out: Actions) -> None:
        """This is what the mask keeps of the model that is on its way, or what changed of it."""
        fetch = state.fetch
        if fetch is None or state.fetch_of or message.of != fetch.cut.sha256:
            return  # said twice, or another one is there by now
        if not state.compact_asks:
            return  # another program with this name asked, which holds another model
        self._require_size(message)
        if message.sha256 == message.of:
            state.compact_asks = ASKS
        else:
            part = Receiver(cut_of(message), touched=-1e18, moved=now, slowest=state.pace)
            self._begin(state, part, message.of, out)
        self.want(state, now, out)

    def _require_size(self, message: m.Parcel) -> None:
        if message.size > self.limits.max_model:
            raise WireError(
                f"global model of {message.size} bytes is above this device's limit of {self.limits.max_model}"
            )

    def _begin(self, state: DeviceState, receiver: Receiver | None, of: bytes, out: Actions) -> None:
        """``receiver`` takes the place of what is on its way."""
        if state.fetch is not None:
            out.append(a.Discard(self.device, transfer_of(state.fetch.cut.sha256)))
        state.fetch, state.fetch_of = receiver, of
        out.append(a.Save())

    def chunk(self, state: DeviceState, frame: Frame, now: float, out: Actions, *, multicast: bool = False) -> None:
        """One chunk of it. What is sent to all is let go by where this device needs a part. Raises
        :class:`~talaria.errors.WireError` for a wrong one."""
        fetch = state.fetch
        if fetch is None or fetch.whole or frame.header.xfer != transfer_of(fetch.cut.sha256):
            return
        if multicast and state.keeps and self._narrows(state):
            return
        asked = bool(fetch.asked)
        try:
            new = fetch.take(frame, now)
        except WireError:
            if fetch.bad == self.limits.strikes:
                reason = f"{fetch.bad} wrong chunks of global model {frame.header.xfer}"
                self.say(state, m.Trouble(attempt=0 if state.job is None else state.job.attempt, reason=reason), out)
            raise
        if not new:
            return
        out.append(a.KeepChunk(self.device, frame.header.xfer, fetch.cut, frame.header.idx, frame.payload))
        if fetch.whole:
            state.pace = fetch.slowest
            out.append(self.complete(state))
        elif self.needed(state) and (asked or self.overdue(state, now)):
            self.want(state, now, out)

    def complete(self, state: DeviceState) -> a.ModelComplete:
        """What is to be done with a model of which all chunks are there. Until it is in force, what changed of a next
        one is not asked for: it would be of the model that is on flash no more by then."""
        if state.fetch is None:
            raise StateError("device: no global model is on its way")
        cut, state.held = state.fetch.cut, b""
        return a.ModelComplete(state.fetch_version, transfer_of(cut.sha256), cut, state.fetch_of)

    def needed(self, state: DeviceState) -> bool:
        """Whether the global model that was announced last is for this device: the job begins from it, or the program
        wants it. Else it stays where it is; what comes of it by multicast is kept."""
        job, digest = state.job, state.fetched
        if digest is None:
            return False
        return state.wanted or (job is not None and job.phase == "fetching" and job.model_digest == digest)

    def want(self, state: DeviceState, now: float, out: Actions, again: bool = False) -> None:
        """Ask for missing chunks of the global model, or for the manifest of the one that the job needs."""
        job, fetch = state.job, state.fetch
        if fetch is not None and self.needed(state):
            if again and state.compact_asks and not state.keeps:
                state.compact_asks = ASKS  # who needs all of it takes that when the changes do not come
            if self._narrows(state):
                if again or not state.compact_asks:
                    want = self._less(state, fetch.cut.sha256)
                    state.compact_asks, fetch.touched = state.compact_asks + 1, now
                    self.say(state, want, out)
            elif not fetch.whole:
                bitmap = fetch.window(now, state.credit, again)
                if bitmap:
                    self.say(state, m.Want(model_digest=fetch.cut.sha256, bitmap=bitmap), out)
        elif (
            job is not None
            and job.phase == "fetching"
            and job.model_digest != state.model_digest
            and job.version < state.version
        ):
            job.phase, job.reason = "refused", f"global model {job.version} was replaced by {state.version}"
            out.append(a.Save())
            self.say(state, m.Decline(attempt=job.attempt, reason=job.reason), out)
        elif job is not None and job.phase == "fetching" and job.model_digest != state.model_digest:
            self.say(state, m.Want(model_digest=job.model_digest, bitmap=b""), out)

    def _narrows(self, state: DeviceState) -> bool:
        """Whether less than the model that is on its way is to be asked for instead."""
        begun = state.fetch is None or bool(state.fetch_of or state.fetch.have)
        follows = bool(state.held and state.model_digest)
        return not begun and state.compact_asks < ASKS and (follows or bool(state.keeps))

    def _less(self, state: DeviceState, digest: bytes) -> m.WantCompact:
        """What is asked for in the place of the whole model ``digest``: at first the changes, where there is another
        one; a coordinator of before there were any says nothing to that."""
        if state.compact_asks or not state.held or not state.model_digest:
            return m.WantCompact(model_digest=digest, mask=state.keeps)
        return m.WantChanges(model_digest=digest, mask=state.keeps, base=state.model_digest, held=state.held)

    def unfit(self, state: DeviceState, digest: bytes, out: Actions) -> None:
        """The changes ``digest`` are of no use here: the model is asked for otherwise."""
        if state.fetch is not None and state.fetch.cut.sha256 == digest:
            of = state.fetch_of
            state.held, state.model_digest = b"", b""
            self._let_go(state, out)
            self.say(state, m.Want(model_digest=of, bitmap=b""), out)

    def bound(self, state: DeviceState, out: Actions) -> None:
        """After a start: let go of what is on its way and larger than this device takes by now."""
        if state.fetch is not None and state.fetch.cut.size > self.limits.max_model:
            self._let_go(state, out)

    def _let_go(self, state: DeviceState, out: Actions) -> None:
        """What is on its way is of no use any more."""
        if state.fetch is not None:
            state.wanted = False
            self._begin(state, None, b"", out)

    def whole(self, state: DeviceState, now: float, out: Actions) -> None:
        """What is on flash is not enough, or damaged: the whole model is asked for; unless it is another one by now
        than that which the job begins from."""
        digest, job = state.model_digest, state.job
        if job is not None and job.phase == "training":
            job.phase = "fetching"
            if job.model_digest != digest:
                self.want(state, now, out)
                return
        state.keeps, state.model_digest = b"", b""
        out.append(a.Save())
        if digest:
            self.say(state, m.Want(model_digest=digest, bitmap=b""), out)

    def overdue(self, state: DeviceState, now: float) -> bool:
        """Whether nothing of the model that is on its way has come for too long."""
        return state.fetch is not None and state.fetch.overdue(now, self.patience(state))

    def patience(self, state: DeviceState) -> float:
        """Seconds after which what was not answered is said again."""
        return max(self.limits.retry, state.retry)
