"""Writes the vectors of docs/PROTOCOL.md: what stands on the wire, for whoever writes a device in another language.

``python tests/vectors/make.py`` writes them anew; test_vectors.py makes them again and compares byte for byte. Bytes
stand in JSON as ``{"hex": ...}``. Vectors of a version are promises: what changes them needs a new version.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from talaria import seeds
from talaria.bitmaps import bits_of
from talaria.federated.run import Run
from talaria.identity.enrolment import Answer, Code, Request, fingerprint
from talaria.model import masks
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.model.spec import ModelSpec
from talaria.protocol.transfer import ReplayWindow, transfer_of
from talaria.training import augment
from talaria.training.batching import batches, cut, kept
from talaria.types import Recipe, Update, as_delta
from talaria.wire import download, strict_safetensors
from talaria.wire import messages as m
from talaria.wire.chunks import describe
from talaria.wire.codec import encode_tensors, encode_update
from talaria.wire.compact import compacted
from talaria.wire.feedback import compensate, remainder
from talaria.wire.frames import Header, encode_frame
from talaria.wire.signing import Signer
from talaria.wire.topics import Topic

HERE = Path(__file__).parent
FLEET, DEVICE = "watch", "anna"
COORDINATOR, OWN = Signer.of(bytes(32)), Signer.of(bytes(range(32)))
RUN = Run(spec=ModelSpec("mlp", (4,), 3), algorithm="fedavg", rounds=10, seed=2**62 + 1, recipe=Recipe(batch=8))
LAYOUT = ChannelLayout(
    {"conv1": 10, "fc": 3}, {"conv1.weight": ((("conv1", 1),), ()), "fc.weight": ((("fc", 1),), (("conv1", 2),))}
)
MASK = ChannelMask(LAYOUT, {"conv1": (0, 2, 9), "fc": (1, 2)})


def plain(value: Any) -> Any:
    """As JSON can hold it."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def text(value: Any) -> bytes:
    return (json.dumps(plain(value), indent=1, ensure_ascii=False) + "\n").encode()


def content(count: int, name: str) -> bytes:
    """Bytes drawn by rule."""
    return seeds.words(-(-count // 8), 0, name, 0, "vector").astype("<u8").tobytes()[:count]


def listed(value: np.ndarray, dtype: bool = True) -> dict[str, Any]:
    """An array as JSON can hold it."""
    shown = {"shape": list(value.shape), "values": value.reshape(-1).tolist()}
    return {"dtype": value.dtype.name, **shown} if dtype else shown


def numbers(shape: tuple[int, ...], name: str) -> np.ndarray:
    """float32 values in -1..1 that no codec holds exactly."""
    draws = seeds.draws(0, name, 0, "vector")
    return (2 * draws.uniform(*shape) - 1).astype(np.float32)


def spoken() -> list[tuple[str, Header, m.Message, Signer]]:
    """One of each message: its topic, header and who signs it."""
    model, update = describe(content(300, "model"), 128), describe(content(100, "update"), 64)
    parcel = {"size": model.size, "chunk": model.chunk, "sha256": model.sha256, "hashes": model.hashes}
    own = {"size": update.size, "chunk": update.chunk, "sha256": update.sha256, "hashes": update.hashes}
    nonce = bytes(range(16))
    name = transfer_of(update.sha256)
    co, dev = "co/state", "evt"
    told = {"chunk": 122880, "credit": 8, "max_update": 1 << 26, "retry": 2.5, "spec": RUN.to_json().encode()}
    least = {"chunk": 4096, "credit": 1, "max_update": 1, "retry": 2, "spec": b""}
    late = b'{"round": 4, "after": 2}'
    ends = {o: "" if o == "stored" else "why — in words" for o in m.OUTCOMES}
    said: list[tuple[str, m.Message]] = [
        (co, m.CoordinatorBirth(online=True, key=COORDINATOR.public, **told)),
        (co, m.CoordinatorBirth(online=False, key=b"", **least)),
        ("co/model", m.ModelManifest(**parcel, nonce=nonce, version=3)),
        ("cmd", m.ModelManifest(**parcel, nonce=nonce, version=3)),
        ("cmd", m.CompactManifest(**parcel, nonce=nonce, of=hashlib.sha256(b"the whole").digest())),
        ("cmd", m.KitManifest(**parcel, nonce=nonce)),
        ("cmd", m.NoKit(reason="there is none")),
        ("cmd", m.Told(attempt=7, step=1, part=0, parts=2, data=b"the first half, ")),
        ("cmd", m.Heard(attempt=7, step=0)),
        ("cmd", m.Work(attempt=7, version=3, model_digest=model.sha256, seconds=0.0, spec=b'{"round": 4}')),
        ("cmd", m.Work(attempt=2**53, version=2**32, model_digest=model.sha256, seconds=59.5, spec=late)),
        ("cmd", m.Grant(attempt=7, xfer=name, bitmap=b"\x03", credit=8)),
        ("cmd", m.Need(attempt=7, xfer=name, bitmap=b"\x02", credit=1)),
        *(("cmd", m.Receipt(attempt=7, sha256=update.sha256, outcome=o, reason=why)) for o, why in ends.items()),
        ("cmd", m.Abort(attempt=7, reason="the round is closed")),
        ("cmd", m.Rebirth(above=1763878000000)),
        ("cmd", m.Farewell()),
        ("cmd", m.Notice(text="shut out")),
        ("cmd", m.Trouble(attempt=0, reason="two with one name")),
        ("state", m.DeviceBirth(online=True, key=OWN.public, profile=b"{}", process=b"\xff" * 16)),
        ("state", m.DeviceBirth(online=False, key=b"", profile=b"")),
        (dev, m.Accept(attempt=7)),
        (dev, m.Decline(attempt=7, reason="no power")),
        (dev, m.Want(model_digest=model.sha256, bitmap=b"")),
        (dev, m.Want(model_digest=model.sha256, bitmap=bits_of({0, 2}, 3))),
        (dev, m.WantCompact(model_digest=model.sha256, mask=masks.pack(MASK))),
        (dev, m.WantKit(sha256=b"", bitmap=b"")),
        (dev, m.Word(attempt=7, step=0, part=0, parts=1, data=b"a word")),
        (dev, m.WantKit(sha256=model.sha256, bitmap=bits_of({1}, 3))),
        (dev, m.Offer(**own, nonce=nonce, attempt=7, base_version=3, base_digest=model.sha256)),
        (dev, m.Trouble(attempt=7, reason="20 wrong chunks")),
        (dev, m.Goodbye(version=10)),
        (dev, m.Leave()),
        (dev, m.WantChanges(model_digest=model.sha256, mask=b"", base=update.sha256, held=update.sha256)),
    ]
    out = []
    for number, (kind, message) in enumerate(said, 1):
        mine = kind in ("state", dev)
        device = "" if kind.startswith("co/") else DEVICE
        seq = number if kind in ("cmd", dev) else 0
        header = Header(message.TYPE, FLEET, device, boot=1763878000000 if mine else 5, seq=seq)
        out.append((str(Topic(FLEET, kind, device)), header, message, OWN if mine else COORDINATOR))  # type: ignore[arg-type]
    return out


def frames() -> bytes:
    listed = []
    for topic, header, message, signer in spoken():
        payload = m.encode_message(message)
        listed.append(
            {
                "topic": topic,
                "header": {f.name: getattr(header, f.name) for f in fields(header) if f.name != "sig"},
                "message": {f.name: getattr(message, f.name) for f in fields(message)},
                "public": signer.public,
                "unsigned": encode_frame(header, payload),
                "signed": encode_frame(header, payload, signer),
            }
        )
    chunk = content(300, "model")[128:256]
    sent = Header(m.CHUNK, FLEET, DEVICE, boot=5, attempt=0, xfer="0123456789abcdef", idx=1, off=128)
    listed.append(
        {
            "topic": str(Topic(FLEET, "dn", DEVICE, "0123456789abcdef")),
            "header": {f.name: getattr(sent, f.name) for f in fields(sent) if f.name != "sig"},
            "payload": chunk,
            "unsigned": encode_frame(sent, chunk),
        }
    )
    return text({"seeds": {"coordinator": COORDINATOR.seed(), "device": OWN.seed()}, "frames": listed})


def refused() -> bytes:
    """Frames of which nothing may be used, and why."""
    good = encode_frame(Header("accept", FLEET, DEVICE, boot=1, seq=1), m.encode_message(m.Accept(attempt=1)))
    sealed = Header("accept", FLEET, DEVICE, boot=1, seq=1)

    def of(payload: bytes) -> bytes:
        return encode_frame(sealed, payload)

    cases = {
        "empty": b"",
        "another magic": b"FLF2" + good[4:],
        "a flipped bit": good[:20] + bytes([good[20] ^ 1]) + good[21:],
        "cut short": good[:-5],
        "bytes behind it": good + b"\0",
        "a header beyond its bound": b"FLF1\xff\xff" + good[6:],
        "an unknown type": encode_frame(Header("hello", FLEET, DEVICE), b"\x80"),
        "a field is missing": of(b"\x80"),
        "a field too many": of(bytes.fromhex("82a7617474656d707401a16100")),
        "a number below its bound": of(bytes.fromhex("81a7617474656d7074ff")),
        "a number beyond its bound": of(bytes.fromhex("81a7617474656d7074cf0020000000000001")),
        "another type of value": of(bytes.fromhex("81a7617474656d7074a131")),
        "bytes behind the message": of(bytes.fromhex("81a7617474656d70740100")),
        "a float for a whole number": of(bytes.fromhex("81a7617474656d7074cb3ff0000000000000")),
        "text that is no UTF-8": encode_frame(
            Header("error", FLEET, DEVICE), bytes.fromhex("82a7617474656d707401a6726561736f6ea1ff")
        ),
        "a type that every object has": encode_frame(Header("toString", FLEET, DEVICE), b"\x80"),
    }
    return text(cases)


def transfers() -> bytes:
    data = content(1000, "model")
    cuts = [describe(data, chunk) for chunk in (1000, 999, 300, 125)]
    sets = (([0, 9], 10), ([], 3), ([7, 8, 15], 16), ([3599], 3600))
    steps = [(1, 1), (1, 1), (1, 3), (1, 2), (1, 70), (1, 6), (1, 7), (2, 1), (1, 71), (2, 0), (2, 2)]
    window = ReplayWindow()
    return text(
        {
            "content": data,
            "cuts": [{**vars(c), "name": transfer_of(c.sha256)} for c in cuts],
            "bitmaps": [{"indices": i, "count": n, "bitmap": bits_of(i, n)} for i, n in sets],
            "window": [{"boot": b, "seq": s, "fresh": window.fresh(b, s)} for b, s in steps],
        }
    )


def draws() -> bytes:
    asked = [(0, "", 1, "cohort"), (7, "anna", 3, "train"), (2**62 + 1, "Zoë", 0, "train/layers/drop")]
    listed = []
    for key in asked:
        factors = {share: kept(seeds.draws(*key), share, 2, 3).reshape(-1).tolist() for share in (0.0, 0.25, 1.0)}
        listed.append(
            {
                "seed": str(key[0]),
                "client": key[1],
                "round": key[2],
                "purpose": key[3],
                "drawn": str(seeds.seed_of(*key)),
                "words": [f"{word:016x}" for word in seeds.words(9, *key).tolist()],
                "uniform": seeds.draws(*key).uniform(5).tolist(),
                "order": seeds.order(17, *key),
                "integers": seeds.draws(*key).integers(-3, 4, 12).tolist(),
                "normal": [float(f"{v:.9g}") for v in seeds.draws(*key).normal(5)],
                "dropout": [{"share": share, "factors": drawn} for share, drawn in factors.items()],
            }
        )
    epochs = []
    for count, size, steps in ((17, 8, 5), (18, 8, 3), (5, 8, 2), (3, 1, 4), (1, 8, 1)):
        found = batches(count, size, steps, seeds.draws(7, "anna", 3, "train"))
        epochs.append({"count": count, "size": size, "steps": steps, "batches": [one.tolist() for one in found]})
    pieces = [len(piece) for piece in cut(np.arange(17), 8)]
    return text({"draws": listed, "batches": epochs, "pieces of 17 in eights": pieces})


def channels() -> bytes:
    dense = {"conv1.weight": numbers((10, 2), "dense"), "fc.weight": numbers((3, 20), "dense2")}
    return text(
        {
            "sizes": dict(LAYOUT.sizes),
            "axes": {k: [[list(part) for part in axis] for axis in axes] for k, axes in LAYOUT.axes.items()},
            "kept": {g: list(k) for g, k in MASK.kept.items()},
            "digest": MASK.digest,
            "bitmaps": {g: bits_of(MASK.kept[g], n) for g, n in LAYOUT.sizes.items()},
            "dense": {k: listed(v, dtype=False) for k, v in dense.items()},
            "compact": {k: listed(v, dtype=False) for k, v in masks.gather(dense, MASK).items()},
        }
    )


def tensors() -> dict[str, np.ndarray]:
    return {
        "fc.weight": numbers((4, 5), "weight"),
        "fc.bias": numbers((5,), "bias"),
        "bn.running_var": np.abs(numbers((3,), "variance")),
        "bn.num_batches_tracked": np.array(6, np.int64),
    }


def updates() -> dict[str, bytes]:
    """An update in each codec, with what was left out of it, and one under a mask."""
    new = tensors()
    old = {k: np.asarray(v * 0.5 if v.dtype.kind == "f" else v - 1).astype(v.dtype) for k, v in new.items()}
    value = Update(new, 18.0, client=DEVICE, base_version=3, metrics={"loss": 0.1})
    out = {"update-raw.bin": encode_update(value, compress=False)}
    left, delta = {}, as_delta(value, old)
    for codec in ("fp16", "bf16", "int8", "topk:0.25"):
        out[f"update-{codec.partition(':')[0]}.bin"] = encode_update(delta, codec, compress=False)
        left[codec.partition(":")[0]] = {k: v.reshape(-1).tolist() for k, v in remainder(delta, codec).items()}
    again = compensate(delta, remainder(delta, "int8"))
    out["update-int8-fed-back.bin"] = encode_update(again, "int8", compress=False)
    dense = {"conv1.weight": numbers((10, 2), "dense"), "fc.weight": numbers((3, 20), "dense2")}
    narrow = Update(masks.gather(dense, MASK), 1.5, client=DEVICE, mask=MASK)
    out["update-masked.bin"] = encode_update(narrow, compress=False)
    out["model-compact.bin"] = compacted(download.encoded(download.rounded(dense, "int8"), "int8"), MASK)
    shown = {n: {k: listed(v) for k, v in t.items()} for n, t in (("new", new), ("old", old))}
    facts = {"client": DEVICE, "weight": 18.0, "base_version": 3, "metrics": {"loss": 0.1}}
    out["model.bin"] = encode_tensors(old)
    coarse = {how: download.rounded(old, how) for how in ("fp16", "bf16", "int8")}
    out |= {f"model-{how}.bin": download.encoded(model, how) for how, model in coarse.items()}
    models = {how: {k: listed(v) for k, v in model.items()} for how, model in coarse.items()}
    out["updates.json"] = text({"facts": facts, "tensors": shown, "left out": left, "models": models})
    return out


def enrolment() -> bytes:
    code = Code(FLEET, DEVICE, fingerprint(b"an authority as DER", COORDINATOR.public), bytes(range(16)))
    request = Request(FLEET, DEVICE, "a certificate request as PEM\n", OWN.public).signed(OWN, code)
    certificates = "an authority as PEM\n", "a certificate as PEM\n"
    answer = Answer(FLEET, DEVICE, *certificates, COORDINATOR.public, "mqtts://broker:8883").signed(COORDINATOR)
    return text(
        {
            "code": code.text(),
            "code's public key": code.signer().public,
            "authority": b"an authority as DER",
            "fingerprint": code.fingerprint,
            "device's seed": OWN.seed(),
            "request": request.encode().decode(),
            "answer": answer.encode().decode(),
        }
    )


def made() -> dict[str, bytes]:
    """Every file that can be made again to the byte, by its name."""
    return {
        "frames.json": frames(),
        "refused.json": refused(),
        "transfers.json": transfers(),
        "draws.json": draws(),
        "masks.json": channels(),
        "enrolment.json": enrolment(),
        "run.json": RUN.to_json().encode(),
        **updates(),
    }


def stepped() -> dict[str, bytes]:
    """A program and one step of it: its bytes depend on what measured its parity, and its outputs on the processor's
    rounding, so that these are compared as numbers."""
    import torch

    from talaria.model import zoo
    from talaria.programs.build import build
    from talaria.programs.program import Program

    torch.manual_seed(0)
    layers = OrderedDict(
        fc=torch.nn.Linear(6, 5), relu=torch.nn.ReLU(), drop=torch.nn.Dropout(0.25), head=torch.nn.Linear(5, 3)
    )
    spec = zoo.keep(torch.nn.Sequential(layers), (6,), 3)
    data = build(spec, "all", Recipe(momentum=0.9, weight_decay=0.01, smoothing=0.1))
    program = Program(data)
    shapes = {"fc.weight": (5, 6), "fc.bias": (5,), "head.weight": (3, 5), "head.bias": (3,)}
    weights = {name: numbers(shape, name) for name, shape in shapes.items()}
    given = program.feed(
        weights,
        {k: v / 8 for k, v in weights.items()},
        numbers((4, 6), "x"),
        np.array([0, 1, 2, 1]),
        0.1,
        {"drop": kept(seeds.draws(0, "", 0, "vector"), 0.25, 4, 5)},
    )
    step = {f"in/{k}": v for k, v in given.items()} | {f"out/{k}": v for k, v in program.run(given).items()}
    return {"step.program": data, "step.safetensors": strict_safetensors.pack(step)}


def augmented() -> dict[str, bytes]:
    """What each augmentation makes of a batch by the draws of (7, "anna", 3, "train"), likewise."""
    given = {"imu": numbers((3, 6, 30), "imu"), "crop_flip": numbers((4, 2, 17, 8), "crop_flip")}
    found = {name: augment.get(name)(x, seeds.draws(7, "anna", 3, "train")) for name, x in given.items()}
    tensors = {f"{name}/in": x for name, x in given.items()} | {f"{name}/out": x for name, x in found.items()}
    return {"augment.safetensors": strict_safetensors.pack(tensors)}


if __name__ == "__main__":
    for name, data in {**made(), **stepped(), **augmented()}.items():
        (HERE / name).write_bytes(data)
