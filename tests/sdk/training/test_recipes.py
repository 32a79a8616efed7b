"""Recipes: optimizers against torch's, rates over rounds, what is frozen, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from tolerance import roundings

import talaria
from talaria.data import Federated
from talaria.errors import ConfigError
from talaria.training.array_sgd import ArraySGD
from talaria.training.sgd import SGD
from talaria.types import Recipe

THEIRS: dict[str, Any] = {
    "sgd": lambda w: torch.optim.SGD(w, 0.05, momentum=0.8, weight_decay=0.1),
    "nesterov": lambda w: torch.optim.SGD(w, 0.05, momentum=0.8, weight_decay=0.1, nesterov=True),
    "adam": lambda w: torch.optim.Adam(w, 0.05, betas=(0.8, 0.999), weight_decay=0.1),
    "adamw": lambda w: torch.optim.AdamW(w, 0.05, betas=(0.8, 0.999), weight_decay=0.1),
}


@pytest.fixture(scope="module")
def data() -> Federated:
    draw = np.random.default_rng(0)
    y = np.tile([0, 1], 60)
    x = draw.normal(size=(120, 6)) + 2 * y[:, None]
    return Federated.from_arrays(x, y, np.repeat(["anna", "bela"], 60))


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("name", list(THEIRS))
def test_both_engines_step_as_torch_does(name: str, clip: float) -> None:
    draw = np.random.default_rng(1)
    start = {key: draw.normal(size=shape).astype(np.float32) for key, shape in (("a", (4, 3)), ("b", (3,)))}
    slopes = [{key: draw.normal(size=v.shape).astype(np.float32) for key, v in start.items()} for _ in range(5)]
    recipe = Recipe(optimizer=name, lr=0.05, momentum=0.8, weight_decay=0.1, clip=clip)

    def walked(make: Any, step: Any = None) -> dict[str, np.ndarray[Any, Any]]:
        weights = {key: torch.tensor(v, requires_grad=True) for key, v in start.items()}
        optimizer = make(weights)
        for slope in slopes:
            for key, weight in weights.items():
                weight.grad = torch.tensor(slope[key])
            if step:
                step(weights.values())
            optimizer.step()
        return {key: weight.detach().numpy() for key, weight in weights.items()}

    cut = (lambda weights: torch.nn.utils.clip_grad_norm_(weights, clip)) if clip else None
    theirs = walked(lambda weights: THEIRS[name](list(weights.values())), cut)
    assert roundings(walked(lambda weights: SGD(weights, recipe)), theirs) < 64
    arrays, ours = dict(start), ArraySGD(recipe)
    for slope in slopes:
        ours.step(arrays, slope)
    assert roundings(arrays, theirs) < 64


def test_rates_over_rounds() -> None:
    def rates(**more: Any) -> list[float]:
        return [Recipe(lr=1.0, **more).at(round, 8).lr for round in range(1, 9)]

    assert rates() == [1.0] * 8
    assert rates(schedule="step") == [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]
    cosine = rates(schedule="cosine")
    assert cosine[0] == 1
    assert cosine[4] == pytest.approx(0.5)
    assert 0 < cosine[-1] < 0.05
    assert cosine == sorted(cosine, reverse=True)
    warm = rates(schedule="step", warmup=4)
    assert warm == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 0.1, 0.01])


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_a_recipe_is_learned_on_both_engines_and_what_is_frozen_stays(data: Federated, engine: Any) -> None:
    recipe = {"optimizer": "adam", "lr": 0.01, "schedule": "cosine", "clip": 1.0, "freeze": "body"}
    first = next(name for name in talaria.simulate("fedavg", data, "mlp", rounds=1).learned.shared)
    recipe["freeze"] = first.rpartition(".")[0]
    found = {n: talaria.simulate("fedavg", data, "mlp", rounds=n, recipe=recipe, engine=engine) for n in (1, 4)}
    assert found[4].accuracy.mean > 0.9
    one, four = (found[n].learned.shared for n in (1, 4))
    still = {name for name in one if np.array_equal(one[name], four[name])}
    assert {name for name in one if name.startswith(recipe["freeze"])} <= still < set(one)


@pytest.mark.parametrize("algorithm", ["apfl", "perfedavg"])
def test_a_model_that_is_frozen_whole_is_served_as_it_began(data: Federated, algorithm: str) -> None:
    for engine in ("torch", "onnx"):
        done = talaria.simulate(algorithm, data, "mlp", rounds=2, recipe={"freeze": "*"}, engine=engine)
        first = talaria.simulate("fedavg", data, "mlp", rounds=1, recipe={"epochs": 0}).learned.shared
        assert all(np.array_equal(done.learned.shared[name], first[name]) for name in first)


def test_engines_agree_on_adam(data: Federated) -> None:
    recipe = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.01, "warmup": 1}
    torchs, programs = (
        talaria.simulate("fedper", data, "mlp", rounds=2, recipe=recipe, engine=engine).learned.shared
        for engine in ("torch", "onnx")
    )
    assert all(np.allclose(torchs[name], programs[name], atol=1e-3) for name in torchs)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"recipe": {"optimizer": "lion"}}, "optimizer='lion'.*adamw"),
        ({"recipe": {"schedule": "up"}}, "schedule='up'.*cosine"),
        ({"recipe": {"warmup": -1}}, "warmup=-1"),
        ({"recipe": {"warmup": 3}, "rounds": 3}, "warmup=3 must be below rounds=3"),
        ({"recipe": {"clip": -0.1}}, "clip=-0.1.*0 for no limit"),
        ({"recipe": {"optimizer": "nesterov", "momentum": 0.0}}, "momentum=0 leaves nesterov nothing"),
        ({"recipe": {"freeze": [3]}}, "freeze=.*must be a list of dotted names"),
        ({"recipe": {"freeze": 0}}, "freeze=0 must be a list of dotted names"),
        ({"recipe": {"freeze": False}}, "freeze=False must be a list of dotted names"),
        ({"recipe": {"freeze": ["nose"]}}, "freeze='nose' names no layer; the model has"),
        (
            {"recipe": {"optimizer": "adam"}, "algorithm": "apfl"},
            "apfl: its two models step along one slope.*use optimizer='sgd'",
        ),
    ],
)
def test_what_does_not_fit_a_recipe_is_refused(data: Federated, words: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        talaria.simulate(**{"algorithm": "fedavg", "data": data, "model": "mlp", "rounds": 1, **words})


def test_a_recipe_as_it_was_travels_as_it_did() -> None:
    assert set(Recipe().to_json()) == {
        "epochs", "batch", "lr", "momentum", "weight_decay", "smoothing", "steps", "most_steps", "accumulate", "augment"
    }  # fmt: skip
    changed = Recipe(optimizer="adam", freeze=("body",))
    assert Recipe.from_json(changed.to_json()) == changed
