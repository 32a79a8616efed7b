"""What a program that lives for months does when it is asked to end."""

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress


def asked_by() -> list[signal.Signals]:
    """The signals that ask a program to end: of a service manager, a keyboard, and a terminal that goes away, unless
    ``nohup`` said that it is to go on without one."""
    asked = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        asked.append(signal.SIGHUP)
    return asked


def when_asked(stop: Callable[[], object]) -> None:
    """Call ``stop`` in the running loop when this process is asked to end. Only the main thread can listen to signals;
    elsewhere nothing happens, and the caller stops what runs by itself."""
    for name in asked_by():
        with suppress(RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(name, stop)
