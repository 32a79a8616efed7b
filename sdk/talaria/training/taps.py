"""What a module makes of a batch at its taps, in torch: the places where an objective looks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import Module
from torch.nn.utils.rnn import PackedSequence

from talaria.errors import ModelError
from talaria.model.called import by_place
from talaria.model.inside import base_of
from talaria.training.objectives import INTO, LOGITS, MEAN, of_none, of_parts, uncalled, unknown

LAST = (
    nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.Linear, nn.LayerNorm,
    nn.RMSNorm, nn.Embedding,
)  # fmt: skip
"""Layers that give the channels of a sequence last."""
FIRST = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.GroupNorm, nn.InstanceNorm1d, nn.MaxPool1d, nn.AvgPool1d)
"""And first."""


def called(module: Module, name: str) -> str:
    """The dotted name of the module that answers for ``name``: of a list of modules, which nobody calls, the last."""
    layers = dict(module.named_modules())
    while isinstance(layers.get(name), nn.ModuleList | nn.ModuleDict):
        inside = [one for one, _ in layers[name].named_children()]
        if not inside:
            break
        name = f"{name}.{inside[-1]}"
    return name


def channels_last(module: Module) -> bool:
    """Whether a map (N, ., .) that leaves ``module`` is a sequence (N, steps, channels): so tells the module itself, or
    else its last layer that says either."""
    told = (base_of(layer) for layer in (module, *reversed(list(module.modules()))))
    return isinstance(next((one for one in told if isinstance(one, (*LAST, *FIRST))), None), LAST)


def _says_second(layer: Module) -> bool | None:
    """Whether a layer reads and gives sequences before the batch, (steps, N, channels); None where it does not say."""
    own = base_of(layer)
    if isinstance(own, nn.TransformerEncoder):
        own = own.layers[0]
    first = getattr(own.self_attn if isinstance(own, nn.TransformerEncoderLayer) else own, "batch_first", None)
    return None if first is None else not first


class Taps:
    """While open, :meth:`seen` has what the module last had at each tap, in the order of ``names``
    (:data:`talaria.training.objectives.LOGITS` and what follows there)."""

    def __init__(self, module: Module, names: Sequence[str]) -> None:
        self.module, self.names = module, tuple(names)
        self._found: dict[str, Tensor] = {}
        self._second: dict[str, bool] = {}

    def __enter__(self) -> Taps:
        self._hooks = [self.module.register_forward_pre_hook(self._beginning)]
        for tap in self.names:
            name = tap.partition(" ")[2]
            if tap != LOGITS and not tap.startswith((INTO, MEAN)):
                raise unknown(tap)
            try:
                layer = self.module.get_submodule(called(self.module, name) if tap.startswith(MEAN) else name)
            except AttributeError:
                raise unknown(tap) from None
            if tap.startswith(INTO):
                self._hooks.append(layer.register_forward_pre_hook(self._entering(tap), with_kwargs=True))
            else:
                if (second := _says_second(layer)) is not None:
                    self._second[tap] = second
                last = tap.startswith(MEAN) and channels_last(layer)
                self._hooks.append(layer.register_forward_hook(self._leaving(tap, last)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def seen(self) -> dict[str, Tensor]:
        """What the last pass had at each tap. Raises :class:`~talaria.errors.ModelError` for a layer without a part in
        it."""
        for tap in self.names:
            if tap not in self._found:
                raise uncalled(tap)
        return {tap: self._found[tap] for tap in self.names}

    def _beginning(self, _module: Module, given: tuple[Tensor, ...]) -> None:
        self._samples = len(given[0])

    def _entering(self, tap: str):  # type: ignore[no-untyped-def]
        def keep(layer: Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            (x, *_), _ = by_place(layer, given, named)
            if x.dim() < 3 and len(x) != self._samples:
                raise of_parts(tap)
            self._found[tap] = x

        return keep

    def _leaving(self, tap: str, last: bool):  # type: ignore[no-untyped-def]
        def keep(_module: Module, _given: object, given: Tensor | tuple[Tensor, ...]) -> None:
            out = given[0] if isinstance(given, tuple) else given  # of a recurrent layer all states
            if isinstance(out, PackedSequence):
                raise ModelError(
                    f"model: layer {tap.partition(' ')[2]!r} gives a packed sequence, of which no mean is taken; name "
                    "a layer behind it, or give it whole sequences"
                )
            if tap.startswith(MEAN) and out.dim() > 2:
                if last and out.dim() == 3:
                    out = out.mean(0 if self._is_second(tap, out) else 1)
                else:
                    out = out.flatten(2).mean(2)
            if tap.startswith(MEAN) and len(out) > self._samples:  # of each part of a sample one
                out = out.reshape(self._samples, -1, *out.shape[1:]).mean(1)
            if tap.startswith(MEAN) and len(out) != self._samples:
                raise of_none(tap)
            self._found[tap] = out

        return keep

    def _is_second(self, tap: str, out: Tensor) -> bool:
        """Whether the batch stands second in a sequence that leaves a layer: so says the layer, or else the sizes, of
        this pass or of one before."""
        first, second = len(out) % self._samples == 0, out.shape[1] == self._samples
        if tap not in self._second and first != second:
            self._second[tap] = second
        if tap not in self._second and second and any(map(_says_second, self.module.modules())):
            raise ModelError(
                f"model: layer {tap.partition(' ')[2]!r} gives {tuple(out.shape)} for {self._samples} samples: either "
                "may be the batch; take another batch size"
            )
        return self._second.get(tap, False)
