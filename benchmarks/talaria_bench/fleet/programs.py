"""Programs of a fleet as processes of their own, started again when they die, as systemd would."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import resource
import signal
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from talaria_bench.fleet import meters
from talaria_bench.fleet.forkserver import Child, Nursery

# The program dies with us. Before it imports anything of its own.
_LAUNCH = """
import ctypes, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
clock = sys.argv.pop(1)
from talaria_bench.fleet.forkserver import shift
shift(clock)
"""
TALARIA = "from talaria.cli.main import main; main()"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
LINE = 1 << 22
PAUSE_S = 0.3
LAST_WORDS = 40

Told = Callable[[str, dict[str, Any]], None]


class Program:
    """``talaria ARGUMENTS`` under ``name``, or other ``code`` with them; ``told`` hears each JSON line of it. It is
    started again until it ends by itself with status 0. With a ``nursery`` it is forked there, else started anew."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        folder: Path,
        told: Told,
        *,
        code: str = TALARIA,
        nursery: Nursery | None = None,
    ) -> None:
        self.name, self._arguments, self._told, self._code = name, tuple(arguments), told, code
        self._nursery = nursery
        self._clock = folder / f"{name}.clock"
        self._clock.write_bytes(struct.pack("d", 0.0))
        self.process: asyncio.subprocess.Process | Child | None = None
        self.alive = asyncio.Event()
        self.done = asyncio.Event()
        self.starts = 0
        self.began = 0.0
        self.calm = True
        """Whether nothing else went wrong since this process began."""
        self.errors: deque[str] = deque(maxlen=LAST_WORDS)
        self._pause = PAUSE_S
        self._size: int | None = None
        self._stopping = False

    async def run(self) -> None:
        """Keep it running until it is done or :meth:`stop`."""
        while not self._stopping:
            await self._once()
            if self.done.is_set() or self._stopping:
                return
            pause, self._pause = self._pause, PAUSE_S
            await asyncio.sleep(pause)

    async def _once(self) -> None:
        out, stdout = os.pipe()
        error, stderr = os.pipe()
        self.began, self.calm = asyncio.get_running_loop().time(), self._size is None
        self.starts += 1
        try:
            process = self.process = await self._start(stdout, stderr)
        finally:
            os.close(stdout)
            os.close(stderr)
        self.full(self._size)
        if self._stopping:  # while it was started
            process.kill()
        self.alive.set()
        try:
            await asyncio.gather(_lines(out, self._listen), _lines(error, self._complain))
            status = await process.wait()
        finally:
            self.alive.clear()
            if process.returncode is None:
                process.kill()
                await process.wait()
        self._told(self.name, {"event": "ended", "status": status, "errors": list(self.errors)[-3:]})
        if status == 0:
            self.done.set()

    async def _start(self, stdout: int, stderr: int) -> asyncio.subprocess.Process | Child:
        if self._nursery is not None:
            return await self._nursery.start(self._arguments, str(self._clock), stdout, stderr)
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", _LAUNCH + self._code, str(self._clock), *self._arguments,
            stdout=stdout, stderr=stderr, env=os.environ | ENVIRONMENT,
        )  # fmt: skip

    def _listen(self, line: bytes) -> None:
        with suppress(ValueError):  # killed in the middle of a line
            self._told(self.name, json.loads(line))

    def _complain(self, line: bytes) -> None:
        self.errors.append(line.decode("utf-8", "replace").rstrip())

    def kill(self, pause: float) -> None:
        """SIGKILL; it is started again after ``pause`` seconds."""
        self._pause = pause
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    def full(self, size: int | None) -> None:
        """As if its disk were full: no file of it may grow beyond ``size`` bytes, after a new start either; None: there
        is room again. It needs no rights, and root is not spared."""
        self._size = size
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))

    def off(self, seconds: float) -> None:
        """Its wall clock is off by so much from now on."""
        with self._clock.open("r+b") as file, mmap.mmap(file.fileno(), 8) as view:
            view[:] = struct.pack("d", seconds)

    def cpu_s(self) -> float:
        """CPU seconds that the present process has used; 0 where there is none."""
        with suppress(psutil.Error):
            if self.process is not None:
                return meters.cpu_s(self.process.pid)
        return 0.0

    async def stop(self, seconds: float = 20.0) -> None:
        """End it in good order, or after ``seconds`` in any."""
        self._stopping = True
        if self.process is None or self.process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), seconds)
        if self.process.returncode is None:
            self.process.kill()


@asynccontextmanager
async def running(programs: Collection[Program]) -> AsyncIterator[list[Exception]]:
    """``programs`` kept running, and stopped at the end; the list then holds what keeping one failed of."""
    failed = list[Exception]()
    keepers = [asyncio.create_task(program.run()) for program in programs]
    try:
        yield failed
    finally:
        await asyncio.gather(*(program.stop() for program in programs))
        for keeper in keepers:
            keeper.cancel()
        ended = await asyncio.gather(*keepers, return_exceptions=True)
        failed += [why for why in ended if isinstance(why, Exception)]


async def _lines(fd: int, take: Callable[[bytes], None]) -> None:
    """Give each line that comes out of a pipe to ``take``, until its other end closes."""
    reader = asyncio.StreamReader(LINE)
    pipe = os.fdopen(fd, "rb", 0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        async for line in reader:
            take(line)
    finally:
        transport.close()
