"""The three baselines, dense, in this process: alone, FedAvg, and FedAvg with local fine-tuning."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from smartwatch.setting import run_of
from talaria.data import Federated
from talaria.federated import rounds
from talaria.federated.global_model import encode_model
from talaria.simulation.run import members_of, simulate
from talaria.training import evaluation


@dataclass(frozen=True)
class Baselines:
    """Test accuracy per user by method; for newcomers ``local`` is from scratch, ``fedavg`` zero-shot and
    ``fedavg_ft`` tuned with their minute of labels."""

    accuracy: Mapping[str, Mapping[str, float]]
    bytes_up: int
    """Of a member of dense FedAvg, which sends its model, as it is, in each round."""
    bytes_down: int
    """What dense FedAvg sends each member: its model before each round and after the last."""


def baselines(data: Federated, seed: int, count: int, tune: int, progress: Callable[[str, int], None]) -> Baselines:
    """Train the baselines for ``count`` rounds and ``tune`` epochs of fine-tuning.

    ``progress(method, round)`` is called after each round.
    """
    every = data.everyone
    people = members_of(every)
    members = {name: people[name] for name in data.clients}
    accuracy: dict[str, dict[str, float]] = {name: {} for name in every}

    fedavg = simulate(
        run_of(data, "fedavg", seed, count), members, progress=lambda facts: progress("fedavg", facts.round)
    )
    tuned = replace(fedavg.run, algorithm="fedavg_ft", hparams=run_of(data, "fedavg_ft", seed, count, tune).hparams)
    for name, person in people.items():
        private = fedavg.private.get(name)
        test = every[name].test
        accuracy[name]["fedavg"] = evaluation.evaluate(fedavg.personal(person), test).accuracy
        model = rounds.personalize(tuned, person, fedavg.shared, private)
        accuracy[name]["fedavg_ft"] = evaluation.evaluate(model, test).accuracy

    alone = run_of(data, "local", seed, count)
    local = simulate(alone, members, progress=lambda facts: progress("local", facts.round))
    # A newcomer that learns alone trains as many epochs as a member does in all its rounds.
    scratch = replace(alone, rounds=1, recipe=alone.recipe.but(epochs=count * alone.recipe.epochs))
    fresh = simulate(scratch, {n: people[n] for n in data.newcomers})
    for name, person in people.items():
        source = local if name in members else fresh
        accuracy[name]["local"] = evaluation.evaluate(source.personal(person), every[name].test).accuracy
    model_bytes = len(encode_model(fedavg.shared))
    return Baselines(accuracy, count * model_bytes, (count + 1) * model_bytes)
