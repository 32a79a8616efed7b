"""How many bytes of the global model a device downloads: the channels that it keeps, as coarse as the run has them."""

from talaria.federated import device_task
from talaria.federated.global_model import encode_model
from talaria.federated.run import Member, Run
from talaria.model.masks import ChannelMask, key_of
from talaria.tensors import Tensors
from talaria.wire.compact import compacted


class Downloads:
    """The sizes of one run's downloads. They follow from names, shapes and masks alone, so each is worked out once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._sizes: dict[tuple[int, str], int] = {}

    def size(self, shared: Tensors, member: Member, private: Tensors | None, *, last: bool = False) -> int:
        """Bytes of the file that ``member`` downloads of the dense global model ``shared``, before a round that it
        takes part in, or the ``last``: then a device whose plan bounds what accuracy it may cost needs all of it."""
        plan = member.plan
        mask = device_task.mask_of(self._run, member, private)
        if last and plan is not None and plan.accuracy_drop is not None:
            mask = None
        key = len(shared), key_of(mask)  # an aggregator may write tensors of its own beside
        if key not in self._sizes:
            self._sizes[key] = self._measured(shared, None if mask is None or mask.is_full else mask)
        return self._sizes[key]

    def _measured(self, shared: Tensors, mask: ChannelMask | None) -> int:
        data = encode_model(shared, self._run.download)
        return len(data if mask is None else compacted(data, mask))
