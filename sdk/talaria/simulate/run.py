"""Many devices in one process: the same functions, seeds and bytes as the fleet over MQTT."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch.nn import Module

from talaria import evaluation, rounds
from talaria.aggregate.base import Aggregator
from talaria.evaluation import Report
from talaria.rounds import Member, Run
from talaria.simulate.data.federated import Client, Federated
from talaria.types import Plan, Tensors, Update
from talaria.wire import codec


@dataclass(frozen=True)
class RoundFacts:
    """What one round was: its number from 1, who took part, bytes sent up, and the devices' mean metrics."""

    round: int
    clients: tuple[str, ...]
    bytes_up: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Result:
    """A finished run. ``shared`` is dense; ``private[client]`` is that device's whole private state."""

    run: Run
    members: Mapping[str, Member] = field(repr=False)
    shared: Tensors = field(repr=False)
    server: Tensors = field(repr=False)
    private: Mapping[str, Tensors] = field(repr=False)
    history: tuple[RoundFacts, ...] = field(repr=False)
    bytes_up: Mapping[str, int] = field(repr=False)

    def personal(self, member: Member) -> Module:
        """The model that ``member`` is served: a member of the run, or a newcomer."""
        return rounds.personalize(self.run, member, self.shared, self.private.get(member.client))


def members_of(clients: Mapping[str, Client], plans: Mapping[str, Plan] | None = None) -> dict[str, Member]:
    """Each client's own side, without its test samples."""
    plans = plans or {}
    return {name: Member(name, c.train, c.val, plans.get(name)) for name, c in clients.items()}


def simulate(
    run: Run,
    members: Mapping[str, Member],
    *,
    aggregator: Aggregator | None = None,
    progress: Callable[[RoundFacts], None] | None = None,
) -> Result:
    """All rounds of ``run`` over ``members``; ``progress`` is called after each.

    Every update crosses the wire's codec, as it does in the fleet, and is decoded one at a time to be folded.
    """
    shared, server = rounds.start(run, aggregator)
    private: dict[str, Tensors] = {}
    sent = dict.fromkeys(sorted(members), 0)
    history = []
    for number in range(1, run.rounds + 1):
        chosen = rounds.cohort(run, number, tuple(members))
        frames: dict[str, bytes] = {}
        metrics: list[Mapping[str, float]] = []
        for name in chosen:
            update, private[name] = rounds.participate(run, members[name], shared, private.get(name), number)
            frames[name] = codec.encode_update(update, rounds.codec_of(run, members[name]))
            sent[name] += len(frames[name])
            metrics.append(update.metrics)
        shared, server = rounds.close(run, shared, server, _decoded(run, shared, frames), aggregator)
        facts = RoundFacts(number, chosen, sum(map(len, frames.values())), _mean(metrics))
        history.append(facts)
        if progress is not None:
            progress(facts)
    return Result(run, members, shared, server, private, tuple(history), sent)


def _decoded(run: Run, shared: Tensors, frames: Mapping[str, bytes]) -> Iterator[Update]:
    schema = codec.schema_of(shared)
    layout = rounds.layout_of(run.spec)
    for name in sorted(frames):
        yield codec.decode_update(frames[name], schema=schema, layout=layout)


def _mean(metrics: list[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({key for entry in metrics for key in entry})
    return {key: sum(m[key] for m in metrics if key in m) / sum(key in m for m in metrics) for key in names}


def evaluate(result: Result, data: Federated, members: Mapping[str, Member]) -> Report:
    """Each client's served model on that client's own test samples."""
    every = {**data.clients, **data.newcomers}
    return evaluation.report(
        {name: evaluation.evaluate(result.personal(member), every[name].test) for name, member in members.items()}
    )
