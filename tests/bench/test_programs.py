"""Programs of a fleet that a bench keeps running."""

import asyncio
from pathlib import Path

from talaria_bench.fleet.programs import Program


def test_a_program_that_is_stopped_while_it_starts_does_not_run(tmp_path: Path) -> None:
    """Ctrl-C in the first seconds of a story waited for it for ever."""

    async def stopped() -> Program:
        program = Program("sleeper", (), tmp_path, lambda *_: None, code="import time; time.sleep(600)")
        keeper = asyncio.create_task(program.run())
        await asyncio.sleep(0)
        await program.stop()
        await asyncio.wait_for(keeper, 60)
        return program

    program = asyncio.run(stopped())
    assert program.process is not None
    assert program.process.returncode == -9
