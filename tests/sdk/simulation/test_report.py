"""The report: the page stands alone and holds every figure, the table too, and a bad summary is told what it lacks."""

import copy
import io
import itertools
import json
import re
import resource
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

import talaria
from talaria.errors import DataError, StateError
from talaria.model.masks import ChannelLayout, ChannelMask
from talaria.simulation import result
from talaria.simulation.reporting import charts, html, mask_overlap, overlap, pair_overlap, print_table, write_html


def user(device: str, width: float, **accuracy: float) -> dict[str, Any]:
    role = "newcomer" if "zero_shot" in accuracy else "member"
    return {
        "role": role,
        "device": device,
        "accuracy": accuracy,
        "params_ratio": width,
        "latency_ratio": round(width**0.5, 3),
        "upload_ratio": width / 4,
        "download_ratio": width / 5,
        "onnx_max_abs_diff": 2.4e-7,
        "bundle_bytes": int(80_000 * width),
    }


@pytest.fixture
def summary() -> dict[str, Any]:
    return {
        "title": "Watches",
        "subtitle": "Three learned together.",
        "users": {
            "s01-left": user("tiny", 0.25, local=0.926, fedavg=0.809, fedavg_ft=0.912, personal=0.941),
            "s01-right": user("large", 1.0, local=0.895, fedavg=0.842, fedavg_ft=0.912, personal=0.93),
            "s02-left": user("tiny", 0.25, local=0.955, fedavg=0.866, fedavg_ft=0.94, personal=0.97),
            "s10-left": user("large", 1.0, scratch=0.614, zero_shot=0.772, personal=0.877),
        },
        "accuracy": {"local": 0.9253, "fedavg": 0.839, "fedavg_ft": 0.9213, "personal": 0.947},
        "newcomers": {"accuracy": {"scratch": 0.614, "zero_shot": 0.772, "personal": 0.877}},
        "params_ratio": 0.5,
        "latency_ratio": 0.667,
        "upload_ratio": 0.125,
        "download_ratio": 0.1,
        "onnx_max_abs_diff": 2.4e-7,
        "rounds": 12,
        "seed": 3,
        "broker": "mosquitto 2.0.11",
        "versions": {"torch": "2.15.0"},
        "curve": [{"round": r, "accuracy": {"personal": 0.9 - 0.3 / r, "fedavg": 0.8 - 0.3 / r}} for r in range(1, 13)],
        "overlap": {"names": ["tiny", "large"], "matrix": [[1.0, 0.25], [0.25, 1.0]]},
        "notes": ["One seed."],
    }


def pictures(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.S)]


def test_the_page_needs_nothing_from_elsewhere(summary: dict[str, Any], tmp_path: Path) -> None:
    page = write_html(summary, tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    for fetch in ("http", "src=", "href=", "url(", "@import", "<script", "<link"):
        assert fetch not in page
    assert "prefers-color-scheme:dark" in page


def test_the_page_tells_every_figure(summary: dict[str, Any]) -> None:
    page = html(summary)
    for text in ("Watches", "Three learned together.", "One seed.", "mosquitto 2.0.11", "2.15.0", "2e-07"):
        assert text in page
    for name, data in summary["users"].items():
        row = re.search(rf'<th scope="row">{name}</th>.*?</tr>', page)
        assert row is not None
        assert all(f"{value:.3f}" in row[0] for value in data["accuracy"].values())
        assert f"<b>{max(data['accuracy'].values()):.3f}</b>" in row[0]
        assert f"{data['bundle_bytes'] / 1024:.1f}" in row[0]
    assert "<h2>Someone new comes</h2><p>1 newcomer took no part in the training." in page  # whatever the data is of
    assert "reaches 0.772" in page
    assert "reaches 0.877 (worst 0.877)" in page


def test_every_picture_is_sound_svg_within_its_frame(summary: dict[str, Any]) -> None:
    shown = pictures(html(summary))
    large = [svg for svg in shown if svg.get("class") == "chart"]
    assert [svg.get("aria-label") for svg in large] == [
        "Newcomers' accuracy",
        "Members' accuracy by method",
        "Ratios to dense FedAvg",
        "Accuracy over rounds",
        "Channels in common",
    ]
    for svg in large:
        _, _, width, height = map(float, str(svg.get("viewBox")).split())
        for mark in svg.iter():
            for key, most in (
                ("x", width),
                ("x1", width),
                ("x2", width),
                ("y", height),
                ("y1", height),
                ("y2", height),
            ):
                if mark.get(key) is not None:
                    assert 0 <= float(str(mark.get(key))) <= most, (svg.get("aria-label"), mark.attrib)


def test_marks_stand_where_their_values_are() -> None:
    rows = [("a", {"local": 0.5, "personal": 1.0}), ("b", {"local": 0.75})]
    svg = ElementTree.fromstring(charts.dots(rows, [], {}, "x"))
    at = {
        str(mark[0].text): float(str(mark.get("transform"))[10:].split()[0])
        for mark in svg
        if mark.get("class", "").startswith("mark")
    }
    low, middle, high = at["a, local: 0.500"], at["b, local: 0.750"], at["a, personal: 1.000"]
    assert middle - low == pytest.approx(high - middle, abs=0.11)
    assert low < high


def test_scores_below_zero_have_their_place_and_their_name(summary: dict[str, Any]) -> None:
    """R² has no lowest value: what is below -1 stands at the foot of the scale, and its figure is told."""
    summary["score"] = "R²"
    summary["users"]["s01-left"]["accuracy"] = {"local": -7.5, "personal": -0.5}
    for row in summary["curve"]:
        row["accuracy"]["personal"] -= 1.5
    page = html(summary)
    assert "ccuracy" not in page
    assert "members' R², personal model" in page or "members&#x27; R², personal model" in page
    shown = {svg.get("aria-label"): svg for svg in pictures(page) if svg.get("class") == "chart"}
    assert {"Members' R² by method", "R² over rounds"} <= shown.keys()
    members = shown["Members' R² by method"]
    at = {
        str(mark[0].text): float(str(mark.get("transform"))[10:].split()[0])
        for mark in members.iter()
        if mark.get("class", "").startswith("mark") and len(mark)
    }
    ticks = {str(t.text): float(str(t.get("x"))) for t in members if t.get("class") == "tick"}
    assert at["s01-left, Alone: -7.500"] == pytest.approx(ticks["-1"], abs=0.11)
    assert ticks["-1"] < at["s01-left, Personal: -0.500"] < ticks["0"]
    foot = max(float(str(line.get("y1"))) for line in shown["R² over rounds"] if line.get("class") == "grid")
    heights = [
        float(point.partition(",")[2])
        for line in shown["R² over rounds"]
        if line.tag == "polyline"
        for point in str(line.get("points")).split()
    ]
    assert max(heights) <= foot


def test_bars_are_as_long_as_their_values() -> None:
    svg = ElementTree.fromstring(charts.bars([("a", {"x": 0.5, "y": 1.0}), ("b", {"x": 0.25})], {}, "x"))
    width = [float(str(bar.get("width"))) for bar in svg if bar.get("class", "").startswith("bar")]
    assert width[0] / width[1] == pytest.approx(0.5, abs=0.01)
    assert width[2] / width[1] == pytest.approx(0.25, abs=0.01)


def test_labels_of_equal_lines_do_not_touch() -> None:
    svg = ElementTree.fromstring(charts.lines({"a": [(1, 0.9)], "b": [(1, 0.9)], "c": [(1, 0.9)]}, {}, "x"))
    heights = sorted(float(str(t.get("y"))) for t in svg if t.tag == "text" and t.get("class") == "name")
    assert heights[1] - heights[0] >= 17
    assert heights[2] - heights[1] >= 17


def test_labels_have_their_marks_where_one_stands_apart_from_the_end_of_its_line() -> None:
    ends = {"fedavg": [(1, -9.0), (4, -9.0)], "fedavg_ft": [(1, -9.0), (2, -9.0)], "local": [(1, 0.5), (4, 0.5)]}
    svg = ElementTree.fromstring(charts.lines(ends, {"fedavg_ft": "a name that is too long to stand here"}, "x"))
    beside = [mark for mark in svg if str(mark.get("class")).startswith("mark") and not list(mark)]
    assert [str(mark.get("class")) for mark in beside] == [f"mark {name}" for name in ends]
    names = {str(text.text): float(str(text.get("y"))) for text in svg if text.get("class") == "name"}
    assert max(names.values()) <= 264  # the foot of the scale
    for mark, name in zip(beside, ("fedavg", "a name that is t…", "local"), strict=True):
        assert float(str(mark.get("transform")).rstrip(")").split()[1]) == pytest.approx(names[name] - 4)


def test_names_are_text_and_never_markup(summary: dict[str, Any]) -> None:
    evil = '<script>alert("x")</script>&'
    summary["users"][evil] = summary["users"].pop("s01-left") | {"device": evil}
    summary |= {"title": evil, "broker": evil, "notes": [evil], "versions": {evil: evil}}
    summary["overlap"]["names"][0] = evil
    page = html(summary)
    assert "<script" not in page
    assert len(pictures(page)) == len(pictures(html(summary)))


def test_the_least_summary_makes_a_page_and_a_table() -> None:
    least = {
        "users": 1,
        "per_user": {"anna": {"accuracy": {"personal": 0.5}}},
        "accuracy": {"personal": 0.5},
        "rounds": 1,
        "seed": 0,
        "broker": "none",
        "versions": {},
    }
    page = html(json.loads(json.dumps(least)))
    assert "anna" in page
    assert "Someone new" not in page
    assert "What it costs" not in page
    console = Console(file=io.StringIO(), width=100)
    print_table(least, console)


def test_the_terminal_table_has_users_mean_and_worst_tenth(summary: dict[str, Any]) -> None:
    out = io.StringIO()
    print_table(summary, Console(file=out, width=160))
    lines = {line.split("│")[1].strip(): line for line in out.getvalue().splitlines() if line.startswith("│")}
    assert {"s01-left", "s01-right", "s02-left", "s10-left"} <= lines.keys()
    for text in ("0.926", "0.809", "0.912", "0.941", "0.25", "0.50", "0.06"):
        assert text in lines["s01-left"]
    assert "Against dense FedAvg: parameters 0.50, latency 0.67, upload 0.12, download 0.10." in out.getvalue()
    assert "12 rounds, seed 3, broker mosquitto 2.0.11." in out.getvalue()
    worst = [line for line in out.getvalue().splitlines() if "worst tenth" in line]
    assert all(text in worst[0] for text in ("0.895", "0.809", "0.912", "0.930"))
    assert all(text in worst[1] for text in ("0.614", "0.772", "0.877"))


def test_a_terminal_of_80_columns_cuts_no_name_and_no_heading(summary: dict[str, Any]) -> None:
    for one in summary["users"].values():
        one["bundle_ratio"] = one["params_ratio"]
    out = io.StringIO()
    print_table(summary, Console(file=out, width=80))
    assert "…" not in out.getvalue()
    assert "s01-right" in out.getvalue()


def without(path: str) -> Any:
    def change(data: dict[str, Any]) -> None:
        *above, last = path.split(".")
        for key in above:
            data = data[key]
        del data[last]

    return change


def put(path: str, value: object) -> Any:
    def change(data: dict[str, Any]) -> None:
        *above, last = path.split(".")
        for key in above:
            data = data[key]
        data[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("users"), "summary: users is missing"),
        (put("users", 20), "summary: per_user is missing"),
        (put("users", {}), "users holds no member"),
        (without("accuracy"), "summary: accuracy is missing"),
        (without("rounds"), "summary: rounds is missing"),
        (without("versions"), "summary: versions is missing"),
        (put("rounds", "many"), "rounds='many' must be a finite number"),
        (put("accuracy", 0.9), r"accuracy=0\.9 must be an object"),
        (put("accuracy.local", float("nan")), r"accuracy\.local=nan must be a finite number"),
        (put("accuracy.local", True), r"accuracy\.local=True must be a finite number"),
        (put("users.s01-left", 3), r"users\.s01-left=3 must be an object"),
        (without("users.s01-left.accuracy"), r"users\.s01-left\.accuracy is missing"),
        (put("users.s01-left.role", "guest"), r"users\.s01-left\.role='guest' is unknown; use 'member' or 'newcomer'"),
        (put("users.s01-left.params_ratio", "half"), r"users\.s01-left\.params_ratio='half'"),
        (put("curve", {"1": 0.5}), "curve=.* must be a list"),
        (put("curve", [{"accuracy": {}}]), r"curve\[0\]\.round is missing"),
        (put("overlap.matrix", [[1.0]]), "must be 2 x 2"),
    ],
)
def test_bad_summaries_name_the_key(summary: dict[str, Any], change: Any, message: str) -> None:
    bad = copy.deepcopy(summary)
    change(bad)
    for use in (html, print_table):
        with pytest.raises(DataError, match=message):
            use(bad)


def test_a_page_that_cannot_be_written_says_so(summary: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot be written .*No such file"):
        write_html(summary, tmp_path / "missing" / "report.html")
    (page := tmp_path / "report.html").write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(StateError, match=r"File too large.; free space there"):
            write_html(summary, page)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert page.read_text() == "before"


def test_mask_overlap_is_the_jaccard_index_over_all_groups() -> None:
    layout = ChannelLayout({"a": 4, "b": 2}, {})
    masks = {
        "small": ChannelMask(layout, {"a": (0, 1), "b": (0,)}),
        "large": layout.full(),
        "other": ChannelMask(layout, {"a": (2, 3), "b": (0,)}),
    }
    got = mask_overlap(masks)
    assert got["names"] == ["small", "large", "other"]
    assert got["matrix"] == [[1.0, 0.5, 0.2], [0.5, 1.0, 0.5], [0.2, 0.5, 1.0]]


@pytest.mark.parametrize("rows", [1, 2, 3, 256])
def test_the_pairs_of_many_masks_are_compared_some_rows_at_a_time(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "ROWS", rows)
    layout = ChannelLayout({"a": 4, "b": 2}, {})
    masks = {f"c{i}": ChannelMask(layout, {"a": (0, *range(1, 1 + i % 3)), "b": (i % 2,)}) for i in range(7)}
    matrix = mask_overlap(masks)["matrix"]
    pairs = [matrix[a][b] for a, b in itertools.combinations(range(7), 2)]
    found = {"mean": pytest.approx(sum(pairs) / len(pairs)), "least": min(pairs), "most": max(pairs)}
    assert pair_overlap(masks) == found


def test_a_page_shows_the_first_masks_pair_by_pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A square of a thousand devices has a million cells."""
    draw = np.random.default_rng(0)
    data = talaria.data.Federated.from_arrays(
        draw.normal(size=(60, 6, 32)), np.tile([0, 1, 2], 20), np.repeat(["anna", "bela", "carl"], 20)
    )
    how = {"threshold": 0.0, "step": 0.5, "cap": 0.5}
    learned = talaria.simulate("hermes", data, "imu_cnn", rounds=2, options=how)
    assert len(learned.learned.masks) == 3
    text = learned.report(tmp_path / "whole.html").read_text()
    assert "carl and anna" in text
    assert "of 3 members" not in text
    monkeypatch.setattr(result, "SHOWN", 2)
    text = learned.report(tmp_path / "page.html").read_text()
    assert "bela and anna" in text
    assert "carl and anna" not in text
    assert "of those that either keeps (2 of 3 members):" in text
