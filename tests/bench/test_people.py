"""The benchmark of newcomers: a fold is a file, and what serves a person is chosen by the others."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from talaria.data import presets
from talaria_bench import bars
from talaria_bench.people.bench import measure, people
from talaria_bench.people.figures import chosen, interval
from talaria_bench.people.figures import told as figures
from talaria_bench.people.folds import fold
from talaria_bench.people.plot import picture
from talaria_bench.people.studies import METHODS, STUDIES


def test_two_speakers_come_in_turn_and_what_is_kept_is_not_done_again(tmp_path: Path) -> None:
    told: list[str] = []
    found = measure(["vowels"], [0], tmp_path, rounds=2, subjects=2, tell=told.append)
    assert len(told) == 2 * len(STUDIES["vowels"]().ways)
    study, one = STUDIES["vowels"](), found["vowels"]
    again = [row for subject in (0, 1) for row in fold(study, tmp_path, subject, 0, 2, told.append)]
    assert len(told) == 2 * len(study.ways)
    assert figures(again) == one["amounts"]
    assert one["parameters_ratio"] < 0.5
    assert [facts["labels"] for facts in one["amounts"].values()] == [11, 22, 33]
    for facts in one["amounts"].values():
        assert set(facts["methods"]) == set(METHODS)
        assert facts["methods"]["personal"]["parameters"] < 0.5 * facts["methods"]["dense"]["parameters"]
    # What the fleet has learned does not depend on the newcomer's labels.
    assert len({facts["methods"]["fleet"]["mean"] for facts in one["amounts"].values()}) == 1
    assert picture(found).count("<polyline") == len(METHODS)
    plot = tmp_path / "a folder" / "that is not there.svg"  # it was found missing once all was measured
    people(["vowels"], [0], tmp_path, 2, 2, bars.place(plot))
    assert plot.read_text() == picture(found)


def test_a_way_may_be_for_some_amounts_of_labels_alone(tmp_path: Path) -> None:
    study = STUDIES["vowels"]()
    ways = [replace(way, amounts=amounts) for way in study.ways[:1] for amounts in ((), ("1 frame",))]
    rows = fold(replace(study, ways=tuple(ways)), tmp_path, 0, 0, 2)
    assert [row["amount"] for row in rows] == [*study.amounts, "1 frame"]


def test_a_fold_of_another_recipe_is_another_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    study = STUDIES["glucose"]()
    before = study.facts(study.ways[0], 2)
    other = replace(presets.GLUCOSE, task="regression:center=zero")
    monkeypatch.setattr(presets, "NAMED", {**presets.NAMED, "glucose": other})
    assert study.facts(study.ways[0], 2) != before


def test_a_persons_own_score_chooses_nothing_for_that_person() -> None:
    scores = {"a": {"short": 0.1, "long": 0.9}, "b": {"short": 0.8, "long": 0.2}, "c": {"short": 0.7, "long": 0.2}}
    rows = [
        {"method": "dense", "amount": "all", "way": way, "subject": subject, "scores": [score, 0.0]}
        for subject, ways in scores.items()
        for way, score in ways.items()
    ]
    picked = {row["subject"]: row["way"] for row in chosen(rows)}
    assert picked == {"a": "short", "b": "long", "c": "long"}


def test_an_interval_is_of_whole_subjects_and_the_same_each_time() -> None:
    values = np.array([0.2, 0.4, 0.6, 0.8])
    low, high = interval(values)
    assert 0.2 < low < 0.5 < high < 0.8
    assert interval(values) == [low, high]
