"""The device's half as a Flower ClientApp. What is private stays in ``context.state``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from talaria import valid
from talaria.data import registry
from talaria.data.client import Client
from talaria.data.federated import Federated
from talaria.errors import ConfigError, DataError, TalariaError, some_of
from talaria.federated import plan_compat, rounds, run_model
from talaria.federated.run import Engine, Member, Run
from talaria.flower import records
from talaria.flower.settings import nested
from talaria.foreign import shown
from talaria.planning.plan import Plan
from talaria.simulation.simulator import trained
from talaria.tensors import Tensors
from talaria.training import evaluation

# flwr is imported after records, which says what to install where it is missing.
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip

Own = Callable[[Context], tuple[str, Client]]
"""A device's own samples: ``context -> (the client's name, its samples)``."""


def client_app(
    data: str | Federated | Own | None = None,
    *,
    data_options: Mapping[str, Any] | None = None,
    plan: Plan | str | Path | Mapping[str, Plan] | None = None,
    engine: Engine = "torch",
    allow: Collection[str] = (),
) -> ClientApp:
    """The ClientApp that trains and measures whatever run the server's :class:`~talaria.flower.TalariaStrategy` has.

    Args:
        data: A dataset by name (:func:`talaria.data.load`) or as an object, of which each node is one client: the one
            that ``client`` of its node config names, else the one numbered ``partition-id``, in order of names. Or a
            function ``context -> (name, talaria.data.Client)`` for samples of the device's own. None:
            ``talaria.data`` of the app's config.
        data_options: Options of a dataset by name; more may stand under ``talaria.data_options`` of the config.
        plan: What `talaria plan` found: for all clients, as a file that ``--json`` wrote, or each by name.
        engine: Who trains, ``"torch"`` or ``"onnx"``.
        allow: Packages beside Talaria whose code the server's run may name (algorithms, models).

    Each client trains with one thread of torch, which gives the bytes of ``talaria simulate --workers``. Raises
    :class:`~talaria.errors.ConfigError`; what goes wrong in a round is Flower's error reply.
    """
    valid.among("flower", "engine", engine, ("torch", "onnx"))
    if not (data is None or isinstance(data, str | Federated) or callable(data)):
        raise ConfigError(f"flower: data={shown(data)} must be a dataset, its name, or a function of the context")
    plans = plan_compat.read(Path(plan)) if isinstance(plan, str | Path) else plan
    node = _Node(data, dict(data_options or {}), plans, engine, tuple(allow))
    app = ClientApp()
    app.query(records.NAME.partition(".")[2])(node.name)
    app.train()(node.train)
    app.evaluate()(node.evaluate)
    return app


@dataclass(frozen=True)
class _Node:
    data: str | Federated | Own | None = field(repr=False)
    data_options: Mapping[str, Any]
    plans: Plan | Mapping[str, Plan] | None = field(repr=False)
    engine: Engine
    allow: Collection[str]

    def name(self, message: Message, context: Context) -> Message:
        """Say whose samples this node has, and how many nodes there are where that is known."""
        try:
            name, _ = self._own(context)
        except TalariaError as error:  # raised, the reason would be the last line of a long trace, and cut off
            return Message(Error(0, str(error)), reply_to=message)
        told = {records.CLIENT: name, records.PARTITIONS: int(context.node_config.get("num-partitions", 0))}
        return Message(RecordDict({records.CONFIG: ConfigRecord(told)}), reply_to=message)

    def train(self, message: Message, context: Context) -> Message:
        """One round: the update goes out as it would over MQTT; what is private goes into ``context.state``."""
        run, shared, number = self._asked(message)
        name, client = self._own(context)
        with _one_thread():
            frame, metrics, private = trained(run, self._member(name, client), shared, _private(context), number)
        context.state[records.STATE] = records.arrays_of(private)
        told = {records.EXAMPLES: len(client.train), **metrics}
        return Message(
            RecordDict({records.UPDATE: records.framed(frame), records.METRICS: MetricRecord(told)}), reply_to=message
        )

    def evaluate(self, message: Message, context: Context) -> Message:
        """The personal model on this client's test samples."""
        run, shared, number = self._asked(message)
        name, client = self._own(context)
        with _one_thread():
            model = rounds.personalize(run, self._member(name, client), shared, _private(context), number)
            found = evaluation.evaluate(model, client.test, task=run.task)
        told = {
            "accuracy": found.accuracy,
            "macro-recall": found.macro_recall,
            records.EXAMPLES: found.samples,
        }
        return Message(RecordDict({records.METRICS: MetricRecord(told)}), reply_to=message)

    def _asked(self, message: Message) -> tuple[Run, Tensors, int]:
        config = message.content.config_records.get(records.CONFIG)
        run = Run.from_json(records.config_of(config, records.RUN, str), allow=self.allow)
        number = records.config_of(config, records.ROUND, int)
        if not 1 <= number <= run.rounds:
            raise ConfigError(f"flower: {records.ROUND}={number} must be in 1..{run.rounds}, the rounds of the run")
        arrays = message.content.array_records.get(records.MODEL)
        if arrays is None:
            raise ConfigError(f"flower: the message has no record {records.MODEL!r}; use TalariaStrategy")
        return run, records.model_of(arrays, run_model.update_schema(run)), number

    def _member(self, name: str, client: Client) -> Member:
        plan = self.plans.get(name) if isinstance(self.plans, Mapping) else self.plans
        return Member(name, client.train, client.val, plan, self.engine, unlabelled=client.unlabelled)

    def _own(self, context: Context) -> tuple[str, Client]:
        if callable(self.data):
            name, client = self.data(context)
            if not isinstance(name, str) or not isinstance(client, Client):
                raise DataError("flower: the function data must return (name, talaria.data.Client)")
            return name, client
        found = self._found(context)
        name = whose(found, context.node_config)
        return name, found.clients[name]

    def _found(self, context: Context) -> Federated:
        if isinstance(self.data, Federated):
            return self.data
        config = nested(context.run_config)
        name = config.get("data") if self.data is None else self.data
        if not isinstance(name, str):
            raise ConfigError(
                "flower: no data; name it in client_app(data), or as talaria.data under [tool.flwr.app.config]"
            )
        options = {**self.data_options, **config.get("data_options", {})}
        fixed = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
        return _loaded(name, tuple(sorted(fixed.items())))


def whose(data: Federated, config: Mapping[str, Any]) -> str:
    """The client of ``data`` that a node with this node config is. Raises :class:`ConfigError`."""
    names = list(data.clients)
    if "client" in config:
        name = config["client"]
        if name not in data.clients:
            raise ConfigError(f"flower: client={shown(name)} of the node config is none of {some_of(names, 8)}")
        return str(name)
    number = config.get("partition-id")
    if type(number) is not int:
        raise ConfigError(
            "flower: the node config has neither client nor partition-id; start the SuperNode with --node-config "
            "'client=\"NAME\"'"
        )
    if not 0 <= number < len(names) or int(config.get("num-partitions", 0)) > len(names):
        raise ConfigError(
            f"flower: partition-id={number} of {config.get('num-partitions')}, but {data.name} has {len(names)} "
            f"clients; set num-supernodes to at most {len(names)}"
        )
    return names[number]


@lru_cache(maxsize=2)
def _loaded(name: str, options: tuple[tuple[str, Any], ...]) -> Federated:
    """A dataset by name, once in a process: Flower loads the app anew for each message."""
    return registry.load(name, **dict(options))


def _private(context: Context) -> Tensors | None:
    state = context.state.array_records.get(records.STATE)
    return None if state is None else records.state_of(state)


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch with one thread: what a client learns does not depend on how many cores its node has."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
