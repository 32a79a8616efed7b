"""Features at several depths of any model, their class means, and HEART-PFL's alignment with them in two parts."""

from collections.abc import Sequence
from copy import deepcopy
from types import TracebackType

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F

from talaria.errors import ModelError
from talaria.model.split import Split
from talaria.model.state import beside, load
from talaria.tensors import Tensors
from talaria.training.engine import Objective
from talaria.types import Samples, Task

DEPTHS = 4
RESNET = tuple(f"layer{k}" for k in range(1, DEPTHS + 1))


def stages(model: Module, split: Split) -> tuple[str, ...]:
    """The dotted names of up to four modules whose outputs are the features, from input to output.

    A ResNet's ``layer1`` to ``layer4``. In any other model: the modules with weights of the body on one level, the
    first level down the tree with at least two of them, cut into up to four equal runs; the last module of each run.
    Raises :class:`~talaria.errors.ModelError` where the body has no such module.
    """
    body = split.parameters("body", "adapters")
    if all(any(k.startswith(f"{name}.") for k in body) for name in RESNET):
        return RESNET
    found = _children(model, "", body)
    while len(found) == 1 and len(deeper := _children(model.get_submodule(found[0]), found[0] + ".", body)) > 0:
        found = deeper
    if not found:
        raise ModelError("heart_pfl: the body has no module with weights, so there are no features to align")
    runs = min(DEPTHS, len(found))
    return tuple(found[(k + 1) * len(found) // runs - 1] for k in range(runs))


def _children(model: Module, prefix: str, body: Sequence[str]) -> list[str]:
    return [prefix + n for n, _ in model.named_children() if any(k.startswith(f"{prefix}{n}.") for k in body)]


class Tap:
    """While open, holds what each named module last put out, averaged over its places: (N, channels) each."""

    def __init__(self, module: Module, names: Sequence[str]) -> None:
        self.layers = [module.get_submodule(name) for name in names]
        self.features: list[Tensor] = []

    def __enter__(self) -> "Tap":
        self.features = [torch.empty(0)] * len(self.layers)
        self.hooks = [layer.register_forward_hook(self._keeper(k)) for k, layer in enumerate(self.layers)]
        return self

    def _keeper(self, k: int):  # type: ignore[no-untyped-def]
        def keep(_module: Module, _args: object, out: Tensor) -> None:
            self.features[k] = pooled(out)

        return keep

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        for hook in self.hooks:
            hook.remove()


def pooled(out: Tensor) -> Tensor:
    """The mean over all dimensions behind the channels: (N, C, ...) to (N, C)."""
    return out if out.dim() == 2 else out.flatten(2).mean(2)


def features(module: Module, names: Sequence[str], x: Tensor, batch: int = 256) -> list[Tensor]:
    """Per stage the features (N, channels) of ``x``, without gradient, in the module's present modes."""
    parts: list[list[Tensor]] = [[] for _ in names]
    with torch.no_grad(), Tap(module, names) as tap:
        for piece in torch.split(x, batch):
            module(piece)
            for part, f in zip(parts, tap.features, strict=True):
                part.append(f)
    return [torch.cat(part) for part in parts]


def class_means(f: Tensor, y: Tensor, classes: int) -> Tensor:
    """(classes, d): the mean of ``f`` (N, d) per label; rows of absent classes are 0 and never looked up."""
    total = torch.zeros(classes, f.shape[1], dtype=f.dtype, device=f.device).index_add_(0, y, f)
    count = torch.bincount(y, minlength=classes).clamp(min=1).to(f.dtype)
    return total / count[:, None]


def prototypes(module: Module, names: Sequence[str], samples: Samples, classes: int) -> list[Tensor]:
    """Per stage, the class means (classes, d) in the module's present modes (eval, for plain group means)."""
    x, y = beside(module, samples.x), beside(module, samples.y)
    return [class_means(f, y, classes) for f in features(module, names, x)]


def alignment(own: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
    """L_HDA = 1/(L B) Σ_b [Σ_early (1 − cos(f, p)) + Σ_deep mean_d (f − p)²] over L stages of features (B, d).

    The first half of the stages (rounded down) is aligned by direction, the rest by value.
    """
    early = len(own) // 2
    loss = torch.zeros((), dtype=own[0].dtype, device=own[0].device)
    for k, (f, p) in enumerate(zip(own, wanted, strict=True)):
        if k < early:
            loss = loss + (1 - F.cosine_similarity(f, p, dim=1)).mean()
        else:
            loss = loss + (f - p).square().mean(1).mean()
    return loss / len(own)


def aligned(task: Task, state: Tensors, weight: float, variant: str) -> tuple[Objective, Tap]:
    """CE + ``weight`` · L_HDA for the personal model beside the global ``state``, and the tap that must be open.

    Variant A draws the personal features to the class means of the global model, taken once; B compares the global
    model's features with the class means of the personal ones within the batch.
    """
    at, smoothing = stages(task.model, task.split), task.recipe.smoothing
    module, tap = load(task.model, state).eval(), Tap(task.model, at)
    fixed = prototypes(module, at, task.train, task.classes) if variant == "A" and weight > 0 else []
    other = deepcopy(module).requires_grad_(False) if variant == "B" and weight > 0 else None

    def objective(module: Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(module(x), y, label_smoothing=smoothing)
        if weight == 0:
            return loss
        if other is None:
            return loss + weight * alignment(tap.features, [p[y] for p in fixed])
        means = [class_means(f, y, task.classes)[y] for f in tap.features]
        return loss + weight * alignment(features(other, at, x), means)

    return objective, tap
