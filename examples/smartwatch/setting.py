"""What the demo trains: one model, one recipe, four classes of hardware.

The recipe was chosen by leaving members out in turn as newcomers; benchmarks/RESULTS.md says what else was looked at.
"""

from talaria.data import Federated
from talaria.data.presets import SMARTWATCH
from talaria.federated import run_model
from talaria.federated.run import Run
from talaria.model import pruning
from talaria.model.spec import ModelSpec
from talaria.planning.plan import Plan

ROUNDS = 30
RECIPE = SMARTWATCH.recipe
TUNE_EPOCHS = 20
HARDWARE = {"phone": 0.75, "watch": 0.625, "band": 0.5, "ring": 0.375}
"""Share of the channels that each class of hardware has room for."""


def run_of(data: Federated, algorithm: str, seed: int, rounds_: int = ROUNDS, tune: int = TUNE_EPOCHS) -> Run:
    """The run of one method, with the demo's recipe; ``tune`` epochs of fine-tuning, where the method fine-tunes.

    A newcomer's epochs are what a member learns in all rounds and its fine-tuning: in a short demo they are few too.
    """
    newcomer = rounds_ * RECIPE.epochs + tune
    masks: dict[str, object] = {"threshold": 0.5, "step": 0.2, "cap": 0.75, "block": 16}
    hparams: dict[str, object] = {
        "hermes": {**masks, **SMARTWATCH.options["hermes"], "tune_epochs": tune, "newcomer_epochs": newcomer},
        "fedavg_ft": {**SMARTWATCH.options["fedavg_ft"], "tune_epochs": tune},
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
        download="fp16" if algorithm == "hermes" else "raw",
    )


def hardware_of(data: Federated) -> dict[str, str]:
    """A hardware class for each user; both wrists of a subject wear different ones."""
    names, classes = [*data.clients, *data.newcomers], list(HARDWARE)
    return {name: classes[(i + i // 4) % len(classes)] for i, name in enumerate(names)}


def plan_of(run: Run, hardware: str) -> Plan:
    """Widths in whole blocks of 16 channels, fast on any CPU, for the share that the hardware has room for."""
    keep = HARDWARE[hardware]
    widths = pruning.widths(run_model.layout_of(run.spec).full(), keep, block=16)
    return Plan(widths=widths, reasons={"widths": f"a {hardware} has room for {keep:.0%} of the channels"})
