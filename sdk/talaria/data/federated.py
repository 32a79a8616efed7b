"""What a federated dataset is: named clients, each with its own train, validation and test samples."""

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from talaria import recorded, tasks, valid
from talaria.data import arrays
from talaria.data.client import Client
from talaria.errors import DataError
from talaria.foreign import shown
from talaria.types import LONGEST_NAME

_UNWRITTEN = ("Cc", "Cs")
"""Unicode's categories of controls and of halves of a character."""


@dataclass(frozen=True)
class Federated:
    """A dataset of clients. ``clients`` and ``newcomers`` are ordered by name.

    ``newcomers`` take no part in the training; they arrive when it is over. ``input_shape`` is that of one sample,
    without the batch. ``meta`` holds plain values (numbers, text, tuples) that say how the data was cut and scaled.
    """

    name: str
    clients: Mapping[str, Client] = field(repr=False)
    labels: tuple[str, ...]
    input_shape: tuple[int, ...]
    newcomers: Mapping[str, Client] = field(default_factory=dict, repr=False)
    meta: Mapping[str, Any] = field(default_factory=dict, repr=False)
    task: str = field(default=tasks.CLASSIFICATION, repr=False)
    """What is learned of it, a text for :func:`talaria.tasks.of`; ``labels`` then name the model's outputs."""

    def __post_init__(self) -> None:
        self._plain()
        for part in ("clients", "newcomers"):
            given = getattr(self, part)
            if not isinstance(given, Mapping):
                raise DataError(f"{self.name}: {part} is a {type(given).__name__}; give a Client each by its name")
            for name, one in given.items():
                if not isinstance(name, str) or not isinstance(one, Client):
                    what = f"{part}[{shown(name)}] is a {type(one).__name__}"
                    raise DataError(f"{self.name}: {what}; give a Client by its name, a text")
        if not self.clients:
            raise DataError(f"{self.name}: holds no client; give at least one")
        fewest = tasks.of(self.task).fewest
        if len(self.labels) < fewest and fewest == 1:
            raise DataError(f"{self.name}: labels={self.labels} names no output; give at least one")
        if len(self.labels) < fewest:
            raise DataError(f"{self.name}: labels={self.labels} is {len(self.labels)} class; give at least two")
        both = set(self.clients) & set(self.newcomers)
        if both:
            raise DataError(f"{self.name}: {sorted(both)} are clients and newcomers; let each be one of them")
        for part in ("clients", "newcomers"):
            ordered = dict(sorted(getattr(self, part).items()))
            object.__setattr__(self, part, ordered)
            for name, client in ordered.items():
                self._check(name, client)

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        client: Any = None,
        split: Any = None,
        *,
        name: str = "arrays",
        validation: float = 0.1,
        test: float = 0.2,
        layout: str = "auto",
        standardize: bool = True,
        seed: int = 0,
        task: str = tasks.CLASSIFICATION,
        clients: int | None = None,
        alpha: float | None = None,
        newcomers: int | tuple[str, ...] = 0,
    ) -> "Federated":
        """The dataset of arrays (numpy, lists, tensors), as ``npz:FILE`` reads them from a file.

        ``x`` (N, ...), ``y`` (N,) labels, whole numbers or text, ``client`` (N,) whose each sample is, numbers or text,
        ``split`` (N,) 0 train, 1 validation, 2 test, 3 unlabelled (whose ``y`` is not read). Of another ``task`` than
        classification ``y`` holds its targets. Without ``client`` all samples are one client's, or dealt over so many
        ``clients``, skewed by Dirichlet(``alpha``) or evenly. ``newcomers``, names or how many, come when the training
        is over. The options are those of :func:`talaria.data.npz_file.load`. Raises
        :class:`~talaria.errors.DataError`, naming the array, the value and the mend.

        >>> x = [[0.0, 1.0]] * 10 + [[1.0, 0.0]] * 10
        >>> Federated.from_arrays(x, ["rest"] * 10 + ["walk"] * 10, ["anna", "bela"] * 10)
        Federated(name='arrays', labels=('rest', 'walk'), input_shape=(2,))
        """
        asked: dict[str, Any] = {
            "validation": validation, "test": test, "layout": layout, "standardize": standardize, "seed": seed,
            "task": task, "clients": clients, "alpha": alpha, "newcomers": newcomers,
        }  # fmt: skip
        plain = {k: v.tolist() if isinstance(v, np.generic | np.ndarray) else v for k, v in asked.items()}
        fitted = valid.options_of(arrays.fields_of).but(["raw"]).read("data", plain)
        return cls(name=name, **arrays.fields_of(recorded.of(x, y, client, split), **fitted))

    def _plain(self) -> None:
        """Have what is written down beside the samples as plain values; numbers of numpy's become Python's."""
        if not isinstance(self.name, str):
            raise DataError(f"data: name={shown(self.name)} must be text")
        for field_name, kinds, rule in (
            ("labels", (str, int), "the name of each output, a text"),
            ("input_shape", (int,), "the sizes of one sample without N, such as (6, 100)"),
        ):
            given = getattr(self, field_name)
            values = given if isinstance(given, Iterable) else [None]
            plain = tuple(one.item() if isinstance(one, np.generic) else one for one in values)
            if not all(isinstance(one, kinds) for one in plain):
                raise DataError(f"{self.name}: {field_name}={shown(given)} must be {rule}")
            object.__setattr__(self, field_name, plain)
        if not isinstance(self.meta, Mapping):
            raise DataError(f"{self.name}: meta={shown(self.meta)} must be plain values by name; leave it out")

    def _check(self, name: str, client: Client) -> None:
        odd = any(unicodedata.category(letter) in _UNWRITTEN for letter in name)  # joined emoji and scripts are none
        if not 0 < len(name) <= LONGEST_NAME or odd:
            raise DataError(
                f"{self.name}: client {shown(name)} has {len(name)} characters{', not all text' if odd else ''}; "
                f"name it with 1 to {LONGEST_NAME} letters, and no line breaks or other controls"
            )
        goal = tasks.of(self.task)
        for part, samples in (("train", client.train), ("val", client.val), ("test", client.test)):
            shape = tuple(samples.x.shape[1:])
            if shape != self.input_shape:
                raise DataError(
                    f"{self.name}: {name} {part} samples have shape {shape}, need {self.input_shape}; reshape them"
                )
            if len(samples):
                goal.require(f"{self.name}: {name} {part}", samples.y, self.classes)
            if part != "val" and not goal.count(samples.y):
                raise DataError(
                    f"{self.name}: {name} {part} has no labelled step, all are -1; label some, or drop the client"
                )
        if client.unlabelled is not None:
            require_inputs(f"{self.name}: {name} unlabelled", client.unlabelled, self.input_shape)

    @property
    def everyone(self) -> dict[str, Client]:
        """Clients and newcomers by name."""
        return {**self.clients, **self.newcomers}

    @property
    def classes(self) -> int:
        """How many labels there are: the outputs that a model needs."""
        return len(self.labels)


def require_inputs(what: str, x: Any, shape: tuple[int, ...]) -> None:
    """Raise :class:`DataError` unless ``x`` is finite float32 (N, *shape): inputs that nobody has labelled."""
    if not isinstance(x, np.ndarray) or x.dtype != np.float32 or x.shape[1:] != shape or not x.ndim:
        raise DataError(
            f"{what} is {getattr(x, 'dtype', type(x).__name__)} {getattr(x, 'shape', '')}, but the model "
            f"takes float32 (N, {', '.join(map(str, shape))}); give inputs as those of train, or None"
        )
    if not np.isfinite(x).all():
        raise DataError(f"{what} holds NaN or infinity; drop or repair those windows")
