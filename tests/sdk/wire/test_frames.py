"""Frames, messages and topics: round trips, bounds, and signatures."""

from __future__ import annotations

import dataclasses
import struct
import zlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.errors import ConfigError, TooLarge, WireError
from talaria.wire import messages as m
from talaria.wire.frames import MAX_FRAME, MAX_PAYLOAD, Frame, Header, decode_frame, encode_frame, signed_by
from talaria.wire.signing import Signer, verified
from talaria.wire.topics import Topic, coordinator_filters, device_filters, matches, parse

NUMBERS = st.integers(0, 2**53)
HEADERS = st.builds(
    Header,
    type=st.text("abcdefgh", min_size=1, max_size=16),
    fleet=st.text("abcdefgh", min_size=1, max_size=36),
    device=st.text("abc-", max_size=36),
    boot=NUMBERS,
    seq=NUMBERS,
    attempt=NUMBERS,
    xfer=st.text("0123456789abcdef", max_size=32),
    idx=NUMBERS,
    off=NUMBERS,
)
KEY = Signer.of(bytes(range(32)))


@given(HEADERS, st.binary(max_size=500), st.booleans())
def test_a_frame_comes_back(header, payload, signed):
    data = encode_frame(header, payload, KEY if signed else None)
    frame = decode_frame(data)
    assert (dataclasses.replace(frame.header, sig=b""), frame.payload) == (header, payload)
    assert signed_by(frame, KEY.public) == signed
    assert not signed_by(frame, Signer.generate().public)


@given(HEADERS, st.binary(max_size=2000))
def test_a_frame_is_the_same_where_the_sum_of_its_payload_is_known(header, payload):
    assert encode_frame(header, payload, crc=zlib.crc32(payload)) == encode_frame(header, payload)


@given(HEADERS, st.binary(max_size=100), st.data())
def test_a_frame_with_one_flipped_bit_is_refused(header, payload, data):
    good = bytearray(encode_frame(header, payload, KEY))
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    good[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        decode_frame(bytes(good))


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data):
    with pytest.raises(WireError):
        decode_frame(data)
    with pytest.raises(WireError):
        decode_frame(b"FLF1" + data)


def test_a_signature_covers_header_and_body():
    frame = decode_frame(encode_frame(Header("work", "watch", "dev-1", boot=3, seq=9), b"model", KEY))
    assert signed_by(frame, KEY.public)
    for other in (
        Frame(frame.header, b"bodx"),
        Frame(dataclasses.replace(frame.header, device="dev-2"), b"model"),
        Frame(dataclasses.replace(frame.header, seq=10), b"model"),
        Frame(dataclasses.replace(frame.header, boot=4), b"model"),
        Frame(dataclasses.replace(frame.header, sig=b""), b"model"),
    ):
        assert not signed_by(other, KEY.public)


def test_the_largest_frame_passes_and_one_byte_more_does_not():
    assert len(decode_frame(encode_frame(Header("c", "f"), bytes(MAX_PAYLOAD))).payload) == MAX_PAYLOAD
    with pytest.raises(TooLarge, match="chunks"):
        encode_frame(Header("c", "f"), bytes(MAX_PAYLOAD + 1))
    with pytest.raises(TooLarge, match="unread"):
        decode_frame(bytes(MAX_FRAME + 1))


def sealed(fields: object, payload: bytes = b"") -> bytes:
    """A frame with any header and a right checksum."""
    head = fields if isinstance(fields, bytes) else msgpack.packb(fields)
    whole = b"FLF1" + struct.pack("<H", len(head)) + head + payload
    return whole + struct.pack("<I", zlib.crc32(whole))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"v": 4, "l": 0, "t": "x", "f": "y"}, "version 4 is unknown; this side speaks 3"),
        ({"v": 2, "l": 0, "t": "x", "f": "y"}, "version 2 is unknown; this side speaks 3"),
        ({"v": 3, "l": 5, "t": "x", "f": "y"}, "declares a payload of 5"),
        ({"v": 3, "l": 0, "t": "x"}, "header fields"),
        ({"v": 3, "l": 0, "t": "x", "f": "y", "z": 1}, "header fields"),
        ({"v": 3, "l": 0, "t": 3, "f": "y"}, "type"),
        ({"v": 3, "l": 0, "t": "x", "f": "y", "s": -1}, "seq"),
        ({"v": 3, "l": 0, "t": "x", "f": "y", "s": True}, "seq"),
        ({"v": 3, "l": 0, "t": "x", "f": "y", "b": 2**60}, "boot"),
        ({"v": 3, "l": 0, "t": "x", "f": "y", "k": b"short"}, "signature"),
        ({"v": 3, "l": 0, "t": "x" * 17, "f": "y"}, "type"),
        ([1, 2], "not a map"),
        (b"\xc1", "msgpack"),
        (b"\x81\x01\x02", "msgpack"),
        (bytes(1025), "1025"),
    ],
)
def test_a_wrong_header_is_refused_by_name(fields, what):
    with pytest.raises(WireError, match=what):
        decode_frame(sealed(fields))


# ---- messages --------------------------------------------------------------------------------------------

HASH = bytes(32)
EXAMPLES = [
    m.CoordinatorBirth(online=True, key=KEY.public, chunk=1000, credit=8, max_update=10**6, retry=2.0, spec=b"s"),
    m.DeviceBirth(online=False, key=b"", profile=b"p"),
    m.CompactManifest(of=HASH, size=2500, chunk=1000, sha256=HASH, hashes=bytes(96), nonce=bytes(16)),
    m.WantCompact(model_digest=HASH, mask=b"\x05"),
    m.WantChanges(model_digest=HASH, mask=b"", base=HASH, held=HASH),
    m.ModelManifest(version=3, size=2500, chunk=1000, sha256=HASH, hashes=bytes(96), nonce=bytes(16)),
    m.Offer(attempt=1, base_version=0, base_digest=HASH, size=1, chunk=1000, sha256=HASH, hashes=HASH, nonce=bytes(16)),
    m.Work(attempt=1, version=2, model_digest=HASH, seconds=1.5, spec=b""),
    m.Accept(attempt=1),
    m.Decline(attempt=1, reason="no power"),
    m.Grant(attempt=1, xfer="ab", bitmap=b"\x01", credit=8),
    m.Need(attempt=1, xfer="ab", bitmap=b"\x01", credit=8),
    m.Receipt(attempt=1, sha256=HASH, outcome="stored", reason=""),
    m.Abort(attempt=1, reason="over"),
    m.Rebirth(above=0),
    m.Want(model_digest=HASH, bitmap=b""),
    m.KitManifest(size=5, chunk=3, sha256=HASH, hashes=HASH * 2, nonce=bytes(16)),
    m.NoKit(reason="there is none"),
    m.WantKit(sha256=HASH, bitmap=b"\3"),
    m.Word(attempt=3, step=0, part=0, parts=2, data=b"word"),
    m.Told(attempt=3, step=1, part=1, parts=2, data=b"told"),
    m.Heard(attempt=3, step=0),
    m.Trouble(attempt=1, reason="disk full"),
    m.Goodbye(version=3),
    m.Leave(),
    m.Farewell(),
    m.Notice(text="shut out by the coordinator: 5 offences"),
]


def test_there_is_an_example_of_every_message():
    assert {type(x) for x in EXAMPLES} == set(m.BY_TYPE.values())


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda x: x.TYPE)
def test_a_message_comes_back(message):
    assert m.decode_message(Frame(Header(message.TYPE, "f"), m.encode_message(message))) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda x: x.TYPE)
def test_missing_unknown_and_mistyped_fields_are_refused(message):
    values = msgpack.unpackb(m.encode_message(message))
    cases = [values | {"extra": 1}] + [{k: v for k, v in values.items() if k != gone} for gone in values]
    cases += [values | {name: {"a": 1}} for name in values] + [values | {name: None} for name in values]
    cases += [[], 7, "text"]
    for case in cases:
        with pytest.raises(WireError):
            m.decode_message(Frame(Header(message.TYPE, "f"), msgpack.packb(case)))


def test_an_unknown_message_and_a_wrong_count_of_hashes_are_refused():
    with pytest.raises(WireError, match="unknown"):
        m.decode_message(Frame(Header("exec", "f"), b"\x80"))
    with pytest.raises(WireError, match="need 96"):
        m.ModelManifest(version=3, size=2500, chunk=1000, sha256=HASH, hashes=bytes(64), nonce=bytes(16))
    with pytest.raises(WireError, match="one of stored"):
        m.Receipt(attempt=1, sha256=HASH, outcome="maybe", reason="")


# ---- topics ----------------------------------------------------------------------------------------------

NAMES = st.from_regex("[a-z0-9][a-z0-9-]{0,35}", fullmatch=True)
TOPICS = st.one_of(
    st.builds(Topic, fleet=st.just("watch"), kind=st.sampled_from(["co/state", "co/model"])),
    st.builds(Topic, fleet=st.just("watch"), kind=st.sampled_from(["state", "cmd", "evt"]), device=NAMES),
    st.builds(
        Topic,
        fleet=st.just("w_1"),
        kind=st.sampled_from(["up", "dn"]),
        device=NAMES,
        xfer=st.text("0af", min_size=1, max_size=32),
    ),
    st.builds(
        Topic, fleet=st.just("watch"), kind=st.just("m"), model8=st.just("0123abcd"), index=st.integers(0, 999_999)
    ),
)


@given(TOPICS)
def test_a_topic_comes_back_with_at_most_six_slashes(topic):
    text = str(topic)
    assert parse(text) == topic
    assert text.count("/") <= 6


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fl/1/watch",
        "fl/2/watch/co/state",
        "fl/1/Watch/co/state",
        "fl/1//co/state",
        "fl/1/watch/co/evil",
        "fl/1/watch/d/../cmd",
        "fl/1/watch/d/dev_1/cmd",
        "fl/1/watch/d/dev/cmd/more",
        "fl/1/watch/d/dev/up",
        "fl/1/watch/d/dev/up/../../x",
        "fl/1/watch/d/" + "a" * 37 + "/cmd",
        "fl/1/watch/m/0123abcd/01",
        "fl/1/watch/m/0123abcd/-1",
        "fl/1/watch/m/0123ABCD/1",
        "fl/1/watch/d/dev/cmd\n",
        "fl/1/watch/d/dév/cmd",
        "fl/1/+/co/state",
        "x" * 100_000,
    ],
)
def test_every_other_topic_is_refused(text):
    with pytest.raises(WireError, match="topic"):
        parse(text)


def test_each_side_hears_what_it_must_and_no_more():
    def heard(filters, topic):
        return any(matches(f, topic) for f in filters)

    device, coordinator = device_filters("watch", "a"), coordinator_filters("watch")
    for topic in ("co/state", "co/model", "m/0123abcd/3", "d/a/cmd", "d/a/dn/x"):
        assert heard(device, f"fl/1/watch/{topic}")
    for topic in ("d/b/cmd", "d/b/dn/x", "d/a/evt", "d/a/up/x", "d/b/state"):
        assert not heard(device, f"fl/1/watch/{topic}")
    for topic in ("co/state", "d/a/state", "d/b/evt", "d/b/up/x"):
        assert heard(coordinator, f"fl/1/watch/{topic}")
    for topic in ("co/model", "m/0123abcd/3", "d/a/cmd", "d/a/dn/x"):
        assert not heard(coordinator, f"fl/1/watch/{topic}")
    assert not heard(device, "fl/1/other/co/state")
    with pytest.raises(WireError):
        device_filters("watch", "a/#")


# ---- keys ------------------------------------------------------------------------------------------------


def test_a_key_is_kept_and_never_shown():
    key = Signer.generate()
    again = Signer.of(key.seed())
    assert again.public == key.public
    assert verified(key.public, again.sign(b"x"), b"x")
    assert key.seed().hex() not in repr(key) + str(key)
    assert not verified(key.public, b"", b"x")
    assert not verified(b"short", key.sign(b"x"), b"x")
    with pytest.raises(ConfigError, match="32"):
        Signer.of(b"short")


def test_a_message_is_never_as_large_as_a_chunk_may_be():
    parcel = m.ModelManifest(
        version=1, size=m.MAX_CHUNKS * MAX_PAYLOAD, chunk=MAX_PAYLOAD, sha256=bytes(32),
        hashes=bytes(32 * m.MAX_CHUNKS), nonce=bytes(16),
    )  # fmt: skip
    largest = m.encode_message(parcel)
    assert m.decode_message(Frame(Header("model", "watch"), largest)) == parcel
    assert len(largest) <= m.MAX_MESSAGE
    with pytest.raises(TooLarge, match=f"{m.MAX_MESSAGE + 1} bytes are above {m.MAX_MESSAGE}; refused unread"):
        m.decode_message(Frame(Header("model", "watch"), bytes(m.MAX_MESSAGE + 1)))
