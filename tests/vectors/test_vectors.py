"""The vectors beside this file are what the code makes today, to the byte, and what it reads back."""

import importlib.util
import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from tolerance import roundings

from talaria.errors import WireError
from talaria.model import masks
from talaria.programs.program import Program
from talaria.tensors import equal
from talaria.wire import compact, download, messages, strict_safetensors
from talaria.wire.codec import TensorSpec, decode_tensors, decode_update
from talaria.wire.frames import decode_frame, signed_by

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("talaria_vectors", HERE / "make.py")
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)


@pytest.fixture(scope="module")
def made():
    return make.made()


def read(name):
    return json.loads((HERE / name).read_text())


def taken(data):
    return messages.decode_message(decode_frame(data))


def test_every_file_is_made_again_to_the_byte(made):
    kept = {p.name for p in HERE.iterdir() if p.suffix in (".json", ".bin")}
    assert kept == set(made)
    for name, data in made.items():
        assert (HERE / name).read_bytes() == data, (
            f"{name} differs: its format changed, or python {make.__file__} again"
        )
    assert sum(map(len, made.values())) < 100_000


def test_every_frame_is_read_back_and_its_signature_holds():
    frames = read("frames.json")["frames"]
    for one in frames:
        frame = decode_frame(bytes.fromhex(one["unsigned"]["hex"]))
        assert {f.name: getattr(frame.header, f.name) for f in fields(frame.header)} == {**one["header"], "sig": b""}
        if "message" in one:
            message = messages.decode_message(frame)
            assert make.plain({f.name: getattr(message, f.name) for f in fields(message)}) == one["message"]
            signed = decode_frame(bytes.fromhex(one["signed"]["hex"]))
            assert signed_by(signed, bytes.fromhex(one["public"]["hex"]))
            assert not signed_by(signed, bytes(32))
    assert {one["header"]["type"] for one in frames} == {*messages.BY_TYPE, messages.CHUNK}


def test_what_is_to_be_refused_is_refused():
    for one in read("refused.json").values():
        with pytest.raises(WireError):
            taken(bytes.fromhex(one["hex"]))


def test_every_update_is_read_back():
    told = read("updates.json")
    new = {k: np.array(v["values"], v["dtype"]).reshape(v["shape"]) for k, v in told["tensors"]["new"].items()}
    schema = {k: TensorSpec(v.shape, v.dtype) for k, v in new.items()}
    for codec in ("raw", "fp16", "bf16", "int8", "topk", "int8-fed-back"):
        update = decode_update((HERE / f"update-{codec}.bin").read_bytes(), schema=schema, client="anna")
        assert (update.weight, update.base_version, update.metrics) == (18.0, 3, {"loss": 0.1})
        assert update.kind == ("value" if codec == "raw" else "delta")
        for name, value in update.tensors.items():
            wanted = (
                new[name]
                if codec == "raw"
                else new[name] - np.array(told["tensors"]["old"][name]["values"], value.dtype).reshape(value.shape)
            )
            left = told["left out"].get(codec, {}).get(name)
            if left is not None:
                wanted = wanted - np.array(left, value.dtype).reshape(value.shape)
                assert roundings(value, wanted) <= 2
    for codec, values in told["models"].items():
        model = decode_tensors((HERE / f"model-{codec}.bin").read_bytes(), schema=schema)
        wanted = {k: np.array(v["values"], v["dtype"]).reshape(v["shape"]) for k, v in values.items()}
        assert equal(model, wanted)
    masked = {"conv1.weight": (10, 2), "fc.weight": (3, 20)}
    schema = {k: TensorSpec(s, np.dtype(np.float32)) for k, s in masked.items()}
    update = decode_update((HERE / "update-masked.bin").read_bytes(), schema=schema, layout=make.LAYOUT)
    assert update.mask == make.MASK
    part = compact.opened((HERE / "model-compact.bin").read_bytes(), schema, make.LAYOUT)
    dense = {"conv1.weight": make.numbers((10, 2), "dense"), "fc.weight": make.numbers((3, 20), "dense2")}
    assert part.mask == make.MASK
    assert equal(part.tensors, masks.gather(download.rounded(dense, "int8"), make.MASK))


def test_a_batch_is_augmented_as_its_vector_says():
    kept, found = (
        {name: entry.array() for name, entry in strict_safetensors.unpack(data, most=100)[0].items()}
        for data in ((HERE / "augment.safetensors").read_bytes(), make.augmented()["augment.safetensors"])
    )
    assert kept.keys() == found.keys() == {f"{name}/{end}" for name in ("imu", "crop_flip") for end in ("in", "out")}
    for name in ("imu/in", "crop_flip/in", "crop_flip/out"):
        assert np.array_equal(kept[name], found[name])
    assert np.abs(kept["imu/out"] - found["imu/out"]).max() <= 2**-20


def test_the_program_steps_as_its_vector_says():
    program = Program.open(HERE / "step.program")
    entries, _ = strict_safetensors.unpack((HERE / "step.safetensors").read_bytes(), most=100)
    given = {k.removeprefix("in/"): e.array() for k, e in entries.items() if k.startswith("in/")}
    found = program.run(given)
    assert {f"out/{name}" for name in found} == {k for k in entries if k.startswith("out/")}
    for name, value in found.items():
        assert roundings(value, entries[f"out/{name}"].array()) <= 64, name
