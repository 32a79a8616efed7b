"""docs/PROTOCOL.md says what the code says: who writes a client from it must not read what is no longer so."""

import hashlib
import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

from talaria.federated import kit
from talaria.federated.run import Run
from talaria.foreign import DEPTH
from talaria.programs.shapes import Limits as ProgramLimits
from talaria.programs.source import Need
from talaria.protocol import transfer
from talaria.protocol.coordinator import compacts
from talaria.protocol.coordinator.state import Rules
from talaria.protocol.device import download
from talaria.protocol.device.state import DeviceLimits
from talaria.types import Recipe
from talaria.wire import changes, codec, frames, messages, strict_safetensors, topics
from talaria.wire.frames import Header
from talaria.wire.tensor_codecs import SUFFIXES, Codec
from talaria_coordinator.fleet import parcels

TEXT = (Path(__file__).parents[1] / "docs" / "PROTOCOL.md").read_text()
FROM_DEVICE = {
    "device", "accept", "decline", "want", "wantcompact", "wantchanges", "wantkit", "offer", "word", "goodbye", "leave",
    "error",
}  # fmt: skip
PLAIN = re.sub(r"\s+", " ", TEXT)


def section(title):
    """What stands under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}[^\n]*\n(.*?)(?=^#|\Z)", TEXT, re.M | re.S)
    assert found, f"docs/PROTOCOL.md has no heading {title!r}"
    return found[1]


def rows(text):
    """The cells of a page's tables, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    heads = {i - 1 for i, row in enumerate(cells) if set(row[0]) == {"-"}}
    return [row for i, row in enumerate(cells) if i not in heads and set(row[0]) != {"-"}]


def bounds(check):
    """``(type, bounds)`` of a message's field as the page writes them, from what its check holds."""
    held = dict(zip(check.__code__.co_freevars, (c.cell_contents for c in check.__closure__ or ()), strict=True))
    kind = check.__qualname__.partition(".")[0]
    if kind == "_int":
        high = "2^53" if held["high"] == frames.LARGEST_INT else held["high"]
        return "whole", f"{held['low']}..{high}"
    if kind == "_bytes":
        low, high = held["low"], held["high"]
        return "bytes", str(high) if low == high else f"{low}..{high}"
    if kind == "_text":
        among = ", ".join(f"`{one}`" for one in held["among"])
        return "text", among or f"at most {held['high']} characters"
    return {"_flag": ("truth value", ""), "_seconds": ("seconds", "0..1e9")}[kind]


@pytest.mark.parametrize("kind", messages.BY_TYPE)
def test_each_message_has_its_fields_in_order_with_types_and_bounds(kind):
    wanted = [[f"`{f.name}`", *bounds(f.metadata["check"])] for f in fields(messages.BY_TYPE[kind])]
    assert [row[:3] for row in rows(section(f"`{kind}`"))] == wanted


def test_no_message_stands_there_that_is_none():
    assert sorted(re.findall(r"^### `(\w+)`", TEXT, re.M)) == sorted(messages.BY_TYPE)


def test_what_devices_say_stands_under_devices():
    """By the machines themselves: a coordinator takes nothing else from a device, and a device says nothing else."""
    code = (Path(messages.__file__).parents[1] / "protocol" / "coordinator" / "machine.py").read_text()
    heard = set(re.findall(r"m\.(\w+)", code[code.index("match message:") : code.index("is not for a device to say")]))
    names = {cls.__name__: name for name, cls in messages.BY_TYPE.items()}
    assert {names[one] for one in heard - {"Farewell"}} | {"device"} == FROM_DEVICE
    place = TEXT.index("**From a device**")
    assert {name for name in messages.BY_TYPE if TEXT.index(f"### `{name}`") > place} == FROM_DEVICE - {"error"}


def test_the_header_has_its_keys_in_the_order_in_which_they_are_signed():
    table = rows(section("Frames"))
    assert [row[0].strip("`") for row in table][:2] == ["v", "l"]
    known = {row[0].strip("`"): row[1].strip("`") for row in table if re.fullmatch(r"`\w`", row[0]) and row[1]}
    assert list(known.items()) == list(frames._KEYS.items())
    assert set(known.values()) == {f.name for f in fields(Header)}
    for _, name, _, text, *_ in (row for row in table if row[2] == "text" and row[1]):
        longest = int(re.search(r"\d+", text)[0])
        Header(**{"type": "t", "fleet": "f", name.strip("`"): "x" * longest})
        with pytest.raises(frames.WireError):
            Header(**{"type": "t", "fleet": "f", name.strip("`"): "x" * (longest + 1)})


def test_the_bounds_are_those_of_the_code():
    found = [
        (row[1], row[2].strip("`"))
        for row in rows(TEXT)
        if len(row) == 3 and re.fullmatch(r"`[\w.]+\.[A-Z_]+`", row[2])
    ]
    assert len(found) > 15
    for value, place in found:
        module, name = place.rsplit(".", 1)
        assert getattr(importlib.import_module(module), name) == float(value), place


def test_the_topics_are_those_of_the_code():
    spelled = {row[0].strip("`"): row[1] for row in rows(section("Topics"))}
    of = {"fleet": "{fleet}", "device": "{device}"}
    listed = re.findall(r"^(fl/1/\S+)( +retained)?", topics.__doc__, re.M)
    assert {name: "yes" if kept else "no" for name, kept in listed} == spelled
    filters = [
        one.replace("watch", "{fleet}").replace("anna", "{device}") for one in topics.device_filters("watch", "anna")
    ]
    assert "\n".join(filters) in TEXT
    for name in spelled:
        text = name.format(**of, model8="0" * 8, k="3", x="ab").replace("{fleet}", "watch").replace("{device}", "anna")
        assert str(topics.parse(text)) == text
    assert "1 to 36" in topics.FLEET_RULE
    assert "1 to 36" in topics.DEVICE_RULE


def test_run_recipe_codecs_and_facts_are_complete():
    run = section("The run")
    assert [row[0].strip("`") for row in rows(run)] == [f.name for f in fields(Run)]
    assert all(f"`{f.name}`" in run for f in fields(Recipe))
    for name in re.findall(r"`([\w:.]+)`", next(row[2] for row in rows(run) if row[0] == "`codec`")):
        Codec.parse(name)
    planes = {plane for row in rows(section("Codecs")) for plane in re.findall(r"w\\\|(\w)", row[1])}
    assert planes == {suffix[1:] for suffix in SUFFIXES if suffix} | {"s", "v"}
    assert [row[0].strip("`") for row in rows(section("Codecs"))] == ["raw", "fp16", "bf16", "int8", "topk"]
    facts = {row[0].strip("`") for row in rows(section("Updates"))}
    assert f"names = {{{', '.join(repr(n) for n in sorted(facts))}}}" in _sorted_names(codec)
    assert " ".join(strict_safetensors.DTYPES) in PLAIN


def _sorted_names(module):
    """The module's text with the names of a set of words in order."""
    text = Path(module.__file__).read_text()
    return re.sub(
        r"\{(\"\w+\"(?:, \"\w+\")*)\}",
        lambda m: "{" + ", ".join(sorted(re.findall(r"\"\w+\"", m[1]))).replace('"', "'") + "}",
        text,
    )


def test_the_step_of_a_kit_has_the_name_that_the_page_says():
    text = re.search(r'`(\{"accumulate".*?\})`', PLAIN)[1]
    assert hashlib.sha256(text.encode()).hexdigest() == Need.of(Recipe(), None).name


def test_numbers_in_the_text_are_those_of_the_code():
    limits, rules = codec.Limits(), Rules()
    assert f"nest at most {DEPTH} deep" in PLAIN
    assert (limits.max_norm, limits.max_weight) == (1e6, 1e8)
    assert "at most 1e6 in magnitude" in PLAIN
    assert "above 0, at most 1e8" in PLAIN
    assert f"at most {limits.metrics} finite numbers" in PLAIN
    assert f"at most {rules.serve} times the model's size" in PLAIN
    assert f"its birth again each {DeviceLimits().hello:g} seconds" in PLAIN
    assert "bitmap` | bytes | 1..450" in TEXT
    assert f"at {transfer.THIN} bytes a second, at most {transfer.LONGEST_FIRST_S:g} seconds" in PLAIN
    assert (download.ASKS, compacts.MASKS, parcels.BEFORE, changes._PAYS) == (3, 4, 8, 0.9)
    assert "the whole model after the third time" in PLAIN
    assert "at most four of these answers of a version" in PLAIN
    assert "one of the eight models before this one" in PLAIN
    assert "at most nine tenths of that part" in PLAIN
    assert f"Of each of these, {changes._BLOCK:,} words at a time" in PLAIN
    sizes = (ProgramLimits().file_bytes, kit.LARGEST_ABOUT, kit.LARGEST_FILES)
    assert "at most {} MiB, `about` {}, and all together {})".format(*(size >> 20 for size in sizes)) in PLAIN
