"""The one thread of a process that learns: its agents take turns on it."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor


def learning_thread() -> ThreadPoolExecutor:
    """An executor of one thread that computes on as many cores as torch was told, from its first product on."""
    return ThreadPoolExecutor(1, thread_name_prefix="learn", initializer=_settle)


def _settle() -> None:
    """What ``torch.set_num_threads`` said elsewhere reaches a new thread once torch is asked there: small products ask
    nothing, and are rounded otherwise on two cores."""
    if "torch" in sys.modules:
        sys.modules["torch"].get_num_threads()
