"""A fleet of liars: every algorithm, and every way in which an enrolled device can lie in what it sends, in one round.

The round completes with the honest, each liar is named and shut out, and nobody else is; nothing that was receipted is
lost. Updates are learned on a tiny model, once for each algorithm, and then changed.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache

import msgpack
import pytest
import torch
from lies import lies
from siege import HONEST, LIARS, Mallory

from talaria.algorithms import ALGORITHMS
from talaria.federated import rounds, run_model
from talaria.federated.fedbuff_run import Buffering
from talaria.federated.run import Member, Run
from talaria.model.spec import ModelSpec
from talaria.protocol.coordinator.state import Rules
from talaria.types import Recipe, Samples, Update
from talaria.wire import messages as m
from talaria.wire.frames import Header, encode_frame
from talaria.wire.signing import Signer

SPEC = ModelSpec("imu_cnn", (3, 16), 3)
STRIKES = Rules().strikes
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
    return Samples.of(x, y)


@cache
def learned(name: str, mode: str) -> dict[str, Update]:
    """What the honest, and one who will lie, learn in the first round."""
    run = run_of(name, mode)
    shared = run_model.first_shared(run)
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
        shut_out = {d.device: d.quarantine for d in s.store.devices.of("watch") if d.quarantine}
        unsaid = {kinds[LIARS.index(liar)]: why for liar, why in shut_out.items() if "offences" in why}
        assert not unsaid, "each is told by its own reason"

    options = {"buffering": Buffering(buffer=2)} if mode == "asynchronous" else {}
    siege(story, attackers=tuple(told), run=run, keys="liar_keys", **options)


# -- lies about the protocol itself; what an update holds is no matter here


RUN = run_of("fedavg", "in step")
MESSAGES = (
    m.Accept(attempt=1),
    m.Decline(attempt=1, reason="no"),
    m.Trouble(attempt=1, reason="no"),
    m.Want(model_digest=bytes(32), bitmap=b"\1"),
    m.Offer(
        attempt=1,
        base_version=0,
        size=1,
        chunk=1,
        sha256=bytes(32),
        hashes=bytes(32),
        nonce=bytes(16),
        base_digest=bytes(32),
    ),
    m.Goodbye(version=0),
    m.Leave(),
)


def deep(levels: int) -> object:
    """Lists in lists, as many as the packer takes."""
    found: object = 0
    for _ in range(levels):
        found = [found]
    return found


def nested(liar, kind: str, facts: dict[str, object]) -> list[bytes]:
    """A message once for each of its fields, which is nested deep there; and once in its header."""
    made = []
    for name in facts:
        shared_model = msgpack.packb(facts | {name: deep(400)})
        made.append(
            encode_frame(Header(kind, "watch", liar.name, boot=1, seq=10**6 + len(made)), shared_model, liar.signer)
        )
    return made


def fields_of(message) -> dict[str, object]:
    return {f.name: getattr(message, f.name) for f in fields(message)}


def test_lies_about_the_protocol_hold_up_nothing_and_blame_nobody_else(siege):
    """Silence, a wrong round, a wrong base, two updates, another's bytes, births without end, nesting everywhere."""

    async def story(s):
        silent, late, astray, twice, replay, births, nests = s.attackers
        s.learned.update(learned("fedavg", "in step"))
        await s.opened(*HONEST)
        silent.say(m.Accept(attempt=1))
        late.upload(s.update(LIARS[0], b"", 0), number=9)
        for i in range(STRIKES):
            astray.offer(bytes([i]) * 9, base_version=4)
        twice.offer(b"one")
        twice.offer(b"two")
        s.release("anna")
        await s.stored("anna")
        for topic, payload in s.lights["anna"].said * STRIKES:
            replay.publish(topic.split("/", 5)[-1], payload)
        for boot in range(2, 200):
            births.birth(boot)
        for message in MESSAGES:
            for frame in nested(nests, message.TYPE, fields_of(message)):
                nests.publish("evt", frame)
        birth = fields_of(m.DeviceBirth(online=True, key=b"", profile=b"")) | {"profile": b"[" * 900 + b"]" * 900}
        for frame in nested(nests, "device", birth):
            nests.publish("state", frame, retain=True)
        for one in (astray, twice, replay, nests):
            await s.until("quarantined", device=one.name)
        s.release("bela")
        await s.stored("bela")
        s.service._state.attempts[1].deadline = 0.0  # the deadline passes
        await s.finishes(*HONEST)
        assert {item["device"] for item in s.of("quarantined")} == {one.name for one in (astray, twice, replay, nests)}
        assert all((1, "stored") in s.lights[who].receipts for who in HONEST)

    siege(story, attackers=LIARS[:7], run=RUN, keys="liar_keys", deadline_s=600.0)


def test_who_has_the_broker_alone_shuts_nobody_out(siege):
    """Nothing here is signed by the device on whose topic it stands: births and wills, offers, declines, goodbyes."""

    async def story(s):
        s.learned.update(learned("fedavg", "in step"))
        (member,) = s.attackers
        await s.opened(*HONEST, honest=(*HONEST, member.name))
        stranger = Mallory(s, member.name)
        for signer in (False, Signer.of(bytes(32)), stranger.signer):
            for who in HONEST:
                for message in (*MESSAGES, *MESSAGES):
                    stranger.publish("evt", stranger.frame(message, boot=9, device=who, signer=signer), device=who)
                for online in (True, False):
                    birth = m.DeviceBirth(online=online, key=b"", profile=b"")
                    frame = stranger.frame(birth, boot=9, device=who, signer=signer)
                    stranger.publish("state", frame, retain=True, device=who)
        s.lights[member.name].held = False
        s.release(*HONEST, member.name)
        await s.finishes(*HONEST, member.name)
        assert not s.of("quarantined")
        assert all((1, "stored") in s.lights[who].receipts for who in HONEST)

    siege(story, attackers=LIARS[:1], run=RUN, keys="liar_keys")
