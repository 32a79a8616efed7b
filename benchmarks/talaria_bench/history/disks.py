"""The disks of a history: what was not flushed may be lost in a power cut, and any write may fail or be the last.

For as long as a history runs, the calls by which files become durable (fsync, rename, unlink, and the writing of
chunks) go through here; each machine's disk is the folder of its name. SQLite flushes by itself, below Python: what it
committed is taken as durable, and its commits fail and are interrupted through :meth:`Disk.commit`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

OWN = ("coordinator.db", "lock", "members.json", "sign.key", "tls.key", "fleet.json")
"""Files that are SQLite's, or were made before the history began."""


class KilledError(BaseException):
    """The process is dead; nothing may catch this."""


@dataclass
class Disk:
    """One machine's files. ``die`` is told when a write was its process's last."""

    folder: Path
    die: Callable[[], None]
    full: bool = False
    fail_in: int = 0
    """The so-manieth write from now fails once; 0: none."""
    die_in: int = 0
    """The so-manieth write from now is the process's last; 0: none."""
    dead: bool = False
    _written: dict[str, bytes] = field(default_factory=dict)
    """Contents that were flushed, by the name that the file has now."""
    _sure: dict[str, bytes] = field(default_factory=dict)
    """What a power cut leaves at least: names that were flushed, too."""

    def about_to(self, what: str) -> None:
        """A write begins: the disk may refuse, the process may die."""
        if self.dead:
            raise KilledError(what)
        if self.die_in:
            self.die_in -= 1
            if not self.die_in:
                self.dead = True
                self.die()
                raise KilledError(what)
        if self.fail_in:
            self.fail_in -= 1
            if not self.fail_in:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # -- what the calls mean

    def flushed(self, path: str, folder: bool) -> None:
        """The file's content, or the folder's list of names, is durable."""
        if not folder:
            self._written[path] = Path(path).read_bytes()
            return
        here = {p for p in (*self._sure, *self._written) if os.path.dirname(p) == path}
        for p in sorted(here):
            if not os.path.exists(p):
                self._sure.pop(p, None)
                self._written.pop(p, None)
            elif p in self._written:
                self._sure[p] = self._written[p]

    def renamed(self, source: str, target: str) -> None:
        """The new name holds in memory; on disk once the folder is flushed."""
        content = self._written.pop(source, None)
        self._written.pop(target, None)
        if content is not None:
            self._written[target] = content

    def lose_power(self, random: Random) -> list[str]:
        """What was not flushed is kept or lost, each by a draw. Names what was lost."""
        lost = []
        now = {str(p) for p in self.folder.rglob("*") if p.is_file() and not p.name.startswith(OWN)}
        for name in sorted(now | set(self._sure)):
            path = Path(name)
            current, sure = path.read_bytes() if name in now else None, self._sure.get(name)
            if current == sure or random.random() < 0.5:
                if current is not None and current != sure and self._written.get(name) != current:
                    # The name came to the disk, of its content only a part.
                    path.write_bytes(current[: len(current) // 2] + bytes(len(current) - len(current) // 2))
                    lost.append(f"{path.name} (half)")
                continue
            lost.append(path.name)
            if sure is None:
                path.unlink()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(sure)
        self._sure = {n: Path(n).read_bytes() for n in sorted(now | set(self._sure)) if Path(n).exists()}
        self._written = dict(self._sure)
        return lost

    def forget(self) -> None:
        """The folder was replaced by hand: what lies there now is durable."""
        self._sure = {
            str(p): p.read_bytes() for p in sorted(self.folder.rglob("*")) if p.is_file() and not p.name.startswith(OWN)
        }
        self._written = dict(self._sure)


class Disks:
    """All machines' disks, below ``root``; a file beside them is nobody's, and never fails."""

    def __init__(self, root: Path) -> None:
        self.root, self.of = str(root), dict[str, Disk]()

    @contextmanager
    def interposed(self) -> Iterator[None]:
        """The calls of the operating system go through these disks."""
        before = os.fsync, os.replace, os.unlink, os.pwrite
        _, replace, unlink, pwrite = before

        def fsync_(handle: int) -> None:
            path = os.readlink(f"/proc/self/fd/{handle}")
            disk = self._disk(path)
            if disk is None:
                return
            disk.about_to(f"flush {path}")
            disk.flushed(path, stat.S_ISDIR(os.fstat(handle).st_mode))

        def replace_(source: Any, target: Any, **options: Any) -> None:
            disk = self._disk(os.fspath(target))
            if disk is not None:
                disk.about_to(f"rename {target}")
            replace(source, target, **options)
            if disk is not None:
                disk.renamed(os.fspath(source), os.fspath(target))

        def unlink_(path: Any, **options: Any) -> None:
            disk = None if options else self._disk(os.fspath(path))
            if disk is not None and disk.dead:
                raise KilledError(f"remove {path}")
            unlink(path, **options)

        def pwrite_(handle: int, data: Any, offset: int) -> int:
            path = os.readlink(f"/proc/self/fd/{handle}")
            disk = self._disk(path)
            if disk is not None:
                disk.about_to(f"write {path}")
            return pwrite(handle, data, offset)

        os.fsync, os.replace, os.unlink, os.pwrite = fsync_, replace_, unlink_, pwrite_  # type: ignore[assignment]
        try:
            yield
        finally:
            os.fsync, os.replace, os.unlink, os.pwrite = before

    def _disk(self, path: str) -> Disk | None:
        if not path.startswith(self.root):
            return None
        return self.of.get(path[len(self.root) + 1 :].split("/", 1)[0])
