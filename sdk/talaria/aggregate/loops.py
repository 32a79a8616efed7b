"""Which loops sum rows of a model: :mod:`talaria.aggregate.row_sums` or, where that pays, the compiled ones."""

from __future__ import annotations

from importlib.util import find_spec

from talaria.aggregate.row_sums import Plain, RowSums

_PAYS = 1 << 20
"""Values of a model from which the compiled loops are worth their import: .4 s of CPU and some 80 MiB, once a
process (and their compilation once an installation)."""


def loops_for(values: int) -> RowSums:
    """The loops for a model of so many values: compiled where that pays and numba is there (``talaria[fast]``)."""
    if values >= _PAYS and find_spec("numba") is not None:
        from talaria.aggregate.compiled import Compiled

        return Compiled()
    return Plain()
