"""``talaria.simulate``: a whole experiment from a few words, each with its default."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn import Module

from talaria import algorithms, plugins, tasks, time, valid
from talaria.aggregate.base import Aggregator
from talaria.algorithms.base import Algorithm
from talaria.data import registry
from talaria.data.client import Client
from talaria.data.federated import Federated
from talaria.data.presets import completed, default_of
from talaria.errors import ConfigError
from talaria.federated.device_task import require_engine, require_plan
from talaria.federated.fedbuff_run import Buffering
from talaria.federated.private_rule import private_rule, require_cohort
from talaria.federated.rounds import check_over, needed
from talaria.federated.run import ENGINES, Engine, Member, Run, require_device
from talaria.federated.run_model import split_of
from talaria.federated.server_rule import located, require_enough
from talaria.foreign import shown
from talaria.model import several, tokens, zoo
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.planning.plan import Plan
from talaria.privacy.rule import Privacy
from talaria.simulation import checkpoint
from talaria.simulation.asked import Factory, buffering_of, data_of, plans_of, rule_of, spec_of, table_of, task_of
from talaria.simulation.device_ids import as_devices, ids_of
from talaria.simulation.pick_engine import AUTO, Pick, pick
from talaria.simulation.private_run import settled
from talaria.simulation.result import Result
from talaria.simulation.run import course, crew_of, evaluate, learned, members_of
from talaria.simulation.simulator import RoundFacts
from talaria.simulation.workers import Crew
from talaria.tensors import Array
from talaria.training.engine import predict
from talaria.types import Recipe, Samples

EngineChoice = Literal["torch", "onnx", "auto"]
SLOW_S, SPARED = 1.0, 10
"""Where it takes so many seconds to keep a run, as with thousands of private states, that is done once in ``SPARED``
times as long: it would take longer than the rounds."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What :func:`talaria.simulate` is asked for, checked; nothing is trained yet. Its fields are as :func:`prepare`
    made them."""

    run: Run
    data: Federated = field(repr=False)
    plans: Mapping[str, Plan] = field(repr=False)
    rule: Aggregator | None = field(repr=False)
    buffering: Buffering | None
    over: float
    evaluate_every: int
    engine: Engine
    asked: Mapping[str, Any] = field(repr=False)
    """The same as plain values, for a file."""
    device: str = "cpu"
    picked: str = ""
    """Why this engine, where it was to be found out."""
    privacy: Privacy | None = None

    def baseline(self, name: str) -> Experiment:
        """The same data, model, recipe, seed and rounds under another algorithm with its own options, whole and in
        step: what stands beside this run in its report."""
        own = dict(default_of(self.asked["dataset"]).options.get(name, {}))
        run = replace(self.run, algorithm=name, hparams=own, codec="raw", download="raw", asynchronous=False)
        asked = {**self.asked, "run": json.loads(run.to_json()), "plans": {}, "aggregator": None, "own_rule": False}
        asked |= {"buffering": None, "over": 0.0, "privacy": None}
        return replace(self, run=run, plans={}, rule=None, buffering=None, over=0.0, privacy=None, asked=asked)

    def as_fleet(self) -> Experiment:
        """The same under names that devices may have (:mod:`talaria.simulation.device_ids`): draws and the order of a
        sum follow the names, and so the fleet that is written down learns these bytes."""
        ids = ids_of((*self.data.clients, *self.data.newcomers))
        if all(client == device for client, device in ids.items()):
            return self
        data = as_devices(self.data, ids)
        plans = {ids[client]: plan for client, plan in self.plans.items()}
        asked = {**self.asked, "fingerprint": checkpoint.fingerprint(data), "as_devices": True}
        asked["plans"] = {client: plan.to_json() for client, plan in plans.items()}
        return replace(self, data=data, plans=plans, asked=asked)

    def begun(self, folder: Path | None, workers: int = 0, ray: str | None = None) -> AbstractContextManager[None]:
        """This run from its first round, of which :meth:`learn` keeps each whole one in a new ``folder``, if there is
        one; see :func:`talaria.simulation.checkpoint.begun`. How its clients learn is kept too, as this process with
        torch's threads rounds otherwise than processes of one."""
        own = workers if ray is None and type(workers) is int else 1
        return checkpoint.begun(folder, {**self.asked, "workers": own})

    @np.errstate(under="ignore")  # an app that has numpy raise for it means sums of its own
    def learn(
        self,
        progress: Callable[[RoundFacts], None] | None = None,
        save: Path | None = None,
        workers: int = 0,
        ray: str | None = None,
    ) -> Result:
        """All rounds; where ``save`` names a folder, whole rounds are kept there, and what was kept is not learned
        again. With ``workers``, clients learn in so many processes of one thread each; with ``ray``, on a cluster."""
        if progress is not None and not callable(progress):
            raise ConfigError(f"simulate: progress={shown(progress)} must be a function that takes a round's facts")
        members = members_of(self.data.clients, self.plans, self.engine, self.device)
        arrivals = members_of(self.data.newcomers, self.plans, self.engine, self.device)
        every = {**members, **arrivals}
        alone = workers == 0 and ray is None
        require_device(self.device, self.engine, alone=alone)
        with nullcontext() if alone else crew_of(self.run, every, self.data, workers, ray) as crew:
            return self._learned(members, arrivals, crew, progress, save)

    def _learned(
        self,
        members: Mapping[str, Member],
        arrivals: Mapping[str, Member],
        crew: Crew | None,
        progress: Callable[[RoundFacts], None] | None,
        save: Path | None,
    ) -> Result:
        fleet, versions = course(
            self.run,
            members,
            aggregator=private_rule(self.run, self.rule, self.privacy, self.run.seed),
            buffering=self.buffering,
            over=self.over,
            crew=crew,
        )
        marks = {} if save is None else checkpoint.restore(save, fleet)
        found, last, due = None, False, 0.0
        for facts in versions:
            last = facts.round == self.run.rounds
            if self.evaluate_every and (facts.round % self.evaluate_every == 0 or last):
                found = evaluate(learned(fleet), self.data, members, facts.round, crew)
                marks[facts.round] = found.accuracy.mean
            began = time.monotonic()
            if save is not None and (last or began >= due):
                checkpoint.write(save, learned(fleet), marks, fleet)
                took = time.monotonic() - began
                due = began + SPARED * took if took >= SLOW_S else 0.0
            if progress is not None:
                progress(facts)
        final = learned(fleet)
        result = Result(
            learned=final,
            data=self.data,
            members=evaluate(final, self.data, members, crew=crew) if found is None or not last else found,
            newcomers=evaluate(final, self.data, arrivals, crew=crew) if arrivals else None,
            marks=marks,
            asked=self.asked,
            plans=self.plans,
            buffering=self.buffering,
            privacy=self.privacy,
        )
        if save is not None:
            checkpoint.finish(save, result.as_dict())
        return result


@torch.inference_mode(False)
def simulate(
    algorithm: str | Algorithm = "fedavg",
    data: str | Federated = "smartwatch",
    model: str | ModelSpec | Module | Factory | None = None,
    *,
    rounds: int = 30,
    seed: int = 0,
    task: str | None = None,
    options: Mapping[str, Any] | None = None,
    recipe: Recipe | Mapping[str, Any] | None = None,
    aggregator: str | Aggregator | None = None,
    plans: Plan | Mapping[str, Plan] | str | Sequence[str] | None = None,
    adapters: str | AdapterSpec | None = None,
    pretrained: bool = False,
    head: str | None = None,
    fraction: float = 1.0,
    buffers: str = "local",
    codec: str = "raw",
    download: str = "raw",
    over: float = 0.0,
    asynchronous: bool = False,
    buffering: Buffering | Mapping[str, Any] | None = None,
    data_options: Mapping[str, Any] | None = None,
    evaluate_every: int = 0,
    engine: EngineChoice = "torch",
    device: str = "cpu",
    privacy: Privacy | Mapping[str, Any] | None = None,
    save: str | Path | None = None,
    workers: int = 0,
    ray: str | None = None,
    progress: Callable[[RoundFacts], None] | None = None,
) -> Result:
    """Let a whole fleet learn in one process, with the seeds and the bytes of the fleet over MQTT.

    Args:
        algorithm: A name (``talaria algorithms`` lists them), an entry point's name, ``module:Name``, or an object.
        data: A name as :func:`talaria.data.load` takes it, or a :class:`talaria.data.Federated`.
        model: A zoo name, an entry point's, ``module:factory``, a spec, a function ``(input_shape, outputs)`` that
            makes one, or a torch module (all clients begin with its weights). None: the plans' own, the dataset's own,
            or one that fits the data.
        rounds: Communication rounds; in an asynchronous run, versions.
        seed: Everything random derives from it.
        task: What is learned, such as ``"regression"`` or ``"multilabel"`` (:mod:`talaria.tasks`). None: the
            data's own.
        options: The algorithm's hyper-parameters by name.
        recipe: Local training: a whole :class:`talaria.Recipe`, or some of its fields; the others are the dataset's.
        aggregator: Another server rule than the algorithm's own: ``"median:f=1"``, ``"module:Name"``, or an object.
        plans: One plan for every client, one each by name, or the files of ``talaria plan --json``: ``FILE`` for all,
            ``CLIENT=FILE`` for one.
        adapters: ``"lowrank:rank=8"`` and its like, or a spec.
        pretrained: Whether to start from published weights.
        head: The dotted name of the last layer of a model that is not Talaria's, where it is not found.
        fraction: Share of the clients that takes part in a round, in (0, 1].
        buffers: BatchNorm statistics: ``"local"`` or ``"aggregate"``.
        codec: How updates travel: raw, fp16, bf16, int8, topk.
        download: How the global model travels: raw, fp16, bf16, int8.
        over: Ask this share more clients than are counted; who comes first is drawn.
        asynchronous: No rounds in step; ``buffering`` (``buffer``, ``max_staleness``, ``damping``) says how updates
            make a version.
        data_options: Options of a dataset that is given by name.
        evaluate_every: Measure the members after every so many rounds and the last one, for ``result.curve``; 0: at
            the end alone.
        engine: Who trains: ``"torch"``, ``"onnx"``, graphs of the same model in ONNX Runtime (docs/programs.md says
            which algorithms and layers), or ``"auto"``: the one of the two that is faster here, by a few steps of each.
            Their results differ by rounding, so that ``"auto"`` may differ between machines; what it took is kept in
            ``save`` and stands in ``result.as_dict()["engine"]``.
        device: Where torch trains: ``"cpu"``, or a torch device such as ``"cuda"`` or ``"cuda:1"``.
        privacy: A :class:`talaria.privacy.rule.Privacy`, or some of its settings: sums that open only as sums
            (``{"secure": True}``), clipping, noise and a budget (docs/privacy.md).
        save: A new folder that keeps each whole round, so that :func:`talaria.resume` goes on after a kill. Where that
            takes more than a second, as with thousands of clients, a tenth of the time is given to it.
        workers: Clients of a round learn in so many processes of one thread each: the same bytes for every number from
            1 on. 0: one after another in this process, with torch's threads.
        ray: Clients of a round learn on all CPUs of a Ray cluster instead, to the same bytes: its address, or
            ``"auto"`` for the cluster of this machine, else its own cores (``pip install 'talaria[ray]'``).
        progress: Called after each round.

    Returns:
        The :class:`talaria.Result`.

    Raises:
        ConfigError: An argument is unknown or does not fit; it names field, value and mend.
        DataError: The data cannot be learned from.
        StateError: ``save`` holds a run already, or cannot be written.

    Example:
        >>> import numpy, talaria
        >>> draw = numpy.random.default_rng(0)
        >>> y = numpy.tile([0, 1], 40)
        >>> x = draw.normal(size=(80, 4)) + 3 * y[:, None]
        >>> data = talaria.data.Federated.from_arrays(x, y, numpy.repeat(["anna", "bela"], 40))
        >>> result = talaria.simulate("fedper", data, rounds=2)
        >>> sorted(result.clients), result.accuracy.mean > 0.5, len(result.curve)
        (['anna', 'bela'], True, 2)
    """
    asked = prepare(
        algorithm,
        data,
        model,
        rounds=rounds,
        seed=seed,
        task=task,
        options=options,
        recipe=recipe,
        aggregator=aggregator,
        plans=plans,
        adapters=adapters,
        pretrained=pretrained,
        head=head,
        fraction=fraction,
        buffers=buffers,
        codec=codec,
        download=download,
        over=over,
        asynchronous=asynchronous,
        buffering=buffering,
        data_options=data_options,
        evaluate_every=evaluate_every,
        engine=engine,
        device=device,
        privacy=privacy,
    )
    folder = None if save is None else valid.path("simulate", "save", save)
    with asked.begun(folder, workers, ray):
        return asked.learn(progress, folder, workers, ray)


@np.errstate(under="ignore")
def prepare(
    algorithm: str | Algorithm,
    data: str | Federated,
    model: str | ModelSpec | Module | Factory | None = None,
    *,
    rounds: int,
    seed: int = 0,
    task: str | None = None,
    options: Mapping[str, Any] | None = None,
    recipe: Recipe | Mapping[str, Any] | None = None,
    aggregator: str | Aggregator | None = None,
    plans: Plan | Mapping[str, Plan] | str | Sequence[str] | None = None,
    adapters: str | AdapterSpec | None = None,
    pretrained: bool = False,
    head: str | None = None,
    fraction: float = 1.0,
    buffers: str = "local",
    codec: str = "raw",
    download: str = "raw",
    over: float = 0.0,
    asynchronous: bool = False,
    buffering: Buffering | Mapping[str, Any] | None = None,
    data_options: Mapping[str, Any] | None = None,
    evaluate_every: int = 0,
    engine: EngineChoice = "torch",
    device: str = "cpu",
    privacy: Privacy | Mapping[str, Any] | None = None,
) -> Experiment:
    """The experiment of these arguments, which are those of :func:`simulate`; every wrong one is refused here."""
    valid.whole("simulate", "evaluate_every", evaluate_every, 0, 1 << 31)
    valid.among("simulate", "engine", engine, (*ENGINES, AUTO))
    require_device(device, engine)
    device = str(device)  # a torch.device, too
    dataset = data if isinstance(data, str) else None
    if isinstance(data, str) and task is not None and "task" in registry.options_of(data):
        data_options = {"task": task, **table_of("data_options", data_options)}
    found = data_of(data, data_options)
    own = plans_of(plans, (*found.clients, *found.newcomers))
    name, hparams = (algorithm, {}) if isinstance(algorithm, str) else algorithms.name_of(algorithm)
    if hparams and options:
        raise ConfigError(f"simulate: options={dict(options)!r} are for an algorithm's name; set them in the object")
    run = Run.of(
        completed(
            {
                "spec": spec_of(found, model, own, adapters, pretrained, seed, dataset or found.name, head).to_json(),
                "algorithm": name,
                "hparams": hparams or table_of("options", options),
                "recipe": asdict(recipe) if isinstance(recipe, Recipe) else table_of("recipe", recipe),
                "rounds": rounds,
                "seed": seed,
                "task": task_of(found, task),
                "buffers": buffers,
                "fraction": fraction,
                "codec": codec,
                "download": download,
                "asynchronous": asynchronous,
            },
            dataset or found.name,
        )
    )
    built = zoo.build(run.spec)
    if zoo.GROUP.is_foreign(run.spec.name):
        several.require_fits(built, found.input_shape, found.meta.get("parts"))
        tokens.require_known(built, _read(found.everyone))
    _require_answers(run, built, next(iter(found.clients.values())).train)
    rule = rule_of(run, aggregator)
    buffer = buffering_of(run, buffering, len(found.clients))
    check_over(run, over)
    require_enough(run, rule, len(found.clients))
    for plan in {id(plan): plan for plan in own.values()}.values():
        require_plan(run, plan)
    found_engine = Pick(engine, "") if engine != AUTO else pick(run, found.clients, own)
    require_engine(run, found_engine.engine)
    kept = settled(run, privacy, list(found.clients), over)
    if kept is not None:
        require_cohort(kept, needed(run, len(found.clients)))
    own_rule = private_rule(run, rule, kept, run.seed)
    course(run, members_of(found.clients), aggregator=own_rule, buffering=buffer, over=over)  # which may not begin
    text = located(aggregator, Path.cwd()) if isinstance(aggregator, str) else None
    of_here = zoo.GROUP.is_kept(run.spec.name) or algorithms.GROUP.is_kept(run.algorithm)
    return Experiment(
        run=run,
        data=found,
        plans=own,
        rule=rule,
        buffering=buffer,
        over=over,
        evaluate_every=evaluate_every,
        engine=found_engine.engine,
        device=device,
        picked=found_engine.why,
        privacy=kept,
        asked={
            "dataset": dataset or found.name,
            "data_options": None if dataset is None else _written(data_options or {}),
            "fingerprint": checkpoint.fingerprint(found),
            "run": json.loads(run.to_json()),
            "plans": {client: plan.to_json() for client, plan in own.items()},
            "aggregator": text if rule is None or text else type(rule).__name__,
            "own_rule": rule is not None and text is None,
            "buffering": None if buffer is None else asdict(buffer),
            "over": over,
            "evaluate_every": evaluate_every,
            "engine": found_engine.engine,
            "device": device,
            "privacy": None if kept is None else asdict(kept),
        }
        | ({"process": plugins.PROCESS} if of_here else {}),
    )


def _require_answers(run: Run, built: Module, samples: Samples) -> None:
    """Refuse a model that does not answer as the targets of ``samples`` need, before anything is written."""
    split_of(run)
    tasks.of(run.task).measured(predict(built, samples.x[:1]), samples.y[:1])


def _read(clients: Mapping[str, Client]) -> dict[str, Array]:
    """All inputs that a model will read, by whose they are and what for."""
    found: dict[str, Array] = {}
    for name, one in clients.items():
        found |= {f"{name}'s samples": one.train.x, f"{name}'s validation samples": one.val.x}
        found |= {f"{name}'s test samples": one.test.x}
        found |= {} if one.unlabelled is None else {f"{name}'s unlabelled samples": one.unlabelled}
    return found


def _written(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """``options`` of data that was named, for a file; None where it can hold one of them not: whoever resumes the run
    then gives the data itself."""
    found = {name: _plain(value) for name, value in options.items()}
    try:
        json.dumps(found)
    except (TypeError, ValueError):
        return None
    return found


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value.item() if isinstance(value, np.generic) else value
