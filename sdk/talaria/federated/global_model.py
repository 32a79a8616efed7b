"""The shared state as the bytes that devices download, and back, checked against the run's own model."""

from talaria.aggregate.validation import is_reserved
from talaria.federated import rounds
from talaria.federated.run import Run
from talaria.tensors import Tensors
from talaria.wire import codec, download, strict_safetensors
from talaria.wire.codec import TensorSpec

MOST = 40_000
"""Tensors that a global model may hold."""


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
    known = rounds.update_schema(run)
    written = [name for name in entries if is_reserved(name) and name not in known]
    extra = {name: TensorSpec(entries[name].shape, entries[name].dtype) for name in written}
    return codec.decode_tensors(data, schema={**known, **extra})
