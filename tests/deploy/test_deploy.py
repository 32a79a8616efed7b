"""What is in deploy/: units that systemd takes, figures that there are, commands and settings of this version."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from talaria.cli.main import app
from talaria_coordinator.cli.template import found
from talaria_coordinator.config.api import PORT
from talaria_coordinator.storage.store import Store
from talaria_coordinator.web import metrics
from talaria_coordinator.web.queries import Views

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
FIGURE = re.compile(r"\b(?:talaria|process)_[a-z_]+")


def figures(folder: Path) -> set[str]:
    """All names under which Prometheus finds something: those that a new coordinator tells, and those in its source."""
    with Store(folder / "coordinator.db"):
        pass
    views = Views(folder / "coordinator.db")
    told = text_string_to_metric_families(metrics.Metrics("watch", views, folder).text().decode())
    views.close()
    names = {sample.name for family in told for sample in family.samples} | {family.name for family in told}
    source = Path(metrics.__file__).read_text()
    gauges = {f"talaria_{name}" for name in re.findall(r'_gauge\(\s*"([a-z_]+)"', source)}
    gauges |= {f"talaria_{name}" for name in ("val_accuracy", "kept_share")}
    for name, kind in re.findall(
        r'(?:(?:Counter|Histogram|Gauge|GaugeMetricFamily))\(\s*"(talaria_[a-z_]+)"(.)', source
    ):
        names |= {name + suffix for suffix in ("", "_total", "_bucket", "_count", "_sum") if kind}
    return names | gauges | {"process_resident_memory_bytes"}


def expressions() -> list[str]:
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    board = json.loads((DEPLOY / "grafana/talaria.json").read_text())
    alerts = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    panels = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return alerts + panels


def test_board_and_alerts_ask_for_figures_that_there_are(tmp_path: Path) -> None:
    known, asked = figures(tmp_path), {name for text in expressions() for name in FIGURE.findall(text)}
    assert len(asked) > 20
    assert asked <= known, asked - known


def test_a_round_that_is_never_committed_is_noticed_in_a_new_fleet_too(tmp_path: Path) -> None:
    """When a round was last committed is not told before the first was, and no alert came."""
    with Store(tmp_path / "coordinator.db") as store:
        store.fleets.enter("watch", '{"rounds": 3}', "a" * 64, "b" * 64)
        store.attempts.open("watch", 1, ["anna"], "a" * 64)
    views = Views(tmp_path / "coordinator.db")
    told = set(FIGURE.findall(metrics.Metrics("watch", views, tmp_path).text().decode()))
    views.close()
    (text,) = (text for text in expressions() if "talaria_round_state" in text)
    for part in text.split(" and on(fleet) "):
        assert told & set(FIGURE.findall(part)), part


def test_board_and_alerts_are_queries_that_prometheus_takes() -> None:
    for text in expressions():
        promql_parser.parse(text)


@pytest.mark.parametrize(
    "wrong",
    [
        "rate(talaria_errors_total) > 0",
        "increase(talaria_errors_total[15m]",
        "talaria_broker_up[5m] == 0",
        "sum by fleet (talaria_devices)",
        "increases(talaria_errors_total[15m])",
    ],
)
def test_a_wrong_query_is_noticed(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        promql_parser.parse(wrong)


def test_hadolint_has_nothing_to_say_of_the_image(tmp_path: Path) -> None:
    text = (DEPLOY / "Containerfile").read_text()
    assert linted(text, tmp_path) == []
    for right, wrong in (("USER 10001", "USER root"), ("ENTRYPOINT", "ENTRYPOINTS"), (":3.11-slim", "")):
        assert right in text
        assert linted(text.replace(right, wrong), tmp_path), f"{wrong} is noticed"


def test_an_image_has_what_it_is_made_of_and_no_keys() -> None:
    """`COPY .` took deploy/fleet, with ca.key and the token, into a layer that a later `rm` leaves as it is."""
    root = DEPLOY.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())
    wanted = {"pyproject.toml", "constraints.txt", project["project"]["readme"], *project["project"]["license-files"]}
    wanted |= set(project["tool"]["setuptools"]["packages"]["find"]["where"])
    lines = [line for line in (root / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines == ["*", *(f"!{name}" for name in sorted(wanted)), "**/__pycache__"]
    assert "/deploy/fleet/\n" in (root / ".gitignore").read_text()


def linted(text: str, folder: Path) -> list[str]:
    """What hadolint, of this environment, has to say about a Containerfile."""
    (folder / "Containerfile").write_text(text)
    hadolint = Path(sys.executable).with_name("hadolint")
    ran = subprocess.run([hadolint, folder / "Containerfile"], capture_output=True, text=True, check=False, timeout=60)
    assert bool(ran.returncode) == bool(ran.stdout), ran.stderr
    return ran.stdout.splitlines()


def test_documented_states_and_outcomes_are_the_ones_asked_for() -> None:
    states = {state for text in expressions() for state in re.findall(r'state="([a-z]+)"', text)}
    assert states <= set(metrics.STATES)
    told = Path(metrics.__file__).read_text()
    for words in re.findall(r'outcome=~?"([a-z|]+)"', " ".join(expressions())):
        assert all(f'"{word}"' in told for word in words.split("|"))


def test_every_alert_says_what_it_is_and_panels_do_not_overlap() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in rules)
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((DEPLOY / "grafana/talaria.json").read_text())["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in own) < 24
        assert not own & taken
        taken |= own


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_are_whole_and_systemd_takes_them(unit: Path, tmp_path: Path) -> None:
    """Read as systemd reads them where it is installed, with a program and a user that are there."""
    text = unit.read_text()
    assert re.findall(r"^\[(\w+)\]$", text, re.MULTILINE) == ["Unit", "Service", "Install"]
    assert "Restart=on-failure" in text
    assert "ReadWritePaths=/var/lib/talaria/%i" in text
    if shutil.which("systemd-analyze") is not None:
        copy = tmp_path / unit.name.replace("@", "@watch")
        changed = text.replace("/opt/talaria/bin/talaria", "/bin/true")
        copy.write_text(re.sub(r"^(User|Group)=talaria$", r"\1=root", changed, flags=re.MULTILINE))
        assert verified(copy) == []
        copy.write_text(copy.read_text().replace("UMask=", "UMusk="))
        assert len(verified(copy)) == 1, "a wrong word is noticed"


def verified(unit: Path) -> list[str]:
    """What systemd has to say about a unit."""
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return [line for line in ran.stderr.splitlines() if unit.name in line]


def commands() -> list[list[str]]:
    """The words after ``talaria`` wherever deploy/ runs it."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    lines = [re.search(r"^ExecStart=\S+/talaria (.+)$", unit.read_text(), re.MULTILINE) for unit in UNITS]
    return [compose["services"]["coordinator"]["command"], *(line[1].split() for line in lines if line)]


def test_the_commands_are_talarias() -> None:
    assert len(commands()) == 4
    for words in commands():
        command: Any = get_command(app(words))
        for word in words[:2]:
            command = command.commands[word]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options


def test_the_emulated_machine_is_begun_in_a_checkout_where_nothing_was_built(tmp_path: Path) -> None:
    """`make aarch64`, as far as its first step, which here finds no mirror."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(DEPLOY.parent / "scripts/aarch64", tmp_path / "scripts")
    says = {"id": "echo 0", "mount": "", "update-binfmts": "", "debootstrap": "echo no mirror; exit 1"}
    for name, line in (says | {"scripts/needs": ""}).items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    ran = subprocess.run(
        [tmp_path / "scripts/aarch64"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (1, "no mirror\n")


def test_the_fleet_that_is_made_first_fits_the_composition(tmp_path: Path) -> None:
    """Token, port, broker's files and the line that the guide changes are where `talaria fleet init` puts them."""
    found(tmp_path / "watch", "watch", ["localhost"], 8883, 2)
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    inside = Path("/srv/talaria/fleet")
    broker = Path(compose["mosquitto"]["command"][-1]).relative_to(inside)
    assert (tmp_path / broker).is_file()
    token = compose["prometheus"]["volumes"][1].split(":")[0].removeprefix("./fleet/")
    assert (tmp_path / token).is_file()
    scrape = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == [f"127.0.0.1:{PORT}"]
    assert scrape["authorization"]["credentials_file"] == compose["prometheus"]["volumes"][1].split(":")[1]
    settings = (tmp_path / "watch/fleet.toml").read_text()
    changed, count = re.subn(r'^url = "mosquitto".*', 'url = "mqtts://localhost:8883"', settings, flags=re.MULTILINE)
    assert count == 1
    assert tomllib.loads(changed)["broker"]["url"] == "mqtts://localhost:8883"
