"""The one thread of a process that learns: its agents take turns on it."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any


def learning_thread() -> ThreadPoolExecutor:
    """An executor of one thread that computes on as many cores as torch was told, from its first product on."""
    return _Learning(1, thread_name_prefix="learn", initializer=_settle)


class _Learning(ThreadPoolExecutor):
    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_stay, work, *args, **kwargs)


# What an event loop takes for a word of its own: an agent that waits for the work would never hear of it, or end.
_SIGNS = (StopIteration, GeneratorExit, KeyboardInterrupt, CancelledError, asyncio.CancelledError)


def _stay(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An app's own code that ends its program here, such as a source of samples, ends this work alone."""
    try:
        return work(*args, **kwargs)
    except SystemExit as error:
        raise RuntimeError(f"code of its own called sys.exit({error.code!r}) here; let it raise an error") from error
    except _SIGNS as error:
        raise RuntimeError(f"code of its own raised {type(error).__name__} here; let it raise an error") from error


def _settle() -> None:
    """What ``torch.set_num_threads`` said elsewhere reaches a new thread once torch is asked there: small products ask
    nothing, and are rounded otherwise on two cores."""
    if sys.modules.get("torch") is not None:  # None where it is kept out
        with suppress(ImportError):  # told by whoever needs it
            importlib.import_module("torch").get_num_threads()  # waits for another thread that is importing it
