"""A device's agent is small: what a plain run never uses is not loaded, and plain words need no reader of words."""

import json
import subprocess
import sys

import pytest

from talaria.errors import ConfigError
from talaria_edge.agent import program

LOADED = """
import json, sys
from talaria.cli import main
import talaria_edge.agent.program
from talaria.federated.run import Run
Run.from_json(sys.argv[1])
print(json.dumps(sorted(sys.modules)))
"""
RUN = {
    "spec": {"name": "imu_cnn", "input_shape": [6, 100], "classes": 7},
    "algorithm": "fedrep",
    "rounds": 1,
    "seed": 0,
}


def test_an_agent_loads_no_words_for_people_no_cryptography_and_one_algorithm():
    done = subprocess.run(
        [sys.executable, "-c", LOADED, json.dumps(RUN)], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(json.loads(done.stdout))
    top = {name.partition(".")[0] for name in loaded}
    assert not top & {"torch", "onnx", "onnxruntime", "typer", "rich", "pydantic", "cryptography"}
    never = {
        "talaria.privacy.rule",
        "talaria.privacy.keystream",
        "talaria.identity.badges",
        "talaria.aggregate.registry",
        "talaria.data.registry",
    }
    assert not loaded & never
    kept = {name for name in loaded if name.startswith("talaria.algorithms.")}
    assert kept - {f"talaria.algorithms.{name}" for name in ("base", "hparams", "sharing", "finetune")} == {
        "talaria.algorithms.fedrep"
    }


@pytest.mark.parametrize("words", [[], ["--help"], ["--json"], ["one.toml", "--threads", "two"], ["one.toml", "--jsn"]])
def test_words_that_are_not_plain_are_left_to_the_command_line(words):
    assert not program.straight(words)


def test_plain_words_start_agents(tmp_path):
    with pytest.raises(ConfigError, match=r"lacking\.toml"):
        program.straight([str(tmp_path / "lacking.toml"), "--threads", "1", "--json", "--insecure"])
    with pytest.raises(ConfigError, match="threads=100000 must be at most 256"):
        program.straight([str(tmp_path / "lacking.toml"), "--threads", "100000"])
