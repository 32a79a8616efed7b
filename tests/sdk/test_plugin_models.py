"""Networks and datasets of somebody else's (``tests/mypkg``), by name and as objects."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from mypkg.nets import Recurrent, plain
from torch import nn

import talaria
from talaria.data import Federated, load, options_of
from talaria.errors import ConfigError, DataError, ModelError
from talaria.federated import rounds, run_model
from talaria.federated.run import Run
from talaria.model import answers, zoo
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.state import state_of
from talaria.personalizer import Personalizer
from talaria.simulation.run import members_of, simulate
from talaria.tensors import equal
from talaria.types import Recipe
from talaria_export import export_onnx

PLAIN = ModelSpec("mypkg.nets:plain", (4,), 3, options={"width": 6})


def run_of(spec: ModelSpec, algorithm: str = "fedper") -> Run:
    return Run(spec=spec, algorithm=algorithm, rounds=2, recipe=Recipe(batch=8, lr=0.05))


def test_a_network_of_somebody_elses_is_built_as_the_zoos_are() -> None:
    one, two, other = (zoo.build(spec) for spec in (PLAIN, PLAIN, ModelSpec("mypkg.nets:plain", (4,), 3, seed=1)))
    assert equal(state_of(one), state_of(two))
    assert one[0].out_features == 6  # type: ignore[index]
    assert other[0].out_features == 8  # type: ignore[index]
    assert ModelSpec.from_json(PLAIN.to_json()) == PLAIN
    assert PLAIN.to_json()["options"] == {"width": 6}
    assert "options" not in ModelSpec("mlp", (4,), 3).to_json()
    assert hash(PLAIN) == hash(ModelSpec.from_json(PLAIN.to_json()))


def test_options_may_be_called_as_talaria_calls_things_itself() -> None:
    spec = ModelSpec("mypkg.nets:worded", (4,), 3, options={"kind": "wide", "what": 6})
    assert zoo.build(spec)[0].out_features == 6  # type: ignore[index]
    assert load("mypkg.sets:called", name="mine", kind="far", what=3).name == "mine-far"


def test_its_head_is_found_or_named() -> None:
    assert zoo.head(PLAIN) == "2"
    assert zoo.head(ModelSpec("mypkg.nets:Recurrent", (6, 20), 3)) == "answer"
    adapted = ModelSpec("mypkg.nets:plain", (4,), 3, AdapterSpec("lowrank", 2))
    assert set(zoo.split(adapted, zoo.build(adapted)).head) == {"2.weight", "2.bias"}
    named = ModelSpec("mypkg.nets:headless", (4,), 3, head="3")
    assert set(zoo.split(named, zoo.build(named)).head) == {"3.weight", "3.bias"}
    assert zoo.head(ModelSpec("mlp", (4,), 3)) == "head"
    with pytest.raises(ModelError, match="its last layer must be Linear and give classes=3, but '0' gives 8"):
        zoo.head(ModelSpec("mypkg.nets:headless", (4,), 3))
    with pytest.raises(ModelError, match="head='tail' names no layer"):
        run_model.split_of(run_of(ModelSpec("mypkg.nets:plain", (4,), 3, head="tail")))


def test_a_head_that_is_made_first_is_found_where_it_answers() -> None:
    data = load("mypkg.sets:rings")
    done = talaria.simulate("fedper", data, "mypkg.nets:AnswerFirst", rounds=1)
    assert {key.partition(".")[0] for key in done.learned.shared} == {"one", "two"}
    named = talaria.simulate("fedper", data, "mypkg.nets:AnswerFirst", rounds=1, head="two")
    assert {key.partition(".")[0] for key in named.learned.shared} == {"one", "answer"}


def test_a_network_that_ends_in_a_softmax_is_told_of() -> None:
    shares = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), nn.Softmax(1))
    with pytest.warns(UserWarning, match="adds up to 1, as behind a Softmax.* End it with its last Linear layer"):
        talaria.simulate("fedper", load("mypkg.sets:rings"), shares, rounds=1)


def test_a_network_that_says_itself_what_is_frozen_is_told_who_says_so() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    net[0].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"requires_grad=False of 0.weight, 0.bias is not looked at.*\(freeze=0\)"):
        talaria.simulate("fedper", load("mypkg.sets:rings"), net, rounds=1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_module_of_torchscript_is_named() -> None:
    net = nn.Sequential(nn.Linear(4, 6), torch.jit.script(nn.ReLU()), nn.Linear(6, 3))  # type: ignore[no-untyped-call]
    with pytest.raises(ModelError, match=r"1 is a module of TorchScript.*give the module that torch.jit was given"):
        zoo.keep(net, (4,), 3)


def test_layers_without_weights_before_a_call_are_refused() -> None:
    net = nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.Linear(6, 3))
    with pytest.raises(ModelError, match=r"0 is a LazyLinear.*make it a Linear with its sizes, or call the model once"):
        talaria.simulate("fedper", load("mypkg.sets:rings"), net, rounds=1)
    net(torch.zeros(2, 4))
    talaria.simulate("fedper", load("mypkg.sets:rings"), net, rounds=1)


class TwoNames(nn.Module):
    """Its first layer stands in a Sequential too, and the pass takes one way or the other, or both."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first = way, nn.Linear(4, 6)
        self.net, self.last = nn.Sequential(self.first, nn.ReLU()), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once = self.net(x) if self.way != "first" else torch.relu(self.first(x))
        return self.last(once + self.first(x) if self.way == "both" else once)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("way", "kept"), [("net", "net.0"), ("first", "first"), ("both", None)])
def test_a_layer_of_two_names_keeps_the_one_that_its_pass_needs(way: str, kept: str | None) -> None:
    spec = zoo.keep(TwoNames(way), (4,), 3)
    names = {name.rpartition(".")[0] for name in zoo.build(spec).state_dict()}
    assert names == ({kept, "last"} if kept else {"first", "net.0", "last"})
    assert bool(zoo.layout(spec).sizes) is (kept is not None), "of one name it may be pruned"
    done = talaria.simulate("fedavg", load("mypkg.sets:rings"), TwoNames(way), rounds=2)
    assert {name.rpartition(".")[0] for name in done.learned.shared} == names


def test_weights_that_a_hook_makes_are_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(net[0])
    with pytest.raises(ModelError, match=r"weights of 0 anew.*use torch.nn.utils.parametrizations.weight_norm"):
        talaria.simulate("fedper", load("mypkg.sets:rings"), net, rounds=1)


def test_what_answers_a_sample_by_those_beside_it_is_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.ReLU(), nn.Linear(6, 3))
    with pytest.raises(ModelError, match=r"model: 1 keeps no running mean.*give it track_running_stats=True"):
        talaria.simulate("fedper", load("mypkg.sets:rings"), net, rounds=1)


class Repeated(nn.Module):
    """A block with dropout of its own that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Repeated.Inner(), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.inner(x)))  # type: ignore[no-any-return]

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.fc(x), 0.5, self.training)


def test_a_call_of_dropout_is_one_layer_however_often_its_block_is_called() -> None:
    model = zoo.build(zoo.keep(Repeated(), (4,), 3))
    assert [name for name, one in model.named_modules() if isinstance(one, nn.Dropout)] == ["inner.dropout_call_0"]
    x = torch.ones(64, 4)
    assert not torch.equal(model(x), model(x)), "it drops in training"
    model.eval()
    assert torch.equal(model(x), model(x))
    net = Repeated()
    runs = [talaria.simulate("fedper", load("mypkg.sets:rings"), net, rounds=2) for _ in range(2)]
    assert equal(runs[0].learned.shared, runs[1].learned.shared)


class OneForAll(nn.Module):
    """One layer of dropout behind several others, and in two blocks that share it, beside a call of the function."""

    def __init__(self, share: float = 0.5) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(4, 6), nn.Linear(6, 6), nn.Dropout(share)
        self.blocks, self.last = nn.Sequential(*(OneForAll.Block(self.drop) for _ in range(2))), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.drop(self.one(x)), 0.25, self.training)
        return self.last(self.drop(self.blocks(self.two(x))))  # type: ignore[no-any-return]

    class Block(nn.Module):
        def __init__(self, drop: nn.Module) -> None:
            super().__init__()
            self.fc, self.drop = nn.Linear(6, 6), drop

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.drop(self.fc(x))  # type: ignore[no-any-return]


def test_each_call_of_a_layer_of_dropout_is_a_layer() -> None:
    model = zoo.build(zoo.keep(OneForAll(), (4,), 3))
    shares = {name: one.p for name, one in model.named_modules() if isinstance(one, nn.Dropout)}
    of_blocks = {f"blocks.{number}.dropout_call_0": 0.5 for number in range(2)}
    assert shares == {**{f"dropout_call_{n}": share for n, share in enumerate((0.5, 0.25, 0.5))}, **of_blocks}
    seen = dict[str, torch.Tensor]()
    for name, one in model.named_modules():
        if name in shares:
            one.register_forward_hook(lambda _, given, out, name=name: seen.update({name: out == 0}))
    x = torch.ones(64, 4)
    assert not torch.equal(model(x), model(x)), "it drops in training"
    assert seen.keys() == shares.keys()
    assert all(bool(one.any()) for one in seen.values())
    model.eval()
    assert torch.equal(model(x), model(x))
    plain = zoo.build(zoo.keep(OneForAll(0.0), (4,), 3))
    assert isinstance(plain.get_submodule("drop"), nn.Dropout), "what takes nothing away stays as it is"


class AlwaysDropping(nn.Module):
    """Forgets who trains and who asks."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(nn.functional.dropout(self.one(x), 0.5))  # type: ignore[no-any-return]


class AlwaysForgetting(AlwaysDropping):
    """The same of the weights of attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.one(x).unsqueeze(1)
        return self.two(nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5).squeeze(1))  # type: ignore[no-any-return]


def test_steps_behind_their_outputs_as_convolutions_have_them_are_told_how_to_be_turned() -> None:
    with pytest.raises(ModelError, match=r"it gives \(2, 3, 8\) .*: end its forward with \.transpose\(1, 2\)"):
        answers.require(nn.Conv1d(2, 3, 1), torch.zeros(2, 2, 8), 3, "model")


@pytest.mark.parametrize("net", [AlwaysDropping, AlwaysForgetting])
def test_dropout_that_evaluation_does_not_stop_is_refused(net: type[nn.Module]) -> None:
    said = "it drops values when it is evaluated too.* write F.dropout\\(x, p, training=self.training\\)"
    with pytest.raises(ModelError, match=said):
        talaria.simulate("fedper", load("mypkg.sets:rings"), net(), rounds=1)


@pytest.mark.parametrize(
    ("net", "shape", "says"),
    [
        ("TwoAnswers", (4,), r"its forward gives a tuple; give one tensor \(N, 3\)"),
        ("Summed", (4,), r"it gives \(2, 1\) for 2 samples; it must give \(N, 3\)"),
        ("Residual", (4,), r"cannot read samples of shape \(4,\) \(RuntimeError: .*input_shape"),
    ],
)
def test_a_network_that_does_not_answer_as_a_model_is_refused_before_it_learns(
    net: str, shape: tuple[int, ...], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        run_model.first_shared(run_of(ModelSpec(f"mypkg.nets:{net}", shape, 3)))


def test_a_recurrent_network_is_surveyed_without_a_word() -> None:
    spec = zoo.keep(LongGRU(), (6, 40), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert zoo.layout(spec).sizes == {"rnn": 8}


@pytest.mark.parametrize("kind", ["lowrank:rank=2", "residual"])
def test_a_transformer_learns_adapters_on_its_linear_layers(kind: str) -> None:
    draw = np.random.default_rng(0)
    data = Federated.from_arrays(draw.normal(size=(40, 3, 16)), np.arange(40) % 3, np.repeat(["anna", "bela"], 20))
    done = talaria.simulate("fedavg", data, "mypkg.nets:Attentive", rounds=1, adapters=kind)
    tuned = {key.partition(".adapter")[0] for key in done.learned.shared if ".adapter" in key}
    assert tuned >= {"layer.linear1", "layer.linear2", "patch"}
    model: Any = done.model("anna")
    x = torch.from_numpy(data.clients["anna"].test.x)
    with torch.no_grad():  # torch's short way around a layer's parts would leave the adapters out
        before, adapter = model(x), model.layer.linear1.adapter
        (adapter if kind == "residual" else adapter.up).weight.add_(1)
        assert not torch.equal(before, model(x))


class LongGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.rnn(x.transpose(1, 2))[0][:, -1])
        return out


@pytest.mark.parametrize("algorithm", ["fedavg", "fedper"])
def test_it_learns(algorithm: str) -> None:
    data = load("mypkg.sets:rings", clients=3)
    done = simulate(run_of(PLAIN, algorithm), members_of(data.clients))
    assert not equal(done.shared, run_model.first_shared(done.run))
    assert ("2.weight" in done.shared) == (algorithm == "fedavg")


class Grouped(nn.Module):
    """A residual block with GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv1d(6, 32, 5, padding=2), nn.GroupNorm(8, 32)
        self.one, self.inner = nn.Conv1d(32, 32, 3, padding=1), nn.GroupNorm(8, 32)
        self.two, self.last, self.head = nn.Conv1d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.stem(x)).relu()
        out: torch.Tensor = self.head((x + self.last(self.two(self.inner(self.one(x)).relu()))).relu().mean(2))
        return out


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_hermes_prunes_whole_groups_of_a_network_with_group_norm(engine: Any) -> None:
    draw, y = np.random.default_rng(0), np.tile([0, 1, 2], 30)
    x = draw.normal(size=(90, 6, 20)) + y[:, None, None]
    data = Federated.from_arrays(x, y, np.repeat(["anna", "bela"], 45))
    done = talaria.simulate("hermes", data, Grouped(), rounds=3, options={"threshold": 0.0}, engine=engine)
    assert done.learned.masks["anna"].layout.sizes == {"stem": 8, "one": 8}
    model: Any = done.model("anna")
    assert model.inner.num_groups == len(model.inner.weight) // 4 < 8
    assert done.accuracy.mean > 0.5


def test_a_module_of_this_process_learns_from_its_own_weights() -> None:
    torch.manual_seed(7)
    own = plain((4,), 3, width=6)
    spec = zoo.keep(own, (4,), 3)
    assert equal(state_of(zoo.build(spec)), state_of(own))
    data = load("mypkg.sets:rings")
    done = simulate(run_of(spec), members_of(data.clients))
    assert not equal(done.shared, run_model.first_shared(done.run))
    with torch.no_grad():
        own[0].weight.zero_()
    assert not equal(state_of(zoo.build(spec)), state_of(own)), "it was copied"
    assert zoo.keep(own, (4,), 3) != spec
    with pytest.raises(ConfigError, match="is known in this process only"):
        rounds.require_travels(run_of(spec))
    with pytest.raises(ConfigError, match="is known in one process only"):
        Run.from_json(run_of(spec).to_json(), allow=("mypkg", "torch"))
    with pytest.raises(ModelError, match="it has no Linear layer"):
        zoo.keep(nn.Sequential(nn.Conv1d(1, 1, 1)), (1, 4), 2)
    with pytest.raises(ConfigError, match="must be a torch module"):
        zoo.keep(Recurrent, (6, 20), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("imu_cn", {}, r"model 'imu_cn' is unknown \(did you mean 'imu_cnn'\?\)"),
        ("mypkg.nets:plane", {}, r"has no 'plane' \(did you mean 'plain'\?\)"),
        ("mypkg.nets:plain", {"widht": 3}, r"option 'widht' is unknown \(did you mean 'width'\?\); it takes width"),
        ("mypkg.nets:plain", {"width": "wide"}, "width='wide' must be a whole number"),
        ("mypkg.nets:text", {}, "its factory gave a str; it must give a torch module"),
        ("mypkg.nets:angry", {}, r"cannot be made \(ValueError: not today\)"),
        ("mypkg.nets:MADE", {}, r"is a Linear; name a function \(input_shape, classes\)"),
        ("mlp", {"width": 3}, "model 'mlp': option 'width' is unknown; it takes none"),
    ],
)
def test_what_is_no_model_is_refused(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        zoo.build(ModelSpec(name, (4,), 3, options=options))  # type: ignore[arg-type]


def test_a_model_of_another_process_is_told_from_one_that_is_misspelled() -> None:
    with pytest.raises(
        ConfigError, match=r"'__main__:<lambda>#7' was known in one process only.*into a module, and name"
    ):
        zoo.build(ModelSpec("__main__:<lambda>#7", (4,), 3))


def test_a_run_from_the_network_names_no_model_that_is_not_allowed() -> None:
    text = run_of(PLAIN).to_json()
    assert Run.from_json(text, ("mypkg",)) == run_of(PLAIN)
    with pytest.raises(ConfigError, match=r"model 'mypkg.nets:plain' is of package 'mypkg', which is not allowed"):
        Run.from_json(text)
    with pytest.raises(ConfigError, match=r"'nn' in mypkg.nets is a module"):
        Run.from_json(text.replace("nets:plain", "nets:nn.Linear"), ("mypkg",))


def test_wrong_fields_of_a_spec() -> None:
    for given, says in (
        ({"options": [1, 2]}, "must be a table of names and values"),
        ({"options": {"a": [1]}}, r"options\['a'\]=\[1\] must be a number or text"),
        ({"head": ""}, "head='' must be the dotted name of a layer"),
    ):
        with pytest.raises(ConfigError, match=says):
            ModelSpec("mlp", (4,), 3, **given)  # type: ignore[arg-type]


# -- datasets


def test_a_dataset_of_somebody_elses() -> None:
    assert len(load("mypkg.sets:rings", clients=3).clients) == 3
    assert options_of("mypkg.sets:rings") == ("clients", "seed")
    for name, options, says in (
        ("mypkg.sets:nothing", {}, "gave a NoneType; it must return a talaria.data.Federated"),
        ("mypkg.sets:rings", {"cliens": 3}, r"option 'cliens' is unknown \(did you mean 'clients'\?\)"),
        ("mypkg.sets:rings", {"clients": 0}, "cannot be made|holds no|data: "),
        ("mypkg.nets:MADE", {}, "cannot be made|option|gave a"),
    ):
        with pytest.raises((ConfigError, DataError), match=says):
            load(name, **options)


def test_arrays_in_python_are_what_a_file_of_them_is(tmp_path: Any) -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(60, 4)), np.tile(["rest", "walk", "run"], 20)
    client = np.repeat(["anna", "bela"], 30)
    np.savez(tmp_path / "d.npz", x=x, y=y, client=client)
    there = load(f"npz:{tmp_path / 'd.npz'}", seed=3)
    objects = y.astype(object), client.astype(object)  # as pandas gives a column of text
    own_text = getattr(np.dtypes, "StringDType", lambda: object)()  # of any length, in numpy 2
    words = [given.astype(own_text) for given in (y, client)]
    learned = torch.from_numpy(x).requires_grad_()
    ways = (x, y.tolist(), client), (x.tolist(), y, client), (learned, *objects), ([*learned], *objects), (x, *words)
    for own, *text in ways:
        here = Federated.from_arrays(own, *text, seed=3)
        assert here.labels == there.labels
        assert here.meta == there.meta
        for name, one in here.clients.items():
            for part in ("train", "val", "test"):
                assert np.array_equal(getattr(one, part).x, getattr(there.clients[name], part).x)
                assert np.array_equal(getattr(one, part).y, getattr(there.clients[name], part).y)


def test_tensors_of_half_a_float_are_read() -> None:
    x, client = torch.tensor([[0.5], [1.5]]).repeat(20, 1), [0, 1] * 20
    given, whole = (Federated.from_arrays(one, client, client) for one in (x.bfloat16(), x))
    for name, one in given.clients.items():
        assert np.array_equal(one.train.x, whole.clients[name].train.x)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"y": [0, 1]}, r"data: x has 4 rows, y has shape \(2,\)"),
        ({"client": [0, 1]}, "client has shape"),
        ({"split": [0, 0, 4, 2]}, "data: split=4 is unknown"),
        ({"x": [[1.0], [2.0, 3.0]]}, "data: x cannot be an array|holds Python objects"),
        ({"y": [object()] * 4}, "data: y holds Python objects"),
        ({"y": np.array(["a", "b", None, "a"], object)}, "data: y holds Python objects"),
        ({"x": np.ma.masked_equal([[0.0], [1.0], [-9999.0], [1.0]], -9999)}, "data: x: hides 1 of its values under a"),
        ({"y": np.ma.masked_equal([0, 1, -1, 1], -1)}, "data: y: hides 1 of its values under a mask"),
        ({"x": {"one": np.ma.masked_equal(np.eye(4), 1)}}, "data: x: input 'one': hides 4 of its values under a mask"),
        ({"y": [1, 1, 1, 1]}, "y holds one class only"),
        ({"x": [[np.nan]] * 4}, r"x\[0\] holds NaN"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"layout": "sideways"}, "layout='sideways' is unknown"),
    ],
)
def test_wrong_arrays_say_which_and_how(given: dict[str, Any], says: str) -> None:
    right: dict[str, Any] = {"x": [[0.0], [1.0], [0.0], [1.0]], "y": [0, 1, 0, 1]}
    with pytest.raises((DataError, ConfigError), match=says):
        Federated.from_arrays(**{**right, **given})


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (lambda: nn.LazyLinear(6), "0 is a LazyLinear.*make it a Linear with its sizes"),
        (
            lambda: nn.utils.weight_norm(nn.Conv1d(4, 6, 1)),
            r"weights of 0 anew in each call; use torch.nn.utils.par",
        ),
    ],
)
def test_a_device_alone_and_an_export_name_what_cannot_be_copied(layer: Any, said: str) -> None:
    net = nn.Sequential(layer(), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3))
    with pytest.raises(ModelError, match=said):
        Personalizer(net)
    with pytest.raises(ModelError, match=said):
        export_onnx(net, torch.zeros(2, 4, 1))


def test_a_device_alone_warns_as_a_simulation_does() -> None:
    x, y = np.random.default_rng(0).normal(size=(12, 4)), np.arange(12) % 3
    shares = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), nn.Softmax(1))
    with pytest.warns(UserWarning, match="adds up to 1, as behind a Softmax.* End it with its last Linear layer"):
        Personalizer(shares).fit((x, y), epochs=1)
    plain = "regression:center=zero,spread=1"
    Personalizer(shares, task=plain).fit((x, np.eye(3)[y]), epochs=1)  # shares may be what is learned
    frozen = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    frozen[0].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"requires_grad=False of 0.weight, 0.bias is not looked at.*\(freeze=0\)"):
        Personalizer(frozen).fit((x, y), epochs=1)
