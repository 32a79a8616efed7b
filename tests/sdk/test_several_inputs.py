"""Several named inputs, padding masks among them, side by side in one array: files, training, pruning, bundles."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mypkg.nets import Masked
from torch import nn

import talaria
from talaria import inputs
from talaria.algorithms.thorki.fusion_gate import ConstantGate
from talaria.algorithms.thorki.serving import fused
from talaria.data import Federated
from talaria.errors import BundleError, ConfigError, DataError, ModelError
from talaria.federated.run import Run
from talaria.model import zoo
from talaria.model.several import Several
from talaria.model.spec import ModelSpec
from talaria.personalizer import Personalizer
from talaria.planning.plan import Plan
from talaria.types import Samples
from talaria_export import Predictor, make_bundle, open_bundle, verify_bundle
from talaria_export.bundle.manifest import parse_manifest

NUMBERS = 6 * 32 + 4 + 32
SPEC = ModelSpec("mypkg.nets:masked", (NUMBERS,), 3)


def recorded(count: int, seed: int = 0) -> tuple[dict[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    draw, y = np.random.default_rng(seed), np.arange(count) % 3
    mask = np.arange(32) < draw.integers(8, 33, count)[:, None]
    imu = (draw.standard_normal((count, 6, 32)) + 2 * y[:, None, None]).astype(np.float32)
    imu[~np.repeat(mask[:, None], 6, 1)] = 0.0
    return {"imu": imu, "about": draw.standard_normal((count, 4)).astype(np.float32), "mask": mask}, y


def test_inputs_stand_side_by_side_in_the_order_of_their_names() -> None:
    xs, _ = recorded(5)
    x, parts = inputs.joined(xs)
    assert list(parts.items()) == [("about", (4,)), ("imu", (6, 32)), ("mask", (32,))]
    assert (x.shape, x.dtype) == ((5, NUMBERS), np.float32)
    for name, values in inputs.apart(x, parts).items():
        assert np.array_equal(values, xs[name].astype(np.float32))
    one = {name: values[0] for name, values in xs.items()}
    assert np.array_equal(inputs.fitting(one, parts), x[:1])
    assert np.array_equal(Samples.of(xs, [0, 1, 2, 0, 1]).x, x)
    given = Several(Masked(3), imu=(6, 32), about=(4,), mask=(32,)).eval()
    with torch.no_grad():
        want = given.module(**{name: torch.from_numpy(value).float() for name, value in xs.items()})
        assert torch.equal(given(torch.from_numpy(x)), want)


def test_the_input_of_another_shape_is_named_and_not_one_that_fits() -> None:
    xs, _ = recorded(5)
    _, parts = inputs.joined(xs)
    one = {name: values[0] for name, values in xs.items()}
    with pytest.raises(DataError, match=r"input 'imu' has shape \(32, 6\); give \(6, 32\)"):
        inputs.fitting({**one, "imu": one["imu"].T}, parts)


def test_a_file_of_named_inputs_is_learned_pruned_and_exported(tmp_path: Path) -> None:
    xs, y = recorded(240)
    np.savez(tmp_path / "mine.npz", y=y, client=np.arange(240) // 80, **{f"x_{name}": xs[name] for name in xs})
    data = talaria.data.load(f"npz:{tmp_path / 'mine.npz'}")
    mask = inputs.apart(data.clients["client-0"].train.x, data.meta["parts"])["mask"]
    assert set(np.unique(mask)) == {0.0, 1.0}, "a mask is not scaled"
    assert set(zoo.layout(SPEC).sizes) == {"module.one", "module.mix"}
    for algorithm in ("fedper", "hermes"):
        for engine in ("torch", "onnx"):
            more = {"rounds": 2, "recipe": {"epochs": 8, "lr": 0.05}, "engine": engine}
            found = talaria.simulate(algorithm, data, "mypkg.nets:masked", **more)  # type: ignore[arg-type]
            assert found.accuracy.mean > 0.6, (algorithm, engine)


def test_a_bundle_takes_named_inputs_and_says_so(tmp_path: Path) -> None:
    (xs, y), (held, told) = recorded(120), recorded(45, seed=1)
    personal = Personalizer(SPEC, plan=Plan(widths={"module.one": 8, "module.mix": 8})).fit(
        (xs, y), (held, told), epochs=25
    )
    assert personal.accuracy is not None
    assert personal.accuracy > 0.8
    personal.export(path := tmp_path / "me.talaria", seconds=0)
    predict = Predictor(path, variant="fp32")
    with torch.no_grad():
        want = personal.model(torch.from_numpy(inputs.joined(held)[0])).numpy()
    assert np.abs(predict(held).logits - want).max() < 1e-4
    assert predict({name: values[0] for name, values in held.items()}).label == predict(held).labels[0]
    other = {**held, "imu": np.where(held["mask"][:, None], held["imu"], -7.0).astype(np.float32)}
    assert np.array_equal(predict(other).logits, predict(held).logits), "what a mask hides does not matter"
    assert open_bundle(path).parts == {"about": (4,), "imu": (6, 32), "mask": (32,)}
    assert verify_bundle(path, samples=(inputs.joined(held)[0], told), seconds=0).ok
    with pytest.raises(DataError, match=r"x: has the inputs \['imu'\]; the model takes about \(4,\), imu"):
        predict({"imu": held["imu"]})
    with pytest.raises(DataError, match=r"x: input 'imu' has shape \(45, 32, 6\); give \(6, 32\) for one"):
        predict({**held, "imu": held["imu"].transpose(0, 2, 1)})
    manifest = dict(open_bundle(path).manifest)
    manifest["input"] = {**manifest["input"], "parts": [{"name": "imu", "shape": [6, 32]}]}
    with pytest.raises(BundleError, match=r"manifest\.json: input="):
        parse_manifest(json.dumps(manifest).encode())


def test_two_that_are_served_as_one_name_their_inputs_too(tmp_path: Path) -> None:
    xs, _ = recorded(60)
    two = [Several(Masked(3), imu=(6, 32), about=(4,), mask=(32,)).eval() for _ in range(2)]
    make_bundle(tmp_path / "two.talaria", fused(*two, ConstantGate(0.5)), example=inputs.joined(xs)[0], seconds=0)
    assert open_bundle(tmp_path / "two.talaria").parts == {"about": (4,), "imu": (6, 32), "mask": (32,)}


def test_without_torch_a_model_of_another_package_is_named_and_never_imported() -> None:
    text = Run(spec=SPEC, algorithm="fedavg").to_json()
    with pytest.raises(ConfigError, match="mypkg"):
        Run.from_json(text)
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from talaria.federated.run import Run; from talaria.model import zoo; from talaria.errors import ConfigError\n"
        "run = Run.from_json(sys.stdin.read())\n"
        "try: zoo.head(run.spec)\n"
        "except ConfigError as error: print(error)\n"
        "assert not any(name.startswith('mypkg') for name in sys.modules)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert "its code needs torch, which is not installed; learn it with programs (a kit)" in done.stdout


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"imu": np.zeros((5, 6, 32), np.uint8)},
            r"'imu' is uint8 .*divide pixels by 255 as float32",
        ),
        ({"about": np.zeros((4, 4), np.float32)}, r"its inputs have .*'about': 4.* samples; give as many of each"),
        ({"train": np.zeros((5, 4), np.float32)}, r"'train' names no input; use letters, digits and _"),
        ({"a b": np.zeros((5, 4), np.float32)}, r"'a b' names no input"),
        ({"about": np.array(["x"] * 5)}, r"input 'about' is <U1 \(5,\); need float32"),
        ({"about": np.zeros((5, 0), np.float32)}, r"about=\(0,\) must be its shape without N"),
        (
            {"about": [[1.0], [1.0, 2.0], [3.0], [4.0], [5.0]]},
            r"input 'about': is no array .*give samples of one shape",
        ),
        ({"about": torch.zeros(5, 4).to_sparse()}, r"input 'about': is no array .*to_dense"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changed: dict[str, Any], said: str) -> None:
    xs, y = recorded(5)
    with pytest.raises(DataError, match=said):
        Samples.of({**xs, **changed}, y)
    with pytest.raises(DataError, match=said):
        Federated.from_arrays({**xs, **changed}, y)


def test_files_and_models_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    xs, y = recorded(60)
    data = Federated.from_arrays(xs, y)
    np.savez(tmp_path / "both.npz", x=xs["imu"], x_imu=xs["imu"], y=y)
    with pytest.raises(DataError, match=r"both\.npz holds x_imu, x; write x_NAME of each input, y and split, or one x"):
        talaria.data.load(f"npz:{tmp_path / 'both.npz'}")
    with pytest.raises(ModelError, match=r"takes about, imu, mask; .*Several\(module, about=\(\.\.\.\), imu"):
        talaria.simulate("fedper", data, "mypkg.nets:bare", rounds=1)
    with pytest.raises(ModelError, match="forward takes about, imu, mask"):
        Personalizer(Masked(3))
    with pytest.raises(ModelError, match="forward takes about, imu, mask"):
        talaria.simulate("fedper", data, Masked(3), rounds=1)
    with pytest.raises(DataError, match=r"have the inputs about .*, and the model reads one array; give it"):
        talaria.simulate("fedper", data, "mypkg.nets:plain", rounds=1)
    less = Federated.from_arrays({"imu": xs["imu"], "mask": xs["mask"]}, y)
    with pytest.raises(DataError, match=r"have the inputs imu .*, and the model takes about \(4,\), imu"):
        talaria.simulate("fedper", less, "mypkg.nets:masked", rounds=1)
    flat = Federated.from_arrays(xs["about"], y)
    with pytest.raises(DataError, match=r"samples have shape \(4,\), and the model takes .*228 numbers side by side"):
        talaria.simulate("fedper", flat, "mypkg.nets:masked", rounds=1)
    own = Several(Masked(3), about=(3,), imu=(6, 32), mask=(32,))
    with pytest.raises(DataError, match=r"have the inputs about \(4,\), .* and the model takes about \(3,\)"):
        talaria.simulate("fedper", data, own, rounds=1)  # torch's word was of two matrices
    with pytest.raises(ModelError, match=r"takes about, imu, mask, and the inputs named are imu; name them alike"):
        Several(Masked(3), imu=(6, 32))
    with pytest.raises(ModelError, match=r"imu=6 must be its shape without N, such as imu=\(6, 100\)"):
        Several(Masked(3), imu=6, about=(4,), mask=(32,))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="must be a torch module"):
        Several("a network", imu=(6, 32))  # type: ignore[arg-type]
    plain = Several(nn.Flatten(), input=(2, 2))
    assert plain(torch.zeros(3, 4)).shape == (3, 4)
    with pytest.raises(ConfigError, match=r"mypkg\.nets:masked"):
        talaria.simulate("fedper", data, "mypkg.nets:masked:depth=3", rounds=1)


@pytest.mark.parametrize("form", [torch.bfloat16, "asked", "listed"])
def test_named_inputs_are_taken_from_tensors_of_any_kind(form: Any) -> None:
    """As one array is: in half precision, with a slope asked for, one by one in a list."""
    whole = torch.arange(20.0).reshape(5, 4)
    about = whole.to(form) if form is torch.bfloat16 else whole.clone().requires_grad_()
    given = {"about": [*about] if form == "listed" else about, "mask": np.ones((5, 3), bool)}
    assert np.array_equal(Samples.of(given, np.arange(5) % 2).x[:, :4], whole.numpy())
    assert np.array_equal(inputs.fitting(given, {"about": (4,), "mask": (3,)})[:, :4], whole.numpy())
    assert Federated.from_arrays(given, [0, 1, 0, 1, 0], client=[0] * 5).meta["parts"] == {"about": (4,), "mask": (3,)}


def test_a_predictor_takes_no_named_input_that_hides_values_or_is_none(tmp_path: Path) -> None:
    xs, _ = recorded(5)
    model = Several(Masked(3), imu=(6, 32), about=(4,), mask=(32,)).eval()
    made = {"example": inputs.joined(xs)[0], "variants": ("fp32",), "seconds": 0}
    make_bundle(tmp_path / "me.talaria", model, **made)
    predict = Predictor(tmp_path / "me.talaria")
    with pytest.raises(DataError, match=r"input 'about': hides 2 of its values under a mask"):
        predict({**xs, "about": np.ma.masked_array(xs["about"], np.arange(20).reshape(5, 4) < 2)})
    with pytest.raises(DataError, match=r"input 'about': is no array .*give samples of one shape"):
        predict({**xs, "about": [[1.0], [1.0, 2.0]]})
    with pytest.raises(DataError, match=r"shape \(0, 228\) does not fit"):
        predict({name: values[:0] for name, values in xs.items()})


def test_inputs_of_other_names_or_shapes_are_never_read_as_the_networks_own() -> None:
    """Side by side they have as many numbers, and were learned from in a wrong order without a word."""
    xs, y = recorded(12)
    model = Several(Masked(3), imu=(6, 32), about=(4,), mask=(32,))
    renamed = {"imu": xs["imu"], "mask": xs["mask"], "who": xs["about"]}
    turned = {**xs, "imu": xs["imu"].transpose(0, 2, 1)}
    for personal in (Personalizer(model), Personalizer(SPEC)):
        with pytest.raises(DataError, match=r"the inputs imu .*, who \(4,\), and the model takes about \(4,\), imu"):
            personal.fit((renamed, y), epochs=1)
        with pytest.raises(DataError, match=r"the inputs about .*, imu \(32, 6\), .*takes about \(4,\), imu \(6, 32\)"):
            personal.fit(Samples.of(xs, y), (turned, y), epochs=1)
        personal.fit((xs, y), (inputs.joined(xs)[0], y), epochs=1)  # side by side they have no names
    with pytest.raises(DataError, match=r"the inputs about .*, and the model reads one array; give it as"):
        Personalizer(nn.Sequential(nn.Linear(228, 4), nn.Linear(4, 3))).fit((xs, y), epochs=1)


def test_no_bundle_is_judged_on_samples_of_other_inputs(tmp_path: Path) -> None:
    xs, y = recorded(12)
    model = Several(Masked(3), imu=(6, 32), about=(4,), mask=(32,)).eval()
    made = {"example": inputs.joined(xs)[0], "variants": ("fp32",), "seconds": 0}
    turned = {**xs, "imu": xs["imu"].transpose(0, 2, 1)}
    with pytest.raises(DataError, match=r"samples: have .*, imu \(32, 6\), .*takes about .*, imu \(6, 32\)"):
        make_bundle(tmp_path / "me.talaria", model, samples=(turned, y), **made)
    assert make_bundle(tmp_path / "me.talaria", model, samples=(xs, y), **made).ok


def test_a_bundle_of_other_inputs_is_not_swapped_in(tmp_path: Path) -> None:
    xs, _ = recorded(4)
    made = {"example": inputs.joined(xs)[0], "variants": ("fp32",), "seconds": 0}
    net = Masked(3)
    make_bundle(tmp_path / "a.talaria", Several(net, imu=(6, 32), about=(4,), mask=(32,)).eval(), **made)
    other = nn.Sequential(Several(Turned(net), walk=(6, 32), about=(4,), mask=(32,))).eval()
    make_bundle(tmp_path / "b.talaria", other, **made)
    predict = Predictor(tmp_path / "a.talaria")
    with pytest.raises(ConfigError, match=r"takes the inputs about \(4,\), mask \(32,\), walk .*serves about .*, imu"):
        predict.swap(tmp_path / "b.talaria")


class Turned(nn.Module):
    """The same network, to which an input has another name."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, walk: torch.Tensor, about: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.net(imu=walk, about=about, mask=mask)  # type: ignore[no-any-return]
