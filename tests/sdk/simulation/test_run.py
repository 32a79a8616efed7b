"""The simulator and its command: what a user types, on arrays that nobody here has seen."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from talaria.cli.main import app
from talaria.data import load
from talaria.errors import ConfigError, DataError
from talaria.federated import device_task
from talaria.federated.global_model import encode_compact, encode_model
from talaria.federated.run import Run
from talaria.federated.server_rule import rule_named
from talaria.model import masks
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.options import assignments
from talaria.planning.plan import Plan
from talaria.simulation.run import evaluate, members_of, simulate
from talaria.tensors import equal
from talaria.types import Recipe
from talaria.wire import codec


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three clients, four features, three classes that lie apart."""
    path = tmp_path_factory.mktemp("data") / "mine.npz"
    draw = np.random.default_rng(0)
    y = np.tile(np.arange(3), 60)
    x = draw.normal(0, 0.4, (180, 4)).astype(np.float32)
    x[:, 0] += 2 * y
    x[:, 1] -= y
    np.savez(path, x=x, y=y, client=np.repeat(np.arange(3), 60))
    return path


def command(*words: str) -> dict:
    done = CliRunner().invoke(app(words), list(words))
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_users_own_arrays(arrays: Path) -> None:
    words = ["simulate", "-a", "fedper", "-d", f"npz:{arrays}", "--rounds", "8", "--lr", "0.1", "--json"]
    told = command(*words)
    assert told["model"]["name"] == "mlp"
    assert sorted(told["clients"]) == sorted(load(f"npz:{arrays}").clients)
    assert told["accuracy"]["mean"] > 0.8
    assert command(*words) == told, "the same command gives the same document"


def test_the_server_rule_can_be_replaced(arrays: Path) -> None:
    data = load(f"npz:{arrays}")
    run = Run(spec=ModelSpec("mlp", (4,), 3), algorithm="fedavg", recipe=Recipe(), rounds=1)
    mean, median = (
        simulate(run, members_of(data.clients), aggregator=a) for a in (None, rule_named(run, "median:f=1"))
    )
    assert not equal(mean.shared, median.shared)
    told = command("simulate", "-d", f"npz:{arrays}", "--rounds", "1", "--json", "--aggregator", "median:f=1")
    assert told["aggregator"] == "median:f=1"


def test_devices_plans_are_simulated_as_they_would_run(arrays: Path, tmp_path: Path) -> None:
    data = load(f"npz:{arrays}")
    spec = ModelSpec("mlp", (4,), 3, AdapterSpec("lowrank", 2))
    small, tiny = (Plan(widths={"fc1.base": n}, batch=8, model=spec.to_json()) for n in (16, 8))
    first, *others = sorted(data.clients)
    for name, plan in (("small", small), ("tiny", tiny)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"plan": plan.to_json(), "machine": "ab"}))
    given = ["--plan", str(tmp_path / "small.json"), "--plan", f"{first}={tmp_path / 'tiny.json'}"]
    base = ["simulate", "-a", "fedavg", "-d", f"npz:{arrays}", "--rounds", "2", "--json"]
    told = command(*base, *given)
    assert told["model"] == spec.to_json()
    recipe = Recipe(**told["recipe"])
    run = Run(spec=spec, algorithm="fedavg", recipe=recipe, rounds=2)
    members = members_of(data.clients, {**dict.fromkeys(others, small), first: tiny})
    assert told["accuracy"]["mean"] == evaluate(simulate(run, members), data, members).accuracy.mean
    assert told["clients"][first]["bytes_up"] < told["clients"][others[0]]["bytes_up"]
    assert told["clients"][first]["parameters"] < told["clients"][others[0]]["parameters"]
    assert command(*base, "--adapters", "lowrank:rank=2")["model"]["adapters"] == spec.to_json()["adapters"]


def test_bytes_are_those_of_the_wire_and_add_up(arrays: Path) -> None:
    data = load(f"npz:{arrays}")
    run = Run(spec=ModelSpec("mlp", (4,), 3), algorithm="fedavg", recipe=Recipe(), rounds=2)
    facts = []
    result = simulate(run, members_of(data.clients), progress=facts.append)
    assert [f.round for f in facts] == [1, 2]
    assert sum(f.bytes_up for f in facts) == sum(result.bytes_up.values())
    parameters = 4 * sum(v.size for v in result.shared.values())
    assert 0.7 * parameters < min(result.bytes_up.values()) / 2 < 1.1 * parameters + 1500


def test_an_update_that_nothing_is_lost_of_is_not_decoded(arrays: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load(f"npz:{arrays}")
    run = Run(spec=ModelSpec("mlp", (4,), 3), algorithm="fedavg", recipe=Recipe(), rounds=2)
    whole = simulate(run, members_of(data.clients))

    def never(*given: object, **named: object) -> None:
        raise AssertionError("decoded")

    through = codec.decode_update
    monkeypatch.setattr(codec, "as_decoded", lambda one, **how: through(codec.encode_update(one), **how))
    wired = simulate(run, members_of(data.clients))
    assert equal(wired.shared, whole.shared)
    monkeypatch.undo()
    monkeypatch.setattr(codec, "decode_update", never)
    assert equal(simulate(run, members_of(data.clients)).shared, whole.shared)


@pytest.mark.parametrize("download", ["raw", "fp16", "int8"])
def test_each_downloads_what_it_keeps_and_the_last_model_too(arrays: Path, tmp_path: Path, download: str) -> None:
    data = load(f"npz:{arrays}")
    run = Run(spec=ModelSpec("mlp", (4,), 3), algorithm="fedavg", recipe=Recipe(), rounds=2, download=download)
    narrow, bounded = Plan(widths={"fc1": 32}), Plan(widths={"fc1": 32}, accuracy_drop=0.5)
    plans = dict(zip(sorted(data.clients), (narrow, bounded, None), strict=True))
    members = members_of(data.clients, {name: plan for name, plan in plans.items() if plan is not None})
    done = simulate(run, members)
    model = encode_model(done.shared, download)
    mask = device_task.mask_of(run, next(iter(members.values())), None)
    assert mask is not None
    part = len(encode_compact(run, model, masks.pack(mask)))
    assert part < 0.7 * len(model)
    assert [facts.bytes_down for facts in done.history] == [2 * part + len(model)] * 2
    # One whose plan bounds what accuracy it costs compares with the whole model in the end.
    assert done.bytes_down == 2 * (2 * part + len(model)) + part + 2 * len(model)
    dense = 4 * sum(value.size for value in done.shared.values())
    assert done.bytes_whole == (6 * dense, 9 * dense)
    older = replace(done, history=tuple(replace(facts, bytes_down=None) for facts in done.history))
    assert older.bytes_down is None


def test_local_sends_no_tensor(arrays: Path) -> None:
    data = load(f"npz:{arrays}")
    run = Run(spec=ModelSpec("mlp", (4,), 3), algorithm="local", recipe=Recipe(), rounds=1)
    assert max(simulate(run, members_of(data.clients)).bytes_up.values()) < 1000


def test_sampling_leaves_the_others_alone(arrays: Path) -> None:
    data = load(f"npz:{arrays}")
    run = Run(spec=ModelSpec("mlp", (4,), 3), algorithm="fedper", recipe=Recipe(), rounds=1, fraction=0.34)
    result = simulate(run, members_of(data.clients))
    assert len(result.private) == 1
    assert len(result.history[0].clients) == 1
    report = evaluate(result, data, members_of(data.clients))
    assert len(report.clients) == 3, "those who never took part are measured too"


def test_a_lossy_codec_stays_near(arrays: Path) -> None:
    data = load(f"npz:{arrays}")
    raw = Run(spec=ModelSpec("mlp", (4,), 3), algorithm="fedavg", recipe=Recipe(lr=0.01), rounds=1)
    half = Run(spec=raw.spec, algorithm="fedavg", recipe=raw.recipe, rounds=1, codec="fp16")
    one, two = (simulate(run, members_of(data.clients)) for run in (raw, half))
    assert not equal(one.shared, two.shared)
    assert all(float(np.abs(one.shared[k] - two.shared[k]).max()) < 1e-3 for k in one.shared)
    assert sum(two.bytes_up.values()) < 0.6 * sum(one.bytes_up.values())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-a", "fedavgg"], "did you mean 'fedavg'"),
        (["-d", "smartwach"], "smartwatch"),
        (["-o", "mu=3"], "'mu' is unknown"),
        (["-o", "mu"], "NAME=VALUE"),
        (["--buffers", "both"], "'local' or 'aggregate'"),
        (["--codec", "zip"], "codec"),
        (["--aggregator", "medain"], "median"),
        (["--model", "resnet"], "resnet18"),
        (["--adapters", "lowrnk"], "lowrnk"),
        (["--adapters", "lowrank:rnk=8"], "'rnk' is unknown; it has rank"),
        (["--plan", "none.json"], "none.json cannot be read"),
        (["--plan", "nobody=none.json"], "there is no client 'nobody'"),
        (["--fraction", "1.5"], "fraction=1.5"),
        (["--lr", "0"], "lr=0.0"),
        (["--lr", "0.1", "--recipe", "lr=0.2"], "--recipe lr=0.2 and --lr say two things; leave one out"),
        (["--epsilon", "8", "--privacy-option", "epsilon=3"], "--privacy-option epsilon=3 and --epsilon say two"),
        (["-a", "ditto", "-o", "lam=1", "-o", "lam=2"], "--option 'lam=2': 'lam' is given twice; leave one out"),
        (["--privacy-option", "epsilon=8", "--epochs", "0", "--clip", "0"], "clip=0.0"),
    ],
)
def test_a_bad_option_names_field_and_mend(arrays: Path, words: list[str], says: str) -> None:
    base = ["simulate", "-d", f"npz:{arrays}", "--rounds", "1"]
    done = CliRunner().invoke(app(base), [*base, *words])
    assert isinstance(done.exception, ConfigError | DataError), done.output
    assert says in str(done.exception)


def test_assignments_read_as_what_they_look_like() -> None:
    assert assignments(["a=1", "b=0.5", "c=true", "d=x=y"], "-o") == {"a": 1, "b": 0.5, "c": True, "d": "x=y"}


def test_a_budget_brings_its_length_however_it_is_said(arrays: Path) -> None:
    base = ["simulate", "-d", f"npz:{arrays}", "--rounds", "1", "--epochs", "0", "--json"]
    (named, own) = (command(*base, *words) for words in (["--privacy-option", "epsilon=8"], ["--epsilon", "8"]))
    assert named["privacy"] == own["privacy"]


def test_with_a_report_members_are_measured_ten_times_at_most(arrays: Path, tmp_path: Path) -> None:
    base = ["simulate", "-d", f"npz:{arrays}", "--rounds", "15", "--epochs", "0", "--json"]
    curve = command(*base, "--report", str(tmp_path / "page.html"))["curve"]
    assert [point["round"] for point in curve if point["accuracy"] is not None] == [2, 4, 6, 8, 10, 12, 14, 15]


def test_where_nothing_is_shared_no_share_of_it_is_told(arrays: Path) -> None:
    words = ["simulate", "-d", f"npz:{arrays}", "--rounds", "1", "--epochs", "0", "-a"]
    shown = {name: CliRunner().invoke(app(words), [*words, name]).output for name in ("local", "fedavg")}
    assert "in brackets the share" in shown["fedavg"]
    assert "travelled" in shown["local"]
    assert "(" not in shown["local"].partition("travelled")[2]


def test_the_table_of_algorithms() -> None:
    rows = command("algorithms", "--json")
    assert {"local", "fedavg", "fedavg_ft", "fedper", "hermes"} <= {row["name"] for row in rows}
    for row in rows:
        assert row["evidence"] in ("confirmed", "reconstructed", "partly reconstructed")
        assert all(row[key] for key in ("shares", "keeps", "serves", "source"))
    narrow = CliRunner().invoke(app(["algorithms"]), ["algorithms"], env={"COLUMNS": "80"})
    assert narrow.exit_code == 0
    assert "…" not in narrow.output  # nothing is cut
