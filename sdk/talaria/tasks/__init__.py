"""What a run learns to say of a sample, one short file each: a class (``classification``), numbers (``regression``),
any of several labels (``multilabel``), or a class for each step of a sequence (``per_step``).

A task's text is its name, with options after a colon: ``"regression:kind=squared"``.
"""

from __future__ import annotations

from functools import lru_cache

from talaria import valid
from talaria.errors import ConfigError
from talaria.foreign import shown
from talaria.options import taken_apart
from talaria.tasks.base import Goal, Scale
from talaria.tasks.classification import Classification
from talaria.tasks.multilabel import MultiLabel
from talaria.tasks.per_step import PerStep
from talaria.tasks.regression import Regression

__all__ = ["CLASSIFICATION", "NAMES", "Goal", "Scale", "of", "score_word"]

CLASSIFICATION = "classification"
"""The task of whoever names none."""
_KINDS: dict[str, type[Goal]] = {
    CLASSIFICATION: Classification,
    "regression": Regression,
    "multilabel": MultiLabel,
    "per_step": PerStep,
}
NAMES = tuple(_KINDS)
"""The tasks there are."""


def of(text: str) -> Goal:
    """The task that ``text`` names. Raises :class:`~talaria.errors.ConfigError` with what is wrong and the mend.

    >>> of("regression:kind=huber,delta=0.5")
    Regression(kind='huber', delta=0.5, center='mean', spread=None)
    """
    if not isinstance(text, str):
        raise ConfigError(f"task={shown(text)} must be text, one of {', '.join(NAMES)}")
    return _of(text)


def score_word(task: str) -> str:
    """What people call the score of a task.

    >>> score_word("regression"), score_word("multilabel"), score_word("classification")
    ('R²', 'micro F1', 'accuracy')
    """
    return of(task).figures[0].replace("_", " ").replace("r2", "R²").replace("f1", "F1")


@lru_cache(maxsize=32)
def _of(text: str) -> Goal:
    name, options = taken_apart(text, "task")
    if name not in _KINDS:
        raise ConfigError(f"task={shown(text)} is unknown; use one of {', '.join(NAMES)}")
    return _KINDS[name](**valid.options_of(_KINDS[name]).read(f"task {name!r}", options))
