"""The term ∇²f(w) · g of the form ``hf``, by central differences of gradients."""

import math

import numpy as np

from talaria.algorithms.perfedavg.triples import Batch
from talaria.tensors import Tensors
from talaria.training.interface import LayerStreams, Walk


def differenced(walk: Walk, batch: Batch, along: Tensors, noise: LayerStreams, delta: float) -> Tensors:
    """∇²f(w) · ``along``: (∇f(w+δg) − ∇f(w−δg)) / 2δ, where δg has the length ``delta``; nothing where ``along`` is 0.
    Both sides see the same dropout, else its noise would be all."""
    length = math.sqrt(sum(float(np.square(v, dtype=np.float64).sum()) for v in along.values()))
    if length == 0:
        return {}
    reach, again = delta / length, noise.copy()
    up = walk.gradient(*batch, at=moved(walk.weights, along, reach), draws=noise)
    down = walk.gradient(*batch, at=moved(walk.weights, along, -reach), draws=again)
    return {k: (up[k] - down[k]) / (2 * reach) for k in up.keys() & down.keys()}


def moved(w: Tensors, along: Tensors, by: float) -> Tensors:
    """w + by · along."""
    return {k: np.asarray(v + by * along[k], v.dtype) if k in along else v for k, v in w.items()}
