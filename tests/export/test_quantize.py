import json
from fractions import Fraction

import numpy as np
import onnx
import pytest
import torch
from tolerance import roundings
from torch import nn

from talaria import shares
from talaria.errors import ConfigError
from talaria_export import Predictor, make_bundle, open_bundle, verify_bundle
from talaria_export.build.selection import choose, judge
from talaria_export.bundle.bundle import read_bundle, save, seal
from talaria_export.bundle.manifest import VARIANTS
from talaria_export.convert.onnx import convert
from talaria_export.convert.quantize import Gate, Made, half, linear_int8, make_variants, static_int8
from talaria_export.runtime import cpu as cpu_module
from talaria_export.runtime.session import Session


@pytest.fixture(scope="module")
def proto(imu) -> onnx.ModelProto:
    return convert(imu.model, imu.x)


@pytest.fixture(scope="module")
def every(imu, tmp_path_factory):
    """A bundle for which every variant was tried, and its report."""
    path = tmp_path_factory.mktemp("every") / "every.talaria"
    report = make_bundle(
        path, imu.model, example=imu.x, samples=(imu.x, imu.y), calibration=imu.x, optimize=True, seconds=0.05
    )
    return path, report


def kinds(data: bytes) -> list[str]:
    return [node.op_type for node in onnx.load_from_string(data).graph.node]


def test_half_precision_halves_the_file_and_keeps_the_answer(proto, imu):
    data, plain = half(proto).SerializeToString(), proto.SerializeToString()
    assert len(data) < 0.52 * len(plain)
    np.testing.assert_allclose(Session(data)(imu.x.numpy()), Session(plain)(imu.x.numpy()), atol=5e-3)


def test_an_app_in_which_numpy_raises_for_what_is_lost_exports_too():
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 4)).eval()
    nn.init.constant_(model[1].weight, 1e-12)
    with np.errstate(all="raise"):
        assert half(convert(model, torch.zeros(2, 4, 8))).ByteSize()


class Masked(nn.Module):
    """Words of which 0 is padding, that no softmax sees."""

    def __init__(self):
        super().__init__()
        self.weigh, self.head = nn.Linear(4, 1), nn.Linear(4, 3)

    def forward(self, x):
        shares = self.weigh(x)[..., 0].masked_fill(x[..., 0] == 0, -torch.inf).softmax(1)
        return self.head((shares.unsqueeze(2) * x).sum(1))


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("numpy_does", ["warn", "raise"])
def test_a_masks_infinity_is_quantized_without_a_word_of_numpys(numpy_does):
    x = np.random.default_rng(0).standard_normal((20, 5, 4), np.float32)
    x[:, 3:] = 0
    model = convert(Masked().eval(), torch.from_numpy(x[:2]))
    with np.errstate(invalid=numpy_does):
        assert np.isfinite(Session(static_int8(model, x, keep=[], reduce_range=True))(x)).all()


def test_weights_beyond_half_precision_stay_as_they_are():
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 3))
    with torch.no_grad():
        model[1].weight[0, 0] = 1e6
    plain = convert(model, torch.zeros(2, 20))
    assert kinds(half(plain).SerializeToString()).count("Cast") == 0


def test_static_int8_quantizes_every_layer_but_the_kept_ones(proto, imu):
    x = imu.x.numpy()
    data = static_int8(proto, x, keep=[], reduce_range=True)
    assert len(data) < 0.35 * len(proto.SerializeToString())
    weights = [t for t in onnx.load_from_string(data).graph.initializer if len(t.dims) > 1]
    assert {t.data_type for t in weights} == {onnx.TensorProto.INT8}
    assert max(np.abs(onnx.numpy_helper.to_array(t)).max() for t in weights) <= 64
    agreement = (Session(data)(x).argmax(1) == imu.y.numpy()).mean()
    assert agreement >= 0.9
    first = [f"n{i}" for i, node in enumerate(proto.graph.node) if node.op_type == "Conv"][:1]
    kept = onnx.load_from_string(static_int8(proto, x, keep=first, reduce_range=True))
    assert {t.data_type for t in kept.graph.initializer if len(t.dims) > 1} == {
        onnx.TensorProto.INT8,
        onnx.TensorProto.FLOAT,
    }


def test_linear_int8_touches_linear_layers_only(proto, imu):
    data = linear_int8(proto)
    assert kinds(data).count("Conv") == 4
    assert {"MatMulInteger", "DynamicQuantizeLinear"} <= set(kinds(data))
    assert (Session(data)(imu.x.numpy()).argmax(1) == imu.y.numpy()).mean() >= 0.9


def test_layers_stay_in_fp32_until_the_gate_is_kept(proto, imu):
    """A gate that nothing can reach makes the search try every prefix and keep the best."""
    x = imu.x.numpy()
    strict = make_variants(proto, ["int8"], x, x, Gate(agreement=1.0))[1]
    loose = make_variants(proto, ["int8"], x, x, Gate(agreement=0.0))[1]
    assert loose.settings is not None
    assert loose.settings["fp32_layers"] == 0
    assert strict.settings is not None
    assert strict.settings["fp32_layers"] >= 0
    plain = Session(proto.SerializeToString())(x).argmax(1)
    shares = [(Session(made.data)(x).argmax(1) == plain).mean() for made in (loose, strict) if made.data]
    assert shares[1] >= shares[0]


@pytest.mark.parametrize(
    ("flag", "reduced"), [("avx2", True), ("avx512_vnni", False), ("avx_vnni", False), ("asimddp", False)]
)
def test_range_is_reduced_where_the_processor_saturates(proto, imu, monkeypatch, flag, reduced):
    monkeypatch.setattr(cpu_module, "flags", lambda: frozenset({flag}))
    made = make_variants(proto, ["int8"], imu.x[:8].numpy(), imu.x[:8].numpy(), Gate(agreement=0.0))[1]
    assert made.settings == {"fp32_layers": 0, "reduce_range": reduced}


def test_without_samples_static_int8_is_left_out_with_a_reason(proto, imu):
    made = make_variants(proto, VARIANTS, None, imu.x.numpy(), Gate())
    assert [one.name for one in made] == list(VARIANTS)
    assert made[2].data is None
    assert "samples" in made[2].why


def test_model_without_linear_layers_has_no_linear_variant():
    model = nn.Sequential(nn.Conv1d(6, 7, 100), nn.Flatten()).eval()
    made = make_variants(
        convert(model, torch.zeros(2, 6, 100)), ["int8-linear"], None, np.zeros((2, 6, 100), "f4"), Gate()
    )
    assert made[1].data is None
    assert "linear" in made[1].why


class Tied(nn.Module):
    """A table of words that is the weight of the last layer but one too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False), nn.Linear(12, 4)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.head(self.out(self.words(x.long()).mean(1)))


def test_a_variant_that_does_not_run_is_left_out_with_a_reason_and_the_others_stay(tmp_path):
    torch.manual_seed(0)
    net, x = Tied().eval(), np.random.default_rng(0).integers(0, 12, (30, 9)).astype(np.float32)
    wanted = net(torch.from_numpy(x)).detach().numpy()
    make_bundle(tmp_path / "me.talaria", net, example=x, samples=(x, wanted.argmax(1)))
    assert np.array_equal(Predictor(tmp_path / "me.talaria")(x).index, wanted.argmax(1))


class Divided(nn.Module):
    """By what 8 bits round to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.over, self.under, self.head = nn.Linear(4, 16), nn.Linear(4, 16, bias=False), nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.over(x) / self.under(x).abs())


def test_a_variant_that_gives_infinity_is_left_out_with_a_reason_and_the_others_stay(tmp_path):
    torch.manual_seed(0)
    x = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    x[:20] *= 1e-3
    given = {"example": x, "samples": (x, x[:, :1]), "calibration": x}
    report = make_bundle(tmp_path / "me.talaria", Divided(), **given, task="regression", seconds=0)
    told = {row["name"]: row["why"] for row in report.figures["variants"]}
    assert told["int8"] == "gives NaN or infinity"
    assert report.figures["default"] in ("fp32", "fp16")
    assert verify_bundle(tmp_path / "me.talaria").ok


def test_calibration_and_judgement_never_share_a_sample(imu, monkeypatch, tmp_path):
    from talaria_export.build import build

    seen = {}

    def spy(fp32, wanted, calibration, held_out, gate, task):
        seen["calibration"], seen["held out"] = calibration, held_out
        return make_variants(fp32, ["fp32"], None, held_out, gate)

    monkeypatch.setattr(build, "make_variants", spy)
    make_bundle(tmp_path / "x.talaria", imu.model, example=imu.x, samples=(imu.x[:21], imu.y[:21]), seconds=0)
    rows = [{row.tobytes() for row in seen[name]} for name in ("calibration", "held out")]
    assert rows[0] & rows[1] == set()
    assert len(rows[0]) + len(rows[1]) == 21


def test_gate_refuses_a_variant_that_disagrees_or_loses_accuracy(proto, imu):
    plain = Made("fp32", proto.SerializeToString())
    other = onnx.ModelProto()
    other.CopyFrom(proto)
    last = other.graph.initializer[-1] if len(other.graph.initializer[-1].dims) == 1 else None
    bias = last or next(t for t in other.graph.initializer if list(t.dims) == [7])
    bias.CopyFrom(onnx.numpy_helper.from_array(np.array([99, 0, 0, 0, 0, 0, 0], np.float32), bias.name))
    wrong = Made("fp16", other.SerializeToString())
    x, y = imu.x.numpy(), imu.y.numpy()
    expected = Session(plain.data)(x)
    assert judge(plain, plain, (x, y), Gate(), x, expected)["passed"]
    row = judge(wrong, plain, (x, y), Gate(), x, expected)
    assert not row["passed"]
    assert "agrees" in row["why"]
    row = judge(wrong, plain, (x, y), Gate(agreement=0.0), x, expected)
    assert not row["passed"]
    assert "accuracy" in row["why"]
    assert judge(wrong, plain, (x, y), Gate(agreement=0.0, accuracy_drop=1.0), x, expected)["passed"]


def test_choice_is_the_fastest_then_the_smallest_of_those_that_passed():
    rows = [
        {"name": "fp32", "passed": True, "bytes": 100, "latency_ms": 1.0},
        {"name": "fp16", "passed": True, "bytes": 50, "latency_ms": 1.02},
        {"name": "int8", "passed": False, "bytes": 25, "latency_ms": 0.5},
        {"name": "int8-linear", "passed": True, "bytes": 80, "latency_ms": 2.0},
    ]
    assert choose(rows, Gate()) == "fp16"
    assert choose(rows, Gate(latency_gain=0.0)) == "fp32"
    rows[2]["passed"] = True
    assert choose(rows, Gate()) == "int8"


@pytest.mark.parametrize("name", ["agreement", "accuracy_drop", "latency_gain"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_thresholds_are_shares(name, value):
    with pytest.raises(ConfigError, match=name):
        Gate(**{name: value})


def test_table_of_all_variants_stays_in_the_manifest(every):
    path, report = every
    opened = open_bundle(path)
    rows = {row["name"]: row for row in opened.manifest["variants"]}
    assert set(rows) == set(VARIANTS)
    assert all(row["latency_ms"] > 0 and row["bytes"] > 0 for row in rows.values())
    assert set(opened.variants) == {"fp32", opened.manifest["default"]}
    assert rows[report.figures["default"]]["passed"]


def test_optimized_file_serves_its_own_machine_and_the_portable_one_all_others(every, imu, tmp_path):
    path, report = every
    default = report.figures["default"]
    opened = open_bundle(path)
    assert opened.variant()["optimized"]["cpu"] == cpu_module.cpu_class()
    assert verify_bundle(path, seconds=0).ok
    here = Predictor(path)(imu.x).logits

    manifest = json.loads(json.dumps({k: v for k, v in opened.manifest.items() if k != "files"}))
    for row in manifest["variants"]:
        if row["name"] == default:
            row["optimized"]["cpu"] = "z80"
    members = {name: bytes(content) for name, content in opened.members.items()}
    members[opened.variant()["optimized"]["file"]] = members["models/fp32.onnx"]
    elsewhere = tmp_path / "elsewhere.talaria"
    save(elsewhere, seal(manifest, members))
    there = Predictor(elsewhere)(imu.x).logits
    assert roundings(there, here) <= 1000
    assert np.array_equal(there, Session(read_bundle(path.read_bytes()).model(default))(imu.x.numpy()))


def test_convolutions_of_the_fastest_form_are_in_the_blocked_layout(proto):
    """The reason for exporting 1D convolutions as 2D ones, seen without a clock."""
    from talaria_export.runtime.session import optimized

    operators = onnx.load_from_string(optimized(proto.SerializeToString())).graph.node
    domains = [node.domain for node in operators if node.op_type == "Conv"]
    if "x86" in cpu_module.cpu_class():
        assert domains == ["com.microsoft.nchwc"] * 4
    else:
        assert len(domains) == 4


@pytest.mark.parametrize(("limit", "count", "lost"), [(0.01, 300, 3), (0.29, 100, 29), (0.07, 100, 7), (0.1, 30, 3)])
def test_a_loss_exactly_at_its_limit_is_allowed_and_one_sample_more_is_not(limit, count, lost):
    for more, kept in ((0, True), (1, False)):
        assert shares.at_most(lost + more, count, limit) is kept
        assert shares.at_least(count - lost - more, count, float(1 - Fraction(repr(limit)))) is kept


def test_the_gate_counts_samples_instead_of_comparing_floats(proto, imu):
    """91 of 100 against 90 are 0.010000000000000009 of accuracy, and exactly what a limit of 0.01 allows."""
    plain = Made("fp32", proto.SerializeToString())
    answers = Session(plain.data)(imu.x.numpy()).argmax(1)
    common, odd = 0, int(np.flatnonzero(answers != answers[0])[0])
    other = onnx.ModelProto()
    other.CopyFrom(proto)
    bias = next(t for t in other.graph.initializer if list(t.dims) == [7])
    always = np.zeros(7, np.float32)
    always[answers[common]] = 1e4
    bias.CopyFrom(onnx.numpy_helper.from_array(always, bias.name))
    stuck = Made("fp16", other.SerializeToString())
    for lost, passed in ((1, True), (2, False)):
        x = imu.x.numpy()[[common] * 90 + [odd] * lost + [common] * (10 - lost)]
        y = np.concatenate([answers[[common] * 90 + [odd] * lost], [(answers[common] + 1) % 7] * (10 - lost)])
        row = judge(stuck, plain, (x, y), Gate(agreement=0.0, accuracy_drop=0.01), x[:2], Session(plain.data)(x[:2]))
        assert row["passed"] is passed, row
    assert row["why"] == "loses 2 of 100 samples that fp32 labels right; accuracy_drop=0.01"
