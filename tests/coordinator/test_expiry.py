"""When certificates end is told before they do, wherever an operator looks."""

import json
import time
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from talaria.federated.run import Run
from talaria.identity import badges
from talaria.model.spec import ModelSpec
from talaria.wire.validity import DAY
from talaria_coordinator.cli.fleet import app
from talaria_coordinator.cli.status import read_status, render
from talaria_coordinator.cli.template import found
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.identity import ca, membership
from talaria_coordinator.identity.ca import Authority
from talaria_coordinator.identity.membership import EnrolledDevice, Membership
from talaria_coordinator.storage.store import Store
from talaria_coordinator.web.metrics import Metrics
from talaria_coordinator.web.queries import Views


@pytest.fixture
def keys(tmp_path):
    """A fleet's folder with two members, let in 100 days ago, and one that was revoked long before."""
    found(tmp_path / "keys", "watch", ["localhost"], 8883, 2)
    let_in(tmp_path / "keys", anna=100, bela=100)
    return tmp_path / "keys"


def let_in(keys, **days_ago):
    with membership.changing(keys) as change:
        members = {name: EnrolledDevice(bytes(32), 1, time.time() - days * DAY) for name, days in days_ago.items()}
        members["gone"] = EnrolledDevice(bytes(32), 2, time.time() - 390 * DAY, revoked=1.0)
        change.roll = replace(change.roll, members=members)


def server_for(keys, days):
    key = ca.new_key()
    made = Authority.load(keys).sign(key.public_key(), "broker", server=True, hosts=["localhost"], days=days)
    (keys / "broker" / "server.crt").write_text(ca.to_pem(made).decode())


def listed(keys, *args):
    done = CliRunner().invoke(app, ["list", str(keys), *args], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def looked(keys, capsys):
    """What status says, as data and for people."""
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedavg")
    config = FleetConfig(name="watch", run=run, state=keys / "state", devices=2, identity=keys)
    with Store(keys / "state" / "coordinator.db") as store:
        store.fleets.enter("watch", run.to_json(), "0" * 64, "0" * 64)
    seen = read_status(config)
    render(seen)
    return seen["certificates"], " ".join(capsys.readouterr().out.split())


def days_left(keys):
    views = Views(keys / "state" / "coordinator.db")
    try:
        families = list(text_string_to_metric_families(Metrics("watch", views, keys, keys).text().decode()))
    finally:
        views.close()
    return next(f for f in families if f.name == "talaria_certificate_days").samples[0].value


def test_the_first_that_ends_is_told_without_alarm_while_it_is_far(keys, capsys):
    shown, text = looked(keys, capsys)
    assert shown["first"] == "the certificate of 'anna'"
    assert shown["warnings"] == []
    assert "certificates hold until" in text
    assert "warning" not in text + listed(keys)
    assert days_left(keys) == pytest.approx(297, abs=0.1)
    told = json.loads(listed(keys, "--json"))
    assert [c["what"].rpartition("/")[2] for c in told["certificates"]] == ["ca.crt", "coordinator.crt", "server.crt"]


def test_a_member_whose_certificate_ends_soon_is_told_with_the_mend(keys, capsys):
    let_in(keys, anna=100, bela=380)
    shown, text = looked(keys, capsys)
    for said in (*shown["warnings"], text, listed(keys)):
        assert "the certificate of 'bela' ends on" in said
        assert "talaria fleet enroll" in said
        assert "'gone'" not in said
    assert days_left(keys) == pytest.approx(17, abs=0.1)


def test_a_broker_whose_certificate_has_ended_is_told_with_the_mend(keys, capsys):
    server_for(keys, -1 / 48)
    shown, text = looked(keys, capsys)
    for said in (*shown["warnings"], text, listed(keys)):
        assert "server.crt ended on" in said
        assert "talaria fleet rotate" in said
    assert days_left(keys) == pytest.approx(-1 / 48, abs=0.1)
    membership.renew(keys, Membership.load(keys))
    assert looked(keys, capsys)[0]["warnings"] == []


def test_ingest_workers_are_told_and_renewed_as_the_coordinator_is(keys, capsys, monkeypatch):
    """Where ca.key is kept elsewhere nobody was told, and what says so did not renew them."""
    with monkeypatch.context() as old:
        old.setattr(Authority.sign, "__kwdefaults__", Authority.sign.__kwdefaults__ | {"days": 20})
        membership.staff(keys, 3)
    shown, text = looked(keys, capsys)
    assert len(shown["warnings"]) == 3
    assert "ingest-2.crt ends on" in text
    assert days_left(keys) == pytest.approx(20, abs=0.1)
    key = (keys / "ingest-2.key").read_bytes()
    assert CliRunner().invoke(app, ["rotate", str(keys)]).exit_code == 0
    assert (keys / "ingest-2.key").read_bytes() != key
    assert looked(keys, capsys)[0]["warnings"] == []
    badges.read(keys / "coordinator.crt", keys / "ca.crt", "watch", membership.COORDINATOR)
    membership.staff(keys, 1)
    assert membership.workers_in(keys) == [0]
    assert "_ingest-1" not in (keys / "broker" / "acl").read_text()


def test_a_damaged_list_of_members_hides_nothing_else(keys, capsys):
    (keys / "members.json").write_text("{")
    shown, text = looked(keys, capsys)
    assert "members.json" in shown["warnings"][0]
    assert "fleet watch: running" in text
