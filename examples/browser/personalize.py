"""One HTML file in which a newcomer makes the fleet's model theirs, in the browser, without a server.

    python examples/browser/personalize.py -o page.html

The wearers of the smartwatch learn together for some rounds (FedAvg); then one whom the fleet has never seen opens the
page: a minute of recorded windows in stretches, each to be labelled. Adapters and head are trained there by an ONNX
graph (docs/programs.md) in onnxruntime-web, the accuracy on later windows is shown before and after, and the personal
model is saved as a bundle, which `talaria verify` proves. Needs npm, once, to fetch onnxruntime-web.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import talaria
from talaria.data.client import Client
from talaria.errors import ConfigError
from talaria.federated import run_model
from talaria.federated.run import Member, Run
from talaria.model import zoo
from talaria.model.batch_norm import tracked
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.state import state_of
from talaria.programs import onnx_file
from talaria.programs.build import packed
from talaria.programs.graph import Graph
from talaria.programs.step import answers_of, statistics_of
from talaria.simulation.run import simulate
from talaria.tensors import Tensors
from talaria.types import Recipe
from talaria.wire import strict_safetensors
from talaria_export.bundle.manifest import FORMAT, VERSION
from talaria_export.runtime.parity_inputs import drawn, spread

HERE = Path(__file__).parent
MODULES = HERE.parent / "node"
PARITY = 16
"""Inputs on which the bundle proves itself."""
TUNE_EPOCHS = 40


def a_run(rounds: int) -> Run:
    """The fleet's run: FedAvg of a small network with adapters; a newcomer tunes adapters and head."""
    spec = ModelSpec("imu_cnn", (6, 100), 7, adapters=AdapterSpec("residual", rank=8))
    recipe = Recipe(epochs=1, batch=32, lr=0.05, momentum=0.9, weight_decay=1e-4, smoothing=0.1)
    hparams = {"tune": "adapters", "tune_epochs": TUNE_EPOCHS}
    return Run(spec=spec, algorithm="fedavg_ft", rounds=rounds, recipe=recipe, hparams=hparams)


def learned(run: Run, clients: Mapping[str, Client]) -> Tensors:
    """The global model after all rounds of a simulated fleet."""
    members = {name: Member(name, one.train, one.val, engine="onnx") for name, one in clients.items()}
    return simulate(run, members).shared


def page(run: Run, shared: Tensors, newcomer: str, own: Client, labels: tuple[str, ...], dist: Path) -> str:
    """The HTML text. ``own`` has the newcomer's minute (``train``) and later windows (``test``)."""
    spec = run.spec
    module, looking, head = zoo.build(spec), zoo.build(spec).requires_grad_(False).eval(), zoo.head(spec)
    split = run_model.split_of(run)
    step = packed(spec, module, frozenset(split.of("adapters", "head")), "some", run.recipe)
    forward = answers_of(looking, head, spec.input_shape)
    model, places = _template(forward, state_of(module))
    shift, scale = spread(own.train.x)
    parity = drawn(0, PARITY, spec.input_shape, shift, scale)
    recorded = {"x": own.train.x, "x_test": own.test.x, "y_test": own.test.y, "x_parity": parity}
    # A wearer says when something else begins, not what: stretches stand in the recording, labels do not.
    begins = [0, *(np.flatnonzero(np.diff(own.train.y)) + 1).tolist(), len(own.train)]
    data = {
        "wasm": _base64((dist / "ort-wasm-simd-threaded.wasm").read_bytes()),
        "state": _base64(strict_safetensors.pack({**state_of(module), **shared})),
        "step": _base64(step),
        "forward": _base64(onnx_file.write(forward, "")),
        "calibration": _calibration(run),
        "model": _base64(model),
        "places": places,
        "recorded": _base64(strict_safetensors.pack(recorded)),
        "stretches": [[a, b - a] for a, b in pairwise(begins)],
        "seconds": 1,
        "seed": str(run.seed),
        "client": newcomer,
        "round": run.rounds,
        "purpose": "tune",
        "recipe": {**vars(run.recipe), "epochs": run.hparams["tune_epochs"], "steps": None},
        "falls": {},
        "manifest": _manifest(run, labels, {"seed": 0, "count": PARITY, "shift": shift, "scale": scale}),
    }
    parts = {
        "data": json.dumps(data),
        "runtime": (dist / "ort.wasm.bundle.min.mjs").read_text("utf-8"),
        "writer": (HERE / "personal_bundle.mjs").read_text("utf-8"),
        **{name: (MODULES / f"{name}.mjs").read_text("utf-8") for name in ("draws", "tensors", "augment", "training")},
    }
    text = (HERE / "personalize.html").read_text("utf-8")
    for name, part in parts.items():
        text = text.replace("{{" + name + "}}", part.replace("</script", "<\\/script"))
    return text


def _calibration(run: Run) -> str | None:
    """The graph that estimates BatchNorm's statistics, where the fleet does not share them and the model has any that
    the recipe does not freeze."""
    module = zoo.build(run.spec).requires_grad_(False).eval()
    still = run.recipe.still(list(module.state_dict()))
    moving = tracked(module, still).values()
    if not moving or run.buffers != "local":
        return None
    for one in moving:
        one.training = True
    return _base64(onnx_file.write(statistics_of(module, zoo.head(run.spec), run.spec.input_shape), ""))


def _template(forward: Graph, state: Tensors) -> tuple[bytes, dict[str, list[int]]]:
    """The model as a file of its own, weights inside, and where each of them lies in its bytes."""
    names = {port.name: port.name.removeprefix("weight/") for port in forward.inputs if port.name != "x"}
    noise = np.random.default_rng(0)
    fill = {port: noise.bytes(state[name].nbytes) for port, name in names.items()}
    weights = {
        port: np.frombuffer(fill[port], state[name].dtype).reshape(state[name].shape) for port, name in names.items()
    }
    renamed = {"x": "input", forward.outputs[0].name: "logits"}

    def called(some: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(renamed.get(name, name) for name in some)

    graph = Graph(
        tuple(replace(port, name="input") for port in forward.inputs if port.name == "x"),
        tuple(replace(port, name="logits") for port in forward.outputs),
        tuple(replace(node, inputs=called(node.inputs), outputs=called(node.outputs)) for node in forward.nodes),
        {**forward.constants, **weights},
    )
    data = onnx_file.write(graph, "")
    if any(data.count(content) != 1 for content in fill.values()):
        raise RuntimeError("a weight's place in the file is not certain; fill it with other bytes")
    return data, {name: [data.index(fill[port]), len(fill[port])] for port, name in names.items()}


def _manifest(run: Run, labels: tuple[str, ...], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """All of the bundle's manifest that does not depend on the newcomer."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "card": {"algorithm": run.algorithm, "rounds": run.rounds, "seed": run.seed, "model": run.spec.to_json()},
        "input": {"name": "input", "shape": list(run.spec.input_shape), "dtype": "float32"},
        "output": {"name": "logits", "labels": list(labels)},
        "variants": [{"name": "fp32", "file": "models/fp32.onnx", "passed": True, "why": ""}],
        "default": "fp32",
        "gate": {"agreement": 0.98, "accuracy_drop": 0.01},
        "parity": {"inputs": dict(inputs), "outputs": "parity/outputs.npy"},
        "reference": None,
        "device": {},
    }


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _build() -> ModuleType:
    """The other example, which fetches onnxruntime-web and writes a page."""
    found = importlib.util.spec_from_file_location("talaria_browser_build", HERE / "build.py")
    assert found is not None
    assert found.loader is not None
    build = importlib.util.module_from_spec(found)
    found.loader.exec_module(build)
    return build


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--newcomer", default="s10-right", help="who opens the page: s09-left to s10-right")
    parser.add_argument("--rounds", type=int, default=10, help="how long the others learn together")
    parser.add_argument("-o", "--out", type=Path, default=Path("personalize.html"), help="the page to write")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "talaria" / "browser-example"
    parser.add_argument("--cache", type=Path, default=cache, help="where npm keeps onnxruntime-web")
    asked = parser.parse_args()
    if not asked.out.parent.is_dir():
        parser.error(f"--out {asked.out}: there is no folder {asked.out.parent}; make it first")
    data = talaria.data.load("smartwatch")
    if asked.newcomer not in data.newcomers:
        parser.error(f"--newcomer {asked.newcomer}: nobody has that name; choose from {', '.join(data.newcomers)}")
    try:
        run = a_run(asked.rounds)
    except ConfigError as problem:
        parser.error(f"{problem}")
    own = data.newcomers[asked.newcomer]
    shared, build = learned(run, data.clients), _build()
    build.save(asked.out, page(run, shared, asked.newcomer, own, data.labels, build.runtime(asked.cache)))
    size = math.ceil(asked.out.stat().st_size / 1e6)
    print(f"{asked.out}: {size} MB; open it in a browser, and label the stretches of the recording")


if __name__ == "__main__":
    main()
