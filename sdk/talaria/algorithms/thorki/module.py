"""The served model in torch: both branches and the gate as one network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn import functional as F

from talaria.algorithms.thorki.fusion_gate import HIDDEN, ConstantGate, Gate, named
from talaria.model.state import tensor_of
from talaria.tensors import Array


class Constant(Module):
    """The same α for every sample."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.register_buffer("alpha", torch.tensor(alpha))

    def forward(self, general: Tensor, small: Tensor) -> Tensor:
        """α, a scalar that broadcasts to (N, 1); the logits (N, C) are not looked at."""
        alpha: Tensor = self.get_buffer("alpha")
        return alpha


class PerSample(Module):
    """A :class:`~talaria.algorithms.thorki.fusion_gate.SampleGate`."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(2 * classes + 3, HIDDEN)
        self.out = nn.Linear(HIDDEN, 1)

    def forward(self, general: Tensor, small: Tensor) -> Tensor:
        """α (N, 1) for the two branches' logits (N, C)."""
        logs = [F.log_softmax(z, 1) for z in (general, small)]
        probs = [log.exp() for log in logs]
        entropies = [-(p * log).sum(1, keepdim=True) for p, log in zip(probs, logs, strict=True)]
        gap = probs[0].amax(1, keepdim=True) - probs[1].amax(1, keepdim=True)
        hidden = torch.relu(self.hidden(torch.cat([*probs, gap, *entropies], 1)))
        alpha: Tensor = torch.sigmoid(self.out(hidden))
        return alpha


class Fused(Module):
    """Both branches and the gate as one module: what is served and exported. ``shift`` (C,) is added to the general
    branch's logits; none by default."""

    def __init__(self, general: Module, small: Module, gate: Gate, shift: Array | None = None) -> None:
        super().__init__()
        self.general, self.small, self.gate = general, small, module_of(gate)
        self.register_buffer("shift", None if shift is None else tensor_of(shift))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C)."""
        general, small = self.general(x), self.small(x)
        if self.shift is not None:
            general = general + self.shift
        alpha = self.gate(general, small)
        mixture: Tensor = (1 - alpha) * general + alpha * small
        return mixture


def module_of(gate: Gate) -> Module:
    """The gate as a module."""
    if isinstance(gate, ConstantGate):
        return Constant(gate.alpha)
    made = PerSample((gate.hidden.shape[1] - 3) // 2)
    made.load_state_dict({name: tensor_of(value) for name, value in named(gate).items()})
    return made
