"""No ``repr`` and no error shows a key, a code, a password or a token: logs repeat both."""

import logging

import pytest

from talaria.errors import TalariaError
from talaria.identity import credentials
from talaria.identity.credentials import Credentials
from talaria.identity.enrolment import Answer, Code, Request
from talaria.wire.broker_url import Tls
from talaria.wire.mqtt import Mqtt
from talaria.wire.signing import Signer
from talaria_coordinator.cli.template import found
from talaria_coordinator.config.fleet import load_config
from talaria_coordinator.fleet.allowlist import Members
from talaria_coordinator.identity import membership
from talaria_coordinator.identity.ca import Authority
from talaria_coordinator.identity.membership import Membership
from talaria_edge import config as device_config
from talaria_edge.identity.enroll import ask, finish

PASSWORD = "hunter2-hunter2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("secrets")
    found(root / "keys", "watch", ["localhost"], 8883, 2)
    code = membership.enroll(root / "keys", "anna")
    request = ask(root / "anna", code)
    (root / "code").write_text(code.text())
    (root / "request").write_bytes(request.read_bytes())
    answer = membership.admit(root / "keys", request.read_bytes())
    (root / "answer").write_bytes(answer.encode())
    finish(root / "anna", answer.encode())
    membership.enroll(root / "keys", "bela")
    (root / "password").write_text(PASSWORD)
    (root / "password").chmod(0o600)
    return root


@pytest.fixture(scope="module")
def secrets(folder):
    """Every line of every private key, seeds in hex, the token, the code's secret, the password."""
    found_ = {PASSWORD, (folder / "keys" / "api.token").read_text().strip()}
    found_.add((folder / "code").read_text().rpartition(".")[2])
    for key in folder.rglob("*.key"):
        lines = [line for line in key.read_text().splitlines() if not line.startswith("-----")]
        found_ |= set(lines[:2])  # the third line of an elliptic curve's key is its public half
    for owner in ("keys", "anna"):
        seed = credentials.load_signer(folder / owner / "sign.key").seed()
        found_ |= {seed.hex(), repr(seed)[2:-1]}
    assert len(found_) > 12
    return found_


def device_settings(folder):
    path = folder / "device.toml"
    path.write_text(
        '[device]\nid = "anna"\n[fleet]\nname = "watch"\nbroker = "mqtts://broker.example"\nusername = "me"\n'
        'password_file = "password"\n[identity]\nfolder = "anna"\n[data]\nsource = "npz"\npath = "x.npz"\n'
    )
    return device_config.load_config(path)


def test_no_repr_shows_one(folder, secrets):
    config = load_config(folder / "keys" / "fleet.toml")
    own = Credentials.load(folder / "anna")
    code = Code.parse((folder / "code").read_text())
    roll = Membership.load(folder / "keys")
    assert set(roll.codes) == {"bela"}
    objects = [
        config, config.api, device_settings(folder), own, own.signer, own.tls, code, code.signer(), roll,
        Request.decode((folder / "request").read_bytes()), Answer.decode((folder / "answer").read_bytes()),
        Authority.load(folder / "keys"), Members(config), Members(config).half, membership.tls(folder / "keys"),
        Signer.of(bytes(32)), membership.load_signer(folder / "keys"),
        Mqtt("mqtts://b.test", "anna", (), username="me", password=lambda: PASSWORD, tls=Tls(folder / "keys/ca.crt")),
    ]  # fmt: skip
    for one in objects:
        for shown in (repr(one), str(one), f"{one}"):
            for secret in secrets:
                assert secret not in shown, type(one).__name__
    assert code.text().rpartition(".")[2] in secrets  # so that this looks for the right thing


def test_what_travels_and_what_the_broker_reads_holds_none(folder, secrets):
    files = [folder / "request", folder / "answer", folder / "keys" / "members.json", folder / "keys" / "fleet.toml"]
    files += [f for f in (folder / "keys" / "broker").iterdir() if f.is_file() and f.suffix != ".key"]
    assert len(files) >= 8
    for file in files:
        for secret in secrets:
            assert secret.encode() not in file.read_bytes(), file


def test_errors_about_damaged_secrets_do_not_repeat_them(folder, secrets, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    code = (folder / "code").read_text()
    damaged = tmp_path / "sign.key"
    damaged.write_text((folder / "anna" / "sign.key").read_text().replace("BEGIN", "BEGUN"))
    damaged.chmod(0o600)
    two = tmp_path / "two"
    two.write_text(f"{PASSWORD}\n{PASSWORD}")
    two.chmod(0o600)
    for attempt in (
        lambda: Code.parse(code + "x"),
        lambda: Code.parse(code.replace(".", " ")),
        lambda: credentials.load_signer(damaged),
        lambda: credentials.password(two),
        lambda: credentials.require_no_password(f"mqtts://me:{PASSWORD}@b.example"),
        lambda: Signer.of(b"short"),
    ):
        with pytest.raises(TalariaError) as caught:
            attempt()
        for secret in secrets:
            assert secret not in f"{caught.value} {caught.value.__cause__} {caplog.text}"
