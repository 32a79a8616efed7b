"""What strangers say: how deep it may nest, how it is read, and how an error quotes it.

A value that nests very deep can be read at one depth of the stack and neither compared, printed nor written again at
another. So nothing of a stranger's nests deeper than is needed, and an error shows numbers and short texts only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from talaria.errors import TalariaError, WireError

DEPTH = 8
"""Lists and maps within each other, at most."""
_NESTS = (list, tuple, dict)


def shallow(value: Any, depth: int = DEPTH) -> bool:
    """True where lists and maps stand at most ``depth`` deep in each other; needs no stack itself."""
    level = [value] if isinstance(value, _NESTS) else []
    for _ in range(depth):
        if not level:  # of most values at once: this is asked of each message twice
            return True
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, _NESTS)
        ]
    return not level


def parsed(text: str | bytes, depth: int = DEPTH, **how: Any) -> Any:
    """The JSON value of ``text``; ``how`` goes to :func:`json.loads`. Raises :class:`ValueError` for what is no JSON,
    and for what nests deeper than ``depth``."""
    try:
        value = json.loads(text, **how)
    except RecursionError:
        value = None
    else:
        if shallow(value, depth):
            return value
    raise ValueError(f"nested deeper than {depth}")


def printed(text: str) -> str:
    """``text``, which may quote what a stranger sent, as it is printed: no line of its own, and nothing that steers a
    terminal."""
    return text if text.isprintable() else ascii(text)


def shown(value: object, most: int = 80) -> str:
    """How an error quotes ``value``, a stranger's too: numbers as they are, the beginning of a text, and of what is
    long or nests deep no more than can be read."""
    if isinstance(value, str | bytes):
        return repr(value[:most])
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length()} bits"
    try:
        text = repr(value) if shallow(value) else type(value).__name__
    except (RecursionError, ValueError):  # an int within, of more digits than Python prints, raises the second
        text = type(value).__name__
    return text if len(text) <= most + 4 else f"{text[:most]}..."


def named(names: Iterable[object]) -> str:
    """How an error quotes the names in a stranger's map: the first twelve, each by its beginning."""
    return f"[{', '.join(sorted(shown(name, 20) for name in names)[:12])}]"


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Whatever goes wrong while a stranger's bytes are read is a :class:`WireError`: not one of them ends a program."""
    try:
        yield
    except TalariaError:
        raise
    except Exception as why:  # noqa: BLE001  what can go wrong there is a stranger's choice
        raise WireError(f"{what}: cannot be read ({type(why).__name__})") from None
