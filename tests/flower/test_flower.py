"""Talaria inside the real Flower: messages cross Flower's own serialization, and the bytes are those of a simulation.

`make flower` runs these in a venv of their own, for Flower asks for older packages than constraints.txt has.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
    UserConfig,
)  # fmt: skip
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

import talaria
from talaria.algorithms import ALGORITHMS
from talaria.data import Federated, registry
from talaria.errors import ConfigError, WireError
from talaria.federated import run_model
from talaria.flower import TalariaStrategy, client_app, records, server_app
from talaria.flower.client import whose
from talaria.flower.server import _ASKED, experiment_of
from talaria.simulation.experiment import Experiment
from talaria.tensors import Tensors, equal

torch.set_num_threads(1)
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as Flower sets them in a ServerApp's process


def travelled(what: Message | RecordDict) -> Message | RecordDict:
    """What arrives of it: Flower takes it apart into objects, and another process makes it of them again."""
    objects = {key: one.deflate() for key, one in get_all_nested_objects(what).items()}
    return inflate_object_from_contents(what.object_id, objects)


class Nodes(Grid):
    """Flower's grid in one process: nodes numbered from 100, each with its own context, as in Flower's simulation."""

    def __init__(self, app: ClientApp, count: int, change: Callable[[int, Message], Message | None] | None = None):
        self.app, self.change = app, change or (lambda node, reply: reply)
        config = [UserConfig({"partition-id": at, "num-partitions": count}) for at in range(count)]
        self.contexts = {
            100 + at: Context(1, 100 + at, one, RecordDict(), UserConfig()) for at, one in enumerate(config)
        }
        self.trained: list[list[int]] = []

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies, asked = [], []
        for message in reversed(list(messages)):  # in another order than the clients'
            node = message.metadata.dst_node_id
            if message.metadata.message_type == MessageType.TRAIN:
                asked.append(node)
            context = self.contexts[node]
            try:
                reply = self.app(travelled(message), context)
            except Exception as error:  # noqa: BLE001  as Flower does with what an app raises
                reply = Message(Error(0, f"{type(error).__name__}: {error}"), reply_to=message)
            context.state = travelled(context.state)
            answer = self.change(node, travelled(reply) if reply.has_content() else reply)
            replies += [] if answer is None else [answer]
        self.trained += [asked] if asked else []
        return replies

    def private(self, node: int) -> Tensors:
        state = self.contexts[node].state.array_records
        return records.state_of(state[records.STATE]) if records.STATE in state else {}

    run = property(lambda self: None)
    set_run = create_message = push_messages = pull_messages = lambda self, *_, **__: NotImplemented


def people(clients: int = 3, classes: int = 3) -> Federated:
    draw = np.random.default_rng(4)
    y = np.tile(np.arange(classes), 16 * clients)
    x = draw.normal(size=(len(y), 8)) + 2 * np.eye(8)[y] + 0.1
    return Federated.from_arrays(x, y, np.repeat([f"p{at}" for at in range(clients)], len(y) // clients))


def learn(experiment: Experiment, nodes: Nodes, count: int) -> TalariaStrategy:
    strategy = TalariaStrategy(experiment.run, aggregator=experiment.rule, nodes=count)
    strategy.start(nodes)
    return strategy


CASES = {name: {} for name in sorted(ALGORITHMS)} | {
    "fedavg": {"fraction": 0.6, "aggregator": "median"},
    "hermes": {"codec": "int8", "rounds": 3, "options": {"step": 0.3}},
}


@pytest.mark.parametrize(("algorithm", "options"), CASES.items())
def test_flower_gives_the_bytes_of_a_simulation(algorithm: str, options: dict[str, object]) -> None:
    data = people(5 if algorithm == "fedavg" else 3)
    asked = {"rounds": 2, "seed": 5, **options}
    expected = talaria.simulate(algorithm, data, **asked)
    nodes = Nodes(client_app(data), len(data.clients))
    strategy = learn(experiment_of({"algorithm": algorithm, "data": data, **asked}), nodes, 2)
    assert equal(strategy.shared, expected.learned.shared)
    assert equal(strategy.server, expected.learned.server)
    for at, name in enumerate(data.clients):
        assert equal(nodes.private(100 + at), expected.learned.private.get(name, {}))
    assert strategy.report == expected.members
    told = [(one.clients, one.bytes_up, one.metrics, one.counted) for one in strategy.history]
    assert told == [(one.clients, one.bytes_up, one.metrics, one.counted) for one in expected.learned.history]
    if algorithm == "fedavg":
        assert [len(asked) for asked in nodes.trained] == [3, 3]
    if algorithm == "hermes":
        assert expected.learned.masks  # which travel within the updates


def test_a_plan_and_a_reply_that_does_not_come_leave_the_others_as_they_are() -> None:
    """Widths of a device's own travel as its mask; who fails in a round is missing in it, and comes back."""
    data = people()
    from talaria.planning.plan import Plan

    experiment = experiment_of({"algorithm": "fedper", "data": data, "rounds": 2})
    groups = run_model.layout_of(experiment.run.spec).sizes
    plan = Plan(widths={group: max(1, size // 2) for group, size in groups.items()})
    failed = iter([True])

    def change(node: int, reply: Message) -> Message | None:
        train = reply.metadata.message_type == MessageType.TRAIN
        return None if train and node == 102 and next(failed, False) else reply

    nodes = Nodes(client_app(data, plan={"p0": plan}), 3, change)
    strategy = learn(experiment, nodes, 2)
    assert [one.clients for one in strategy.history] == [("p0", "p1"), ("p0", "p1", "p2")]
    from talaria.model import masks

    kept = masks.from_tensors(run_model.layout_of(experiment.run.spec), nodes.private(100))
    assert {group: len(kept.kept[group]) for group in groups} == dict(plan.widths)


LIES = {
    "another's update": lambda reply, others: others[0],
    "no update": lambda reply, others: RecordDict({"arrays": ArrayRecord({"w": Array(np.ones(3))})}),
    "bytes that are none": lambda reply, others: RecordDict({"arrays": records.framed(b"\x80\x04pickle")}),
    "a number that is none": lambda reply, others: RecordDict({"arrays": records.framed(spoilt(reply))}),
    "nothing": lambda reply, others: RecordDict(),
}


def spoilt(reply: RecordDict) -> bytes:
    """The update of a reply with NaN for a value."""
    from talaria.wire import compression, strict_safetensors

    entries, meta = strict_safetensors.unpack(
        compression.unsqueeze(records.frame_of(reply.array_records["arrays"]), 1 << 24), most=99
    )
    arrays = {name: entry.array() for name, entry in entries.items()}
    next(value for value in arrays.values() if value.dtype == np.float32).flat[0] = np.nan
    return strict_safetensors.pack(arrays, meta)


@pytest.mark.parametrize("lie", LIES)
def test_what_a_node_says_wrong_is_left_out_of_its_round(lie: str) -> None:
    data, seen = people(), []

    def change(node: int, reply: Message) -> Message:
        if reply.metadata.message_type == MessageType.TRAIN:
            if node == 100:  # the last to answer
                reply.content = LIES[lie](reply.content, seen)
            seen.append(reply.content)
        return reply

    nodes = Nodes(client_app(data), 3, change)
    strategy = learn(experiment_of({"algorithm": "fedavg", "data": data, "rounds": 1}), nodes, 2)
    assert [one.clients for one in strategy.history] == [("p1", "p2")]


def test_a_round_in_which_too_few_fit_changes_nothing() -> None:
    data = people()
    nodes = Nodes(
        client_app(data), 3, lambda node, reply: None if reply.metadata.message_type == MessageType.TRAIN else reply
    )
    experiment = experiment_of({"algorithm": "fedavg", "data": data, "rounds": 1})
    strategy = learn(experiment, nodes, 2)
    assert not strategy.history
    assert equal(strategy.shared, run_model.first_shared(experiment.run))


def lying(shape: str) -> Array:
    """An npy file of a few bytes whose header speaks of ``shape``."""
    told = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return Array(
        "float32", (3,), "numpy.ndarray", b"\x93NUMPY\x01\x00" + len(told).to_bytes(2, "little") + told.encode()
    )


@pytest.mark.parametrize(
    "value",
    [
        lying("(1 << 40,)"),
        lying("(1099511627776,)"),
        lying("(" * 50),
        Array("float32", (3,), "pickle", b"\x80\x04"),
        Array(
            "object",
            (1,),
            "numpy.ndarray",
            b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
        ),
        Array("float32", (3,), "numpy.ndarray", b""),
    ],
)
def test_an_array_that_lies_is_refused_before_anything_is_made_for_it(value: Array) -> None:
    with pytest.raises(WireError):
        records.array_of(value)


def test_a_model_of_another_run_is_refused_and_one_with_a_rules_words_is_not() -> None:
    shared = {"w": np.ones((2, 3), np.float32), "mask/g": np.array([3], np.uint8)}
    schema = {"w": records.TensorSpec((2, 3), np.dtype(np.float32))}
    assert equal(records.model_of(records.arrays_of(shared), schema), shared)
    for wrong in ({}, {"w": np.ones((3, 2), np.float32)}, {"w": np.ones((2, 3))}, {**shared, "x": np.ones(1)},
                  {"w": np.full((2, 3), np.inf, np.float32)}):  # fmt: skip
        with pytest.raises(WireError):
            records.model_of(records.arrays_of(wrong), schema)


def test_a_device_runs_no_code_that_a_server_names_without_its_owners_word() -> None:
    data = people()
    nodes = Nodes(client_app(data), 3)
    run = experiment_of({"algorithm": "fedavg", "data": data, "rounds": 1}).run
    text = run.to_json().replace('"algorithm":"fedavg"', '"algorithm":"os:system"')
    content = RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord({"server-round": 1, "talaria-run": text})})
    (reply,) = nodes.send_and_receive([Message(content, message_type=MessageType.TRAIN, dst_node_id=100)])
    assert "os" in reply.error.reason
    assert "allow" in reply.error.reason


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"partition-id": 2, "num-partitions": 3}, "p2"),
        ({"client": "p1", "partition-id": 0}, "p1"),
        ({}, "--node-config"),
        ({"partition-id": 0, "num-partitions": 10}, "num-supernodes to at most 3"),
        ({"client": "you"}, "'you'"),
    ],
)
def test_a_node_says_whose_samples_it_has(config: dict[str, object], name: str) -> None:
    if name.startswith("p"):
        assert whose(people(), config) == name
        return
    with pytest.raises(ConfigError, match=name):
        whose(people(), config)


def test_an_option_of_a_dataset_may_be_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[object]()
    monkeypatch.setattr(registry, "load", lambda name, **options: given.append((name, options)) or people())
    app = client_app("smartwatch", data_options={"newcomers": [9, 10]})
    learn(experiment_of({"algorithm": "fedavg", "data": people(), "rounds": 1}), Nodes(app, 3), 3)
    assert given == [("smartwatch", {"newcomers": (9, 10)})], "once in a process"


def test_what_a_node_cannot_be_is_said_in_its_own_words() -> None:
    """Not by the end of a trace, of which the reason was cut off."""
    with pytest.raises(ConfigError, match=r"last said: 'flower: partition-id=\d of 4, .* num-supernodes to at most 3"):
        learn(experiment_of({"algorithm": "fedavg", "data": people(), "rounds": 1}), Nodes(client_app(people()), 4), 4)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"asynchronous": True}, "asynchronous"),
        ({"privacy": {"secure": True}}, "privacy"),
        ({"data": None}, "talaria.data"),
        ({"round": 3}, "did you mean 'rounds'"),
    ],
)
def test_what_flower_cannot_do_is_refused_by_name(asked: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        experiment_of({"algorithm": "fedavg", "data": people(), **asked})
    if "data" not in asked:
        with pytest.raises(ConfigError, match=why):
            server_app("fedavg", **asked)


def test_the_apps_config_says_what_is_learned(tmp_path) -> None:
    """As ``flwr run --run-config`` gives it, flat."""
    data, file = people(), tmp_path / "model.safetensors"
    nodes = Nodes(client_app(data), 3)
    config = UserConfig({"talaria.rounds": 2, "talaria.recipe.epochs": 1, "talaria.save": str(file), "mine": 7})
    app = server_app("fedper", data, rounds=9)
    app(nodes, Context(1, 0, UserConfig(), RecordDict(), config))
    expected = talaria.simulate("fedper", data, rounds=2, recipe={"epochs": 1})
    from talaria.federated.global_model import decode_model

    assert equal(decode_model(expected.learned.run, file.read_bytes()), expected.learned.shared)


def test_the_page_names_what_an_app_takes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
    named = re.search(r"takes of `talaria.simulate` the arguments (.*?)\. The data set", page, re.DOTALL)
    assert named is not None
    assert re.findall(r"`(\w+)`", named[1]) == list(_ASKED)


def test_figures_of_a_client_are_checked() -> None:
    data = people()

    def change(node: int, reply: Message) -> Message:
        if reply.metadata.message_type == MessageType.EVALUATE and node == 101:
            reply.content = RecordDict({"metrics": MetricRecord({"accuracy": float("nan"), "num-examples": 3})})
        return reply

    strategy = learn(
        experiment_of({"algorithm": "fedavg", "data": data, "rounds": 1}), Nodes(client_app(data), 3, change), 2
    )
    assert strategy.report is not None
    assert list(strategy.report.clients) == ["p0", "p2"]


def test_figures_are_called_what_the_task_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told, usual = [], TalariaStrategy.aggregate_evaluate

    def kept(self: TalariaStrategy, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        told.append(usual(self, server_round, replies))
        return told[-1]

    monkeypatch.setattr(TalariaStrategy, "aggregate_evaluate", kept)
    x = np.random.default_rng(0).normal(size=(40, 8))
    numbers = Federated.from_arrays(x, x[:, 0] * 3, np.repeat(["anna", "bela"], 20), task="regression")
    for data, name in ((people(), "accuracy"), (numbers, "r2")):
        asked = experiment_of({"algorithm": "fedavg", "data": data, "rounds": 1})
        strategy = learn(asked, Nodes(client_app(data), len(data.clients)), len(data.clients))
        assert strategy.report is not None
        assert dict(told[-1]) == {
            name: strategy.report.accuracy.mean, "worst": strategy.report.accuracy.worst, "clients": len(data.clients)
        }  # fmt: skip
