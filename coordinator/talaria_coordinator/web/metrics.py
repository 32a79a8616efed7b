"""A coordinator's figures for Prometheus. Counters follow what the service tells; gauges are read when asked.

Labels are few and fixed: what a device or a stranger writes never becomes a label, only its class does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from talaria.errors import ConfigError, StateError
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.wire.validity import DAY
from talaria_coordinator.identity.expiry import Ending
from talaria_coordinator.identity.membership import Membership
from talaria_coordinator.web.queries import Views
from talaria_coordinator.web.schemas import AttemptView, FleetView

_CLASSES = (
    ("finite", ("finite", "nan", "infinit")),
    ("signature", ("signed", "signature", "enrolled", "key")),
    ("replay", ("replay", "nonce", "was made in", "based on model", "retained")),
    ("quarantined", ("quarantined",)),
    ("size", ("too large", "at most", "bytes", "more than")),
    ("checksum", ("checksum", "sha256", "match")),
    ("shape", ("shape", "dtype", "tensor", "mask")),
    ("late", ("late", "did not ask", "came first", "round", "attempt")),
)
_REASONS = (*(name for name, _ in _CLASSES), "other")
ROUND_BUCKETS = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
FOLD_BUCKETS = (0.01, 0.05, 0.25, 1, 5, 15, 60, 300)
STATES = ("waiting", "open", "paused", "aborted", "done")


def class_of(reason: str) -> str:
    """One of a few words for any reason; ``other`` where none fits."""
    text = reason.lower()
    return next((name for name, words in _CLASSES if any(word in text for word in words)), _REASONS[-1])


class Metrics:
    """The figures of one fleet. Give :meth:`tell`, :meth:`observe` and :meth:`sent` to the service."""

    def __init__(self, fleet: str, views: Views, state: Path, identity: Path | None = None) -> None:
        """``identity`` is the folder of a fleet with keys."""
        self._fleet, self._linked, self._unsettled = fleet, False, False
        self._opened: dict[int, float] = {}
        self._closing: dict[int, float] = {}
        self._gone: dict[str, tuple[str, int]] = {}  # the last transfer to each device ("": to all), a bit for a chunk
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_Read(fleet, views, state, identity))
        here = self.registry
        self._attempts = Counter(
            "talaria_attempts", "Attempts at a round that ended", ["fleet", "outcome"], registry=here
        )
        self._took = Histogram(
            "talaria_round_seconds",
            "From opening a round to its commit",
            ["fleet"],
            buckets=ROUND_BUCKETS,
            registry=here,
        )
        self._folding = Histogram(
            "talaria_aggregate_seconds",
            "Folding and committing a round",
            ["fleet"],
            buckets=FOLD_BUCKETS,
            registry=here,
        )
        self._updates = Counter(
            "talaria_updates", "What became of updates", ["fleet", "outcome", "reason"], registry=here
        )
        self._bytes = Counter(
            "talaria_transfer_bytes", "Bytes on the link, topics included", ["fleet", "way"], registry=here
        )
        self._chunks = Counter(
            "talaria_chunks",
            "Chunks of updates that came, and of global models that went",
            ["fleet", "way"],
            registry=here,
        )
        self._again = Counter(
            "talaria_retransmitted_chunks",
            "Chunks that came twice or damaged, or went to one device again",
            ["fleet", "way"],
            registry=here,
        )
        self._lost = Counter(
            "talaria_broker_reconnects", "Times the link broke and came back", ["fleet"], registry=here
        )
        self._up = Gauge("talaria_broker_up", "1 while the broker is reached", ["fleet"], registry=here)
        self._ingest = Gauge("talaria_ingest_workers", "Ingest workers that reach the broker", ["fleet"], registry=here)
        self._workers: set[int] = set()
        self._refused = Counter(
            "talaria_messages_refused", "Messages that were refused", ["fleet", "reason"], registry=here
        )
        self._out = Counter("talaria_quarantines", "Devices that were shut out", ["fleet", "reason"], registry=here)
        self._errors = Counter("talaria_errors", "Steps the disk or the store refused", ["fleet"], registry=here)
        self._missing = Gauge(
            "talaria_devices_missing",
            "Devices that a round still needs before it begins",
            ["fleet"],
            registry=here,
        )
        self._missing.labels(fleet).set(0)
        # All counters are there from the beginning: Prometheus sees no increase in one that comes with its first event.
        for counter in (self._lost, self._errors):
            counter.labels(fleet)
        for outcome in ("closed", "failed"):
            self._attempts.labels(fleet, outcome)
        for outcome in ("stored", "counted", "missing", "damaged", "equivocation"):
            self._updates.labels(fleet, outcome, "")
        for reason in _REASONS:
            self._updates.labels(fleet, "rejected", reason)
            self._refused.labels(fleet, reason)
            self._out.labels(fleet, reason)
        self._up.labels(fleet).set(0)
        self._ingest.labels(fleet).set(0)

    def text(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self.registry)

    def tell(self, event: Mapping[str, Any]) -> None:
        """An event of the service's journal."""
        fleet = self._fleet
        match event["event"]:
            case "connected":
                if self._linked:
                    self._lost.labels(fleet).inc()
                self._linked = True
                self._up.labels(fleet).set(1)
            case "disconnected":
                self._up.labels(fleet).set(0)
            case "failed":  # its links are closed until it begins anew
                self._up.labels(fleet).set(0)
                self._workers.clear()
                self._ingest.labels(fleet).set(0)
            case "ingest-connected":
                self._workers.add(event["worker"])
                self._ingest.labels(fleet).set(len(self._workers))
            case "ingest-disconnected" | "ingest-lost":
                self._workers.discard(event["worker"])
                self._ingest.labels(fleet).set(len(self._workers))
            case "waiting":
                self._missing.labels(fleet).set(event["needed"] - event["here"])
            case "pause" | "abort" | "budget-spent":  # nobody is waited for then
                self._missing.labels(fleet).set(0)
            case "round-opened":
                self._missing.labels(fleet).set(0)
                self._opened = {event["attempt"]: event["at"]}
            case "round-closed":
                self._attempts.labels(fleet, "closed").inc()
                if event["attempt"] in self._opened:
                    self._took.labels(fleet).observe(event["at"] - self._opened[event["attempt"]])
                if event["attempt"] in self._closing:
                    self._folding.labels(fleet).observe(event["at"] - self._closing.pop(event["attempt"]))
            case "round-failed":
                self._attempts.labels(fleet, "failed").inc()
            case "error":
                self._errors.labels(fleet).inc()

    def observe(self, item: object) -> None:
        """An event or action of the protocol machine."""
        fleet = self._fleet
        match item:
            case e.Received():
                self._bytes.labels(fleet, "received").inc(item.size)
                self._settle_chunk()
                self._unsettled = item.topic.split("/")[5:6] == ["up"]
            case e.ChunksCame():
                self._bytes.labels(fleet, "received").inc(item.size)
                self._chunks.labels(fleet, "received").inc(len(item.chunks))
            case a.KeepChunk():
                self._unsettled = False
                self._chunks.labels(fleet, "received").inc()
            case a.SendChunks():
                way = "sent-to-all" if item.kind == "m" else "sent-to-one"
                self._chunks.labels(fleet, way).inc(len(item.indices))
                self._again.labels(fleet, "sent").inc(self._sent_before(item))
            case a.RoundClosed():
                self._closing = {item.attempt: time.time()}
                self._updates.labels(fleet, "counted", "").inc(len(item.counted))
                self._updates.labels(fleet, "missing", "").inc(len(item.missing))
            case e.Stored():
                self._updates.labels(fleet, "stored", "").inc()
            case e.UpdateRejected():
                self._updates.labels(fleet, "rejected", class_of(item.reason)).inc()
            case e.Damaged():
                self._updates.labels(fleet, "damaged", "").inc()
            case a.Equivocation():
                self._updates.labels(fleet, "equivocation", "").inc()
            case a.FrameRefused():
                self._refused.labels(fleet, class_of(item.reason)).inc()
            case a.Quarantined():
                self._out.labels(fleet, class_of(item.reason)).inc()
            case _:
                pass

    def sent(self, size: int) -> None:
        """Bytes went out."""
        self._bytes.labels(self._fleet, "sent").inc(size)

    def _sent_before(self, item: a.SendChunks) -> int:
        """How many of these chunks, which go to one device, had gone to it or to all before."""
        chunks = sum(1 << index for index in item.indices)
        last = (self._gone.get(who, ("", 0)) for who in (item.device, ""))
        mine, of_all = (bits if xfer == item.xfer else 0 for xfer, bits in last)
        self._gone[item.device] = item.xfer, mine | chunks
        return 0 if item.kind == "m" else ((mine | of_all) & chunks).bit_count()

    def _settle_chunk(self) -> None:
        """A chunk that was not kept had come before, or was wrong."""
        if self._unsettled:
            self._again.labels(self._fleet, "received").inc()
            self._unsettled = False


class _Read:
    """Gauges read from the store, and from the folder of partial uploads, whenever Prometheus asks."""

    def __init__(self, fleet: str, views: Views, state: Path, identity: Path | None) -> None:
        self._fleet, self._views, self._state, self._identity = fleet, views, state, identity

    def collect(self) -> Iterator[Metric]:
        """The gauges now; of a store that does not answer only ``talaria_store_up 0``, and when certificates end."""
        yield from self._of_keys()
        try:
            fleet = self._views.fleet(self._fleet)
            last = next(iter(self._views.attempts(self._fleet, limit=1)), None)
            committed = self._views.committed(self._fleet)
        except StateError:
            yield self._gauge("store_up", "1 while the store answers", 0)
            return
        yield self._gauge("store_up", "1 while the store answers", 1)
        yield self._gauge("reassembly_bytes", "Bytes of partial uploads on disk", _partial(self._state / "uploads"))
        yield self._gauge("store_bytes", "Bytes of the database and its log", _database(self._state))
        if fleet is None:
            return
        yield from self._of_fleet(fleet, last if last is not None and last.state == "open" else None)
        if committed is not None:
            yield from self._of_attempt(committed)

    def _of_keys(self) -> Iterator[Metric]:
        if self._identity is None:
            return
        with suppress(ConfigError):  # a damaged list of members: the service tells it
            first = Ending.of(self._identity, Membership.load(self._identity)).first
            if first is not None:
                left = (first.ends - time.time()) / DAY
                yield self._gauge("certificate_days", "Days until the first of the fleet's certificates ends", left)

    def _of_fleet(self, fleet: FleetView, open_: AttemptView | None) -> Iterator[Metric]:
        now = fleet.status if fleet.status != "running" else ("waiting" if open_ is None else "open")
        states = GaugeMetricFamily("talaria_round_state", "1 for what the fleet does now", labels=["fleet", "state"])
        for state in STATES:
            states.add_metric([self._fleet, state], float(state == now))
        yield states
        yield self._gauge("round", "Rounds of learning that are committed", fleet.round)
        yield self._gauge("rounds_planned", "Rounds of learning that the run has", fleet.rounds)
        yield self._gauge("epoch", "When the coordinator of this fleet began, in ms since 1970", fleet.epoch)
        yield self._gauge("devices", "Devices that ever came", fleet.devices)
        yield self._gauge("devices_online", "Devices that are here now", fleet.online)
        yield self._gauge("devices_quarantined", "Devices that are shut out now", fleet.quarantined)
        if fleet.privacy is not None:
            yield self._gauge(
                "epsilon", "What privacy has cost the device that was counted most", fleet.privacy.epsilon
            )
            if fleet.privacy.budget is not None:
                yield self._gauge("epsilon_budget", "What it may cost at most", fleet.privacy.budget)
        asked, came = (0, 0) if open_ is None else (open_.cohort, open_.stored)
        yield self._gauge("round_cohort", "Devices asked in the open round", asked)
        yield self._gauge("round_stored", "Updates stored in the open round", came)
        yield self._gauge("round_opened_timestamp_seconds", "When the open round began", open_.opened if open_ else 0)

    def _of_attempt(self, last: AttemptView) -> Iterator[Metric]:
        yield self._gauge("last_commit_timestamp_seconds", "When a round was last committed", last.closed or 0)
        yield self._gauge("round_upload_bytes", "Bytes of the last round's updates", last.bytes_up)
        yield self._gauge("round_dense_bytes", "The same, had each sent every shared value", last.bytes_dense)
        if last.bytes_down is not None and last.bytes_down_dense is not None:
            yield self._gauge("round_download_bytes", "What of models went down to its devices", last.bytes_down)
            yield self._gauge("round_download_dense_bytes", "The same, had each the whole model", last.bytes_down_dense)
        if last.overlap is not None:
            yield self._gauge("mask_overlap", "How far the last round's masks agree, 0..1", last.overlap)
        if last.means:
            family = GaugeMetricFamily(
                "talaria_mean", "What devices told within the last sum", labels=["fleet", "metric"]
            )
            for name, value in last.means.items():
                family.add_metric([self._fleet, name], value)
            yield family
        for name, text, spread in (
            ("val_accuracy", "Validation accuracy over the last round's devices", last.accuracy),
            ("kept_share", "Share of channels kept over the last round's devices", last.kept),
        ):
            if spread is not None:
                family = GaugeMetricFamily(f"talaria_{name}", text, labels=["fleet", "stat"])
                for stat in ("low", "median", "mean", "high"):
                    family.add_metric([self._fleet, stat], getattr(spread, stat))
                yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"talaria_{name}", text, labels=["fleet"])
        family.add_metric([self._fleet], float(value))
        return family


def _partial(folder: Path) -> int:
    return sum(_size(file) for file in folder.glob("*.part"))


def _database(folder: Path) -> int:
    return sum(_size(folder / name) for name in ("coordinator.db", "coordinator.db-wal"))


def _size(file: Path) -> int:
    try:
        return file.stat().st_blocks * 512
    except OSError:
        return 0
