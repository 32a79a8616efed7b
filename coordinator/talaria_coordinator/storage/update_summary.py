"""The summary of an update that is kept for the operator: its metrics, its mask, and the bytes of a dense update."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from talaria.aggregate.partial_sum import PartialSum
from talaria.model import masks
from talaria.model.masks import ChannelMask
from talaria.types import Update


@dataclass(frozen=True)
class Findings:
    """``dense`` is the bytes of the update had it sent every shared value; ``kept`` the share of channels that its
    mask keeps, ``bits`` the mask itself as hex bitmaps (empty: nothing is masked). ``clients`` is how many devices are
    in it: one, but of a gateway's partial sum those of its site, whose union of masks is then the mask."""

    metrics: Mapping[str, float]
    weight: float
    dense: int
    kept: float = 1.0
    bits: str = ""
    clients: int = 1

    @property
    def accuracy(self) -> float | None:
        """Validation accuracy in 0..1 as the device measured it, where its algorithm tells. A score below 0, as R² of
        answers that are worse than the mean, counts as 0: such a device is no less one of the last."""
        value = self.metrics.get("val_accuracy")
        return max(0.0, value) if value is not None and value <= 1 else None


def findings_of(update: Update | PartialSum, dense: int) -> str:
    """The findings as JSON text, in which they are stored."""
    if isinstance(update, PartialSum):
        return json.dumps(json.loads(findings_of(update.whole, dense)) | {"clients": update.clients})
    return _written(update.metrics, update.weight, update.mask, dense)


def findings_unseen(mask: ChannelMask | None, dense: int) -> str:
    """As :func:`findings_of`, of an update that nobody can read: its mask is all that is known."""
    return _written({}, 1.0, mask, dense)


def _written(metrics: Mapping[str, float], weight: float, mask: ChannelMask | None, dense: int) -> str:
    about = {"metrics": dict(metrics), "weight": weight, "dense": dense}
    if mask is not None:
        sizes = mask.layout.sizes
        kept = sum(len(mask.kept[group]) for group in sizes) / max(1, sum(sizes.values()))
        about |= {"kept": kept, "bits": masks.pack(mask).hex()}
    return json.dumps(about)


def read(text: str) -> Findings:
    """What :func:`findings_of` wrote."""
    return Findings(**json.loads(text))


def overlap(first: Findings, second: Findings) -> float:
    """Channels that both keep over channels that at least one keeps (Jaccard index): 1 for equal masks."""
    a, b = (int.from_bytes(bytes.fromhex(one.bits)) for one in (first, second))
    return 1.0 if a == b else (a & b).bit_count() / (a | b).bit_count()


def mean_overlap(every: Sequence[Findings]) -> float | None:
    """The mean over all pairs of masked updates; None with fewer than two."""
    masked = [one for one in every if one.bits]
    pairs = [overlap(a, b) for i, a in enumerate(masked) for b in masked[:i]]
    return sum(pairs) / len(pairs) if pairs else None
