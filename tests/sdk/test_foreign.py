"""What strangers say: bounded in depth without a stack of its own, and quoted without being walked."""

import json
import sys

import pytest

from talaria.cli.main import main
from talaria.errors import ConfigError, TooLarge, WireError
from talaria.foreign import DEPTH, parsed, reading, shallow, shown
from talaria.types import Recipe


def nested(depth, inner=0):
    for _ in range(depth):
        inner = [inner]
    return inner


def test_depth_is_counted_through_lists_and_maps():
    assert shallow(7, 0)
    assert shallow({"a": [1, {"b": 2}]}, 3)
    assert not shallow({"a": [1, {"b": 2}]}, 2)
    assert shallow(nested(DEPTH))
    assert not shallow(nested(DEPTH + 1))


def test_a_value_deeper_than_the_stack_is_measured_and_shown():
    deep = nested(50 * sys.getrecursionlimit())
    assert not shallow(deep)
    assert shown(deep) == "list"
    while deep:  # taken apart from outside: its own end would walk it too
        deep = deep[0]


@pytest.mark.parametrize("depth", [DEPTH + 1, 900, 990, 100_000])
def test_json_that_nests_deep_is_refused(depth):
    with pytest.raises(ValueError, match="deeper than 8"):
        parsed("[" * depth + "]" * depth)
    assert parsed("[" * DEPTH + "]" * DEPTH, DEPTH) == nested(DEPTH - 1, [])


def test_values_are_quoted_short():
    assert shown("x" * 99, 3) == "'xxx'"
    assert shown(b"\xff" * 99, 1) == r"b'\xff'"
    assert (shown(None), shown(True), shown(-3), shown(0.5)) == ("None", "True", "-3", "0.5")
    assert shown(10**4000) == "a whole number of 13288 bits"
    assert shown({"a": 1}) == "{'a': 1}"
    assert shown([10**5000]) == "list"
    assert shown(["x" * 99]) == f"['{'x' * 78}..."


@pytest.mark.parametrize("error", [RecursionError, MemoryError, KeyError, AttributeError, UnicodeError])
def test_whatever_goes_wrong_while_reading_is_a_refusal(error):
    with pytest.raises(WireError, match=f"frame: cannot be read \\({error.__name__}"), reading("frame"):
        raise error
    with pytest.raises(TooLarge, match="as it was"), reading("frame"):
        raise TooLarge("as it was")


def test_a_field_of_somebody_else_is_told_as_text(tmp_path, monkeypatch, capsys):
    odd = "lr\x1b[2J\rall is well"
    with pytest.raises(ConfigError, match="is unknown") as refused:
        Recipe.from_json({odd: 0.1})
    assert str(refused.value).isprintable()
    rest = '[fleet]\nname = "watch"\nbroker = "mqtt://127.0.0.1:9"\n[data]\nsource = "npz"\npath = "data.npz"\n'
    (tmp_path / "device.toml").write_text(f'[device]\nid = "anna"\n{json.dumps(odd)} = 3\n{rest}')
    monkeypatch.setattr(sys, "argv", ["talaria", "edge", "run", str(tmp_path / "device.toml")])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert "is unknown" in said
    assert all(line.isprintable() for line in said.split("\n"))
