"""A device without torch plans for itself: it measures the graph of its run's kit at some widths, and chooses its own.

The graph that gives the logits serves every width, so the probes are that one file with other weights, which ONNX
Runtime holds as it holds those of a bundle. The algorithm, what trains and what travels are the run's. The plan is
kept as a document of ``talaria plan --json``, and made anew where the model, the budget or the machine is another.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from talaria import cpuinfo, durable, seeds
from talaria.errors import BudgetError, ConfigError, StateError
from talaria.federated import plan_compat
from talaria.federated.kit import Kit
from talaria.federated.run import Run
from talaria.model import masks
from talaria.model.widths import first_of, whole
from talaria.planning import cpu_timer, width_schedule
from talaria.planning.anatomy import Anatomy, Widths, bundle_bytes, sent_bytes
from talaria.planning.budget import Budget
from talaria.planning.cost import Cost, predicted
from talaria.planning.plan import Plan
from talaria.programs import onnx_file
from talaria.programs.session import Session, runtime
from talaria.programs.shapes import Value, measure

VERSION = 4
"""Of how a device plans; plans of another one are made anew."""
BLOCK = 8
"""Channels that widths are whole multiples of, as a profile has it where it is not measured."""
PROBES = 12
ROUNDS, BURST, SECONDS = 40, 3e-3, 3.0
"""Bursts of each probe at most, the CPU seconds that one aims at, and those after which no round of bursts begins."""
CODECS = ("raw", "fp16", "int8")
UNKNOWN = ("train_memory_mb", "train_s", "energy_j")
"""Limits that need what torch alone can work out, or a profile."""


def require_answerable(budget: Budget) -> None:
    """Raise :class:`~talaria.errors.ConfigError` for a limit that a device cannot plan for by itself."""
    odd = [name for name in budget.limits() if name in UNKNOWN]
    if odd:
        raise ConfigError(
            f"budget: {odd[0]}={budget.limits()[odd[0]]:g} cannot be worked out on a device without torch; leave it "
            "out, or write a plan where torch is (`talaria plan --json`) and name it as [device] plan"
        )


def plan(run: Run, kit: Kit, budget: Budget, cost: Cost | None = None) -> Plan:
    """The widest model that keeps ``budget`` here; ``cost`` is measured where it is not given and latency is limited.

    Raises :class:`~talaria.errors.BudgetError`, with the nearest budget, where there is none, and
    :class:`~talaria.errors.ConfigError` for what cannot be planned here.
    """
    require_answerable(budget)
    parts = kit.anatomy
    if cost is None and budget.limits_latency:
        cost = measured(run, kit)
    search = _Search(run, kit, parts, budget, cost)
    sizes, fixed = parts.layout.sizes, _fixed(kit)
    cuts = [{**cut, **fixed} for cut in width_schedule.evenly(parts, BLOCK)]
    codecs = CODECS if run.codec != "raw" else CODECS[:1]
    firsts = [(search.first(cuts, codec), place) for place, codec in enumerate(codecs)]
    fits = [(at, place) for at, place in firsts if at is not None]
    if not fits:
        raise search.refusal(cuts[-1], codecs[-1])
    at, place = min(fits)
    codec, widths = codecs[place], cuts[at]
    if at:
        widths = width_schedule.bought_back(widths, parts.layout, BLOCK, partial(search.keeps, codec=codec))
    figures = search.figures(widths, codec)
    halved = budget.bundle_mb is not None and figures.bundle_fp32_mb > budget.bundle_mb
    return Plan(
        widths={group: width for group, width in widths.items() if width < sizes[group]},
        reasons=search.reasons(widths, codec, cut=at > 0, halved=halved),
        precision="fp16" if halved else "fp32",
        codec=codec,
        accuracy_drop=budget.accuracy_drop,
        model=run.spec.to_json(),
        predicted=figures.told(halved=halved),
    )


def _fixed(kit: Kit) -> dict[str, int]:
    """The groups that no program of the kit narrows, and their sizes: around a convolution of several groups."""
    ports, sizes = kit.source.forward().graph.inputs, kit.layout.sizes
    axes = (zip(kit.layout.axes.get(port.name.removeprefix("weight/"), ()), port.shape, strict=False) for port in ports)
    whole = (axis for each in axes for axis, size in each if isinstance(size, int))
    return {group: sizes[group] for axis in whole for group, _ in axis}


def kept(path: Path, run: Run, kit: Kit, budget: Budget) -> Plan:
    """The plan in the file ``path`` where it is of this model, budget and machine, else one that is made now and
    written there. Raises as :func:`plan`, and :class:`~talaria.errors.StateError` where it cannot be written.
    """
    machine = _machine(run, kit, budget)
    if _machine_of(path) == machine:
        try:
            return plan_compat.read(path)
        except ConfigError:  # damaged: made anew
            pass
    made = plan(run, kit, budget)
    document = {"model": run.spec.to_json(), "plan": made.to_json(), "machine": machine}
    try:
        durable.write(path, json.dumps(document, indent=1, sort_keys=True).encode())
    except OSError as error:
        raise StateError(f"plan: {path} could not be written: {error.strerror}; make room there") from None
    return made


def _machine_of(path: Path) -> object:
    try:
        with path.open("rb") as file:
            return json.loads(file.read(1 << 20))["machine"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _machine(run: Run, kit: Kit, budget: Budget) -> str:
    """Names what a plan depends on: equal names, equal models, budgets and machines."""
    cpu = cpuinfo.facts().get("model name", "")
    graph = hashlib.sha256(kit.source.files["forward"]).hexdigest()
    about: list[Any] = [VERSION, run.identity, run.codec, graph, budget.to_json()]
    about += [cpu, platform.machine(), runtime()]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


# -- what is measured


def measured(run: Run, kit: Kit) -> Cost:
    """The model's latency here, in CPU time of one core for one input, explained by what its layers compute."""
    parts, begin = kit.anatomy, time.thread_time()
    widths = _probes(parts)
    calls = {str(i): _call(run, kit, one) for i, one in enumerate(widths)}
    took = cpu_timer.interleaved(calls, ROUNDS, BURST, SECONDS)
    size = len(kit.source.files["forward"])
    return Cost.explaining(parts, widths, took, BLOCK, size, time.thread_time() - begin)


def _probes(parts: Anatomy) -> list[dict[str, int]]:
    """Widths to measure: all channels, the fewest, even cuts, and random ones. The same ones every time."""
    full, draws = parts.full(), seeds.draws(0, "device", 0, "probes")
    even = [{g: whole(parts.layout, g, keep * n, BLOCK) for g, n in full.items()} for keep in (1e-6, 0.75, 0.5, 0.25)]
    chosen = [full, *even]
    while len(chosen) < PROBES:
        share = 0.1 + 0.9 * float(draws.uniform(1)[0])
        own = dict(zip(full, (share * (0.5 + draws.uniform(len(full)))).tolist(), strict=True))
        chosen.append({g: whole(parts.layout, g, min(1.0, own[g]) * n, BLOCK) for g, n in full.items()})
    return chosen


def _call(run: Run, kit: Kit, widths: Widths) -> Callable[[], None]:
    """One input through the model at ``widths``, with its weights as constants, as they are in a bundle."""
    state = masks.gathered(kit.model, kit.model, first_of(kit.layout, widths))
    graph = kit.source.forward().fixed(state)
    x = np.zeros((1, *run.spec.input_shape), np.float32)
    session = Session(onnx_file.write(graph, ""))
    (out,) = session(["features"], {"x": x})
    return session.bound({"x": x}, {"features": np.ascontiguousarray(out)})


# -- what is chosen


@dataclass(frozen=True)
class _Figures:
    """By their names in a budget; latencies hold ``spare``, the share of them that is kept in hand."""

    values: dict[str, float]
    bundle_fp32_mb: float
    spare: float

    def told(self, *, halved: bool) -> dict[str, float]:
        """As a plan tells them."""
        return predicted(self.values | ({} if halved else {"bundle_mb": self.bundle_fp32_mb}), self.spare)


@dataclass(frozen=True)
class _Search:
    run: Run
    kit: Kit
    parts: Anatomy
    budget: Budget
    cost: Cost | None

    def figures(self, widths: Widths, codec: str) -> _Figures:
        found: dict[str, float] = {}
        spare = 0.0
        if self.cost is not None:
            uncut = dict(widths) == self.parts.full()
            spare = 0.0 if uncut else self.cost.margin
            predicted = self.cost.latency_ms(self.parts, widths) * (1 + spare)
            found["latency_ms"] = self.cost.dense_ms if uncut else predicted
            found["latency_ratio"] = found["latency_ms"] / self.cost.dense_ms
        half, both = bundle_bytes(self.parts, widths, len(self.kit.source.files["forward"]))
        found["bundle_mb"] = half / 1e6
        sent = [key for key in self.kit.shared if key in self.parts.shapes]
        found["upload_mb"] = sent_bytes(self.parts, widths, sent, codec) / 1e6
        if self.budget.run_memory_mb is not None:
            found["run_memory_mb"] = self._running(widths) / 1e6
        return _Figures(found, both / 1e6, spare)

    def _running(self, widths: Widths) -> int:
        """Bytes of weights and of what lives at once in one pass."""
        look = self.kit.source.forward()
        given = {"x": Value((1, *self.run.spec.input_shape))}
        for port in look.graph.inputs:
            if port.name.startswith("weight/"):
                given[port.name] = Value(self.parts.shape(port.name.removeprefix("weight/"), widths), port.dtype)
        return measure(look.graph, given, look.limits).memory_bytes

    def keeps(self, widths: Widths, *, codec: str) -> bool:
        return not self.budget.broken(self.figures(widths, codec).values)

    def first(self, cuts: list[dict[str, int]], codec: str) -> int | None:
        """Index of the widest cut that keeps the budget."""
        return next((at for at, widths in enumerate(cuts) if self.keeps(widths, codec=codec)), None)

    def reasons(self, widths: Widths, codec: str, *, cut: bool, halved: bool) -> dict[str, str]:
        why = width_schedule.UNCUT
        if cut:
            share = sum(widths.values()) / max(1, sum(self.parts.layout.sizes.values()))
            why = f"{share:.0%} of the channels are kept, in blocks of {BLOCK}"
            if self.cost is not None:
                why += f"; latency is predicted from {self.cost.probes} widths measured here, with "
                why += self.cost.why_margin
        return {
            "budget": self.budget.words,
            "widths": why,
            "trained": "what trains is the run's",
            "codec": "the run's own fits" if codec == "raw" else f"{codec}, so that the upload fits",
            "precision": "half precision in the file keeps bundle_mb" if halved else "fp32 fits",
        }

    def refusal(self, smallest: Widths, codec: str) -> BudgetError:
        broken = self.budget.broken(self.figures(smallest, codec).values)
        nearest = {name: float(f"{v * 1.005:.3g}") for name, v in broken.items()}
        if nearest.get("latency_ratio", 0) > 1:
            nearest["latency_ratio"] = 1.0
        return BudgetError(
            f"budget: {self.budget.refused(nearest)} ({self.run.spec.name} with one block of {BLOCK} channels in every "
            "group that its programs narrow); allow that in [budget] of device.toml, or leave it out",
            replace(self.budget, **nearest),
        )
