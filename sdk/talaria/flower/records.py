"""Talaria's values as Flower's records: what messages and ``context.state`` hold.

Nothing is pickled, and what came from elsewhere is compared with what is expected before a value is read.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib import format as npy

from talaria.aggregate.validation import is_reserved
from talaria.errors import ConfigError, TooLarge, WireError
from talaria.foreign import reading, shown
from talaria.tensors import Array, Tensors, is_float
from talaria.wire.codec import Limits, TensorSpec
from talaria.wire.compact import MOST

try:
    from flwr.app import Array as FlowerArray
    from flwr.app import ArrayRecord, ConfigRecord
except ImportError as error:
    raise ConfigError(f"flower: flwr cannot be imported ({error}): pip install 'talaria[flower]'") from None

MODEL, UPDATE, METRICS, CONFIG, STATE = "arrays", "arrays", "metrics", "config", "talaria"
"""Names of the records of a message, and of the one in ``context.state``."""
ROUND, RUN, CLIENT, PARTITIONS, EXAMPLES = "server-round", "talaria-run", "client", "partitions", "num-examples"
"""Names within them."""
NAME = "query.talaria"
"""The type of the message that asks a node for its client's name."""
FRAME = "talaria.update"
"""How an update lies in a Flower array: the bytes of :func:`talaria.wire.codec.encode_update`."""
MAX_NAME, MAX_NODES = 64, 1 << 20
_HEADER = 4096


def arrays_of(tensors: Tensors) -> ArrayRecord:
    """``tensors`` as Flower's arrays of numpy values, in their order."""
    return ArrayRecord({name: FlowerArray(np.asarray(value, order="C")) for name, value in tensors.items()})


def model_of(record: ArrayRecord, schema: Mapping[str, TensorSpec]) -> Tensors:
    """The shared state in ``record``, in the order of ``schema``; then what a rule wrote under a reserved prefix.

    Raises :class:`WireError` for other names, shapes or dtypes than the run's, and for values that are not finite.
    """
    if len(record) > MOST:
        raise TooLarge(f"global model: {len(record)} tensors, above {MOST}")
    written = [name for name in record if name not in schema]
    odd = [name for name in written if not is_reserved(name)]
    missing = [name for name in schema if name not in record]
    if odd or missing:
        raise WireError(
            f"global model: has {shown(odd[:3])} beside the run's tensors and lacks {shown(missing[:3])}; give the "
            "arrays of this run's own model, or leave initial_arrays out"
        )
    found = {name: array_of(record[name], schema.get(name)) for name in (*schema, *written)}
    for name, value in found.items():
        if is_float(value) and not np.isfinite(value).all():
            raise WireError(f"global model: {name!r} holds NaN or infinity")
    return found


def state_of(record: ArrayRecord) -> Tensors:
    """The private tensors of a device's own ``context.state``."""
    return {name: array_of(value) for name, value in record.items()}


def array_of(value: FlowerArray, spec: TensorSpec | None = None) -> Array:
    """The numpy array in a Flower array: a copy. Its header is compared with ``spec`` and with the bytes that are there
    before anything is allocated; raises :class:`WireError`."""
    with reading("flower array"):
        if value.stype != "numpy.ndarray":
            raise WireError(f"flower array: stype={shown(value.stype)} must be 'numpy.ndarray'")
        file = io.BytesIO(value.data)
        if npy.read_magic(file) != (1, 0):
            raise WireError("flower array: is no npy file of version 1.0")
        shape, fortran, dtype = npy.read_array_header_1_0(file, max_header_size=_HEADER)
        start = file.tell()
        if dtype.kind not in "biuf" or (fortran and len(shape) > 1):
            raise WireError(f"flower array: {shown(dtype)} of this order cannot be read; send plain numbers by rows")
        if spec is not None and (tuple(shape) != tuple(spec.shape) or dtype != spec.dtype):
            raise WireError(f"flower array: shape {shown(shape)} of {dtype}, need {spec.shape} of {spec.dtype}")
        if math.prod(shape) * dtype.itemsize != len(value.data) - start:
            raise WireError(
                f"flower array: {len(value.data) - start} bytes do not hold shape {shown(shape)} of {dtype}"
            )
        return np.frombuffer(value.data, dtype, offset=start).reshape(shape).copy()


def frame_of(record: ArrayRecord) -> bytes:
    """The update's bytes in a reply, at most :class:`~talaria.wire.codec.Limits` of them; they are not looked into."""
    if list(record) != ["update"] or record["update"].stype != FRAME:
        raise WireError(
            f"reply: holds {shown(list(record)[:3])} and no update of Talaria's; use talaria.flower.client_app"
        )
    data: bytes = record["update"].data
    if len(data) > Limits().total:
        raise TooLarge(f"reply: an update of {len(data)} bytes, above {Limits().total}")
    return data


def framed(frame: bytes) -> ArrayRecord:
    """An update's bytes as the one array of a reply."""
    return ArrayRecord({"update": FlowerArray("uint8", (len(frame),), FRAME, frame)})


def config_of(record: Any, name: str, kind: type[Any]) -> Any:
    """One value of a message's settings. Raises :class:`WireError` where it is missing or of another type."""
    value = record.get(name) if isinstance(record, ConfigRecord) else None
    if type(value) is not kind:
        raise WireError(f"message: config[{name!r}]={shown(value)} must be {kind.__name__}; use TalariaStrategy")
    return value
