"""Clients in parallel on all nodes of a Ray cluster (``pip install 'talaria[ray]'``): the bytes of ``workers``.

Each CPU of the cluster is one actor with one thread of torch. Ray brings the run and the samples to its nodes in a form
of its own (a pickle), once; so a cluster is a place where every node is trusted. Global model, private states and
updates travel as safetensors. Nodes have the same Talaria; the bytes are the same on processors of one kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from talaria import errors, plugins
from talaria.errors import ConfigError, StateError, TalariaError
from talaria.foreign import shown
from talaria.simulation.workers import MOST, Answer, Crew, Job, Work, packed, unpacked
from talaria.tensors import Tensors

_AHEAD = 2
"""Clients that are with an actor at most: while one learns, the next is on its way."""


class Trainer:
    """What an actor is: it does the work of one client after another, with one thread."""

    def __init__(self, work: Work, beside: Sequence[str]) -> None:
        import torch

        for folder in beside:
            plugins.look_in(Path(folder))
        torch.set_num_threads(1)
        self._work = work

    def answer(self, asked: str, shared: bytes, private: bytes | None) -> tuple[str, bytes, bytes] | tuple[str, str]:
        """The answer's facts (JSON), tensors and bytes; of an error of ours its name and text."""
        try:
            own = None if private is None else unpacked(private)
            facts, tensors, data = self._work(json.loads(asked), unpacked(shared), own)
        except TalariaError as error:
            return type(error).__name__, str(error)
        return json.dumps(dict(facts)), packed(tensors), data


class RayCrew(Crew):
    """Actors that do ``work`` on the cluster at ``address``, one for each CPU; gone with the ``with`` statement.

    ``"auto"`` is the cluster that this machine belongs to, else all cores of this machine.
    """

    def __init__(self, address: str, work: Work) -> None:
        """Raises :class:`ConfigError` where Ray is not installed, or there is no such cluster."""
        if not isinstance(address, str) or not address:
            raise ConfigError(f"simulate: ray={shown(address)} must be 'auto' or the address of a cluster")
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                f"simulate: ray={shown(address)} needs Ray ({error}): pip install 'talaria[ray]'"
            ) from None
        self._ray: Any = ray
        self._mine = not ray.is_initialized()  # whoever had Ray before goes on with it
        try:
            ray.init(
                address=None if address == "auto" else address, log_to_driver=False, logging_level="error",
                ignore_reinit_error=True,
            )  # fmt: skip
        except (ConnectionError, ValueError, RuntimeError) as error:
            why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise ConfigError(
                f"simulate: ray={shown(address)} cannot be reached ({why}); start it with `ray start --head`"
            ) from None
        self.count = min(MOST, max(1, int(ray.cluster_resources().get("CPU", 1))))
        beside = [str(folder) for folder in plugins.beside()]
        held, actor = ray.put(work), ray.remote(Trainer)
        self._actors = list[Any]()
        # Whose CPU another job of the cluster has may never begin: who has begun is asked, and no others.
        begun = (actor.options(num_cpus=1).remote(held, beside) for _ in range(self.count))
        self._starting = {one.__ray_ready__.remote(): one for one in begun}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._actors.clear()
        self._starting.clear()
        if self._mine:
            self._ray.shutdown()

    def answers(self, shared: Tensors, jobs: Iterable[Job]) -> Iterator[Answer]:
        """As :meth:`Crew.answers`."""
        ray = self._ray
        held, free = ray.put(packed(shared)), self._actors * _AHEAD
        todo, turn = enumerate(jobs), 0
        found, busy = dict[int, Answer](), dict[Any, tuple[int, Any]]()
        try:
            while True:
                while free and (job := next(todo, None)) is not None:
                    actor, (number, (asked, private)) = free.pop(), job
                    own = None if private is None else packed(private)
                    busy[actor.answer.remote(json.dumps(dict(asked)), held, own)] = number, actor
                while turn in found:
                    yield found.pop(turn)
                    turn += 1
                if free and not busy:
                    return
                ready, _ = ray.wait([*busy, *self._starting], num_returns=1)
                for one in ready:
                    if one in self._starting:
                        ray.get(one)
                        self._actors.append(self._starting.pop(one))
                        free += self._actors[-1:] * _AHEAD
                        continue
                    number, actor = busy.pop(one)
                    free.append(actor)
                    found[number] = _answer(ray.get(one))
        except ray.exceptions.RayActorError as error:
            why = str(error).splitlines()[0][:200]
            raise StateError(
                f"simulate: one of {self.count} Ray actors ended ({why}); go on with --resume from the last round that "
                "--save kept, or begin anew"
            ) from None


def _answer(told: Sequence[Any]) -> Answer:
    if len(told) == 3:
        return json.loads(told[0]), unpacked(told[1]), told[2]
    name, text = told
    raise getattr(errors, name, StateError)(text)
