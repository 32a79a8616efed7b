"""From a torch module to one self-contained ONNX file, through torch's current exporter."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import Embedding, Module, Parameter
from torch.nn.utils import parametrize

from talaria.errors import ConfigError, DataError, ModelError
from talaria.foreign import shown
from talaria.model import answers
from talaria.model.called import by_place
from talaria.model.cloning import clone
from talaria.model.dependency_groups import TRACE_ERRORS
from talaria.model.merging import merge
from talaria.planning.refusals import short
from talaria.seeds import ALONE
from talaria_export.bundle.preprocess import Preprocessing
from talaria_export.convert.names import INPUT, OUTPUT
from talaria_export.convert.quiet import quiet
from talaria_export.convert.spoken import spoken

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET = 20
"""Version of the ONNX operators that exported files use."""
_NOISY = ("torch.onnx", "torch.export", "torch.fx.experimental.symbolic_shapes", "onnxscript", "onnx_ir")


def export_onnx(
    model: Module,
    example: Tensor,
    path: str | os.PathLike[str] | None = None,
    *,
    plain: bool = False,
    steps: Preprocessing | None = None,
) -> bytes:
    """The model as an ONNX file with the weights inside; also written to ``path`` where one is given.

    ``example`` is a float32 batch (N, ...) of any size: the file takes any batch size. It has one input, ``input``,
    and one output, ``logits`` (N, classes). Adapters are merged and BatchNorm is folded where that is exact, and 1D
    convolutions become 2D ones of height 1; ``plain`` leaves all as torch exports it. ``steps`` are done inside the
    graph, before the model: the file then takes raw numbers, or a recording. The caller's module is not touched.

    Raises :class:`~talaria.errors.ModelError` on a module that torch cannot convert, or that does not map a batch to
    (N, classes) or (N, steps, classes), and :class:`~talaria.errors.DataError` on an example that is not a float32
    batch.
    """
    from talaria_export.convert.passes.rewrites import file_of

    proto = convert(model, example, plain=plain)
    if steps is not None:
        from talaria_export.convert.passes.preprocessing import prefixed

        if steps.shape != tuple(example.shape[1:]):
            raise ConfigError(f"steps: made for inputs of shape {steps.shape}, the example has {example.shape[1:]}")
        proto = prefixed(proto, steps)
    data = file_of(proto)
    if path is not None:
        from talaria_export.bundle.bundle import save

        save(path, data)
    return data


def convert(model: Module, example: Tensor, *, plain: bool = False) -> ModelProto:
    """:func:`export_onnx`, as a message that can be rewritten."""
    import onnx

    from talaria_export.convert.passes import nchwc, rewrites

    own, batch = prepared(model, example, keep_adapters=plain)
    proto = _exported(own, batch)
    if not plain:
        rewrites.fold_batchnorm(proto)
        rewrites.lift_1d(proto)
    rewrites.strip(proto)
    if not plain:
        nchwc.keep_blocked(proto)
        rewrites.drop_unused(proto)
    _check_form(proto)
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as problem:
        raise ModelError(f"model: the exported file is not valid ONNX ({problem}); simplify its forward") from None
    return proto


def prepared(model: Module, example: Tensor, *, keep_adapters: bool = False) -> tuple[Module, Tensor]:
    """A copy of the model, merged and in eval mode, and a batch of two to trace it with."""
    if not isinstance(example, torch.Tensor):
        raise DataError(f"example: need a tensor, got {type(example).__name__}; write torch.as_tensor(example)")
    if example.dtype != torch.float32 or example.dim() < 2 or len(example) == 0:
        raise DataError(
            f"example: need a float32 batch (N, ...), got {example.dtype} of shape {tuple(example.shape)}; "
            "convert it with .float(), and add the batch dimension with x[None]"
        )
    own = _bounded(_fixed(_copied(model)))
    if not keep_adapters:
        own = _merged(own)
    batch = example.detach().cpu()[:2]
    if len(batch) == 1:  # a batch of one would fix the size of the batch
        batch = batch.repeat(2, *[1] * (batch.dim() - 1))
    try:
        with torch.no_grad():
            answer = own(batch)
    except TRACE_ERRORS as error:
        raise ModelError(
            f"model: does not take a float32 example of shape {tuple(example.shape)} ({short(error)}); "
            "give what it reads, and a model of float32 weights (model.float())"
        ) from None
    if not isinstance(answer, Tensor) or answer.dim() not in (2, 3) or len(answer) != len(batch):
        found = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
        raise ModelError(
            f"model: gives {found} for a batch of {len(batch)}; it must give logits (N, classes) or (N, steps, classes)"
        )
    return own, batch


def _copied(model: Module) -> Module:
    if not isinstance(model, Module):
        raise ModelError(f"model={shown(model)} must be a torch module")
    try:
        return clone(model).cpu().eval().requires_grad_(False)
    except (RuntimeError, ValueError):
        answers.require_own_weights(model, "model")
        raise


def _fixed(model: Module) -> Module:
    """``model`` with the weights that torch.nn.utils.parametrize computes in each call as they are now: ONNX does not
    have all that they are computed by, as orthogonal's matrix exponential."""
    for layer in [one for one in model.modules() if parametrize.is_parametrized(one)]:
        with torch.no_grad():
            made = {name: getattr(layer, name).clone() for name in cast(Any, layer).parametrizations}
        del layer.parametrizations
        layer.__class__ = type(layer).__mro__[1]  # torch's own way back would change the class of the copied module too
        for name, value in made.items():
            setattr(layer, name, Parameter(value, requires_grad=False))
    return model


def _bounded(model: Module) -> Module:
    """``model``, whose embeddings look a token below 0 up where there is no entry: ONNX counts from a table's end, and
    would answer where torch refuses."""
    for layer in model.modules():
        if isinstance(layer, Embedding):
            layer.register_forward_pre_hook(_beyond, with_kwargs=True)
    return model


def _beyond(layer: Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> tuple[tuple[Tensor], dict[str, Any]]:
    ((places,), _) = by_place(layer, given, named)
    return (torch.where(places < 0, cast(Embedding, layer).num_embeddings, places),), {}


def _merged(model: Module) -> Module:
    try:
        return merge(model).eval()
    except ModelError:  # an adapter with a ReLU inside, say: it stays a part of the graph
        return model


def _exported(model: Module, batch: Tensor) -> ModelProto:
    from torch.onnx import OnnxExporterError

    size: Any = {0: torch.export.Dim("batch")}
    first = next(iter(inspect.signature(model.forward).parameters.values()))
    dynamic = ((size,),) if first.kind is first.VAR_POSITIONAL else (size,)
    try:
        with ALONE, _quietly(), spoken(model):
            _build_translations_once()
            take_a_gradient()
            program = torch.onnx.export(
                model,
                (batch,),
                dynamo=True,
                verbose=False,
                opset_version=OPSET,
                dynamic_shapes=dynamic,
                input_names=[INPUT],
                output_names=[OUTPUT],
            )
    except OnnxExporterError as problem:
        cause = problem.__cause__ or problem
        reason = " ".join(str(cause).split())[:300]
        mend = "avoid data-dependent Python control flow in forward"
        if reason.startswith("Error when translating node"):
            mend = "ONNX has no operator for that; use another layer or function there"
        raise ModelError(f"model: torch cannot convert {type(model).__name__} to ONNX ({reason}); {mend}") from None
    if program is None:
        raise ModelError(f"model: torch gave no ONNX program for {type(model).__name__}; simplify its forward")
    proto: ModelProto = program.model_proto
    return proto


def take_a_gradient() -> None:
    """With the first gradient of a process torch starts a thread for each device beside the CPU, and whoever exports
    has it see devices that are not there: processes that are forked later, such as the workers of a simulation, could
    then take none. So one is taken before anything is exported."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]


def _build_translations_once() -> None:
    """torch builds its table of some thousand translations anew for each export, which is half of a small one's time:
    keep the first, and give each export a copy, which it may add to. Where torch has moved the table, nothing changes.
    """
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        build = ONNXRegistry.from_torchlib
    except (ImportError, AttributeError):
        return
    if getattr(build, "of_talaria", False):
        return
    kept = functools.cache(build)

    def from_torchlib(*args: Any, **options: Any) -> ONNXRegistry:
        table = copy.copy(kept(*args, **options))
        table.functions = {operator: list(found) for operator, found in table.functions.items()}
        return table

    from_torchlib.of_talaria = True  # type: ignore[attr-defined]
    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)  # type: ignore[method-assign]


def _check_form(proto: ModelProto) -> None:
    """The exporter may leave another opset or an outside file behind, and only says so in its log."""
    opsets = {entry.domain: entry.version for entry in proto.opset_import}
    if opsets.get("", opsets.get("ai.onnx")) != OPSET:
        raise ModelError(f"model: torch exported opset {opsets} where {OPSET} was asked for; use torch 2.11 or later")
    if [v.name for v in proto.graph.input] != [INPUT] or [v.name for v in proto.graph.output] != [OUTPUT]:
        raise ModelError("model: must have one input and one output; wrap it in a module that takes one tensor")
    sizes = [value.type.tensor_type.shape.dim[0] for value in [*proto.graph.input, *proto.graph.output]]
    if any(size.HasField("dim_value") for size in sizes):
        raise ModelError(
            "model: its forward fixes the size of the batch; let it take any (x.shape[0], without int() around it)"
        )
    if any(tensor.external_data for tensor in proto.graph.initializer) or proto.functions:
        raise ModelError("model: torch left weights or functions outside of the graph; use torch 2.11 or later")


@contextmanager
def _quietly() -> Iterator[None]:
    """The exporter logs and warns about its own inner workings; none of it concerns the caller."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
