"""Whole networks, worked out in float64: their step is torch's, whatever float32 loses on the way."""

import importlib.util
from pathlib import Path

import pytest
import torch

from talaria.model import zoo
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.programs import reference, vector
from talaria.programs.build import sizes_of
from talaria.programs.manifest import Manifest
from talaria.programs.step import graph_of
from talaria.types import Recipe

_exact = importlib.util.spec_from_file_location("talaria_program_exact", Path(__file__).with_name("exact.py"))
exact = importlib.util.module_from_spec(_exact)
_exact.loader.exec_module(exact)

CASES = {
    "mobilenet_v3_small": ModelSpec("mobilenet_v3_small", (3, 64, 64), 4),
    "resnet18": ModelSpec("resnet18", (3, 32, 32), 4),
    "efficientnet_lite0": ModelSpec("efficientnet_lite0", (3, 64, 64), 4, adapters=AdapterSpec("lowrank", rank=2)),
    "imu_cnn": ModelSpec("imu_cnn", (6, 100), 7),
}
ROUNDING = 1e-7
"""Float64 errs by 1e-16, deep networks make that more; of constants (smoothing) the file has float32."""


@pytest.mark.parametrize("name", CASES)
def test_a_step_says_what_torch_says(name):
    spec, recipe = CASES[name], Recipe(momentum=0.9, weight_decay=0.01, smoothing=0.1)
    module = zoo.build(spec)
    only = None if spec.adapters is None else zoo.split(spec, module).of("adapters", "head")
    graph = graph_of(module, zoo.head(spec), spec.input_shape, spec.classes, recipe, only)
    facts = Manifest(
        model=spec.to_json(),
        trained="all",
        recipe={},
        classes=spec.classes,
        sizes=sizes_of(graph, module),
        vector=0,
        parity={},
        expected={},
        made_with={},
    )
    feed = vector.inputs(graph, facts)
    wanted = reference.step(module, recipe, only, feed, torch.float64)
    assert vector.distance(exact.evaluated(graph, feed), wanted) <= ROUNDING
