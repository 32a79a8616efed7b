"""What a coordinator computes: is this update sound, and what do these updates make of the body? No network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from talaria import bodies, rounds
from talaria.aggregate.base import Aggregator
from talaria.asynchrony import Buffering, buffered
from talaria.errors import WireError
from talaria.protocol.events import Counted
from talaria.rounds import Run
from talaria.simulate.server_rule import rule_named
from talaria.types import Update
from talaria.wire import codec
from talaria_coordinator.blobs import Blobs
from talaria_coordinator.records import Fleet


def aggregator_of(run: Run, rule: str | None, buffering: Buffering | None) -> Aggregator | None:
    """The rule that a fleet folds with, where it is not the algorithm's own. Raises
    :class:`~talaria.errors.ConfigError` where it does not suit the run."""
    named = None if rule is None else rule_named(run, rule)
    if buffering is not None:
        return buffered(run, buffering, named)
    rounds.rule_of(run, named)
    return named


@dataclass(frozen=True)
class Learning:
    """One run's learning over blobs; ``rule`` names an aggregator that replaces the algorithm's own, and ``buffering``
    is that of an asynchronous run."""

    run: Run
    blobs: Blobs
    rule: str | None = None
    max_update: int = 64 << 20
    buffering: Buffering | None = None

    @cached_property
    def aggregator(self) -> Aggregator | None:
        """What replaces the algorithm's own rule, if anything does."""
        return aggregator_of(self.run, self.rule, self.buffering)

    @cached_property
    def dense(self) -> int:
        """Bytes of an update that sends every shared value as it is."""
        specs = bodies.update_schema(self.run).values()
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)

    def first(self) -> tuple[str, str]:
        """The digests of the first body and server state."""
        shared, server = rounds.start(self.run, self.aggregator)
        return self.blobs.put(bodies.encode_body(shared)), self.blobs.put(codec.encode_tensors(server))

    def checked(self, data: bytes, device: str, step: int | None) -> Update:
        """The update in ``data``. Raises :class:`~talaria.errors.WireError` where it may not count; ``step`` is the
        learning round that it must have been made for (None: any)."""
        update = codec.decode_update(
            data,
            schema=bodies.update_schema(self.run),
            layout=rounds.layout_of(self.run.spec),
            limits=codec.Limits(total=self.max_update),
            client=device,
        )
        if step is not None and update.base != step - 1:
            raise WireError(
                f"update says it was made from body {update.base}, but learning round {step} began from {step - 1}; "
                "it may be replayed"
            )
        return update

    def fold(self, fleet: Fleet, counted: Sequence[Counted]) -> tuple[str, str]:
        """The digests of the body and server state after these updates, one of them in memory at a time."""
        shared = bodies.decode_body(self.run, self.blobs.get(fleet.body))
        server = codec.decode_tensors(self.blobs.get(fleet.server), schema=None)
        after, state = rounds.close(self.run, shared, server, self._updates(counted), self.aggregator)
        return self.blobs.put(bodies.encode_body(after)), self.blobs.put(codec.encode_tensors(state))

    def _updates(self, counted: Sequence[Counted]) -> Iterator[Update]:
        for entry in counted:
            yield self.checked(self.blobs.get(entry.sha256.hex()), entry.dev, None)
