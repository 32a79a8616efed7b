"""The invariants of Hermes: the schedule, the gate, monotone masks, both aggregation modes, newcomers."""

import itertools
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch
from tolerance import roundings

from talaria.aggregate.fedopt import ServerMomentum
from talaria.aggregate.masked import MaskedMean
from talaria.aggregate.robust.bucketing import Bucketed
from talaria.aggregate.robust.krum import Krum
from talaria.aggregate.robust.median import Median, TrimmedMean
from talaria.aggregate.wrappers import Clipped
from talaria.algorithms.hermes import Hermes
from talaria.algorithms.hermes.own_values import assembled
from talaria.algorithms.hermes.subnetwork import narrowed, next_widths, pruned_share
from talaria.errors import ConfigError
from talaria.federated import device_task, rounds, run_model
from talaria.federated.private_rule import require_private
from talaria.federated.run import Member, Run
from talaria.model import masks, zoo
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.model.spec import ModelSpec
from talaria.model.state import state_of, tensor_of
from talaria.planning.plan import Plan
from talaria.privacy.rule import Privacy
from talaria.simulation.reporting import mask_overlap, pair_overlap
from talaria.simulation.run import simulate
from talaria.tensors import Tensors, equal, only, under
from talaria.training.evaluation import evaluate
from talaria.types import Recipe, Samples, Update

SPEC = ModelSpec("imu_cnn", (6, 32), 3)


def learnable(seed: int, count: int = 24) -> Samples:
    """Three classes that differ in the mean of their first axis."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    x = torch.randn(count, 6, 32, generator=g) * 0.3
    x[:, 0] += y[:, None].float() - 1
    return Samples.of(x, y)


def member(name: str, seed: int, plan: Plan | None = None) -> Member:
    return Member(name, learnable(seed), learnable(seed + 100, 9), plan)


def run(**hparams: object) -> Run:
    options = {"threshold": 0.0, "step": 0.5, "cap": 0.5, **hparams}
    return Run(
        spec=SPEC,
        algorithm="hermes",
        hparams=options,
        recipe=Recipe(epochs=1, batch=8, lr=0.05, momentum=0.0),
        rounds=3,
    )


def learn(run: Run, members: list[Member], count: int, rule=None, who=None) -> tuple[dict, dict, list]:
    """``who(number)``: the names of those who take part in a round; all where it is not given."""
    shared, server = rounds.start(run, rule)
    private: dict = {}
    sent = []
    for number in range(1, count + 1):
        updates = []
        for m in members:
            if who is not None and m.client not in who(number):
                continue
            update, private[m.client] = rounds.participate(run, m, shared, private.get(m.client), number)
            updates.append(update)
        shared, server = rounds.close(run, shared, server, updates, rule)
        sent.append(updates)
    return shared, private, sent


def test_the_schedule_of_the_card() -> None:
    """p = min(step, what is left to the cap): 0.2, 0.36, 0.488, 0.5 of the channels."""
    layout = ChannelLayout({"g": 1000}, {})
    mask, shares = layout.full(), []
    for _ in range(5):
        widths = next_widths(mask, None, step=0.2, cap=0.5, block=1)
        mask = ChannelMask(layout, {"g": tuple(range(widths["g"]))})
        shares.append(round(pruned_share(mask), 3))
    assert shares == [0.2, 0.36, 0.488, 0.5, 0.5]


def test_a_plan_sets_the_cap_of_each_group() -> None:
    planned = member("a", 1, Plan(widths={"conv1": 8, "conv4": 40}))
    _, private, _ = learn(run(step=0.9), [planned], 3)
    mask = masks.from_tensors(run_model.layout_of(SPEC), private["a"])
    assert {g: len(k) for g, k in mask.kept.items()} == {"conv1": 8, "conv2": 32, "conv3": 64, "conv4": 40}


def test_masks_only_shrink_and_never_past_the_cap() -> None:
    _, _, sent = learn(run(step=0.2), [member("a", 1), member("b", 2)], 4)
    for earlier, later in itertools.pairwise(sent):
        for before, after in zip(earlier, later, strict=True):
            assert before.mask is not None
            assert after.mask is not None
            assert after.mask.within(before.mask)
    last = sent[-1][0].mask
    assert last is not None
    assert all(len(k) >= last.layout.sizes[g] // 2 for g, k in last.kept.items())


def test_below_the_threshold_nothing_is_pruned() -> None:
    _, _, sent = learn(run(threshold=1.0), [member("a", 1)], 1)
    assert sent[0][0].mask is not None
    assert sent[0][0].mask.is_full


def test_the_gate_reads_validation_data_alone() -> None:
    """Other training labels change the weights, and so the choice of channels, not the decision to prune."""
    m = member("a", 1)
    wrong = replace(m, train=Samples(m.train.x, (m.train.y + 1) % 3))
    shared, _ = rounds.start(run())
    one, _ = rounds.participate(run(), m, shared, None, 1)
    two, _ = rounds.participate(run(), wrong, shared, None, 1)
    assert not one.mask.is_full
    assert {g: len(k) for g, k in one.mask.kept.items()} == {g: len(k) for g, k in two.mask.kept.items()}
    assert one.metrics["val_accuracy"] == two.metrics["val_accuracy"]


def test_only_kept_coordinates_travel() -> None:
    _, _, sent = learn(run(), [member("a", 1)], 1)
    update = sent[0][0]
    assert update.mask is not None
    assert not update.mask.is_full
    for key, value in update.tensors.items():
        want = [len(i) if i is not None else value.shape[d] for d, i in enumerate(update.mask.indices.get(key, ()))]
        assert list(value.shape)[: len(want)] == want
    assert not any("running" in k or "num_batches" in k or k.startswith(masks.PREFIX) for k in update.tensors)


def test_a_full_mask_is_fedavg_to_the_bit() -> None:
    members = [member("a", 1), member("b", 2)]
    hermes, _, _ = learn(run(step=0.01, cap=0.3, block=64), members, 2)
    fedavg, _, _ = learn(replace(run(), algorithm="fedavg", hparams={}), members, 2)
    assert equal(hermes, fedavg)


def test_coordinates_that_nobody_kept_stay_as_they_were() -> None:
    start, _ = rounds.start(run())
    shared, _, sent = learn(run(), [member("a", 1)], 1)
    mask = sent[0][0].mask
    assert mask is not None
    gone = sorted(set(range(64)) - set(mask.kept["conv1"]))
    assert np.array_equal(shared["conv1.weight"][gone], start["conv1.weight"][gone])
    assert not np.array_equal(
        shared["conv1.weight"][list(mask.kept["conv1"])], start["conv1.weight"][list(mask.kept["conv1"])]
    )


def labelled(name: str, seed: int, *classes: int) -> Member:
    """A device that sees these classes alone; each class is a tone of its own on an axis of its own."""
    g = torch.Generator().manual_seed(seed)
    y = torch.tensor(classes).repeat(8)
    time = torch.arange(32) / 32
    x = torch.randn(len(y), 6, 32, generator=g) * 0.3
    for row, label in enumerate(y.tolist()):
        x[row, 2 * label] += torch.sin(2 * torch.pi * (2 * label + 1) * time)
    return Member(name, Samples.of(x[::2], y[::2]), Samples.of(x[1::2], y[1::2]))


def test_a_device_is_served_the_subnetwork_as_it_trained_it() -> None:
    """Not the average of everybody cut to its mask: after the last fold its model is what it sent, to the bit."""
    config, members = run(tune_epochs=0), [labelled("a", 1, 0, 1), labelled("b", 2, 1, 2)]
    shared, private, sent = learn(config, members, 3)
    for m, update in zip(members, sent[-1], strict=True):
        model = state_of(rounds.personalize(config, m, shared, private[m.client]))
        assert equal(only(model, update.tensors), update.tensors)
        assert not equal(only(model, update.tensors), masks.gather(only(shared, update.tensors), update.mask))


@pytest.mark.parametrize("importance", ["l1", "taylor", "bn"])
def test_devices_with_other_labels_keep_other_channels(importance: str) -> None:
    """Their gates open in the same round, on the same download: their own labels must choose."""
    members = [labelled("a", 1, 0, 1), labelled("b", 2, 1, 2), labelled("c", 3, 0, 2)]
    config = replace(run(importance=importance), recipe=Recipe(epochs=6, batch=4, lr=0.1, momentum=0.9))
    result = simulate(config, {m.client: m for m in members})
    assert {pruned_share(mask) for mask in result.masks.values()} == {0.5}
    matrix = mask_overlap(result.masks)["matrix"]
    pairs = [matrix[a][b] for a, b in itertools.combinations(range(3), 2)]
    assert pair_overlap(result.masks) == {
        "mean": pytest.approx(sum(pairs) / 3),
        "least": min(pairs),
        "most": max(pairs),
    }
    assert max(pairs) < 1


def test_the_gate_opens_where_everybodys_average_fits_nobody() -> None:
    """Same windows, the labels turned by one: the download is wrong for each device, its own subnetwork right."""
    one, two = learnable(1, 48), learnable(2, 48)
    held = [learnable(seed, 30) for seed in (11, 12)]
    members = [
        Member("a", one, held[0]),
        Member("b", Samples(two.x, (two.y + 1) % 3), Samples(held[1].x, (held[1].y + 1) % 3)),
    ]
    config = replace(run(threshold=0.6), recipe=Recipe(epochs=6, batch=8, lr=0.05, momentum=0.0))
    _, _, sent = learn(config, members, 4)
    assert {pruned_share(update.mask) for update in sent[-1]} == {0.5}
    assert min(update.metrics["val_accuracy"] for update in sent[-1]) >= 0.6


def test_fine_tuning_that_costs_accuracy_is_not_served() -> None:
    """At a rate that throws the weights about, a device serves what it trained in the rounds, to the bit."""
    members = [member("a", 1), member("b", 2)]
    config = replace(run(), recipe=Recipe(epochs=6, batch=8, lr=0.05, momentum=0.0))
    shared, private, sent = learn(config, members, 3)
    for m, update in zip(members, sent[-1], strict=True):
        for rate, kept in ((1e4, True), (0.0, False)):
            tuned = replace(config, hparams={**config.hparams, "tune_lr": rate})
            model = state_of(rounds.personalize(tuned, m, shared, private[m.client]))
            assert equal(only(model, update.tensors), update.tensors) is kept


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_fine_tuning_that_diverged_is_not_served_where_all_is_of_the_first_class(engine: str) -> None:
    """The largest of outputs that are no numbers is the first one, which would be right there."""
    config, x = run(tune_lr=1e20), learnable(1).x
    own = Samples(x, np.zeros(len(x), np.int64))
    one = replace(member("a", 1), train=own, val=own.take(np.arange(4)), engine=engine)
    shared, private, sent = learn(config, [one], 1)
    model = state_of(rounds.personalize(config, one, shared, private["a"]))
    assert equal(only(model, sent[0][0].tensors), sent[0][0].tensors)


def digits(device: int) -> tuple[Member, Samples]:
    """Handwritten digits (UCI), four of ten to a device, twice as large and noisy; and its samples to test on."""
    from sklearn.datasets import load_digits

    every = load_digits()
    rng = np.random.default_rng([device, 1])
    mine = np.flatnonzero(np.isin(every.target, rng.choice(10, 4, replace=False)))
    index = rng.permutation(mine)[:250]
    x = np.kron(every.images[index] / 16, np.ones((2, 2))) + 0.7 * rng.standard_normal((len(index), 16, 16))
    x, y = x[:, None].astype(np.float32), every.target[index]
    train, val, test = (Samples.of(x[part], y[part]) for part in (slice(80), slice(80, 100), slice(100, None)))
    return Member(f"device-{device}", train, val), test


def test_a_subnetwork_of_half_the_parameters_is_worth_the_whole_network_alone_where_labels_differ() -> None:
    """With the defaults, on images no default was chosen for: what the device would have without any fleet."""
    data = [digits(device) for device in range(6)]
    whole, right, sizes = zoo.fitting((1, 16, 16), 10, 480), {}, []
    for name in ("local", "hermes"):
        config = Run(spec=whole, algorithm=name, rounds=8)
        result = simulate(config, {m.client: m for m, _ in data})
        models = [(result.personal(m), test) for m, test in data]
        right[name] = fmean(evaluate(model, test).accuracy for model, test in models)
        sizes.append(fmean(sum(p.numel() for p in model.parameters()) for model, _ in models))
    assert sizes[1] < 0.5 * sizes[0]
    assert right["hermes"] > right["local"] - 0.03, right


def test_the_overlap_is_that_of_pairs() -> None:
    layout = ChannelLayout({"g": 3, "h": 2}, {})
    one, two = (ChannelMask(layout, {"g": g, "h": (0, 1)}) for g in ((0, 1), (1, 2)))
    assert mask_overlap({"one": one, "two": two}) == {"names": ["one", "two"], "matrix": [[1.0, 0.6], [0.6, 1.0]]}
    assert pair_overlap({"one": one}) is None
    assert mask_overlap({}) == {"names": [], "matrix": []}


def test_scores_are_taken_in_slices_no_larger_than_a_step_of_training() -> None:
    """All training samples at once would take memory that a planned device has not got."""
    config, m = run(), member("a", 1)
    task = device_task.task_of(config, m, 1, run_model.layout_of(SPEC).full())
    seen = []
    task.model.register_forward_hook(
        lambda _module, x, _out: seen.append(len(x[0])) if torch.is_grad_enabled() else None
    )
    widths = {group: len(kept) // 2 for group, kept in task.mask.kept.items()}
    smaller, _ = narrowed(task, state_of(task.model), {}, widths, kind="taylor", block=8)
    assert smaller.mask != task.mask
    assert max(seen) <= config.recipe.batch
    assert sum(seen) == len(m.train)


def own_or_averaged(shared: Tensors, before: Tensors, private: Tensors, update: Update) -> tuple[Tensors, Tensors]:
    """What a device goes on from, and per tensor where the server moved it, under its mask."""
    now, then = (masks.gather(only(body, update.tensors), update.mask) for body in (shared, before))
    return assembled({**shared, **now}, private), {key: now[key] != then[key] for key in now}


@pytest.mark.parametrize(
    ("rule", "options"),
    [(None, {"mode": "intersection"}), (None, {"min_holders": 3}), (Median(f=1), {}), (TrimmedMean(f=1), {})],
    ids=["intersection", "min_holders", "median", "trimmed mean"],
)
def test_own_values_stand_where_too_few_hold_a_coordinate(rule, options) -> None:
    """What its few holders learn is kept by each, and the average is taken wherever there is one."""
    config = run(importance="taylor", **options)
    members = [labelled("a", 1, 0, 1), labelled("b", 2, 1, 2), labelled("c", 3, 0, 2)]
    before, _, _ = learn(config, members, 1, rule)
    shared, private, sent = learn(config, members, 2, rule)
    for update in sent[-1]:
        state, moved = own_or_averaged(shared, before, private[update.client], update)
        now = masks.gather(only(shared, update.tensors), update.mask)
        alone = sum(int((~m).sum()) for m in moved.values())
        assert 0 < alone < sum(m.size for m in moved.values())
        for key, trained in update.tensors.items():
            assert np.array_equal(state[key][moved[key]], now[key][moved[key]])
            assert np.array_equal(state[key][~moved[key]], trained[~moved[key]])


def test_a_device_that_was_not_asked_takes_the_averages_of_all_rounds_since() -> None:
    """Each fold averages what its own cohort keeps; the last one's word alone would lose the rounds between."""
    config = run(mode="intersection", importance="taylor")
    members = [labelled("a", 1, 0, 1), labelled("b", 2, 1, 2), labelled("c", 3, 0, 2)]
    cohorts = {1: "abc", 2: "abc", 3: "ab", 4: "bc"}
    shared, private, sent = learn(config, members, 4, who=cohorts.get)
    third, _, _ = learn(config, members, 3, who=cohorts.get)
    second, _, _ = learn(config, members, 2, who=cohorts.get)
    update = sent[2][0]
    state, _ = own_or_averaged(shared, second, private["a"], update)
    assert update.client == "a"
    a, b, c = (masks.gather(only(body, update.tensors), update.mask) for body in (second, third, shared))
    between = 0
    for key, trained in update.tensors.items():
        only_third = (a[key] != b[key]) & (b[key] == c[key])
        between += int(only_third.sum())
        assert np.array_equal(state[key][only_third], b[key][only_third])
        stayed = a[key] == c[key]
        assert np.array_equal(state[key][stayed], trained[stayed])
    assert between, "some rows must be averaged in round 3 alone for this test to say anything"


def test_an_intersection_without_a_common_channel_stops_nobody() -> None:
    """One device that lies about its mask can end the averaging of a group, not the learning of the others."""
    config = run(mode="intersection", importance="taylor")
    honest = [member("a", 1), member("b", 2)]
    shared, server = rounds.start(config)
    private: dict = {}
    for number in range(1, 5):
        updates = []
        for m in honest:
            update, private[m.client] = rounds.participate(config, m, shared, private.get(m.client), number)
            updates.append(update)
        held = set(updates[0].mask.kept["conv2"]) & set(updates[1].mask.kept["conv2"])
        layout = run_model.layout_of(SPEC)
        kept = {g: tuple(range(n)) for g, n in layout.sizes.items()}
        kept["conv2"] = tuple(sorted(set(kept["conv2"]) - held)) or (0,)
        mask = ChannelMask(layout, kept)
        lie = masks.gather(only(shared, updates[0].tensors), mask)
        liar = Update(lie, weight=1.0, client="liar", base_version=number - 1, mask=mask)
        before, (shared, server) = shared, rounds.close(config, shared, server, [*updates, liar])
    assert not shared["mask/conv2"].any()
    assert np.array_equal(shared["conv2.weight"], before["conv2.weight"])
    for m in [*honest, member("new", 9)]:
        model = rounds.personalize(config, m, shared, private.get(m.client))
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    trained = under(private["a"], "own/")["conv2.weight"]
    assert equal({"w": assembled(_gathered(shared, private["a"]), private["a"])["conv2.weight"]}, {"w": trained})


def _gathered(shared: Tensors, private: Tensors) -> Tensors:
    return masks.gather(shared, masks.from_tensors(run_model.layout_of(SPEC), private))


@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_an_intersection_learns_over_the_wire(fraction: float) -> None:
    """The rule's bitmaps stand in the body that comes down, and in no update."""
    members = {m.client: m for m in (member("a", 1), member("b", 2), member("c", 3))}
    result = simulate(replace(run(mode="intersection"), fraction=fraction), members)
    assert len(result.history) == 3
    assert any(name.startswith(masks.PREFIX) for name in result.shared)


@pytest.mark.parametrize(
    "rule", [MaskedMean(), Median(), Krum(f=1), ServerMomentum(inner=MaskedMean()), Clipped(inner=Median(), norm=1.0)]
)
def test_a_rule_that_moves_what_some_keep_is_refused_for_an_intersection(rule) -> None:
    """It would leave every device alone with its own values, and nobody would know."""
    with pytest.raises(ConfigError, match=r"hermes: mode='intersection'.*keep='all'.*mode='holders'"):
        rounds.rule_of(run(mode="intersection"), rule)


@pytest.mark.parametrize(
    "rule", [MaskedMean(mode="intersection"), Median(keep="all"), Clipped(inner=Median(keep="all"), norm=1.0)]
)
def test_a_rule_that_moves_what_all_keep_folds_an_intersection(rule) -> None:
    assert rounds.rule_of(run(mode="intersection"), rule) is rule
    members = {m.client: m for m in (member("a", 1), member("b", 2), member("c", 3))}
    assert len(simulate(run(mode="intersection"), members, aggregator=rule).history) == 3


@pytest.mark.parametrize("download", ["raw", "fp16", "bf16"])
def test_what_a_rule_leaves_alone_stands_still_however_coarsely_it_travels(download) -> None:
    """By that a device knows that it goes on from its own value."""
    config = replace(run(mode="intersection"), download=download)
    members = [labelled("a", 1, 0, 1), labelled("b", 2, 1, 2), labelled("c", 3, 0, 2)]
    before, _, _ = learn(config, members, 1)
    shared, _, sent = learn(config, members, 2)
    every = [
        masks.scatter({k: np.ones_like(v) for k, v in u.tensors.items()}, u.mask, _zeros(shared)) for u in sent[-1]
    ]
    for key in sent[-1][0].tensors:
        alone = np.minimum.reduce([one[key] for one in every]) == 0
        assert np.array_equal(shared[key][alone], before[key][alone]), key
        assert key.startswith("bn") or not alone.any() or not np.array_equal(shared[key], before[key]), key


@pytest.mark.parametrize(
    ("hparams", "rule", "privacy"),
    [
        ({"mode": "intersection"}, None, None),
        ({"min_holders": 2}, None, None),
        ({}, ServerMomentum(inner=Median()), None),
        ({}, Bucketed(inner=Median(), size=2), None),
        ({}, None, Privacy(secure=True)),
    ],
    ids=["intersection", "min_holders", "median", "bucketed", "secure"],
)
def test_int8_models_are_refused_where_a_rule_leaves_coordinates_alone(hparams, rule, privacy) -> None:
    """Its scales move with each row's largest value: a device would lose its own values of all that few hold."""

    def told(of: Run) -> None:
        rounds.rule_of(of, rule)
        if privacy is not None:
            require_private(of, privacy)

    config = replace(run(**hparams), download="int8")
    with pytest.raises(ConfigError, match=r"download='int8'.*hermes.*set download='bf16', 'fp16' or 'raw'"):
        told(config)
    for fits in (replace(config, download="bf16"), replace(config, algorithm="fedavg", hparams={})):
        told(fits)
    rounds.rule_of(replace(run(), download="int8"))


def _zeros(shared: Tensors) -> Tensors:
    return {key: np.zeros_like(value) for key, value in shared.items()}


def test_who_chooses_no_channels_reads_no_bitmaps() -> None:
    """FedAvg on planned widths under a rule that says which channels moved: their names are no tensors of its model."""
    narrow = Plan(widths={"conv1": 32})
    members = {n: member(n, i, narrow) for i, n in enumerate("abc")}
    config = replace(run(), algorithm="fedavg", hparams={})
    for rule in (Median(keep="all"), Median(), MaskedMean(min_holders=2)):
        assert len(simulate(config, members, aggregator=rule).history) == 3


def test_a_newcomer_prunes_by_the_same_gate_and_serves_a_small_model() -> None:
    config = run(step=0.3)
    shared, _, _ = learn(config, [member("a", 1), member("b", 2)], 2)
    model = rounds.personalize(config, member("new", 9), shared, None)
    widths = {n: p.shape[0] for n, p in model.named_parameters() if n.startswith("conv")}
    assert widths == {"conv1.weight": 32, "conv2.weight": 32, "conv3.weight": 64, "conv4.weight": 64}


def test_a_newcomer_has_the_statistics_of_its_own_samples_as_they_are() -> None:
    """Not the running ones of a few steps: those of augmented samples, a tenth of each, begun from another state."""
    config = replace(run(tune_on="all"), recipe=Recipe(epochs=1, batch=8, lr=0.05, momentum=0.0, augment="imu"))
    shared, _, _ = learn(config, [member("a", 1), member("b", 2)], 2)
    new = member("new", 9)
    model = rounds.personalize(config, new, shared, None)
    seen = model.conv1(tensor_of(np.concatenate([new.train.x, new.val.x]))).double()
    want = {"mean": seen.mean((0, 2)), "var": seen.var((0, 2))}
    found = {"mean": model.bn1.running_mean, "var": model.bn1.running_var}
    count = seen.shape[0] * seen.shape[2]
    assert roundings(found["mean"], want["mean"], seen.abs().max()) <= count
    assert roundings(found["var"], want["var"]) <= count


def test_a_newcomer_learns_for_epochs_of_its_own() -> None:
    """They change nothing for those who took part in the rounds, and none of their own means as many as members."""
    members, new = [member("a", 1), member("b", 2)], member("new", 9)
    shared, private, _ = learn(run(), members, 2)

    def both(**options: int) -> list[Tensors]:
        config = run(**options)
        kept = [(members[0], private["a"]), (new, None)]
        return [state_of(rounds.personalize(config, m, shared, p)) for m, p in kept]

    (one, few), (same, many), (_, as_members) = both(), both(newcomer_epochs=40), both(newcomer_epochs=20)
    assert equal(one, same)
    assert not equal(few, many)
    assert equal(few, as_members)


def test_private_parts_never_travel() -> None:
    shared, _ = rounds.start(run(private="head"))
    update, private = rounds.participate(run(private="head"), member("a", 1), shared, None, 1)
    assert not any(k.startswith("head") for k in [*shared, *update.tensors])
    assert private["head.weight"].shape[1] == 64, "the head's columns follow the mask"


def test_the_same_run_gives_the_same_bits() -> None:
    members = [member("a", 1), member("b", 2)]
    one, mine, _ = learn(run(), members, 2)
    two, again, _ = learn(run(), members, 2)
    assert equal(one, two)
    assert all(equal(mine[k], again[k]) for k in mine)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("threshold", 1.5),
        ("step", 0.0),
        ("cap", 1.0),
        ("block", 0),
        ("mode", "mean"),
        ("private", "body"),
        ("choose_by", "luck"),
        ("tune", "x"),
        ("newcomer_epochs", -1),
    ],
)
def test_bad_options_name_field_and_value(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field}={value!r}"):
        Hermes(**{field: value})


def test_plain_average_of_the_update_is_what_the_server_keeps() -> None:
    """One client, holders mode: the kept coordinates become exactly its values."""
    shared, _, sent = learn(run(), [member("a", 1)], 1)
    update = sent[0][0]
    assert update.mask is not None
    assert equal(masks.gather(only(shared, update.tensors), update.mask), update.tensors)
