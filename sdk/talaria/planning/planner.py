"""From (model, budget, device) to a plan, with a reason in words for each choice. Equal inputs, equal plans.

The largest model that keeps the budget wins: channels are kept evenly, in blocks that this device computes fast, and
what is left of the budget buys back the groups that lost most. What costs no channels goes first: half precision in
the file, then a lossy codec on the wire, then slices of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from talaria.errors import BudgetError, ConfigError, ModelError
from talaria.model import adapters, zoo
from talaria.model.spec import AdapterSpec, ModelSpec
from talaria.model.split import WHOLE, Part, torn
from talaria.planning import width_schedule
from talaria.planning.budget import Budget
from talaria.planning.cost import Cost
from talaria.planning.estimates import SLICES, Choice, Figures, figures
from talaria.planning.layer_stats import anatomy
from talaria.planning.plan import Plan
from talaria.planning.profile import Profile
from talaria.planning.width_schedule import Widths, bought_back
from talaria.tensors import Array

RANKS = (8, 4, 2)
"""Ranks of the low-rank adapters that are considered, the largest first."""
HEADS = (64, 32, 16, 8)
"""Ranks of a head in two factors that are considered where the whole one is too large, the largest first."""
TRAINED_SHARE = 0.03
"""Most of a pretrained model's parameters that adapters and head may be by default."""


@dataclass(frozen=True)
class _Way:
    """One way to train and to send, in words."""

    parts: tuple[Part, ...]
    codec: str
    adapters: AdapterSpec | None
    slices: int
    why: str
    wire: str


def plan(
    spec: ModelSpec,
    budget: Budget,
    profile: Profile,
    cost: Cost | None = None,
    *,
    batch: int = 32,
    worth: Mapping[str, Array] | None = None,
) -> Plan:
    """The plan of ``spec`` on the device of ``profile``; ``cost`` is needed where the budget limits latency.

    With ``worth``, what :func:`talaria.model.sensitivity.worth` found for the model without adapters, channels go where
    they are worth least for the time they save; without it they go evenly.

    Raises :class:`~talaria.errors.BudgetError`, with the nearest budget that can be kept, where there is no plan, and
    :class:`~talaria.errors.ConfigError` where a limit needs something that was not measured.
    """
    _answerable(budget, profile, cost)
    search = _Search(spec, budget, profile, cost, batch, worth)
    for group in search.groups():
        best: tuple[int, _Way] | None = None
        for way in group:
            at = search.largest(way)
            if at is not None and (best is None or at < best[0]):
                best = (at, way)
        if best is not None:
            return search.finished(*best)
    raise search.refusal()


def weighed(
    spec: ModelSpec, budget: Budget, made: Plan, profile: Profile, cost: Cost | None, worth: Mapping[str, Array]
) -> Plan:
    """The plan ``made`` for ``spec`` within ``budget``, with widths by ``worth`` and all else as it was.

    What :func:`plan` chooses before there are samples prunes evenly; a model that has learned knows better. ``worth``
    has the groups of the model without adapters. A plan that keeps all channels is given back.
    """
    if not made.widths:
        return made
    search = _Search(adapted(spec, made), budget, profile, cost, made.batch or 32, worth)
    for group in search.groups():
        for way in group:
            if (way.parts, way.codec, way.slices) == (made.trained, made.codec, made.accumulate):
                at = search.largest(way)
                if at is not None:
                    return search.finished(at, way)
    raise ConfigError("the plan was made for another budget, model or device; plan again")


def adapted(spec: ModelSpec, made: Plan) -> ModelSpec:
    """The model that the plan is for: ``spec`` with the plan's adapters."""
    if made.adapter is None:
        return spec
    if spec.adapters is not None and spec.adapters.kind == made.adapter and spec.adapters.rank == made.rank:
        return spec
    return replace(spec, adapters=_adapters(spec, made.adapter, made.rank))


def _adapters(spec: ModelSpec, kind: str, rank: int | None) -> AdapterSpec:
    """Adapters of ``rank`` for a spec that asks for none."""
    return compact(spec, rank) if spec.pretrained and kind == "lowrank" and rank else AdapterSpec(kind, rank)


@lru_cache(maxsize=64)
def _adaptable(spec: ModelSpec) -> bool:
    """Whether the model has a layer beside its head that low-rank adapters can sit on, and runs with them."""
    bare = replace(zoo.plain(spec), adapters=AdapterSpec("lowrank", RANKS[0]))
    try:
        zoo.build(bare).eval()(zoo.example(bare))
    except ModelError:
        return False
    return True


@lru_cache(maxsize=64)
def _torn(spec: ModelSpec, parts: tuple[Part, ...]) -> bool:
    """Whether ``parts`` have a weight under one of its names alone, which is refused where it is trained."""
    model = zoo.build(replace(spec, seed=0, pretrained=False))
    return torn(model, set(zoo.split(spec, model).of(*parts))) is not None


@lru_cache(maxsize=64)
def compact(spec: ModelSpec, rank: int) -> AdapterSpec:
    """Low-rank adapters on the layers that are tuned by default, and the largest head with which they are at most
    :data:`TRAINED_SHARE` of the model's parameters (the smallest one where none is)."""
    bare = zoo.plain(spec)
    whole = sum(p.numel() for p in zoo.build(bare).parameters())
    made = AdapterSpec("lowrank", rank, where=zoo.tuned(spec.name))
    for head in (None, *HEADS):
        made = replace(made, head=head)
        model = zoo.build(replace(bare, adapters=made))
        head_keys = set(zoo.split(bare, model).of("head"))
        trained = adapters.count(model) + sum(p.numel() for k, p in model.named_parameters() if k in head_keys)
        if trained <= TRAINED_SHARE * whole:
            break
    return made


class _Search:
    def __init__(
        self,
        spec: ModelSpec,
        budget: Budget,
        profile: Profile,
        cost: Cost | None,
        batch: int,
        worth: Mapping[str, Array] | None,
    ) -> None:
        self.spec, self.budget, self.profile, self.cost, self.batch = spec, budget, profile, cost, batch
        self.parts = anatomy(zoo.plain(spec))
        self.weighed = worth is not None
        self.steps = (
            width_schedule.evenly(self.parts, profile.block)
            if worth is None
            else width_schedule.by_worth(self.parts, profile.block, worth, self._price)
        )

    def _price(self, widths: Widths) -> float:
        """What widths are traded by: milliseconds where they were measured, else products."""
        return self.parts.products(widths) if self.cost is None else self.cost.latency_ms(self.parts, widths)

    def groups(self) -> list[list[_Way]]:
        """Ways to train, in groups of falling preference; within a group the one that keeps most channels wins."""
        every = self._ways(WHOLE, self.spec.adapters, "everything trains: this is the most accurate")
        tuned: list[list[_Way]] = []
        tuned_parts: tuple[Part, ...] = ("adapters", "head")
        own = self.spec.adapters
        specs = [_adapters(self.spec, "lowrank", r) for r in RANKS if _adaptable(self.spec)] if own is None else [own]
        for one in specs:
            rank = "full width" if one.rank is None else f"rank {one.rank}"
            head = "the head" if one.head is None else f"a head of rank {one.head}"
            why = f"{one.kind} adapters of {rank} and {head} train; the rest is frozen"
            tuned.append(self._ways(tuned_parts, one, why))
        tuned.append(self._ways(("head",), self.spec.adapters, "only the head trains; the rest is frozen"))
        tuned = [g for g in tuned if not _torn(replace(self.spec, adapters=g[0].adapters), g[0].parts)]
        if self.spec.pretrained and self._uncut():
            return [[replace(w, why=f"{w.why}, because the weights are pretrained") for w in g] for g in tuned] + [
                every
            ]
        return [
            every,
            *([replace(w, why=f"{w.why}, because training more breaks the budget") for w in g] for g in tuned),
        ]

    def _ways(self, parts: tuple[Part, ...], adapters: AdapterSpec | None, why: str) -> list[_Way]:
        raw = "full precision fits"
        ways = [("raw", raw)]
        if self.budget.upload_mb is not None:
            limit = f"upload_mb={self.budget.upload_mb:g}"
            ways.append(("fp16", f"half precision halves the upload, so that it fits {limit}"))
            ways.append(("int8", f"8 bits per value, so that the upload fits {limit}"))
        slices = SLICES if self.budget.train_memory_mb is not None else (1,)
        return [
            _Way(parts, codec, adapters, cut, why, wire) for codec, wire in ways for cut in slices if cut <= self.batch
        ]

    def _uncut(self) -> bool:
        """Whether what is deployed keeps its budget with all channels."""
        found = self.figures(self.steps[0], self._ways(("head",), self.spec.adapters, "")[-1])
        deployed = ("latency_ms", "latency_ratio", "run_memory_mb", "bundle_mb")
        return not set(self.budget.broken(found.values)) & set(deployed)

    def figures(self, widths: Widths, way: _Way) -> Figures:
        choice = Choice(replace(self.spec, adapters=way.adapters), way.parts, way.codec, self.batch, way.slices)
        return figures(choice, widths, self.budget, self.profile, self.cost)

    def _broken(self, widths: Widths, way: _Way) -> dict[str, float]:
        return self.budget.broken(self.figures(widths, way).values)

    def largest(self, way: _Way) -> int | None:
        """Index of the first even cut that keeps the budget this way, or None."""
        low, high = 0, len(self.steps) - 1
        if not self._broken(self.steps[low], way):
            return low  # asked first: only cut models must keep a margin, so a small cut may not fit where no cut does
        if self._broken(self.steps[high], way):
            return None
        while low < high:
            middle = (low + high) // 2
            if self._broken(self.steps[middle], way):
                low = middle + 1
            else:
                high = middle
        return low

    def finished(self, at: int, way: _Way) -> Plan:
        def keeps(widths: Widths) -> bool:
            return not self._broken(widths, way)

        layout, block = self.parts.layout, self.profile.block
        # By worth, the last block that was given up is all that the budget could not hold.
        chosen = self.steps[at] if at == 0 or self.weighed else bought_back(self.steps[at], layout, block, keeps)
        found = self.figures(chosen, way)
        halved = self.budget.bundle_mb is not None and found.values["bundle_fp32_mb"] > self.budget.bundle_mb
        kept = sum(chosen.values()) / max(1, sum(self.parts.layout.sizes.values()))
        names = self.parts.renamed(anatomy(replace(self.spec, adapters=way.adapters)))
        cut = {names[g]: w for g, w in chosen.items() if w < self.parts.layout.sizes[g]}
        reasons = {
            "budget": self.budget.words,
            "widths": self._why_widths(kept, at),
            "trained": way.why,
            "codec": way.wire,
            "precision": "half precision in the file keeps bundle_mb, at the same speed" if halved else "fp32 fits",
            "batch": f"{self.batch} samples a step"
            + (f" in {way.slices} slices, so that train_memory_mb is kept" if way.slices > 1 else ""),
        }
        whole = zoo.left_whole(zoo.plain(self.spec))
        if whole:
            reasons["whole"] = whole
        if found.steps is not None:
            each = f"{found.values['step_s']:.3g} s a step"
            reasons["steps"] = f"{found.steps}, as many as fit into the training budget at {each}"
        return Plan(
            widths=cut,
            reasons=reasons,
            adapter=None if way.adapters is None else way.adapters.kind,
            rank=None if way.adapters is None else way.adapters.rank,
            trained=way.parts,
            batch=self.batch,
            accumulate=way.slices,
            steps=found.steps,
            precision="fp16" if halved else "fp32",
            codec=way.codec,
            predicted=found.reported("fp16" if halved else "fp32"),
        )

    def _why_widths(self, kept: float, at: int) -> str:
        block = self.profile.block
        if at == 0:
            return width_schedule.UNCUT
        why = f"{kept:.0%} of the channels are kept, in blocks of {block}, which this device computes fast"
        if self.weighed:
            why += "; those go that are worth least to the loss for the time they save"
        if self.cost is not None and self.budget.limits_latency:
            why += f"; latency is predicted from {self.cost.probes} models measured here, with {self.cost.why_margin}"
        return why

    def _smallest(self) -> str:
        """What the smallest model that can be cut from this one is, in words."""
        groups, whole = self.parts.layout.sizes, zoo.left_whole(zoo.plain(self.spec))
        if not groups:
            return f"nothing of {self.spec.name} can be pruned: {whole or 'it has no channels to take out'}"
        outputs, block = self.spec.classes, self.profile.block
        own = f"{self.spec.name} of {outputs} outputs with one block of {block} channels in every group"
        return f"{own}; left whole: {whole}" if whole else own

    def refusal(self) -> BudgetError:
        """What is missing, and the nearest budget that can be kept."""
        smallest = self.steps[-1]
        every = (self._broken(smallest, group[-1]) for group in self.groups())
        broken = min(every, key=lambda limits: (len(limits), sum(limits.values())))
        mended = {name: _rounded_up(need) for name, need in broken.items() if name != "latency_ratio" or need <= 1}
        nearest = replace(self.budget, **{name: mended.get(name) for name in broken})
        said = self.budget.refused({name: mended.get(name, 1.0) for name in broken})
        return BudgetError(
            f"budget: {said} ({self._smallest()}); ask for that, or choose a smaller model",
            nearest,
        )


def _answerable(budget: Budget, profile: Profile, cost: Cost | None) -> None:
    if cost is None and budget.limits_latency:
        raise ConfigError("budget: latency is limited, but this model's cost is not measured; give cost=measure(...)")
    if budget.energy_j is not None and profile.watts is None:
        raise ConfigError(
            f"budget: energy_j={budget.energy_j} needs to know what training draws; give the profile its watts, "
            "or limit train_s"
        )


def _rounded_up(value: float) -> float:
    """``value`` to three digits, never below it."""
    short = float(f"{value:.3g}")
    return short if short >= value else float(f"{value * 1.005:.3g}")
