"""The coordinator's half as a Flower Strategy: rounds, masks, robust rules and codecs are Talaria's, nodes and messages
Flower's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from logging import getLogger

from talaria import tasks, valid
from talaria.aggregate.base import Aggregator
from talaria.errors import AggregationError, ConfigError, DataError, TalariaError, WireError
from talaria.federated import rounds, run_model
from talaria.federated.run import Run
from talaria.federated.server_rule import least_of
from talaria.flower import records
from talaria.foreign import named, shown
from talaria.simulation.simulator import RoundFacts, means_of
from talaria.training import evaluation
from talaria.training.evaluation import Metrics, Report
from talaria.types import Update
from talaria.wire import codec

# flwr is imported after records, which says what to install where it is missing.
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict  # isort: skip
from flwr.serverapp import Grid  # isort: skip
from flwr.serverapp.strategy import Result, Strategy  # isort: skip

ASK_S = 60.0
"""How long nodes may take to say whose samples they have."""
_log = getLogger("flwr")


class TalariaStrategy(Strategy):
    """A whole Talaria run in Flower: its ClientApp is :func:`talaria.flower.client_app`.

    Each node is asked once whose samples it has; the run's own draws then say who takes part in a round, so that the
    bytes are those of ``talaria simulate``. What a node sends is checked as in a fleet, and left out of its round where
    it does not fit.

    Args:
        run: What is learned (:class:`talaria.federated.run.Run`); it travels to the nodes with each message.
        aggregator: Another server rule than the algorithm's own.
        nodes: How many nodes must be there before the first round; where they are the partitions of a simulation, all
            of these.
        evaluate_every: Measure all nodes after every so many rounds; 0: after the last one alone.

    Raises:
        ConfigError: The run is asynchronous, or the rule does not suit it.
    """

    def __init__(
        self, run: Run, *, aggregator: Aggregator | None = None, nodes: int = 2, evaluate_every: int = 0
    ) -> None:
        if run.asynchronous:
            raise ConfigError("flower: asynchronous=True, but a Flower strategy learns in rounds; leave it False")
        valid.whole("flower", "nodes", nodes, 1, 1 << 20)
        valid.whole("flower", "evaluate_every", evaluate_every, 0, 1 << 31)
        self.run, self._aggregator = run, aggregator
        self._nodes, self._evaluate_every = nodes, evaluate_every
        self.shared, self.server = rounds.start(run, aggregator)
        """The global model and the rule's own state after the last whole round."""
        self.history: list[RoundFacts] = []
        """What each whole round was."""
        self.report: Report | None = None
        """Each client's figures when all were measured last."""
        self._clients: dict[int, str] = {}
        self._refused: dict[int, str] = {}

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """All rounds of the run. ``initial_arrays`` default to the run's first model, ``num_rounds`` to its rounds;
        schedules and seeds follow these, so that another number is refused. The rest is Flower's."""
        if num_rounds not in (None, self.run.rounds):
            raise ConfigError(
                f"flower: num_rounds={num_rounds}, but the run has rounds={self.run.rounds}; leave it out"
            )
        first = records.arrays_of(self.shared) if initial_arrays is None else initial_arrays
        return super().start(grid, first, self.run.rounds, timeout, train_config, evaluate_config, evaluate_fn)

    def summary(self) -> None:
        """Say what is learned, in Flower's log."""
        run = self.run
        _log.info("\t├──> Talaria: %s, %s, codec %s, seed %d", run.algorithm, run.spec.name, run.codec, run.seed)
        _log.info("\t└──> Share of the nodes in a round: %g", run.fraction)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The global model and the run to the nodes whose turn it is."""
        self.shared = records.model_of(arrays, run_model.update_schema(self.run))
        there = self._known(grid)
        asked = rounds.cohort(self.run, server_round, list(there))
        _log.info("configure_train: %d of %d nodes", len(asked), len(there))
        return self._messages(server_round, arrays, config, [there[name] for name in asked], MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold what came, in order of clients, one decoded at a time. ``(None, None)`` leaves the global model as it
        is: too few updates fitted."""
        frames = self._frames(replies)
        counted: list[Update] = []
        try:
            shared, server = rounds.close(
                self.run, self.shared, self.server, self._updates(server_round, frames, counted), self._aggregator
            )
        except (AggregationError, DataError) as error:
            _log.warning("round %d changes nothing: %s", server_round, error)
            return None, None
        if len(counted) < least_of(self.run, self._aggregator):
            _log.warning("round %d changes nothing: %d updates fitted, too few", server_round, len(counted))
            return None, None
        self.shared, self.server = shared, server
        names = tuple(one.client for one in counted)
        facts = RoundFacts(
            server_round,
            names,
            sum(len(frame) for name, frame in frames if name in names),
            means_of([one.metrics for one in counted]),
            tuple((name, server_round - 1) for name in names),
        )
        self.history.append(facts)
        return records.arrays_of(shared), MetricRecord({**facts.metrics, "bytes-up": facts.bytes_up})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The global model to all nodes, in the rounds that are measured."""
        last = server_round == self.run.rounds
        if not last and (self._evaluate_every == 0 or server_round % self._evaluate_every):
            return []
        there = self._known(grid)
        return self._messages(server_round, arrays, config, list(there.values()), MessageType.EVALUATE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """What the personal models are worth by the task's first figure (``accuracy``, ``r2``, ``micro_f1``): the mean
        over clients, and the worst; ``report`` has each client's."""
        found: dict[str, Metrics] = {}
        for reply in self._answers(replies):
            name = self._clients[reply.metadata.src_node_id]
            try:
                found[name] = _figures(reply)
            except WireError as error:
                _log.warning("client %s: %s", name, error)
        if not found:
            return None
        self.report = evaluation.report(found, self.run.task)
        summary = self.report.accuracy
        figure = tasks.of(self.run.task).figures[0]
        return MetricRecord({figure: summary.mean, "worst": summary.worst, "clients": len(found)})

    def _known(self, grid: Grid) -> dict[str, int]:
        """Client's name -> node, of the nodes that are there; who is new is asked. Waits for enough of them before the
        first round."""
        wanted = self._nodes if not self._clients else 1
        while True:
            there = set(grid.get_node_ids())
            new = sorted(there - set(self._clients) - set(self._refused))
            if new and len(there) >= wanted:
                wanted = max(wanted, self._ask(grid, new, there))
            known = {name: node for node, name in self._clients.items() if node in there}
            refused = [why for node, why in self._refused.items() if node in there]
            if len(known) + len(refused) >= wanted:
                if not known:
                    raise ConfigError(f"flower: no node says whose samples it has; the last said: {refused[-1]}")
                return dict(sorted(known.items()))
            _log.info("Waiting for nodes: %d there, %d needed", len(there), wanted)
            time.sleep(1)

    def _ask(self, grid: Grid, nodes: list[int], there: set[int]) -> int:
        """Ask ``nodes`` for their clients' names; gives how many partitions they are of, 0 where that is unknown."""
        messages = [Message(RecordDict(), message_type=records.NAME, dst_node_id=node) for node in nodes]
        most = 0
        for reply in grid.send_and_receive(messages, timeout=ASK_S):
            node = reply.metadata.src_node_id
            try:
                name, partitions = _told(reply)
                other = next((at for at, known in self._clients.items() if known == name), node)
                if other != node and other in there:
                    raise WireError(f"it is client {name!r}, as node {other} is; give each a name of its own")
            except WireError as error:
                _log.warning("node %d takes no part: %s", node, error)
                self._refused[node] = str(error)
                continue
            self._clients.pop(other, None)  # the same device under a new number
            self._clients[node] = name
            most = max(most, partitions)
        return most

    def _messages(
        self, number: int, arrays: ArrayRecord, config: ConfigRecord, nodes: list[int], kind: str
    ) -> list[Message]:
        told = ConfigRecord({**config, records.ROUND: number, records.RUN: self.run.to_json()})
        content = RecordDict({records.MODEL: arrays, records.CONFIG: told})
        return [Message(content, message_type=kind, dst_node_id=node) for node in nodes]

    def _answers(self, replies: Iterable[Message]) -> Iterator[Message]:
        """The replies of nodes that are known, without errors; these are logged."""
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                _log.warning("node %d (%s) failed: %s", node, self._clients.get(node), reply.error.reason)
            elif node in self._clients:
                yield reply

    def _frames(self, replies: Iterable[Message]) -> list[tuple[str, bytes]]:
        """``(client, its update's bytes)``, in order of clients, one of each."""
        found: dict[str, bytes] = {}
        for reply in self._answers(replies):
            name = self._clients[reply.metadata.src_node_id]
            try:
                found[name] = records.frame_of(reply.content.array_records.get(records.UPDATE, ArrayRecord()))
            except WireError as error:
                _log.warning("client %s: %s", name, error)
        return sorted(found.items())

    def _updates(self, number: int, frames: list[tuple[str, bytes]], counted: list[Update]) -> Iterator[Update]:
        """The updates that fit, decoded one at a time; ``counted`` gets each without its tensors."""
        schema, layout = run_model.update_schema(self.run), run_model.layout_of(self.run.spec)
        for name, frame in frames:
            try:
                update = codec.decode_update(frame, schema=schema, layout=layout, client=name)
                if update.base_version != number - 1:
                    raise WireError(f"base_version={update.base_version}, but round {number} begins from {number - 1}")
                rounds.require_update(self.run, self.shared, update, self._aggregator)
            except TalariaError as error:
                _log.warning("client %s: its update is left out: %s", name, error)
                continue
            counted.append(update.but(tensors={}))
            yield update


def _told(reply: Message) -> tuple[str, int]:
    """The client's name and the number of partitions that a node tells. Raises :class:`WireError`."""
    if reply.has_error():
        raise WireError(shown(reply.error.reason, 300))
    config = reply.content.config_records.get(records.CONFIG)
    name = records.config_of(config, records.CLIENT, str)
    partitions = records.config_of(config, records.PARTITIONS, int)
    if not 0 < len(name) <= records.MAX_NAME or not 0 <= partitions <= records.MAX_NODES:
        raise WireError(f"it calls itself {shown(name)}, one of {shown(partitions)}; need 1 to 64 letters")
    return name, partitions


def _figures(reply: Message) -> Metrics:
    """What a node tells of its client's test samples. Raises :class:`WireError`."""
    told = reply.content.metric_records.get(records.METRICS, {})
    accuracy, recall, samples = (told.get(name) for name in ("accuracy", "macro-recall", records.EXAMPLES))
    if type(accuracy) is not float or type(recall) is not float or type(samples) is not int:
        raise WireError(f"figures {named(told)} must be accuracy, macro-recall and {records.EXAMPLES}")
    if not math.isfinite(accuracy) or not math.isfinite(recall) or not 1 <= samples <= 1 << 40:
        raise WireError(f"accuracy={accuracy}, macro-recall={recall}, {records.EXAMPLES}={shown(samples)} cannot be")
    return Metrics(accuracy, recall, samples)
