"""One large global model to one device over a link that is cut again and again: what is sent twice, and what it
takes."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from talaria.protocol.coordinator.state import Rules
from talaria.wire.chunks import CHUNK
from talaria_bench.fleet import meters
from talaria_bench.fleet.fake_devices import CODE, Job
from talaria_bench.fleet.files import FLEET
from talaria_bench.fleet.meters import MIB
from talaria_bench.fleet.programs import Program, running
from talaria_bench.fleet.proxy import Proxy, Trouble
from talaria_bench.fleet.synthetic import run_of, write_config
from talaria_coordinator.broker import open_broker

DEVICE = "dev-0000"
MOST_S = 900.0
SPARE_MIB = 32


async def fetched(folder: Path, model_mib: float, cuts: int, *, retry_s: float) -> dict[str, Any]:
    """Let one device fetch the global model while its link is cut ``cuts`` times, evenly spread."""
    run = run_of(model_mib, 1, 1.0)
    told: list[dict[str, Any]] = []
    before = {"rss": 0.0}
    with open_broker("mosquitto", state=folder / "broker") as broker:
        port = urlsplit(broker.url).port or 1883
        proxy = Proxy(port, 0)
        await proxy.open()
        url = f"mqtt://127.0.0.1:{proxy.port}"
        config = write_config(folder, run, 1, url, retry_s=retry_s)
        job = Job(FLEET, url, [DEVICE], retry_s, 1, disk=str(folder))

        def heard(name: str, event: dict[str, Any]) -> None:
            if event["event"] == "here":
                before["rss"] = meters.rss_mib(event["pid"])
            if name == DEVICE:
                told.append(event)

        coordinator = Program("coordinator", ["coordinator", "serve", str(config), "--json"], folder, lambda *_: None)
        device = Program(DEVICE, [job.dump()], folder, heard, code=CODE)
        begin, done, peak = time.monotonic(), 0, 0.0
        try:
            async with running((coordinator, device)):
                while time.monotonic() - begin < MOST_S:
                    if done < cuts and proxy.carried[DEVICE] > model_mib * MIB * (done + 1) / (cuts + 1):
                        proxy.make(Trouble("cut", DEVICE, 0.2))
                        done += 1
                    if device.process is not None and device.alive.is_set():
                        peak = meters.peak_mib(device.process.pid)
                    if any(event["event"] == "model" for event in told):
                        break
                    await asyncio.sleep(0.005)
        finally:
            await proxy.close()
    lost = sum(event["event"] == "cut" for event in told)
    model = next((event for event in told if event["event"] == "model"), None)
    credit, wrong = Rules().credit, []
    # All that the coordinator sent beyond one global model, what it said of other things included.
    again = math.ceil((proxy.taken["coordinator"] - model_mib * MIB) / CHUNK)
    if model is None:
        wrong.append(f"the global model did not come within {MOST_S:g} s; last words: {list(device.errors)[-3:]}")
    elif again > 2 * credit * cuts:
        wrong.append(f"{again} chunks came again, more than two windows of {credit} for each of {cuts} cuts")
    if lost < cuts:
        wrong.append(f"the link was lost {lost} times, not {cuts}")
    grown = peak - before["rss"]
    if grown > model_mib + SPARE_MIB:
        wrong.append(f"the receiver grew by {grown:.1f} MiB, more than the global model and {SPARE_MIB} MiB")
    return {
        "model_mib": model_mib,
        "cuts": lost,
        "chunks": 0 if model is None else model["count"],
        "chunks_came": 0 if model is None else model["chunks"],
        "chunks_sent_again": again,
        "allowed_again": 2 * credit * cuts,
        "receiver_grew_mib": round(grown, 1),
        "receiver_allowed_mib": model_mib + SPARE_MIB,
        "seconds": round(time.monotonic() - begin, 1),
        "wrong": wrong,
        "kept": not wrong,
    }
