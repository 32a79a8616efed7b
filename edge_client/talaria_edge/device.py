"""``Device``: the agent of one device for a program that brings its samples along; and what joins a fleet for the
sdk's ``Personalizer``."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from talaria import valid
from talaria.errors import ConfigError, ModelError, StateError, TalariaError, said
from talaria.federated import device_task, plan_compat, run_model
from talaria.federated.run import ENGINES, Run
from talaria.foreign import shown
from talaria.identity.credentials import Credentials
from talaria.model.spec import ModelSpec
from talaria.model.weights import Model
from talaria.planning.plan import Plan
from talaria.training.engine import state_of
from talaria_edge.agent.supervisor import keep_running
from talaria_edge.agent.training import Learner
from talaria_edge.agent.worker import learning_thread
from talaria_edge.config import DeviceConfig
from talaria_edge.data import Data, DataSource, DeviceData, NamedSource, NpzSource, checked, source_of
from talaria_edge.home_assistant import HomeAssistant
from talaria_edge.identity.connection import over_mqtt, require_safe
from talaria_edge.recording.folder import FolderSource
from talaria_edge.recording.labels import Said
from talaria_edge.storage.state import DeviceStore
from talaria_edge.training_policy import Rules

if TYPE_CHECKING:
    from talaria.personalizer import Joining

logger = logging.getLogger("talaria_edge")

KEYS = Path("identity")
"""Where ``keys`` are looked for unless they are named, as ``talaria edge join identity`` makes them."""


class Device:
    """One device in a fleet, inside a program of yours: what ``talaria edge run device.toml`` is from a shell.

    What is private stays in ``state``. The program may be killed at any time: a new Device on the same folder goes on
    where it was, and no round counts twice. Training runs in one thread of its own, so the event loop stays free. Paths
    are of the folder that is current when the Device is made, also where the program goes to another one later.

    Args:
        broker: URL of the fleet's broker, as the coordinator prints it: ``mqtt://host:1883``, ``mqtts://``, ``ws://``,
            ``wss://``.
        fleet: The fleet's name.
        data: This device's samples, x float32 (N, ...) in the shape that the fleet's model takes, y int64 (N,): a
            function that gives them as they are now (asked again before each round), or the samples themselves: a
            :class:`talaria.Samples` or a pair of arrays ``(x, y)``, which are cut into 70 % training, 10 % validation
            and 20 % test, where ``y`` are classes as a simulation cuts them (of another task, whose name is not known
            yet, other samples may fall into each part); ``(train, val)`` or ``(train, val, test)``, each Samples or a
            tuple ``(x, y)``; a :class:`DeviceData`. Or a name: ``"npz:mine.npz"`` (a ``Path`` works too),
            ``"smartwatch"``, whose client ``id`` is this device; ``"folder:windows"``, a folder that fills
            (:meth:`record`, :meth:`label`); ``"mypkg.data:load"`` of a package in ``allow``. Or a :class:`DataSource`,
            such as a :class:`FolderSource` with bounds of your own.
        id: This device's name: 1 to 36 of a-z, 0-9 and '-'. None: the name in its keys; without keys ``"device"``.
        keys: The folder that :func:`join` made. None: ``identity`` in the current folder where that holds keys; else
            none, which is for a fleet on this machine alone.
        state: The folder of what stays on the device. None: ``state/ID`` in the current folder.
        plan: What fits this device: a :class:`talaria.Plan`, or the file of ``talaria plan --json``. None: the whole
            model.
        bundle: Where the personal model goes as a file for :class:`talaria_export.Predictor`; to make it takes
            ``talaria[bundle]``, or with torch ``talaria[export]``. None: nowhere.
        labels: What the classes are called, in the fleet's order; also for a :class:`FolderSource` or
            :class:`NpzSource` that names none itself.
        variants: Forms that the bundle may choose from; empty for all.
        allow: Packages beside Talaria whose algorithms and models the fleet's run may name.
        guard: When this device may train; None: always.
        insecure: Accept a broker beyond this machine without TLS or keys.
        report: Called with every event of the agent, in the event loop; what it raises is logged, and ends nothing
            (``sys.exit`` ends the program). None: events go to the log ``talaria_edge``.
        require: Called with the fleet's :class:`talaria.Run` before anything is learned; what it raises ends
            :meth:`run`. Of a run that the fleet goes on to later, it is the reason why its rounds are declined.
        settings: The other fields of :class:`DeviceConfig`: ``username``, ``password_file``, ``engine`` (``"torch"`` or
            ``"onnx"``), ``kit`` (a file of ``talaria programs kit``, with which ``"onnx"`` needs no torch),
            ``guard_every_s``, ``profile``, ``retry_s``, ``max_model``, ``patience_s`` (seconds to wait for a silent
            broker; 0 for ever), ``stay``, ``home_assistant`` (a :class:`talaria_edge.HomeAssistant`).

    Raises:
        ConfigError: An argument is unknown or does not fit; it names field, value and mend.

    Example:
        >>> import numpy, talaria_edge
        >>> def load():
        ...     return numpy.zeros((40, 6, 100), "float32"), numpy.arange(40) % 7
        >>> device = talaria_edge.Device("mqtt://127.0.0.1:1883", fleet="watch", data=load, id="s01-left")
        >>> device.config.state.parts[-2:], device.config.identity
        (('state', 's01-left'), None)

        In an async function, ``async with device: await device.run()`` then takes part until the run is over.
    """

    def __init__(
        self,
        broker: str,
        *,
        fleet: str,
        data: Data,
        id: str | None = None,
        keys: str | Path | None = None,
        state: str | Path | None = None,
        plan: Plan | str | Path | None = None,
        bundle: str | Path | None = None,
        labels: Sequence[str] = (),
        variants: Sequence[str] = (),
        allow: Sequence[str] = (),
        guard: Rules | None = None,
        insecure: bool = False,
        report: Callable[[dict[str, Any]], None] | None = None,
        require: Callable[[Run], None] | None = None,
        **settings: Any,
    ) -> None:
        for what, value in (("fleet: broker", broker), ("fleet: name", fleet), ("device: id", id)):
            if not isinstance(value, str) and not (value is None and what == "device: id"):
                raise ConfigError(f"{what}={shown(value)} must be text")
        for what, words in (("device: labels", labels), ("device: variants", variants), ("code: allow", allow)):
            listed = isinstance(words, Iterable) and not isinstance(words, str)
            if not listed or not all(isinstance(word, str) for word in words):
                raise ConfigError(f"{what}={shown(words)} must be a list of words")
        if guard is not None and not isinstance(guard, Rules):
            raise ConfigError(f"device: guard={shown(guard)} must be Rules, such as Rules(min_battery=0.3)")
        for what, own in (("data", data), ("report", report), ("require", require)):
            if what != "data" and own is not None and not callable(own):
                raise ConfigError(f"device: {what}={shown(own)} must be a function, or left out")
            if any(map(inspect.iscoroutinefunction, (own, getattr(own, "__call__", None)))):  # noqa: B004 - its own
                raise ConfigError(f"device: {what} is an async function, and nobody would await it; give one of def")
        valid.flag("device", "insecure", insecure)
        paths = {"keys": keys, "state": state, "bundle": bundle}
        at = {name: valid.path("device", name, one).absolute() for name, one in paths.items() if one is not None}
        folder = at.get("keys", KEYS.absolute() if (KEYS / "fleet.json").is_file() else None)
        if id is None:
            id = "device" if folder is None else Credentials.load(folder).device
        self.config = DeviceConfig(
            device=id,
            fleet=fleet,
            broker=broker,
            state=at.get("state", Path("state", id).absolute()),
            source=_source(data, id, tuple(labels), tuple(allow)),
            plan=plan
            if plan is None or isinstance(plan, Plan)
            else plan_compat.read(valid.path("device", "plan", plan)),
            identity=folder,
            bundle=at.get("bundle"),
            labels=tuple(labels),
            variants=tuple(variants),
            allow=tuple(allow),
            guard=guard,
            **_fitting(settings),
        )
        if not insecure:
            require_safe(self.config)
        self._report, self._require = _log if report is None else _harmless(report), require
        self._model: Model = None
        self._task: asyncio.Task[dict[str, Any]] | None = None
        self._ended = asyncio.Event()
        self._stopped = False

    @property
    def model(self) -> Model:
        """The personal model, physically small, in eval mode: a torch module, or where a kit was learned from, an
        object whose ``predict(x)`` gives its answers. Raises :class:`~talaria.errors.ModelError` before :meth:`run` has
        come to the end of the run."""
        if self._model is None:
            raise ModelError("device: there is no personal model yet; let run() come to the end of the fleet's run")
        return self._model

    def record(self, x: Any, y: Said | None = None) -> str:
        """Keep one window ``x``, in the shape that the fleet's model takes, to learn from once its label is known; its
        name for :meth:`label`. On flash when this returns; any thread may call it, also while :meth:`run` runs.

        Raises :class:`~talaria.errors.ConfigError` where ``data`` is no folder that fills or ``y`` no class of
        ``labels``, and :class:`~talaria.errors.DataError` where the disk refuses.
        """
        return self._folder().record(x, y)

    def label(self, id: str, y: Said) -> None:
        """Say what the window ``id`` was: a class's number or name, or the number to learn. Labels may come days later,
        and again: the last word counts. On flash when this returns; raises as :meth:`record`."""
        self._folder().label(id, y)

    def _folder(self) -> FolderSource:
        if not isinstance(self.config.source, FolderSource):
            raise ConfigError('device: windows and labels are kept in a folder; give data="folder:PATH"')
        return self.config.source

    async def run(self) -> dict[str, Any] | None:
        """Take part until the run is over; then personalize, and write the bundle where one is asked for.

        An unforeseen failure, or a full disk, is reported, and the agent begins again a while later.

        Returns:
            What came of it, as ``talaria edge result`` prints it: ``device``, ``rounds`` learned,
            ``parameters`` of the personal model, paths, ``traffic`` in bytes by round; or ``error``, where the
            personal model could not be made. None where :meth:`stop` ended it before.

        Raises:
            ConfigError: The fleet's keys are others. What ``require`` raises comes as it is.
            DataError: The samples cannot be read. What a function that gives them raises comes as it is, where it is
                asked before the agent begins; in a round it costs the round alone.
            StateError: The state folder is damaged, of another run, or in use by another agent.
            TransportError: The broker did not answer within ``patience_s``.
        """
        if self._task is not None:
            raise StateError(
                f"device: {self.config.device} runs already; make another Device with its own id and state"
            )
        self._stopped = False
        self._ended = asyncio.Event()  # of this event loop: the run before may have been of another one
        worker = learning_thread()
        self._task = asyncio.create_task(keep_running(self.config, self._report, worker, over_mqtt, self._learner))
        try:
            return await self._task
        except _RefusedError as error:
            raise error.own from error.own.__cause__
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._stopped and (task is None or not task.cancelling()):
                return None
            raise
        finally:
            try:
                # What trains just now ends by itself, so that the folder is at rest when this returns; unless whoever
                # waits is cancelled once more.
                await asyncio.to_thread(worker.shutdown, wait=True, cancel_futures=True)
            finally:
                self._task = None
                self._ended.set()

    def stop(self) -> None:
        """Leave in good order: :meth:`run` returns None, once what trains just now has ended. Any thread may call it;
        where nothing runs, nothing happens."""
        task = self._task
        if task is not None:
            self._stopped = True
            with suppress(RuntimeError):  # its event loop has ended meanwhile
                task.get_loop().call_soon_threadsafe(task.cancel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self.stop()
            await self._ended.wait()

    def _learner(self, config: DeviceConfig, store: DeviceStore, run: Run) -> Learner:
        if self._require is not None:
            try:
                self._require(run)
            except TalariaError:
                raise
            except Exception as error:
                raise _RefusedError(error) from error
        return Learner(config, store, run, self._keep)

    def _keep(self, model: Model) -> None:
        self._model = model


class _RefusedError(TalariaError):
    """What an app's own ``require`` raised: it is no failure after which an agent begins again."""

    def __init__(self, own: Exception) -> None:
        super().__init__(said(own))
        self.own = own


def take_part(joining: Joining) -> Model:
    """Take part in a fleet until its run is over, and give the personal model: the ``talaria.runtimes`` entry point,
    which ``Personalizer.join`` finds. ``joining.options`` are further arguments of :class:`Device`.

    Raises :class:`~talaria.errors.ConfigError` where the fleet's model or plan is another, and as :class:`Device`.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise ConfigError(
            "join: waits until the fleet's run is over, and would hold up this event loop; write "
            "await asyncio.to_thread(personal.join, ...)"
        )
    known = set(inspect.signature(Device).parameters) - {"broker", "fleet", "data", "id", "plan", "require", "settings"}
    unknown = sorted(set(joining.options) - known - _SETTINGS)
    if unknown:
        raise ConfigError(f"join: {unknown[0]}={shown(joining.options[unknown[0]])} is unknown; {_choice(known)}")
    if joining.options.get("kit") is not None:
        raise ConfigError(
            f"join: kit={shown(str(joining.options['kit']))} gives a model without torch, which no Personalizer runs; "
            "leave kit out: programs are made here"
        )
    data = DeviceData(joining.train, joining.val, unlabelled=joining.unlabelled)

    def require(run: Run) -> None:
        _require_model(joining, run)
        device_task.require_plan(run, joining.plan)
        checked(data, run.spec.input_shape, run.spec.classes, run.task, run_model.named_inputs(run))

    device = Device(
        joining.broker,
        fleet=joining.fleet,
        data=data,
        id=joining.device,
        plan=joining.plan,
        require=require,
        **joining.options,
    )
    found = asyncio.run(device.run()) or {}
    if "error" in found:
        raise StateError(f"join: {found['error']}")
    return device.model


def _require_model(joining: Joining, run: Run) -> None:
    mend = "make the Personalizer with the fleet's model, or join a fleet that learns this one"
    own = joining.spec
    if own is not None:
        names = [one.name for one in fields(ModelSpec) if one.name not in ("seed", "pretrained")]
        odd = [name for name in names if getattr(own, name) != getattr(run.spec, name)]
        if odd:
            told = "; ".join(f"{n}={getattr(own, n)!r}, the fleet's is {getattr(run.spec, n)!r}" for n in odd)
            raise ConfigError(f"join: the Personalizer's model has {told}; {mend}")
        return
    here = {name: tuple(value.shape) for name, value in state_of(joining.model).items()}
    there = {name: tuple(value.shape) for name, value in state_of(run_model.template(run.spec)).items()}
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            raise ConfigError(
                f"join: tensor {name!r} has shape {here.get(name)} in the Personalizer's model and {there.get(name)} "
                f"in the fleet's {run.spec.name!r}; {mend}"
            )


def _source(data: Data, id: str, labels: tuple[str, ...], allow: tuple[str, ...]) -> DataSource:
    if isinstance(data, str) and data.startswith("folder:") and len(data) > len("folder:"):
        data = FolderSource(Path(data.removeprefix("folder:")))
    found = source_of(data, id, labels)
    if isinstance(found, FolderSource | NpzSource) and type(found) in (FolderSource, NpzSource):  # not an app's own
        return replace(found, labels=found.labels or labels)
    return replace(found, allow=allow) if isinstance(found, NamedSource) else found


_SETTINGS = {one.name for one in fields(DeviceConfig)} & {
    "username", "password_file", "engine", "guard_every_s", "profile", "retry_s", "max_model", "patience_s", "stay",
    "kit", "home_assistant",
}  # fmt: skip


def _fitting(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Further fields of :class:`DeviceConfig`, looked at as device.toml's are."""
    unknown = sorted(set(settings) - _SETTINGS)
    if unknown:
        raise ConfigError(f"device: {unknown[0]}={shown(settings[unknown[0]])} is unknown; {_choice()}")
    for name, (low, high) in {"retry_s": (0.05, 3600), "guard_every_s": (0.05, 3600), "patience_s": (0, 1e300)}.items():
        if name in settings:
            valid.number("device", name, settings[name], f"a number of seconds of at least {low}", low=low, high=high)
    if "engine" in settings:
        valid.among("device", "engine", settings["engine"], ENGINES)
    home = settings.get("home_assistant")
    if home is not None and not isinstance(home, HomeAssistant):
        raise ConfigError(f"device: home_assistant={shown(home)} must be a talaria_edge.HomeAssistant, or left out")
    if "max_model" in settings:
        valid.whole("device", "max_model", settings["max_model"], 1)
    if "stay" in settings:
        valid.flag("device", "stay", settings["stay"])
    if not isinstance(settings.get("username"), str | None):
        raise ConfigError(f"device: username={shown(settings['username'])} must be text, or left out")
    try:
        json.dumps(dict(settings.get("profile", {})), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ConfigError(
            f"device: profile={shown(settings['profile'])} must be a table of what JSON has: texts, numbers, lists"
        ) from None
    given = [name for name in ("password_file", "kit") if settings.get(name) is not None]
    return {**settings, **{name: valid.path("device", name, settings[name]).absolute() for name in given}}


def _choice(known: set[str] | frozenset[str] = frozenset()) -> str:
    return f"choose of {', '.join(sorted(known | _SETTINGS))}"


def _harmless(report: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """``report``, whose errors end no agent: they are the app's, and learning is not theirs to stop."""

    def told(event: dict[str, Any]) -> None:
        try:
            report(event)
        except (Exception, asyncio.CancelledError):  # of something else: nothing is awaited here
            logger.exception("%s: report failed on the event %r", event["device"], event["event"])

    return told


def _log(event: Mapping[str, Any]) -> None:
    level = logging.WARNING if "error" in event else logging.INFO
    facts = " ".join(f"{name}={value}" for name, value in event.items() if name not in ("at", "device", "event"))
    logger.log(level, "%s: %s %s", event["device"], event["event"], facts)
