"""A fleet of liars: every algorithm, and every way in which an enrolled device can lie in what it sends, in one round.

The round completes with the honest, each liar is named and shut out, and nobody else is; nothing that was receipted is
lost. Updates are learned on a tiny model, once for each algorithm, and then changed.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from lies import lies
from siege import HONEST, LIARS

from talaria import rounds
from talaria.algorithms import ALGORITHMS
from talaria.asynchrony import Buffering
from talaria.model.zoo import ModelSpec
from talaria.rounds import Member, Run
from talaria.types import Recipe, Samples, Update

SPEC = ModelSpec("imu_cnn", (3, 16), 3)
NAMES = sorted(ALGORITHMS)
IN_STEP = ("local", "pfedgm")
"""What cannot learn asynchronously."""


def run_of(name: str, mode: str) -> Run:
    hparams = {"threshold": 0.0} if name == "hermes" else {}
    recipe = Recipe(epochs=1, batch=6, lr=0.02)
    kind = {"asynchronous": True} if mode == "asynchronous" else {"buffers": "aggregate"}
    return Run(spec=SPEC, algorithm=name, hparams=hparams, recipe=recipe, rounds=2, seed=3, **kind)


def samples(seed: int, count: int) -> Samples:
    y = torch.arange(count) % 3
    x = torch.randn(count, 3, 16, generator=torch.Generator().manual_seed(seed)) + y[:, None, None]
    return Samples(x, y)


@cache
def learned(name: str, mode: str) -> dict[str, Update]:
    """What the honest, and one who will lie, learn in the first round."""
    run = run_of(name, mode)
    shared = rounds.first_body(run)
    found = {}
    for seed, who in enumerate((*HONEST, LIARS[0])):
        member = Member(who, samples(seed, 12), samples(seed + 9, 6))
        found[who], _ = rounds.participate(run, member, shared, None, 1)
    return found


CASES = [(name, "in step") for name in NAMES] + [(n, "asynchronous") for n in NAMES if n not in IN_STEP]


@pytest.mark.parametrize(("name", "mode"), CASES, ids=[f"{name} {mode}" for name, mode in CASES])
def test_every_liar_is_shut_out_by_name_and_the_round_completes_with_the_honest(siege, name, mode):
    run, updates = run_of(name, mode), learned(name, mode)
    found = lies(run, updates[LIARS[0]])
    kinds = list(found)
    # Names are of equal length.
    told = {
        liar: data.replace(LIARS[0].encode(), liar.encode()) for liar, data in zip(LIARS, found.values(), strict=False)
    }
    assert len(told) == len(kinds) > 20

    async def story(s):
        s.learned.update({who: updates[who] for who in HONEST})
        await s.opened(*HONEST)
        for mallory in s.attackers:
            mallory.upload(told[mallory.name])
        await s.until("quarantined", len(told))
        s.release(*HONEST)
        await s.finishes(*HONEST)
        assert {item["device"] for item in s.of("quarantined")} == set(told)
        assert not s.of("error")
        assert not s.of("left-out")
        for who in HONEST:
            assert (1, "stored") in s.lights[who].receipts
        shut_out = {d.device: d.quarantine for d in s.store.devices("watch") if d.quarantine}
        unsaid = {kinds[LIARS.index(liar)]: why for liar, why in shut_out.items() if "offences" in why}
        assert not unsaid, "each is told by its own reason"

    options = {"buffering": Buffering(buffer=2)} if mode == "asynchronous" else {}
    siege(story, attackers=tuple(told), run=run, keys="liar_keys", **options)
