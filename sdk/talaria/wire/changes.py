"""What changed from one file of tensors to the next of the same form: the versions of a global model are near each
other, so that a device which holds one downloads a half to a fifth of the next.

Nothing is rounded: what comes out is the newer file, to the byte. The values are read as whole numbers of their bits,
whose order among floats of one sign is that of the floats; their differences are small, and most of their high bytes 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np

from talaria.errors import WireError
from talaria.tensors import Array
from talaria.wire import strict_safetensors
from talaria.wire.compact import MOST
from talaria.wire.compression import framed, unframed

VERSION = 1
MAGIC = b"TLC" + bytes([VERSION])
_HEAD = len(MAGIC) + 64
"""Bytes before the first frame: the mark, and the sha256 of both files."""
_WORDS: dict[int, np.dtype[Any]] = {w: np.dtype(f"<u{w}") for w in (1, 2, 4, 8)}
_BLOCK = 1 << 18
"""Words whose bytes are in frames of their own: so much is held beside both files."""
_PROBE = 1 << 14
_PAYS = 0.9
"""Of the newer file: changes that are more are not worth that somebody undoes them."""


def changes(before: bytes, after: bytes) -> bytes | None:
    """What makes ``after`` of ``before``, both as :func:`~talaria.wire.strict_safetensors.pack` writes them; None where
    they are not of one form, or that is hardly smaller."""
    runs = _worth(before, after)
    if not runs:
        return None
    parts = [MAGIC, hashlib.sha256(before).digest(), hashlib.sha256(after).digest()]
    for start, count, word in _blocks(runs):
        parts += _frames(_words(before, start, count, word), _words(after, start, count, word))
    found = b"".join(parts)
    return found if len(found) < _PAYS * len(after) else None


def pays(before: bytes, after: bytes) -> bool:
    """Whether both are of one form, and :func:`changes` few, as far as some words in the midst say."""
    return bool(_worth(before, after))


def are_changes(data: bytes) -> bool:
    """Whether ``data`` begins as changes do: no file of tensors does."""
    return data.startswith(MAGIC)


def made_by(found: bytes) -> bytes:
    """The sha256 of the file that these changes make."""
    return found[len(MAGIC) + 32 : _HEAD]


def applied(found: bytes, before: bytes) -> bytes:
    """The newer file that :func:`changes` was given; no more is made than ``before`` has.

    Raises :class:`~talaria.errors.WireError` where ``found`` is damaged, or of another file than ``before``.
    """
    if not are_changes(found) or len(found) < _HEAD:
        raise WireError("these are no changes of a global model")
    if hashlib.sha256(before).digest() != found[len(MAGIC) : len(MAGIC) + 32]:
        raise WireError("the changes are of another global model than the one that is here")
    after, rest = np.frombuffer(before, np.uint8).copy(), memoryview(found)[_HEAD:]
    for start, count, word in _blocks(_runs(before)):
        places = np.empty((count, word), np.uint8)
        for place in reversed(range(word)):
            data, rest = unframed(rest, count)
            places[:, place] = np.frombuffer(data, np.uint8)
        words = after[start : start + count * word].view(_WORDS[word])
        words += _unfolded(places.view(_WORDS[word])[:, 0])
    made = after.tobytes()
    if rest or hashlib.sha256(made).digest() != made_by(found):
        raise WireError("the changes do not give the global model that they name; damaged")
    return made


def _worth(before: bytes, after: bytes) -> list[tuple[int, int, int]]:
    """The runs of both files where :func:`pays` is true, else none."""
    runs = _runs(before)
    if len(before) != len(after) or runs != _runs(after):
        return []
    start, size, word = max(runs, key=lambda run: run[1])
    count = min(_PROBE, size // word)
    start += (size // word - count) // 2 * word
    tried = _frames(_words(before, start, count, word), _words(after, start, count, word))
    return runs if sum(map(len, tried)) < _PAYS * count * word else []


def _frames(before: Array, after: Array) -> list[bytes]:
    """Of each place of the differences' words, the highest first, its bytes in a frame."""
    word = before.itemsize
    places = _folded(after - before).view(np.uint8).reshape(-1, word)
    return [framed(np.ascontiguousarray(places[:, place]).data) for place in reversed(range(word))]


def _folded(differences: Array) -> Array:
    """Small ones of both signs as small numbers without: 0, -1, 1, -2 become 0, 1, 2, 3."""
    signed = differences.view(f"<i{differences.itemsize}")
    found: Array = (differences << 1) ^ (signed >> (8 * signed.itemsize - 1)).view(differences.dtype)
    return found


def _unfolded(folded: Array) -> Array:
    found: Array = (folded >> 1) ^ (0 - (folded & 1))
    return found


def _runs(data: bytes) -> list[tuple[int, int, int]]:
    """``(start, bytes, bytes of a word)`` of what lies side by side in words of one size: first the header."""
    entries, _ = strict_safetensors.unpack(data, most=MOST)
    sizes = sorted((one.dtype.itemsize for one in entries.values()), reverse=True)
    values = sum(len(one.raw) for one in entries.values())
    start = len(data) - values
    found = [(0, start, 1)]
    for word, _ in groupby(sizes):
        size = sum(len(one.raw) for one in entries.values() if one.dtype.itemsize == word)
        found.append((start, size, word))
        start += size
    return found


def _blocks(runs: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """``(start, words, bytes of a word)``, block by block."""
    for start, size, word in runs:
        for done in range(0, size // word, _BLOCK):
            yield start + done * word, min(_BLOCK, size // word - done), word


def _words(data: bytes, start: int, count: int, word: int) -> Array:
    return np.frombuffer(data, _WORDS[word], count, start)
