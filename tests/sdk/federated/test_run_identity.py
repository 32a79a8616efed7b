"""Which run it is: the same however many rounds it goes on for, and in what older versions wrote."""

import copy
import hashlib
from dataclasses import fields, replace

import pytest

from talaria.errors import ConfigError
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec


def test_a_run_keeps_its_identity_when_it_goes_on():
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedper", rounds=3)
    longer, other = replace(run, rounds=40), replace(run, seed=1)
    assert run.identity == longer.identity != other.identity
    written_before = hashlib.sha256(run.to_json().encode()).hexdigest()
    assert longer.is_named(written_before)
    assert run.is_named(written_before)
    assert not other.is_named(written_before)
    assert not replace(run, rounds=2).is_named(written_before)


def test_it_is_worked_out_once(monkeypatch):
    """Each device's round asks for it, and to write the run as text took a fifth of a small network's."""
    run, written = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedper"), Run.to_json
    texts = []
    monkeypatch.setattr(Run, "to_json", lambda self: texts.append(written(self)) or texts[-1])
    assert run.identity == run.identity == replace(run).identity
    assert len(texts) == 2


def test_what_it_follows_travels_and_is_checked():
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedper")
    after = replace(run, follows=(run.identity,))
    assert Run.from_json(after.to_json()) == after
    assert "follows" not in run.to_json()
    assert after.identity != run.identity
    for wrong in ("abc", ("abc",), (run.identity,) * 17, (1,)):
        with pytest.raises(ConfigError, match=r"follows=.* must be a list of at most 16 identities"):
            replace(run, follows=wrong)


@pytest.mark.parametrize("part", ['"input_shape"', '"none"', '"imu_cnn"'])
def test_a_strangers_model_is_quoted_by_its_beginning(part):
    text = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedper").to_json().replace(part, f'"{"x" * 5000}"')
    with pytest.raises(ConfigError, match=r"unknown|there is no model") as refused:
        Run.from_json(text)
    assert len(str(refused.value)) < 400


def test_a_hash_stays_in_its_process():
    """Texts have another one in each."""
    run = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedper")
    assert hash(run) == hash(replace(run))
    again = copy.copy(run)
    assert vars(again).keys() == {f.name for f in fields(Run)}
    assert again == run
    assert hash(again) == hash(run)
