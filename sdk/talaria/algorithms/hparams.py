"""Rules of hyper-parameters, declared beside each field and checked when an algorithm is made.

lam: Annotated[float, at_least(0), off(0, "makes it Local")] = 0.1
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, get_type_hints

from talaria.aggregate.validation import Weighting
from talaria.algorithms.base import Algorithm
from talaria.errors import ConfigError


@dataclass(frozen=True)
class Rule:
    """What a value must be: ``holds(value)``, and the words that an error says it in."""

    holds: Callable[[Any], bool]
    says: str
    off: bool = False
    """True for a value that switches the method off, which ``allow_degenerate`` allows, to compare."""


def at_least(low: float, also: str = "") -> Rule:
    """A finite number from ``low`` on; ``also`` continues the error."""
    return Rule(lambda value: low <= value < float("inf"), f"must be at least {low:g}{also}")


def above(low: float) -> Rule:
    """A finite number above ``low``."""
    return Rule(lambda value: low < value < float("inf"), f"must be finite and above {low:g}")


def within(interval: str, also: str = "") -> Rule:
    """A number in an interval such as ``"(0, 1]"``, whose brackets say which ends belong to it."""
    low, high = map(float, interval[1:-1].split(","))
    ends = ({low} if interval[0] == "[" else set()) | ({high} if interval[-1] == "]" else set())
    return Rule(lambda value: low < value < high or value in ends, f"must be in {interval}{also}")


def one_of(*names: str) -> Rule:
    """One of these texts."""
    return Rule(lambda value: value in names, f"must be {', '.join(map(repr, names[:-1]))} or {names[-1]!r}")


def off(value: object, effect: str) -> Rule:
    """Anything but ``value``, which switches the method off and so has the ``effect``."""
    end = "choose another value, or set allow_degenerate=true to compare"
    return Rule(lambda given: given != value, f"{effect}; {end}", off=True)


Epochs = Annotated[int, at_least(0)]
Rate = Annotated[float, at_least(0, " (0 takes the recipe's)")]
Weighed = Annotated[Weighting, one_of("samples", "uniform")]


def check(algorithm: Algorithm) -> None:
    """Hold each field of ``algorithm`` to its rules.

    Raises:
        ConfigError: with algorithm, field, value and what it must be, for the first rule that is broken.
    """
    for name, rule in _rules(type(algorithm)):
        broken = not _holds(rule, getattr(algorithm, name))
        require(algorithm, name, not broken or (rule.off and algorithm.allow_degenerate), rule.says)  # type: ignore[attr-defined]


def _holds(rule: Rule, value: object) -> bool:
    """Not of what cannot be compared: a text, None or an array where a number belongs."""
    try:
        return bool(rule.holds(value))
    except (TypeError, ValueError):
        return False


@cache
def _rules(kind: type[Algorithm]) -> list[tuple[str, Rule]]:
    """Each field's rules, by the annotations themselves: a module may keep them as text."""
    hints = get_type_hints(kind, include_extras=True)
    named = [(field.name, hints[field.name]) for field in fields(kind)]  # type: ignore[arg-type]
    return [(name, rule) for name, hint in named for rule in getattr(hint, "__metadata__", ())]


def require(algorithm: Algorithm, field: str, ok: bool, says: str) -> None:
    """Raise :class:`ConfigError` that the value of ``field`` ``says``, unless ``ok``: for rules over several fields."""
    if not ok:
        raise ConfigError(f"{algorithm.card.name}: {field}={getattr(algorithm, field)!r} {says}")
