"""Which rule a layer follows. What stands in neither table is refused by its name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import Module, RNNBase
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from talaria.model.inside import base_of
from talaria.model.weight_norm import is_spectral_normed, is_weight_normed
from talaria.programs.layers import (
    activation,
    attention,
    convolution,
    elementwise,
    embedding,
    glu,
    linear,
    normalization,
    padding,
    plumbing,
    pooling,
    recurrent,
    resizing,
    sample_norm,
    shares,
    swin,
)
from talaria.programs.layers.base import Rule
from talaria.programs.layers.parameters import Weight
from talaria.programs.layers.prelu import prelu
from talaria.programs.layers.sequence import on_maps, on_rows
from talaria.programs.layers.spectral_norm import spectral_normed
from talaria.programs.layers.spelled import channel_shuffle, local_response_norm, pairwise_distance
from talaria.programs.layers.weight_norm import weight_normed

LAYERS: Mapping[type[Module], Rule] = {
    **activation.RULES,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d), on_maps(convolution.convolution)),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d), on_maps(convolution.transposed)),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d), on_maps(normalization.batch_norm)),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d), on_maps(pooling.max_pool)),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d), on_maps(pooling.average_pool)),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d), on_maps(pooling.adaptive_average)),
    **dict.fromkeys((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d), on_maps(pooling.adaptive_max)),
    nn.Linear: on_rows(linear.linear),
    nn.Embedding: embedding.embedding,
    nn.LayerNorm: sample_norm.of_layer_norm,
    nn.RMSNorm: sample_norm.of_rms_norm,
    nn.GroupNorm: on_maps(normalization.group_norm),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d), on_maps(normalization.instance_norm)),
    **dict.fromkeys((nn.Softmax, nn.LogSoftmax, nn.Softmin), shares.of_module),
    nn.PReLU: prelu,
    nn.GLU: glu.of_module,
    nn.Flatten: plumbing.flatten,
    nn.Identity: plumbing.identity,
    nn.Dropout: plumbing.dropout,
    **dict.fromkeys((nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), plumbing.channel_dropout),
    **dict.fromkeys(padding.MODES, padding.of_module),
    **dict.fromkeys((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), on_maps(resizing.upsample)),
    nn.PixelShuffle: on_maps(resizing.shuffle),
}
"""By the exact type of a module."""

WEIGHING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d)
"""Layers whose weight may be computed by weight_norm or spectral_norm."""
PARTS: Mapping[type[Module], Mapping[str, Rule]] = {nn.MultiheadAttention: {"0": on_rows(attention.attention)}}
"""By the exact type of a module that gives several values: the rules of those that are known."""
RECURRENT = tuple(recurrent.CELLS)
"""Modules that give states."""


MENDS: Mapping[type[Module], str] = {
    nn.EmbeddingBag: "use Embedding, and a mean over the length",
    nn.Transformer: "use TransformerEncoder and TransformerDecoder",
}
"""What to use instead, where that is known."""
DRAWN = "draw in layers alone, nn.Dropout or torchvision.ops.StochasticDepth, which every engine draws alike"
FUNCTION_MENDS: Mapping[str, str] = {
    **dict.fromkeys(("rand", "rand_like", "randn", "randn_like", "bernoulli", "empty", "new_empty"), DRAWN),
    "einsum": "give it two tensors, as in torch.einsum('bld,de->ble', x, weight)",
}
"""What to use instead of a function."""


def _encoder_layer(
    own: Any, x: Any, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False
) -> Any:
    """The pass of torch.nn.TransformerEncoderLayer without its shortcuts."""

    def attended(given: Any) -> Any:
        masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask}
        found = own.self_attn(given, given, given, need_weights=False, is_causal=is_causal, **masks)
        return own.dropout1(found[0])

    def fed(given: Any) -> Any:
        return own.dropout2(own.linear2(own.dropout(own.activation(own.linear1(given)))))

    return _in_turn(own, x, (own.norm1, attended), (own.norm2, fed))


def _in_turn(own: Any, x: Any, *pairs: tuple[Any, Callable[[Any], Any]]) -> Any:
    """``x`` through the blocks of a layer, each with its normalization before or behind it."""
    for norm, block in pairs:
        x = x + block(norm(x)) if own.norm_first else norm(x + block(x))
    return x


def _encoder(own: Any, x: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None) -> Any:
    for layer in own.layers:
        x = layer(x, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
    return x if own.norm is None else own.norm(x)


def _decoder_layer(
    own: Any,
    tgt: Any,
    memory: Any,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    tgt_is_causal: bool = False,
    memory_is_causal: bool = False,
) -> Any:
    """The pass of torch.nn.TransformerDecoderLayer."""

    def attended(given: Any) -> Any:
        masks = {"attn_mask": tgt_mask, "key_padding_mask": tgt_key_padding_mask}
        return own.dropout1(own.self_attn(given, given, given, need_weights=False, **masks)[0])

    def crossed(given: Any) -> Any:
        masks = {"attn_mask": memory_mask, "key_padding_mask": memory_key_padding_mask}
        return own.dropout2(own.multihead_attn(given, memory, memory, need_weights=False, **masks)[0])

    def fed(given: Any) -> Any:
        return own.dropout3(own.linear2(own.dropout(own.activation(own.linear1(given)))))

    return _in_turn(own, tgt, (own.norm1, attended), (own.norm2, crossed), (own.norm3, fed))


def _decoder(own: Any, tgt: Any, memory: Any, *args: Any, **named: Any) -> Any:
    for layer in own.layers:
        tgt = layer(tgt, memory, *args, **named)
    return tgt if own.norm is None else own.norm(tgt)


def _sums(own: Any, x: Any, h: Any) -> tuple[Any, Any]:
    """What a cell makes of its input and of its state before they meet."""
    h = x.new_zeros(x.shape[0], own.hidden_size) if h is None else h
    return F.linear(x, own.weight_ih, own.bias_ih), F.linear(h, own.weight_hh, own.bias_hh)


def _rnn_cell(own: Any, x: Any, hx: Any = None) -> Any:
    given, before = _sums(own, x, hx)
    return torch.tanh(given + before) if own.nonlinearity == "tanh" else torch.relu(given + before)


def _gru_cell(own: Any, x: Any, hx: Any = None) -> Any:
    given, before = _sums(own, x, hx)
    (r, z, n), (r_before, z_before, n_before) = (one.chunk(3, -1) for one in (given, before))
    n = torch.tanh(n + torch.sigmoid(r + r_before) * n_before)
    z = torch.sigmoid(z + z_before)
    return n - z * n if hx is None else n + z * (hx - n)


def _lstm_cell(own: Any, x: Any, hx: Any = None) -> Any:
    h, c = (None, None) if hx is None else hx
    given, before = _sums(own, x, h)
    i, f, g, o = (given + before).chunk(4, -1)
    kept = torch.sigmoid(i) * torch.tanh(g)
    c = kept if c is None else torch.sigmoid(f) * c + kept
    return torch.sigmoid(o) * torch.tanh(c), c


def _alike(own: Any, x1: Any, x2: Any) -> Any:
    return F.cosine_similarity(x1, x2, own.dim, own.eps)


def _unflattened(own: nn.Unflatten, x: Any) -> Any:
    return x.unflatten(own.dim, own.unflattened_size)


def _distant(own: Any, x1: Any, x2: Any) -> Any:
    return pairwise_distance(x1, x2, own.norm, own.eps, own.keepdim)


def _shuffled(own: Any, input: Any) -> Any:
    return channel_shuffle(input, own.groups)


def _local(own: Any, input: Any) -> Any:
    return local_response_norm(input, own.size, own.alpha, own.beta, own.k)


PASSES: Mapping[type[Module], Callable[..., Any]] = {
    nn.ChannelShuffle: _shuffled,
    nn.PairwiseDistance: _distant,
    nn.LocalResponseNorm: _local,
    nn.CosineSimilarity: _alike,
    nn.Unflatten: _unflattened,
    nn.RNNCell: _rnn_cell,
    nn.GRUCell: _gru_cell,
    nn.LSTMCell: _lstm_cell,
    nn.TransformerEncoderLayer: _encoder_layer,
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoderLayer: _decoder_layer,
    nn.TransformerDecoder: _decoder,
}
"""The plain pass of modules of torch's own that are looked into."""

NAMED_PASSES: Mapping[str, Callable[..., Any]] = {
    "torchvision.models.swin_transformer.ShiftedWindowAttention": swin.attention,
    "torchvision.models.swin_transformer.PatchMerging": swin.merging,
}
"""Likewise by the full name of a module's type, where its package may be missing."""

NAMED: Mapping[str, Rule] = {"torchvision.ops.stochastic_depth.StochasticDepth": plumbing.stochastic_depth}
"""By the full name of a module's type, where its package may be missing."""

FUNCTIONS: Mapping[Callable[..., Any] | str, tuple[Rule, Module]] = {
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), (plumbing.add, nn.Identity())),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul, "mul", "mul_"), (plumbing.multiply, nn.Identity())),
    **dict.fromkeys((torch.flatten, "flatten"), (plumbing.flatten, nn.Flatten())),
    **{function: (activation.rule_of(of), own) for function, (of, own) in elementwise.EACH.items()},
}
"""By the function, or the name of a tensor's method."""


def mend_of(module: Module, known: str) -> str:
    """What to use instead of a module that has no rule; ``known`` are the layers that have one."""
    if is_parametrized(module):
        names = ", ".join(sorted(one.__name__ for one in WEIGHING))
        return f"of torch.nn.utils.parametrizations use weight_norm or spectral_norm, of the weight of {names}"
    return MENDS.get(type(module), f"use layers among {known}")


def parts_of(module: Module) -> Mapping[str, Rule] | None:
    """The rules of a module that gives several values, with or without adapters inside; None of any other."""
    return PARTS.get(type(base_of(module)))


def masked(mask: Weight) -> Mapping[str, Rule]:
    """The rules of attention under a mask that is the same for each sample."""
    return {"0": on_rows(partial(attention.attention, mask=mask))}


def recurrent_of(module: Module) -> RNNBase | None:
    """The RNN, GRU or LSTM that a module is, with or without adapters inside; None of any other."""
    base = base_of(module)
    return base if isinstance(base, RNNBase) and type(base) in RECURRENT else None


def states_as(asked: recurrent.Asked) -> Rule:
    """The rule that gives the states of a recurrent layer as they are ``asked`` for."""
    return on_rows(partial(recurrent.states, asked=asked))


def pass_of(module: Module) -> Callable[..., Any] | None:
    """The plain pass of a module that is looked into in place of its own; None of any other."""
    return PASSES.get(type(module)) or NAMED_PASSES.get(_full_name(type(module)))


def _full_name(kind: type[Module]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def rule_of(module: Module) -> Rule | None:
    """The rule of a module, or None where it has none."""
    kind = type(module)
    computed = weight_normed if is_weight_normed(module) else spectral_normed if is_spectral_normed(module) else None
    if computed is not None:
        plain = kind.__mro__[1]  # before it was parametrized
        return computed(LAYERS[plain]) if plain in WEIGHING else None
    return LAYERS.get(kind) or NAMED.get(_full_name(kind))
