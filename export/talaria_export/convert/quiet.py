"""What the libraries that convert say in passing, kept from an app's log and its stderr."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from threading import get_ident


class _Others(io.TextIOBase):
    """stderr, without what the thread that made it writes until it is heard again."""

    def __init__(self) -> None:
        self.stream, self.unheard = sys.stderr, get_ident()
        while isinstance(self.stream, _Others) and not self.stream.unheard:
            self.stream = self.stream.stream  # what two threads leave behind that were quiet at once

    def write(self, text: str) -> int:
        if self.stream is None or get_ident() == self.unheard:
            return len(text)
        return self.stream.write(text)


@contextmanager
def quiet() -> Iterator[None]:
    """What this thread writes to stderr is not heard. Other threads, which are the app's, are heard as ever."""
    others = _Others()
    with redirect_stderr(others):
        try:
            yield
        finally:
            others.unheard = 0  # a log that an app set up meanwhile keeps this stream


@contextmanager
def quiet_root() -> Iterator[None]:
    """What this thread says through the root logger is not heard, nor does it set up a log in the app's place."""
    here, root, deaf = get_ident(), logging.root, logging.NullHandler()

    def heard(record: logging.LogRecord) -> bool:
        return get_ident() != here

    root.addFilter(heard)
    root.addHandler(deaf)
    try:
        yield
    finally:
        root.removeHandler(deaf)
        root.removeFilter(heard)
