"""What is said of the dates of certificates: as a reason, and 30 days before the end."""

import asyncio
import datetime as dt

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from talaria.wire.broker_url import Tls
from talaria.wire.validity import DAY, Validity, troubles, validities, watch

NOW = 1_800_000_000.0


@pytest.fixture
def paths(tmp_path):
    for name, days in (("ca.crt", 3650), ("tls.crt", 397)):
        key, subject = (
            ec.generate_private_key(ec.SECP256R1()),
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")]),
        )
        begin = dt.datetime.fromtimestamp(NOW, dt.UTC)
        builder = x509.CertificateBuilder(subject, subject, key.public_key(), 1, begin, begin + dt.timedelta(days=days))
        made = builder.sign(key, hashes.SHA256())
        (tmp_path / name).write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return tmp_path


def test_each_certificate_of_a_link_is_looked_at(paths):
    own, ca = validities(Tls(paths / "ca.crt", paths / "tls.crt"))
    assert (own.begins, own.ends, ca.ends) == (NOW, NOW + 397 * DAY, NOW + 3650 * DAY)
    assert str(paths / "tls.crt") in own.what
    (paths / "ca.crt").write_text("no certificate")
    assert validities(Tls(paths / "ca.crt", paths / "none.crt")) == []


@pytest.mark.parametrize("why", ["certificate has expired", "certificate is not yet valid"])
def test_of_a_certificate_that_is_not_ours_the_clock_is_told_where_ours_are_good(paths, why):
    tls, said = Tls(paths / "ca.crt", paths / "tls.crt"), f"certificate verify failed: {why} (_ssl.c:1006)"
    (told,) = troubles(tls, said, NOW + DAY)
    assert told.startswith("This machine's clock says 2027-01-16 08:00 UTC: where that is wrong, set it; else")
    assert ["begins on 2027-01-15" in told for told in troubles(tls, said, NOW - DAY)] == [True, True], (
        "ours come first"
    )
    assert troubles(tls, "certificate verify failed: self-signed certificate", NOW + DAY) == []


def test_it_warns_from_thirty_days_before_the_end():
    held = Validity("the certificate tls.crt", NOW - DAY, NOW + 30 * DAY)
    assert held.warning(NOW - 1) == ""
    assert held.warning(NOW).startswith("the certificate tls.crt ends on 2027-02-14 08:00 UTC, in 30 days; `talaria")
    assert held.warning(NOW + 31 * DAY).startswith(
        "the certificate tls.crt ended on 2027-02-14 08:00 UTC, and this machine's clock says 2027-02-15 08:00 UTC"
    )


def test_a_wrong_clock_and_an_end_are_told_apart():
    held = Validity("the certificate tls.crt", NOW, NOW + DAY)
    assert held.trouble(NOW + 1) == ""
    assert held.trouble(0.0).startswith("this machine's clock says 1970-01-01 00:00 UTC, but")
    assert "set the clock" in held.trouble(0.0)
    assert "ended on 2027-01-16 08:00 UTC" in held.trouble(NOW + 2 * DAY)


def test_a_warning_is_said_each_day(monkeypatch):
    said, slept = [], []

    async def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr("talaria.wire.validity.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watch(lambda now: ["it ends"], said.append))
    assert (said, slept) == (["it ends"] * 3, [DAY] * 3)
