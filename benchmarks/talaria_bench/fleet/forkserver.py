"""A process that has imported what takes seconds, and forks each program from there: a program killed a hundred times
need not import torch a hundred times. Each is a process of its own all the same, with memory and files of its own.

The nursery talks over one socket. It takes ``{"start": ARGUMENTS}`` with two file descriptors (the program's stdout and
stderr), and where they are to differ ``"clock": PATH`` (:func:`shift`), ``"environment"`` and ``"folder"``, and answers
``{"pid": PID}``; it takes ``{"signal": NUMBER, "pid": PID}``; and it tells ``{"ended": PID, "status": STATUS}``. It is
Linux's and other Unixes' own; the nursery must have no threads.
"""

from __future__ import annotations

import asyncio
import gc
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import Any

PACKET = 1 << 16


class Child:
    """A program that the nursery started."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid, self._nursery = pid, nursery
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        """Its exit status, or minus the signal that ended it; None while it runs."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        self._nursery.ask({"signal": int(number), "pid": self.pid})

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def ended(self, status: int) -> None:
        """Told by the nursery."""
        if not self._ended.done():
            self._ended.set_result(status)


class Nursery:
    """The nursery's other end; in one event loop."""

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}
        self._early: dict[int, int] = {}
        self._asked: asyncio.Queue[int] = asyncio.Queue()
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        """Start it; it is ready when the first program is."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", "from talaria_bench.fleet.forkserver import main; main()",
                str(theirs.fileno()), pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal is for us: without it, whom we wait for never comes
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip
        ours.setblocking(False)
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours, self._readable)

    async def close(self) -> None:
        """End it and all its programs."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        await self._process.wait()

    async def start(self, arguments: tuple[str, ...], clock: str, stdout: int, stderr: int) -> Child:
        """A new program; the two descriptors are its own from now on."""
        async with self._turn:
            data = json.dumps({"start": arguments, "clock": clock}).encode()
            socket.send_fds(self._socket, [data], [stdout, stderr])
            pid = await self._asked.get()
        child = self._children[pid] = Child(self, pid)
        if pid in self._early:
            child.ended(self._early.pop(pid))
        return child

    def ask(self, what: dict[str, Any]) -> None:
        """Send a request."""
        self._socket.send(json.dumps(what).encode())

    def _readable(self) -> None:
        data = b""
        with suppress(OSError):
            data = self._socket.recv(PACKET)
        if not data:
            asyncio.get_running_loop().remove_reader(self._socket)
            return
        told = json.loads(data)
        if "pid" in told:
            self._asked.put_nowait(told["pid"])
        elif told["ended"] in self._children:
            self._children.pop(told["ended"]).ended(told["status"])
        else:
            self._early[told["ended"]] = told["status"]


def main() -> None:
    """Serve on the socket whose descriptor is the first argument until its other end closes."""
    own = socket.socket(fileno=int(sys.argv[1]))
    _warm()
    running: set[int] = set()
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # it closed while we spoke
            _serve(own, running)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)


def _serve(own: socket.socket, running: set[int]) -> None:
    """Until the other end closes; ``running`` are the programs that have not ended."""
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([own.fileno(), wake], [], [])
        if wake in ready:
            os.read(wake, PACKET)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            running.discard(pid)
            own.send(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}).encode())
        if own.fileno() not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(own, PACKET, 2)
        if not data:
            return
        asked = json.loads(data)
        if "signal" in asked:
            if asked["pid"] in running:
                os.kill(asked["pid"], asked["signal"])
            continue
        pid = os.fork()
        if pid == 0:
            own.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(wake)
            os.close(waker)
            _become(asked, fds)
        running.add(pid)
        for fd in fds:
            os.close(fd)
        own.send(json.dumps({"pid": pid}).encode())


def _warm() -> None:
    """Import what takes long, and learn once, so that it is all in memory. Starts no thread: there is one CPU thread to
    learn with (the environment says so) and no other device to see."""
    import numpy as np

    import talaria_coordinator.server.server  # noqa: F401
    from talaria.federated import rounds
    from talaria.federated.run import Member
    from talaria.types import Samples
    from talaria_bench.fleet import files

    run = files.run_of("fedper", 1, 0)
    y = np.arange(12) % files.CLASSES
    x = np.zeros((12, files.FEATURES), np.float32)
    samples = Samples(x, y)
    shared, _ = rounds.start(run)
    rounds.participate(run, Member("nobody", samples, samples), shared, None, 1)
    gc.collect()
    gc.freeze()  # what stands here is no program's garbage: looked through, each would copy it all


def _become(asked: dict[str, Any], fds: list[int]) -> None:
    """Be the program, and never come back."""
    status = 1
    try:
        for fd, number in zip(fds, (1, 2), strict=True):
            os.dup2(fd, number)
            os.close(fd)
        if "environment" in asked:
            os.environ.clear()
            os.environ.update(asked["environment"])
        os.chdir(asked.get("folder", "."))
        if "clock" in asked:
            shift(asked["clock"])
        from talaria.cli.main import main as talaria

        sys.argv = ["talaria", *asked["start"]]
        talaria()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def shift(path: str) -> None:
    """The wall clock that this process reads is off by what the file says, the monotonic one is not: as on a machine
    whose clock is set."""
    with open(path, "rb") as file:
        off = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    told = time.time
    time.time = lambda: told() + struct.unpack("d", off)[0]
