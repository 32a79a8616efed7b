"""The docs say what the code says."""

import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields
from html.parser import HTMLParser
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import typer
from typer.core import TyperGroup

import talaria
import talaria_coordinator
import talaria_edge
import talaria_export
from talaria.cli.main import GROUP, app
from talaria.config import Section
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.programs import shapes
from talaria.types import Recipe

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCES = ("sdk", "coordinator", "edge_client", "export", "gateway")


def test_the_pages_of_the_algorithms_are_current() -> None:
    spec = importlib.util.spec_from_file_location("algorithm_docs", ROOT / "scripts" / "algorithm_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, text in module.pages().items():
        page = module.DOCS / name
        assert page.exists(), f"{name} is missing; run python scripts/algorithm_docs.py"
        assert page.read_text() == text, f"{name} is stale; run python scripts/algorithm_docs.py"


def named_commands(text: str) -> Iterator[list[str]]:
    """The words after ``talaria`` of what stands in backticks, over line ends too, or begins a line of a block."""
    for found in re.findall(r"`talaria ([^`]+)`|^(?:#: |    )*talaria ([^`#\n]+)", text, re.MULTILINE):
        yield " ".join(found).split()


PAGES = (ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
MODULES = tuple(module for root in SOURCES for module in sorted((ROOT / root).rglob("*.py")))


def test_every_command_that_is_named_exists_and_has_its_options() -> None:
    """On the pages, and in the words that the programs say when something must be mended."""
    top = typer.main.get_command(app())
    for file in (*PAGES, *MODULES):
        for words in named_commands(file.read_text()):
            command, rest = top, list(words)
            while rest and isinstance(command, TyperGroup) and re.fullmatch(r"[a-z][a-z-]*", rest[0]):
                below = command.get_command(typer.Context(command), rest[0])
                assert below is not None, f"{file.relative_to(ROOT)}: there is no `talaria {' '.join(words)}`"
                command, rest = below, rest[1:]
            if isinstance(command, TyperGroup):
                continue
            known = {"--help", *(name for one in command.params for name in (*one.opts, *one.secondary_opts))}
            options = {word.partition("=")[0].strip(",;)]") for word in rest if re.match(r"--?[a-z]", word)}
            assert options <= known, f"{file.relative_to(ROOT)}: `talaria {' '.join(words)}`: {options - known}"


def test_the_reference_has_every_command() -> None:
    shown = re.findall(r"^```\{commands\} (\S+)$", (DOCS / "reference" / "commands.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(one.name for one in entry_points(group=GROUP))


def test_the_table_of_formats_says_what_the_code_says() -> None:
    rows = re.findall(r"^\|[^|]+\| (\S+) \|[^|]+\| `([\w.]+)` \|$", (DOCS / "formats.md").read_text(), re.MULTILINE)
    assert len(rows) >= 9, "docs/formats.md lists a version in each row of its table"
    for version, place in rows:
        module, name = place.rsplit(".", 1)
        assert str(getattr(importlib.import_module(module), name)) == version, f"docs/formats.md is stale at {place}"


def test_as_many_operators_are_allowed_as_the_page_says() -> None:
    found = re.search(r"must be on a list\s+of (\d+)", (DOCS / "programs.md").read_text())
    assert found is not None
    assert int(found[1]) == len(shapes.RULES)


@pytest.mark.parametrize(
    ("page", "said", "places"),
    [
        ("privacy.md", "A device knows the newest {:d} of them", ["talaria_edge.agent.secure.MOST_MARKS"]),
        ("operating.md", "in at most {:d} different masks", ["talaria.wire.partial_sums.Bounds.classes"]),
        (
            "operating.md",
            "One that stands still for a minute, or for five while it begins, is replaced too",
            [
                ("talaria_coordinator.fleet.ingest.pool.STILL_S", 60),
                ("talaria_coordinator.fleet.ingest.pool.BEGIN_S", 300),
            ],
        ),
        ("devices.md", "(a date before 2001)", [("talaria_edge.recording.folder.SET", 1e9)]),
    ],
)
def test_numbers_on_the_pages_are_those_of_the_code(
    page: str, said: str, places: list[str | tuple[str, float]]
) -> None:
    numbers = []
    for place in places:
        name, wanted = (place, None) if isinstance(place, str) else place
        numbers.append(pkgutil.resolve_name(name))
        assert wanted in (None, numbers[-1]), name
    assert said.format(*numbers) in " ".join((DOCS / page).read_text().split())


def test_every_file_of_ours_that_the_pages_name_exists() -> None:
    roots = (ROOT, ROOT / "sdk" / "talaria", *(ROOT / name for name in SOURCES))
    programs = [folder for root in roots[3:] for folder in root.glob("talaria_*") if folder.is_dir()]
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.glob("*.md"))):
        for named in re.findall(
            rf"`((?:\w+/)+\w+\.py|(?:{'|'.join(SOURCES)}|tests|benchmarks)/[\w/]*)`", page.read_text()
        ):
            assert any((root / named).exists() for root in (*roots, *programs)), f"{page.name}: there is no {named}"


def test_a_module_above_500_lines_says_why() -> None:
    """As CONTRIBUTING.md asks; the product's modules."""
    for root in SOURCES:
        for module in sorted((ROOT / root).glob("talaria*/**/*.py")):
            text = module.read_text()
            assert text.count("\n") <= 500 or "500 lines" in text.split('"""')[1], (
                f"{module} says not why it is so long"
            )


class Page(HTMLParser):
    """What one page of the site links to, what it loads, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("script", "img", "link", "iframe"):
            self.loads += [given[name] for name in ("src", "href") if name in given]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_site_builds_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(site)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    for source in DOCS.rglob("*.md"):
        assert (site / source.relative_to(DOCS)).with_suffix(".html").is_file(), f"{source} is no page of the site"
    pages = {file: Page(file.read_text()) for file in site.rglob("*.html")}
    for package in (talaria, talaria_coordinator, talaria_edge, talaria_export):
        for name in (one for one in package.__all__ if one != "__version__"):
            anchor = f"{package.__name__}.{name}"
            anchors = pages[site / "reference" / "python.html"].anchors
            assert {anchor, f"module-{anchor}"} & anchors, f"{anchor} is in no reference"
    for file, page in pages.items():
        for target in page.loads:
            assert not urlsplit(target).netloc, f"{file.name} loads {target}: the site needs no network"
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            led = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert led.exists(), f"{file.relative_to(site)} links to {link}, which is not there"
            if parts.fragment and led in pages:
                assert unquote(parts.fragment) in pages[led].anchors, f"{file.relative_to(site)}: nothing is at {link}"


def listed(page: str, heading: str) -> dict[str, set[str]]:
    """By the name of each table, the fields that the page of settings lists under ``heading``."""
    block = page.split(f"\n## {heading}\n")[1].split("```toml\n")[1].split("```", 1)[0]
    text = re.sub(r"^# ", "", block, flags=re.MULTILINE)
    found: dict[str, set[str]] = {}

    def walk(name: str, table: dict[str, Any]) -> None:
        found[name] = {field for field, value in table.items() if not isinstance(value, dict) or field in ADAPTED}
        for field, value in table.items():
            if isinstance(value, dict) and field not in ADAPTED:
                walk(f"{name}.{field}" if name else field, value)

    walk("", tomllib.loads(text))
    return {name: fields for name, fields in found.items() if name and fields}


ADAPTED = ("adapters", "options")
"""Tables that stand in one line on the page."""


def test_the_page_of_settings_lists_every_field_that_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, set[str]] = {}
    get = Section._get

    def noted(section: Section, field: str, default: Any, rule: str) -> Any:
        if rule != "must be a table":
            asked.setdefault(section.name, set()).add(field)
        return get(section, field, default, rule)

    monkeypatch.setattr(Section, "_get", noted)
    page = (DOCS / "reference" / "settings.md").read_text()

    def read(load: Callable[[Path], object], *texts: str) -> dict[str, set[str]]:
        asked.clear()
        for text in texts:
            path = tmp_path / "settings.toml"
            path.write_text(text)
            load(path)
        return {name: set(found) for name, found in asked.items() if name not in ("", "plan")}

    device = '[device]\nid="a"\nengine="onnx"\n[fleet]\nname="w"\nbroker="mqtt://127.0.0.1"\n[data]\n'
    found = read(
        talaria_edge.load_config,
        f'{device}source="npz"\npath="a.npz"\n[guard]\n[home_assistant]\n[plan.widths]\nconv1=8\n',
        f'{device}source="folder"\npath="a"\n[budget]\nlatency_ratio=0.5\n',
        f'{device}source="smartwatch"\n',
    )
    known = listed(page, "device.toml")
    found["data"] |= {"options"}
    found |= {name: known[name] for name in ("plan.widths", "profile", "budget")}  # any names, or said in one line
    assert known == found

    fleet = '[fleet]\nname="w"\ndevices=3\n[api]\n[ingest]\n[run]\nalgorithm="fedavg"\n'
    fleet += '[run.spec]\nname="imu_cnn"\ninput_shape=[6,100]\nclasses=7\n[rounds]\n'
    found = read(
        talaria_coordinator.load_config,
        f"{fleet}[canary]\n[privacy]\nclip=1.0\n",
        f'{fleet}mode="asynchronous"\nbuffer=2\n',
    )
    known = listed(page, "fleet.toml")
    for name, kind in (("run", Run), ("run.spec", ModelSpec), ("run.recipe", Recipe)):
        found[name] = {one.name for one in fields(kind)} - {"spec", "recipe", "hparams", "asynchronous"}
    found["run"] |= {"defaults"}
    found["gateways"] = known["gateways"]
    assert known == found
