"""The server half of HEART-PFL, and every rule with options, by name: for one command and for a fleet."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from talaria.aggregate.distill import ROUNDS, Distilled
from talaria.aggregate.robust.median import Median
from talaria.cli.main import app
from talaria.errors import ConfigError, DataError
from talaria.federated import global_model, rounds
from talaria.federated.run import Member, Run
from talaria.federated.server_rule import located, rule_named
from talaria.model.spec import ModelSpec
from talaria.protocol.actions import Counted
from talaria.simulation.run import simulate
from talaria.tensors import equal
from talaria.types import Recipe, Samples
from talaria.wire import codec
from talaria_coordinator.config.fleet import load_config
from talaria_coordinator.fleet.aggregation import Learning
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.records import Fleet

RUN = Run(spec=ModelSpec("mlp", (4,), 3), algorithm="heart_pfl", recipe=Recipe(epochs=1, batch=8, lr=0.05), rounds=1)
AKT = "akt:proxy=own.npz,steps=4,batch=16,every=1,attack_steps=1"


def arrays(seed, count=60):
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 3
    x = rng.normal(0, 0.4, (count, 4)).astype(np.float32)
    x[:, 0] += 2 * y
    return x, y


def members():
    made = {}
    for seed, name in enumerate(("anna", "bela")):
        x, y = arrays(seed)
        made[name] = Member(name, Samples.of(x[:48], y[:48]), Samples.of(x[48:], y[48:]))
    return made


@pytest.fixture
def folder(tmp_path):
    x, y = arrays(9, 90)
    np.savez(tmp_path / "own.npz", x=x, y=y)
    return tmp_path


def fleet_toml(folder, rule):
    path = folder / "fleet.toml"
    path.write_text(
        f"""
[fleet]
name = "watch"
members = ["anna", "bela", "carl"]
[rounds]
aggregator = "{rule}"
[run]
algorithm = "heart_pfl"
rounds = 1
[run.spec]
name = "mlp"
input_shape = [4]
classes = 3
[run.recipe]
epochs = 1
batch = 8
lr = 0.05
"""
    )
    return path


def test_a_fleet_folds_with_knowledge_transfer_as_the_simulation_does(folder):
    """The rule needs samples and a model of the server's own: a fleet names the file beside its fleet.toml."""
    config = load_config(fleet_toml(folder, AKT))
    run = config.run
    taught = simulate(run, members(), aggregator=rule_named(run, located(AKT, folder)))
    assert int(taught.server[ROUNDS]) == 1

    blobs = FolderBlobs(folder / "blobs")
    learning = Learning(config.run, blobs, config.aggregator)
    assert isinstance(learning.aggregator, Distilled)
    first, server = learning.first()
    counted, (shared, _) = [], rounds.start(run)
    for name, member in members().items():
        update, _ = rounds.participate(run, member, shared, None, 1)
        sha = blobs.put(codec.encode_update(update, "raw"))
        counted.append(Counted(name, 1, 0, bytes.fromhex(sha)))
    record = Fleet("watch", run.to_json(), 1, 0, 1, "running", first, server, ("anna", "bela"))
    shared_model = learning.fold(record, counted).model_digest
    assert equal(global_model.decode_model(run, blobs.get(shared_model)), taught.shared)


def test_the_command_takes_it(folder):
    x, y = arrays(3, 120)
    np.savez(folder / "mine.npz", x=x, y=y, client=np.arange(120) % 2)
    words = ["simulate", "-a", "heart_pfl", "-d", f"npz:{folder / 'mine.npz'}", "--rounds", "1", "--json"]
    rule = located(AKT, folder)
    done = CliRunner().invoke(app(words), [*words, "--aggregator", rule])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["aggregator"] == rule


def test_a_fleets_rule_takes_options(folder):
    config = load_config(fleet_toml(folder, "median:f=1"))
    assert rule_named(config.run, config.aggregator) == Median(f=1)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("akt", ConfigError, "akt:proxy=FILE.npz"),
        ("akt:proxy=none.npz", DataError, "no such file"),
        ("akt:proxy=own.npz,stepps=3", ConfigError, "'stepps' is unknown"),
        ("akt:proxy=own.npz,steps=many", ConfigError, "steps='many' must be a whole number"),
        ("akt:proxy=own.npz,lr=nan", ConfigError, "lr=nan"),
        ("akt:proxy=own.npz,steps=0", ConfigError, "steps=0"),
        ("akt:proxy=other.npz", DataError, r"need \(N, 4\)"),
    ],
)
def test_what_it_cannot_use_is_refused_by_name(folder, text, error, words):
    np.savez(folder / "other.npz", x=np.zeros((4, 5), np.float32), y=np.arange(4))
    with pytest.raises(error, match=words):
        rule_named(RUN, located(text, folder))


def test_an_algorithm_that_shares_more_than_one_models_weights_is_refused(folder):
    with pytest.raises(ConfigError, match="pfedgm shares more"):
        rule_named(replace(RUN, algorithm="pfedgm"), located(AKT, folder))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "multilabel", "algorithm": "fedavg"}, "task='multilabel' has none: leave"),
        ({"algorithm": "hermes", "hparams": {"min_holders": 2}}, "min_holders=2 leaves alone"),
        ({"algorithm": "hermes", "hparams": {"mode": "intersection"}}, "mode='intersection' .* leaves alone"),
    ],
)
def test_a_run_that_it_would_teach_wrongly_is_refused_before_its_first_round(folder, change, words):
    with pytest.raises(ConfigError, match=f"'akt' .*{words}"):
        rule_named(replace(RUN, **change), located(AKT, folder))
