"""JavaScript in tests: npm packages fetched once, and a real headless Chromium."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "talaria"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def found(*names: str) -> str:
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return path
    pytest.fail(f"this test needs {names[0]}; on Debian: apt install {names[0]}")


def packages(folder: Path) -> Path:
    """``node_modules`` of a folder's package.json, fetched once; several test processes may ask at the same time."""
    wanted = (folder / "package.json").read_text()
    cache = CACHE / json.loads(wanted)["name"]
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = cache / "installed.json"
        if not done.is_file() or done.read_text() != wanted:
            (cache / "package.json").write_text(wanted)
            command = [found("npm"), "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(cache)]
            made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
            if made.returncode != 0:
                pytest.fail(f"npm could not fetch what {folder / 'package.json'} names:\n{made.stderr[-2000:]}")
            done.write_text(wanted)
    return cache / "node_modules"


class Chromium:
    """A headless browser, spoken to through a pipe (DevTools protocol)."""

    def __init__(self, profile: Path) -> None:
        own_read, their_write = os.pipe()
        their_read, own_write = os.pipe()
        options = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
        command = f'exec "$0" {options} --user-data-dir="$1" about:blank 3<&{their_read} 4>&{their_write}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", command, found(*BROWSERS), str(profile)],
            pass_fds=(their_read, their_write),
            stderr=subprocess.DEVNULL,
        )
        os.close(their_read)
        os.close(their_write)
        self._in, self._out = own_read, own_write
        self._number = 0
        self._rest = b""

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            answer = json.loads(self._receive())
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> bytes:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], 240)
            part = os.read(self._in, 1 << 16) if ready else b""
            if not part:
                pytest.fail("the browser gave no answer")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return message

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.kill()
        self._process.wait()


def when(condition: str) -> str:
    """JavaScript that waits for a condition and gives its value."""
    look = f"const look = () => {{ const v = {condition}; v ? done(v) : setTimeout(look, 50) }}"
    return f"new Promise(done => {{ {look}; look() }})"


LOADING = "location.href === 'about:blank' || document.readyState !== 'complete'"


def shown(chromium: Chromium, page: Path | str, first: str = "") -> tuple[str, Callable[[str], Any]]:
    """Opens a page, a file or a URL; gives its session, and what evaluates JavaScript in it. ``first`` runs before."""
    target = chromium.ask("Target.createTarget", url="about:blank")["targetId"]
    session = chromium.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    if first:
        chromium.ask("Page.enable", session)
        chromium.ask("Page.addScriptToEvaluateOnNewDocument", session, source=first)
    chromium.ask("Page.navigate", session, url=page if isinstance(page, str) else page.as_uri())

    def evaluate(expression: str) -> Any:
        answer = chromium.ask("Runtime.evaluate", session, expression=expression, awaitPromise=True, returnByValue=True)
        return answer["result"].get("value")

    # A promise that is asked for in the blank page's context, on its way out, is never kept.
    while evaluate(LOADING) is not False:
        time.sleep(0.02)
    return session, evaluate
