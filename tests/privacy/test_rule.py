"""The private mean stands where the masked mean stands, and gives the same bytes by the protocol and in the open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cohorts import LAYOUT, SHAPES, mask
from safetensors import safe_open

import talaria
from talaria import tensors
from talaria.aggregate import registry
from talaria.aggregate.base import Aggregator
from talaria.aggregate.class_statistics import PooledStatistics
from talaria.aggregate.distill import Distilled
from talaria.aggregate.fedbuff import FedBuff
from talaria.aggregate.fedopt import ServerAdam, ServerMomentum
from talaria.aggregate.masked import MaskedMean
from talaria.errors import AggregationError, ConfigError
from talaria.federated.private_rule import require_cohort
from talaria.model.masks import gather
from talaria.privacy.accounting import ledger_in, noise_for
from talaria.privacy.coordinates import Coordinates
from talaria.privacy.in_process import identities, plain_sum, secure_sum
from talaria.privacy.rule import Privacy, PrivateMean, clipped, contribution, inner_of, private
from talaria.seeds import Draws
from talaria.tensors import Tensors
from talaria.types import LONGEST_NAME, Update


def shared_state(rng: np.random.Generator) -> Tensors:
    out = {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
    return out | {"norm.running_var": np.ones(5, np.float32), "norm.num_batches_tracked": np.array(7, np.int64)}


def updates_of(
    shared: Tensors, count: int, rng: np.random.Generator, kind: str = "value", dense: int = 1
) -> list[Update]:
    """``dense`` devices without a mask for each two with one."""
    masks = [*[None] * dense, mask(rng), mask(rng)]
    out = []
    for number in range(count):
        own = masks[number % len(masks)]
        steps = {k: rng.normal(0, 0.1, v.shape).astype(np.float32) for k, v in shared.items() if v.dtype.kind == "f"}
        values = steps if kind == "delta" else {k: shared[k] + v for k, v in steps.items()}
        if kind == "value":
            values["norm.running_var"] = np.abs(values["norm.running_var"])
        compact = values if own is None else gather(values, own)
        out.append(Update(compact, float(rng.integers(1, 300)), f"c{number}", kind=kind, mask=own))  # type: ignore[arg-type]
    return out


RULES: list[MaskedMean] = [
    MaskedMean(min_holders=3),
    MaskedMean(min_holders=3, weighting="uniform"),
    MaskedMean(min_holders=2, blend=True),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("kind", ["value", "delta"])
def test_it_is_the_masked_mean_but_for_the_rounding_to_whole_numbers(rule: MaskedMean, kind: str) -> None:
    rng = np.random.default_rng(0)
    shared = shared_state(rng)
    updates = updates_of(shared, 6, rng, kind)
    asked = Privacy(secure=True, threshold=4, holders=rule.min_holders, tiers=1)
    (new, state), (plain, _) = (one.apply(shared, {}, updates) for one in (PrivateMean(privacy=asked, like=rule), rule))
    assert state == {}
    assert new.keys() == plain.keys()
    unit = (2**31 - 1) // 6
    for name, value in new.items():
        if name == "norm.num_batches_tracked":
            assert value == 7
            continue
        if value.dtype == np.uint8:
            assert np.array_equal(value, plain[name])
            continue
        # Each of 6 values is off by half a step at most, over a weight of 1/512 at least, and a float32 rounding.
        bound = 1024.0 if name.endswith("var") else 4.0
        step = 6 * 0.5 * bound / unit * 512
        assert np.abs(value.astype(np.float64) - plain[name]).max() <= step + 4 * np.spacing(np.float32(4)), name


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize(
    "rule",
    [MaskedMean(), MaskedMean(weighting="uniform", blend=True), ServerMomentum(inner=MaskedMean()),
     ServerAdam(inner=ServerMomentum(inner=MaskedMean()))],
    ids=["mean", "blend", "momentum", "adam"],
)  # fmt: skip
def test_the_protocol_changes_no_byte(rule: Aggregator, bits: int) -> None:
    rng = np.random.default_rng(1)
    shared = shared_state(rng)
    both = []
    for secure in (True, False):
        one = private(rule, Privacy(secure=secure, bits=bits, holders=2))
        new, state = shared, one.init(shared)
        for seed in (2, 3):
            sent = updates_of(shared, 5, np.random.default_rng(seed))
            longest = [update.but(client=update.client.ljust(LONGEST_NAME, "-")) for update in sent]
            new, state = one.apply(new, state, longest)
        both.append((new, state))
    assert tensors.equal(both[0][0], both[1][0])
    assert tensors.equal(both[0][1], both[1][1])
    assert not tensors.equal({k: both[0][0][k] for k in shared}, shared)


@pytest.mark.parametrize("bits", [16, 32])
def test_noise_that_devices_add_comes_to_what_was_asked_for_and_no_byte_depends_on_the_protocol(bits: int) -> None:
    """Also where it is wider than the bound on values."""
    shared: Tensors = {"w": np.zeros(4000, np.float32)}
    updates = [Update({"w": np.zeros(4000, np.float32)}, 1.0, f"d{n}", kind="delta") for n in range(4)]
    both = []
    for secure in (False, True):
        asked = Privacy(secure=secure, bits=bits, clip=1.0, noise=6.0, holders=4, noise_by="devices")
        rule = private(MaskedMean(weighting="uniform"), asked)
        new, state = rule.apply(shared, rule.init(shared), updates)
        both.append(new["w"])
        ledger = ledger_in(state)
        assert ledger is not None
        assert (ledger.noise, ledger.version) == (6.0, 1)
    assert np.array_equal(both[0], both[1])
    assert 4 * both[0].std() >= 6.0 * 0.95  # of the sum, of 4000 values: off by 1 % on average
    assert 4 * both[0].std() <= 6.0 * (1.05 if bits == 32 else 4)  # rounding counts as a part of what is hidden
    with pytest.raises(ConfigError, match="noise_by='nobody' is unknown"):
        Privacy(noise_by="nobody")


def test_noise_that_devices_add_is_not_rounded_away() -> None:
    """Of 200 devices a step of 16 bits is many times a device's part of the noise: all of it was rounded to nothing."""
    shared: Tensors = {"w": np.zeros(64, np.float32), "bn.running_mean": np.zeros(64, np.float32)}
    steps = {name: np.zeros(64, np.float32) for name in shared}
    updates = [Update(steps, 1.0, f"d{n:03}", kind="delta") for n in range(200)]
    asked = Privacy(bits=16, clip=0.1, noise=0.2, statistics_bound=64.0, noise_by="devices")
    rule = private(MaskedMean(), asked)
    new, _ = rule.apply(shared, rule.init(shared), updates)
    terms = inner_of(rule).terms(Coordinates.of(shared, None), 200, 0, fleet="f", round=0, attempt=0)
    for name, bound in (("w", terms.bound), ("bn.running_mean", terms.statistics_bound)):
        least = max(terms.noise, bound / terms.grid.unit) * 200**0.5
        assert least * 0.75 <= 200 * new[name].std() <= least * 1.35  # of 64 values: off by 9 % on average


def test_neighbours_instead_of_all_change_no_byte_of_what_most_hold() -> None:
    """Eight of twelve are in one piece on every ring. A round of no more devices than neighbours is one of all."""
    shared, rule = shared_state(np.random.default_rng(1)), MaskedMean()
    for devices, degree, dense in ((12, 6, 4), (5, 6, 1)):
        mean = inner_of(private(rule, Privacy(secure=True, degree=6, holders=2)))
        terms = mean.terms(Coordinates.of(shared, LAYOUT), devices, 64, fleet="watch", round=1, attempt=1)
        assert (terms.degree, terms.own_threshold) == ((6, 4) if degree < devices - 1 else (0, 0))
        updates = updates_of(shared, devices, np.random.default_rng(2), dense=dense)
        both = [means(rule, shared, updates, secure) for secure in (False, True)]
        assert tensors.equal(*both)
    with pytest.raises(ConfigError, match="degree=7 must be even"):
        Privacy(secure=True, degree=7)


def test_what_few_hold_stays_where_the_ring_parts_them() -> None:
    """Four of twelve hold some coordinates; whether in one piece, the ring says that the cohort's keys draw."""
    shared, rule = shared_state(np.random.default_rng(1)), MaskedMean()
    updates = updates_of(shared, 12, np.random.default_rng(2))
    plain, secure = (means(rule, shared, updates, secure) for secure in (False, True))
    for name, old in shared.items():
        assert np.all((secure[name] == plain[name]) | (secure[name] == old)), name


def means(rule: MaskedMean, shared: Tensors, updates: list[Update], secure: bool) -> Tensors:
    new, _ = private(rule, Privacy(secure=secure, degree=6, holders=2)).apply(shared, {}, updates)
    return new


def test_what_too_few_hold_stays_and_says_so() -> None:
    rng = np.random.default_rng(4)
    shared = shared_state(rng)
    updates = updates_of(shared, 6, rng)
    new, _ = PrivateMean(privacy=Privacy(secure=True)).apply(shared, {}, updates)
    kept = [one.mask for one in updates]
    for group, size in LAYOUT.sizes.items():
        count = [sum(m is None or c in m.kept[group] for m in kept) for c in range(size)]
        assert new[f"mask/{group}"].tolist() == [int(n >= 5) for n in count]  # more than two thirds of six
    rare = [c for c in range(5) if sum(m is None or c in m.kept["a"] for m in kept) < 5]
    assert rare
    assert np.array_equal(new["bias"][rare], shared["bias"][rare])


def test_rules_that_are_no_sums_are_refused_with_the_reason() -> None:
    asked = Privacy(secure=True)
    for spec, why in (
        ({"name": "median", "f": 1}, "compares the updates of single devices"),
        ({"name": "krum", "f": 1}, "compares"),
        ({"name": "rfa"}, "compares"),
        ({"name": "centered_clip", "radius": 1.0}, "compares"),
        ({"name": "clipped", "norm": 1.0, "inner": "mean"}, "lets the devices do it"),
        ({"name": "server_momentum", "inner": {"name": "median", "f": 1}}, "compares"),
        ({"name": "masked_mean", "mode": "intersection"}, "mode='holders'"),
    ):
        try:
            rule = registry.load(spec)
        except ConfigError:
            rule = registry.load({k: v for k, v in spec.items() if k != "radius"})
        with pytest.raises(ConfigError, match=why):
            private(rule, asked)
    with pytest.raises(ConfigError, match="one by one"):
        private(FedBuff(), asked)
    with pytest.raises(ConfigError, match="teaches the server's model from single devices' models"):
        private(object.__new__(Distilled), asked)
    pooled = PooledStatistics(inner=MaskedMean())
    for more in ({"bits": 16}, {"clip": 1.0}):
        with pytest.raises(ConfigError, match="class statistics are sums"):
            private(pooled, replace(asked, **more))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="class statistics are sums"):
        private(replace(pooled, inner=MaskedMean(weighting="uniform")), asked)


def test_metrics_open_as_their_mean_alone_and_each_must_tell_all() -> None:
    rng = np.random.default_rng(5)
    shared = shared_state(rng)
    asked = Privacy(secure=True, holders=2, metrics=["val_accuracy", "pruned"], metric_bound=2.0)  # type: ignore[arg-type]
    updates = [one.but(metrics={"val_accuracy": rng.random(), "pruned": 9.0, "odd": 1.0}) for one in updates_of(
        shared, 5, rng)]  # fmt: skip
    rule, coordinates = PrivateMean(privacy=asked), Coordinates.of(shared, LAYOUT)
    terms = rule.terms(coordinates, 5, 512, fleet="f", round=1, attempt=1)
    given = {one.client: contribution(shared, coordinates, terms, one) for one in updates}
    seen = secure_sum(terms, coordinates, given, identities("f", sorted(given)), least=2).metrics
    assert seen == plain_sum(terms, coordinates, given).metrics
    assert list(seen) == ["val_accuracy", "pruned"]
    # Each of five is rounded to a step of the bound over (2^31 - 1) / 5, and cut at the bound.
    mean = np.mean([one.metrics["val_accuracy"] for one in updates])
    assert abs(seen["val_accuracy"] - mean) <= 0.5 * 2.0 / ((2**31 - 1) // 5) + 1e-15
    assert seen["pruned"] == pytest.approx(2.0, rel=1e-8)
    for lacking in ({}, {"val_accuracy": 0.5}, {"val_accuracy": float("nan"), "pruned": 0.0}):
        with pytest.raises(AggregationError, match=r"does not tell (val_accuracy|pruned)"):
            rule.apply(shared, {}, [*updates[:4], updates[4].but(metrics=lacking)])


def far(shared: Tensors, updates: list[Update]) -> list[Update]:
    """Every value far beyond its bound, up or down."""
    rng = np.random.default_rng(9)
    return [
        one.but(
            tensors={
                k: (1e9 * rng.choice([-1.0, 1.0], v.shape)).astype(v.dtype) if v.dtype.kind == "f" else v
                for k, v in one.tensors.items()
            },
            kind="delta",
        )
        for one in updates
    ]


@pytest.mark.parametrize("asked", [{}, {"bits": 16}, {"most_weight": 4096}, {"clip": 1.0}, {"clip": 1.0, "bits": 16},
    {"clip": 2.0, "noise": 1.0, "noise_by": "devices"}], ids=str)  # fmt: skip
def test_what_honest_devices_cut_is_used_and_garbage_within_the_sum_is_not(asked: dict[str, object]) -> None:
    """The largest sums of the honest pass; a masked update of any numbers makes sums of any numbers."""
    rng = np.random.default_rng(4)
    shared = shared_state(rng)
    rule = PrivateMean(privacy=Privacy(secure=True, holders=2, **asked))  # type: ignore[arg-type]
    updates = far(shared, updates_of(shared, 6, rng))
    state = rule.init(shared)
    coordinates = Coordinates.of(shared, LAYOUT)
    terms = rule.terms(coordinates, 6, 4096 if rule.weighted else 0, fleet="f", round=1, attempt=1)
    given = {one.client: contribution(shared, coordinates, terms, one, Draws(7)) for one in updates}
    opened = plain_sum(terms, coordinates, given)
    kept = [one.mask for one in updates]
    used = {k: v + np.float32(1e6) if v.dtype.kind == "f" else v for k, v in shared.items()}  # variances stay above 0
    assert not tensors.equal(rule.moved(used, state, coordinates, opened, kept)[0], used)
    garbage = rng.integers(0, 1 << terms.bits, opened.sums.size).astype(opened.sums.dtype)
    garbage[opened.sums == 0] = 0  # what did not open stays zero
    with pytest.raises(AggregationError, match=r"one of them (sent garbage|was not cut)"):
        rule.moved(used, state, coordinates, replace(opened, sums=garbage), kept)


def test_a_difference_that_was_not_cut_is_found_by_the_length_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: Tensors = {"w": np.zeros(50, np.float32)}
    updates = [Update({"w": np.full(50, 0.2, np.float32)}, 1.0, f"d{n}", kind="delta") for n in range(4)]
    rule = PrivateMean(privacy=Privacy(secure=False, clip=0.5, holders=4))
    whole = rule.apply(shared, rule.init(shared), updates)[0]["w"]
    assert np.allclose(whole, 0.5 / 50**0.5, atol=1e-6)
    real = clipped
    monkeypatch.setattr("talaria.privacy.rule.clipped", lambda steps, norm: steps if norm else real(steps, norm))
    with pytest.raises(AggregationError, match="one of them was not cut"):
        rule.apply(shared, rule.init(shared), updates)


def test_fewer_than_the_threshold_are_refused() -> None:
    rng = np.random.default_rng(5)
    shared = shared_state(rng)
    with pytest.raises(AggregationError, match="3 must be there"):
        PrivateMean(privacy=Privacy(secure=True)).apply(shared, {}, updates_of(shared, 2, rng))
    with pytest.raises(AggregationError, match="7 must be there"):
        PrivateMean(privacy=Privacy(secure=True, threshold=7)).apply(shared, {}, updates_of(shared, 6, rng))


def data() -> talaria.data.Federated:
    rng = np.random.default_rng(0)
    y = np.tile([0, 1], 60)
    x = rng.normal(size=(120, 1, 16)) + 2 * y[:, None, None]
    return talaria.data.Federated.from_arrays(x, y, np.repeat(["anna", "bela", "cleo", "dana"], 30))


def test_a_simulation_with_secure_sums_gives_the_bytes_of_the_plain_integer_sum() -> None:
    secure = talaria.simulate("hermes", data(), rounds=3, privacy={"secure": True, "holders": 2})
    plain = talaria.simulate(
        "hermes", data(), rounds=3, aggregator=PrivateMean(privacy=Privacy(secure=False, holders=2))
    )
    usual = talaria.simulate("hermes", data(), rounds=3)
    assert tensors.equal(secure.learned.shared, plain.learned.shared)
    assert secure.as_dict()["model_digest"] == plain.as_dict()["model_digest"] != usual.as_dict()["model_digest"]
    assert secure.as_dict()["privacy"] == {"secure": True, "bits": 32, "clip": None}
    assert abs(secure.accuracy.mean - usual.accuracy.mean) < 0.1


@pytest.mark.parametrize(
    "how",
    [{"engine": "onnx"}, {"adapters": "lowrank:rank=2"}, {"server": {"name": "server_adam"}}, {"bits": 16}],
    ids=lambda how: next(iter(how)),
)
def test_with_either_engine_adapters_server_rules_and_half_the_bits_it_is_the_same_bytes(how: dict[str, Any]) -> None:
    asked = Privacy(secure=True, holders=2, bits=how.get("bits", 32))
    rest = {name: value for name, value in how.items() if name not in ("bits", "server")}
    inner = registry.load(how["server"] | {"inner": "masked_mean"}) if "server" in how else MaskedMean()
    both = [
        talaria.simulate("fedavg", data(), rounds=2, aggregator=private(inner, replace(asked, secure=secure)), **rest)
        for secure in (True, False)
    ]
    assert tensors.equal(both[0].learned.shared, both[1].learned.shared)


def test_a_simulation_keeps_its_budget_and_its_ledger(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path)) / "run"
    asked = {"secure": True, "clip": 1.0, "epsilon": 8.0, "holders": 2}
    whole = talaria.simulate("fedavg", data(), rounds=3, privacy=asked, save=folder)
    figures = whole.as_dict()["privacy"]
    assert figures["epsilon"] == pytest.approx(8.0, rel=1e-9)
    assert figures["epsilon"] <= 8.0
    assert figures["rounds_of_one_device"] == 3
    again = talaria.resume(folder, data=data())
    assert again.as_dict() == whole.as_dict()
    ledger = ledger_in(whole.learned.server)
    assert ledger is not None
    with pytest.raises(AggregationError, match="is not opened"):
        ledger.after(["anna"]).require(8.0)
    with safe_open(folder / "state.safetensors", "numpy") as kept:
        assert sum("privacy/ledger" in name for name in kept.keys()) == 1  # noqa: SIM118  no mapping
    drawn = talaria.simulate("fedavg", data(), rounds=4, fraction=0.75, privacy=asked).as_dict()["privacy"]
    assert drawn["rounds_of_one_device"] <= 4
    assert drawn["epsilon"] <= 8.0


@pytest.mark.parametrize(("fraction", "fit"), [(1.0, 3), (0.75, 4)])
def test_noise_that_spends_the_budget_early_is_refused_before_anything_is_learned(fraction: float, fit: int) -> None:
    """It ended in an error at that round, and nothing told what the rounds before had come to."""
    noise = noise_for(8.0, 3, 1e-5) * (1 + 1e-9)
    asked = {"clip": 1.0, "epsilon": 8.0, "noise": noise}
    with pytest.raises(ConfigError, match=f"for {fit} of rounds=7; set rounds={fit}, more noise"):
        talaria.simulate("fedavg", data(), rounds=7, seed=11, fraction=fraction, privacy=asked)
    fitting = talaria.simulate("fedavg", data(), rounds=fit, seed=11, fraction=fraction, privacy=asked)
    figures = fitting.as_dict()["privacy"]
    assert figures["rounds_of_one_device"] == 3
    assert figures["epsilon"] <= 8.0
    with pytest.raises(ConfigError, match=r"for 0 of rounds=7; set more noise or a larger epsilon, or leave noise"):
        talaria.simulate("fedavg", data(), rounds=7, privacy={"clip": 1.0, "epsilon": 8.0, "noise": 0.0})


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"asynchronous": True}, "one by one"),
        ({"codec": "int8"}, "rounds each update alone"),
        ({"fraction": 0.5}, r"asks 2 of 4 clients \(fraction=0.5\), and 3 must be there .*; raise fraction$"),
        ({"privacy": {"clip": 1.0, "threshold": 9}}, "asks 4 of 4 clients .*; take more clients, or lower threshold"),
        ({"privacy": {"secure": True, "holders": 9}}, "holders=9 .* asks 4 devices, so that none would open; lower it"),
        ({"privacy": {"clip": 1.0}, "aggregator": "mean:min_holders=5"}, "no fewer than 5 updates, .* min_holders"),
        ({"privacy": {"secure": True, "threshold": 2}}, "threshold=2 must be more than half of the 4 devices"),
        ({"algorithm": "local"}, "local shares nothing, so that there is nothing to hide"),
        ({"algorithm": "mypkg.mine:Hermit"}, "mypkg.mine:Hermit shares nothing"),
        ({"aggregator": "median:f=1"}, "compares"),
        ({"algorithm": "pfedgm", "privacy": {"secure": True, "clip": 1.0}}, "leave clip"),
        ({"privacy": {"epsilon": 8.0}}, "need clip"),
        ({"privacy": {"noise": 1.0}}, "need clip"),
        ({"privacy": {"bits": 16}}, "neither secure nor clip"),
        ({"privacy": {"secret": True}}, "unknown"),
        ({"privacy": {"clip": 1.0, "noise": 1.0, "noise_by": "devices"}}, "set secure=true"),
        ({"privacy": {"clip": 1.0, "most_weight": 5}}, "weigh the same"),
        ({"privacy": {"secure": True, "metrics": ["a", "a"]}}, "different names"),
        ({"privacy": {"secure": True, "metrics": 3}}, "different names"),
        ({"privacy": {"clip": 1.0, "metrics": "pruned"}}, "tells its own anyhow"),
        ({"privacy": {"secure": True, "clip": 1.0, "epsilon": 8.0, "metrics": "pruned"}}, "without noise"),
        ({"privacy": {"clip": float("nan")}}, "above 0"),
    ],
)
def test_a_run_that_cannot_be_private_is_refused_before_it_begins(more: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        talaria.simulate(**{"algorithm": "fedavg", "data": data(), "privacy": {"secure": True}, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "devices", "why"),
    [({"bits": 16}, 600, "use bits=32"), ({"clip": 1.0}, 1025, "asks 1025 devices, and may ask 1024; lower fraction")],
)
def test_more_devices_than_one_sum_takes_are_refused(asked: dict[str, object], devices: int, why: str) -> None:
    require_cohort(Privacy.of(asked), 400)
    with pytest.raises(ConfigError, match=why):
        require_cohort(Privacy.of(asked), devices)


def test_clipping_is_over_all_that_travels() -> None:
    steps = {"a": np.full(9, 2.0, np.float32), "b": np.full(16, -1.0, np.float32)}
    short = clipped(steps, 1.0)
    length = np.sqrt(sum(np.square(v.astype(np.float64)).sum() for v in short.values()))
    assert length <= 1 + 1e-12
    assert np.allclose(short["a"] / short["b"][:9], -2)
    assert clipped(steps, 100.0) is steps


def test_settings_are_plain_values_and_back() -> None:
    asked = Privacy(secure=True, clip=2.0, noise=1.5, delta=1e-6)
    from dataclasses import asdict

    assert Privacy.of(asdict(asked)) == asked
    assert Privacy.of(asdict(replace(asked, secure=False))) != asked
