"""What all members of a run agree on, and one member's own side."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from talaria import algorithms, tasks, valid
from talaria.algorithms.base import Algorithm
from talaria.errors import ConfigError
from talaria.foreign import parsed, shown
from talaria.model import zoo
from talaria.model.spec import ModelSpec
from talaria.model.split import Buffers
from talaria.planning.plan import Plan
from talaria.tensors import Array
from talaria.training import augment
from talaria.types import Recipe, Samples
from talaria.wire.download import CODECS
from talaria.wire.tensor_codecs import Codec

MOST_ROUNDS = 1 << 31
MOST_BEFORE = 16
"""So many runs before it a run names, newest first; whoever slept through more begins anew."""
_IDENTITY = "talaria-run-2"
_SEARCHED = 4096
Engine = Literal["torch", "onnx"]
"""Who trains on a device: torch, or ONNX graphs of the same model (:mod:`talaria.programs`)."""
ENGINES: tuple[Engine, ...] = ("torch", "onnx")


ALLOWING = 'its owner allows it by [code] allow = ["{package}"] in device.toml'


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that all members of a run must agree on; pure data, it travels in the manifest."""

    spec: ModelSpec
    algorithm: str
    """Built in, an entry point's name, or ``module:Name``; of an object, :func:`talaria.algorithms.name_of` says it."""
    hparams: Mapping[str, Any] = field(default_factory=dict)
    recipe: Recipe = field(default_factory=Recipe)
    rounds: int = 10
    seed: int = 0
    buffers: Buffers = "local"
    fraction: float = 1.0
    """Share of the members that takes part in a round."""
    codec: str = "raw"
    """How updates travel up."""
    download: str = "raw"
    """How the global model travels down (:mod:`talaria.wire.download`)."""
    asynchronous: bool = False
    """No rounds in step: some updates, each from its own version of the global model, make the next one
    (:mod:`talaria.federated.fedbuff_run`). ``rounds`` then counts versions."""

    task: str = tasks.CLASSIFICATION
    """What is learned, a text for :func:`talaria.tasks.of`."""
    follows: tuple[str, ...] = ()
    """The identities of the runs that this one goes on from, newest first (:mod:`talaria.federated.warm_start`)."""

    def __post_init__(self) -> None:
        if not isinstance(self.spec, ModelSpec) or not isinstance(self.recipe, Recipe):
            raise ConfigError("run: spec must be a ModelSpec and recipe a Recipe; see Run.of for plain values")
        valid.whole("run", "rounds", self.rounds, 1, MOST_ROUNDS)
        valid.whole("run", "seed", self.seed, 0, (1 << 63) - 1)
        valid.among("run", "buffers", self.buffers, ("local", "aggregate"))
        valid.number("run", "fraction", self.fraction, "in (0, 1]", low=5e-324, high=1)
        valid.flag("run", "asynchronous", self.asynchronous)
        if not isinstance(self.codec, str):
            raise ConfigError(f"run: codec={shown(self.codec)} must be text, such as 'raw' or 'int8'")
        Codec.parse(self.codec)
        valid.among("run", "download", self.download, CODECS)
        zoo.require(self.spec.name)
        augment.get(self.recipe.augment)
        if self.asynchronous and self.fraction != 1:
            raise ConfigError(
                f"run: fraction={self.fraction} draws a cohort for each round, and an asynchronous run has none; "
                "leave it at 1, and say by the buffer how many updates make a version"
            )
        if not isinstance(self.hparams, Mapping) or not isinstance(self.algorithm, str):
            raise ConfigError("run: algorithm must be a name, and hparams a table of its options")
        for name, value in self.hparams.items():
            if not isinstance(name, str) or not valid.plain(value):
                raise ConfigError(
                    f"run: hparams[{shown(name)}]={shown(value)} must be a number or text{valid.by_item(value)}"
                )
        self._require_task(algorithm := algorithms.load(self.algorithm, self.hparams))
        if not self.recipe.plain and algorithm.card.plain_steps:
            raise ConfigError(
                f"{self.algorithm}: {algorithm.card.plain_steps}, so it cannot take optimizer="
                f"{self.recipe.optimizer!r} with clip={self.recipe.clip}; use optimizer='sgd' and clip=0"
            )
        self._require_follows()
        if self.recipe.warmup >= self.rounds and self.recipe.warmup:
            raise ConfigError(f"recipe: warmup={self.recipe.warmup} must be below rounds={self.rounds}")

    def _require_follows(self) -> None:
        given = self.follows
        fits = isinstance(given, tuple | list) and len(given) <= MOST_BEFORE
        if not fits or not all(isinstance(one, str) and re.fullmatch("[0-9a-f]{64}", one) for one in given):
            raise ConfigError(
                f"run: follows={shown(given)} must be a list of at most {MOST_BEFORE} identities of runs, 64 "
                "hexadecimal digits each; `talaria coordinator next` writes it"
            )
        object.__setattr__(self, "follows", tuple(given))

    def _require_task(self, algorithm: Algorithm) -> None:
        goal, why = tasks.of(self.task), algorithm.card.classes_alone
        if self.task == tasks.CLASSIFICATION:
            if self.spec.classes < goal.fewest:
                raise ConfigError(f"run: classes={self.spec.classes} must be at least 2 where one of them is said")
            return
        if why:
            raise ConfigError(
                f"{self.algorithm}: {why}, so it cannot learn task={self.task!r}; use fedavg, fedper, fedrep, ditto or "
                "hermes"
            )
        if self.spec.classes < goal.fewest:
            raise ConfigError(f"run: classes={self.spec.classes} must be at least {goal.fewest} for task={self.task!r}")
        if self.recipe.smoothing:
            raise ConfigError(
                f"recipe: smoothing={self.recipe.smoothing} smooths the labels of plain classification, and "
                f"task={self.task!r} is another; set it to 0"
            )

    def __hash__(self) -> int:
        """Of the fields that are no table: runs that are equal have the same, so that what is worked out of one is
        kept (:func:`functools.lru_cache`)."""
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: texts have another hash in each process."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def _hash(self) -> int:
        travels = self.codec, self.download
        return hash((self.spec, self.algorithm, self.recipe, self.rounds, self.seed, self.buffers, travels))

    def to_json(self) -> str:
        """Canonical JSON: equal runs, equal text."""
        data = asdict(self) | {"spec": self.spec.to_json(), "recipe": self.recipe.to_json()}
        if self.task == tasks.CLASSIFICATION:
            del data["task"]
        if not self.follows:
            del data["follows"]
        if self.download == "raw":
            del data["download"]
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    @cached_property
    def identity(self) -> str:
        """Hex sha256 of all but how long it goes on: what a device keeps of a run stays its own when ``rounds`` grow.
        The promise of format 2: no later version of Talaria names the same run otherwise."""
        data = json.loads(self.to_json())
        del data["rounds"]
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(f"{_IDENTITY} {text}".encode()).hexdigest()

    @property
    def asks_all(self) -> bool:
        """Whether each round asks everybody, so that all begin from each global model."""
        return self.fraction == 1.0 and not self.asynchronous

    def is_named(self, digest: str) -> bool:
        """Whether ``digest`` names this run: its identity, or, in what was written before there were identities, the
        sha256 of its JSON with the rounds that it had then, which were as many or fewer."""
        if digest == self.identity:
            return True
        head, _, tail = self.to_json().rpartition(f',"rounds":{self.rounds},"seed":')
        counts = range(self.rounds, max(0, self.rounds - _SEARCHED), -1)
        return any(hashlib.sha256(f'{head},"rounds":{n},"seed":{tail}'.encode()).hexdigest() == digest for n in counts)

    @staticmethod
    def from_json(text: str, allow: Collection[str] | None = ()) -> Run:
        """The run that ``to_json`` wrote. Raises :class:`ConfigError` on anything else.

        ``allow`` are the top-level packages beside Talaria whose code the text may name: of a text from a network none
        but those that this machine's owner allows; None for a text that this program wrote itself. A model's code
        runs with torch alone: without it any model may be named, and is learned with programs that are given.
        """
        try:
            data = parsed(text)
        except (ValueError, TypeError, RecursionError) as error:
            why = str(error).encode(errors="backslashreplace").decode()
            raise ConfigError(f"run: not a run description ({why[:200]}); write one with Run.to_json()") from error
        if allow is not None and isinstance(data, Mapping):
            algorithms.GROUP.require_allowed(data.get("algorithm"), allow, ALLOWING)
            spec = data.get("spec")
            zoo.require_allowed(spec.get("name") if isinstance(spec, Mapping) else None, allow, ALLOWING)
        return Run.of(data)

    @staticmethod
    def of(values: Mapping[str, Any]) -> Run:
        """The run of plain values: its fields by name, with ``spec``, ``recipe`` and ``hparams`` as tables.

        What is left out is as in ``Run``; :func:`talaria.data.presets.completed` fills in what suits a dataset. Raises
        :class:`ConfigError`, with field, value and mend, on whatever is not a run.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"run: need a table of its fields, got {shown(values)}")
        valid.only("run", values, [f.name for f in fields(Run)])
        for name in ("spec", "algorithm"):
            if name not in values:
                raise ConfigError(f"run: {name} is missing; say which model (a table) or algorithm (text) to learn")
        rest = {name: value for name, value in values.items() if name not in ("spec", "recipe")}
        return Run(spec=ModelSpec.from_json(values["spec"]), recipe=Recipe.from_json(values.get("recipe", {})), **rest)


@dataclass(frozen=True)
class Member:
    """One device's own side: who it is, what it may learn from, and what its plan allows."""

    client: str
    train: Samples = field(repr=False)
    val: Samples = field(repr=False)
    plan: Plan | None = None
    engine: Engine = "torch"
    device: str = "cpu"
    """Where torch trains; what goes in and comes out are arrays, wherever that is."""
    unlabelled: Array | None = field(default=None, repr=False)
    """Inputs float32 (N, ...) without labels, for BatchNorm alone."""

    def __post_init__(self) -> None:
        valid.among(f"member {self.client!r}", "engine", self.engine, ENGINES)


def require_device(device: str, engine: str, *, alone: bool = True) -> None:
    """Raise :class:`ConfigError` unless torch can train on ``device`` here, in this one process (``alone``)."""
    if device == "cpu":
        return
    what = f"simulate: device={shown(device)}"
    if engine == "onnx":
        raise ConfigError(f"{what} is where torch trains, but engine='onnx' trains on the CPU; use engine='torch'")
    if not alone:
        raise ConfigError(f"{what} is used by one process alone; leave workers and ray out")
    import torch

    try:
        torch.zeros(1, device=torch.device(device)).cpu()
    except Exception as why:  # noqa: BLE001  each kind of device fails in its own way
        lines = (str(why) or type(why).__name__).splitlines()
        raise ConfigError(f"{what} cannot be used here ({lines[0][:120]}); use device='cpu'") from None
