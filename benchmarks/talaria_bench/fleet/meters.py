"""CPU and memory of other processes, and what the plain work on the same bytes costs."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

MIB = 1 << 20


def cpu_s(pid: int) -> float:
    """CPU seconds, user and system, that a process has used."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def children_cpu_s(pid: int, module: str) -> dict[int, float]:
    """CPU seconds of each child of a process that runs ``module``, by process id."""
    found = {}
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):  # it has just ended
            if module in child.cmdline():
                found[child.pid] = cpu_s(child.pid)
    return found


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    return float(psutil.Process(pid).memory_info().rss / MIB)


def peak_mib(pid: int) -> float:
    """The most resident memory that a process had so far (Linux)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def slope(values: Sequence[float]) -> float:
    """The least-squares slope of ``values`` by their index.

    >>> slope([1.0, 3.0, 5.0])
    2.0
    """
    count = len(values)
    middle, mean = (count - 1) / 2, sum(values) / count
    spread = sum((i - middle) ** 2 for i in range(count))
    return sum((i - middle) * (v - mean) for i, v in enumerate(values)) / spread if spread else 0.0


def plain_copy(mib: int = 256) -> dict[str, float]:
    """CPU milliseconds per MiB of a copy in memory, a sha256, and a TCP socket on this machine (each end)."""
    block = os.urandom(MIB)
    begin = time.thread_time()
    for _ in range(mib):
        bytearray(block)
    copied = time.thread_time()
    for _ in range(mib):
        hashlib.sha256(block).digest()
    hashed = time.thread_time()
    sent, received = _through_a_socket(block, mib)
    each = 1000 / mib
    return {
        "copy": (copied - begin) * each,
        "sha256": (hashed - copied) * each,
        "socket_send": sent * each,
        "socket_receive": received * each,
    }


def plain_loop(steps: int = 10_000_000) -> float:
    """CPU seconds of a loop of Python: a virtual machine's neighbours may make it half as fast as a minute ago, where
    sha256 takes what it took."""
    begin, total = time.thread_time(), 0
    for step in range(steps):
        total += step & 3
    return time.thread_time() - begin


def _through_a_socket(block: bytes, mib: int) -> tuple[float, float]:
    sent = 0.0
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            nonlocal sent
            with socket.create_connection(server.getsockname()) as out:
                begin = time.thread_time()
                for _ in range(mib):
                    out.sendall(block)
                sent = time.thread_time() - begin

        sender = threading.Thread(target=send)
        sender.start()
        link, _ = server.accept()
        with link:
            room, begin = bytearray(MIB), time.thread_time()
            while link.recv_into(room):
                pass
            received = time.thread_time() - begin
        sender.join()
    return sent, received
