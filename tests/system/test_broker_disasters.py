"""What befalls a broker with TLS and keys, its links and its certificates, while all others live on: learning goes on
by itself, or the operator is told what to do, and just that works."""

import asyncio
import datetime as dt
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from keyed import enrol

from talaria.errors import TalariaError
from talaria.wire.chunks import CHUNK
from talaria_coordinator.broker import mosquitto
from talaria_coordinator.identity import ca, membership
from talaria_coordinator.identity.ca import Authority
from talaria_coordinator.identity.membership import Membership

ROUNDS = 3


def learned(fleet):
    assert [x["round"] for x in fleet.of("round-closed")] == list(range(1, ROUNDS + 1))
    assert fleet.of("quarantined") == []


def broker_process(fleet):
    """The broker's process, by its configuration's name."""
    wanted = os.fsencode(fleet.broker / "mosquitto.conf")
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = line.read_bytes().split(b"\0")
            if wanted in words and words[0].endswith(b"mosquitto"):
                return int(line.parent.name)
    return None


def test_a_broker_that_loses_all_that_it_kept_is_told_again(keyed):
    fleet = keyed(ROUNDS)

    async def lose_everything():
        for attempt in (1, 2):
            await fleet.told_of("round-opened", count=attempt)
            ups = len(fleet.of("connected", fleet="watch"))
            os.kill(broker_process(fleet), signal.SIGKILL)
            for kept in (fleet.broker / "persistence").glob("mosquitto.db*"):
                kept.unlink()
            await fleet.told_of("broker", count=attempt)
            await fleet.told_of("connected", count=ups + 1)

    fleet.live(lose_everything)
    learned(fleet)
    assert all("is started again" in x["reason"] for x in fleet.of("broker"))


def test_a_broker_of_small_packets_is_sent_small_ones(keyed, monkeypatch):
    monkeypatch.setattr(mosquitto, "BESIDE", 16_384 - CHUNK)
    fleet = keyed(ROUNDS)

    async def nothing():
        await fleet.told_of("connected")

    fleet.live(nothing)
    learned(fleet)


def dated(keys, old, begins_h, ends_h):
    """The certificate again, with other dates: hours from now."""
    signed_by, now = Authority.load(keys), dt.datetime.now(dt.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(old.subject)
        .issuer_name(old.issuer)
        .public_key(old.public_key())
        .serial_number(old.serial_number)
        .not_valid_before(now + dt.timedelta(hours=begins_h))
        .not_valid_after(now + dt.timedelta(hours=ends_h))
    )
    for one in old.extensions:
        built = built.add_extension(one.value, one.critical)
    return ca.to_pem(built.sign(signed_by._key, hashes.SHA256()))


def spoil(keys, path, begins_h, ends_h):
    path.write_bytes(dated(keys, x509.load_pem_x509_certificate(path.read_bytes()), begins_h, ends_h))


@pytest.mark.parametrize(
    ("begins_h", "ends_h", "said"),
    [
        (-48, -24, "ended on .*talaria fleet enroll.*talaria edge join"),
        (24, 48, "clock says .* begins on .*set the clock"),
    ],
    ids=["ended", "clock-behind"],
)
def test_a_device_whose_certificate_does_not_hold_is_told_why_and_new_keys_mend_it(keyed, begins_h, ends_h, said):
    fleet = keyed(ROUNDS)
    folder = fleet.folder / "id-bela"
    spoil(fleet.keys, folder / "tls.crt", begins_h, ends_h)

    async def together():
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            group.create_task(fleet.serve())
            await fleet.told_of("connected")
            group.create_task(fleet.agent("anna").run())
            refused = group.create_task(fleet.agent("bela").run())
            async with asyncio.timeout(60):
                while not any(re.search(said, str(item)) for item in fleet.told):
                    await asyncio.sleep(0.05)
            refused.cancel()
            folder.rename(folder.with_name("old"))  # keys are never written over
            await asyncio.to_thread(enrol, fleet.keys, folder, "bela")
            group.create_task(fleet.agent("bela").run())

    asyncio.run(together())
    learned(fleet)


def test_a_broker_whose_certificate_ended_is_told_with_the_mend_that_works(keyed):
    fleet = keyed(ROUNDS)
    spoil(fleet.keys, fleet.keys / "broker" / "server.crt", -48, -24)

    async def refused():
        async with asyncio.timeout(60):
            await fleet.serve()

    with pytest.raises(TalariaError, match=r"server.crt ended on .*talaria fleet rotate"):
        asyncio.run(refused())
    membership.renew(fleet.keys, Membership.load(fleet.keys))

    async def nothing():
        await fleet.told_of("connected")

    fleet.live(nothing)
    learned(fleet)
