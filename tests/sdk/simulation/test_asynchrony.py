"""Asynchronous and over-provisioned runs in the simulator: who counts, how old, and the same bytes when replayed."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from tolerance import roundings
from typer.testing import CliRunner

from talaria.aggregate.distill import Distilled
from talaria.aggregate.registry import load as load_rule
from talaria.aggregate.robust.median import TrimmedMean
from talaria.algorithms import ALGORITHMS
from talaria.algorithms.heart_pfl import HeartPFL
from talaria.cli.main import app
from talaria.errors import AggregationError, ConfigError
from talaria.federated import rounds, run_model
from talaria.federated.fedbuff_run import Buffering, buffered
from talaria.federated.run import Member, Run
from talaria.model.spec import ModelSpec
from talaria.planning.plan import Plan
from talaria.simulation.run import replay, simulate
from talaria.simulation.schedules import Record
from talaria.simulation.stragglers import delay
from talaria.tensors import equal
from talaria.types import Recipe, Samples

SPEC = ModelSpec("imu_cnn", (3, 16), 3)
NAMES = ("anna", "bela", "carl", "dora", "emil")
RUN = Run(spec=SPEC, algorithm="fedavg", recipe=Recipe(batch=6, lr=0.02), rounds=3, seed=3, asynchronous=True)
STEP = replace(RUN, asynchronous=False)
KRUM = {"name": "krum", "f": 1}
REFUSED = {"local": "shares nothing", "mypkg.mine:Hermit": "shares nothing", "pfedgm": "class statistics"}


def samples(seed: int, count: int) -> Samples:
    y = torch.arange(count) % 3
    x = torch.randn(count, 3, 16, generator=torch.Generator().manual_seed(seed))
    x[:, 0] += y[:, None].float() - 1
    return Samples.of(x, y)


def members(narrow: str = "") -> dict[str, Member]:
    plan = Plan(widths={"conv1": 16, "conv2": 24})
    return {
        n: Member(n, samples(i, 12), samples(i + 50, 6), plan if n == narrow else None) for i, n in enumerate(NAMES)
    }


def run_of(algorithm: str, **changes: object) -> Run:
    hparams = {"threshold": 0.0} if algorithm == "hermes" else {}
    return replace(RUN, algorithm=algorithm, **{"hparams": hparams, **changes})


@pytest.mark.parametrize("algorithm", sorted({*ALGORITHMS, *REFUSED}))
def test_every_algorithm_learns_asynchronously_and_replays_to_the_same_bytes_or_says_why_not(algorithm: str) -> None:
    run, two = run_of(algorithm), Buffering(buffer=2)
    if algorithm in REFUSED:
        with pytest.raises(ConfigError, match=f"{algorithm}.*{REFUSED[algorithm]}"):
            simulate(run, members(), buffering=two)
        return
    done = simulate(run, members(narrow="bela"), buffering=two)
    again = replay(run, members(narrow="bela"), done.records, buffering=two)
    assert equal(done.shared, again.shared)
    assert equal(done.server, again.server)
    assert all(equal(done.private[n], again.private[n]) for n in done.private)
    assert done.private.keys() == again.private.keys()
    assert done.bytes_up == again.bytes_up
    assert not equal(done.shared, run_model.first_shared(run))


def test_some_updates_are_old_and_each_says_what_it_started_from() -> None:
    done = simulate(replace(RUN, rounds=12), members(), buffering=Buffering(buffer=2))
    ages = [age for facts in done.history for age in facts.staleness]
    assert min(ages) == 0
    assert max(ages) > 0
    for facts in done.history:
        clients = [client for client, _ in facts.counted]
        assert clients == sorted(set(clients)), "one place for each device"
        assert len(clients) == 2
    for name in NAMES:
        bases = [base for facts in done.history for client, base in facts.counted if client == name]
        assert all(a < b for a, b in itertools.pairwise(bases)), "never twice from one version"
    times = [facts.time for facts in done.history]
    assert times == sorted(times)
    assert int(done.server["version"]) == 12


def test_a_buffer_of_all_members_is_learning_in_step() -> None:
    """Nobody is ever late, so that only the rounding of differences is not the same."""
    one = simulate(RUN, members(), buffering=Buffering(buffer=len(NAMES)))
    two = simulate(STEP, members())
    assert {age for facts in one.history for age in facts.staleness} == {0}
    assert all(roundings(one.shared[k], two.shared[k]) <= 100 for k in two.shared)


def test_nothing_older_than_allowed_counts_and_its_device_begins_anew() -> None:
    run = replace(RUN, rounds=12, algorithm="fedper")
    done = simulate(run, members(), buffering=Buffering(buffer=1, max_staleness=1))
    assert max(age for facts in done.history for age in facts.staleness) <= 1
    assert sum(facts.recalled for facts in done.history) > 0
    again = replay(run, members(), done.records, buffering=Buffering(buffer=1, max_staleness=1))
    assert equal(done.shared, again.shared), "who was recalled kept its private part as it was"


def test_a_robust_rule_within_the_buffer_outvotes_one_who_lies() -> None:
    run, five = replace(RUN, spec=ModelSpec("mlp", (4,), 3)), Buffering(buffer=4)
    flat = {n: Member(n, Samples(m.train.x[:, 0, :4], m.train.y), m.val) for n, m in members().items()}
    liar = Member("carl", Samples(flat["carl"].train.x * 40, (flat["carl"].train.y + 1) % 3), flat["carl"].val)
    honest, moved = simulate(run, flat, buffering=five), {}
    for name, rule in (("mean", None), ("trimmed", TrimmedMean(f=1))):
        done = simulate(run, flat | {"carl": liar}, aggregator=rule, buffering=five)
        moved[name] = max(float(np.abs(done.shared[k] - honest.shared[k]).max()) for k in honest.shared)
    assert moved["trimmed"] < 0.1 * moved["mean"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Buffering(buffer=0), "buffer=0"),
        (lambda: Buffering(max_staleness=0), "max_staleness=0 .* rounds in step"),
        (lambda: Buffering(damping=-1), "damping=-1"),
        (lambda: Buffering(normalise="sum"), "normalise='sum'"),
        (lambda: replace(RUN, fraction=0.5), "fraction=0.5 draws a cohort"),
        (lambda: simulate(RUN, members(), buffering=Buffering(buffer=6)), "buffer=6 never fills with 5 members"),
        (lambda: simulate(RUN, members(), over=0.5), "over=0.5: an asynchronous run"),
        (lambda: simulate(STEP, members(), buffering=Buffering(buffer=2)), "a buffer is for"),
        (lambda: simulate(STEP, members(), over=0.2), "over=0.2: fraction=1 asks all"),
        (lambda: simulate(replace(STEP, fraction=0.4), members(), over=-1), "over=-1"),
        (lambda: rounds.start(RUN), "folds a buffer"),
        (lambda: rounds.start(STEP, load_rule("fedbuff")), "needs an asynchronous run"),
        (lambda: buffered(RUN, Buffering(), load_rule("fedbuff")), "name the rule within it"),
        (lambda: buffered(RUN, Buffering(buffer=4), load_rule(KRUM)), "buffer=4 must be at least 5.* lower its f"),
        (lambda: buffered(run_of("hermes", hparams={"mode": "intersection"}), Buffering()), "hermes.*masks of all"),
        (lambda: buffered(replace(RUN, algorithm="ffgg"), Buffering(normalise="convex")), "ignores weights"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]


def test_distillation_is_refused_with_its_reason() -> None:
    run = run_of("heart_pfl")
    proxy = samples(9, 30)
    distilled = Distilled(inner=HeartPFL().aggregator, model=run_model.template(SPEC), proxy=proxy)
    with pytest.raises(ConfigError, match="heart_pfl: cannot learn asynchronously: its distillation"):
        buffered(run, Buffering(buffer=2), distilled)


def test_a_record_of_what_cannot_have_been_is_refused() -> None:
    with pytest.raises(ConfigError, match="record 1: no version 1"):
        replay(RUN, members(), [Record((("anna", 1),))], buffering=Buffering(buffer=1))
    with pytest.raises(ConfigError, match="'zoe' is no member"):
        replay(RUN, members(), [Record((("zoe", 0),))], buffering=Buffering(buffer=1))
    with pytest.raises(AggregationError, match="no update to fold"):
        replay(RUN, members(), [Record(())], buffering=Buffering(buffer=1))


def test_asking_more_than_needed_counts_those_who_come_first() -> None:
    run = Run(spec=SPEC, algorithm="fedper", recipe=RUN.recipe, rounds=4, seed=3, fraction=0.4)
    done = simulate(run, members(), over=0.5)
    for facts in done.history:
        asked = rounds.cohort(run, facts.round, NAMES, 0.5)
        assert set(rounds.cohort(run, facts.round, NAMES)) <= set(asked) == set(facts.clients)
        assert (len(asked), len(facts.counted), len(facts.late)) == (3, 2, 1)
        due = {name: delay(run.seed, name, facts.round) for name in asked}
        assert max(due[n] for n, _ in facts.counted) < due[facts.late[0][0]]
        assert facts.time == max(due[n] for n, _ in facts.counted)
    again = replay(run, members(), done.records)
    assert equal(done.shared, again.shared)
    assert all(equal(done.private[n], again.private[n]) for n in done.private)
    plain = simulate(run, members())
    assert all(facts.late == () for facts in plain.history)
    assert not equal(plain.shared, done.shared)


def test_delays_are_the_runs_own() -> None:
    drawn = [delay(0, f"c{i}", r) for i in range(40) for r in range(1, 11)]
    assert drawn == [delay(0, f"c{i}", r) for i in range(40) for r in range(1, 11)]
    assert min(drawn) > 0
    assert 0.3 < median(drawn) < 2
    slow = [median(drawn[10 * i : 10 * i + 10]) for i in range(40)]
    assert max(slow) > 3 * min(slow), "some devices are slow by nature"
    assert delay(1, "c0", 1) != delay(0, "c0", 1)


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "mine.npz"
    draw, y = np.random.default_rng(0), np.tile(np.arange(3), 60)
    x = draw.normal(0, 0.4, (180, 4)).astype(np.float32)
    x[:, 0] += 2 * y
    np.savez(path, x=x, y=y, client=np.repeat(np.arange(6), 30))
    return path


def test_the_command_tells_how_old_updates_were(arrays: Path) -> None:
    words = ["simulate", "-a", "ffgg", "-d", f"npz:{arrays}", "--rounds", "10", "--asynchronous", "--json"]
    words += ["--buffer", "2", "--max-staleness", "9", "--damping", "0.3", "--aggregator", "mean"]
    done = CliRunner().invoke(app(words), words)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["asynchronous"]
    assert (told["buffer"], told["max_staleness"], told["damping"], told["versions"]) == (2, 9, 0.3, 10)
    assert sum(told["updates"].values()) == sum(told["staleness"]["updates"].values()) == 20
    assert 0 < told["staleness"]["mean"] <= told["staleness"]["largest"] <= 9


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--buffer", "2"], "--buffer 2: only an asynchronous run"),
        (["--max-staleness", "2"], "--max-staleness 2: only an asynchronous run"),
        (["--asynchronous", "--buffer", "7"], "buffer=7 never fills with 6"),
        (["--asynchronous", "--buffer", "2", "--aggregator", "median:f=1"], "buffer=2 must be at least 3"),
        (["--asynchronous", "-a", "pfedgm"], "pfedgm"),
        (["--over", "0.5"], "fraction=1"),
    ],
)
def test_a_bad_option_names_value_and_mend(arrays: Path, words: list[str], says: str) -> None:
    base = ["simulate", "-d", f"npz:{arrays}", "--rounds", "1"]
    done = CliRunner().invoke(app(base), [*base, *words])
    assert isinstance(done.exception, ConfigError), done.output
    assert says in str(done.exception)
