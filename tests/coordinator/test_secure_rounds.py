"""Secure rounds over the store: words kept together, updates taken side by side, and steps that wait for them."""

import asyncio
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest

from talaria.errors import StateError
from talaria.federated.private_rule import coordinates_of, private_rule
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.privacy.device import DeviceHalf
from talaria.privacy.in_process import identities
from talaria.privacy.messages import decode
from talaria.privacy.rule import Privacy
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.wire.signing import Signer
from talaria_coordinator.fleet.conversation import Conversation
from talaria_coordinator.fleet.hands import Hands
from talaria_coordinator.fleet.secure import GoneError, Secure
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store

NAMES = ("anna", "bela", "carl")
RUN = Run(algorithm="fedavg", spec=ModelSpec("mlp", (4,), 3), rounds=3)


@pytest.fixture
def secure(tmp_path):
    authority = Signer.generate()
    with Store(tmp_path / "coordinator.db") as store:
        store.fleets.enter("watch", RUN.to_json(), "a" * 64, "b" * 64)
        rule = private_rule(RUN, None, Privacy(secure=True, threshold=2), 0)
        made = Secure("watch", RUN, rule, authority.public, store, FolderBlobs(tmp_path / "blobs"))
        made.who = identities("watch", NAMES, authority)
        yield made


def asked(secure, attempt):
    """Devices that are asked in a new attempt, and have said their first word."""
    terms, coordinates = secure.begin(attempt, 1, len(NAMES)), coordinates_of(RUN)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in coordinates.shapes.items()}
    return {
        name: DeviceHalf.begin(terms, coordinates, secure.who[name], tensors, least=2, weight=1.0) for name in NAMES
    }


def words(attempt, step, said):
    return [a.WordSaid(attempt, name, step, message.encode()) for name, message in said.items()]


def heard(secure, attempt, step, devices, told):
    """What the devices answer to what they were ``told``, kept; and where the round goes on from there."""
    said = {name: devices[name].receive(decode(told[name])) for name in devices}
    assert all(isinstance(one, e.WordKept) for one in secure.said(words(attempt, step, said)))
    return secure.step_over(a.StepOver(attempt, step))[0]


def masked(secure, attempt):
    """The masked updates of a round that waits for them."""
    devices = asked(secure, attempt)
    first = words(attempt, 0, {name: one.advert() for name, one in devices.items()})
    assert all(isinstance(one, e.WordKept) for one in secure.said(first))
    step = secure.step_over(a.StepOver(attempt, 0))[0]
    step = heard(secure, attempt, 1, devices, step.words)
    return {name: one.receive(decode(step.words[name])).encode() for name, one in devices.items()}


def test_who_gives_wrong_shares_where_no_more_answer_than_must_has_nobody_else_blamed(secure):
    """One of three could have the two others shut out, one in each round."""
    devices = asked(secure, 1)
    secure.said(words(1, 0, {name: one.advert() for name, one in devices.items()}))
    step = heard(secure, 1, 1, devices, secure.step_over(a.StepOver(1, 0))[0].words)
    for name, one in devices.items():
        update = one.receive(decode(step.words[name])).encode()
        with secure.masked(1, name, update):
            secure.store.words.keep("watch", 1, [(2, name, bytes.fromhex(secure.blobs.put(update)))])
    step = heard(secure, 1, 3, devices, secure.step_over(a.StepOver(1, 2))[0].words)
    said = {name: devices[name].receive(decode(step.words[name])) for name in ("anna", "carl")}  # bela is gone
    wrong = tuple((name, bytes(len(shares) - 1) + b"\7") for name, shares in said["carl"].seeds)
    said["carl"] = replace(said["carl"], seeds=wrong).signed(secure.who["carl"].signer)
    secure.said(words(1, 4, said))
    answer, liars = secure.step_over(a.StepOver(1, 4))
    assert isinstance(answer, e.AbortRound)
    assert "nobody knows" in answer.reason
    assert liars == {}


def test_a_late_word_of_an_attempt_that_is_forgotten_holds_up_no_other(secure):
    old, new = asked(secure, 1), asked(secure, 2)
    late = words(1, 0, {"anna": old["anna"].advert()})
    now = words(2, 0, {name: one.advert() for name, one in new.items()})
    refused, *kept = secure.said([*late, *now])
    assert isinstance(refused, e.WordRefused)
    assert not refused.offence
    assert [(one.attempt, one.device) for one in kept] == [(2, name) for name in NAMES]


def test_a_step_that_the_disk_held_up_until_its_round_was_called_off_is_let_go(secure):
    """It was tried anew for ever, with an error in the journal each time."""
    asked(secure, 1)
    asked(secure, 2)
    told, answers = [], []

    async def put(answer):
        answers.append(answer)

    async def go_on():
        hands = Hands(print, lambda event, **facts: told.append(facts), asyncio.create_task, put)
        await asyncio.wait_for(Conversation(secure, hands).go_on(a.StepOver(1, 0)), 20)

    asyncio.run(go_on())
    assert told == []
    assert [(type(answer), answer.attempt) for answer in answers] == [(e.AbortRound, 1)]


def test_a_step_ends_when_all_that_was_taken_is_kept(secure):
    updates, over = masked(secure, 1), []
    with secure.masked(1, "anna", updates["anna"]), secure.masked(1, "bela", updates["bela"]):
        thread = Thread(target=lambda: over.append(secure.step_over(a.StepOver(1, 2))[0]))
        thread.start()
        thread.join(0.2)
        assert over == []
    thread.join(60)
    assert over[0].members == {"anna", "bela"}


def test_what_could_not_be_kept_is_in_no_sum_and_may_come_again(secure, monkeypatch):
    updates = masked(secure, 1)
    with secure.masked(1, "anna", updates["anna"]):
        digest = secure.blobs.put(updates["anna"])
        secure.store.words.keep("watch", 1, [(2, "anna", bytes.fromhex(digest))])
        with pytest.raises(StateError, match="full"), secure.masked(1, "bela", updates["bela"]):
            raise StateError("the disk is full")
    assert secure.resume(1, NAMES).said == {"anna"}
    with secure.masked(1, "bela", updates["bela"]):
        pass
    assert secure.survivors(1) == ("anna", "bela")


def test_a_key_that_another_device_has_is_no_offence_and_the_round_goes_on_without_it(secure):
    """Which of the two took it from the other, nobody knows."""
    devices = asked(secure, 1)
    said = {name: one.advert() for name, one in devices.items()}
    carl = replace(said["carl"], share_key=said["anna"].mask_key).signed(secure.who["carl"].signer)
    *kept, refused = secure.said(words(1, 0, said | {"carl": carl}))
    assert all(isinstance(one, e.WordKept) for one in kept)
    assert isinstance(refused, e.WordRefused)
    assert not refused.offence
    assert secure.step_over(a.StepOver(1, 0))[0].members == {"anna", "bela"}


def test_a_masked_update_of_an_attempt_that_had_the_same_number_is_not_taken(secure):
    """As after a restore of the fleet's record: it was receipted, and was in no sum."""
    updates = masked(secure, 1)
    other = replace(decode(updates["anna"]), terms=bytes(32)).signed(secure.who["anna"].signer)
    with pytest.raises(GoneError, match="had this number"), secure.masked(1, "anna", other.encode()):
        pass
    with secure.masked(1, "anna", updates["anna"]):
        pass
    assert secure.survivors(1) == ("anna",)
