from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError

import onnx
import pytest
import torch
from tolerance import roundings
from torch import Tensor, nn

from talaria.errors import BundleError, DataError, ModelError
from talaria_export import export_onnx, make_bundle
from talaria_export.convert.onnx import OPSET
from talaria_export.runtime.session import Session


def proto_of(data: bytes) -> onnx.ModelProto:
    return onnx.load_from_string(data)


@pytest.fixture(scope="module")
def exported(imu) -> bytes:
    return export_onnx(imu.model, imu.x)


def test_file_is_self_contained_with_named_ends_and_the_asserted_opset(exported):
    model = proto_of(exported)
    assert [v.name for v in model.graph.input] == ["input"]
    assert [v.name for v in model.graph.output] == ["logits"]
    assert {o.domain: o.version for o in model.opset_import}[""] == OPSET
    assert not any(t.external_data for t in model.graph.initializer)
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_any_batch_size_agrees_with_torch(imu, exported, batch):
    with torch.no_grad():
        expected = imu.model(imu.x[:batch])
    answer = torch.from_numpy(Session(exported)(imu.x[:batch].numpy()))
    assert roundings(answer, expected) <= 1000
    assert torch.equal(answer.argmax(1), expected.argmax(1))


def test_one_dimensional_convolutions_become_two_dimensional_and_batchnorm_is_gone(exported, imu):
    model = proto_of(exported)
    kernels = [
        len(attribute.ints)
        for node in model.graph.node
        if node.op_type == "Conv"
        for attribute in node.attribute
        if attribute.name == "kernel_shape"
    ]
    assert set(kernels) == {2}
    assert "BatchNormalization" not in [node.op_type for node in model.graph.node]
    raw = 4 * sum(p.numel() for p in imu.model.parameters())
    assert len(exported) <= 1.03 * raw


def test_caller_module_is_left_as_it_was(imu):
    model = nn.Sequential(nn.Conv1d(6, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(4 * 98, 7)).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    export_onnx(model, imu.x)
    assert model.training
    assert isinstance(model[0], nn.Conv1d)
    assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_example_of_one_does_not_fix_the_batch(imu):
    model = nn.Sequential(nn.Flatten(), nn.Linear(600, 7)).eval()
    assert Session(export_onnx(model, imu.x[:1]))(imu.x[:5].numpy()).shape == (5, 7)


def test_equal_models_give_equal_bytes(imu, exported):
    assert export_onnx(imu.model, imu.x[:7]) == exported


def test_exporter_keeps_quiet(imu, capfd):
    export_onnx(imu.model, imu.x)
    assert capfd.readouterr() == ("", "")


def test_file_is_written_where_asked(imu, exported, tmp_path):
    data = export_onnx(imu.model, imu.x, tmp_path / "me.onnx")
    assert (tmp_path / "me.onnx").read_bytes() == data


@pytest.mark.parametrize(
    "example", [torch.zeros(6, dtype=torch.float32), torch.zeros(0, 6, 100), torch.zeros(2, 6, 100).double()]
)
def test_example_that_is_no_float32_batch_is_refused(imu, example):
    with pytest.raises(DataError, match="example"):
        export_onnx(imu.model, example)


def test_an_example_that_is_no_tensor_is_told_how_to_become_one(imu):
    with pytest.raises(DataError, match=r"got ndarray; write torch\.as_tensor"):
        export_onnx(imu.model, imu.x.numpy())


def test_a_module_that_hands_on_whatever_it_is_given_is_exported(imu, exported):
    """As torch's own wrappers are, whose forward is ``(*inputs)``: torch's word was of the structure of its inputs."""
    for wrapped in (nn.DataParallel(imu.model), torch.optim.swa_utils.AveragedModel(imu.model)):
        answers = Session(export_onnx(wrapped, imu.x[:1]))(imu.x.numpy())
        assert roundings(answers, Session(exported)(imu.x.numpy()), scale=1.0) <= 100


class TwoOutputs(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) if float(x.sum()) > 0 else -x.flatten(1)


def test_model_without_logits_is_refused(imu):
    with pytest.raises(ModelError, match="logits"):
        export_onnx(TwoOutputs(), imu.x)


def test_model_that_torch_cannot_convert_is_named_in_one_message(imu, capfd):
    with pytest.raises(ModelError, match="Branches"):
        export_onnx(Branches(), imu.x)
    assert capfd.readouterr() == ("", "")


class Token(nn.Module):
    """A class token before patches of a recording, and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv1d(6, 8, 10, 10), nn.Linear(8, 7)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 11, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.places
        return self.head(self.layer(x)[:, 0])


def test_a_class_token_is_laid_out_for_any_batch(imu):
    torch.manual_seed(0)
    model = Token().eval()
    session = Session(export_onnx(model, imu.x))
    for batch in (1, 3):
        with torch.no_grad():
            expected = model(imu.x[:batch])
        assert roundings(torch.from_numpy(session(imu.x[:batch].numpy())), expected) <= 1000


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :7] + torch.rand(int(x.shape[0]), 7)


@pytest.mark.parametrize("model", [nn.Linear(6, 4).half(), nn.Linear(6, 4).double(), nn.Linear(5, 4)], ids=str)
def test_an_example_that_the_model_does_not_take_is_named_with_the_mend(model):
    with pytest.raises(ModelError, match=r"float32 example of shape \(2, 6\).*model\.float\(\)"):
        export_onnx(model, torch.zeros(2, 6))


def test_model_that_fixes_the_batch_is_refused(imu):
    with pytest.raises(ModelError, match="batch"):
        export_onnx(Fixed(), imu.x)


def test_what_one_export_adds_to_torchs_translations_reaches_no_other(imu, exported):
    """The table of them is built once in a process."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    mine, others = (ONNXRegistry.from_torchlib(opset_version=OPSET) for _ in range(2))
    first = next(operator for operator, found in mine.functions.items() if found)
    assert mine.functions[first][0] is others.functions[first][0]
    mine.functions[first].clear()
    mine.functions["of mine"] = []
    assert ONNXRegistry.from_torchlib(opset_version=OPSET).functions == others.functions
    assert others.functions[first]
    assert export_onnx(imu.model, imu.x) == exported


class Meeting(nn.Module):
    """It waits for whoever is exported beside it."""

    others = Barrier(2, timeout=1)

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        with suppress(BrokenBarrierError):
            self.others.wait()
        return self.head(x)


def test_two_threads_may_export():
    model = Meeting().eval()
    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(lambda _: export_onnx(model, torch.zeros(2, 4)), range(2))
    assert one == two


class Mirrored(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


class Computed(nn.Module):
    """Weights that are made anew in each call: orthogonal, symmetric, of the same parameter as another's, of a GRU."""

    def __init__(self) -> None:
        super().__init__()
        made = nn.utils.parametrizations
        self.turn = made.orthogonal(nn.Linear(6, 6))
        self.near, self.far = nn.Linear(6, 6), nn.Linear(6, 6)
        self.far.weight = self.near.weight
        nn.utils.parametrize.register_parametrization(self.near, "weight", Mirrored())
        self.gru = made.weight_norm(nn.GRU(6, 5, batch_first=True), "weight_hh_l0")
        self.head = made.spectral_norm(nn.Linear(5, 7))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.turn(x.transpose(1, 2)))
        return self.head(self.gru(self.far(torch.tanh(self.near(x))))[0][:, -1])


def test_weights_that_are_computed_are_exported_as_they_are(imu):
    torch.manual_seed(0)
    model = Computed().eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    session = Session(export_onnx(model, imu.x))
    with torch.no_grad():
        assert roundings(torch.from_numpy(session(imu.x.numpy())), model(imu.x)) <= 1000
    after = model.state_dict()
    assert [*after] == [*before]
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_what_neither_onnx_nor_its_runtime_has_is_named_with_the_mend(imu, tmp_path):
    drawn = nn.Sequential(nn.Conv1d(6, 4, 3), nn.RReLU(), nn.Flatten(), nn.Linear(4 * 98, 7))
    with pytest.raises(ModelError, match=r"rrelu.*ONNX has no operator for that; use another layer or function there"):
        export_onnx(drawn, imu.x)
    with pytest.raises(BundleError, match=r"implementation for Conv.*; give a model of float32 weights, or use"):
        make_bundle(tmp_path / "me.talaria", Double(), example=imu.x, seconds=0)
    with pytest.raises(ModelError, match=r"model: no bundle may hold it \(.*'Unique', .*; use another layer or"):
        make_bundle(tmp_path / "me.talaria", Renormed(), example=imu.x, seconds=0)
    assert not (tmp_path / "me.talaria").exists()


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(6, 4, 3).double(), nn.Linear(4, 7).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x.double()).mean(2)).float()


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(4, 8, max_norm=1.0), nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words((x[:, 0] > 0).long()).mean(1))
