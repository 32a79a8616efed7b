"""What ``talaria edge run`` starts: agents in one process. It lives for months, so it loads only what they need."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from talaria import malloc, valid
from talaria.event_log import EventLog, let_go
from talaria.plugins import has_torch
from talaria_edge.agent.supervisor import run_agents
from talaria_edge.config import load_configs

_MAPPED = 1 << 20
"""Bytes of a block from which on it goes back to the system once it is free."""
_FLAGS = {"--json", "--insecure"}
_MOST_THREADS = 256
"""Where the system refuses torch a thread, the process ends at its first product."""


def run(configs: Sequence[Path], *, as_json: bool = False, threads: int = 0, insecure: bool = False) -> int:
    """Run the agents of these device.toml to their end; the exit status, with what failed on stderr."""
    valid.whole("edge", "threads", threads, 0, _MOST_THREADS)
    malloc.settle(arenas=1, mapped=_MAPPED, kept=_MAPPED)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if threads and has_torch():
        import torch

        torch.set_num_threads(threads)
    found = asyncio.run(run_agents(load_configs(configs), EventLog(sys.stdout, as_json), insecure=insecure))
    failed = {name: result["error"] for name, result in found.items() if "error" in result}
    for name, error in failed.items():
        sys.stderr.write(f"talaria: {name}: {error}\n")
    let_go()
    if any("stopped" in result for result in found.values()):
        os._exit(1 if failed else 0)  # nobody waits for a training, or a source of samples that gives none
    return 1 if failed else 0


def straight(words: Sequence[str]) -> bool:
    """``talaria edge run`` with files and its own options alone; False where the words are others. Ends the process."""
    files, flags, threads, rest = list[Path](), set[str](), 0, iter(words)
    for word in rest:
        if word in _FLAGS:
            flags.add(word)
        elif word == "--threads" and (number := next(rest, "")).isdecimal():
            threads = int(number)
        elif word.startswith("-"):
            return False
        else:
            files.append(Path(word))
    if not files:
        return False
    sys.exit(run(files, as_json="--json" in flags, threads=threads, insecure="--insecure" in flags))
