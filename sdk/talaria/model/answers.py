"""What a network of somebody else's must give: one number for each output, of each sample or of each of its steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from talaria import seeds
from talaria.errors import ModelError, some_of
from talaria.model.cloning import clone
from talaria.model.dependency_groups import TRACE_ERRORS

ROUNDING = 1e-5
"""How far from 1 shares may add up."""


def require(module: Module, example: Tensor, outputs: int, what: str) -> None:
    """Raise :class:`ModelError`, beginning with ``what``, unless ``module`` maps ``example`` (N, ...) to one tensor
    (N, outputs), or (N, steps, outputs). ``module`` stays as it is. Warns of answers that are shares already: a loss
    and a predictor take a softmax of them; and of frozen parameters: algorithm and recipe say what learns."""
    shape = tuple(example.shape[1:])
    with _asked(module) as twin:
        try:
            found = twin(example)
        except TRACE_ERRORS as error:
            said = " ".join(str(error).split())[:200] or "no word"
            raise ModelError(
                f"{what}: cannot read samples of shape {shape} ({type(error).__name__}: {said}); correct the model, or "
                "cut and order the samples as it expects (input_shape, layout)"
            ) from error
    if not isinstance(found, Tensor):
        raise ModelError(
            f"{what}: its forward gives a {type(found).__name__}; give one tensor (N, {outputs}), such as the "
            "answer of one head"
        )
    if found.ndim not in (2, 3) or len(found) != len(example) or found.shape[-1] != outputs:
        turned = found.ndim == 3 and found.shape[:2] == (len(example), outputs)
        mend = ": end its forward with .transpose(1, 2), as the outputs of a convolution stand before its steps"
        raise ModelError(
            f"{what}: it gives {tuple(found.shape)} for {len(example)} samples; it must give (N, {outputs}), one "
            f"number for each of {outputs} outputs, or (N, steps, {outputs}) for a label of each step"
            + (mend if turned else "")
        )
    warn_of_shares(found, what)
    warn_of_frozen(module, what)


def warn_of_shares(found: Tensor, what: str) -> None:
    """Warn, beginning with ``what``, where what a network gives, ``found`` (..., classes), are shares already."""
    if found.shape[-1] > 1 and bool((found >= 0).all()) and bool(((found.sum(-1) - 1).abs() < ROUNDING).all()):
        warnings.warn(
            f"{what}: what it gives adds up to 1, as behind a Softmax. Classes are learned from logits, and the "
            "predictor makes shares of them: it learns slowly so, and its shares are too even. End it with its last "
            "Linear layer",
            stacklevel=3,
        )


def warn_of_frozen(module: Module, what: str) -> None:
    """Warn, beginning with ``what``, of parameters of ``module`` that it says are frozen."""
    if still := [name for name, one in module.named_parameters() if not one.requires_grad]:
        layer = still[0].rpartition(".")[0] or still[0]
        warnings.warn(
            f"{what}: requires_grad=False of {some_of(still, 4)} is not looked at, for algorithm and recipe say what "
            f"learns; to keep a layer as it is, freeze it in the recipe (freeze={layer})",
            stacklevel=3,
        )


def require_form(module: Module, example: Tensor, form: Sequence[str], what: str) -> None:
    """Raise :class:`ModelError`, beginning with ``what``, unless what ``module`` gives of ``example`` (N, ...) has the
    dimensions that ``form`` names."""
    with _asked(module) as twin:
        found = twin(example)
    if found.ndim == len(form):
        return
    mend = "average what it gives over its steps, or learn task='per_step'"
    if found.ndim < len(form):
        mend = "end it with a Linear layer that reads each step, or choose such a model"
    raise ModelError(f"{what} takes ({', '.join(form)}), but the model gives {tuple(found.shape)}; {mend}")


def require_own_weights(module: Module, what: str) -> None:
    """Raise :class:`ModelError`, beginning with ``what``, where a hook makes a layer's weights anew before each call:
    such a module cannot be copied; where a layer has no weights before it is called; for TorchScript's, which takes no
    hooks; and for BatchNorm whose answer for a sample hangs on those beside it."""
    for name, one in module.named_modules():
        if isinstance(one, torch.jit.ScriptModule):
            raise ModelError(
                f"{what}: {name or 'it'} is a module of TorchScript, whose pass cannot be followed; give the module "
                "that torch.jit was given"
            )
        if isinstance(one, _BatchNorm) and not one.track_running_stats:
            raise ModelError(
                f"{what}: {name or 'it'} keeps no running mean, so that what is said of a sample hangs on those beside "
                "it; give it track_running_stats=True, or use GroupNorm or InstanceNorm"
            )
        if any(map(is_lazy, one.parameters(recurse=False))):
            kind = type(one).__name__
            raise ModelError(
                f"{what}: {name or 'it'} is a {kind}, whose weights have no shape before it is called; make it a "
                f"{kind.removeprefix('Lazy')} with its sizes, or call the model once on an example"
            )
        kinds = {type(hook).__name__ for hook in one._forward_pre_hooks.values()}
        if found := kinds & {"WeightNorm", "SpectralNorm"}:
            new = "weight_norm" if "WeightNorm" in found else "spectral_norm"
            raise ModelError(
                f"{what}: torch.nn.utils.{new}, which torch gives up, makes the weights of {name or 'it'} anew in each "
                f"call; use torch.nn.utils.parametrizations.{new}"
            )


def last_linear(module: Module, example: Tensor) -> str | None:
    """The dotted name of the linear layer that answers last for ``example``; None where none does, or where
    ``example`` cannot be read."""
    calls: list[str] = []
    with _asked(module) as twin:
        for name, layer in twin.named_modules():
            if isinstance(layer, nn.Linear) and name:
                layer.register_forward_hook(lambda *_, name=name: calls.append(name))
        try:
            twin(example)
        except TRACE_ERRORS:
            return None
    return calls[-1] if calls else None


def last_convolution(module: Module, outputs: int) -> str | None:
    """The dotted name of the last convolution with as many channels as ``outputs``, in which a fully convolutional
    network ends: its answers are averaged over maps, or stand for each step. None where there is none."""
    for name, one in reversed([*module.named_modules()]):
        if isinstance(one, nn.Conv1d | nn.Conv2d) and name and one.out_channels == outputs:
            return str(name)
    return None


@contextmanager
def _asked(module: Module) -> Iterator[Module]:
    """A copy in eval mode; torch's global generator stays untouched."""
    with torch.no_grad(), seeds.aside():
        yield clone(module).eval()
