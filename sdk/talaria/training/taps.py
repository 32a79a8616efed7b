"""What a module makes of a batch at its taps, in torch: the places where an objective looks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Module

from talaria.training.engine import INTO, LOGITS, MEAN


class Taps:
    """While open, :meth:`seen` has what the module last had at each tap, in the order of ``names``
    (:data:`talaria.training.engine.LOGITS` and what follows there)."""

    def __init__(self, module: Module, names: Sequence[str]) -> None:
        self.module, self.names = module, tuple(names)
        self._found: dict[str, Tensor] = {}

    def __enter__(self) -> Taps:
        self._hooks = []
        for tap in self.names:
            layer = self.module if tap == LOGITS else self.module.get_submodule(tap.partition(" ")[2])
            if tap.startswith(INTO):
                self._hooks.append(layer.register_forward_pre_hook(self._entering(tap)))
            else:
                self._hooks.append(layer.register_forward_hook(self._leaving(tap)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def seen(self) -> dict[str, Tensor]:
        """What the last pass had at each tap."""
        return {tap: self._found[tap] for tap in self.names}

    def _entering(self, tap: str):  # type: ignore[no-untyped-def]
        def keep(_module: Module, given: tuple[Tensor, ...]) -> None:
            self._found[tap] = given[0]

        return keep

    def _leaving(self, tap: str):  # type: ignore[no-untyped-def]
        def keep(_module: Module, _given: object, given: Tensor | tuple[Tensor, ...]) -> None:
            out = given[0] if isinstance(given, tuple) else given  # of a recurrent layer all states
            averaged = tap.startswith(MEAN) and out.dim() > 2
            self._found[tap] = out.flatten(2).mean(2) if averaged else out

        return keep
