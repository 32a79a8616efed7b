"""While one thread follows a network, others call theirs: two devices of a process, a device beside an app."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.utils import rnn

from talaria.model.packing import unpacked
from talaria.programs.tracing import Tracer
from talaria.training import frozen_features


class Beside(Module):
    """A network in whose pass another thread does ``meanwhile``."""

    def __init__(self, meanwhile: Callable[[], Any]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.meanwhile = meanwhile
        self.said: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as other:
            self.said.append(other.submit(self.meanwhile).result(60))
        return self.head(self.body(x).relu())


FOLLOWED = {
    "halves": lambda model: frozen_features.halve(model, ["head.weight", "head.bias"]),
    "programs": lambda model: Tracer(lambda: (4,)).trace(model),
}


@pytest.mark.parametrize("follow", FOLLOWED)
@torch.no_grad()
def test_another_threads_network_answers_while_one_is_followed(follow: str) -> None:
    own, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.ones(2, 4)
    expected = own(x)
    model = Beside(lambda: own(x))
    found = FOLLOWED[follow](model)
    assert not isinstance(found, str), found
    assert len(model.said) == 1
    assert torch.equal(model.said[0], expected)


def test_two_networks_are_followed_one_after_the_other() -> None:
    call, begun, over = Module.__call__, Event(), Event()
    later = Beside(lambda: (begun.set(), over.wait(10)))
    with ThreadPoolExecutor(1) as other:
        waiting: list[Future[Any]] = []

        def meanwhile() -> None:
            waiting.append(other.submit(frozen_features.halve, later, ["head.weight"]))
            begun.wait(0.3)  # in vain, where each waits for its turn

        assert not isinstance(frozen_features.halve(Beside(meanwhile), ["head.weight"]), str)
        over.set()
        assert not isinstance(waiting[0].result(60), str)
    assert Module.__call__ is call


def test_another_thread_packs_as_ever_while_a_network_is_exported() -> None:
    def packed() -> Any:
        return rnn.pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([3, 2]), batch_first=True)

    with unpacked(nn.GRU(1, 1)), ThreadPoolExecutor(1) as other:
        assert isinstance(other.submit(packed).result(60), rnn.PackedSequence)
        assert not isinstance(packed(), rnn.PackedSequence)
