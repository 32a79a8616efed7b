"""Attacks on the two halves of the protocol: refused, remembered, and the round goes on."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from limits import allowed, cpu_seconds

from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator.machine import CoordinatorMachine, CoordinatorState, Rules
from talaria.protocol.device.machine import DeviceLimits, DeviceMachine, DeviceState
from talaria.protocol.transfer import Known, chunk_frames, transfer_of
from talaria.wire import messages as m
from talaria.wire.chunks import describe
from talaria.wire.frames import Header, decode_frame, encode_frame
from talaria.wire.signing import Signer

FED = "watch"
CO, ANNA, BEN, EVE = (Signer.of(hashlib.sha256(n).digest()) for n in (b"co", b"anna", b"ben", b"eve"))
MODEL = bytes(range(250)) * 10
UPDATE = bytes(reversed(range(250))) * 10
CUT = describe(UPDATE, 500)


def offer_of(cut=CUT, number=1, base_version=0, nonce=None, base_digest=hashlib.sha256(MODEL).digest()):
    return m.Offer(
        attempt=number,
        base_version=base_version,
        base_digest=base_digest,
        size=cut.size,
        chunk=cut.chunk,
        sha256=cut.sha256,
        hashes=cut.hashes,
        nonce=nonce or cut.sha256[:16],
    )


class Bench:
    """A coordinator in an open round with anna and ben, spoken to by hand."""

    def __init__(self, signed=True, cohort=("anna", "ben"), **rules):
        keys = {"anna": ANNA.public, "ben": BEN.public} if signed else {}
        rules = {"chunk": 500, "retry": 1.0, "stall": 10.0} | rules
        self.half = CoordinatorMachine(FED, Rules(**rules), b"", CO if signed else None, keys, enrolled=signed)
        self.signed, self.state, self.now = signed, CoordinatorState(), 0.0
        self.seq = {}
        self.do(e.Start(0.0, 7))
        self.do(e.PublishModel(0.0, 0, describe(MODEL, 500)))
        for device in cohort:
            self.birth(device)
        self.do(e.OpenRound(0.0, 1, dict.fromkeys(cohort, b""), None, 1))

    def do(self, event):
        self.state, actions = self.half.step(self.state, event)
        return actions

    def frame(self, device, message, boot=1, seq=None, signer=None):
        self.seq[device] = self.seq.get(device, 0) + 1
        header = Header(message.TYPE, FED, device, boot=boot, seq=self.seq[device] if seq is None else seq)
        own = {"anna": ANNA, "ben": BEN}.get(device) if self.signed else None
        return encode_frame(header, m.encode_message(message), signer or own)

    def hear(self, topic, payload, retained=False):
        return self.do(e.Received(self.now, f"fl/1/{FED}/{topic}", payload, retained))

    def birth(self, device, boot=1, online=True):
        return self.hear(
            f"d/{device}/state", self.frame(device, m.DeviceBirth(online=online, key=b"", profile=b""), boot)
        )

    def say(self, device, message, **how):
        return self.hear(f"d/{device}/evt", self.frame(device, message, **how))

    def chunk(self, device, index, data=None, cut=CUT, xfer=None, off=None):
        xfer = xfer or transfer_of(cut.sha256)
        data = UPDATE[500 * index : 500 * index + 500] if data is None else data
        header = Header(m.CHUNK, FED, device, boot=1, xfer=xfer, idx=index, off=500 * index if off is None else off)
        return self.hear(f"d/{device}/up/{xfer}", encode_frame(header, data))

    def upload(self, device):
        self.say(device, m.Accept(attempt=1))
        self.say(device, offer_of(nonce=device.encode().ljust(16)))
        for index in range(CUT.count):
            self.chunk(device, index)
        return self.do(e.Stored(self.now, 1, device, CUT.sha256))

    def finishes_with(self, *devices):
        """The round completes for the honest; exactly these count."""
        closed = []
        for device in devices:
            closed += [x for x in self.upload(device) if isinstance(x, a.RoundClosed)]
        assert [tuple(c.device for c in x.counted) for x in closed] == [devices]


def of(actions, kind):
    return [x for x in actions if isinstance(x, kind)]


def reasons(actions):
    return " ".join(x.reason for x in of(actions, a.FrameRefused))


# 23
def test_23_a_replay_of_an_earlier_rounds_update_counts_nowhere():
    bench = Bench(cohort=("anna",))
    first = bench.frame("anna", offer_of())
    bench.say("anna", m.Accept(attempt=1))
    bench.hear("d/anna/evt", first)
    for index in range(CUT.count):
        bench.chunk("anna", index)
    assert of(bench.do(e.Stored(0.0, 1, "anna", CUT.sha256)), a.RoundClosed)
    bench.do(e.Committed(0.0, 1))
    bench.do(e.OpenRound(0.0, 2, {"anna": b""}, None, 1))
    assert bench.hear("d/anna/evt", first) == []  # the very bytes: seen already
    again = bench.say("anna", offer_of())  # the same update, said anew: the old receipt, and nothing else
    assert [type(x) for x in again] == [a.Publish]
    assert bench.state.attempts[2].counted == []


def test_23_an_older_boot_is_not_heard():
    bench = Bench()
    bench.say("anna", m.Accept(attempt=1), boot=5, seq=1)
    actions = bench.say("anna", m.Decline(attempt=1, reason="late voice"), boot=4, seq=9)
    assert [type(x) for x in actions] == [a.Forgot, a.Publish]  # told where to count on from, and nothing else
    assert bench.say("anna", m.Decline(attempt=1, reason="late voice"), boot=4, seq=10) == []  # but not each time
    assert bench.state.attempts[1].cohort["anna"].phase == "working"


# 24
def test_24_the_same_nonce_for_two_offers_is_refused():
    bench = Bench()
    nonce = bytes(16)
    bench.say("anna", offer_of(nonce=nonce))
    actions = bench.say("ben", offer_of(describe(UPDATE + b"!", 500), nonce=nonce))
    assert "repeats the nonce" in reasons(actions)
    assert bench.state.attempts[1].cohort["ben"].phase == "called"


# 25, 26
def device(key=True, **limits):
    half = DeviceMachine(FED, "anna", DeviceLimits(retry=1.0, **limits), b"", ANNA, CO.public if key else None)
    state = DeviceState()
    for event in (e.Boot(0.0), e.Connecting(0.0), e.Connected(0.0)):
        half.step(state, event)
    return half, state


def cmd(half, state, message, epoch=7, seq=1, signer=CO, topic="d/anna/cmd", device="anna", retained=False):
    payload = encode_frame(Header(message.TYPE, FED, device, boot=epoch, seq=seq), m.encode_message(message), signer)
    return half.step(state, e.Received(0.0, f"fl/1/{FED}/{topic}", payload, retained))[1]


def manifest(version=0, data=MODEL):
    cut = describe(data, 500)
    return m.ModelManifest(
        version=version, size=cut.size, chunk=500, sha256=cut.sha256, hashes=cut.hashes, nonce=bytes(16)
    )


WORK = m.Work(attempt=1, version=0, model_digest=describe(MODEL, 500).sha256, seconds=0.0, spec=b"")


def test_25_an_older_coordinator_is_not_obeyed():
    half, state = device()
    assert of(cmd(half, state, WORK, epoch=7), a.Publish)
    late = m.Work(attempt=2, version=0, model_digest=WORK.model_digest, seconds=0.0, spec=b"")
    assert "took over" in reasons(cmd(half, state, late, epoch=6, seq=50))
    assert state.job is not None
    assert state.job.attempt == 1
    assert "took over" in reasons(cmd(half, state, manifest(9), epoch=6, topic="co/model", device=""))


@pytest.mark.parametrize("signer", [None, EVE, ANNA])
def test_25_a_coordinator_is_not_fenced_by_a_birth_that_its_key_did_not_sign(signer):
    bench = Bench()
    birth = m.CoordinatorBirth(online=True, key=b"", chunk=500, credit=8, max_update=9, retry=1.0, spec=b"")

    def rival(key):
        return bench.hear("co/state", encode_frame(Header("co", FED, boot=99), m.encode_message(birth), key))

    assert "did not sign" in reasons(rival(signer))
    assert not bench.state.fenced
    bench.finishes_with("anna", "ben")
    assert [x.epoch for x in of(rival(CO), a.Fenced)] == [99]


def test_25_a_round_before_the_last_one_asked_for_is_not_begun():
    half, state = device()
    state.model_digest = WORK.model_digest
    later = m.Work(attempt=5, version=0, model_digest=WORK.model_digest, seconds=0.0, spec=b"")
    assert [x.attempt for x in of(cmd(half, state, later, seq=1), a.Train)] == [5]
    actions = cmd(half, state, WORK, seq=2)
    assert "attempt 1 is older than 5" in reasons(actions)
    assert not of(actions, a.Train)
    assert not of(actions, a.Cancel)
    assert (state.job.attempt, state.job.phase) == (5, "training")


@pytest.mark.parametrize("base_version", [0, 2, 9])
def test_26_an_offer_from_another_body_than_the_rounds_is_refused(base_version):
    bench = Bench(cohort=("anna",))
    bench.do(e.AbortRound(0.0, 1, "anew"))
    bench.do(e.PublishModel(0.0, 1, describe(MODEL + b"!", 500)))
    bench.do(e.OpenRound(0.0, 2, {"anna": b""}, None, 1))
    model = hashlib.sha256(MODEL + b"!").digest()
    assert f"is based on model {base_version}, not 1" in reasons(
        bench.say("anna", offer_of(number=2, base_version=base_version, base_digest=model))
    )
    assert bench.state.attempts[2].cohort["anna"].phase == "called"
    assert bench.state.transfers() == {}
    bench.say("anna", offer_of(number=2, base_version=1, base_digest=model))
    assert bench.state.attempts[2].cohort["anna"].phase == "receiving"


@pytest.mark.parametrize("signer", [None, EVE, ANNA])
def test_26_a_body_that_the_coordinator_did_not_sign_is_not_fetched(signer):
    half, state = device()
    actions = cmd(half, state, manifest(), signer=signer, topic="co/model", device="", retained=True)
    assert "not signed" in reasons(actions)
    assert state.fetch is None
    assert "not signed" in reasons(cmd(half, state, WORK, signer=signer))
    assert state.job is None


def test_26_chunks_of_another_body_than_the_signed_one_are_not_kept():
    half, state = device()
    cmd(half, state, manifest(), topic="co/model", device="", retained=True)
    name = transfer_of(describe(MODEL, 500).sha256)
    header = Header(m.CHUNK, FED, "", boot=7, xfer=name, idx=0, off=0)
    forged = encode_frame(header, b"x" * 500)
    actions = half.step(state, e.Received(0.0, f"fl/1/{FED}/m/{name[:8]}/0", forged))[1]
    assert "does not match its sha256" in reasons(actions)
    assert not of(actions, a.KeepChunk)


def test_26_a_body_that_is_cut_anew_is_fetched_by_its_new_cut():
    """As after a coordinator came back by a broker that takes smaller messages."""
    half, state = device()
    cmd(half, state, manifest(), topic="co/model", device="", retained=True)
    assert state.fetch.cut.count == 5
    cut = describe(MODEL, 250)
    smaller = m.ModelManifest(
        version=0, size=cut.size, chunk=250, sha256=cut.sha256, hashes=cut.hashes, nonce=bytes(16)
    )
    actions = cmd(half, state, smaller, topic="co/model", device="", retained=True)
    assert state.fetch.cut == cut
    assert of(actions, a.Discard)
    bench = Bench()
    answer = bench.say(
        "anna", m.Want(model_digest=cut.sha256, bitmap=b"\xff\x03")
    )  # ten chunks; the coordinator has five
    assert [decode_frame(x.payload).header.type for x in of(answer, a.Publish)] == ["model"]
    assert bench.state.peers["anna"].strikes == 0


def test_26_an_old_body_is_not_brought_back():
    half, state = device()
    cmd(half, state, manifest(5, UPDATE), topic="co/model", device="", retained=True)
    assert "older" in reasons(cmd(half, state, manifest(4), topic="co/model", device="", retained=True))


def test_26_a_body_above_the_devices_limit_is_not_fetched():
    half, state = device(max_model=1000)
    assert "limit of 1000" in reasons(cmd(half, state, manifest(), topic="co/model", device=""))
    half, state = device()
    cmd(half, state, manifest(), topic="co/model", device="", retained=True)
    assert state.partial() is not None
    lower, _ = device(max_model=1000)  # its owner changed that while it came
    assert of(lower.step(state, e.Boot(0.0))[1], a.Discard)
    assert state.partial() is None


# 27
def test_27_a_device_cannot_speak_as_another():
    bench = Bench()
    payload = bench.frame("ben", m.Decline(attempt=1, reason="I am anna"))
    assert "each device has its own" in reasons(bench.hear("d/anna/evt", payload))
    signed_by_ben = bench.frame("anna", m.Decline(attempt=1, reason="I am anna"), signer=BEN)
    assert "not signed" in reasons(bench.hear("d/anna/evt", signed_by_ben))
    unknown = bench.frame("eve", m.Accept(attempt=1), signer=EVE)
    assert "not enrolled" in reasons(bench.hear("d/eve/evt", unknown))
    assert bench.state.attempts[1].cohort["anna"].phase == "called"
    assert bench.state.quarantined() == {}  # anna did nothing
    bench.finishes_with("anna", "ben")


def test_27_a_command_for_another_device_is_not_obeyed():
    half, state = device()
    assert "frame for 'ben'" in reasons(cmd(half, state, WORK, device="ben"))
    assert "another device's" in reasons(cmd(half, state, WORK, topic="d/ben/cmd", device="ben"))


# 28
def test_28_retained_messages_planted_where_none_are_kept():
    half, state = device(key=False)
    assert "planted" in reasons(cmd(half, state, WORK, signer=None, retained=True))
    assert state.job is None
    bench = Bench(signed=False)
    payload = bench.frame("anna", m.Decline(attempt=1, reason="planted"))
    assert "planted" in reasons(bench.hear("d/anna/evt", payload, retained=True))
    assert bench.state.attempts[1].cohort["anna"].phase == "called"


# 30
@pytest.mark.parametrize(("index", "off"), [(5, None), (10**9, 0), (0, 500), (1, 0)])
def test_30_a_chunk_beyond_the_manifest_or_out_of_its_place(index, off):
    bench = Bench()
    bench.say("anna", offer_of())
    actions = bench.chunk("anna", index, b"x" * 500, off=off)
    assert of(actions, a.FrameRefused)
    assert not of(actions, a.KeepChunk)
    bench.finishes_with("anna", "ben")


def test_30_wants_and_grants_that_do_not_fit():
    bench = Bench()
    model = describe(MODEL, 500)
    assert "bitmap" in reasons(bench.say("anna", m.Want(model_digest=model.sha256, bitmap=b"\xff\xff\xff")))
    half, state = device()
    cmd(half, state, WORK)
    state.model_digest = WORK.model_digest
    half.step(state, e.Tick(5.0))
    state.job.phase = "training"
    half.step(state, e.UpdateReady(5.0, 1, 0, CUT))
    bad = m.Grant(attempt=1, xfer=transfer_of(CUT.sha256), bitmap=b"\xff\xff", credit=8)
    assert "bitmap" in reasons(cmd(half, state, bad, seq=2))


# 31
def test_31_wrong_chunks_again_and_again_end_in_quarantine():
    bench = Bench()
    bench.say("anna", offer_of())
    quarantined = []
    for _ in range(20):
        quarantined += of(bench.chunk("anna", 0, b"x" * 500), a.Quarantined)
    assert [q.device for q in quarantined] == ["anna"]
    assert "wrong chunks" in bench.state.quarantined()["anna"]
    assert bench.state.transfers() == {}
    bench.finishes_with("ben")


def test_31_a_body_that_never_fits_is_reported_and_does_not_loop():
    half, state = device(strikes=3)
    cmd(half, state, manifest(), topic="co/model", device="", retained=True)
    name = transfer_of(describe(MODEL, 500).sha256)
    forged = encode_frame(Header(m.CHUNK, FED, "anna", boot=7, xfer=name, idx=0, off=0), b"x" * 500)
    sent = []
    for _ in range(10):
        sent += of(half.step(state, e.Received(0.0, f"fl/1/{FED}/d/anna/dn/{name}", forged))[1], a.Publish)
    assert len(sent) == 1


# 32
def test_32_ten_thousand_open_transfers_stay_within_bounds():
    names = tuple(f"d{i}" for i in range(10_000))
    bench = Bench(signed=False, cohort=names, max_open=10, max_bytes=2**30)

    def all_offer() -> None:
        for i, device in enumerate(names):
            bench.say(device, offer_of(nonce=i.to_bytes(16, "big")))

    each = cpu_seconds(all_offer) / len(names)
    assert len(bench.state.uploads) == 10
    assert len(bench.state.waiting) <= 40
    assert len(bench.state.nonces) <= 50
    assert each < allowed()


def test_32_one_device_has_one_transfer_and_bytes_are_bounded():
    bench = Bench(max_bytes=3000, max_update=3000)
    bench.say("anna", offer_of())
    bench.say("ben", offer_of(nonce=bytes(16)))
    assert [key[0] for key in bench.state.transfers()] == ["anna"]
    large = describe(bytes(4000), 500)
    bench = Bench(max_bytes=3000, max_update=3000)
    assert "too large" in reasons(bench.say("anna", offer_of(large)))
    assert bench.state.transfers() == {}
    bench.upload("ben")
    assert bench.state.attempts[1].phase == "closed"


def test_32_offers_from_a_new_boot_each_fill_nothing():
    bench = Bench()
    for boot in range(2, 500):
        bench.now += 0.02  # as fast as is no flood
        cut = describe(boot.to_bytes(4, "big"), 500)
        bench.say("anna", offer_of(cut), boot=boot)
        assert bench.state.attempts[1].cohort["anna"].sha256 == cut.sha256
    assert len(bench.state.uploads) == len(bench.state.nonces) == 1
    taken = CoordinatorState.load(bench.state.dump())
    assert taken.nonces == {taken.attempts[1].cohort["anna"].nonce: (1, "anna", cut.sha256)}


def test_32_a_device_cannot_pull_the_body_without_end():
    bench = Bench(serve=2)
    model = describe(MODEL, 500)
    sent, last = 0, []
    for _ in range(100):
        last = bench.say("anna", m.Want(model_digest=model.sha256, bitmap=b"\x1f"))
        sent += sum(model.place(i)[1] for x in of(last, a.SendChunks) for i in x.indices)
    assert "more than 2 times the model" in reasons(last)
    assert sent <= 2 * len(MODEL) + 2 * 8 * 500
    assert bench.state.quarantined() == {}  # a broker that drops what is sent makes an honest device ask like this
    for _ in range(3):
        bench.now += 60.0
        bench.do(e.Tick(bench.now))
    again = bench.say("anna", m.Want(model_digest=model.sha256, bitmap=b"\x1f"))
    assert of(again, a.SendChunks)
    bench.finishes_with("anna", "ben")


# 33
def test_33_a_slow_loris_loses_its_place_to_those_who_wait():
    bench = Bench(max_open=1)
    bench.say("anna", offer_of())
    bench.say("ben", offer_of(nonce=bytes(16)))
    assert [key[0] for key in bench.state.transfers()] == ["anna"]
    for index in range(3):  # a chunk every nine seconds, just below the stall
        bench.now += 9.0
        bench.do(e.Tick(bench.now))
        bench.chunk("anna", index)
    bench.now += 9.0
    bench.do(e.Tick(bench.now))
    assert [key[0] for key in bench.state.transfers()] == ["ben"]
    for index in range(CUT.count):
        bench.chunk("ben", index)
    assert of(bench.do(e.Stored(bench.now, 1, "ben", CUT.sha256)), a.Publish)
    assert bench.state.quarantined() == {}


# 34
def test_34_a_last_will_of_an_older_connection_changes_nothing():
    bench = Bench()
    bench.birth("anna", boot=5)
    assert bench.birth("anna", boot=4, online=False) == []
    assert bench.state.peers["anna"].online
    assert of(bench.birth("anna", boot=5, online=False), a.DeviceDown)
    again = bench.birth("anna", boot=5)  # a birth that was overtaken by its own death: the device must connect anew
    assert [(x.boot, x.newest) for x in of(again, a.Forgot)] == [(5, 5)]
    assert not bench.state.peers["anna"].online
    assert of(bench.birth("anna", boot=6), a.DeviceUp)


def test_34_births_without_end_are_throttled_and_shut_nobody_out():
    """Whoever can cut a link, can have its device born again and again: it costs the device its turn, no more."""
    bench = Bench(flaps=10)
    up, told = [], ""
    for boot in range(2, 102):
        bench.now += 0.5
        actions = bench.birth("anna", boot=boot)
        up += of(actions, a.DeviceUp)
        told += reasons(actions)
        bench.birth("anna", boot=boot, online=False)
    assert len(up) == 9  # of ten in a minute, one was its first
    assert "more than 10 births within a minute" in told
    assert bench.state.quarantined() == {}
    assert len(bench.state.peers["anna"].births) <= 11
    bench.say("anna", m.Accept(attempt=1), boot=102, seq=1)  # a word of its own brings it back at once
    assert bench.state.peers["anna"].online
    bench.now += 61.0
    assert of(bench.birth("anna", boot=103), a.DeviceUp)
    bench.say("anna", m.Decline(attempt=1, reason="that was all"), boot=103, seq=1)
    bench.finishes_with("ben")


def test_34_who_is_born_without_end_has_its_turns_in_each_minute():
    """Else a fleet in which all links break so often, and nobody has anything to say, would wait for ever."""
    bench = Bench(flaps=10)
    ups = []
    for boot in range(2, 602):
        bench.now += 0.5
        ups += [bench.now] * len(of(bench.birth("anna", boot=boot), a.DeviceUp))
        bench.birth("anna", boot=boot, online=False)
    for minute in range(4):
        assert 9 <= sum(60 * minute < when - ups[0] <= 60 * (minute + 1) for when in ups) <= 10
    assert len(bench.state.peers["anna"].births) <= 11


@pytest.mark.parametrize("others", [3, 10], ids=["boots-of-its-own", "the-same-boots"])
def test_34_two_programs_with_one_name_are_told_to_both_and_to_the_operator(others):
    bench = Bench()
    mine, other = b"process1", b"process2"
    doubled, said = [], []

    def born(process, boot):
        bench.now += 2.0
        message = m.DeviceBirth(online=True, key=b"", profile=b"", process=process)
        actions = bench.hear("d/anna/state", bench.frame("anna", message, boot=boot))
        doubled.extend(of(actions, a.Doubled))
        said.extend(x for x in of(actions, a.Publish) if decode_frame(x.payload).header.type == "error")

    for i in range(5):  # those of the other are behind, or the same, and are seen either way
        born(mine, 10 + i)
        born(other, others + i)
    assert [x.device for x in doubled] == ["anna"]
    assert len(said) >= 4
    half, state = device()
    (told,) = of(half.step(state, e.Received(0.0, said[0].topic, said[0].payload))[1], a.Told)
    assert "another program has this device's name" in told.reason
    assert bench.state.quarantined() == {}


def test_34_a_new_boot_in_each_word_brings_a_device_back_so_often_a_minute_only():
    """Each is noted, written and answered by all that is open for it; births alone were bounded."""
    bench, ups, asked = Bench(flaps=10), 0, 0
    for boot in range(2, 500):
        bench.now += 0.02  # as fast as is no flood
        heard = bench.say("anna", m.Accept(attempt=1), boot=boot)
        ups += len(of(heard, a.DeviceUp))
        asked += sum(b"work" in x.payload[:40] for x in of(heard, a.Publish))
    assert ups <= 40
    assert asked <= 40
    assert bench.state.quarantined() == {}
    bench.now += 60.0
    assert of(bench.say("anna", m.Accept(attempt=1), boot=500), a.DeviceUp)  # and later it is there again
    assert bench.state.peers["anna"].online
    bench.say("anna", m.Decline(attempt=1, reason="never mind"), boot=500)
    bench.finishes_with("ben")


@pytest.mark.parametrize("lives", [[b"a", b"b", b"c", b"d", b"e"], [b"a"] * 9, [b"a", b"b", b"a", b"b"], [b""] * 9])
def test_34_a_device_that_starts_anew_or_whose_link_breaks_is_not_two(lives):
    bench = Bench()
    for boot, process in enumerate(lives, 2):
        message = m.DeviceBirth(online=True, key=b"", profile=b"", process=process)
        assert not of(bench.hear("d/anna/state", bench.frame("anna", message, boot=boot)), a.Doubled)


def test_34_a_slow_flapper_is_only_a_bad_link():
    bench = Bench(flaps=10)
    for boot in range(2, 60):
        bench.now += 15.0
        bench.birth("anna", boot=boot)
    assert bench.state.quarantined() == {}


def test_34_what_was_said_before_a_death_brings_nobody_back():
    """A last will may overtake what the same connection said: the device is gone, whatever is heard of it late."""
    bench = Bench()
    late = bench.frame("anna", m.Accept(attempt=1), boot=1)
    bench.birth("anna", boot=1, online=False)
    bench.hear("d/anna/evt", late)
    assert bench.state.attempts[1].cohort["anna"].phase == "working"  # heard it is
    assert not bench.state.peers["anna"].online
    bench.say("anna", m.Accept(attempt=1), boot=2, seq=1)
    assert bench.state.peers["anna"].online


def test_34_a_false_last_will_of_the_coordinator_is_corrected():
    bench = Bench()
    topic, payload = bench.half.will(bench.state)
    actions = bench.do(e.Received(1.0, topic, payload))
    assert [x.topic for x in of(actions, a.Publish)] == [f"fl/1/{FED}/co/state", f"fl/1/{FED}/co/model"]


# 35
def test_35_two_different_updates_for_one_round():
    bench = Bench()
    bench.upload("anna")
    second = describe(UPDATE[::-1], 500)
    actions = bench.say("anna", offer_of(second))
    found = of(actions, a.Equivocation)
    assert [(x.device, x.attempt, x.first, x.second) for x in found] == [("anna", 1, CUT.sha256, second.sha256)]
    assert "two different updates" in bench.state.quarantined()["anna"]
    assert [entry[3] for entry in bench.state.attempts[1].counted] == [CUT.sha256]  # the first stays
    closed = of(bench.upload("ben"), a.RoundClosed)
    assert [c.device for c in closed[0].counted] == ["anna", "ben"]


def test_35_a_second_update_while_the_first_is_on_its_way():
    bench = Bench()
    bench.say("anna", offer_of())
    bench.chunk("anna", 0)
    assert of(bench.say("anna", offer_of(describe(UPDATE[::-1], 500))), a.Equivocation)
    assert bench.state.transfers() == {}
    bench.finishes_with("ben")


# and in general
@pytest.mark.parametrize("kind", ["evt", "state", "up/abc"])
def test_garbage_on_its_own_topic_shuts_a_device_out(kind):
    bench = Bench(signed=False)
    for _ in range(10):
        bench.hear(f"d/anna/{kind}", b"garbage" * 20)
    assert "offences" in bench.state.quarantined()["anna"]
    bench.finishes_with("ben")


@pytest.mark.parametrize("kind", ["evt", "state", "up/abc", "chunks"])
def test_what_a_stranger_says_in_a_members_name_is_not_the_members_offence(kind):
    """Where a broker lets everybody speak on all topics, as some hosted ones do, only a signature tells who it was."""
    bench = Bench()
    bench.half = replace(bench.half, apart=False)
    bench.say("anna", m.Accept(attempt=1))
    bench.say("anna", offer_of())
    forged = encode_frame(Header("decline", FED, "anna", boot=1, seq=99), b"\x80", EVE)
    for _ in range(20):
        if kind == "chunks":
            assert of(bench.chunk("anna", 0, b"x" * 500), a.FrameRefused)
        else:
            assert of(bench.hear(f"d/anna/{kind}", b"garbage" * 20), a.FrameRefused)
            assert of(bench.hear(f"d/anna/{kind}", forged), a.FrameRefused)
    assert bench.state.quarantined() == {}
    for index in range(CUT.count):
        bench.chunk("anna", index)
    bench.do(e.Stored(0.0, 1, "anna", CUT.sha256))
    assert of(bench.upload("ben"), a.RoundClosed)
    for _ in range(5):  # what it signed itself, is
        bench.say("ben", m.Farewell())
    assert "ben" in bench.state.quarantined()


def test_messages_that_are_not_a_devices_to_say():
    bench = Bench()
    for message in (WORK, manifest(), m.Abort(attempt=1, reason="x"), m.Rebirth(above=0)):
        assert of(bench.say("anna", message), a.FrameRefused)
    half, state = device()
    for seq, message in enumerate((m.Accept(attempt=1), offer_of(), m.Want(model_digest=bytes(32), bitmap=b"")), 1):
        assert of(cmd(half, state, message, seq=seq), a.FrameRefused)


def test_a_message_costs_little():
    bench = Bench()
    huge = bench.frame("anna", offer_of(describe(bytes(3600), 1)))
    actions = []
    assert cpu_seconds(lambda: actions.extend(bench.hear("d/anna/evt", huge))) < allowed()
    assert [type(x) for x in actions] == [a.Save, a.Publish]


def test_a_changed_file_is_not_sent():
    from talaria.errors import WireError

    action = a.SendChunks(FED, "anna", "ab", 1, 1, CUT, (0,), "up")
    with pytest.raises(WireError, match="changed"):
        list(chunk_frames(action, lambda off, n: bytes(n)))
    for gone in (b"", bytes(CUT.place(0)[1] + 1)):
        with pytest.raises(WireError, match="changed"):
            list(chunk_frames(action, lambda off, n, gone=gone: gone, known=Known()))


# a device that lost its memory, or a coordinator that went back
def test_an_offer_made_from_another_body_is_late_and_no_offence():
    bench = Bench(cohort=("anna",))
    actions = bench.say("anna", offer_of(base_digest=bytes(32)))
    (receipt,) = [x for x in of(actions, a.Publish) if x.topic.endswith("anna/cmd")]
    assert m.decode_message(decode_frame(receipt.payload)).outcome == "late"
    assert bench.state.peers["anna"].strikes == 0
    bench.finishes_with("anna")


def test_another_update_from_another_boot_is_a_lost_memory_and_not_equivocation():
    bench = Bench(cohort=("anna",))
    bench.say("anna", offer_of(), boot=1)
    bench.birth("anna", boot=2)
    second = describe(UPDATE[::-1], 500)
    actions = bench.say("anna", offer_of(second), boot=2)
    assert of(actions, a.Equivocation) == []
    assert bench.state.attempts[1].cohort["anna"].sha256 == second.sha256
    third = describe(UPDATE + b"!", 500)
    assert of(bench.say("anna", offer_of(third), boot=2), a.Equivocation)  # within one boot it is one


def test_updates_of_two_programs_with_one_name_and_one_boot_are_no_equivocation():
    bench = Bench(cohort=("anna",))

    def born(process, boot):
        message = m.DeviceBirth(online=True, key=b"", profile=b"", process=process)
        bench.hear("d/anna/state", bench.frame("anna", message, boot=boot))

    born(b"process1", 2)
    bench.say("anna", offer_of(), boot=2)
    born(b"process2", 2)
    second = describe(UPDATE[::-1], 500)
    assert of(bench.say("anna", offer_of(second), boot=2), a.Equivocation) == []
    assert bench.state.quarantined() == {}
    assert bench.state.attempts[1].cohort["anna"].sha256 == second.sha256
    born(b"process1", 3)
    bench.say("anna", offer_of(second), boot=3)
    assert of(bench.say("anna", offer_of(), boot=3), a.Equivocation)  # within a boot of one program it is one


def test_another_update_after_a_restore_of_the_coordinator_is_no_equivocation():
    """What came first was in the backup; the device has done later rounds since, and does this one again."""
    bench = Bench(cohort=("anna",))
    bench.say("anna", offer_of())
    bench.do(e.Start(0.0, 8))
    second = describe(UPDATE[::-1], 500)
    actions = bench.say("anna", offer_of(second))
    assert of(actions, a.Equivocation) == []
    assert bench.state.attempts[1].cohort["anna"].sha256 == second.sha256
    third = describe(UPDATE + b"!", 500)
    assert of(bench.say("anna", offer_of(third)), a.Equivocation)  # since that start it is one


def test_an_update_that_is_offered_again_after_a_start_is_the_devices_own_and_no_other_may_follow():
    bench = Bench(cohort=("anna",))
    bench.say("anna", offer_of())
    bench.do(e.Start(0.0, 8))
    bench.say("anna", offer_of())
    assert of(bench.say("anna", offer_of(describe(UPDATE[::-1], 500))), a.Equivocation)


def test_who_is_shut_out_is_told_to_be_offline_for_its_last_will_is_not_heard():
    bench = Bench()
    actions = bench.do(e.Revoke(0.0, "anna", "lied"))
    assert [(x.device, x.boot) for x in of(actions, a.DeviceDown)] == [("anna", 1)]
    assert of(bench.birth("anna", online=False), a.DeviceDown) == []
    bench.do(e.Release(0.0, "anna"))
    assert of(bench.birth("anna"), a.DeviceUp)


def test_a_stored_update_stays_when_its_device_forgot_it_and_offers_another():
    bench = Bench(cohort=("anna", "ben"))
    bench.upload("anna")
    bench.birth("anna", boot=2)
    actions = bench.say("anna", offer_of(describe(UPDATE[::-1], 500)), boot=2)
    (receipt,) = [m.decode_message(decode_frame(x.payload)) for x in of(actions, a.Publish)]
    assert receipt.outcome == "late"
    assert bench.state.quarantined() == {}
    assert [entry[3] for entry in bench.state.attempts[1].counted] == [CUT.sha256]


def test_an_older_boot_is_told_where_to_count_on_from_and_connects_anew():
    bench = Bench()
    bench.birth("anna", boot=7)
    half, state = device()
    actions = bench.birth("anna", boot=state.boot)
    (word,) = [m.decode_message(decode_frame(x.payload)) for x in of(actions, a.Publish)]
    assert word == m.Rebirth(above=6)
    assert of(cmd(half, state, word), a.Reconnect)
    half.step(state, e.Connecting(0.0))
    assert state.boot == 7
    # Played back to a device that is where it should be, it costs a birth and nothing more.
    again = cmd(half, state, m.Rebirth(above=6), seq=2)
    assert [type(x) for x in again] == [a.Publish]


@pytest.mark.parametrize("start", [False, True])
def test_a_restored_memory_that_counts_on_to_a_boot_of_its_other_life_is_told_to_go_on(start):
    """Where the broker lost the last will of that one: what it said was taken for what had been said in that life, and
    a round without a deadline waited for ever."""
    bench = Bench(cohort=("anna",))

    def born(boot, process):
        message = m.DeviceBirth(online=True, key=b"", profile=b"", process=process)
        return bench.hear("d/anna/state", bench.frame("anna", message, boot=boot))

    born(7, b"before")
    for seq in range(1, 40):
        bench.say("anna", m.Accept(attempt=1), boot=7, seq=seq)
    if start:
        bench.state = type(bench.state).load(bench.state.dump())
        bench.do(e.Start(0.0, 8))
    told = [born(boot, b"restored") for boot in (4, 7)]
    words = [m.decode_message(decode_frame(x.payload)) for actions in told for x in of(actions, a.Publish)]
    assert words == [m.Rebirth(above=6), m.Rebirth(above=7)]
    assert [(x.boot, x.newest) for actions in told for x in of(actions, a.Forgot)] == [(4, 7), (7, 7)]
    assert of(born(8, b"restored"), a.DeviceUp)
    assert bench.state.attempts[1].cohort["anna"].phase == "called"
    bench.say("anna", m.Accept(attempt=1), boot=8, seq=1)
    assert bench.state.attempts[1].cohort["anna"].phase == "working"
    assert not [
        x for x in born(8, b"restored") if isinstance(x, a.Forgot)
    ]  # it says again each minute that it is there


def test_a_coordinator_that_went_back_may_ask_for_older_rounds_in_a_later_epoch_only():
    half, state = device()
    later = m.Work(attempt=5, version=4, model_digest=bytes(32), seconds=0.0, spec=b"{}")
    older = m.Work(attempt=3, version=2, model_digest=bytes(32), seconds=0.0, spec=b"{}")
    cmd(half, state, later, epoch=7, seq=1)
    assert "older than 5" in reasons(cmd(half, state, older, epoch=7, seq=2))
    cmd(half, state, older, epoch=8, seq=1)
    assert (state.job.attempt, state.job.epoch) == (3, 8)
    assert "from global model 9 and not 2" in reasons(
        cmd(half, state, m.Work(attempt=3, version=9, model_digest=bytes(32), seconds=0.0, spec=b"{}"), epoch=8, seq=2)
    )


def test_a_deadline_keeps_the_time_that_had_gone_before_a_crash():
    bench = Bench()
    bench.do(e.AbortRound(0.0, 1, "anew"))
    bench.do(e.OpenRound(0.0, 2, {"anna": b""}, 100.0, 1))
    kept = bench.state.dump()
    for _ in range(90):
        bench.now += 1.0
        if of(bench.do(e.Tick(bench.now)), a.Save):
            kept = bench.state.dump()
    state = type(bench.state).load(kept)
    bench.half.step(state, e.Start(5000.0, state.epoch + 1))
    assert 5010.0 <= state.attempts[2].deadline <= 5010.0 + 11.0


def test_rounds_that_all_decline_are_not_remembered_for_ever():
    bench = Bench(keep=4)
    bench.do(e.AbortRound(0.0, 1, "anew"))
    for number in range(2, 30):
        bench.do(e.OpenRound(bench.now, number, {"anna": b"", "ben": b""}, None, 1))
        for name in ("anna", "ben"):
            bench.say(name, m.Decline(attempt=number, reason="battery"))
    assert len(bench.state.attempts) <= 5


@pytest.mark.parametrize(("parts", "most"), [(0, 1), (4, 3), (5, 3), (9, 5), (100, 8)])
def test_of_rounds_with_many_devices_fewer_are_remembered(parts, most):
    """The last one that is over always is: an offer that comes late gets its receipt again."""
    bench = Bench(keep=8, keep_parts=parts)
    bench.do(e.AbortRound(0.0, 1, "anew"))
    for number in range(2, 20):
        bench.do(e.OpenRound(bench.now, number, {"anna": b"", "ben": b""}, None, 1))
        for name in ("anna", "ben"):
            bench.say(name, m.Decline(attempt=number, reason="battery"))
    assert len(bench.state.attempts) == most + 1
