"""Joining a fleet by a one-time code: what is let in, what is refused, and what stays secret."""

import asyncio
import base64
import datetime as dt
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from talaria.errors import ConfigError, StateError
from talaria.identity.credentials import Credentials, load_signer
from talaria.identity.enrolment import Answer, Code, Request
from talaria.privacy.rule import Privacy
from talaria.protocol import events as e
from talaria.protocol.coordinator.machine import Rules
from talaria.wire.broker_url import loopback
from talaria.wire.chunks import CHUNK
from talaria.wire.signing import Signer
from talaria_coordinator.broker import Broker, mosquitto
from talaria_coordinator.cli.template import found
from talaria_coordinator.config.fleet import load_config
from talaria_coordinator.config.privacy import PrivacyConfig
from talaria_coordinator.fleet.allowlist import REVOKED, Members
from talaria_coordinator.identity import membership
from talaria_coordinator.identity.ca import Authority, load_certificate, new_key, requested_key
from talaria_coordinator.identity.eviction import Barring
from talaria_coordinator.identity.membership import Membership
from talaria_edge.identity.enroll import ask, finish

HOST = "broker.example"


@pytest.fixture
def fleet(tmp_path):
    found(tmp_path / "fleet", "watch", [HOST, "10.0.0.5"], 8883, 4)
    return tmp_path / "fleet"


def enrol(fleet, folder, device="anna"):
    request = ask(folder, membership.enroll(fleet, device))
    finish(folder, membership.admit(fleet, request.read_bytes()).encode())
    return Credentials.load(folder)


def config_of(fleet):
    return load_config(fleet / "fleet.toml")


# ---- the folder


def test_a_new_fleet_is_ready_to_serve_and_keeps_its_secrets(fleet):
    config = config_of(fleet)
    assert (config.name, config.identity, config.host, config.port) == ("watch", fleet / ".", "0.0.0.0", 8883)
    secret = ["ca.key", "sign.key", "coordinator.key", "broker/server.key", "broker/acl", "members.json"]
    for name in secret:
        assert (fleet / name).stat().st_mode & 0o077 == 0, name
    assert fleet.stat().st_mode & 0o077 == 0
    server = load_certificate((fleet / "broker" / "server.crt").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [HOST, "localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.5", "127.0.0.1", "::1"]
    assert "allow_anonymous false" in (fleet / "broker" / "mosquitto.conf").read_text()


def test_a_fleet_is_never_overwritten(fleet):
    before = (fleet / "ca.key").read_bytes()
    with pytest.raises(ConfigError, match="holds a fleet already"):
        found(fleet, "watch", [HOST], 8883, 4)
    assert (fleet / "ca.key").read_bytes() == before


@pytest.mark.parametrize("host", ["mqtts://x", "a b", "", "x\nlistener 1883", "-x"])
def test_hosts_that_are_none(tmp_path, host):
    with pytest.raises(ConfigError, match="no host name"):
        found(tmp_path / "f", "watch", [host], 8883, 1)
    assert not (tmp_path / "f").exists()


def test_a_fleet_on_this_machine_listens_here_only(tmp_path):
    found(tmp_path / "f", "watch", ["localhost"], 8883, 1)
    assert config_of(tmp_path / "f").host == "127.0.0.1"


def test_loopback_is_told_without_a_name_server():
    assert all(map(loopback, ["localhost", "127.0.0.1", "127.8.8.8", "::1"]))
    assert not any(map(loopback, ["0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "127.0.0.1.example", ""]))


# ---- joining


def test_a_device_joins_with_keys_that_it_made(fleet, tmp_path):
    own = enrol(fleet, tmp_path / "anna")
    assert (own.fleet, own.device, own.broker) == ("watch", "anna", f"mqtts://{HOST}:8883")
    assert own.coordinator_key == load_signer(fleet / "sign.key").public
    member = Membership.load(fleet).members["anna"]
    assert member.key == own.signer.public
    certificate = load_certificate(own.tls.cert.read_bytes())
    assert certificate.serial_number == member.serial
    assert certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "anna"
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert certificate.not_valid_after_utc - dt.datetime.now(dt.UTC) < dt.timedelta(days=398)
    certificate.verify_directly_issued_by(load_certificate((fleet / "ca.crt").read_bytes()))
    for secret in ("tls.key", "sign.key"):
        assert (tmp_path / "anna" / secret).stat().st_mode & 0o777 == 0o600
    assert sorted(f.name for f in (tmp_path / "anna").iterdir()) == [
        "ca.crt", "fleet.json", "sign.key", "tls.crt", "tls.key"
    ]  # fmt: skip


def test_a_device_whose_own_key_is_damaged_says_so(fleet, tmp_path):
    request = ask(tmp_path / "anna", membership.enroll(fleet, "anna"))
    answer = membership.admit(fleet, request.read_bytes()).encode()
    (tmp_path / "anna" / "tls.key").write_text("-----BEGIN PRIVATE KEY-----")
    with pytest.raises(ConfigError, match=r"anna/tls\.key holds no key; restore it, or join again in a new folder"):
        finish(tmp_path / "anna", answer)


def test_an_authority_whose_certificate_is_damaged_changes_nothing(fleet):
    """Whichever bit was flipped: what reads the certificate later would stumble over some, and pass over others."""
    kept, members = (fleet / "ca.crt").read_bytes(), (fleet / "members.json").read_bytes()
    der = load_certificate(kept).public_bytes(Encoding.DER)
    for at in range(0, len(der), 7):
        damaged = base64.encodebytes(der[:at] + bytes([der[at] ^ 1]) + der[at + 1 :])
        (fleet / "ca.crt").write_bytes(b"-----BEGIN CERTIFICATE-----\n" + damaged + b"-----END CERTIFICATE-----\n")
        with pytest.raises(ConfigError, match="is damaged; restore it from a backup"):
            membership.enroll(fleet, "anna")
    assert (fleet / "members.json").read_bytes() == members


def test_the_code_is_written_down_nowhere(fleet, tmp_path):
    code = membership.enroll(fleet, "anna")
    request = ask(tmp_path / "anna", code)
    secrets = [code.text().encode(), code.secret, code.secret.hex().encode(), code.signer().seed().hex().encode()]
    kept = [p for root in (fleet, tmp_path / "anna") for p in root.rglob("*") if p.is_file()]
    assert len(kept) > 10
    for path in kept:
        assert not any(s in path.read_bytes() for s in secrets), path
    for shown in (repr(code), repr(code.signer()), repr(Request.decode(request.read_bytes())), str(code)):
        assert code.secret.hex() not in shown
        assert repr(code.secret)[2:-1] not in shown


def test_keys_do_not_show_themselves(fleet, tmp_path):
    own = enrol(fleet, tmp_path / "anna")
    shown = repr(own) + repr(Authority.load(fleet)) + repr(Members(config_of(fleet)).half(Rules(), b""))
    for key in (own.signer.seed(), load_signer(fleet / "sign.key").seed()):
        assert key.hex() not in shown
        assert repr(key) not in shown


def test_a_code_works_once(fleet, tmp_path):
    code = membership.enroll(fleet, "anna")
    request = ask(tmp_path / "anna", code).read_bytes()
    membership.admit(fleet, request)
    again = ask(tmp_path / "thief", code).read_bytes()
    for data in (request, again):
        with pytest.raises(ConfigError, match="no open code fits"):
            membership.admit(fleet, data)


def test_a_new_code_voids_the_old(fleet, tmp_path):
    old = membership.enroll(fleet, "anna")
    membership.enroll(fleet, "anna")
    with pytest.raises(ConfigError, match="used, replaced or never given"):
        membership.admit(fleet, ask(tmp_path / "anna", old).read_bytes())


def test_a_code_expires(fleet, tmp_path, monkeypatch):
    code = membership.enroll(fleet, "anna", hours=2)
    request = ask(tmp_path / "anna", code).read_bytes()
    now = membership.time.time()
    monkeypatch.setattr(membership.time, "time", lambda: now + 2.1 * 3600)
    with pytest.raises(ConfigError, match="expired"):
        membership.admit(fleet, request)
    assert "anna" not in Membership.load(fleet).members


@pytest.mark.parametrize("hours", [0, -1, float("nan"), float("inf"), 1e9])
def test_hours_are_bounded(fleet, hours):
    with pytest.raises(ConfigError, match="hours="):
        membership.enroll(fleet, "anna", hours)


def test_a_code_is_for_its_device_and_fleet(fleet, tmp_path):
    code = membership.enroll(fleet, "anna")
    as_bela = Code(code.fleet, "bela", code.fingerprint, code.secret)
    with pytest.raises(ConfigError, match="no open code"):
        membership.admit(fleet, ask(tmp_path / "bela", as_bela).read_bytes())
    found(tmp_path / "other", "lamp", [HOST], 8883, 1)
    with pytest.raises(ConfigError, match="for fleet 'watch'"):
        membership.admit(tmp_path / "other", ask(tmp_path / "anna", code).read_bytes())


@pytest.mark.parametrize("field", ["device", "csr", "key", "own", "proof"])
def test_a_request_altered_on_its_way_is_refused(fleet, tmp_path, field):
    facts = json.loads(ask(tmp_path / "anna", membership.enroll(fleet, "anna")).read_bytes())
    other = json.loads(ask(tmp_path / "eve", Code.new("watch", "anna", bytes(16))).read_bytes())
    other["device"] = "eve"
    with pytest.raises(ConfigError, match="no open code"):
        membership.admit(fleet, json.dumps({**facts, field: other[field]}).encode())
    assert Membership.load(fleet).members == {}


def test_a_request_must_prove_that_it_holds_its_keys(fleet):
    code = membership.enroll(fleet, "anna")
    victim = Signer.generate()
    thief = Signer.generate()
    request = Request("watch", "anna", "", victim.public).signed(thief, code)
    with pytest.raises(ConfigError, match="no open code"):
        membership.admit(fleet, request.encode())


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[" * 9000, b"\x80\x04.", b"x" * 20_000, b'{"talaria": "enrolment request 1"}', b"null"]
)
def test_what_is_no_request_or_answer(fleet, tmp_path, data):
    with pytest.raises(ConfigError, match="enrolment"):
        membership.admit(fleet, data)
    ask(tmp_path / "anna", membership.enroll(fleet, "anna"))
    with pytest.raises(ConfigError, match="enrolment"):
        finish(tmp_path / "anna", data)


def test_only_p256_keys_with_proof_are_signed():
    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "_coordinator")])
    csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, SHA256())
    with pytest.raises(ConfigError, match="P-256"):
        requested_key(csr.public_bytes(Encoding.PEM).decode())
    with pytest.raises(ConfigError, match="damaged"):
        requested_key("-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n")


def test_the_name_in_the_certificate_is_ours_to_give(fleet):
    """What a request calls itself is ignored: it could be the coordinator's name."""
    code, key, signer = membership.enroll(fleet, "anna"), new_key(), Signer.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, membership.COORDINATOR)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, SHA256())
    request = Request("watch", "anna", csr.public_bytes(Encoding.PEM).decode(), signer.public).signed(signer, code)
    answer = membership.admit(fleet, request.encode())
    assert load_certificate(answer.certificate.encode()).subject.rfc4514_string() == "CN=anna"


def test_no_device_can_have_the_coordinators_name(fleet):
    with pytest.raises(ConfigError, match="not allowed"):
        membership.enroll(fleet, membership.COORDINATOR)


# ---- the answer


def test_an_answer_of_another_fleet_is_refused(fleet, tmp_path):
    found(tmp_path / "eve", "watch", ["eve.example"], 8883, 1)
    code = membership.enroll(fleet, "anna")
    request = ask(tmp_path / "anna", code)
    stolen = membership.enroll(tmp_path / "eve", "anna")
    theirs = ask(tmp_path / "x", stolen)
    answer = membership.admit(tmp_path / "eve", theirs.read_bytes())
    with pytest.raises(ConfigError, match="not of the fleet"):
        finish(tmp_path / "anna", answer.encode())
    good = membership.admit(fleet, request.read_bytes())
    for altered in (
        {"broker": "mqtts://eve.example:8883"},
        {"coordinator": Signer.generate().public},
        {"ca": answer.ca},
        {"certificate": answer.certificate},
        {"device": "bela"},
    ):
        with pytest.raises(ConfigError, match="not of the fleet"):
            finish(tmp_path / "anna", Answer(**{**vars(good), **altered}).encode())
    with pytest.raises(ConfigError, match="cannot be read"):
        Credentials.load(tmp_path / "anna")
    assert finish(tmp_path / "anna", good.encode()).device == "anna"


def test_an_answer_to_an_earlier_request_is_refused(fleet, tmp_path):
    first = ask(tmp_path / "one", membership.enroll(fleet, "anna"))
    answer = membership.admit(fleet, first.read_bytes())
    ask(tmp_path / "two", membership.enroll(fleet, "anna"))
    with pytest.raises(ConfigError, match="another key"):
        finish(tmp_path / "two", answer.encode())


def test_keys_are_never_overwritten_by_joining_again(fleet, tmp_path):
    enrol(fleet, tmp_path / "anna")
    with pytest.raises(ConfigError, match="holds keys already"):
        ask(tmp_path / "anna", membership.enroll(fleet, "anna"))


def test_a_folder_of_other_things_is_not_shut_by_joining_there(fleet, tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    (home / "device.toml").touch()
    with pytest.raises(ConfigError, match=r"home is not empty.*name a new folder"):
        ask(home, membership.enroll(fleet, "anna"))
    assert home.stat().st_mode & 0o777 == 0o755
    (home / "identity").mkdir(mode=0o755)
    ask(home / "identity", membership.enroll(fleet, "anna"))
    assert (home / "identity").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "text", ["", None, "watch.anna", "watch.anna." + "a" * 51, "watch.anna." + "!" * 52, "x" * 10_000]
)
def test_what_is_no_code(text):
    with pytest.raises(ConfigError, match="no enrolment code") as caught:
        Code.parse(text)
    assert len(str(caught.value)) < 200


def test_a_code_reads_as_it_was_written(fleet):
    code = membership.enroll(fleet, "anna")
    assert Code.parse(f"  {code.text().upper()}\n") == code


def test_keys_that_others_can_read_are_refused(fleet, tmp_path):
    enrol(fleet, tmp_path / "anna")
    (tmp_path / "anna" / "sign.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Credentials.load(tmp_path / "anna")
    (fleet / "sign.key").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        Members(config_of(fleet))


# ---- members, revocation, rotation


def test_a_revoked_device_loses_key_certificate_and_code(fleet, tmp_path):
    enrol(fleet, tmp_path / "anna")
    members = Members(config_of(fleet))
    assert members.key("anna") is not None
    assert members.key("bela") is None
    assert not members.refresh()
    membership.enroll(fleet, "anna")
    serial = Membership.load(fleet).members["anna"].serial
    membership.revoke(fleet, "anna")
    assert members.refresh()
    assert members.key("anna") is None
    assert members.changes(1.0, {}) == [e.Revoke(1.0, "anna", REVOKED)]
    assert members.changes(1.0, {"anna": REVOKED}) == []
    assert Membership.load(fleet).codes == {}
    crl = x509.load_pem_x509_crl((fleet / "broker" / "revoked.pem").read_bytes())
    assert [c.serial_number for c in crl] == [serial]
    assert crl.is_signature_valid(load_certificate((fleet / "ca.crt").read_bytes()).public_key())
    assert "user anna\ntopic deny #\n" in (fleet / "broker" / "acl").read_text()


def test_a_device_shut_out_for_its_conduct_is_not_let_in_by_the_list(fleet, tmp_path):
    enrol(fleet, tmp_path / "anna")
    assert Members(config_of(fleet)).changes(1.0, {"anna": "5 offences"}) == []


def test_new_keys_take_the_old_ones_place(fleet, tmp_path):
    old = enrol(fleet, tmp_path / "old")
    before = Membership.load(fleet).members["anna"].serial
    membership.revoke(fleet, "anna")
    new = enrol(fleet, tmp_path / "new")
    members = Members(config_of(fleet))
    assert members.key("anna") == new.signer.public != old.signer.public
    assert members.changes(2.0, {"anna": REVOKED}) == [e.Release(2.0, "anna")]
    crl = x509.load_pem_x509_crl((fleet / "broker" / "revoked.pem").read_bytes())
    assert {c.serial_number for c in crl} == {before}
    assert "deny" not in (fleet / "broker" / "acl").read_text()


def test_whom_the_coordinator_keeps_out_is_kept_out_though_the_first_try_failed(fleet, tmp_path):
    enrol(fleet, tmp_path / "anna")
    rights = fleet / "broker" / "acl"
    rights.unlink()
    (rights / "in-the-way").mkdir(parents=True)
    with pytest.raises(StateError, match="acl"):
        membership.bar(fleet, {"anna"})
    shutil.rmtree(rights)
    assert membership.bar(fleet, {"anna"})
    assert "user anna\ntopic deny #\n" in rights.read_text()
    assert not membership.bar(fleet, {"anna"})


@pytest.mark.parametrize("text", [b"{}", b"[1]", b"[", b"\xff"])
def test_a_damaged_list_of_the_kept_out_is_told_with_the_mend_that_works(fleet, text):
    (fleet / membership.BARRED).write_bytes(text)
    with pytest.raises(ConfigError, match=r"barred\.json is damaged; remove it; the coordinator writes it again"):
        membership.enroll(fleet, "anna")
    (fleet / membership.BARRED).unlink()
    membership.enroll(fleet, "anna")


def test_lists_that_changed_are_told_once_the_rest_is_done_too(fleet, tmp_path, monkeypatch):
    """Where the link of who is shut out could not be cut, as with a full disk, the operator was never told."""
    config = replace(load_config(fleet / "fleet.toml"), broker="mqtts://127.0.0.1:1")
    barring = Barring(config, Broker(config.broker, "url"))
    with monkeypatch.context() as full:
        full.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
        with pytest.raises(OSError, match="gone"):
            asyncio.run(barring({"anna"}, ()))
    assert "copy" in asyncio.run(barring({"anna"}, ()))
    assert asyncio.run(barring({"anna"}, ())) == ""


def test_each_ingest_worker_has_keys_of_its_own(fleet):
    membership.staff(fleet, 2)
    rights = (fleet / "broker" / "acl").read_text()
    for number in (0, 1):
        own = membership.worker_tls(fleet, number)
        certificate = load_certificate(own.cert.read_bytes())
        certificate.verify_directly_issued_by(load_certificate((fleet / "ca.crt").read_bytes()))
        assert certificate.subject.rfc4514_string() == f"CN=_ingest-{number}"
        assert f"user _ingest-{number}\n" in rights
        assert own.key.stat().st_mode & 0o77 == 0
    assert "_ingest-2" not in rights
    (fleet / "ca.key").unlink()
    before = (fleet / "ingest-0.crt").read_bytes()
    membership.staff(fleet, 2)
    assert (fleet / "ingest-0.crt").read_bytes() == before
    with pytest.raises(ConfigError, match=r"workers=3 and .*ingest-2\.crt is not there, nor is ca\.key"):
        membership.staff(fleet, 3)


def test_a_fleet_of_sums_has_no_ingest_workers(fleet):
    privacy = PrivacyConfig(rule=Privacy(secure=True))
    with pytest.raises(ConfigError, match=r"ingest: workers=2 and \[privacy\] secure=true exclude each other"):
        replace(config_of(fleet), members=("anna", "bela", "carl"), privacy=privacy, workers=2)


def test_renewed_links_keep_the_members(fleet, tmp_path):
    own = enrol(fleet, tmp_path / "anna")
    before = (fleet / "broker" / "server.crt").read_bytes(), (fleet / "coordinator.key").read_bytes()
    with membership.changing(fleet) as change:
        membership.renew(fleet, change.roll)
    assert (fleet / "broker" / "server.crt").read_bytes() != before[0]
    assert (fleet / "coordinator.key").read_bytes() != before[1]
    server = load_certificate((fleet / "broker" / "server.crt").read_bytes())
    server.verify_directly_issued_by(load_certificate(own.tls.ca.read_bytes()))
    assert Members(config_of(fleet)).key("anna") == own.signer.public


@pytest.mark.parametrize("step", range(8))
def test_new_links_that_are_cut_off_between_key_and_certificate_fit_again(fleet, tmp_path, monkeypatch, step):
    """At each rename of a renewal the machine goes dark; the next to use a pair finds two that belong together."""
    real, left = Path.replace, [step]

    def until_dark(self, target):
        if left[0] == 0:
            raise SystemExit("the lights went out")
        left[0] -= 1
        return real(self, target)

    with monkeypatch.context() as dark:
        dark.setattr(Path, "replace", until_dark)
        with pytest.raises(SystemExit), membership.changing(fleet) as change:
            membership.renew(fleet, change.roll)
    mosquitto.copy(fleet / "broker", tmp_path / "broker's own")
    membership.tls(fleet)
    for stem in (tmp_path / "broker's own" / "server", fleet / "coordinator"):
        certificate = load_certificate(stem.with_suffix(".crt").read_bytes())
        key = load_pem_private_key(stem.with_suffix(".key").read_bytes(), None)
        assert certificate.public_key() == key.public_key()
    assert list(fleet.rglob("*.next")) == []


@pytest.mark.parametrize("name", ["-", "--help", "-x"])
def test_a_name_that_reads_as_an_option_is_nobodys(fleet, name):
    with pytest.raises(ConfigError, match="a letter or digit first"):
        membership.enroll(fleet, name)


def test_strangers_cannot_be_revoked(fleet):
    with pytest.raises(ConfigError, match="not a member"):
        membership.revoke(fleet, "nobody")


@pytest.mark.parametrize(
    "damage",
    [
        "{", "[]", '{"fleet": 1}', '{"fleet": "watch", "members": {"anna": {"key": "00"}}}',
        '{"fleet": "watch", "broker": "", "hosts": [], "members": {}, "codes": {}, "taken": [1e999]}',
    ],
)  # fmt: skip
def test_a_damaged_list_is_told(fleet, damage):
    (fleet / "members.json").write_text(damage)
    with pytest.raises(ConfigError, match=r"members\.json"):
        Members(config_of(fleet))


def test_a_list_of_another_version_is_left_to_it(fleet):
    later = json.loads((fleet / "members.json").read_text()) | {"format": 2}
    (fleet / "members.json").write_text(json.dumps(later))
    with pytest.raises(ConfigError, match=r"members\.json is of format 2, and this version reads 1; run the version"):
        Membership.load(fleet)


def test_a_list_damaged_while_serving_leaves_the_one_before_in_force(fleet, tmp_path):
    own = enrol(fleet, tmp_path / "anna")
    members = Members(config_of(fleet))
    (fleet / "members.json").write_text("{")
    with pytest.raises(ConfigError, match=r"members\.json"):
        members.refresh()
    assert not members.refresh()
    assert members.key("anna") == own.signer.public


def test_the_folder_of_another_fleet_is_refused(fleet, tmp_path):
    text = (fleet / "fleet.toml").read_text().replace('name = "watch"', 'name = "lamp"')
    (fleet / "fleet.toml").write_text(text)
    with pytest.raises(ConfigError, match="of fleet 'watch', not 'lamp'"):
        Members(config_of(fleet))


def test_two_changes_at_once_lose_nothing(fleet):
    code = (
        "import sys\nfrom pathlib import Path\nfrom talaria_coordinator.identity import membership as identity\n"
        "for i in range(5): identity.enroll(Path(sys.argv[1]), sys.argv[2] + str(i))\n"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, str(fleet), name]) for name in ("a", "b")]
    assert [p.wait(60) for p in both] == [0, 0]
    assert sorted(Membership.load(fleet).codes) == [f"{n}{i}" for n in "ab" for i in range(5)]


def test_the_broker_is_told_bounds_and_rights(tmp_path):
    text = mosquitto.config("0.0.0.0", 8883, tmp_path, security=tmp_path)
    for line in ("require_certificate true", "use_username_as_clientid true", "crlfile"):
        assert line in text
    assert f"max_packet_size {CHUNK + mosquitto.BESIDE}\n" in text
    assert "autosave_on_changes false" in text  # by changes, one device could have all that is retained written again
    few, many = (mosquitto.config("127.0.0.1", 1883, tmp_path, devices=n) for n in (1, 11))
    limits = [int(re.findall(r"memory_limit (\d+)", text)[0]) for text in (few, many)]
    assert limits[1] - limits[0] == 10 * mosquitto.IN_FLIGHT * (CHUNK + mosquitto.BESIDE)
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert mosquitto.memory(10**9) <= most / 2  # a limit above the machine's memory is none
    assert "allow_anonymous true" in mosquitto.config("127.0.0.1", 1883, tmp_path)
    assert "_ingest-1" not in mosquitto.acl("watch", "_coordinator", [])
    workers = mosquitto.acl("watch", "_coordinator", [], ["_ingest-1"])
    assert "user _ingest-1\ntopic read fl/1/watch/d/+/up/+\ntopic write fl/1/watch/d/echo/up/+\n" in workers
    assert "topic write fl/1/watch/d/echo/up/+\ntopic write fl/1/watch/d/+/dn/+\n\n" in workers
    assert workers.index("user _ingest-1") < workers.index("pattern read")  # its rights are no pattern
    rights = mosquitto.acl("watch", "_coordinator", [])
    assert "pattern write fl/1/watch/d/%u/up/+" in rights
    assert "pattern write fl/1/watch/d/%u/cmd" not in rights
    assert "pattern read fl/1/watch/d/%u/cmd" in rights
