"""``talaria.resume``: a run that was saved goes on, as it would have without the interruption."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from talaria import plugins, valid
from talaria.aggregate.base import Aggregator
from talaria.aggregate.registry import required
from talaria.data.federated import Federated
from talaria.errors import ConfigError, DataError, StateError
from talaria.federated.fedbuff_run import Buffering
from talaria.federated.run import Run
from talaria.federated.server_rule import rule_named
from talaria.foreign import shown
from talaria.planning.plan import Plan
from talaria.privacy.rule import Privacy
from talaria.simulation import checkpoint
from talaria.simulation.asked import data_of
from talaria.simulation.device_ids import as_devices, ids_of
from talaria.simulation.experiment import Experiment
from talaria.simulation.result import Result
from talaria.simulation.simulator import RoundFacts


@torch.inference_mode(False)
def resume(
    folder: str | Path,
    *,
    data: Federated | None = None,
    aggregator: Aggregator | None = None,
    workers: int | None = None,
    ray: str | None = None,
    progress: Callable[[RoundFacts], None] | None = None,
) -> Result:
    """Go on with a run that ``save`` kept, from its last whole round; one that is whole is only measured again.

    The bytes are those of a run that was never interrupted (on the same machine).

    Args:
        folder: What ``save`` named.
        data: The data, where the run was given an object instead of a name.
        aggregator: The server rule, where the run was given an object instead of a name.
        workers: As in :func:`talaria.simulate`; by default as many as the run began with, one of them in the place of
            a cluster.
        ray: As there.
        progress: Called after each further round.

    Returns:
        The :class:`talaria.Result`.

    Raises:
        StateError: There is no such run, it is damaged, or of another format.
        DataError: The data is not what the run began with.
        ConfigError: The data, the rule, or the code of an algorithm is missing.
    """
    folder = valid.path("resume", "folder", folder)
    asked = checkpoint.experiment(folder)
    if data is not None and not isinstance(data, Federated):
        raise ConfigError(f"resume: data={shown(data)} must be the Federated that the run began with")
    if asked.get("process", plugins.PROCESS) != plugins.PROCESS:
        raise ConfigError(
            f"{folder}: its model or algorithm was an object of the process that began it; write that into a module, "
            "and begin anew with its name, such as 'mypkg.mine:Name'"
        )
    try:
        run = Run.of(asked["run"])
        plans = {client: Plan.from_json(plan) for client, plan in asked["plans"].items()}
        buffering = None if asked["buffering"] is None else Buffering(**asked["buffering"])
        if data is None and asked["data_options"] is None:
            raise ConfigError(
                f"{folder}: its data ({asked['dataset']!r}), or an option of it, was an object; give it: "
                "resume(..., data=...)"
            )
        found = _named(folder, asked["dataset"], asked["data_options"]) if data is None else data
        if asked.get("as_devices"):
            found = as_devices(found, ids_of((*found.clients, *found.newcomers)))
        if aggregator is None and asked["own_rule"]:
            raise ConfigError(f"{folder}: its rule ({asked['aggregator']}) was an object; give it: aggregator=...")
        if aggregator is not None:
            kind = type(required("resume: aggregator", aggregator)).__name__
            if not asked["own_rule"] or kind != asked["aggregator"]:
                own, mend = asked["aggregator"], "give that" if asked["own_rule"] else "leave it out"
                raise ConfigError(f"{folder}: its rule is {own or 'that of its algorithm'}, not {kind}; {mend}")
        elif asked["aggregator"] is not None:
            aggregator = rule_named(run, asked["aggregator"])
        same = checkpoint.fingerprint(found) == asked["fingerprint"]
        over, every = asked["over"], asked["evaluate_every"]
        engine, device = asked.get("engine", "torch"), asked.get("device", "cpu")
        privacy = None if asked.get("privacy") is None else Privacy.of(asked["privacy"])
    except (KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{folder}/{checkpoint.EXPERIMENT}: damaged ({error}); restore it, or begin anew") from error
    if not same:
        raise DataError(f"{folder}: the data is not what this run began with; give the same, or begin a new run")
    if workers is None:
        workers = 0 if ray is not None else asked.get("workers", 0)
    one = Experiment(
        run=run,
        data=found,
        plans=plans,
        rule=aggregator,
        buffering=buffering,
        over=over,
        evaluate_every=every,
        engine=engine,
        device=device,
        privacy=privacy,
        asked={name: value for name, value in asked.items() if name not in ("format", "workers")},
    )
    with checkpoint.alone(folder):
        return one.learn(progress, folder, workers, ray)


def _named(folder: Path, name: str, options: Mapping[str, Any]) -> Federated:
    """The data of the run in ``folder``. Files and modules are named as seen from the folder that it began in, which
    may be another one than this."""
    try:
        return data_of(name, options)
    except (ConfigError, DataError) as error:
        raise type(error)(
            f"{error}; the run in {folder} began with data={name!r} in its working folder: go on in that folder, with "
            "the data as it was, or give it: resume(..., data=...)"
        ) from error
