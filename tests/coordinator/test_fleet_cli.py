"""``talaria fleet`` and ``talaria edge join`` as people use them; and links with a password."""

import datetime as dt
import json
import os
import re
import shlex
import stat
from ipaddress import ip_address
from types import SimpleNamespace

import pytest
from cryptography import x509
from typer.testing import CliRunner

from talaria.errors import ConfigError, StateError
from talaria.identity import credentials
from talaria.identity.credentials import password
from talaria_coordinator.broker import open_broker, reached
from talaria_coordinator.cli.fleet import app as fleet
from talaria_coordinator.config import fleet as fleet_config
from talaria_coordinator.fleet.connection import over_mqtt
from talaria_edge import config as device_config
from talaria_edge.cli import app as edge
from talaria_edge.cli import join as join_command
from talaria_edge.identity.connection import credentials_of


def ran(app, *args, text=None):
    done = CliRunner().invoke(app, [str(a) for a in args], input=text, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def keys(tmp_path):
    ran(fleet, "init", tmp_path / "keys", "--name", "watch", "--host", "broker.example", "--devices", 3)
    return tmp_path / "keys"


def join(keys, folder, device):
    code = ran(fleet, "enroll", keys, device, "--json")
    code = json.loads(code)["code"]
    ran(edge, "join", folder, text=code + "\n")
    admitted = ran(fleet, "admit", keys, folder / f"{device}.request", "-o", folder / "answer", "--json")
    assert json.loads(admitted) == {"device": device, "answer": str(folder / "answer")}
    return ran(edge, "join", folder, "--answer", folder / "answer")


def test_what_init_says_to_type_can_be_typed(tmp_path):
    folder = tmp_path / "my keys"
    told = ran(fleet, "init", folder, "--name", "watch")
    typed = [shlex.split(line.partition(": ")[2]) for line in told.splitlines()]
    assert ["talaria", "fleet", "enroll", str(folder), "DEVICE"] in typed
    assert ["talaria", "coordinator", "serve", str(folder / "fleet.toml")] in typed


@pytest.mark.parametrize(
    ("hosts", "url", "listen"),
    [
        (["localhost"], "localhost", "127.0.0.1"),
        (["::1"], "[::1]", "::1"),
        (["localhost", "::1"], "localhost", "::1"),
        (["broker.example"], "broker.example", "0.0.0.0"),
        (["broker.example", "2001:db8::"], "broker.example", "::"),
    ],
)
def test_the_broker_listens_where_devices_are_told_that_it_is(hosts, url, listen, tmp_path):
    told = ran(fleet, "init", tmp_path / "keys", "--name", "watch", *[w for host in hosts for w in ("--host", host)])
    assert f"devices reach its broker at mqtts://{url}:8883." in told
    assert fleet_config.load_config(tmp_path / "keys" / "fleet.toml").host == listen
    certificate = x509.load_pem_x509_certificate((tmp_path / "keys" / "broker" / "server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert ip_address(reached(listen)) in names.get_values_for_type(x509.IPAddress)


def test_from_init_to_revocation(keys, tmp_path):
    assert "mqtts://broker.example:8883" in join(keys, tmp_path / "anna", "anna")
    ran(fleet, "enroll", keys, "bela")
    shown = ran(fleet, "list", keys)
    assert "anna" in shown
    assert "member" in shown
    assert "good for 24.0 hours" in shown
    assert json.loads(ran(fleet, "revoke", keys, "anna", "--json")) == {"device": "anna", "revoked": True}
    rotated = json.loads(ran(fleet, "rotate", keys, "--json"))
    found = json.loads(ran(fleet, "list", keys, "--json"))
    assert [m["device"] for m in found["members"]] == ["anna"]
    assert found["members"][0]["revoked"] is not None
    assert found["members"][0]["until"] - found["members"][0]["since"] == 397 * 86400
    assert [c["device"] for c in found["codes"]] == ["bela"]
    assert len(found["certificates"]) == 3
    assert rotated["certificates"] == found["certificates"]


def test_each_step_of_joining_prints_the_next_as_it_is_typed(keys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = json.loads(ran(fleet, "enroll", keys, "anna", "--json"))["code"]
    said = ran(edge, "join", "own keys", text=code + "\n").replace("\n", " ")
    (tmp_path / "anna.request").write_bytes((tmp_path / "own keys" / "anna.request").read_bytes())
    ((admit,), (accept,)) = (re.findall(rule, said) for rule in (r"`talaria fleet (.*?)`", r"talaria edge (join .*)$"))
    ran(fleet, *admit.replace("DIR", "keys").split())
    assert "anna belongs to fleet watch" in ran(edge, *shlex.split(accept))


def test_init_tells_as_json(tmp_path):
    made = json.loads(ran(fleet, "init", tmp_path / "f", "--name", "lamp", "--port", 9000, "--json"))
    assert made["broker"] == "mqtts://localhost:9000"
    assert fleet_config.load_config(tmp_path / "f" / "fleet.toml").port == 9000


def test_what_init_writes_serves_the_operators_view_to_who_has_the_token(tmp_path):
    ran(fleet, "init", tmp_path / "f", "--name", "lamp", "--api-port", 0)
    word, settings = tmp_path / "f" / "api.token", tmp_path / "f" / "fleet.toml"
    api = fleet_config.load_config(settings).api
    assert (api.host, api.port, api.local) == ("127.0.0.1", 0, True)
    assert word.stat().st_mode & 0o777 == 0o600
    assert api.token() == word.read_text().strip()
    assert len(api.token()) == 64
    assert api.token() not in settings.read_text() + repr(api)
    ran(fleet, "init", tmp_path / "g", "--name", "lamp")
    other = fleet_config.load_config(tmp_path / "g" / "fleet.toml").api
    assert other.port == 8420
    assert other.token() != api.token()


def test_what_init_comments_out_is_what_opens_the_view(tmp_path):
    """The commented lines, with their marks taken away, are settings that are understood."""
    ran(fleet, "init", tmp_path / "f", "--name", "lamp")
    settings = tmp_path / "f" / "fleet.toml"
    settings.write_text(re.sub(r"^# (host|cert|key) ", r"\1 ", settings.read_text(), flags=re.M))
    api = fleet_config.load_config(settings).api
    assert (api.host, api.local) == ("0.0.0.0", False)
    assert (api.cert, api.key) == (tmp_path / "f" / "api.crt", tmp_path / "f" / "api.key")
    assert api.token() is not None


def test_an_answer_that_has_no_place_spends_no_code(keys, tmp_path):
    code = json.loads(ran(fleet, "enroll", keys, "anna", "--json"))["code"]
    ran(edge, "join", tmp_path / "anna", text=code + "\n")
    request = tmp_path / "anna" / "anna.request"
    with pytest.raises(ConfigError, match="give -o a file in a folder that is there"):
        ran(fleet, "admit", keys, request, "-o", tmp_path / "not there" / "anna.answer")
    os.mkfifo(tmp_path / "pipe")  # as a full disk, and /dev/stdout, which whoever may write /dev would replace for all
    with pytest.raises(StateError, match=r"pipe cannot be written \(it is no file that can be replaced\); name a file"):
        ran(fleet, "admit", keys, request, "-o", tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    ran(fleet, "admit", keys, request, "-o", tmp_path / "anna.answer")  # the code is good still
    assert "mqtts://" in ran(edge, "join", tmp_path / "anna", "--answer", tmp_path / "anna.answer")


@pytest.mark.parametrize("last", ["tls.key", "sign.key", "bela.request", "anna.request"])
def test_joining_that_a_full_disk_or_a_kill_cut_off_is_begun_anew(keys, tmp_path, monkeypatch, last):
    """Nobody has heard of its keys, and no answer will come: told to give one, an owner would go in a circle."""
    written, folder = credentials.write, tmp_path / "anna"

    def cut(path, data, **how):
        written(path, data, **how)
        if path.name == last:
            (folder / f".{path.name}.part").touch()
            raise StateError("cut off")

    def code(device):
        return json.loads(ran(fleet, "enroll", keys, device, "--json"))["code"] + "\n"

    monkeypatch.setattr(credentials, "write", cut)
    with pytest.raises(StateError, match="cut off"):
        ran(edge, "join", folder, text=code("bela" if last == "bela.request" else "anna"))
    monkeypatch.undo()
    ran(edge, "join", folder, text=code("anna"))
    assert {path.name for path in folder.iterdir()} == {"tls.key", "sign.key", "anna.request", "joining.json"}
    with pytest.raises(ConfigError, match="holds keys already"):  # these are asked for
        ran(edge, "join", folder, text=code("bela"))


@pytest.mark.parametrize("days", [400, -19_000])
def test_a_clock_that_is_wrong_for_a_day_shuts_nobody_out_of_the_broker(keys, monkeypatch, days):
    """Whose list of revoked certificates must have begun, and not have ended, once the clock is right again."""

    class Wrong(dt.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + dt.timedelta(days=days)

    with monkeypatch.context() as patch:
        wrong = SimpleNamespace(datetime=Wrong, timedelta=dt.timedelta, UTC=dt.UTC)
        patch.setattr("talaria_coordinator.identity.ca.dt", wrong)
        ran(fleet, "enroll", keys, "anna")
    found = x509.load_pem_x509_crl((keys / "broker" / "revoked.pem").read_bytes())
    assert found.last_update_utc <= dt.datetime.now(dt.UTC) < found.next_update_utc


def test_an_order_in_a_folder_that_is_no_fleets_leaves_nothing_there(tmp_path):
    (tmp_path / "identity").mkdir()
    with pytest.raises(ConfigError, match=r"members.json cannot be read"):
        ran(fleet, "rotate", tmp_path / "identity")
    assert not any((tmp_path / "identity").iterdir())


def test_a_code_that_cannot_be_asked_for_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)  # as `<&-` leaves it
    with pytest.raises(ConfigError, match="code: stdin is closed"):
        join_command(tmp_path / "anna")


def test_a_device_takes_its_own_keys_only(keys, tmp_path):
    join(keys, tmp_path / "anna", "anna")
    assert credentials_of(tmp_path / "anna", "watch", "anna").device == "anna"
    with pytest.raises(ConfigError, match="belongs to device 'anna' of fleet 'watch', not to 'bela'"):
        credentials_of(tmp_path / "anna", "watch", "bela")
    with pytest.raises(ConfigError, match="not to 'anna' of 'lamp'"):
        credentials_of(tmp_path / "anna", "lamp", "anna")


@pytest.mark.parametrize("command", ["init", "enroll", "admit", "revoke", "rotate", "list"])
def test_every_command_explains_itself(command):
    assert len(ran(fleet, command, "--help")) > 200


# ---- passwords

FLEET = """
[fleet]
name = "watch"
devices = 1
[broker]
{broker}
[run]
algorithm = "fedavg"
[run.spec]
name = "imu_cnn"
input_shape = [6, 32]
classes = 3
"""
DEVICE = '[device]\nid = "anna"\n[fleet]\nname = "watch"\n{broker}\n[data]\nsource = "npz"\npath = "x.npz"\n'


@pytest.mark.parametrize(
    ("load", "text", "field"), [(fleet_config.load_config, FLEET, "url"), (device_config.load_config, DEVICE, "broker")]
)
def test_a_password_does_not_stand_in_a_url(tmp_path, load, text, field):
    path = tmp_path / "x.toml"
    path.write_text(text.format(broker=f'{field} = "mqtts://me:hunter2@broker.example"'))
    with pytest.raises(ConfigError, match="password_file") as caught:
        load(path)
    assert "hunter2" not in str(caught.value)
    (tmp_path / "secret").write_text("hunter2\n")
    (tmp_path / "secret").chmod(0o600)
    login = f'{field} = "mqtts://broker.example"\nusername = "me"\npassword_file = "secret"'
    path.write_text(text.format(broker=login))
    loaded = load(path)
    assert loaded.username == "me"
    assert password(loaded.password_file) == "hunter2"
    (tmp_path / "secret").write_text("\ufeffhunter2\r\n")  # as Windows saves it; the mark was part of the password
    assert password(loaded.password_file) == "hunter2"
    assert "hunter2" not in repr(loaded)


@pytest.mark.parametrize(("content", "mode"), [("", 0o600), ("a\nb", 0o600), ("\x00" * 2000, 0o600), ("x", 0o644)])
def test_password_files_that_are_none(tmp_path, content, mode):
    path = tmp_path / "secret"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="secret"):
        password(path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"secret cannot be read: .*; write the password there, in one line"):
        password(path)


def test_a_password_of_nobody_is_refused(tmp_path):
    path = tmp_path / "f.toml"
    path.write_text(FLEET.format(broker='url = "mqtts://b.example"\npassword_file = "secret"'))
    with pytest.raises(ConfigError, match=r"broker: username is missing, whose password is in .*secret; give both"):
        fleet_config.load_config(path)


def test_a_hosted_brokers_link_shows_no_password(tmp_path):
    (tmp_path / "secret").write_text("hunter2")
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "f.toml").write_text(
        FLEET.format(broker='url = "mqtts://b.example"\nusername = "me"\npassword_file = "secret"')
    )
    config = fleet_config.load_config(tmp_path / "f.toml")
    link = over_mqtt(config.broker, config, lambda: None)
    assert (link.address.host, link.address.tls) == ("b.example", True)
    assert "hunter2" not in repr(link) + repr(link.address) + str(link.address)


# ---- the broker that a fleet with keys needs


def test_a_fleet_with_keys_does_not_fall_back_to_a_broker_without_tls(keys, tmp_path):
    with (
        pytest.raises(ConfigError, match="needs Mosquitto"),
        open_broker("amqtt", state=tmp_path / "b", security=keys / "broker"),
    ):
        pass
