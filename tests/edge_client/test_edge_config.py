"""device.toml: every field that is wrong is named, with its value and the mend."""

from pathlib import Path

import pytest

from talaria.config import Section
from talaria.errors import ConfigError
from talaria.model.spec import MOST_CLASSES
from talaria_edge.config import load_config
from talaria_edge.data import NamedSource, NpzSource
from talaria_edge.training_policy import Rules

GOOD = """
[device]
id = "s01-left"
[fleet]
name = "watch"
broker = "mqtt://127.0.0.1:1883"
[data]
source = "smartwatch"
"""


def written(tmp_path, text):
    path = tmp_path / "device.toml"
    path.write_text(text)
    return path


def test_what_is_left_out_has_defaults(tmp_path):
    config = load_config(written(tmp_path, GOOD))
    assert config.device == "s01-left"
    assert config.state == tmp_path / "state" / "s01-left"
    assert config.source == NamedSource("smartwatch", "s01-left", {})
    assert config.plan is None
    assert config.bundle is None
    assert not config.stay


@pytest.mark.timeout(30)  # looking each name up among all took two minutes
def test_as_many_labels_as_a_model_has_classes_are_looked_at_once(tmp_path):
    names = [f"class {number}" for number in range(MOST_CLASSES)]
    text = GOOD.replace("[fleet]", f"labels = {names}\n[fleet]")
    assert len(load_config(written(tmp_path, text)).labels) == MOST_CLASSES


def test_all_fields(tmp_path):
    text = GOOD.replace('source = "smartwatch"', 'source = "npz"\npath = "mine.npz"').replace(
        'id = "s01-left"', 'id = "a"\nstate = "/var/a"\nbundle = "a.talaria"\nstay = true'
    )
    config = load_config(written(tmp_path, text + '[plan.widths]\nconv1 = 16\n"b.c" = 8\n[profile]\nclass = "small"\n'))
    assert config.state == Path("/var/a")
    assert config.bundle == tmp_path / "a.talaria"
    assert config.source == NpzSource(tmp_path / "mine.npz", "a")
    assert config.plan.widths == {"conv1": 16, "b.c": 8}
    assert config.profile == {"class": "small"}
    assert config.stay


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "s01-left"', "", r"\[device\] id is missing"),
        ('id = "s01-left"', "id = 5", r"\[device\] id=5 must be text"),
        ('id = "s01-left"', 'id = "S01"', "'S01' must be 1 to 36 of a-z"),
        ('id = "s01-left"', 'id = "a"\nbudle = "x"', r"budle='x' is unknown; did you mean 'bundle'"),
        ("mqtt://127.0.0.1:1883", "localhost", "write mqtt://host:1883"),
        ("mqtt://127.0.0.1:1883", "mqtt://h:99999", "write mqtt://host:1883"),
        ('source = "smartwatch"', "", r"\[data\] source is missing"),
        ('source = "smartwatch"', 'source = "npz"', r"\[data\] path is missing"),
        (
            'source = "smartwatch"',
            'source = "smartwatch"\n[plan.widths]\nc = 0',
            r"\[plan.widths\] c=0 must be a whole",
        ),
        ('source = "smartwatch"', 'source = "smartwatch"\n[cloud]', r"cloud=\{\} is unknown"),
        ("[device]", "[device", "is not TOML"),
        ("[device]", "[run]", "holds a fleet's settings; give the device's"),
    ],
)
def test_bad_fields(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=message):
        load_config(written(tmp_path, GOOD.replace(old, new)))


def test_a_file_as_windows_saves_it(tmp_path):
    """Its mark at the beginning was told as a line that is not TOML."""
    path = written(tmp_path, GOOD)
    kept = load_config(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert load_config(path) == kept


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"none.toml: cannot be read \(No such file"):
        load_config(tmp_path / "none.toml")


def test_types_of_a_section():
    section = Section({"a": True, "b": 1.5, "c": ["x", "x"], "d": 1}, "f.toml", "t")
    for read, field in ((section.whole, "a"), (section.whole, "b"), (section.names, "c"), (section.table, "d")):
        with pytest.raises(ConfigError, match=rf"f.toml: \[t\] {field}="):
            read(field)
    with pytest.raises(ConfigError, match="must be true or false"):
        section.flag("d", False)
    with pytest.raises(ConfigError, match="must be one of 'x', 'y'"):
        Section({"k": "z"}, "f", "t").text("k", among=("x", "y"))
    with pytest.raises(ConfigError, match=r"must be a number in 0..1"):
        section.number("b", 0, high=1)


def test_the_guard_is_off_unless_asked_for(tmp_path):
    assert load_config(written(tmp_path, GOOD)).guard is None
    assert load_config(written(tmp_path, GOOD + "[guard]\n")).guard == Rules()
    text = '[guard]\nmin_battery = 0.5\nonly_charging = true\nmax_load = 0.7\nhours = "22:00-06:30"\nevery_s = 2\n'
    config = load_config(written(tmp_path, GOOD + text))
    assert config.guard == Rules(min_battery=0.5, only_charging=True, max_load=0.7, hours=(1320, 390))
    assert config.guard_every_s == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("min_battery = 30", r"\[guard\] min_battery=30 must be a number in 0..1"),
        ('max_celsius = "hot"', r"\[guard\] max_celsius='hot' must be a number"),
        ('hours = "late"', "HH:MM-HH:MM"),
        ("hours = 7", r"\[guard\] hours=7 must be text"),
        ("min_batery = 0.3", "did you mean 'min_battery'"),
        ("every_s = 0", r"\[guard\] every_s=0 must be a number"),
    ],
)
def test_bad_rules(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message):
        load_config(written(tmp_path, f"{GOOD}[guard]\n{line}\n"))


def test_an_owner_says_how_much_noise_a_sum_must_have(tmp_path):
    config = load_config(written(tmp_path, GOOD + "[privacy]\nsecure = true\nleast_noise = 0.5\n"))
    assert (config.secure, config.least_noise) == (True, 0.5)
    with pytest.raises(ConfigError, match=r"\[privacy\] least_noise=0.5 is of secure rounds"):
        load_config(written(tmp_path, GOOD + "[privacy]\nleast_noise = 0.5\n"))


def test_a_budget_is_planned_for_on_the_device(tmp_path):
    text = GOOD.replace('id = "s01-left"', 'id = "a"\nengine = "onnx"')
    config = load_config(written(tmp_path, text + "[budget]\nlatency_ratio = 0.5\naccuracy_drop = 0.02\n"))
    assert config.budget.limits() == {"latency_ratio": 0.5, "accuracy_drop": 0.02}


@pytest.mark.parametrize(
    ("engine", "more", "message"),
    [
        ("onnx", "[budget]\n", r"\[budget\] latency_ratio.*is missing"),
        ("onnx", "[budget]\nlatency_ms = 5\nlatncy = 1\n", r"latncy=1 is unknown"),
        ("onnx", "[budget]\nlatency = 1\n", r"\[budget\] latency=1 is unknown; did you mean 'latency_m"),
        ("onnx", "[budget]\nlatency_ratio = 2\n", r"latency_ratio=2.* allows more"),
        ("onnx", "[budget]\ntrain_s = 2\n", r"train_s=2 cannot be worked out"),
        ("onnx", "[budget]\nlatency_ms = 5\n[plan.widths]\nconv1 = 8\n", r"a plan is given too"),
        ("torch", "[budget]\nlatency_ms = 5\n", r"engine='torch', but a device plans for itself"),
    ],
)
def test_a_budget_that_cannot_be_planned_for_is_refused(tmp_path, engine, more, message):
    text = GOOD.replace('id = "s01-left"', f'id = "a"\nengine = "{engine}"')
    with pytest.raises(ConfigError, match=message):
        load_config(written(tmp_path, text + more))
