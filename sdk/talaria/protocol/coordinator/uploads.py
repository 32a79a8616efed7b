"""How an update comes in: offers, their place in the queue, windows of chunks, the receipt; and who is shut out."""

from __future__ import annotations

from collections.abc import Mapping

from talaria.errors import WireError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol import words
from talaria.protocol.coordinator.state import HELD, LIVE, Attempt, Participant, Upload
from talaria.protocol.coordinator.step_context import IgnoredError, Turn
from talaria.protocol.transfer import Receiver, transfer_of
from talaria.wire import messages as m
from talaria.wire.chunks import Cut, cut_of
from talaria.wire.frames import Frame

TELL_SECONDS = 60.0


# -- offers


def offer(t: Turn, device: str, offer: m.Offer) -> None:
    """An update is ready. Raises :class:`WireError` where the offer itself is an offence."""
    state = t.state
    attempt = state.attempts.get(offer.attempt)
    member = None if attempt is None else attempt.cohort.get(device)
    if attempt is None or member is None:
        _answer(t, device, offer.attempt, offer.sha256, "late", "this round is not open to this device")
        t.act(a.FrameRefused("", device, f"offer for attempt {offer.attempt}, which did not ask for it"))
        return
    used = state.nonces.get(offer.nonce)
    if used is not None and used != (offer.attempt, device, offer.sha256):
        raise WireError(f"offer for attempt {offer.attempt} repeats the nonce of another offer")
    if offer.base_digest != attempt.model_digest:
        # Made before the fleet's record was restored or began anew, for a round that had this number then.
        _answer(t, device, offer.attempt, offer.sha256, "late", "this round began from another model")
        return
    if member.sha256 and member.sha256 != offer.sha256 and member.phase != "rejected":
        peer = t.peer(device)
        if member.boot == peer.boot != peer.shared:
            _equivocated(t, attempt, device, member, offer)
            return
        if not _gave_way(t, attempt, device, member, offer):
            return
    elif member.sha256 == offer.sha256:
        member.boot = t.peer(device).boot
        _recut(t, attempt, device, member, offer)
    if member.phase == "stored":
        _answer(t, device, attempt.number, offer.sha256, "stored", "")
    elif member.phase == "rejected":
        _answer(t, device, attempt.number, offer.sha256, "rejected", member.reason)
    elif member.phase == HELD:
        return  # its receipt goes out once it counts
    elif not countable(t, attempt) or member.phase not in LIVE:
        _answer(t, device, attempt.number, offer.sha256, "late", "the round is over")
    elif member.phase == "receiving":
        _ask(t, device, member.xfer, again=True)
    elif member.phase in ("called", "working"):
        _welcome(t, attempt, device, member, offer)


def _welcome(t: Turn, attempt: Attempt, device: str, member: Participant, offer: m.Offer) -> None:
    cut = cut_of(offer)
    if reason := _too_large(t, cut):
        member.phase, member.sha256, member.reason = "rejected", cut.sha256, reason
        _answer(t, device, attempt.number, cut.sha256, "rejected", reason)
        raise WireError(f"offer for attempt {attempt.number} is too large: {reason}")
    if cut.chunk > t.rules.chunk:  # it was said before the device heard that ours are smaller since we began anew
        raise IgnoredError(
            f"offer for attempt {attempt.number} in chunks of {cut.chunk}; at most {t.rules.chunk}, as `co` tells: "
            "the device cuts it anew, and offers it again"
        )
    if attempt.secure and (attempt.between or member.step != words.UPLOAD):
        return  # nobody is asked for an update now; who is asked later offers again
    if offer.base_version != attempt.version:
        raise WireError(
            f"offer for attempt {attempt.number} is based on model {offer.base_version}, not {attempt.version}"
        )
    if len(t.state.waiting) >= 4 * t.rules.max_open:
        return  # no room to remember it: the device offers again
    t.state.nonces.pop(member.nonce, None)  # one for each member: who offers without end fills nothing
    t.state.nonces[offer.nonce] = (attempt.number, device, cut.sha256)
    member.nonce = offer.nonce
    member.phase, member.sha256, member.base_version = "waiting", cut.sha256, offer.base_version
    member.boot = t.peer(device).boot
    member.xfer = transfer_of(cut.sha256)
    t.state.waiting.append((attempt.number, device))
    t.state.offers[attempt.number, device] = cut
    t.act(a.Save(soon=True))
    admit(t)


def _too_large(t: Turn, cut: Cut) -> str:
    most = t.rules.max_update
    return f"{cut.size} bytes; at most {most} ([rounds] max_update)" if cut.size > most else ""


def _recut(t: Turn, attempt: Attempt, device: str, member: Participant, offer: m.Offer) -> None:
    """The same update in other pieces: those that came of it are of no use any more."""
    upload, cut = t.state.uploads.get((device, member.xfer)), cut_of(offer)
    known = t.state.offers.get((attempt.number, device)) if upload is None else upload.receiver.cut
    if member.phase in ("waiting", "receiving") and known != cut and cut.chunk <= t.rules.chunk:
        drop(t, attempt, device, "working", "this device offers its update in other pieces since")


def _equivocated(t: Turn, attempt: Attempt, device: str, member: Participant, offer: m.Offer) -> None:
    t.act(a.Equivocation(device, attempt.number, member.sha256, offer.sha256))
    _answer(t, device, attempt.number, offer.sha256, "equivocation", "another update of this round came first")
    quarantine(t, device, f"two different updates for attempt {attempt.number}")


def _gave_way(t: Turn, attempt: Attempt, device: str, member: Participant, offer: m.Offer) -> bool:
    """Another update of this round, from another boot of the device, which may have lost the first with its memory,
    or of another program with its name, or from before our start, which may have gone back to an older record. What
    has not come in whole gives way; what has stays, and counts."""
    if member.phase in ("waiting", "receiving"):
        drop(t, attempt, device, "working", "this device offers another update since")
    if member.phase in ("called", "working"):
        return True
    if member.phase != "storing":
        reason = "another update of this device is here for this round, from before it or the coordinator began anew"
        _answer(t, device, attempt.number, offer.sha256, "late", reason)
    return False


def countable(t: Turn, attempt: Attempt) -> bool:
    """Whether an update of this round may still count: in the open round, or, asynchronously, in a later one."""
    state = t.state
    if state.current is None:
        return False
    now = state.attempts[state.current]
    if not now.stale:
        return attempt is now and now.phase == "open" and (not now.secure or now.step <= words.UPLOAD)
    if "failed" in (now.phase, attempt.phase):
        return False
    # While a full buffer is folded, what comes is for the version after.
    version = now.version + (now.phase in ("closed", "committed"))
    return version - attempt.version <= now.stale


def admit(t: Turn) -> None:
    """Give the next offers their place, as many as the bounds on open uploads allow."""
    state = t.state
    while state.waiting:
        number, device = state.waiting[0]
        cut = state.offers[number, device]
        busy = sum(u.receiver.cut.size for u in state.uploads.values())
        if len(state.uploads) >= t.rules.max_open or busy + cut.size > t.rules.max_bytes:
            return
        if state.uploads and _asked(t) + _piece(cut) > t.rules.max_asked:
            return
        state.waiting.pop(0)
        del state.offers[number, device]
        member = state.attempts[number].cohort[device]
        member.phase = "receiving"
        state.uploads[device, member.xfer] = Upload(device, number, Receiver(cut, moved=t.now), t.now)
        if t.relayed:
            _expect(t, device, member.xfer)
        else:
            _ask(t, device, member.xfer, first=True)


# -- chunks


def _piece(cut: Cut) -> int:
    return min(cut.chunk, cut.size)


def _asked(t: Turn) -> int:
    """Bytes that open uploads are asked for and that are not here; of each that is not whole one chunk at least."""
    asked = 0
    for upload in t.state.uploads.values():  # a plain loop: it is gone through with each chunk
        cut, many = upload.receiver.cut, len(upload.receiver.asked)
        if many or not upload.receiver.whole:
            asked += max(1, many) * _piece(cut)
    return asked


def _credit(t: Turn, receiver: Receiver) -> int:
    """How many chunks may be on their way: its share of all that may be, among those that are open or soon will be."""
    piece, state = _piece(receiver.cut), t.state
    others = _asked(t) - max(1, len(receiver.asked)) * piece
    many = min(t.rules.max_open, len(state.uploads) + len(state.waiting))
    share = min(t.rules.max_asked // many, t.rules.max_asked - others)
    return max(1, min(t.rules.credit, share // piece))


def _ask(t: Turn, device: str, xfer: str, again: bool = False, first: bool = False) -> None:
    upload = t.state.uploads.get((device, xfer))
    if upload is None or not upload.listening:
        return
    bitmap = upload.receiver.window(t.now, _credit(t, upload.receiver), again)
    if bitmap:
        kind = m.Grant if first or again else m.Need
        t.say(device, kind(attempt=upload.attempt, xfer=xfer, bitmap=bitmap, credit=t.rules.credit))


def chunk(t: Turn, device: str, frame: Frame, proven: bool = True) -> None:
    """A piece of an upload. Raises :class:`WireError` where it does not fit; many of those shut the device out,
    where it is ``proven`` that it sent them."""
    key = (device, frame.header.xfer)
    upload = t.state.uploads.get(key)
    if upload is None or upload.receiver.whole:
        return
    try:
        new = upload.receiver.take(frame, t.now)
    except WireError:
        if proven and upload.receiver.bad >= t.rules.strikes:
            quarantine(t, device, f"{upload.receiver.bad} wrong chunks in upload {key[1]}")
        raise
    if new and t.relayed:  # handed on by a worker; what it keeps, it says itself
        upload.receiver.have.discard(frame.header.idx)
        return
    if new:
        t.act(a.KeepChunk(device, key[1], upload.receiver.cut, frame.header.idx, frame.payload))
        _completed(t, upload, key)
    if not upload.receiver.whole:
        _ask(t, *key)
    admit(t)


def _completed(t: Turn, upload: Upload, key: tuple[str, str]) -> None:
    if upload.receiver.whole:
        member = t.state.attempts[upload.attempt].cohort[upload.device]
        member.phase = "storing"
        secure = bool(t.state.attempts[upload.attempt].secure)
        t.act(a.Complete(upload.attempt, upload.device, key[1], member.base_version, upload.receiver.cut, secure))


def recover(t: Turn, chunks: Mapping[tuple[str, str], frozenset[int]]) -> None:
    """After a start: the chunks found on disk are those that are there; what ingest workers find, they tell. What is
    larger than may be by now is no offence: its device was told another bound."""
    coming = {(upload.attempt, device): upload.receiver.cut for (device, _), upload in t.state.uploads.items()}
    for (number, device), cut in (coming | t.state.offers).items():
        if reason := _too_large(t, cut):
            drop(t, t.state.attempts[number], device, "rejected", reason)
            _answer(t, device, number, cut.sha256, "rejected", reason)
    for key, upload in list(t.state.uploads.items()):
        _found(t, upload, key, chunks.get(key, frozenset()))
        if t.relayed:
            _expect(t, *key)


def _found(t: Turn, upload: Upload, key: tuple[str, str], chunks: frozenset[int]) -> None:
    upload.receiver.have = set(chunks)
    upload.receiver.asked, upload.receiver.touched = set(), t.now
    upload.receiver.moved = upload.opened = t.now
    _completed(t, upload, key)


# -- chunks that come to an ingest worker


def _expect(t: Turn, device: str, xfer: str) -> None:
    upload = t.state.uploads[device, xfer]
    upload.listening = False
    t.act(a.Expect(device, xfer, upload.receiver.cut))


def listening(t: Turn, event: e.Listening) -> None:
    """Somebody takes the chunks of this upload: ask for those that are not there. A worker that began anew has them as
    they lie on disk, and where it was about to check all of them it begins that anew too."""
    key = event.device, event.xfer
    upload = t.state.uploads.get(key)
    if upload is None:
        t.act(a.Discard(*key))  # dropped meanwhile
        return
    upload.listening = True
    t.state.attempts[upload.attempt].cohort[event.device].phase = "receiving"
    _found(t, upload, key, event.chunks)
    if not upload.receiver.whole:
        _ask(t, *key, first=True)


def came(t: Turn, event: e.ChunksCame) -> None:
    """Verified chunks of this upload are kept."""
    t.peer(event.device).heard = t.now
    key = event.device, event.xfer
    upload = t.state.uploads.get(key)
    if upload is None or upload.receiver.whole or not upload.listening:
        return  # what was kept before it listens is in what it finds, unless it came in other pieces
    receiver = upload.receiver
    receiver.have |= event.chunks
    receiver.asked -= event.chunks
    receiver.touched = receiver.moved = t.now
    _completed(t, upload, key)
    if not receiver.whole:
        _ask(t, *key)
    admit(t)


# -- the store's answer


def answered(t: Turn, event: e.Stored | e.UpdateRejected | e.Damaged) -> None:
    """What the program says about a complete upload."""
    attempt = t.state.attempts.get(event.attempt)
    member = None if attempt is None else attempt.cohort.get(event.device)
    if attempt is None or member is None or member.phase != "storing":
        if isinstance(event, e.Stored) and member is not None and member.phase == "late":
            _answer(t, event.device, event.attempt, event.sha256, "late", "the round ended first")
        return
    upload = t.state.uploads.get((event.device, member.xfer))
    match event:
        case e.Stored() if attempt.secure and attempt.between:
            return  # whether it came in time, those decide who add it up
        case e.Stored() if not countable(t, attempt):
            drop(t, attempt, event.device, "late")
            _answer(t, event.device, event.attempt, event.sha256, "late", "the round ended first")
        case e.Stored():
            t.act(a.Save(soon=True))  # the store holds it: a start without this save learns it there
            receipt(t, attempt, event.device, member)
        case e.Damaged() if upload is not None:
            member.phase = "receiving"
            upload.receiver.have = set(event.chunks)
            upload.receiver.asked = set()
            _ask(t, event.device, member.xfer)
        case e.UpdateRejected():
            sha = member.sha256
            drop(t, attempt, event.device, "rejected", event.reason)
            t.act(a.Save())
            _answer(t, event.device, event.attempt, sha, "rejected", event.reason)
            quarantine(t, event.device, event.reason)
    admit(t)


def receipt(t: Turn, attempt: Attempt, device: str, member: Participant) -> None:
    """An update is durable: it counts, and its device is told."""
    sha = member.sha256
    if counted(t, attempt, device, member):
        _answer(t, device, attempt.number, sha, "stored", "")


def counted(t: Turn, attempt: Attempt, device: str, member: Participant) -> bool:
    """This update counts, in the round that is open now, and only once. False where it is held for the next one,
    because this buffer is full."""
    _forget(t, device, member.xfer)
    t.peer(device).strikes = 0
    current = t.state.current
    into = attempt if current is None else t.state.attempts[current]
    if into.stale and (into.phase != "open" or len(into.counted) >= into.target):
        member.phase = HELD
        return False
    member.phase = "stored"
    if into.secure:
        member.step, member.told = words.UPLOAD + 1, b""
    into.counted.append((device, attempt.number, member.base_version, member.sha256))
    return True


def _answer(t: Turn, device: str, number: int, sha: bytes, outcome: str, reason: str) -> None:
    t.say(device, m.Receipt(attempt=number, sha256=sha, outcome=outcome, reason=reason[: m.MAX_TEXT]))


# -- leaving


def _forget(t: Turn, device: str, xfer: str) -> None:
    if t.state.uploads.pop((device, xfer), None) is not None:
        t.act(a.Discard(device, xfer))


def withdraw(t: Turn, number: int, device: str, xfer: str) -> None:
    """Nothing more of what this device offered for the round is received."""
    if (number, device) in t.state.offers:
        del t.state.offers[number, device]
        t.state.waiting.remove((number, device))
    _forget(t, device, xfer)


def drop(t: Turn, attempt: Attempt, device: str, phase: str, reason: str = "") -> None:
    """End a member's part in this round without counting it."""
    member = attempt.cohort[device]
    withdraw(t, attempt.number, device, member.xfer)
    member.phase, member.reason = phase, reason[: m.MAX_TEXT]
    t.act(a.Progressed(device, attempt.number, phase, reason=member.reason))


def strike(t: Turn, device: str, reason: str) -> None:
    """One offence; enough of them shut the device out."""
    peer = t.peer(device)
    peer.strikes += 1
    if peer.strikes >= t.rules.strikes:
        quarantine(t, device, f"{peer.strikes} offences, the last: {reason}")


def quarantine(t: Turn, device: str, reason: str) -> None:
    """Shut a device out; what it has stored stays counted, what is open is dropped."""
    peer = t.peer(device)
    if peer.out:
        return
    if peer.online:  # what it says is not heard any more, its last will neither
        t.act(a.DeviceDown(device, peer.boot))
    peer.out, peer.online = reason[: m.MAX_TEXT], False
    for attempt in t.state.attempts.values():
        if device in attempt.cohort and attempt.cohort[device].phase in LIVE:
            drop(t, attempt, device, "dropped", reason)
    t.act(a.Save(), a.Quarantined(device, peer.out))
    tell_out(t, device)
    admit(t)


def tell_out(t: Turn, device: str) -> None:
    """Say to a device that it is shut out, and why; not often."""
    peer = t.peer(device)
    if t.now - peer.told >= TELL_SECONDS:
        peer.told = t.now
        t.say(device, m.Notice(text=f"shut out by the coordinator: {peer.out}"[: m.MAX_TEXT]))


def heard(t: Turn, device: str) -> None:
    """A message of this device came: too many that bring nothing new are a flood."""
    peer = t.peer(device)
    forgotten = t.rules.pace * max(0.0, t.now - peer.heard)
    peer.idle, peer.heard = max(0.0, peer.idle - forgotten) + 1, t.now
    if peer.idle > t.rules.burst:
        quarantine(t, device, f"flooded the fleet: more than {t.rules.burst} messages without anything new")


def useful(t: Turn, device: str) -> None:
    """The last message of this device brought something new, or was right to ask."""
    t.peer(device).idle -= 1


# -- time


def tick(t: Turn) -> None:
    """Ask again for what did not come; let a stalled upload make room where others wait."""
    state = t.state
    for (device, xfer), upload in list(state.uploads.items()):
        receiver = upload.receiver
        if receiver.whole:
            continue
        still = t.now - receiver.moved >= t.rules.stall
        slow = t.now - upload.opened >= t.rules.stall * (2 + len(receiver.have) / t.rules.credit)
        if state.waiting and (still or slow):
            attempt = state.attempts[upload.attempt]
            drop(t, attempt, device, "working", "the upload was too slow and others were waiting")
            attempt.cohort[device].sha256 = receiver.cut.sha256
            admit(t)
        elif t.now - receiver.touched >= t.rules.retry and t.peer(device).online:
            _ask(t, device, xfer, again=True)
