"""What refusing one message may cost, on whatever machine the tests run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

CPU_SECONDS = 0.1
MEMORY_MIB = 64
HEADERS = 20
"""Times that reading the largest header, as JSON and no more, takes: the bound on a machine slower than was meant.
Beside ten busy processes on two cores 6.5 were seen; what the bound is there to find has no bound at all."""

_HEADER = "{" + ",".join(f'"{i:06}":1' for i in range(95_000)) + "}"  # 1 MiB, the most that is ever read


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU time of this thread for one call."""
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def allowed() -> float:
    """Seconds of CPU for one message: 100 ms, or more where this machine now takes more than 5 ms for a header."""
    return max(CPU_SECONDS, HEADERS * min(cpu_seconds(lambda: json.loads(_HEADER)) for _ in range(3)))
