"""A member of a real fleet lies in a secure round: it is shut out by name, and the others' rounds go on without it."""

import asyncio
from dataclasses import replace

import pytest
from tests.keyed import FLEET

from talaria.identity.credentials import Credentials
from talaria.privacy.device import DeviceHalf
from talaria.privacy.messages import Advert, Masked
from talaria.privacy.rule import Privacy
from talaria.protocol import words
from talaria_coordinator.config.privacy import PrivacyConfig
from talaria_edge.agent.secure import Part, Said

HONEST = ("anna", "bela", "carl")
LIAR = "dora"
SECURE = PrivacyConfig(rule=Privacy(secure=True, threshold=3), step_s=30.0)
LOW = bytes([1]) + bytes(31)
"""A point of order 4: whoever agrees with it agrees with everybody."""
LIES = {
    "a mask key that anybody can agree with": (Advert, {"mask_key": LOW}, "anybody can agree with"),
    "a share key that anybody can agree with": (Advert, {"share_key": bytes(32)}, "anybody can agree with"),
    "one key for both purposes": (Advert, {"share_key": "mask_key"}, "one key for two purposes"),
    "its shares in the place of its masked update": (Masked, {}, "'shares' in the place of a masked update"),
}


@pytest.mark.parametrize("lie", LIES)
def test_who_lies_in_a_secure_round_is_shut_out_and_the_others_rounds_go_on(keyed, monkeypatch, lie):
    kind, how, reason = LIES[lie]
    fleet = keyed(rounds=2, members=(*HONEST, LIAR), privacy=SECURE)
    signer, said = Credentials.load(fleet.folder / f"id-{LIAR}").signer, {}
    advert, answer = DeviceHalf.advert, Part._answer

    def adverts(half):
        message = advert(half)
        if half.device == LIAR and kind is Advert:
            own = vars(message)  # no check of its own holds it back
            own |= {name: own[value] if isinstance(value, str) else value for name, value in how.items()}
            own["signature"] = signer.sign(message.text())
        return message

    def answers(part, *more):
        word = answer(part, *more)
        if word is not None and part.config.device == LIAR:
            said[word.step] = word.data
            if kind is Masked and word.step == words.UPLOAD:
                part._write(replace(part._read(), masked=said[1]))
                return Said(word.step, said[1])
        return word

    monkeypatch.setattr(DeviceHalf, "advert", adverts)
    monkeypatch.setattr(Part, "_answer", answers)

    async def scenario():
        async with fleet.running(*HONEST, LIAR):
            await fleet.told_of("round-closed", fleet=FLEET, round=2)

    asyncio.run(asyncio.wait_for(scenario(), 100))
    assert fleet.counted() == {1: list(HONEST), 2: list(HONEST)}
    assert not fleet.of("round-failed")
    assert [(told["device"], reason in told["reason"]) for told in fleet.of("quarantined")] == [(LIAR, True)]
