"""``talaria bench privacy``: what a secure round costs beside a plain one, in bytes and CPU time of one thread.

A cohort of devices with a few nested mask classes (and so updates of different sizes) adds up updates of some MiB,
while some leave after they have shared; the plain round decodes and folds the same updates. Twelve devices are measured
as if each were alone: signatures that another has checked are checked again. Figures are their means.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from talaria_bench import bars

SIDE = 64
"""Channels of each group of the model."""
KEPT = (64, 56, 48, 40)
"""Channels that the mask classes keep, in turn."""
MEASURED = 12


def privacy(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw CPU times here, as SVG.", callback=bars.place)] = None,
    devices: Annotated[int, typer.Option(help="Devices of the cohort.", min=3)] = 100,
    mib: Annotated[float, typer.Option(help="MiB of an unpruned update (float32).", min=0.05)] = 1.0,
    degree: Annotated[int, typer.Option(help="Neighbours of a device (even); 0: all others.", min=0)] = 24,
    leaving: Annotated[
        float, typer.Option(help="Share of the devices that leave after sharing.", min=0, max=0.3)
    ] = 0.1,
) -> None:
    """Measure a secure round: bytes and CPU of a device, and the coordinator's CPU beside a plain round's."""
    import json

    found = measure(devices, mib, degree, leaving)
    if plot is not None:
        bars.draw({f"a round of {devices} devices": _times(found)}, "CPU ms", plot)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    one, server = found["device"], found["coordinator"]
    typer.echo(f"{devices} devices, {found['neighbours']} neighbours, {found['left']} left: the sum is exact")
    typer.echo(
        f"device: {one['up_bytes'] / 1024:.0f} KiB up, {one['values_ratio']:.3f} of the plain values and "
        f"{one['extra_per_neighbour']:.0f} bytes per neighbour beside; {one['down_bytes'] / 1024:.0f} KiB down"
    )
    typer.echo(
        f"device CPU: {one['masking_ms_per_mib']:.1f} ms per MiB for masking, {one['fixed_ms']:.0f} ms for all else "
        f"({one['fixed_later_ms']:.0f} in later rounds, when badges are known)"
    )
    typer.echo(
        f"coordinator CPU: {server['secure_s']:.2f} s, plain {server['plain_s']:.2f} s: {server['ratio']:.2f} times"
    )
    typer.echo(f"the round cannot open: below {found['fails']:.1e}; secrets show: below {found['shows']:.1e}")


def _times(found: dict[str, Any]) -> dict[str, float]:
    one, server = found["device"], found["coordinator"]
    return {
        "coordinator": 1e3 * server["secure_s"],
        "coordinator, plain round": 1e3 * server["plain_s"],
        "a device: masking": one["masking_ms"],
        "a device: all else": one["fixed_ms"],
        "a device: all else, later": one["fixed_later_ms"],
    }


def measure(devices: int, mib: float, degree: int, leaving: float) -> dict[str, Any]:
    """All figures, as plain data. Raises where the opened sum is not the plain one."""
    import numpy as np

    from talaria.aggregate.masked import MaskedMean
    from talaria.model.masks import ChannelLayout, ChannelMask, gather
    from talaria.privacy.coordinates import Coordinates
    from talaria.privacy.coordinator import CoordinatorHalf
    from talaria.privacy.device import DeviceHalf
    from talaria.privacy.in_process import Contribution, identities, plain_sum
    from talaria.privacy.messages import Masked, decode
    from talaria.privacy.neighbours import chances
    from talaria.privacy.roster import enrolled, vouched
    from talaria.privacy.terms import Terms, majority
    from talaria.types import Update
    from talaria.wire import codec

    draws = np.random.default_rng(0)
    taps = max(1, round(mib * (1 << 18) / SIDE**2))
    layout = ChannelLayout({"a": SIDE, "b": SIDE}, {"conv": ((("a", 1),), (("b", 1),), ())})
    shared = {"conv": np.zeros((SIDE, SIDE, taps), np.float32)}
    masks = [ChannelMask(layout, {"a": tuple(range(k)), "b": tuple(range(k))}) for k in KEPT]
    coordinates = Coordinates.of(shared, layout)
    names = [f"d{i:04}" for i in range(devices)]
    given = {}
    for number, name in enumerate(names):
        dense = {"conv": draws.normal(0, 0.05, shared["conv"].shape).astype(np.float32)}
        own = masks[number % len(masks)]
        given[name] = Contribution(gather(dense, own), own, float(draws.integers(50, 500)))
    neighbours = devices - 1 if degree == 0 or degree >= devices - 1 else degree
    own_threshold = 0 if neighbours == devices - 1 else degree // 2 + 1
    terms = Terms(
        fleet="bench",
        round=1,
        attempt=1,
        coordinates=coordinates.digest,
        threshold=majority(devices),
        holders=max(3, devices // len(KEPT) // 2),
        most=devices,
        degree=0 if neighbours == devices - 1 else degree,
        own_threshold=own_threshold,
        most_weight=512,
    )
    gone = set(draws.choice(names, round(leaving * devices), replace=False).tolist())
    stay = [name for name in names if name not in gone]
    measured = stay[: min(MEASURED, len(stay) // 2)]
    later = stay[len(measured) :][:MEASURED]  # they know the others' badges from a round before
    who = identities("bench", names)
    spent = {name: {"masking": 0.0, "else": 0.0} for name in (*measured, *later)}
    bytes_up, bytes_down = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    values = dict.fromkeys(names, 0)
    halves = {}
    for name, one in given.items():
        start = time.thread_time()
        halves[name] = DeviceHalf.begin(terms, coordinates, who[name], one.tensors, mask=one.mask, weight=one.weight)
        if name in spent:
            spent[name]["masking"] += time.thread_time() - start
    authority = next(iter(who.values())).authority
    coordinator = CoordinatorHalf(terms, coordinates, authority)
    server = 0.0
    vouched.cache_clear()
    enrolled.cache_clear()
    for name, half in halves.items():
        data = half.advert().encode()
        bytes_up[name] += len(data)
        start = time.thread_time()
        coordinator.receive(decode(data))
        server += time.thread_time() - start
    while coordinator.phase != "done":
        start = time.thread_time()
        out = coordinator.proceed()
        server += time.thread_time() - start
        for name, message in out.items():
            if coordinator.phase in ("masked", "agreed", "openings") and name in gone:
                continue
            sent = message.encode()
            bytes_down[name] += len(sent)
            if name in spent:
                vouched.cache_clear()
            if name in measured:
                enrolled.cache_clear()
            start = time.thread_time()
            said = halves[name].receive(decode(sent))
            took = time.thread_time() - start
            if name in spent:
                spent[name]["masking" if isinstance(said, Masked) else "else"] += took
            data = said.encode()
            bytes_up[name] += len(data)
            values[name] = len(said.values) if isinstance(said, Masked) else values[name]
            start = time.thread_time()
            coordinator.receive(decode(data))
            server += time.thread_time() - start
    start = time.thread_time()
    opened = coordinator.opened()
    server += time.thread_time() - start
    survivors = [name for name in names if name not in gone]
    frames = {
        n: codec.encode_update(Update(given[n].tensors, given[n].weight, n, kind="delta", mask=given[n].mask), "raw")
        for n in survivors
    }
    schema = codec.schema_of(shared)
    start = time.thread_time()
    MaskedMean().apply(
        shared, {}, (codec.decode_update(frames[name], schema=schema, layout=layout) for name in survivors)
    )
    plain_s = time.thread_time() - start
    expected = plain_sum(terms, coordinates, given, members=names, survivors=survivors)
    both = coordinates.values(opened.rows)
    if not np.array_equal(opened.sums[both], expected.sums[both]) or opened.weights != expected.weights:
        raise AssertionError("the opened sum is not the plain one")
    fails, shows = chances(
        devices, neighbours, own_threshold or terms.threshold, colluding=devices // 10, leaving=len(gone)
    )
    plain_bytes = {n: sum(v.nbytes for v in given[n].tensors.values()) for n in measured}
    beside = [(bytes_up[n] - values[n]) / neighbours for n in measured]
    mean = {kind: 1e3 * sum(spent[n][kind] for n in measured) / len(measured) for kind in ("masking", "else")}
    mebi = sum(plain_bytes.values()) / len(measured) / (1 << 20)
    return {
        "devices": devices,
        "neighbours": neighbours,
        "left": len(gone),
        "opened_share": float(opened.rows.mean()),
        "device": {
            "plain_bytes": round(sum(plain_bytes.values()) / len(measured)),
            "up_bytes": round(sum(bytes_up[n] for n in measured) / len(measured)),
            "down_bytes": round(sum(bytes_down[n] for n in measured) / len(measured)),
            "values_ratio": sum(values[n] / plain_bytes[n] for n in measured) / len(measured),
            "extra_per_neighbour": sum(beside) / len(beside),
            "masking_ms": mean["masking"],
            "masking_ms_per_mib": mean["masking"] / mebi,
            "fixed_ms": mean["else"],
            "fixed_later_ms": 1e3 * sum(spent[n]["else"] for n in later) / len(later),
        },
        "coordinator": {"secure_s": server, "plain_s": plain_s, "ratio": server / plain_s},
        "fails": fails,
        "shows": shows,
    }
