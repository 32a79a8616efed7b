"""The shared state as the bytes that devices download, and back, checked against the run's own model."""

import numpy as np

from talaria.aggregate.validation import RESERVED, is_reserved
from talaria.federated import run_model
from talaria.federated.run import Run
from talaria.model import masks
from talaria.model.masks import ChannelMask
from talaria.tensors import Tensors, only
from talaria.wire import codec, compact, download, strict_safetensors
from talaria.wire.codec import TensorSpec
from talaria.wire.compact import MOST


def encode_model(shared: Tensors, how: str = "raw") -> bytes:
    """``shared``, as coarse as ``how`` (:attr:`~talaria.federated.run.Run.download`) already, as a safetensors file;
    equal tensors give equal bytes."""
    return download.encoded(shared, how)


def decode_model(run: Run, data: bytes) -> Tensors:
    """The shared state of ``run`` in ``data``, in the run's own order.

    Names, shapes and dtypes must be those of the run's model. Beside them stand what an aggregator writes under a
    reserved prefix (``mask/`` ...), as the file declares it. Raises :class:`~talaria.errors.WireError` for anything
    else and for values that are not finite.
    """
    entries, _ = strict_safetensors.unpack(data, most=MOST)
    known = run_model.update_schema(run)
    written = [name for name in entries if is_reserved(name) and name not in known]
    extra = {name: TensorSpec(entries[name].shape, entries[name].dtype) for name in written}
    return codec.decode_tensors(data, schema={**known, **extra})


def encode_compact(run: Run, data: bytes, mask: bytes) -> bytes:
    """What of the global model ``data`` a device needs that keeps ``mask`` (as :func:`talaria.model.masks.pack` writes
    it). Raises :class:`~talaria.errors.ModelError` where that is no mask of the run's model."""
    return compact.compacted(data, masks.unpack(run_model.layout_of(run.spec), mask))


def decode_held(run: Run, data: bytes) -> tuple[Tensors, ChannelMask | None]:
    """The dense shared state in ``data``, which may be compact, and the mask that it is compact to, if it is: beyond
    the mask all is zero. Raises as :func:`decode_model`."""
    known = run_model.update_schema(run)
    found = compact.opened(data, known, run_model.layout_of(run.spec), RESERVED)
    if found is None:
        return decode_model(run, data), None
    zeros = {name: np.zeros(spec.shape, spec.dtype) for name, spec in known.items()}
    own = [name for name in found.tensors if name not in known]
    dense = masks.scatter(only(found.tensors, known), found.mask, zeros)
    return {**dense, **only(found.tensors, own)}, found.mask
