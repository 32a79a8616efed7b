"""Without Flower or Ray installed, an error says what to install; with them, tests/flower has the rest."""

import importlib
import sys

import pytest

from talaria.errors import ConfigError
from talaria.flower.settings import nested
from talaria.simulation.ray_crew import RayCrew


def test_without_flower_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    monkeypatch.delitem(sys.modules, "talaria.flower.records", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'talaria\[flower\]'"):
        importlib.import_module("talaria.flower.records")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'talaria\[ray\]'"):
        RayCrew("auto", lambda asked, shared, private: ({}, {}, b""))


def test_a_setting_below_a_plain_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"talaria\.recipe\.lr"):
        nested({"talaria.recipe": 3, "talaria.recipe.lr": 0.1})
