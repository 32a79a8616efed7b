"""The form of an algorithm, the device half of one paper as pure methods over explicit state, and its card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from talaria.aggregate.base import Aggregator
from talaria.model.split import Split
from talaria.model.weights import Model
from talaria.tensors import Tensors
from talaria.training.interface import Task
from talaria.types import Update


@dataclass(frozen=True, kw_only=True)
class Card:
    """What is shared, kept and served, its source, and how sure we are of it: for `talaria algorithms` and the docs."""

    name: str
    title: str
    shares: str
    """``"nothing"`` where nothing travels: there is nothing to hide then, and no versions."""
    keeps: str
    serves: str
    source: str
    evidence: Literal["confirmed", "reconstructed", "partly reconstructed"]
    prunes: bool = False
    """True where ``fit`` shrinks the device's mask itself; else the plan's mask is fixed from the start."""
    torch_alone: str = ""
    """Why only torch can train it (``"its loss is torch's code"``); empty where any engine can."""
    classes_alone: str = ""
    """Why it can only learn one class for each sample (``"its head has a mean for each class"``); empty where it can
    learn any task of :mod:`talaria.tasks`."""
    plain_steps: str = ""
    """Why its steps can only be those of SGD; empty where any optimizer will do."""
    differences: bool = False
    """True where updates hold differences to what was downloaded, whatever the codec; else new values."""
    beside: tuple[str, ...] = ()
    """How the names begin of private tensors that rounds make and ``init`` does not, such as a small model's
    (``"small/"``). As they are they stay under another plan, whose mask must not cut them, and come into a run that
    follows, where the algorithm looks whether they fit."""


class Algorithm(Protocol):
    """A frozen dataclass of validated hyper-parameters; state comes in and goes out, nothing is hidden."""

    card: ClassVar[Card]

    @property
    def aggregator(self) -> Aggregator:
        """The server half."""
        ...

    def init(self, model: Model, split: Split) -> tuple[Tensors, Tensors]:
        """``(shared, private)`` of a model's present weights.

        The coordinator takes the first. A device loads what it received into its model and takes the second,
        so that a private copy of the shared model (Ditto, APFL) starts from the model as received. Where there is no
        torch, the model is weights alone.
        """
        ...

    def fit(self, task: Task, shared: Tensors, private: Tensors) -> tuple[Update, Tensors]:
        """One round on the device: the update to send, and the new private state. Inputs stay untouched."""
        ...

    def personal(self, task: Task, shared: Tensors, private: Tensors) -> Model:
        """The model that this device runs, evaluates and exports, in eval mode; never the scratch module itself. Where
        there is no torch, a :class:`~talaria.model.weights.Served`."""
        ...
