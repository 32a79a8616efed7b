"""How far apart two results of arithmetic may lie: so many roundings as operations lead to them, not so many digits.

An operation rounds its result to the nearest number of its type. Another processor adds in another order, joins a
product with a sum, and has another ``exp``; each step may then round to the neighbour. So two right results of n
operations lie at most about n roundings apart, each as large as ``eps`` times the numbers at work: a mean of n rows n,
a layer the length of its sums, a network the sum over its layers. An absolute bound says nothing of the kind: 1e-5 is a
hundred roundings beside 1.0 in float32 and less than one beside 100.

Equal to the bit are only results of the same kernels, over the same shapes, on one machine, with one count of threads.
"""

import math

import numpy as np


def roundings(actual, expected, scale=None):
    """The largest distance between ``actual`` and ``expected``, in roundings of the coarser of their types.

    Tensors, arrays, numbers, and dicts of them (the worst entry counts; plain numbers are float64). One rounding is
    ``eps`` times ``scale``: the largest size among the expected numbers, unless what was added on the way was larger
    (sums that cancel) and is given. Not finite where the other is: infinitely many.
    """
    if isinstance(expected, dict):
        assert set(actual) == set(expected), set(actual) ^ set(expected)
        return max((roundings(actual[k], expected[k], scale) for k in expected), default=0.0)
    (a, fine), (b, coarse) = _values(actual), _values(expected)
    assert a.shape == b.shape or not a.ndim or not b.ndim, f"shapes {a.shape} and {b.shape}"
    eps = max(fine, coarse) or float(np.finfo(np.float32).eps)
    with np.errstate(invalid="ignore"):
        apart = float(np.where(a == b, 0.0, np.abs(a - b)).max(initial=0.0))
    if not apart:
        return 0.0
    unit = eps * float(np.abs(b if scale is None else _values(scale)[0]).max())
    return apart / unit if math.isfinite(apart) and 0 < unit < math.inf else math.inf


def _values(value):
    """Tensors, arrays and numbers as float64, and ``eps`` of the type that they had; 0 of whole numbers."""
    if hasattr(value, "detach"):
        import torch  # which a device does not have, where these tests run too

        value = value.detach()
        return value.double().numpy(), torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
    found = np.asarray(value)
    return found.astype(np.float64), float(np.finfo(found.dtype).eps) if found.dtype.kind == "f" else 0.0


def slack(values, operations):
    """How far ``operations`` roundings reach beside ``values``: what a bound on computed numbers must leave."""
    found, eps = _values(values)
    return operations * eps * float(np.abs(found).max())
