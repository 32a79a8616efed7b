"""A program's graph worked out in float64 by numpy and torch: what it says, apart from how ONNX Runtime rounds."""

import numpy as np
import torch
from torch.nn import functional as F


def evaluated(graph, feed):
    """All outputs by name, in float64 where the program has float32."""
    values = {name: _meant(value) for name, value in graph.constants.items()}
    values |= {name: value.astype(np.float64) if value.dtype == np.float32 else value for name, value in feed.items()}
    last = {name: place for place, node in enumerate(graph.nodes) for name in node.inputs}
    outputs = {port.name for port in graph.outputs}
    for place, node in enumerate(graph.nodes):
        given = [values[name] for name in node.inputs]
        found = RULES[node.kind](node, *given)
        made = found if isinstance(found, tuple) else (found,)
        values |= zip(node.outputs, map(np.asarray, made), strict=True)
        for name in {*node.inputs} - outputs:
            if last[name] == place:
                del values[name]
    return {name: values[name] for name in outputs}


def _meant(value):
    """A constant as it was before it was rounded to float32: a short decimal, or one over a whole number."""
    if value.dtype != np.float32:
        return value
    flat = [float(str(one)) for one in value.reshape(-1)]
    whole = [round(1 / one) if one else 0 for one in flat]
    near = [n and len(str(x)) > 7 and abs(x * n - 1) < 1e-6 for x, n in zip(flat, whole, strict=True)]
    meant = [1 / n if close else x for x, n, close in zip(flat, whole, near, strict=True)]
    return np.array(meant).reshape(value.shape)


def _reduced(of):
    return lambda node, x, axes: of(x, axis=tuple(axes), keepdims=bool(node.get("keepdims", 1)))


def _reshaped(node, x, shape):
    return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape)])


def _sliced(node, x, starts, ends, axes, steps):
    cuts = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        cuts[axis] = slice(start, end, step)
    return x[tuple(cuts)]


def _padded(node, x, pads, fill):
    return np.pad(x, list(zip(pads[: x.ndim], pads[x.ndim :], strict=True)), constant_values=fill)


def _gemm(node, a, b, c=None):
    a, b = a.T if node.get("transA") else a, b.T if node.get("transB") else b
    return a @ b + (0 if c is None else node.get("beta", 1.0) * c)


def _hot(node, at, depth, levels):
    places = np.arange(np.ravel(depth)[0])
    return np.where(at[..., None] == places, levels[1], levels[0])


def _pooled(node, x):
    kernel, stride, pads = node.get("kernel_shape"), node.get("strides"), node.get("pads")
    pool = {("MaxPool", 1): F.max_pool1d, ("MaxPool", 2): F.max_pool2d}
    pool |= {("AveragePool", 1): F.avg_pool1d, ("AveragePool", 2): F.avg_pool2d}
    rank = len(kernel)
    edges = [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)]
    whole = np.pad(x, edges, constant_values=-np.inf if node.kind == "MaxPool" else 0)
    return pool[node.kind, rank](torch.from_numpy(whole), kernel, stride).numpy()


def _transposed(node, x, w):
    pads = node.get("pads")
    return F.conv_transpose2d(torch.from_numpy(x), torch.from_numpy(w), padding=pads[: len(pads) // 2]).numpy()


def _normalized(node, x, scale):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    rate = 1 / np.sqrt(var + node.get("epsilon"))
    return (x - mean) * rate * scale, mean, rate


def _scattered(node, table, at, rows):
    out = np.array(table)
    np.add.at(out, at[:, 0], rows)
    return out


def _soft(node, x):
    return torch.softmax(torch.from_numpy(x), node.get("axis")).numpy()


RULES = {
    "Add": lambda _, a, b: a + b,
    "And": lambda _, a, b: a & b,
    "AveragePool": _pooled,
    "Cast": lambda node, x: x.astype({1: np.float64, 7: np.int64, 9: bool}[node.get("to")]),
    "Clip": lambda _, x, low, high: np.clip(x, low, high),
    "Concat": lambda node, *parts: np.concatenate(parts, axis=node.get("axis")),
    "ConvTranspose": _transposed,
    "Div": lambda _, a, b: a / b,
    "Equal": lambda _, a, b: a == b,
    "Erf": lambda _, x: torch.erf(torch.from_numpy(x)).numpy(),
    "Exp": lambda _, x: np.exp(x),
    "Expand": lambda _, x, shape: np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape))),
    "Flatten": lambda node, x: x.reshape(int(np.prod(x.shape[: node.get("axis")])), -1),
    "Gather": lambda node, x, at: np.take(x, at, axis=node.get("axis", 0)),
    "Gemm": _gemm,
    "Greater": lambda _, a, b: a > b,
    "HardSigmoid": lambda node, x: np.clip(node.get("alpha") * x + node.get("beta"), 0, 1),
    "Identity": lambda _, x: x,
    "LayerNormalization": _normalized,
    "Less": lambda _, a, b: a < b,
    "Log": lambda _, x: np.log(x),
    "Sin": lambda _, x: np.sin(x),
    "Cos": lambda _, x: np.cos(x),
    "LogSoftmax": lambda node, x: np.log(_soft(node, x)),
    "MatMul": lambda _, a, b: a @ b,
    "Max": lambda _, a, b: np.maximum(a, b),
    "MaxPool": _pooled,
    "Min": lambda _, a, b: np.minimum(a, b),
    "Mul": lambda _, a, b: a * b,
    "Neg": lambda _, x: -x,
    "Not": lambda _, x: ~x,
    "OneHot": _hot,
    "Pad": _padded,
    "Reciprocal": lambda _, x: 1 / x,
    "Pow": lambda _, x, exponent: x**exponent,
    "ReduceMax": _reduced(np.max),
    "ReduceMean": _reduced(np.mean),
    "ReduceSum": _reduced(np.sum),
    "Relu": lambda _, x: np.maximum(x, 0),
    **{name: (lambda _, x, of=of: of(x)) for name, of in (("Round", np.round), ("Floor", np.floor), ("Ceil", np.ceil))},
    "Reshape": _reshaped,
    "ScatterND": _scattered,
    "Shape": lambda node, x: np.array(x.shape[node.get("start", 0) : node.get("end")]),
    "Sigmoid": lambda _, x: 1 / (1 + np.exp(-x)),
    "Sign": lambda _, x: np.sign(x),
    "Slice": _sliced,
    "Softmax": _soft,
    "Softplus": lambda _, x: np.logaddexp(0, x),
    "Split": lambda node, x, sizes: tuple(np.split(x, np.cumsum(sizes)[:-1], axis=node.get("axis"))),
    "Sqrt": lambda _, x: np.sqrt(x),
    "Sub": lambda _, a, b: a - b,
    "Tanh": lambda _, x: np.tanh(x),
    "Transpose": lambda node, x: np.transpose(x, node.get("perm")),
    "Unsqueeze": lambda _, x, axes: np.expand_dims(x, tuple(axes)),
    "Where": lambda _, which, a, b: np.where(which, a, b),
}
