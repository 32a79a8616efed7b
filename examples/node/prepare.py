"""Writes what a device without torch needs for a run, into a folder: ``prepare.py fleet.toml programs``.

step.program          one training step (docs/programs.md)
forward.onnx          the model that only looks: logits of windows
calibrate.onnx        BatchNorm's statistics of a batch; missing where a model has no BatchNorm
initial.safetensors   the whole state that all begin from
about.json            which model and recipe these are of, and what dropout lets fall
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torch.nn.modules.batchnorm import _BatchNorm

from talaria.federated.run import Run
from talaria.model import zoo
from talaria.model.state import state_of
from talaria.programs import onnx_file
from talaria.programs.build import packed
from talaria.programs.program import Program
from talaria.programs.step import features_of, statistics_of
from talaria.wire import strict_safetensors


def prepare(run: Run, folder: Path) -> None:
    """Write the files of ``run`` for algorithms that train everything at once."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = run.spec
    data = packed(spec, zoo.build(spec), None, "all", run.recipe)
    (folder / "step.program").write_bytes(data)
    module, head = zoo.build(spec).requires_grad_(False).eval(), zoo.head(spec)
    (folder / "forward.onnx").write_bytes(onnx_file.write(features_of(module, head, spec.input_shape), ""))
    looking = zoo.build(spec).requires_grad_(False).eval()
    norms = [layer for layer in looking.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    if norms:
        for layer in norms:
            layer.training = True
        (folder / "calibrate.onnx").write_bytes(onnx_file.write(statistics_of(looking, head, spec.input_shape), ""))
    (folder / "initial.safetensors").write_bytes(strict_safetensors.pack(state_of(zoo.build(spec))))
    drawn = [port for port in Program(data).graph.inputs if port.name.startswith("draw/")]
    falls = {port.name[5:]: module.get_submodule(port.name[5:]).p for port in drawn}
    told = json.loads(run.to_json())
    (folder / "about.json").write_text(json.dumps({"spec": told["spec"], "recipe": told["recipe"], "falls": falls}))


def main() -> None:
    """The command."""
    from talaria_coordinator.config.fleet import load_config

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fleet", type=Path, help="the coordinator's fleet.toml")
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    prepare(load_config(asked.fleet).run, asked.folder)


if __name__ == "__main__":
    main()
