"""Programs of ``talaria`` for tests, each a process of its own, forked from one that has imported torch: importing it
takes seconds of a processor, and system tests start some hundred programs."""

import atexit
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from functools import cache

PACKET = 1 << 16


class Forked:
    """A program, with what :class:`subprocess.Popen` has of it."""

    def __init__(self, nursery, stdout, stderr):
        self._nursery, self.stdout, self.stderr = nursery, stdout, stderr
        self.pid, self.returncode, self._ended = 0, None, threading.Event()

    def ended(self, status):
        self.returncode = status
        self._ended.set()

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("talaria", timeout)
        return self.returncode

    def communicate(self, timeout=None):
        """What it writes to stdout and stderr until it ends."""
        errors = []
        reader = threading.Thread(target=lambda: errors.append(self.stderr.read()), daemon=True)
        reader.start()
        killer = threading.Timer(timeout, self.kill) if timeout else None
        if killer is not None:
            killer.start()
        with self.stdout, self.stderr:
            out = self.stdout.read()
            reader.join()
        if killer is not None:
            killer.cancel()
        self.wait(20)
        return out, errors[0]

    def send_signal(self, number):
        self._nursery.ask({"signal": int(number), "pid": self.pid})

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


_BEGIN = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # programs inherit it where nohup started these tests
from talaria_bench.fleet.forkserver import main
main()
"""


class Nursery:
    """The other end of :mod:`talaria_bench.fleet.forkserver`, for threads."""

    def __init__(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BEGIN, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,
            )
        self._children, self._told, self._turn = {}, queue.Queue(), threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        atexit.register(self.close)

    def close(self):
        """End it and all its programs."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait(20)
        self._reader.join(5)
        self._socket.close()

    def start(self, arguments, environment):
        """``talaria ARGUMENTS`` in a process of its own, with pipes to read what it writes as text."""
        (out, own_out), (err, own_err) = os.pipe(), os.pipe()
        child = Forked(self, os.fdopen(out), os.fdopen(err))
        with self._turn:
            asked = {"start": arguments, "environment": environment, "folder": os.getcwd()}
            self._children[None] = child  # the next number that is told is its own
            socket.send_fds(self._socket, [json.dumps(asked).encode()], [own_out, own_err])
            os.close(own_out)
            os.close(own_err)
            if self._told.get(timeout=120) is None:
                raise RuntimeError("the nursery has ended")
        return child

    def ask(self, what):
        self._socket.send(json.dumps(what).encode())

    def _read(self):
        while data := self._recv():
            told = json.loads(data)
            if "pid" in told:
                child = self._children.pop(None)
                child.pid = told["pid"]
                self._children[child.pid] = child
                self._told.put(child)
            else:
                self._children.pop(told["ended"]).ended(told["status"])
        self._told.put(None)

    def _recv(self):
        try:
            return self._socket.recv(PACKET)
        except OSError:
            return b""


@cache
def nursery():
    """The one of this test process, begun when it is first needed."""
    return Nursery()
