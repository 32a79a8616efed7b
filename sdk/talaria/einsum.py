"""Equations of sums of products (``torch.einsum``, ONNX's ``Einsum``)."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters


def named(equation: str, ranks: Sequence[int]) -> str:
    """``equation`` with a letter for each dimension that its dots stand for, these aligned at the end; ``ranks`` are
    how many dimensions each tensor has. Raises ValueError where there are more or fewer tensors.

    >>> named("...i, ij -> ...j", [3, 2])
    'abi,ij->abj'
    """
    left, arrow, out = equation.replace(" ", "").partition("->")
    own = list(zip(left.split(","), ranks, strict=True))
    hidden = [rank - len(names) + len("...") if "..." in names else 0 for names, rank in own]
    letters = "".join(one for one in ascii_letters if one not in equation)[: max(hidden)]
    spelled = [names.replace("...", letters[len(letters) - n :]) for (names, _), n in zip(own, hidden, strict=True)]
    return ",".join(spelled) + arrow + out.replace("...", letters)
