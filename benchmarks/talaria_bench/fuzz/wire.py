"""Fuzz targets of the wire: frames, messages, topics, chunks, tensors, updates and sums of them, keys and enrolment."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from functools import partial

import msgpack
import numpy as np

from talaria.aggregate.partial_sum import MaskClass, PartialSum
from talaria.bitmaps import indices_of
from talaria.errors import ConfigError, ModelError, WireError
from talaria.identity import enrolment
from talaria.model import masks
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.protocol.transfer import Receiver, transfer_of
from talaria.tensors import Tensors, is_float
from talaria.types import Update
from talaria.wire import codec, compact, download, messages, strict_safetensors, topics
from talaria.wire.broker_url import Address
from talaria.wire.changes import applied, changes
from talaria.wire.chunks import cut_of, describe
from talaria.wire.compression import squeeze, unsqueeze
from talaria.wire.frames import MAX_HEADER, VERSION, Frame, Header, decode_frame, encode_frame, signed_by
from talaria.wire.partial_sums import Bounds, decode_partial_sum, encode_partial_sum
from talaria.wire.signing import Signer
from talaria_bench.fuzz.target import Defect, Target

SIGNER = Signer.of(bytes(32))
TYPES = sorted(messages.BY_TYPE)
LAYOUT = ChannelLayout({"g": 4}, {"w": ((("g", 1),), ()), "b": ((("g", 1),),)})
MASK = ChannelMask(LAYOUT, {"g": (0, 2)})
DENSE: Tensors = {
    "w": np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6),
    "b": np.ones(4, np.float32),
    "n": np.arange(3),
}
COMPACT: Tensors = {"w": np.ones((2, 6), np.float32), "b": np.ones(2, np.float32), "n": np.arange(3)}
SCHEMA = codec.schema_of(DENSE)
LIMITS = codec.Limits(total=1 << 20)
MODEL = bytes(range(250)) * 4
CUT = describe(MODEL, 300)
CAP = 1 << 16
WORD = messages.encode_message(messages.Rebirth(above=0))
"""The message behind a fuzzed header."""


def every_message() -> list[messages.Message]:
    """One valid message of each type."""
    parcel = {"size": CUT.size, "chunk": CUT.chunk, "sha256": CUT.sha256, "hashes": CUT.hashes, "nonce": bytes(16)}
    asked = {"attempt": 1, "xfer": transfer_of(CUT.sha256), "bitmap": b"\x0f", "credit": 8}
    told = {"attempt": 1, "reason": "battery below 20 %"}
    return [
        messages.CoordinatorBirth(
            online=True, key=SIGNER.public, chunk=300, credit=8, max_update=10_000, retry=1.0, spec=b"{}"
        ),
        messages.DeviceBirth(online=True, key=SIGNER.public, profile=b"{}"),
        messages.ModelManifest(version=1, **parcel),  # type: ignore[arg-type]
        messages.Offer(attempt=1, base_version=1, base_digest=CUT.sha256, **parcel),  # type: ignore[arg-type]
        messages.Work(attempt=1, version=1, model_digest=CUT.sha256, seconds=10.0, spec=b'{"round":1}'),
        messages.Accept(attempt=1),
        messages.Decline(**told),  # type: ignore[arg-type]
        messages.Grant(**asked),  # type: ignore[arg-type]
        messages.Need(**asked),  # type: ignore[arg-type]
        messages.Receipt(attempt=1, sha256=CUT.sha256, outcome="stored", reason=""),
        messages.Abort(**told),  # type: ignore[arg-type]
        messages.Rebirth(above=0),
        messages.Notice(text="asked once others have left"),
        messages.Want(model_digest=CUT.sha256, bitmap=b"\x0f"),
        messages.CompactManifest(of=bytes(32), **parcel),  # type: ignore[arg-type]
        messages.WantCompact(model_digest=CUT.sha256, mask=masks.pack(MASK)),
        messages.WantChanges(model_digest=CUT.sha256, mask=b"", base=bytes(32), held=bytes(32)),
        messages.KitManifest(**parcel),  # type: ignore[arg-type]
        messages.NoKit(reason="there is none"),
        messages.WantKit(sha256=CUT.sha256, bitmap=b"\x0f"),
        messages.Word(attempt=1, step=0, part=0, parts=1, data=b"word"),
        messages.Told(attempt=1, step=1, part=0, parts=2, data=b"told"),
        messages.Heard(attempt=1, step=0),
        messages.Trouble(**told),  # type: ignore[arg-type]
        messages.Goodbye(version=1),
        messages.Leave(),
        messages.Farewell(),
    ]


def updates() -> list[bytes]:
    """The same update in every codec, with and without a mask."""
    dense = Update(
        tensors=DENSE, weight=5.0, client="anna", base_version=3, kind="delta", metrics={"val_accuracy": 0.5}
    )
    masked = dense.but(tensors=COMPACT, mask=MASK)
    ways = [(update, how) for update in (dense, masked) for how in ("raw", "fp16", "bf16", "int8", "topk:0.3")]
    found = [codec.encode_update(update, how, compress=False) for update, how in ways]
    return [*found, codec.encode_update(dense)]


def partial_sums() -> list[bytes]:
    """The sum of devices without a mask and with one, and of one that is masked alone."""
    masked = MaskClass(MASK, 3.0, 1)
    both = PartialSum(DENSE, None, (MaskClass(None, 9.0, 2), masked), "anna", 3, "delta")
    return [
        encode_partial_sum(one, LAYOUT, compress=False) for one in (both, PartialSum(COMPACT, MASK, (masked,), "anna"))
    ]


def targets() -> list[Target]:
    """All of them."""
    spoken = every_message()
    frames = [encode_frame(Header(m.TYPE, "watch", "anna", 1, 2), messages.encode_message(m), SIGNER) for m in spoken]
    models = [bytes([TYPES.index(m.TYPE)]) + messages.encode_message(m) for m in spoken]
    heads = [
        msgpack.packb({"v": VERSION, "l": len(WORD), "t": "rebirth", "f": "watch", "d": "anna", "b": 1, "k": bytes(64)})
    ]
    kinds = ("co/state", "co/model", "m/00112233/7", "d/anna/state", "d/anna/evt", "d/anna/up/ab", "d/anna/dn/ab")
    code = enrolment.Code("watch", "anna", bytes(16), bytes(16))
    request = enrolment.Request("watch", "anna", "-----BEGIN-----", SIGNER.public).signed(SIGNER, code)
    answer = enrolment.Answer("watch", "anna", "ca", "crt", SIGNER.public, "mqtts://b.example").signed(SIGNER)
    facts = strict_safetensors.unpack(updates()[0], most=9)[1]["talaria"].encode()
    raw, wire = strict_safetensors.pack(DENSE), (WireError,)
    numbers = np.sqrt(np.arange(2, 400, dtype=np.float32)).tobytes()
    part = compact.compacted(raw, MASK)
    about = strict_safetensors.parse_meta(strict_safetensors.unpack(part, most=9)[1], "talaria-compact")
    roots = np.sqrt(np.arange(1000, dtype=np.float32))
    older, newer = (strict_safetensors.pack({"w": roots * np.float32(by)}) for by in (1.0, 1.0001))
    quantized = compact.compacted(download.encoded(download.rounded(DENSE, "int8"), "int8"), MASK)
    return [
        Target("frame", _frame, wire, frames),
        Target("frame header", _header, wire, heads),
        Target("message", _message, wire, models),
        Target("topic", _topic, wire, [f"fl/1/watch/{kind}".encode() for kind in kinds]),
        Target("chunk", _chunk, wire, [struct.pack("<HH", i, 300 * i) + MODEL[300 * i :][:300] for i in range(4)]),
        Target("zstd", _unsqueeze, wire, [squeeze(bytes(1000) + MODEL), squeeze(numbers, 4), b"plain"]),
        Target("tensors", _tensors, wire, [raw, squeeze(raw), codec.encode_tensors(DENSE, codec="int8")]),
        Target("own tensors", _own, wire, [raw]),
        Target("part of a model", _part, wire, [part, quantized]),
        Target("changes", partial(_changes, older), wire, [changes(older, newer) or b""]),
        Target("facts of a part", _facts_of_part, wire, [json.dumps(about).encode()]),
        Target("packed mask", lambda data: masks.unpack(LAYOUT, data), (ModelError,), [masks.pack(MASK)]),
        Target("update", _update, wire, updates()),
        Target("update facts", _facts, wire, [facts]),
        Target("partial sum", _partial_sum, wire, partial_sums()),
        Target("code", _text(enrolment.Code.parse), (ConfigError,), [code.text().encode()]),
        Target("request", enrolment.Request.decode, (ConfigError,), [request.encode()]),
        Target("answer", enrolment.Answer.decode, (ConfigError,), [answer.encode()]),
        Target("broker", _text(Address.parse), (ConfigError,), [b"mqtts://me@b.example:8883", b"wss://[::1]:80/mqtt"]),
    ]


def _text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: parse(data.decode("utf-8", "replace"))


def _frame(data: bytes) -> None:
    frame = decode_frame(data)
    signed_by(frame, SIGNER.public)
    _said(frame)


def _header(data: bytes) -> None:
    head, model = data[: MAX_HEADER + 8], WORD
    whole = b"".join((b"FLF1", struct.pack("<H", len(head)), head, model))
    _said(decode_frame(whole + struct.pack("<I", zlib.crc32(whole))))


def _message(data: bytes) -> None:
    _said(Frame(Header(TYPES[(data or b"\0")[0] % len(TYPES)], "watch"), data[1:]))


def _said(frame: Frame) -> None:
    message = messages.decode_message(frame)
    again = messages.decode_message(Frame(frame.header, messages.encode_message(message)))
    if repr(again) != repr(message):
        raise Defect(f"a message that does not survive being sent: {message!r:.300} {again!r:.300}")
    if isinstance(message, messages.Parcel):
        cut = cut_of(message)
        if cut.count > messages.MAX_CHUNKS or sum(cut.place(i)[1] for i in range(cut.count)) != cut.size:
            raise Defect(f"chunks that do not cover their transfer: {cut!r:.300}")
    if isinstance(message, messages.Grant | messages.Need | messages.Want):
        indices_of(message.bitmap, 4)


def _topic(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    if str(topics.parse(text)) != text:
        raise Defect(f"a topic that is spelt in two ways: {text!a:.200}")


def _chunk(data: bytes) -> None:
    index, offset = struct.unpack("<HH", data[:4].ljust(4, b"\0"))
    receiver = Receiver(CUT)
    receiver.take(Frame(Header(messages.CHUNK, "watch", idx=index, off=offset), data[4:]), 0.0)
    if data[4:] != MODEL[300 * index :][:300]:
        raise Defect(f"chunk {index} was taken with other bytes")


def _unsqueeze(data: bytes) -> None:
    if len(unsqueeze(data, CAP)) > CAP:
        raise Defect("more bytes than the cap")


def _tensors(data: bytes) -> None:
    _fitting(codec.decode_tensors(data, schema=SCHEMA, limits=LIMITS))


def _own(data: bytes) -> None:
    codec.decode_tensors(data, schema=None, limits=LIMITS)


def _update(data: bytes) -> None:
    decode = partial(codec.decode_update, schema=SCHEMA, layout=LAYOUT, limits=LIMITS, client="anna")
    update = decode(data)
    _fitting(update.tensors, update.mask)
    again = decode(codec.encode_update(update))
    if (again.mask, again.metrics, again.weight) != (update.mask, update.metrics, update.weight):
        raise Defect("an update that does not survive being sent")


def _partial_sum(data: bytes) -> None:
    bounds = Bounds(clients=3, classes=4, update=LIMITS)
    decode = partial(decode_partial_sum, schema=SCHEMA, bounds=bounds, layout=LAYOUT, client="anna")
    total = decode(data)
    if total.clients > bounds.clients or not 0 < total.weight <= bounds.clients * LIMITS.max_weight:
        raise Defect(f"a sum of {total.clients} clients that weigh {total.weight}")
    for update in total.updates():
        _fitting(update.tensors, update.mask)
    again = decode(encode_partial_sum(total, LAYOUT))
    if (again.classes, again.union) != (total.classes, total.union):
        raise Defect("a partial sum that does not survive being sent")


def _part(data: bytes) -> None:
    found = compact.opened(data, SCHEMA, LAYOUT)
    if found is not None:
        _fitting(found.tensors, found.mask)
        compact.model_of(data)


def _changes(before: bytes, data: bytes) -> None:
    if len(made := applied(data, before)) != len(before):
        raise Defect(f"changes of {len(before)} bytes made {len(made)}")


def _facts_of_part(data: bytes) -> None:
    planes = codec.bitmaps_of(MASK) | COMPACT
    _part(strict_safetensors.pack(planes, {"talaria-compact": data.decode("utf-8", "replace")}))


def _facts(data: bytes) -> None:
    _update(strict_safetensors.pack(DENSE, {"talaria": data.decode("utf-8", "replace")}))


def _fitting(tensors: Tensors, mask: ChannelMask | None = None) -> None:
    like = DENSE if mask is None else {n: v[: len(mask.kept["g"])] if n != "n" else v for n, v in DENSE.items()}
    for name, value in like.items():
        if tensors[name].shape != value.shape or tensors[name].dtype != value.dtype:
            raise Defect(f"tensor {name!r} came as {tensors[name].dtype} {tuple(tensors[name].shape)}")
        if is_float(value) and not bool(np.isfinite(tensors[name]).all()):
            raise Defect(f"tensor {name!r} came with values that are not finite")
