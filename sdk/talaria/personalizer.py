"""One device's model, from start to bundle. Thin: it only arranges the planner, the training loop and the exporter.

personal = Personalizer(ModelSpec("imu_cnn", (6, 100), 7), budget=Budget(latency_ratio=0.5, upload_mb=0.1))
personal.fit(train, val)          # alone, offline, useful at once
personal.export("me.talaria")     # ONNX and manifest, proven against torch
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from talaria import plugins, tasks, valid
from talaria.aggregate.validation import lost
from talaria.data.federated import require_inputs
from talaria.errors import BudgetError, ConfigError, DataError, ModelError
from talaria.federated import targets
from talaria.federated.plan_compat import recipe_under
from talaria.foreign import shown
from talaria.model import adapters, answers, prunability, pruning, several, split, tokens, zoo
from talaria.model.cloning import clone
from talaria.model.masks import ChannelMask
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.split import Split
from talaria.model.state import load, state_of, tensor_of
from talaria.planning import measured, onnx_runtime, planner
from talaria.planning.budget import AccuracyCheck, Budget
from talaria.planning.plan import Plan
from talaria.planning.profile import Profile
from talaria.planning.refusals import short
from talaria.tasks import Scale
from talaria.tensors import Array, Tensors
from talaria.training import engine, loop
from talaria.training.interface import Task
from talaria.types import Recipe, Samples, inputs_of

SCORED = 16
"""Most batches that channels are scored on."""

BUNDLERS = "talaria.bundlers"
"""Entry-point group in which an installed maker of bundles makes itself known."""

RUNTIMES = "talaria.runtimes"
"""Entry-point group in which an installed program makes itself known that takes part in a fleet for a device."""


@dataclass(frozen=True, kw_only=True)
class Joining:
    """What a device brings to a fleet: handed to the ``runtime`` of :meth:`Personalizer.join`."""

    broker: str
    fleet: str
    device: str | None
    """None: the name in the device's keys, or the runtime's own."""
    plan: Plan
    train: Samples
    val: Samples
    unlabelled: Array | None = field(default=None, repr=False)
    """Inputs float32 (N, ...) that nobody has labelled; None: there are none."""
    model: Module = field(repr=False)
    """The network before any channel was pruned: the fleet's must have the same tensors."""
    spec: ModelSpec | None = None
    """That of ``model``; None where a torch module was given."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments for the runtime."""


Runtime = Callable[[Joining], Module]
"""Takes part in a fleet until the run is over, and gives the personal model."""


class Personalizer:
    """A model that becomes one user's own, within a budget.

    ``model`` is a :class:`~talaria.model.spec.ModelSpec`, or any torch module that maps a batch to what ``task`` needs,
    in classification logits (N, classes), and whose last layer ``head`` names; None: its layer ``head``, the linear
    one that answers last, or where none is linear the last convolution with as many channels as outputs. The budget of
    a module is planned at :meth:`fit`, which shows what it reads. ``plan`` takes the place of planning, such as one
    that was made for this kind of device. With ``by_worth`` a zoo model that must lose channels loses those that the
    samples of :meth:`fit` need least for their time, where it loses them evenly without: better for large networks and
    many samples, no better for small ones. ``task`` is what is learned (:mod:`talaria.tasks`); of another than
    classification, what is called accuracy here is its score.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        model: ModelSpec | Module,
        budget: Budget | None = None,
        *,
        plan: Plan | None = None,
        head: str | None = None,
        profile: Profile | None = None,
        by_worth: bool = False,
        seed: int = 0,
        task: str = tasks.CLASSIFICATION,
    ) -> None:
        if budget is not None and not isinstance(budget, Budget):
            raise ConfigError(f"budget={shown(budget)} must be a Budget, such as Budget(latency_ms=5)")
        if plan is not None and not isinstance(plan, Plan):
            raise ConfigError(
                f"plan={shown(plan)} must be a Plan; talaria.federated.plan_compat.read takes one from a file"
            )
        if head is not None and not isinstance(head, str):
            raise ConfigError(f"head={shown(head)} must be the dotted name of a layer, such as 'fc', or left out")
        if profile is not None and not isinstance(profile, Profile):
            raise ConfigError(f"profile={shown(profile)} must be a Profile, as talaria profile measures one")
        self.budget = budget or Budget()
        self.seed = seed
        self._head = head
        self._profile = profile
        self._spec = model if isinstance(model, ModelSpec) else None
        self._given = model if isinstance(model, Module) else None
        if self._spec is None and self._given is None:
            raise ConfigError(f"model={type(model).__name__} must be a ModelSpec or a torch module")
        if self._spec is not None and head is not None:
            raise ConfigError(f"head={shown(head)} is a module's; a ModelSpec has its own: ModelSpec(..., head=...)")
        if self._given is not None:
            answers.require_own_weights(self._given, "model")
            several.require_one(self._given, "model")
        limits = sorted(set(self.budget.limits()) - {"accuracy_drop"})
        self._unplanned = self._given is not None and plan is None and bool(limits)
        if by_worth and (self._spec is None or (plan is not None and not limits)):
            raise ConfigError(
                "by_worth=True chooses the widths of a zoo model within a budget; give a ModelSpec, and with a plan "
                "the budget that it was made for"
            )
        if by_worth and task != tasks.CLASSIFICATION:
            raise ConfigError(
                f"by_worth=True weighs channels by the cross-entropy of classes, and task={shown(task)} has none; "
                "leave it out: channels are then given up evenly"
            )
        self.goal, self._aim = task, tasks.of(task)
        self._plan = plan
        self._by_worth = by_worth
        self._task: Task | None = None
        self._dense: Module | None = None
        self._model: Module | None = None
        self.accuracy: float | None = None
        """Share of the held-out samples that the present model labels right, or its task's score, once it is fitted."""
        self._twin: float | None = None

    @property
    def plan(self) -> Plan:
        """What was chosen for this device, with reasons; measured and worked out at first use. :meth:`fit` chooses
        the widths again where they go by worth. Raises :class:`~talaria.errors.ModelError` for a module before it."""
        if self._plan is None:
            if self._unplanned:
                raise ModelError("plan: what a torch module reads is not known yet; call fit(train, val) first")
            self._plan = Plan() if self._spec is None else measured.plan(self._spec, self.budget, profile=self._profile)
        return self._plan

    @property
    def model(self) -> Module:
        """The personal model, in eval mode. Raises :class:`~talaria.errors.ModelError` before :meth:`fit`."""
        return self._fitted()[1]

    @property
    def check(self) -> AccuracyCheck | None:
        """What the plan cost in accuracy against its dense twin, which :meth:`fit` learned in the same way but for the
        pruning; None where the budget (or the plan) sets no ``accuracy_drop``, and before :meth:`fit`."""
        if self._task is None or self._allowed is None:
            return None
        return AccuracyCheck(self.accuracy or 0.0, self._twin or 0.0, self._allowed, len(self._task.val))

    @property
    def _allowed(self) -> float | None:
        return self.plan.accuracy_drop if self.budget.accuracy_drop is None else self.budget.accuracy_drop

    @torch.inference_mode(False)
    def fit(
        self,
        train: Samples | tuple[Any, Any],
        val: Samples | tuple[Any, Any] | None = None,
        *,
        epochs: int = 30,
        recipe: Recipe | None = None,
    ) -> Personalizer:
        """Learn from this device's samples alone; ``val`` is held out and only measured on. Both are Samples, or
        (x, y) as tensors, numpy arrays or lists. ``epochs`` stands in for those of ``recipe``.

        Where the plan prunes, the whole model learns for the first third of the epochs, then gives up its least
        important channels, and the small one learns on. Frozen layers are computed once (see
        :mod:`talaria.training.frozen_features`). Where the budget limits ``accuracy_drop``, the whole model learns on
        as well, to tell what pruning cost: :attr:`check` holds it, and :meth:`export` refuses a model that broke the
        limit.
        """
        train = _samples(train, "train", self.goal)
        held = train.take(np.arange(0)) if val is None else _samples(val, "val", self.goal)
        if not len(train):
            raise DataError("train: there are no samples to learn from")
        if not self._aim.count(train.y):
            raise DataError("train: no step is labelled, all are -1; label some")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise ConfigError(f"recipe={shown(recipe)} must be a Recipe, such as Recipe(lr=0.02)")
        for name in ("steps", "schedule", "warmup") if recipe is not None else ():
            if (value := getattr(recipe, name)) != getattr(Recipe(), name):
                raise ConfigError(f"recipe: {name}={value!r} is for rounds, and fit learns for epochs=; leave it out")
        if recipe is not None and recipe.smoothing and self.goal != tasks.CLASSIFICATION:
            raise ConfigError(
                f"recipe: smoothing={recipe.smoothing} smooths the labels of plain classification, and "
                f"task={self.goal!r} is another; set it to 0"
            )
        if len(held) and held.x.shape[1:] != train.x.shape[1:]:
            raise DataError(f"val: inputs of shape {held.x.shape[1:]}, train has {train.x.shape[1:]}")
        if self._given is not None:
            _require_inputs(self._given, train, held)
            answers.warn_of_frozen(self._given, "model")
        read = {"train's samples": train.x, "val's samples": held.x}
        given = None if self._given is None else zoo.own(clone(self._given), tensor_of(train.x[:2]))
        if given is not None:
            tokens.require_known(given, read)
            if self._unplanned and self._plan is None:
                self._plan = self._planned(given, train)
        chosen = self.plan
        recipe = recipe or Recipe(batch=32, lr=0.02, momentum=0.9, weight_decay=1e-4)
        recipe = recipe_under(recipe, replace(chosen, steps=None)).but(epochs=epochs, steps=None)
        model, parts = self._built(given, train.x[:2])
        tokens.require_known(model, {} if given is not None else read)
        if given is None:
            _require_inputs(model, train, held)
        classes = int(self._classes(model, train, held))
        targets.require_folds(model, tensor_of(train.x[:2]), parts, self.goal)
        scale = self._aim.scale(train.y)
        task = Task(
            model=model, split=parts, train=targets.scaled(train, scale), val=held, recipe=recipe, classes=classes,
            seed=self.seed, goal=self.goal,
        )  # fmt: skip
        state = state_of(model)
        only = None if len(chosen.trained) == 3 else parts.of(*chosen.trained)
        dense, twin = clone(model), None
        if chosen.widths:
            first = max(1, epochs // 3)
            rest = recipe.but(epochs=max(0, epochs - first))
            state = _trained(task.but(recipe=recipe.but(epochs=first)), state, only, "dense")
            if self._spec is not None and self._by_worth:
                learned = load(clone(model), state)
                some = recipe.but(epochs=1, most_steps=SCORED, augment="none")
                batches = loop.feed(task, some, train, "worth")
                chosen = measured.weighed(self._spec, self.budget, chosen, learned, batches, profile=self._profile)
                self._plan = chosen
            if self._allowed is not None and len(held):
                twin = self._score(_serving(task, _trained(task.but(recipe=rest), state, only, "train"), scale), held)
            task, state = _pruned(task.but(recipe=rest), state, chosen)
        state = _trained(task, state, only, "train")
        self._task, self._model, self._dense = task.but(train=train), _serving(task, state, scale), dense
        self.accuracy = self._score(self._model, held) if len(held) else None
        self._twin = self.accuracy if twin is None else twin  # where nothing was pruned, the model is its own twin
        return self

    def join(
        self,
        broker: str,
        fleet: str,
        *,
        device: str | None = None,
        unlabelled: Any = None,
        runtime: Runtime | None = None,
        **options: Any,
    ) -> Personalizer:
        """Learn with a fleet until its run is over. This device takes part with the samples of :meth:`fit` and the
        plan, from the fleet's own beginning, as every member does: the bytes stay those of the simulation, and what
        :meth:`fit` learned stays here. The personal model that comes of it replaces the present one only if it does
        better on the held-out samples.

        This waits, for hours where the fleet needs hours; in async code write ``await asyncio.to_thread(personal.join,
        ...)``. A program that was killed meanwhile calls it again and goes on where it was.

        Args:
            broker: URL of the fleet's broker, such as ``mqtts://host:8883``.
            fleet: The fleet's name.
            device: This device's name in the fleet. None: that in its keys, or ``"device"`` without keys.
            unlabelled: Inputs (N, ...) of this device that nobody has labelled, on which BatchNorm is calibrated beside
                the labelled ones. None: there are none.
            runtime: Takes part and gives the personal model. None: the agent that is installed
                (``talaria_edge``, entry point ``talaria.runtimes``).
            options: Further arguments of :class:`talaria_edge.Device`, such as ``keys``, ``state``, ``patience_s``.

        Returns:
            This Personalizer.

        Raises:
            ModelError: :meth:`fit` was not called yet.
            ConfigError: No agent is installed, an argument does not fit, or the fleet's model is another.
            DataError: The fleet's model cannot learn from these samples, or ``unlabelled`` has another shape than
                theirs.
            StateError: The device's state folder is damaged, in use, or of another run.
            TransportError: The broker did not answer within ``patience_s``.

        Example:
            ``personal.fit(train, val).join("mqtts://broker.example:8883", fleet="watch", keys="identity")``
        """
        task, _, dense = self._fitted()
        rest = None if unlabelled is None else inputs_of(unlabelled, "unlabelled")
        if rest is not None:
            require_inputs("unlabelled", rest, task.train.x.shape[1:])
        offered = (runtime or _runtime(broker, fleet))(
            Joining(
                broker=broker,
                fleet=fleet,
                device=device,
                plan=self.plan,
                train=task.train,
                val=task.val,
                unlabelled=rest,
                model=dense,
                spec=None if self._spec is None else planner.adapted(self._spec, self.plan),
                options=options,
            )
        )
        if len(task.val):
            share = self._score(offered, task.val)
            if self.accuracy is not None and share <= self.accuracy:
                return self
            self.accuracy = share
        self._model = offered.requires_grad_(False).eval()
        return self

    def export(self, path: str | os.PathLike[str], *, labels: Sequence[str] | None = None, **options: Any) -> Any:
        """Write the bundle of the personal model to ``path`` and give the report of what was measured.

        ``options`` are those of :func:`talaria_export.make_bundle`. Needs the extra ``talaria[export]``. Raises
        :class:`~talaria.errors.BudgetError`, with the nearest budget that is kept, where the model lost more accuracy
        than ``accuracy_drop`` allows.
        """
        (task, model, dense), check = self._fitted(), self.check
        if check is not None and check.kept is False:
            nearest = replace(self.budget, accuracy_drop=check.nearest)
            raise BudgetError(
                f"budget: {check.reason}; nearest possible accuracy_drop={nearest.accuracy_drop:g} with these widths. "
                "Allow that, or a larger model",
                nearest,
            )
        meta = {
            "plan": self.plan.to_json(),
            "budget": self.budget.to_json(),
            "model": None if self._spec is None else planner.adapted(self._spec, self.plan).to_json(),
            "accuracy": None if check is None else check.to_json(),
        }
        asked = {"precision": self.plan.precision} if self.plan.precision != "fp32" else {}
        with suppress(OSError):  # whoever writes the bundle tells it
            valid.path("export", "path", path).parent.mkdir(parents=True, exist_ok=True)
        return _bundler()(
            path,
            model,
            **{
                "example": task.train.x[:1],
                "samples": task.val if len(task.val) else None,
                "calibration": task.train.x,
                "labels": labels,
                "meta": meta,
                "dense": dense,
                **({} if self._aim.name == tasks.CLASSIFICATION else {"task": self.goal}),
                **asked,
                **options,
            },
        )

    def _fitted(self) -> tuple[Task, Module, Module]:
        """What :meth:`fit` made: the task, the personal model, and the unpruned one."""
        if self._task is None or self._model is None or self._dense is None:
            raise ModelError("there is no personal model yet; call fit(train, val) first")
        return self._task, self._model, self._dense

    def _built(self, given: Module | None, example: Array) -> tuple[Module, Split]:
        chosen = self.plan
        if self._spec is not None:
            spec = planner.adapted(self._spec, chosen)
            if example.shape[1:] != spec.input_shape:
                raise DataError(f"train: inputs of shape {example.shape[1:]}, the model takes {spec.input_shape}")
            model = zoo.build(spec)
            return model, zoo.split(spec, model)
        model = Module() if given is None else given
        head = self._last(model, example)
        if chosen.adapter is not None:
            model = adapters.insert(model, AdapterSpec(chosen.adapter, chosen.rank), skip=(head,), seed=self.seed)
        return model, split.split_model(model, head=head)

    def _planned(self, module: Module, train: Samples) -> Plan:
        """The plan of the module that was given, for what it reads of ``train``."""
        outputs, head = _answers(module, train.x[:2], self.goal), self._last(module, train.x[:2])
        spec = zoo.keep(module, train.x.shape[1:], outputs, head)
        return replace(measured.plan(spec, self.budget, profile=self._profile), model=None)

    def _last(self, module: Module, example: Array) -> str:
        if self._head is not None:
            return self._head
        if any(key.startswith("head.") for key in module.state_dict()):
            return "head"
        found = answers.last_linear(module, tensor_of(example))
        return found or answers.last_convolution(module, _answers(module, example, self.goal)) or "head"

    def _classes(self, model: Module, train: Samples, held: Samples) -> int:
        if self._spec is not None:
            zoo.require_form(self._spec, self._aim.answer, self.goal)
            classes = self._spec.classes
        else:
            found = _answered(model, train.x[:2], self.goal)
            classes = int(found.shape[-1])
            if self._aim.name != "regression":  # whose targets may add up to 1
                answers.warn_of_shares(found, "model")
        for name, samples in (("train", train), ("val", held)):
            if len(samples):
                self._aim.require(f"{name}:", samples.y, classes)
        return classes

    def _score(self, model: Module, samples: Samples) -> float:
        return self._aim.measured(loop.predict(model, samples.x), samples.y)[0]


def _serving(task: Task, state: Tensors, scale: Scale | None) -> Module:
    """What is run and exported: of regression a model that speaks in the targets' own units."""
    model = loop.served(task, state)
    if scale is not None:
        targets.folded(model, scale, task.split)
    return model


def _trained(task: Task, state: Tensors, only: Sequence[str] | None, purpose: str) -> Tensors:
    if only is None:
        after = engine.train(task, state, purpose=purpose)
    else:
        after = engine.train_upper(task, state, only=only, purpose=purpose)
    if (name := lost(state, after)) is not None:
        raise ConfigError(
            f"recipe: with lr={task.recipe.lr:g} the training diverged, tensor {name!r} holds NaN or infinity; "
            "lower lr, or scale the samples"
        )
    return after


def _pruned(task: Task, state: Tensors, plan: Plan) -> tuple[Task, Tensors]:
    model = load(task.model, state)
    layout = prunability.layout(model, tensor_of(task.train.x[:2]))
    scores = pruning.importance(model, layout)
    mask: ChannelMask = pruning.choose(scores, layout.full(), widths=plan.widths, block=1)
    small = pruning.compact(model, mask)
    return replace(task, model=small, mask=mask, plan=plan), state_of(small)


def _samples(given: Samples | tuple[Any, Any], name: str, task: str) -> Samples:
    if isinstance(given, Samples):
        return given
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise DataError(f"{name}: need Samples, or a pair (x, y) of arrays, got {type(given).__name__}")
    return Samples.of(*given, task=task)


def _require_inputs(model: Module, *parts: Samples) -> None:
    """Raise :class:`~talaria.errors.DataError` where named inputs are not those that ``model`` reads."""
    for samples in parts:
        several.require_fits(model, samples.x.shape[1:], samples.parts)


def _answers(model: Module, x: Array, task: str) -> int:
    """The number of classes that ``model`` tells apart, or its outputs; raises as :func:`_answered`."""
    return int(_answered(model, x, task).shape[-1])


def _answered(model: Module, x: Array, task: str) -> Tensor:
    """What ``model`` gives of ``x``. Raises :class:`~talaria.errors.ModelError` where it does not map a float32 batch
    to logits (N, classes), or as the task needs."""
    form = tasks.of(task).answer
    try:
        with torch.no_grad():
            answer = clone(model).eval()(tensor_of(x))
    except Exception as error:
        raise ModelError(
            f"model: cannot take a float32 batch of shape {x.shape} ({type(error).__name__}: {short(error)}); give "
            "samples of the shape that it takes; where it takes whole numbers such as tokens, convert in its forward"
        ) from error
    if not isinstance(answer, Tensor) or answer.dim() != len(form) or len(answer) != len(x):
        found = tuple(answer.shape) if isinstance(answer, Tensor) else f"a {type(answer).__name__}"
        raise ModelError(f"model: gives {found} for a batch of {len(x)}; it must give ({', '.join(form)}) and no more")
    return answer


def _bundler() -> Callable[..., Any]:
    lacking = "export: no maker of bundles is installed"
    found: Callable[..., Any] = plugins.installed(BUNDLERS, "export", lacking, onnx_runtime.NEEDS)
    return found


def _runtime(broker: str, fleet: str) -> Runtime:
    lacking = f"join: taking part in {fleet!r} at {broker} needs the device's agent"
    mend = "pip install talaria, or pass runtime=, a function that takes part and gives the model"
    found: Runtime = plugins.installed(RUNTIMES, "join", lacking, mend)
    return found
