"""The fuzzer: it knows every decoder, it finds what is wrong with one, and a short run finds nothing wrong."""

import inspect
import os
import sys

import msgpack
import pytest

from talaria.errors import ConfigError, WireError
from talaria.federated.run import Run
from talaria.wire import codec, messages
from talaria_bench.fuzz import bench
from talaria_bench.fuzz.target import CPU_SECONDS, STACK, Defect, Tally, Target, awkward, installed, sayable

REFUSED = {"bundle", "manifest", "certificate"}
"""Targets whose seeds are near misses: a whole bundle is too large to begin from."""


@pytest.fixture(scope="module")
def targets():
    return installed()


def test_every_seed_is_taken_but_the_near_misses(targets):
    tallies = {target.name: Tally() for target in targets}
    for target in targets:
        for seed in target.seeds:
            tallies[target.name].shoot(target, seed)
    assert {name for name, tally in tallies.items() if tally.refused} == REFUSED
    assert all(tally.runs for tally in tallies.values())


def test_every_kind_of_message_and_every_codec_is_a_seed(targets):
    seeds = {target.name: target.seeds for target in targets}
    assert len(seeds["message"]) == len(seeds["frame"]) == len(messages.BY_TYPE)
    assert len(seeds["update"]) == 11
    assert len(seeds) >= 25


def test_what_is_not_a_targets_own_error_gets_out():
    def odd(data):
        raise ValueError("odd") if data == b"x" else WireError("refused")

    tally, target = Tally(), Target("one", odd, (WireError,), [b"y"])
    tally.shoot(target, b"y")
    assert (tally.refused, tally.taken) == (1, 0)
    with pytest.raises(ValueError, match="odd"):
        tally.shoot(target, b"x")


def test_a_slow_decoder_and_an_unsayable_reason_are_defects(monkeypatch):
    clock = iter([0.0, CPU_SECONDS + 0.01])
    monkeypatch.setattr("talaria_bench.fuzz.target.time.thread_time", lambda: next(clock))
    with pytest.raises(Defect, match="1 bytes took"):
        Tally().shoot(Target("one", bytes, (), []), b"x")
    with pytest.raises(Defect, match="no store can hold"):
        sayable("\ud800")
    with pytest.raises(Defect, match="2001 characters"):
        sayable("x" * 2001)


def test_some_thousand_inputs_find_nothing(targets):
    found = bench.measure(400, seed=3, runs=100)
    assert found["crashes"] == []
    assert {name.replace("-", " ") for name in found["targets"]} == {target.name for target in targets}
    assert all(row["runs"] == 100 for row in found["targets"].values())
    assert found["edges"] > 1000
    assert found["memory_mib"] < 64


PLANTED = """
import os
from talaria.errors import WireError
from talaria_bench.fuzz.target import Target
def decode(data):
    if data[:1] == os.environ["PLANTED"].encode():
        return {}[data]
def targets():
    return [Target(name, decode, (WireError,), [name.encode()]) for name in ("one", "two")]
"""


def planted(tmp_path, monkeypatch, fault, runs=0):
    """What the bench finds in two decoders that have ``fault``; what it found is kept."""
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.setitem(os.environ, "PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setitem(os.environ, "PLANTED", fault)
    return bench.measure(30, runs=runs, corpus=tmp_path / "corpus", targets="planted:targets")["crashes"]


def test_a_planted_fault_is_found_and_shown_with_its_input_until_it_is_mended(tmp_path, monkeypatch):
    for crash in (found := planted(tmp_path, monkeypatch, "F")):
        assert bytes.fromhex(crash["input"])[:1] == b"F"
        assert "KeyError" in crash["error"]
    assert {crash["target"] for crash in found} == {"one", "two"}
    assert planted(tmp_path, monkeypatch, "none", 1000) == []  # the input that failed then was told for ever


def test_a_decoder_that_fails_at_a_seed_is_told_by_name(tmp_path, monkeypatch):
    """It was left out where another one failed, and else told without a name or a word."""
    told = {crash["target"]: crash["error"] for crash in planted(tmp_path, monkeypatch, "o", 1000)}
    assert "KeyError: b'one'" in told["one"]


def test_without_atheris_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("talaria_bench.fuzz.bench.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"talaria\[fuzz\]"):
        bench.measure(1)


def test_decoders_run_as_deep_in_the_stack_as_programs_call_them():
    """A header of lists in lists that can be read, and counted on an empty stack, but not where a program reads it."""
    left = []

    def depth(value):  # by calls of Python's own: what C code prints has a bound of its own since Python 3.12
        return 1 + depth(value[0]) if value else 0

    def quote(data):
        left.append(sys.getrecursionlimit() - len(inspect.stack(0)))
        return depth(msgpack.unpackb(data, strict_map_key=False))

    target, deep = Target("quoted", quote, (WireError,), [b"\x01"]), b"\x91" * 850 + b"\x90"
    assert deep in awkward(target.seeds, (deep,), 9)
    with pytest.raises(RecursionError):
        Tally().shoot(target, deep)
    assert left[0] < sys.getrecursionlimit() - STACK


def test_awkward_inputs_are_the_seeds_with_a_word_in_each_place():
    assert awkward([b"ab", b"c"], [b"--", b""], 9) == [b"--b", b"b", b"a--", b"a", b"--", b""]
    assert len(awkward([bytes(100)], [b"1", b"2"], 50)) == 50


def test_what_quotes_a_lone_surrogate_can_be_said():
    header = b'{"w":{"dtype":"F32","shape":%s,"data_offsets":%s}}'
    for shape, offsets in ((b"[1]", b'"\\ud800"'), (b'"\\ud800"', b"[0,4]")):
        text = header % (shape, offsets)
        with pytest.raises(WireError) as told:
            codec.decode_tensors(len(text).to_bytes(8, "little") + text + bytes(4), schema=None)
        sayable(str(told.value))
    with pytest.raises(ConfigError) as said:
        Run.from_json('{"spec": {"name": "imu_cnn", "input_shape": [6, 32], "classes": 3}, "recipe": {"\\ud800": 1}}')
    sayable(str(said.value))
