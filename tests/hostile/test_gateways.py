"""A gateway at a real coordinator: its partial sum gives what its devices give alone, and no lie gets through."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from siege import ATTACKERS, HONEST
from test_liars import run_of, samples
from tolerance import roundings

from talaria.aggregate.partial_sum import MaskClass, partial_sum
from talaria.federated import global_model, rounds, run_model
from talaria.federated.run import Member
from talaria.simulation.run import simulate
from talaria.wire.codec import encode_update
from talaria.wire.partial_sums import encode_partial_sum

SITE = ("bela-1", "bela-2", "bela-3")


@cache
def members():
    return {
        name: Member(name, samples(seed, 12 + seed), samples(seed + 9, 6)) for seed, name in enumerate(("anna", *SITE))
    }


@cache
def learned(name):
    """What each device of the flat fleet learns in its first round, as simulation does."""
    run = run_of(name, "in step")
    shared = rounds.start(run)[0]
    return {who: rounds.participate(run, one, shared, None, 1)[0] for who, one in members().items()}


def sum_of(name, client="bela"):
    run = run_of(name, "in step")
    return partial_sum(rounds.start(run)[0], [learned(name)[who] for who in SITE], client)


def packed(partial):
    return encode_partial_sum(partial, run_model.layout_of(run_of("fedavg", "in step").spec))


def with_a_site(siege, name):
    """Anna is a device and bela a gateway of three, both through the real device's half."""
    sent = {"anna": encode_update(learned(name)["anna"]), "bela": packed(sum_of(name))}
    siege.update = lambda who, model, version: sent[who]


@pytest.mark.parametrize("name", ["fedavg", "hermes"])
def test_a_site_behind_a_gateway_gives_what_its_devices_give_alone(siege, name):
    run, found = run_of(name, "in step"), {}

    async def story(s):
        await s.opened()
        s.mallory.upload(b"nothing")  # the round waits for nobody else
        await s.finishes(*HONEST)
        row = next(row for row in s.views.attempts("watch") if row.round == 1)
        assert (row.counted, row.clients) == (2, 4)
        found.update(global_model.decode_model(run, s.blobs.get(row.model_digest)))

    siege(story, lambda s: with_a_site(s, name), run=run, gateways={"bela": 3})
    flat, start = simulate(replace(run, rounds=1), members()).shared, rounds.start(run)[0]
    for key, value in flat.items():
        sizes = [np.abs(one.tensors[key]).max(initial=0) for one in learned(name).values() if key in one.tensors]
        scale = np.abs(start[key]).max(initial=0) + max(sizes, default=0)
        assert roundings(found[key], value, scale=scale) <= 1.5 + 1e-6, key  # see tests/sdk/wire/test_partial_sums.py


def test_who_lies_in_the_name_of_a_site_is_shut_out_and_nobody_else(siege):
    names = ATTACKERS[:5]
    good = sum_of("fedavg", names[0])
    heavy = replace(good, client=names[3], classes=(MaskClass(None, 4e8, 3),))
    lies = {
        names[0]: (packed(replace(good, base_version=7)), "global model 7"),
        names[1]: (packed(replace(good, client=names[1])), "3] clients"),  # it may speak for two
        names[2]: (encode_update(learned("fedavg")["anna"].but(client=names[2])), "no partial sum"),
        names[3]: (packed(heavy), "weighs 4e+08"),
        names[4]: (packed(replace(good, client=names[4])), "is no gateway"),
    }

    async def story(s):
        await s.opened("bela")
        for one in s.attackers:
            one.upload(lies[one.name][0])
        for name, (_, words) in lies.items():
            await s.shut_out(words, name=name)
        s.release("bela")
        await s.finishes(*HONEST)

    may = dict.fromkeys(names[:4], 3) | {names[1]: 2, "bela": 3}
    siege(story, lambda s: with_a_site(s, "fedavg"), run=run_of("fedavg", "in step"), attackers=names, gateways=may)
