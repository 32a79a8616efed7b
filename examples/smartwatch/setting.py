"""What the demo trains: one model, one recipe, four classes of hardware.

The recipe was chosen by leaving members out in turn as newcomers; benchmarks/RESULTS.md says what else was looked at.
"""

from talaria.data import Federated
from talaria.data.presets import SMARTWATCH
from talaria.federated import rounds
from talaria.federated.rounds import Run
from talaria.model import pruning
from talaria.model.zoo import ModelSpec
from talaria.types import Plan

ROUNDS = 30
RECIPE = SMARTWATCH.recipe
TUNE = SMARTWATCH.options["fedavg_ft"]
SCRATCH_EPOCHS = 60
"""Epochs of a newcomer that learns alone: as many as a member trains in all its rounds."""

HARDWARE = {"phone": 0.75, "watch": 0.625, "band": 0.5, "ring": 0.375}
"""Share of the channels that each class of hardware has room for."""


def run_of(data: Federated, algorithm: str, seed: int, rounds_: int = ROUNDS) -> Run:
    """The run of one method, with the demo's recipe."""
    hparams: dict[str, object] = {
        "hermes": {"threshold": 0.5, "step": 0.2, "cap": 0.75, "block": 16, **SMARTWATCH.options["hermes"]},
        "fedavg_ft": TUNE,
    }.get(algorithm, {})
    return Run(
        spec=ModelSpec("imu_cnn", data.input_shape, data.classes, seed=seed),
        algorithm=algorithm,
        hparams=hparams,
        recipe=RECIPE,
        rounds=rounds_,
        seed=seed,
        buffers="local" if algorithm == "hermes" else "aggregate",
        codec="fp16" if algorithm == "hermes" else "raw",
    )


def hardware_of(data: Federated) -> dict[str, str]:
    """A hardware class for each user; both wrists of a subject wear different ones."""
    names, classes = [*data.clients, *data.newcomers], list(HARDWARE)
    return {name: classes[(i + i // 4) % len(classes)] for i, name in enumerate(names)}


def plan_of(run: Run, hardware: str) -> Plan:
    """Widths in whole blocks of 16 channels, fast on any CPU, for the share that the hardware has room for."""
    keep = HARDWARE[hardware]
    widths = pruning.widths(rounds.layout_of(run.spec).full(), keep, block=16)
    return Plan(widths=widths, reasons={"widths": f"a {hardware} has room for {keep:.0%} of the channels"})
