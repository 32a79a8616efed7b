"""Sets the faults of tests/mutants/mutants.toml into a copy of the sources, one at a time, and runs the tests nearest
to each: a fault that no test notices is a survivor. Writes tests/mutants/SURVIVORS.md.

    python scripts/mutants.py [--missing] [WORDS...]   those of which nothing is known; names with one of the words

Each mutant runs in a process forked from one that has imported what takes seconds, but nothing of Talaria. What was
found is kept in build/mutants.json, at once and for as long as a mutant's file and tests stay as they were: a run may
be stopped and continued. SURVIVORS.md is written as soon as something is known of each.
"""

import argparse
import compileall
import hashlib
import json
import os
import py_compile
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants" / "mutants.toml"
REPORT = ROOT / "tests" / "mutants" / "SURVIVORS.md"
FOUND = ROOT / "build" / "mutants.json"
SOURCES = ("sdk", "coordinator", "edge_client", "export", "gateway", "benchmarks")
LIMIT = 600.0
"""Seconds that the tests of one mutant may take: a fault may well keep them waiting for ever, and is noticed so. Tests
without one have limits of their own."""


@dataclass(frozen=True)
class Mutant:
    """One small fault. ``old`` stands exactly once in ``file``."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str = ""

    def flaw(self) -> str:
        """Why this is no edit of the present sources, or nothing."""
        text = (ROOT / self.file).read_text()
        found = text.count(self.old)
        if found != 1:
            return f"its old text stands {found} times in {self.file}"
        missing = [t for t in self.tests if t.startswith("tests/") and not (ROOT / t).exists()]
        return f"there is no {missing[0]}" if missing else ""

    def key(self) -> str:
        """Another one as soon as the fault, its file or one of its tests is another."""
        digest = hashlib.sha256(repr((self.file, self.old, self.new, self.tests)).encode())
        for path in (ROOT / self.file, *(ROOT / t for t in self.tests if t.startswith("tests/"))):
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                digest.update(file.read_bytes())
        return digest.hexdigest()


@dataclass
class Copy:
    """A copy of the sources and tests, in which one mutant at a time lives."""

    folder: Path
    pid: int = 0
    began: float = 0.0
    at: Mutant | None = None
    tests: tuple[str, ...] = ()
    text: str = field(default="", repr=False)

    def begin(self, mutant: Mutant | None, tests: tuple[str, ...]) -> None:
        """Start the tests on the copy with ``mutant`` in it (None: as it is)."""
        self.at, self.tests, self.began = mutant, tests, time.monotonic()
        if mutant is not None:
            path = self.folder / mutant.file
            self.text = path.read_text()
            path.write_text(self.text.replace(mutant.old, mutant.new))
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            _test(self.folder, tests)

    def status(self) -> int | None:
        """How the tests ended, -1 for too long, or None while they run; the copy is whole again once they ended."""
        ended, raw = os.waitpid(self.pid, os.WNOHANG)
        if not ended and (self.at is None or time.monotonic() - self.began < LIMIT):
            return None
        if not ended:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        if self.at is not None:
            (self.folder / self.at.file).write_text(self.text)
        self.pid = 0
        return os.waitstatus_to_exitcode(raw) if ended else -1


def main() -> int:
    mutants = [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in tomllib.loads(LIST.read_text())["mutant"]]
    asked = argparse.ArgumentParser(description="Small faults that a test must notice.")
    asked.add_argument("words", nargs="*", help="parts of names")
    asked.add_argument("--missing", action="store_true", help="only those of which nothing is known yet")
    words, missing = asked.parse_args().words, asked.parse_args().missing
    keys = {m.name: m.key() for m in mutants}
    known = _known() if missing else {}
    chosen = [m for m in mutants if keys[m.name] not in known and (not words or any(w in m.name for w in words))]
    broken = [f"{m.name}: {flaw}" for m in chosen if (flaw := m.flaw())]
    if broken:
        print("the list is out of date:", *broken, sep="\n  ", file=sys.stderr)
        return 2
    _warm()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="talaria-mutants-") as name:
        copies = [_copied(Path(name) / str(i)) for i in range(max(2, os.cpu_count() or 2))]
        sound = [(None, tests) for tests in _without_mutants(chosen, len(copies))]
        bad = [" ".join(tests) for tests, status in _all(copies, sound) if status]
        if bad:
            print("these tests fail without any mutant:", *bad, sep="\n  ", file=sys.stderr)
            return 2
        ended = _all(copies, [(m, m.tests) for m in chosen], lambda m, status: _keep(keys[m.name], status))
    odd = [m.name for m, status in ended if status not in (-1, 0, 1)]
    if odd:
        print("these tests could not run:", *odd, sep="\n  ", file=sys.stderr)
        return 2
    survivors = [m for m, status in ended if status == 0]
    _write(mutants, keys)
    for m in survivors:
        print(f"SURVIVED  {m.name}  ({m.file})" + (f": {m.why}" if m.why else ""))
    unexplained = [m for m in survivors if not m.why]
    print(
        f"{len(ended) - len(survivors)} of {len(ended)} mutants killed, {len(survivors)} survived, "
        f"{len(unexplained)} of them unexplained; {time.monotonic() - begin:.0f} s"
    )
    return 1 if unexplained else 0


def _without_mutants(mutants: list[Mutant], parts: int) -> list[tuple[str, ...]]:
    """All the tests that the mutants name, each once, in ``parts``, and those that options choose by themselves."""
    plain = sorted({t for m in mutants if all(t.startswith("tests/") for t in m.tests) for t in m.tests})
    chosen = {m.tests for m in mutants if not all(t.startswith("tests/") for t in m.tests)}
    return [*(tuple(plain[i::parts]) for i in range(min(parts, len(plain)))), *sorted(chosen)]


def _copied(folder: Path) -> Copy:
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".pytest_cache", "node_modules")
    for part in (*SOURCES, "tests", "examples", "scripts", "docs"):
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    for file in ROOT.glob("*.*"):
        if file.is_file():
            shutil.copy(file, folder)
    # By hash: a mutant of the same size and second would be taken for the last one.
    by_hash = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(folder, quiet=2, invalidation_mode=by_hash)
    return Copy(folder)


def _all(copies, jobs, keep=lambda mutant, status: None):
    """``(mutant or tests, status)`` of each job, as many at a time as there are copies; ``keep`` is told of each mutant
    when it ends."""
    waiting, ended = list(reversed(jobs)), []
    while waiting or any(copy.pid for copy in copies):
        for copy in copies:
            if copy.pid and (status := copy.status()) is not None:
                ended.append((copy.at or copy.tests, status))
                if copy.at is not None:
                    said = {0: "SURVIVED", 1: "killed", -1: "killed (never ended)"}.get(status, f"status {status}")
                    keep(copy.at, status)
                    print(f"{said:9} {time.monotonic() - copy.began:5.1f} s  {copy.at.name}", flush=True)
            if not copy.pid and waiting:
                copy.begin(*waiting.pop())
        time.sleep(0.02)
    return ended


def _warm() -> None:
    """Import what takes long, so that no mutant's tests need to; nothing of Talaria, which is what changes."""
    import msgpack  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch.distributions
    import torch.fx

    torch.set_num_threads(1)
    assert "talaria" not in sys.modules


def _test(folder: Path, tests: tuple[str, ...]) -> None:
    """Run the tests in this new process, and end it with their status."""
    os.setpgid(0, 0)
    os.chdir(folder)
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    paths = [str(folder / part) for part in SOURCES]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    import pytest

    status = 3
    how = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={folder}"]
    try:
        status = int(pytest.main([*how, *tests]))
    finally:
        os._exit(status)


def _known() -> dict[str, bool]:
    """Whether each mutant, by its key, was killed, as far as it was tried."""
    return json.loads(FOUND.read_text()) if FOUND.exists() else {}


def _keep(key: str, status: int) -> None:
    if status in (-1, 0, 1):
        FOUND.parent.mkdir(exist_ok=True)
        FOUND.write_text(json.dumps(_known() | {key: status != 0}, indent=1))


def _write(mutants: list[Mutant], keys: dict[str, str]) -> None:
    """The report, once something is known of every mutant."""
    known = _known()
    missing = sum(key not in known for key in keys.values())
    if missing:
        print(f"{missing} of {len(mutants)} are still to be tried; {REPORT.name} stays as it is")
    else:
        REPORT.write_text(_report(mutants, [m for m in mutants if not known[keys[m.name]]]))


def _report(mutants: list[Mutant], survivors: list[Mutant]) -> str:
    lines = [
        "# Mutants that no test notices",
        "",
        f"Written by `make mutants`: {len(mutants)} small faults (`mutants.toml`) set into the sources one at a time; "
        f"{len(mutants) - len(survivors)} were noticed by the tests nearest to them.",
        "",
        *([f"- **{m.name}** (`{m.file}`): {m.why or 'unexplained'}" for m in survivors] or ["None survived."]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
