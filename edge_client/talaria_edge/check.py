"""``talaria edge check``: all that must be right before a device's first round, looked at one after another.

Nothing is learned and nothing is said to the fleet: the device connects as its agent would, hears the coordinator,
and leaves.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from talaria import durable, tasks, time
from talaria.errors import DataError, TalariaError, TransportError, WireError, some_of
from talaria.federated import device_task, run_model
from talaria.federated.kit import open_kit
from talaria.federated.run import Run
from talaria.identity.credentials import password
from talaria.inputs import Parts
from talaria.plugins import has_torch
from talaria.wire import messages as m
from talaria.wire.frames import decode_frame, signed_by
from talaria.wire.mqtt import Arrival, Transport, Will
from talaria.wire.topics import Topic, parse
from talaria.wire.validity import day_of, validities
from talaria_edge.config import DeviceConfig, load_config
from talaria_edge.data import DeviceData, NpzSource, checked, require_learnable
from talaria_edge.identity.connection import Open, keys_of, over_mqtt, require_safe, unheard
from talaria_edge.recording.folder import FolderSource
from talaria_edge.storage.state import DeviceStore, has_left

LEAST_MB = 64
"""Free space below which a round's files may not fit."""
OLDEST = 1_760_000_000.0
"""A clock before this (October 2025) was never set."""


@dataclass(frozen=True)
class Finding:
    """``what`` was looked at, and ``said`` of it: fine (ok), to be known (note), or to be mended (wrong)."""

    what: str
    state: Literal["ok", "note", "wrong"]
    said: str


def check(path: Path, *, wait_s: float = 5.0, insecure: bool = False, opened: Open = over_mqtt) -> Iterator[Finding]:
    """What there is to say of the device.toml at ``path``, one by one; the coordinator is waited for ``wait_s``."""
    try:
        config = load_config(path)
    except TalariaError as error:
        yield Finding("settings", "wrong", str(error))
        return
    yield Finding("settings", "ok", f"device {config.device!r} of fleet {config.fleet!r}")
    if left := has_left(config.state):
        yield Finding("member", "wrong", left)
    data: DeviceData | None = None
    notes: tuple[str, ...] = ()
    try:
        if isinstance(config.source, FolderSource):
            data, notes = config.source.look()
        else:
            data = config.source.load()
        for note in notes:
            yield Finding("data", "note", note)
        if len(data.train) == 0 and isinstance(config.source, NpzSource | FolderSource):
            path = config.source.path
            raise DataError(f"data: no sample to learn from is in {path} yet; record some, or correct [data] path")
        require_learnable(data, "regression")
        yield _taught(data)
    except (TalariaError, OSError) as error:
        yield Finding("data", "wrong", str(error))
    yield _clock(time.time())
    yield from _space(config)
    yield from _kept(config)
    yield from _engine(config)
    try:
        own = keys_of(config)
        trouble = [] if own is None else [text for one in validities(own.tls) if (text := one.trouble(time.time()))]
        soon = [] if own is None else [text for one in validities(own.tls) if (text := one.warning(time.time()))]
        if own is not None and config.username is None:
            own.tls.context()  # raises where the files of the link are damaged, or do not fit each other
        if trouble:
            yield Finding("keys", "wrong", "; ".join(trouble))
        elif own is None and config.secure:
            said = "none, without which [privacy] secure declines each round; join the fleet with `talaria edge join`"
            yield Finding("keys", "wrong", said)
        elif own is None:
            who = "strangers" if config.username is None else "others who may use it, and whoever runs it,"
            yield Finding(
                "keys", "note", f"none: {who} at the broker can listen and speak; `talaria edge join` makes some"
            )
        else:
            yield Finding("keys", "note" if soon else "ok", "; ".join(soon) or "this device's own, and in force")
        if not insecure:
            require_safe(config)
        if config.password_file is not None:
            password(config.password_file)
    except (TalariaError, OSError) as error:
        yield Finding("keys", "wrong", str(error))
        return
    if _in_use(config.state):
        yield Finding("broker", "note", "an agent runs with this state folder, so it is not asked a second time")
        return
    yield from asyncio.run(_fleet(config, data, None if own is None else own.coordinator_key, wait_s, opened))


def _told(data: DeviceData) -> str:
    parts = [f"{len(data.train)} to learn from", f"{len(data.val)} to validate"]
    if data.test is not None:
        parts.append(f"{len(data.test)} to test")
    rest = data.unlabelled
    if isinstance(rest, np.ndarray) and rest.ndim:  # of a function it may be anything; `checked` says what is wrong
        parts.append(f"{len(rest)} unlabelled")
    parts += [f"{name} {value:.2f}" for name, value in data.told.items()]
    return f"{', '.join(parts)}, each of shape {tuple(data.train.x.shape[1:])}"


def _taught(data: DeviceData) -> Finding:
    """What there is. One class alone may be a number that a run learns: that is judged once the run is known."""
    try:
        require_learnable(data)
    except DataError as error:
        return Finding("data", "note", f"{_told(data)}; {error}, unless the run learns numbers")
    return Finding("data", "ok", _told(data))


def _clock(now: float) -> Finding:
    if now < OLDEST:
        return Finding("clock", "wrong", f"says {day_of(now)}, before this version was made; set it")
    return Finding("clock", "ok", "was set")


def _space(config: DeviceConfig) -> Iterator[Finding]:
    place = _there(config.state)
    free = shutil.disk_usage(place).free // 2**20
    cannot = "is no folder that can be written to; give its rights to this user, or set [device]"
    if not _writable(place):
        yield Finding("space", "wrong", f"{place} {cannot} state")
    elif free < LEAST_MB:
        yield Finding("space", "wrong", f"{free} MB are free at {place}; a round needs {LEAST_MB}, free some")
    else:
        yield Finding("space", "ok", f"{free} MB free at {place}")
    if config.bundle is not None and not _writable(goes := _there(config.bundle.parent)):
        yield Finding("bundle", "wrong", f"{goes} {cannot} bundle")
    elif config.no_bundle:
        yield Finding("bundle", "wrong", config.no_bundle)


def _there(place: Path) -> Path:
    """What there is of a path: itself, or what is to hold it."""
    while not os.path.exists(place) and place != place.parent:  # Path.exists raises where one is closed
        place = place.parent
    return place


def _writable(place: Path) -> bool:
    return os.path.isdir(place) and os.access(place, os.W_OK)


def _engine(config: DeviceConfig) -> Iterator[Finding]:
    if config.engine == "torch" and not has_torch():
        mend = "leave [device] engine out, or pip install 'talaria[torch]'"
        yield Finding("engine", "wrong", f"torch is not installed here; {mend}")
        return
    how = {"torch": "torch", "onnx": "programs in ONNX Runtime"}[config.engine]
    if config.engine == "onnx" and config.kit is None and not has_torch():
        how += ", from a kit that the coordinator gives"
    yield Finding("engine", "ok", how)
    if config.kit is not None:
        try:
            open_kit(config.kit)
            yield Finding("kit", "ok", str(config.kit))
        except TalariaError as error:
            yield Finding("kit", "wrong", str(error))


def _kept(config: DeviceConfig) -> Iterator[Finding]:
    """What is wrong with the private state that an agent left here: it may be another device's."""
    if not os.path.exists(config.state / "lock") or _in_use(config.state):
        return
    try:
        with DeviceStore(config.state, config.fleet, config.device) as store:
            store.private()
    except (TalariaError, OSError) as error:
        yield Finding("state", "wrong", str(error))


def _in_use(state: Path) -> bool:
    """Whether an agent holds the folder."""
    if not os.path.exists(state / "lock"):  # Path.exists raises where one is closed
        return False
    try:
        durable.lock(state / "lock", wait=False).close()
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


async def _fleet(
    config: DeviceConfig, data: DeviceData | None, key: bytes | None, wait_s: float, opened: Open
) -> list[Finding]:
    """What the broker lets us do, and whether the coordinator's run can be learned here."""
    # The last will says nothing to anybody: a device that only looks does not go offline.
    transport = opened(config, lambda: Will(str(Topic(config.fleet, "evt", config.device)), b"", retain=False))
    try:
        await transport.start()
    except (TransportError, OSError) as error:
        return [Finding("broker", "wrong", str(error))]
    found = [Finding("broker", "ok", f"{config.broker}: connected, and may hear this device's topics")]
    try:
        birth = await _birth(transport, key, wait_s)
    except WireError as error:
        return [*found, Finding("coordinator", "wrong", str(error))]
    finally:
        await transport.close()
    if birth is None:
        return [*found, Finding("coordinator", "wrong", unheard(config.fleet, wait_s))]
    if not birth.online:
        found.append(Finding("coordinator", "note", "away just now; what it said last is looked at"))
    try:
        run = Run.from_json(birth.spec.decode("utf-8", "replace"), config.allow)
    except TalariaError as error:
        return [*found, Finding("run", "wrong", str(error))]
    if birth.online:
        found.append(Finding("coordinator", "ok", f"{run.algorithm}, {run.rounds} rounds, {run.spec.name}"))
    return [*found, *_run(config, run, data)]


async def _birth(transport: Transport, key: bytes | None, wait_s: float) -> m.CoordinatorBirth | None:
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while True:
                item = await transport.receive()
                if not isinstance(item, Arrival) or not item.payload or parse(item.topic).kind != "co/state":
                    continue
                frame = decode_frame(item.payload)
                if key is not None and not signed_by(frame, key):
                    raise WireError(
                        "its birth is not signed by the key that this device was given; join the fleet anew"
                    )
                birth = m.decode_message(frame)
                if isinstance(birth, m.CoordinatorBirth):
                    return birth
    return None


def _run(config: DeviceConfig, run: Run, data: DeviceData | None) -> Iterator[Finding]:
    def judged(what: str, said: str, *looks: object) -> Finding:
        try:
            for look in looks:
                look()  # type: ignore[operator]
        except TalariaError as error:
            return Finding(what, "wrong", str(error))
        return Finding(what, "ok", said)

    plan, budget = config.plan, config.budget
    yield judged("run", "can be learned by this engine", lambda: device_task.require_engine(run, config.engine))
    if plan is not None and (has_torch() or config.kit is not None):
        yield judged("plan", "fits the run", lambda: device_task.require_plan(run, plan))
    if budget is not None:
        limits = ", ".join(f"{name}={value:g}" for name, value in budget.limits().items())
        yield Finding("plan", "ok", f"this device makes it from the run's kit, for {limits}")
    if config.labels:
        named = judged("labels", "name the run's classes", lambda: config.names_of(run.spec.classes))
        more = config.labels[run.spec.classes :]
        yield Finding("labels", "note", f"{some_of(more, 6)} name no class of the run yet") if more else named
    if config.kit is not None:
        kit = config.kit
        yield judged("kit of the run", "is this run's", lambda: open_kit(kit).require(run))
    if data is not None:
        yield _samples(data, run, None if config.kit else run_model.named_inputs(run))


def _samples(data: DeviceData, run: Run, parts: Parts | None) -> Finding:
    try:
        fits = checked(data, run.spec.input_shape, run.spec.classes, run.task, parts)
    except TalariaError as error:
        return Finding("samples", "wrong", str(error))
    if fits.aside:
        return Finding(
            "samples",
            "note",
            f"the run has no class for labels in {some_of(fits.aside, 6)}; the others are learned from",
        )
    return Finding("samples", "ok", f"can be learned from ({tasks.of(run.task).name})")
