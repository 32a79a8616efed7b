"""The invariants of Hermes: the schedule, the gate, monotone masks, both aggregation modes, newcomers."""

import itertools
from dataclasses import replace

import pytest
import torch

from talaria import rounds
from talaria.algorithms.hermes import Hermes, overlaid, pruned_share
from talaria.errors import ConfigError
from talaria.model import masks
from talaria.model.zoo import ModelSpec
from talaria.rounds import Member, Run
from talaria.tree import equal, only, without
from talaria.types import ChannelLayout, ChannelMask, Plan, Recipe, Samples

SPEC = ModelSpec("imu_cnn", (6, 32), 3)


def learnable(seed: int, count: int = 24) -> Samples:
    """Three classes that differ in the mean of their first axis."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    x = torch.randn(count, 6, 32, generator=g) * 0.3
    x[:, 0] += y[:, None].float() - 1
    return Samples(x, y)


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


def learn(run: Run, members: list[Member], count: int) -> tuple[dict, dict, list]:
    shared, server = rounds.start(run)
    private: dict = {}
    sent = []
    for number in range(1, count + 1):
        updates = []
        for m in members:
            update, private[m.client] = rounds.participate(run, m, shared, private.get(m.client), number)
            updates.append(update)
        shared, server = rounds.close(run, shared, server, updates)
        sent.append(updates)
    return shared, private, sent


def test_the_schedule_of_the_card() -> None:
    """p = min(step, what is left to the cap): 0.2, 0.36, 0.488, 0.5 of the channels."""
    layout = ChannelLayout({"g": 1000}, {})
    algorithm = Hermes(step=0.2, cap=0.5, block=1)
    mask, shares = layout.full(), []
    for _ in range(5):
        target = algorithm.target(mask, None)
        mask = ChannelMask(layout, {"g": tuple(range(target["g"]))})
        shares.append(round(pruned_share(mask), 3))
    assert shares == [0.2, 0.36, 0.488, 0.5, 0.5]


def test_a_plan_sets_the_cap_of_each_group() -> None:
    planned = member("a", 1, Plan(widths={"conv1": 8, "conv4": 40}))
    _, private, _ = learn(run(step=0.9), [planned], 3)
    mask = masks.from_tensors(rounds.layout_of(SPEC), private["a"])
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
    """Other training labels change the weights, not the decision to prune."""
    m = member("a", 1)
    wrong = replace(m, train=Samples(m.train.x, (m.train.y + 1) % 3))
    shared, _ = rounds.start(run())
    one, _ = rounds.participate(run(), m, shared, None, 1)
    two, _ = rounds.participate(run(), wrong, shared, None, 1)
    assert one.mask == two.mask
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
    assert torch.equal(shared["conv1.weight"][gone], start["conv1.weight"][gone])
    assert not torch.equal(
        shared["conv1.weight"][list(mask.kept["conv1"])], start["conv1.weight"][list(mask.kept["conv1"])]
    )


def test_intersection_keeps_own_values_where_not_all_kept() -> None:
    config = run(mode="intersection", importance="taylor")
    members = [member("a", 1), member("b", 2)]
    shared, private, sent = learn(config, members, 1)
    everyone = masks.from_tensors(rounds.layout_of(SPEC), shared)
    mine = sent[0][0].mask
    assert mine is not None
    assert everyone.within(mine)
    assert everyone.kept != mine.kept, "the two members must differ for this test to say anything"
    own = {k.removeprefix("own/"): v for k, v in private["a"].items() if k.startswith("own/")}
    gathered = masks.gather(without(shared, masks.PREFIX), mine)
    merged = overlaid(own, gathered, mine, everyone)
    lone = [i for i, c in enumerate(mine.kept["conv1"]) if c not in everyone.kept["conv1"]]
    both = [i for i, c in enumerate(mine.kept["conv1"]) if c in everyone.kept["conv1"]]
    assert torch.equal(merged["bn1.weight"][lone], own["bn1.weight"][lone])
    assert torch.equal(merged["bn1.weight"][both], gathered["bn1.weight"][both])
    assert not torch.equal(own["bn1.weight"][both], gathered["bn1.weight"][both])


def test_a_newcomer_prunes_by_the_same_gate_and_serves_a_small_model() -> None:
    config = run(step=0.3)
    shared, _, _ = learn(config, [member("a", 1), member("b", 2)], 2)
    model = rounds.personalize(config, member("new", 9), shared, None)
    widths = {n: p.shape[0] for n, p in model.named_parameters() if n.startswith("conv")}
    assert widths == {"conv1.weight": 32, "conv2.weight": 32, "conv3.weight": 64, "conv4.weight": 64}


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
        ("tune", "x"),
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
