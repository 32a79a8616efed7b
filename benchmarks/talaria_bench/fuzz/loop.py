"""The process that fuzzes: each target in a fork of its own under libFuzzer, through atheris, one after another.

    python -m talaria_bench.fuzz.loop FOLDER SECONDS RUNS SEED [MODULE:FUNCTION]

SECONDS are for all targets together, RUNS (0: no end) for each. Below FOLDER each target leaves what it found: its
corpus, a log, ``stats.json``, and ``crash-...`` with an input that it failed on. The function gives the targets;
without one they are those of all programs that are installed.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from talaria_bench.fuzz.target import Target

INSTRUMENTED = [
    *(
        "talaria.wire",
        "talaria.protocol",
        "talaria.federated.run_model",
        "talaria.federated.device_task",
        "talaria.federated.rounds",
        "talaria.foreign",
        "talaria.model.spec",
        "talaria.types",
    ),
    *("talaria_coordinator", "talaria_export", "msgpack"),
]
WORDS = (
    *(b"9" * 400, b"1e999", b"-1", b"NaN", b"Infinity", b"null", b"true", b"[" * 300, b'{"a":' * 300, b'"\\ud800"'),
    *(
        b"\xff" * 4,
        b"\xff" * 8,
        b"\x7f" + b"\xff" * 7,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc1",
        b"../",
    ),
)
"""What decoders stumble over, for the mutations to put in."""
MEMORY_MIB = 128
"""Above what the process had after a first run over the seeds: libFuzzer's own tables, and what a decoder takes."""
LONGEST = 16_384
AWKWARD = 1000
"""Inputs beside the seeds that each target is given first."""


def main(args: Sequence[str]) -> NoReturn:
    """Fuzz all targets; ends the process, with status 1 where one failed."""
    folder, seconds, runs, seed = Path(args[0]), float(args[1]), int(args[2]), int(args[3])
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from talaria_bench.fuzz.target import installed

        targets = EntryPoint("targets", args[4], "").load()() if len(args) > 4 else installed()
    words = folder / "words"
    words.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in WORDS))
    failed = False
    for target in targets:
        place = folder / target.name.replace(" ", "-")
        (place / "corpus").mkdir(parents=True, exist_ok=True)
        child = os.fork()
        if child == 0:
            _fuzz(atheris, target, place, seconds / len(targets), runs, seed, words)
        failed |= os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    sys.exit(failed)


def _fuzz(atheris: Any, target: Target, place: Path, seconds: float, runs: int, seed: int, words: Path) -> NoReturn:
    """libFuzzer never returns, so this process ends here."""
    from talaria_bench.fuzz.target import NESTED, Tally, awkward

    log = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1), os.dup2(log, 2)
    tally = Tally()
    for i, data in enumerate(target.seeds):
        tally.shoot(target, data)
        (place / "corpus" / f"seed-{i:03}").write_bytes(data)
    for data in awkward(target.seeds, (*NESTED, *WORDS), runs or AWKWARD):
        try:
            Tally().shoot(target, data)
        except BaseException:
            (place / "crash-awkward").write_bytes(data)
            raise
    before, begin = resident(), time.monotonic()

    def shoot(data: bytes) -> None:
        tally.shoot(target, data)
        over = (runs and tally.runs >= runs) or time.monotonic() - begin >= seconds
        if over or tally.runs % 1000 == 0:
            found = {**asdict(tally), "runs": tally.runs, "memory_mib": resident() - before}
            (place / "stats.json").write_text(json.dumps(found))
        if over:
            os._exit(0)

    limit = int(before) + MEMORY_MIB
    options = [f"-seed={seed}", f"-rss_limit_mb={limit}", f"-max_len={LONGEST}", "-timeout=30", f"-dict={words}"]
    atheris.Setup([sys.argv[0], *options, f"-artifact_prefix={place}/", str(place / "corpus")], shoot)
    atheris.Fuzz()
    os._exit(1)


def resident() -> float:
    """The most memory that this process had so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main(sys.argv[1:])
