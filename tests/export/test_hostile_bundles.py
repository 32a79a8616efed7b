"""Bundles made to harm: every one is refused with a clear error, and nothing of it reaches ONNX Runtime."""

import hashlib
import io
import json
import random
import re
import resource
import struct
import zipfile
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from talaria.errors import BundleError, ConfigError
from talaria_export import Limits, Predictor, make_bundle, open_bundle
from talaria_export.bundle.archive import pack, unpack
from talaria_export.bundle.bundle import read_array, read_bundle
from talaria_export.bundle.onnx_validator import inspect_onnx
from talaria_export.runtime.session import Session
from talaria_export.runtime.verify import verify_bundle

KEY = bytes(range(32))
PUBLIC = Ed25519PrivateKey.from_private_bytes(KEY).public_key().public_bytes_raw()
ROUNDS = 10_000


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> bytes:
    """A signed bundle of a few kilobytes."""
    path = tmp_path_factory.mktemp("small") / "small.talaria"
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(20, 3)).eval()
    make_bundle(
        path,
        model,
        example=torch.zeros(2, 2, 10),
        dense=model,
        variants=("fp32",),
        probes=2,
        seconds=0,
        signing_key=KEY,
    )
    return path.read_bytes()


def members_of(data: bytes) -> dict[str, bytes]:
    return {name: bytes(content) for name, content in unpack(data).items()}


def flip(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def cut_out(data: bytes, rng: random.Random) -> bytes:
    begin = rng.randrange(len(data))
    return data[:begin] + data[begin + rng.randint(1, 500) :]


def insert(data: bytes, rng: random.Random) -> bytes:
    place = rng.randint(0, len(data))
    return data[:place] + rng.randbytes(rng.randint(1, 500)) + data[place:]


def overwrite(data: bytes, rng: random.Random) -> bytes:
    begin = rng.randrange(len(data) - 64)
    return data[:begin] + rng.randbytes(64) + data[begin + 64 :]


def swap_members(data: bytes, rng: random.Random) -> bytes:
    found = members_of(data)
    one, two = rng.sample(sorted(found), 2)
    found[one], found[two] = found[two], found[one]
    return pack(found)


def lose_member(data: bytes, rng: random.Random) -> bytes:
    found = members_of(data)
    del found[rng.choice(sorted(set(found) - {"signature.json"}))]
    return pack(found)


def stow_away(data: bytes, rng: random.Random) -> bytes:
    return pack(members_of(data) | {f"extra/{rng.randrange(1000)}": rng.randbytes(9)})


def damage_member(data: bytes, rng: random.Random) -> bytes:
    """The checksums of the archive are right again; only the manifest's hashes tell."""
    found = members_of(data)
    name = rng.choice([name for name in found if not name.endswith(".json")])
    found[name] = flip(found[name], rng)
    return pack(found)


def damage_header(data: bytes, rng: random.Random) -> bytes:
    """Sizes, flags, methods, offsets: any field of the first header."""
    place = rng.randrange(4, 30)
    return data[:place] + struct.pack("<H", rng.randrange(1 << 16)) + data[place + 2 :]


MUTATIONS: list[Callable[[bytes, random.Random], bytes]] = [
    flip, cut, cut_out, insert, overwrite, swap_members, lose_member, stow_away, damage_member, damage_header,
]  # fmt: skip


def test_ten_thousand_mutations_are_refused_in_bounded_memory(small):
    assert read_bundle(small, trust=PUBLIC).signer == PUBLIC.hex()
    rng = random.Random(20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded: list[str] = []
    for turn in range(ROUNDS):
        mutation = MUTATIONS[turn % len(MUTATIONS)]
        mutant = mutation(small, rng)
        if mutant == small:
            mutant = flip(small, rng)
        try:
            read_bundle(mutant)
        except BundleError:
            continue
        loaded.append(f"{turn} {mutation.__name__}")
    assert loaded == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def stored(name: str, content: bytes) -> bytes:
    """An archive with one member of any name, as zip tools write it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content)
    return stream.getvalue()


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/../../b", "a//b", "C:evil", "a\\b", ".hidden", "a/b/c/d", "A", "a" * 99, ""],
)
def test_names_that_could_leave_the_archive_are_refused(name):
    with pytest.raises(BundleError, match="name"):
        unpack(stored(name, b"x"))


def test_compressed_bomb_is_refused_before_it_is_unpacked():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", bytes(50 << 20))
    with pytest.raises(BundleError, match="compressed"):
        unpack(stream.getvalue())


def test_announced_size_beyond_the_file_is_refused():
    head = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 0x21, 0, 0xFFFFFFFF, 0xFFFFFFFF, 1, 0)
    with pytest.raises(BundleError, match="too early"):
        unpack(head + b"a" + bytes(100))


def test_archive_packed_again_by_a_zip_tool_is_refused(small):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members_of(small).items():
            archive.writestr(name, content)
    with pytest.raises(BundleError, match="form"):
        unpack(stream.getvalue())


def test_any_zip_tool_can_read_a_bundle(small):
    with zipfile.ZipFile(io.BytesIO(small)) as archive:
        assert archive.testzip() is None
        assert archive.namelist()[0] == "manifest.json"


def test_limits_hold(small, tmp_path):
    path = tmp_path / "x.talaria"
    path.write_bytes(small)
    for limits, word in [
        (Limits(file=100), "Limits.file"),
        (Limits(members=2), "members"),
        (Limits(manifest=100), "Limits.manifest"),
    ]:
        with pytest.raises(BundleError, match=word):
            open_bundle(path, limits)


def test_special_file_is_read_no_further_than_the_limit():
    with pytest.raises(BundleError, match="limit"):
        open_bundle("/dev/zero", Limits(file=1 << 20))


# -- signatures ----------------------------------------------------------------------------------------------------


def test_signature_of_another_key_or_none_is_refused(small):
    stranger = Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key().public_bytes_raw()
    with pytest.raises(BundleError, match="not by the trusted"):
        read_bundle(small, trust=stranger)
    unsigned = {name: content for name, content in members_of(small).items() if name != "signature.json"}
    assert read_bundle(pack(unsigned)).signer is None
    with pytest.raises(BundleError, match="not signed"):
        read_bundle(pack(unsigned), trust=PUBLIC.hex())


def test_changed_manifest_breaks_the_signature(small):
    found = members_of(small)
    found["manifest.json"] = found["manifest.json"].replace(b'"seed": 0', b'"seed": 1')
    with pytest.raises(BundleError, match="signature does not fit"):
        read_bundle(pack(found), trust=PUBLIC)


@pytest.mark.parametrize("signature", [b"", b"[]", b"{}", b'{"key": 1, "signature": 2}', b"[" * 100_000, b"\xff"])
def test_unreadable_signature_is_refused(small, signature):
    with pytest.raises(BundleError, match=r"signature\.json"):
        read_bundle(pack(members_of(small) | {"signature.json": signature}), trust=PUBLIC)


@pytest.mark.parametrize("trust", ["xyz", b"short", "00" * 31])
def test_unusable_public_key_is_the_callers_error(small, trust):
    with pytest.raises(ConfigError, match="trust"):
        read_bundle(small, trust=trust)


# -- manifests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"null", b"\xff\xfe", b"{" * 100_000, b"[" * 100_000, b'{"format": "talaria-bundle"}',
        b'{"format": "talaria-bundle", "version": 2}', b'{"a": 1, "a": 2}', b'{"a": NaN}',
        b'{"a": 1' + b"0" * 5000 + b"}",
    ],
)  # fmt: skip
def test_manifest_that_is_none_is_refused(small, text):
    with pytest.raises(BundleError, match=r"manifest\.json"):
        read_bundle(pack(members_of(small) | {"manifest.json": text}))


ODD = [None, -1, 1.5, "x" * 2000, [], {}, [[]], {"a": 1}, True, 1 << 70]


def test_every_field_of_the_wrong_kind_is_refused(small):
    found = members_of(small)
    manifest = json.loads(found["manifest.json"])
    for field in set(manifest) - {"card", "device"}:
        for value in ODD:
            if field in ("created", "reference") and value is None:
                continue
            text = json.dumps(manifest | {field: value}).encode()
            with pytest.raises(BundleError):
                assert not read_bundle(pack(found | {"manifest.json": text})), (field, value)


PARITY = {"outputs": "parity/outputs.npy", "tolerance": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("default", "int8"),
        ("parity", PARITY | {"inputs": {"file": "../x"}}),
        ("parity", PARITY | {"inputs": {"seed": 0, "count": 1 << 30, "shift": 0, "scale": 1}}),
        ("reference", {"file": "/etc/passwd"}),
        ("input", {"name": "input", "shape": [1 << 40], "dtype": "float32"}),
        ("variants", [{"name": "fp32", "file": "parity/outputs.npy", "passed": True}]),
    ],
)  # fmt: skip
def test_references_to_what_is_not_there_are_refused(small, field, value):
    found = members_of(small)
    manifest = json.loads(found["manifest.json"]) | {field: value}
    with pytest.raises(BundleError, match=field):
        read_bundle(pack(found | {"manifest.json": json.dumps(manifest).encode()}))


# -- arrays and models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [np.zeros(3), np.zeros(3, np.int32), np.asfortranarray(np.zeros((2, 3), np.float32)), np.array([{}], dtype=object)],
    ids=["float64", "int32", "fortran", "pickle"],
)
def test_arrays_of_another_kind_are_refused(array):
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    with pytest.raises(BundleError, match="array"):
        read_array("x.npy", stream.getvalue())


@pytest.mark.parametrize("shape", ["(999999999999,)", "(-1, -3)", "(True,)", "(2,)", "('a',)", "(__import__('os'),)"])
def test_array_header_must_fit_the_bytes(shape):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(12)
    with pytest.raises(BundleError, match="array"):
        read_array("x.npy", data)


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e999"])
@pytest.mark.parametrize("field", ["tolerance", "scale", "shift"])
def test_numbers_that_no_float_holds_are_refused_by_verify(small, tmp_path, field, number):
    found = members_of(small)
    text = re.sub(rf'("{field}": )[-+.e0-9]+', rf"\g<1>{number}", found["manifest.json"].decode())
    path = tmp_path / "forged.talaria"
    path.write_bytes(pack(found | {"manifest.json": text.encode()}))
    report = verify_bundle(path, seconds=0)
    assert [check.name for check in report.failed] == ["integrity"]
    assert "parity" in report.failed[0].detail


def network(*nodes: onnx.NodeProto, tensors: list[onnx.TensorProto] | None = None) -> onnx.ModelProto:
    value = onnx.helper.make_tensor_value_info
    ends = [value("input", 1, ["b", 2])], [value("logits", 1, ["b", 2])]
    plain = nodes or (onnx.helper.make_node("Relu", ["input"], ["logits"]),)
    graph = onnx.helper.make_graph(list(plain), "g", *ends, tensors or [])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)


def external() -> onnx.ModelProto:
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../../etc/passwd")
    return network(tensors=[tensor])


def hidden_external() -> onnx.ModelProto:
    """The outside file is named by a constant inside a node."""
    node = onnx.helper.make_node("Constant", [], ["logits"])
    node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR, t=external().graph.initializer[0])
    return network(node)


def oversize() -> onnx.ModelProto:
    return network(tensors=[onnx.TensorProto(name="w", data_type=1, dims=[1 << 20, 1 << 20], raw_data=b"1234")])


def short() -> onnx.ModelProto:
    return network(tensors=[onnx.TensorProto(name="w", data_type=1, dims=[1000], raw_data=b"1234")])


def wrapped() -> onnx.ModelProto:
    """Sizes whose product is small only where it overflows."""
    return network(tensors=[onnx.TensorProto(name="w", data_type=1, dims=[1 << 33, 1 << 33], raw_data=b"")])


def negative() -> onnx.ModelProto:
    return network(tensors=[onnx.TensorProto(name="w", data_type=1, dims=[-4], raw_data=b"")])


def text() -> onnx.ModelProto:
    return network(tensors=[onnx.TensorProto(name="w", data_type=8, dims=[1], string_data=[b"x"])])


def foreign() -> onnx.ModelProto:
    return network(onnx.helper.make_node("Run", ["input"], ["logits"], domain="org.evil"))


def foreign_opset() -> onnx.ModelProto:
    model = network()
    model.opset_import.add(domain="org.evil", version=1)
    return model


def loop() -> onnx.ModelProto:
    return network(onnx.helper.make_node("Loop", ["input"], ["logits"], body=network().graph))


def nested() -> onnx.ModelProto:
    """A forbidden operator inside a graph inside an attribute."""
    return network(onnx.helper.make_node("Relu", ["input"], ["logits"], body=foreign().graph))


def grown() -> onnx.ModelProto:
    """A few bytes that ask for terabytes."""
    node = onnx.helper.make_node("ConstantOfShape", ["w"], ["logits"])
    return network(node, tensors=[onnx.numpy_helper.from_array(np.array([1 << 20, 1 << 20]), "w")])


def grown_typed() -> onnx.ModelProto:
    node = onnx.helper.make_node("Expand", ["input", "w"], ["logits"])
    return network(node, tensors=[onnx.TensorProto(name="w", data_type=7, dims=[2], int64_data=[1 << 20, 1 << 20])])


def stretched() -> onnx.ModelProto:
    """A range from far below zero, each of whose ends looks harmless to a check of positive numbers."""
    node = onnx.helper.make_node("Range", ["w", "o", "o"], ["logits"])
    ends = (("w", -(1 << 40)), ("o", 1))
    return network(node, tensors=[onnx.numpy_helper.from_array(np.array(n), name) for name, n in ends])


def divided() -> onnx.ModelProto:
    """A range in steps that are not whole."""
    node = onnx.helper.make_node("Range", ["input", "input", "w"], ["logits"])
    return network(node, tensors=[onnx.numpy_helper.from_array(np.array(1e-30, np.float32), "w")])


def computed(*kinds: str) -> Callable[[], onnx.ModelProto]:
    """Few bytes that compute the shape of terabytes: 2**40 from a product, then what makes a tensor of it."""

    def make() -> onnx.ModelProto:
        node, whole = onnx.helper.make_node, onnx.numpy_helper.from_array
        many = [whole(np.array([1 << 20], np.int64), "w"), whole(np.array([1, 1], np.int64), "ones")]
        many.append(whole(np.array([1e4, 1e5], np.float32), "scales"))
        nodes = [node("Mul", ["w", "w"], ["big"]), node("Concat", ["w", "big"], ["shape"], axis=0)]
        nodes += {
            "ConstantOfShape": [node("ConstantOfShape", ["shape"], ["logits"])],
            "Expand": [node("Expand", ["input", "shape"], ["logits"])],
            "Tile": [node("Tile", ["input", "shape"], ["logits"])],
            "Pad": [node("Concat", ["ones", "shape"], ["pads"], axis=0), node("Pad", ["input", "pads"], ["logits"])],
            "Resize": [node("Resize", ["input", "", "scales"], ["logits"])],
            "OneHot": [node("OneHot", ["input", "big", "ones"], ["logits"])],
            "Range": [node("Range", ["ones", "big", "ones"], ["logits"])],
            "Reshaped": [node("Shape", ["input"], ["own"]), node("Pow", ["own", "ones"], ["more"]),
                         node("Expand", ["input", "more"], ["logits"])],
        }[kinds[0]]  # fmt: skip
        return network(*nodes, tensors=many)

    make.__name__ = f"computed {kinds[0]}"
    return make


def alike(big: str, small: str) -> Callable[[], onnx.ModelProto]:
    """The shape of terabytes, by a name that a careless reader takes for that of a small one."""

    def make() -> onnx.ModelProto:
        node, whole = onnx.helper.make_node, onnx.numpy_helper.from_array
        shapes = [whole(np.array([1 << 20, 1 << 20]), big), whole(np.array([1, 2]), small)]
        return network(node("ConstantOfShape", [big], ["logits"]), tensors=shapes)

    make.__name__ = "alike"
    return make


def said_twice() -> onnx.ModelProto:
    """A constant with two values, of which ONNX Runtime takes the first."""
    node, whole = onnx.helper.make_node, onnx.numpy_helper.from_array
    constant = node("Constant", [], ["w"], value=whole(np.array([1 << 20, 1 << 20])))
    constant.attribute.append(node("Constant", [], ["w"], value=whole(np.array([1, 2]))).attribute[0])
    return network(constant, node("ConstantOfShape", ["w"], ["logits"]))


def laborious() -> onnx.ModelProto:
    """Forty products of matrices that no file holds."""
    node, whole = onnx.helper.make_node, onnx.numpy_helper.from_array
    nodes = [node("ConstantOfShape", ["w"], ["m0"])]
    nodes += [node("MatMul", [f"m{i}", f"m{i}"], [f"m{i + 1}"]) for i in range(40)]
    return network(*nodes, tensors=[whole(np.array([1600, 1600], np.int64), "w")])


def squared() -> onnx.ModelProto:
    """Small for one input, and by the square of their number for more."""
    node, whole = onnx.helper.make_node, onnx.numpy_helper.from_array
    nodes = [
        node("Shape", ["input"], ["n"], start=0, end=1),
        node("Mul", ["n", "n"], ["nn"]),
        node("Mul", ["nn", "w"], ["many"]),
        node("Mul", ["many", "nn"], ["shape"]),
        node("ConstantOfShape", ["shape"], ["logits"]),
    ]
    return network(*nodes, tensors=[whole(np.array([1 << 16], np.int64), "w")])


def drawn(kind: str) -> Callable[[], onnx.ModelProto]:
    """Answers that differ from call to call."""

    def make() -> onnx.ModelProto:
        return network(onnx.helper.make_node(kind, ["input"], ["logits"]))

    make.__name__ = kind
    return make


def function() -> onnx.ModelProto:
    model = network()
    model.functions.add(name="f", domain="")
    return model


def sparse() -> onnx.ModelProto:
    model = network()
    model.graph.sparse_initializer.add(dims=[1 << 40])
    return model


@pytest.mark.parametrize(
    "make",
    [
        external, hidden_external, oversize, short, wrapped, negative, text,
        foreign, foreign_opset, loop, nested, grown, grown_typed, stretched, divided, function, sparse,
        laborious, squared, alike("w" * 200 + "a", "w" * 200 + "b"), alike("w", "w"), said_twice,
        *map(computed, ("ConstantOfShape", "Expand", "Tile", "Pad", "Resize", "OneHot", "Range", "Reshaped")),
        *map(drawn, ("RandomUniformLike", "RandomNormalLike", "Bernoulli", "Multinomial")),
    ],
)  # fmt: skip
def test_models_that_reach_outside_or_lie_about_their_size_are_refused(make):
    inspect_onnx("m.onnx", network().SerializeToString())
    with pytest.raises(BundleError, match=r"m\.onnx"):
        inspect_onnx("m.onnx", make().SerializeToString())


def test_a_pool_that_keeps_channels_last_is_measured_as_onnx_runtime_runs_it():
    """As it rewrites a U-Net in 8 bits, whose smaller map then stands beside one of other channels."""
    node, whole = onnx.helper.make_node, onnx.numpy_helper.from_array
    layer = {"kernel_shape": [2, 2], "strides": [2, 2], "domain": "com.microsoft"}
    model = onnx.helper.make_model(
        onnx.helper.make_graph(
            [
                node("QuantizeLinear", ["input", "scale", "zero"], ["map"]),
                node("NhwcMaxPool", ["map"], ["pooled"], **layer),
                node("Concat", ["pooled", "beside"], ["both"], axis=3),
                node("DequantizeLinear", ["both", "scale", "zero"], ["logits"]),
            ],
            "g",
            [onnx.helper.make_tensor_value_info("input", onnx.TensorProto.FLOAT, [1, 6, 10, 3])],
            [onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, None)],
            [
                whole(np.float32(0.1), "scale"),
                whole(np.uint8(0), "zero"),
                whole(np.zeros((1, 3, 5, 2), np.uint8), "beside"),
            ],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    data = model.SerializeToString()
    shape = (1, 6, 10, 3)
    assert Session(data, optimize=False)(np.zeros(shape, np.float32)).shape == (1, 3, 5, 5)
    inspect_onnx("m.onnx", data, shapes=(shape, shape))


def test_names_that_are_no_text_are_refused():
    """Two such names look alike to who replaces what cannot be read."""
    data = alike("zzzzA", "zzzzB")().SerializeToString()
    with pytest.raises(BundleError, match=r"m\.onnx: has a name that is no text"):
        inspect_onnx("m.onnx", data.replace(b"zzzzA", b"zzzz\xfe").replace(b"zzzzB", b"zzzz\xff"))


def test_deeply_nested_graphs_are_refused():
    graph = network().graph
    for _ in range(15):
        node = onnx.helper.make_node("Relu", ["input"], ["logits"], body=graph)
        graph = network(node).graph
    model = network()
    model.graph.CopyFrom(graph)
    with pytest.raises(BundleError, match="nests a graph"):
        inspect_onnx("m.onnx", model.SerializeToString())


def test_a_number_that_is_not_four_bytes_is_refused():
    node = onnx.helper.make_node("Relu", ["input"], ["logits"], alpha=0.5)
    whole = network(node).SerializeToString()
    attribute = node.attribute[0].SerializeToString()
    # The float, field 2 in 4 bytes, as field 2 in bytes of a length: 3 of them, so that all around it keeps its place.
    at = attribute.index(b"\x15")
    forged = attribute[:at] + b"\x12\x03" + attribute[at + 1 : at + 4] + attribute[at + 5 :]
    assert len(forged) == len(attribute)
    with pytest.raises(BundleError, match="a number of 3 bytes"):
        inspect_onnx("m.onnx", whole.replace(attribute, forged))


def test_damaged_models_never_raise_anything_else(small):
    model = members_of(small)["models/fp32.onnx"]
    rng = random.Random(3)
    for mutation in (flip, cut, overwrite, insert):
        for _ in range(500):
            try:
                inspect_onnx("m.onnx", mutation(model, rng))
            except BundleError as problem:
                assert "m.onnx" in str(problem)  # noqa: PT017


def test_forged_model_is_refused_by_every_door(small, tmp_path):
    """Right hashes, right checksums, a model that reads another file."""
    found = members_of(small)
    manifest = json.loads(found["manifest.json"])
    evil = external().SerializeToString()
    name = manifest["variants"][0]["file"]
    manifest["files"][name] = {"bytes": len(evil), "sha256": hashlib.sha256(evil).hexdigest()}
    path = tmp_path / "forged.talaria"
    path.write_bytes(pack(found | {name: evil, "manifest.json": json.dumps(manifest).encode()}))
    with pytest.raises(BundleError, match="another file"):
        Predictor(path)
    with pytest.raises(BundleError, match="signature"):
        Predictor(path, trust=PUBLIC)
