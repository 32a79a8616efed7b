"""What a device runs: both branches and the gate as one model."""

import numpy as np

from talaria.algorithms.thorki.fused_graph import fused_graph
from talaria.algorithms.thorki.fusion_gate import ConstantGate, Gate, mixed, named
from talaria.model.weights import Model, Served
from talaria.programs.graph import Graph
from talaria.tensors import Array, prefixed


def fused(general: Model, small: Model, gate: Gate, shift: Array | None = None) -> Model:
    """``(1 − α) (general + shift) + α small``, with α by ``gate``; ``shift`` (C,) is left out where there is none."""
    if not isinstance(general, Served):
        from talaria.algorithms.thorki.module import Fused

        return Fused(general, small, gate, shift).requires_grad_(False).eval()
    learned = named(gate)

    def logits(x: Array) -> Array:
        z_g, z_p = general.logits(x), small.logits(x)
        z_g = z_g if shift is None else z_g + shift
        return np.asarray(mixed(z_g, z_p, gate(z_g, z_p)), np.float32)

    def graph() -> Graph:
        return fused_graph(general, small, gate, shift)

    whole = None if general.graph is None or small.graph is None else graph
    state = {} if shift is None else {"shift": shift}
    state |= {**prefixed(general.state, "general."), **prefixed(small.state, "small."), **prefixed(learned, "gate.")}
    parameters = {f"general.{key}" for key in general.parameters} | {f"small.{key}" for key in small.parameters}
    of_gate = () if isinstance(gate, ConstantGate) else prefixed(learned, "gate.")
    return Served(state, logits, frozenset(parameters.union(of_gate)), whole, general.parts)
