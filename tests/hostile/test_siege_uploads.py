"""Hostile bytes as a member's update, over the whole real path: frame, offer, chunks, file, check, store, quarantine.

Each is refused within 100 ms of CPU and 64 MiB, its sender is shut out with the reason where the operator looks, and
the round completes with the honest devices. The table of all 35 cases:

==  =============================================  ====================================================================
 1  pickle, zip, torch file                        here; test_decoding, test_no_pickle
 2  zstd bomb that states its size                 here; test_decoding
 3  zstd bomb that does not                        here; test_decoding
 4  zstd window of 128 MiB                         here; test_decoding
 5  header of 1 TiB                                here; test_decoding
 6  400,000 empty tensors                          here; test_decoding
 7  overlapping offsets                            here; test_decoding
 8  shape product that overflows                   here; test_decoding
 9  negative and zero dimensions                   here; test_decoding
10  unknown and doubled tensor names               here; test_decoding
11  wrong dtype                                    here; test_decoding
12  deep msgpack                                   test_siege_messages; test_decoding
13  array of 4 G entries                           test_siege_messages; test_decoding
14  truncated and trailing bytes                   here; test_siege_messages; test_decoding
15  fuzzed frames                                  test_siege_messages; tests/bench/test_fuzz.py; ``talaria bench fuzz``
16  NaN                                            here; test_decoding
17  infinity                                       here; test_decoding
18  norm of 1e30                                   here; test_decoding
19  weight of 0, negative, NaN, 1e9                here; test_decoding
20  mask of nothing, or of channels not there      here; test_decoding
21  top-k positions out of range or repeated       here; test_decoding
22  int8 scale of NaN, 0, huge                     here; test_decoding
23  replay of the last round's update              test_siege_messages; test_protocol
24  the same nonce twice                           test_siege_messages; test_protocol
25  older coordinator epoch                        test_siege_messages; test_protocol
26  forged body signature                          test_siege_messages; test_protocol; tests/system/test_identity.py
27  publishing on another device's topic           test_siege_messages; test_protocol; tests/system/test_identity.py
28  retained message planted on cmd                test_siege_messages; test_protocol; tests/system/test_identity.py
29  client-id takeover                             test_siege_messages; tests/system/test_identity.py
30  chunk index beyond the manifest                test_siege_messages; test_protocol
31  wrong chunks without end                       test_siege_messages; test_protocol
32  10,000 open transfers                          test_siege_messages; test_protocol
33  slow-loris upload                              test_siege_messages; test_protocol
34  flapping, stale last will                      test_siege_messages; test_protocol
35  two different updates of one round             test_siege_messages; test_protocol
==  =============================================  ====================================================================

Traversal in names and external data of ONNX files: tests/export/test_hostile_bundles.py.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from siege import RUN, Cost

from talaria.federated import run_model
from talaria.model.masks import ChannelMask
from talaria.types import Update
from talaria.wire.codec import encode_update
from talaria.wire.compression import MAGIC, zstd
from talaria.wire.strict_safetensors import pack, unpack

LAYOUT = run_model.layout_of(RUN.spec)
SCHEMA = run_model.update_schema(RUN)
FIRST = next(name for name, spec in SCHEMA.items() if len(spec.shape) == 3)
VECTOR = next(name for name, spec in SCHEMA.items() if len(spec.shape) == 1)


def base(**changes):
    """An update with zeros that would count."""
    tensors = {name: np.zeros(spec.shape, spec.dtype) for name, spec in SCHEMA.items()}
    return Update(tensors=tensors, weight=8.0, client="mallory", base_version=0).but(**changes)


def plain(**changes):
    return encode_update(base(**changes), compress=False)


def file_of(header, content=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def changed(change):
    """The good update with its header changed."""
    data = plain()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    result = change(header)
    return file_of(header if result is None else result, data[8 + size :])


def entry(name, **fields):
    return changed(lambda header: header[name].update(fields))


def about(old, new):
    def change(header):
        assert old in header["__metadata__"]["talaria"]
        header["__metadata__"]["talaria"] = header["__metadata__"]["talaria"].replace(old, new)

    return changed(change)


def with_planes(**changes):
    """The good update with planes put in (``None``: taken out); ``__`` stands for ``|``, ``_v_`` for the vector."""
    entries, meta = unpack(plain(), most=99)
    planes = {name: e.array() for name, e in entries.items()}
    for key, value in changes.items():
        name = key.replace("_v_", VECTOR).replace("__", "|")
        if value is None:
            del planes[name]
        else:
            planes[name] = value
    return pack(planes, meta)


def valued(value):
    entries, meta = unpack(plain(), most=99)
    planes = {name: e.array() for name, e in entries.items()}
    planes[FIRST].reshape(-1)[3] = value
    return pack(planes, meta)


def torch_file():
    data = io.BytesIO()
    torch.save({"w": torch.zeros(3)}, data)
    return data.getvalue()


def npz():
    data = io.BytesIO()
    np.savez(data, a=np.zeros(3))
    return data.getvalue()


UNSIZED = {zstd.CompressionParameter.content_size_flag: 0}


def bomb(options=None):
    return zstd.compress(bytes(256 * 2**20), options=options)


def window():
    return b"\x28\xb5\x2f\xfd" + bytes([0x40, (27 - 10) << 3]) + struct.pack("<H", 1000 - 256) + bytes([1, 0, 0])


def empties(count):
    one = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    return file_of(("{" + ",".join(one % i for i in range(count)) + "}").encode())


def doubled():
    data = plain()
    (size,) = struct.unpack_from("<Q", data)
    text = data[8 : 8 + size].rstrip()
    header = json.loads(text)
    return file_of(text[:-1] + b"," + json.dumps({VECTOR: header[VECTOR]}).encode()[1:], data[8 + size :])


def masked(change=lambda planes: None):
    """An update under a mask of every second channel, with its planes changed."""
    mask = ChannelMask(LAYOUT, {g: tuple(range(0, n, 2)) for g, n in LAYOUT.sizes.items()})
    tensors = {}
    for name, value in base().tensors.items():
        tensors[name] = value
        for dim, at in enumerate(mask.indices.get(name, ())):
            tensors[name] = tensors[name] if at is None else tensors[name].take(at, dim)
    entries, meta = unpack(encode_update(base(tensors=tensors, mask=mask), compress=False), most=99)
    planes = {name: e.array() for name, e in entries.items()}
    change(planes)
    return pack(planes, meta)


def all_zero(planes):
    for name in planes:
        if name.startswith("mask|"):
            planes[name] = np.zeros_like(planes[name])


def too_many(planes):
    name = next(name for name in planes if name.startswith("mask|"))
    size = LAYOUT.sizes[name.removeprefix("mask|")]
    full = (1 << 8 * len(planes[name])) - 1 if size % 8 else None
    planes[name] = np.full_like(planes[name], 255) if full else np.concatenate([planes[name], planes[name]])


def topk(at, values=None):
    values = np.zeros(len(at), np.float16) if values is None else values
    return with_planes(_v_=None, _v___i=np.array(at, np.int32), _v___v=values)


def scaled(scale):
    levels = np.ones(SCHEMA[VECTOR].shape, np.int8)
    return with_planes(_v_=None, _v___q=levels, _v___s=np.array([scale], np.float32))


LARGEST = SCHEMA[VECTOR].numel
CASES = {
    "01 a pickle": (lambda: pickle.dumps(object), "pickle"),
    "01 a zip": (npz, "zip"),
    "01 a torch file": (torch_file, "zip"),
    "02 a zstd bomb that states its size": (bomb, "declares 268435456 bytes"),
    "03 a zstd bomb that does not state its size": (
        lambda: bomb(UNSIZED),
        "does not state its size",
    ),
    "04 a zstd window of 128 MiB": (window, "window"),
    "05 a header of 1 TiB": (lambda: struct.pack("<Q", 2**40) + bytes(1000), "declares a header"),
    "06 15 thousand empty tensors": (lambda: empties(15_000), "above"),
    "06 400 thousand empty tensors": (lambda: zstd.compress(empties(400_000)), "above"),
    "07 overlapping offsets": (lambda: entry(VECTOR, data_offsets=[0, 4 * LARGEST]), "overlap"),
    "08 a shape whose product overflows": (lambda: entry(FIRST, shape=[2**62, 2**62]), "shape"),
    "09 a negative dimension": (lambda: entry(FIRST, shape=[-4, -6]), "whole numbers"),
    "09 a dimension of zero": (lambda: entry(FIRST, shape=[0, 6]), "do not hold"),
    "10 an unknown name": (lambda: changed(lambda h: h.update({"../x": h.pop(VECTOR)})), "not in the schema"),
    "10 a name twice": (doubled, "stands twice"),
    "11 another dtype": (lambda: entry(VECTOR, dtype="I32"), "expected float32"),
    "14 a truncated update": (lambda: plain()[:-1], "do not hold"),
    "14 bytes behind an update": (lambda: plain() + b"\0", "follow the last tensor"),
    "16 NaN": (lambda: valued(math.nan), "NaN or infinity"),
    "17 infinity": (lambda: valued(-math.inf), "NaN or infinity"),
    "18 a value of 1e30": (lambda: valued(1e30), "magnitude 1e+30"),
    "18 a norm that hides in many values": (
        lambda: plain(tensors={n: np.full_like(v, 9e5) for n, v in base().tensors.items()}),
        "norm",
    ),
    "19 a weight of 0": (lambda: about('"weight":8.0', '"weight":0'), "weight"),
    "19 a negative weight": (lambda: about('"weight":8.0', '"weight":-1'), "weight"),
    "19 a weight of NaN": (lambda: about('"weight":8.0', '"weight":NaN'), "not a number"),
    "19 a weight of 1e9 samples": (lambda: about('"weight":8.0', '"weight":1e9'), "weight"),
    "19 a metric beyond any float": (lambda: about('"metrics":{}', '"metrics":{"a":' + "9" * 400 + "}"), "finite"),
    "19 a mask's name that is no text": (lambda: about('"mask":null', '"mask":"' + "\\ud800" * 64 + '"'), "digest"),
    "20 a mask that keeps nothing": (lambda: masked(all_zero), "must keep"),
    "20 a mask of channels that are not there": (lambda: masked(too_many), "mask"),
    "21 a position out of range": (lambda: topk([0, LARGEST]), "positions"),
    "21 a repeated position": (lambda: topk([1, 1]), "positions"),
    "22 a scale of NaN": (lambda: scaled(math.nan), "scale"),
    "22 a scale of 0": (lambda: scaled(0.0), "scale"),
    "22 a huge scale": (lambda: scaled(1e30), "scale"),
}


NUMBERS = sorted({name[:2] for name in CASES})


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: next(name for name in CASES if name.startswith(n)))
def test_an_update_made_to_harm_is_refused_and_the_round_completes(siege, number):
    """All forms of one case, each by a member of its own."""
    forms = {name: (make(), words) for name, (make, *words) in CASES.items() if name.startswith(number)}

    async def story(s):
        await s.opened("bela")
        await s.stored("anna")
        for mallory, (data, words) in zip(s.attackers, forms.values(), strict=True):
            mine = data.replace(b"mallory", mallory.name.encode())  # names are of equal length
            with Cost(messages=2 + -(-len(mine) // (120 * 1024))):
                mallory.upload(mine)
                await s.until("quarantined", device=mallory.name)
            await s.shut_out(*words, name=mallory.name)
        s.release("bela")
        await s.finishes("anna", "bela")
        rejected = [u.device for u in s.store.updates.of("watch", 1) if u.status == "rejected"]
        assert rejected == sorted(mallory.name for mallory in s.attackers)
        assert set(s.lights["anna"].receipts) == set(s.lights["bela"].receipts) == {(1, "stored")}

    siege(story, attackers=len(forms))


def test_the_same_updates_unharmed_count(siege):
    """So that none of the above is refused for another reason than its own."""
    forms = [plain(), masked(), zstd.compress(plain()), topk([0, 1])]
    assert forms[2].startswith(MAGIC)

    async def story(s):
        await s.opened()
        for mallory, data in zip(s.attackers, forms, strict=True):
            raw = zstd.decompress(data) if data.startswith(MAGIC) else data
            mine = raw.replace(b"mallory", mallory.name.encode())
            mallory.upload(zstd.compress(mine) if raw is not data else mine)
        await s.finishes(*sorted(["anna", "bela", *(mallory.name for mallory in s.attackers)]))

    siege(story, attackers=len(forms))


def test_an_offer_whose_sha256_is_not_that_of_its_chunks_holds_nobody_up(siege):
    """Each chunk has the sha256 that was signed for it, the whole has not: nobody but its sender can be to blame."""

    async def story(s):
        await s.opened("bela")
        await s.stored("anna")
        for mallory in s.attackers:
            data, lie = mallory.good(), mallory.name.encode().ljust(32)
            cut = replace(mallory.offer(data, sha256=lie), sha256=lie)
            for index in range(cut.count):
                mallory.chunk(cut, index, data[cut.chunk * index :][: cut.chunk])
        for mallory in s.attackers:
            await s.shut_out("whole sha256", name=mallory.name)
        s.release("bela")
        await s.finishes("anna", "bela")
        rejected = [u.device for u in s.store.updates.of("watch", 1) if u.status == "rejected"]
        assert rejected == sorted(mallory.name for mallory in s.attackers)

    siege(story, attackers=8)
