""":class:`Keeper`: runs a broker as a child process, ends it with this process, and restarts it when it dies."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0
AGAIN_S = (0.2, 30.0)
"""The pause before a broker that died is started again; it doubles while it keeps dying at once."""
FULL = re.compile(rb"^.*out of memory.*$", re.IGNORECASE | re.MULTILINE)
"""What Mosquitto writes at its memory limit; it then goes on, and disconnects whoever needs a byte more. Before 2.0.22
it writes the same of who is gone while it is being answered, so it counts only where our own link fails as well."""
SHORT = re.compile(rb"^.*Error: Out of memory.*$", re.MULTILINE)
"""What it writes at that limit alone, where it gets no byte more itself; it may end with an error then."""
WHO = re.compile(rb"Client (\S+) ")
READ = 2**20
"""Bytes of the log, at its end, that are looked at."""
LARGEST = 2**24
"""Bytes of the log with which it begins anew; the one before is kept. Each link of each stranger adds some lines."""

# Sets the signal that Linux sends to the broker when the coordinator dies in any way, then becomes the broker.
# It is SIGTERM, on which Mosquitto saves its sessions; SIGKILL loses them all. A process that changes its user loses
# that setting: root takes the broker's account before it, not Mosquitto after it. Each device is one open file: as
# many as there may be, since the usual 1024 would shut out the thousandth device.
_WITH_PARENT = """
import ctypes, os, resource, signal, sys
parent, user, group = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if hard == resource.RLIM_INFINITY or hard > 65536:
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 65536), hard))
else:
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
if user >= 0:
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != parent:
    sys.exit("the coordinator is gone")
os.execv(sys.argv[4], sys.argv[4:])
"""


def _at_once(path: str, flags: int) -> int:
    """Refused where it is a pipe, for whose reader one would wait."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


class Keeper:
    """``command`` as our child, its output appended to ``log``; for root, under the user and group of ``account``.
    ``answers`` says whether this child serves yet, and ``forget`` takes away what it kept, True where there was any:
    a broker that is full, or whose file is damaged, would load all of it again."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        answers: Callable[[subprocess.Popen[bytes]], bool],
        account: tuple[int, int] = (-1, -1),
        forget: Callable[[], bool] = lambda: False,
    ) -> None:
        self._command, self._log, self._answers, self._account = tuple(command), log, answers, account
        self._forget = forget
        self._news: list[str] = []
        self._filled = ""  # why tend() ended this child
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None
        self.child = self._spawn()

    def process(self) -> int:
        """The child's process id, which changes when it is started again."""
        return self.child.pid

    def ready(self) -> bool:
        """Whether the first start worked; from then on the child is kept running until :meth:`stop`."""
        if not self._answers(self.child):
            if self.child.poll() is None or not self._forget():
                return False
            self._tell_of_forgetting()
            self.child = self._spawn()
            if not self._answers(self.child):
                return False
        self._thread = threading.Thread(target=self._keep, name="broker keeper", daemon=True)
        self._thread.start()
        return True

    def signal(self, number: int) -> None:
        """Send a signal to the child, if it lives."""
        if self.child.poll() is None:
            self.child.send_signal(number)

    def tend(self, failing: bool) -> list[str]:
        """What befell the broker since this was asked last. Where our link to it is ``failing`` and it is out of
        memory, it is ended, and starts anew without what it kept."""
        if failing and self.child.poll() is None and (full := self._full()):
            self._filled = full
            self.child.kill()  # on SIGTERM it would save what fills it
        self._bound_log()
        news, self._news = self._news, []
        return news

    def _bound_log(self) -> None:
        """The child appends to the file that it was given, which stays: what is in it is copied away."""
        with suppress(OSError):
            if self._log.stat().st_size >= LARGEST:
                shutil.copyfile(self._log, self._log.with_name(f"{self._log.name}.1"))
                os.truncate(self._log, 0)
                self._begun = 0

    def _full(self, sign: re.Pattern[bytes] = FULL) -> str:
        """That this child ran out of memory, by its ``sign``, and whom it disconnected for that; empty where it did
        not."""
        try:
            with self._log.open("rb") as log:
                log.seek(max(self._begun, log.seek(0, os.SEEK_END) - READ))
                said = log.read()
        except OSError:
            return ""
        if not sign.search(said):
            return ""
        who = Counter(name[1].decode("ascii", "replace") for line in FULL.findall(said) if (name := WHO.search(line)))
        most = ", ".join(f"{name!r} ({count}x)" for name, count in who.most_common(3))
        return "the broker was out of memory" + (f", and threw out {most}" if most else "")

    def _tell(self, text: str) -> None:
        logger.warning("%s", text)
        self._news.append(text)

    def _tell_of_forgetting(self) -> None:
        self._tell(f"the broker did not start with what it kept; it begins without. Its log is {self._log}")

    def stop(self) -> None:
        """End the child in good order, and for good."""
        self._leaving.set()
        self._end()
        if self._thread is not None:
            self._thread.join(2 * STOP_SECONDS)
            self._end()  # one that was being started just then

    def _end(self) -> None:
        self.signal(signal.SIGTERM)
        try:
            self.child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _WITH_PARENT, str(os.getpid()), *map(str, self._account), *self._command]
        with open(self._log, "ab", opener=_at_once) as out:
            self._begun = out.tell()
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)

    def _keep(self) -> None:
        wait, served = AGAIN_S[0], True
        while True:
            status = self.child.wait()
            if self._leaving.wait(wait):
                return
            full, self._filled = self._filled, ""
            if not full and status > 0:  # it gave up by itself
                full = self._full(SHORT)
            forgot = (full or not served) and self._forget()
            if full:
                self._tell(f"{full}; it begins anew, without what it kept. Its log is {self._log}")
            elif forgot:
                self._tell_of_forgetting()
            else:
                self._tell(f"the broker ended (status {status}) and is started again; its log is {self._log}")
            try:
                self.child = self._spawn()
            except OSError as error:
                logger.warning("the broker cannot be started: %s; trying again", error)
                wait = min(2 * wait, AGAIN_S[1])
                continue
            served = self._answers(self.child)
            wait = AGAIN_S[0] if served else min(2 * wait, AGAIN_S[1])
