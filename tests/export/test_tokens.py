"""Networks that read tokens: learned, pruned where that can be proven, and exported; what they do not know is said
before anything is learned."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import talaria
from talaria.data import Federated
from talaria.errors import DataError
from talaria.federated import kit as kits
from talaria.federated import rounds, run_model
from talaria.federated.make_kit import kit_of
from talaria.federated.run import Member, Run
from talaria.model import tokens, zoo
from talaria.model.prunability import survey
from talaria.tensors import equal
from talaria.training.engine import predict
from talaria.types import Recipe, Samples
from talaria_export import Predictor, make_bundle, open_bundle, verify_bundle

KINDS, LENGTH, CLASSES = 40, 12, 3


class Words(nn.Module):
    """Its embedding is given what samples are, float32, as most people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(KINDS, 16)
        self.conv = nn.Conv1d(16, 24, 3, padding=1)
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.conv(self.embed(x).transpose(1, 2))
        return self.head(F.relu(self.norm(found)).mean(-1))


class Sentences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(KINDS, 8)
        self.read = nn.GRU(8, 12, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.read(self.embed(x.long()))[0][:, -1])


class Phrases(nn.Module):
    """Two layers of an LSTM in both directions, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(KINDS, 8)
        self.read = nn.LSTM(8, 6, 2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, (last, _) = self.read(self.embed(x))
        return self.head(torch.cat((last[-2, :, :], last[-1, :, :]), dim=1))


def told(**more: object) -> Federated:
    """Four people's sequences, in each of which a third of the tokens tells the class."""
    draw, y = np.random.default_rng(0), np.tile(np.arange(CLASSES), 80)
    x = draw.integers(0, KINDS, (len(y), LENGTH))
    telling = draw.random(x.shape) < 1 / 3
    x[telling] = (10 * y[:, None] + draw.integers(0, 3, x.shape))[telling]
    return Federated.from_arrays(x, y, np.repeat(["anna", "bela", "carl", "dora"], 60), **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def by_torch() -> dict[type[nn.Module], float]:
    """The mean accuracy that each network reached with torch."""
    return {}


@pytest.mark.parametrize("engine", ["torch", "onnx"])
@pytest.mark.parametrize("network", [Words, Sentences])
def test_they_learn_and_are_exported(network: type[nn.Module], engine: str, by_torch, tmp_path) -> None:
    torch.manual_seed(0)
    data = told(standardize=False)
    recipe = {"epochs": 2, "lr": 0.1, "batch": 8}
    result = talaria.simulate("fedper", data, model=network(), rounds=8, recipe=recipe, engine=engine)
    assert result.accuracy.mean > 0.7
    apart = abs(result.accuracy.mean - by_torch.setdefault(network, result.accuracy.mean))
    assert apart <= 0.1  # four of 48 samples: eight rounds at a large rate make much of a rounding
    client = data.clients["anna"]
    model = result.model("anna").eval()
    path = tmp_path / "anna.talaria"
    report = make_bundle(path, model, example=client.test.x[:2], variants=("fp32",), seconds=0)
    assert report.ok
    assert verify_bundle(path, seconds=0).ok
    assert "parity/inputs.npy" not in open_bundle(path).members
    with torch.no_grad():
        want = model(torch.from_numpy(client.test.x)).argmax(1).numpy()
    assert (Predictor(path)(client.test.x).index == want).all()
    for odd in (-1, KINDS):  # which torch refuses, and ONNX would count from the end of the table
        with pytest.raises(DataError, match="out of data bounds"):
            Predictor(path)(np.full((1, LENGTH), odd, np.float32))


def test_channels_behind_an_embedding_are_pruned_where_that_is_exact() -> None:
    torch.manual_seed(0)
    network = Words()
    found = survey(tokens.as_numbers(network), tokens.example(network, (LENGTH,), 2))
    assert found.layout.sizes
    result = talaria.simulate(
        "hermes", told(standardize=False), model=network, rounds=3, options={"threshold": 0.0, "block": 8}
    )
    assert all(
        facts["parameters"] < sum(p.numel() for p in network.parameters())
        for facts in result.as_dict()["clients"].values()
    )


@pytest.mark.parametrize("network", [Sentences, Phrases])
def test_a_device_without_torch_learns_them_from_a_kit_to_the_same_bytes(network: type[nn.Module], tmp_path) -> None:
    torch.manual_seed(0)
    spec, recipe = zoo.keep(network(), (LENGTH,), CLASSES), Recipe(epochs=2, batch=8)
    run = Run(spec=spec, algorithm="fedper", rounds=1, recipe=recipe)
    own = told(standardize=False).clients["anna"]
    member = Member("anna", own.train, own.val, engine="onnx")
    shared = run_model.first_shared(run)
    made = kits.encode(kit_of(run))
    want, _ = rounds.participate(run, member, shared, None, 1)
    try:
        run_model.equip(run, kits.decode(made))
        update, private = rounds.participate(run, member, shared, None, 1)
        served = rounds.personalize(run, member, shared, private)
        assert equal(update.tensors, want.tensors)
        want = predict(served, own.test.x)
        assert want.shape == (len(own.test), CLASSES)
        path = tmp_path / "anna.talaria"
        assert make_bundle(path, served, example=own.test.x[:2], variants=("fp32",), seconds=0).ok
        assert (Predictor(path)(own.test.x).index == want.argmax(1)).all()
        with pytest.raises(DataError, match="out of data bounds"):
            Predictor(path)(np.full((1, LENGTH), -1, np.float32))
        with pytest.raises(DataError, match="a table of 40 entries"):
            predict(served, own.test.x + KINDS)
    finally:
        run_model._kits.clear()
        run_model._adopted.clear()
        run_model.update_schema.cache_clear()


def test_a_token_that_no_embedding_knows_is_told_before_anything_is_learned() -> None:
    with pytest.raises(DataError, match=r"anna's samples span -.* no entry .* standardize=false"):
        talaria.simulate("fedper", told(), model=Words(), rounds=1)


@pytest.mark.parametrize("part", ["validation", "test", "unlabelled"])
def test_so_is_one_that_nobody_learns_from(part: str) -> None:
    data = told(standardize=False)
    anna = data.clients["anna"]
    odd = np.full((2, LENGTH), KINDS, np.float32)
    if part == "unlabelled":
        anna = replace(anna, unlabelled=odd)
    else:
        name = {"validation": "val", "test": "test"}[part]
        anna = replace(anna, **{name: Samples(odd, np.zeros(2, np.int64))})
    data = replace(data, clients={**data.clients, "anna": anna})
    with pytest.raises(DataError, match=rf"anna's {part} samples span 40\.\.40, and the model has no entry"):
        talaria.simulate("fedper", data, model=Words(), rounds=1)


def test_an_example_is_made_of_tokens_that_every_embedding_knows() -> None:
    both = nn.ModuleList([nn.Embedding(9, 2), nn.Embedding(5, 2)])
    assert tokens.vocabulary(both) == 5
    example = tokens.example(both, (3, 7), 4)
    assert example.shape == (4, 3, 7)
    assert set(example.unique().tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0}
    assert tokens.vocabulary(nn.Linear(2, 2)) == 0
