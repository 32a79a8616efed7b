"""The one thread of a process that learns: its agents take turns on it."""

from __future__ import annotations

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress


def learning_thread() -> ThreadPoolExecutor:
    """An executor of one thread that computes on as many cores as torch was told, from its first product on."""
    return ThreadPoolExecutor(1, thread_name_prefix="learn", initializer=_settle)


def _settle() -> None:
    """What ``torch.set_num_threads`` said elsewhere reaches a new thread once torch is asked there: small products ask
    nothing, and are rounded otherwise on two cores."""
    if sys.modules.get("torch") is not None:  # None where it is kept out
        with suppress(ImportError):  # told by whoever needs it
            importlib.import_module("torch").get_num_threads()  # waits for another thread that is importing it
