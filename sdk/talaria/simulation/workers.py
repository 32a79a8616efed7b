"""Clients in parallel: processes forked from this one, which so know the run, all samples and whatever was imported.

The bytes do not depend on how many there are: what a client learns follows from its samples, the global model, its
private state and the round alone, and each process computes with one thread.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess
from select import select
from socket import MSG_WAITALL, SHUT_RDWR, socket, socketpair
from types import TracebackType
from typing import Any, Self

import numpy as np
from safetensors.numpy import load, save

from talaria import errors, seeds
from talaria.errors import ConfigError, StateError, TalariaError
from talaria.tensors import Tensors
from talaria.valid import by_item

Job = tuple[Mapping[str, Any], Tensors | None]
"""What a process is asked, as plain values, and the private state of the client that it is asked about, if any."""
Answer = tuple[Mapping[str, Any], Tensors, bytes]
"""What it found: plain values, tensors, bytes."""
Work = Callable[[Mapping[str, Any], Tensors, Tensors | None], Answer]
"""``(asked, shared, private) -> answer``: what each process does."""

MOST = 256


class Crew:
    """``count`` processes that do ``work``; forked when they are first asked, and gone with the ``with`` statement."""

    def __init__(self, count: int, work: Work) -> None:
        """Raises :class:`ConfigError` for a number out of 1..256, and where processes cannot be forked or started."""
        if type(count) is not int or not 1 <= count <= MOST:
            rule = f"a whole number in 1..{MOST}, or 0 for this process"
            raise ConfigError(f"simulate: workers={count!r} must be {rule}{by_item(count)}")
        if "fork" not in multiprocessing.get_all_start_methods():
            raise ConfigError(f"simulate: workers={count}: this system cannot fork processes; leave it at 0")
        if multiprocessing.current_process().daemon:
            raise ConfigError(
                f"simulate: workers={count}: a process of a multiprocessing.Pool may start none; leave it at 0, or use "
                "concurrent.futures.ProcessPoolExecutor"
            )
        self.count, self._work = count, work
        self._all: list[tuple[BaseProcess, socket]] = []
        self._idle: list[tuple[BaseProcess, socket]] = []
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as this does
        self._size = self._shares = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process, link in self._all:
            with suppress(OSError):
                link.shutdown(SHUT_RDWR)  # whoever was forked meanwhile holds it open too
            link.close()
            if kind is not None:  # what they are at is of no use
                process.kill()
        for process, _ in self._all:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._all.clear()
        self._file.close()

    def answers(self, shared: Tensors, jobs: Iterable[Job]) -> Iterator[Answer]:
        """The answers to ``jobs``, in their order, each as soon as it is its turn: what is done with it is done while
        others work. All see ``shared``.

        What the work raises of ours is raised here. Raises :class:`StateError` where a process ends.
        """
        self._share(shared)
        todo, turn = enumerate(jobs), 0
        found, busy = dict[int, Answer](), dict[socket, tuple[int, BaseProcess]]()
        try:
            while True:
                while self._idle and (job := next(todo, None)) is not None:
                    process, link = self._idle.pop()
                    busy[link] = job[0], process
                    self._ask(link, job[1])
                while turn in found:
                    yield found.pop(turn)
                    turn += 1
                if not busy:
                    return
                ready, _, _ = select(list(busy), [], [])
                for link in ready:
                    number, process = busy.pop(link)
                    self._idle.append((process, link))
                    found[number] = _answer(link)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            process.join(5)
            raise StateError(
                f"simulate: one of {self.count} workers ended ({process.exitcode}); memory may be short: take fewer"
            ) from None
        except Exception:  # one's work failed: the others' answers are of no use, and all may be asked again
            for link, (_, process) in busy.items():
                with suppress(Exception):
                    _answer(link)
                self._idle.append((process, link))
            raise

    def _share(self, shared: Tensors) -> None:
        """Write ``shared`` where every process reads it."""
        data = packed(shared)
        os.ftruncate(self._file.fileno(), len(data))
        at, view = 0, memoryview(data)
        while at < len(data):  # one call writes at most 2 GiB
            at += os.pwrite(self._file.fileno(), view[at:], at)
        self._size = len(data)
        self._shares += 1
        if not self._all:
            self._fork()

    def _ask(self, link: socket, job: Job) -> None:
        asked, private = job
        head = {"asked": dict(asked), "size": self._size, "share": self._shares, "private": private is not None}
        _send(link, json.dumps(head).encode())
        if private is not None:
            _send(link, packed(private))

    def _fork(self) -> None:
        context, mine = multiprocessing.get_context("fork"), list[socket]()
        for _ in range(self.count):
            try:
                here, there = socketpair()
                mine.append(here)
                args = (there, mine, self._file.fileno(), self._work)
                process = context.Process(target=_serve, args=args, daemon=True)
                # What a thread holds at the fork, nobody lets go of in the child.
                with there, seeds.ALONE, warnings.catch_warnings():
                    # Of threads beside a fork: torch's wait between calls; the child, with one, asks for none.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
            except OSError as error:
                for link in mine:
                    link.close()
                raise StateError(
                    f"simulate: workers={self.count}: the system gives {len(self._all)} ({error.strerror}); take "
                    "fewer, or raise what `ulimit -a` or the container allows"
                ) from None
            self._all.append((process, here))
        self._idle = list(self._all)


def _serve(link: socket, others: list[socket], file: int, work: Work) -> None:
    """A process until its parent closes the link, or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who asked decides
    for other in others:
        other.close()  # else none of them would hear that the parent ended
    import torch

    torch.set_num_threads(1)
    shared: Tensors = {}
    share = 0  # those that were read last
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            head = json.loads(_received(link))
            private = unpacked(_received(link)) if head["private"] else None
            if head["share"] != share:
                with mmap.mmap(file, head["size"], access=mmap.ACCESS_READ) as held:
                    shared, share = unpacked(bytes(held)), head["share"]
            try:
                facts, tensors, data = work(head["asked"], dict(shared), private)
            except Exception as error:  # noqa: BLE001  whatever it is, the one who asked is told
                known, lines = _known(error), "".join(traceback.format_exception(error)).rstrip()
                _send(link, json.dumps({"error": [type(known).__name__, str(known), lines]}).encode())
                continue
            _send(link, json.dumps({"facts": dict(facts)}).encode())
            _send(link, packed(tensors))
            _send(link, data)


def _known(error: Exception) -> Exception:
    """``error``, or what it means of ours."""
    if isinstance(error, RuntimeError) and "fork-based multiprocessing" in str(error):
        return ConfigError(
            "simulate: workers cannot learn here: torch has started threads of its own for gradients in this process, "
            "as it does for a GPU and after torch.export, and what is forked from it takes none; take workers=0, or "
            "simulate in a process that has not (`talaria simulate` is one)"
        )
    return error


def _answer(link: socket) -> Answer:
    head = json.loads(_received(link))
    if "error" in head:
        name, text, lines = head["error"]
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, TalariaError):
            raise kind(text)
        failed = RuntimeError(f"a worker failed with {name}: {text}")
        failed.add_note(lines)  # where in code of one's own, which only the worker knows
        raise failed
    return head["facts"], unpacked(_received(link)), _received(link)


def _send(link: socket, data: bytes) -> None:
    link.sendall(len(data).to_bytes(8, "little"))
    link.sendall(data)


def _received(link: socket) -> bytes:
    """What :func:`_send` sent. Raises EOFError where the other side is gone."""
    return _exactly(link, int.from_bytes(_exactly(link, 8), "little"))


def _exactly(link: socket, count: int) -> bytes:
    data = b""
    while len(data) < count:  # once, unless a signal comes between or it is more than 2 GiB
        more = link.recv(count - len(data), MSG_WAITALL)
        if not more:
            raise EOFError
        data = data + more if data else more
    return data


def packed(tensors: Tensors) -> bytes:
    """``tensors`` as safetensors, with their order."""
    order = {"order": json.dumps(list(tensors))}  # the format has one of its own
    data: bytes = save({name: np.asarray(value, order="C") for name, value in tensors.items()}, order)
    return data


def unpacked(data: bytes) -> Tensors:
    """What :func:`packed` was given."""
    length = int.from_bytes(data[:8], "little")
    found, order = load(data), json.loads(data[8 : 8 + length])["__metadata__"]["order"]
    return {name: found[name] for name in json.loads(order)}
