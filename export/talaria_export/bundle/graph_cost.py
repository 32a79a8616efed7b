"""The cost of a graph (values held, products computed), worked out from its shapes before a runtime allocates
anything.

Only operators that `talaria export` and ONNX Runtime's optimizer write are known (`operators/`); every other one is
refused. A shape that the graph computes (for windows of a recording) is worked out from its few numbers; one that
depends on the values of an input is refused. Needs nothing but Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from talaria.errors import BundleError
from talaria_export.bundle.operators import arithmetic, layout, windows
from talaria_export.bundle.operators.rule import Node, Unknown, Value

MOST_ELEMENTS = 1 << 27
"""Numbers that all values of a graph may hold together, for one input."""
MOST_PRODUCTS = 1 << 35
"""Products that a graph may compute for one input."""
_RULES = {**arithmetic.RULES, **windows.RULES, **layout.RULES}


def measure(nodes: Sequence[Node], known: Mapping[str, Value], inputs: int = 1) -> tuple[int, int]:
    """``(elements, products)`` of a graph whose input and weights are ``known``; ``inputs`` scales the limits.

    Raises :class:`~talaria.errors.BundleError`, without the name of the file, where they are beyond the limits, an
    operator has no place in a bundle, or a shape cannot be told.
    """
    values, elements, products = dict(known), 0, 0
    for node in nodes:
        rule = _RULES.get((node.domain.removeprefix("ai.onnx"), node.kind))
        if rule is None:
            raise BundleError(f"uses the operator {node.kind!r}, which no bundle needs")
        try:
            given = [values[name] if name else Value(()) for name in node.inputs]
            found, work = rule(node, given)
        except Unknown as why:
            raise BundleError(f"{node.kind!r} makes a size that cannot be told ({why})") from None
        except (KeyError, IndexError, ValueError, TypeError, OverflowError, ZeroDivisionError, AttributeError) as odd:
            raise BundleError(f"{node.kind!r} does not fit what it is given ({type(odd).__name__}: {odd})") from None
        for name, value in zip(node.outputs, [*found, *[Value(())] * len(node.outputs)], strict=False):
            if len(value.shape) > 8 or any(size < 0 for size in value.shape):
                raise BundleError(f"{node.kind!r} makes a tensor of shape {value.shape}")
            elements += value.count
            values[name] = value
        products += max(work, sum(value.count for value in found))
        if elements > MOST_ELEMENTS * inputs or products > MOST_PRODUCTS * inputs:
            raise BundleError(
                f"makes {elements} numbers with {products} products for {inputs} inputs, more than "
                f"{MOST_ELEMENTS} and {MOST_PRODUCTS} each"
            )
    return elements, products
