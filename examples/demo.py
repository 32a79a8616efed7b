"""Twenty smartwatch wearers, one broker: `make demo`.

Sixteen wearers train a model together over MQTT, each with a subnetwork that fits its own hardware. Then four people
whom the fleet has never seen put on the watch, with one minute of labelled data each. No agent has torch: the
coordinator gives them a kit to learn from. Every one of the twenty makes itself a small ONNX bundle, which is verified
here against torch. What they would have had otherwise is trained beside them.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from smartwatch.baselines import baselines
from smartwatch.setting import ROUNDS, TUNE_EPOCHS, hardware_of, plan_of, run_of
from smartwatch.summary import summary_of

from smartwatch import fleet
from talaria import data as datasets
from talaria.errors import TalariaError
from talaria.simulation.reporting import print_table, write_html

console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tune", type=int, default=TUNE_EPOCHS, help="epochs of fine-tuning after the rounds")
    parser.add_argument("--broker", default="auto", help="auto, mosquitto, amqtt, or a broker's URL")
    parser.add_argument(
        "--codec", default="fp16", choices=("raw", "fp16", "int8"), help="how updates and models travel"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)  # a small network gains nothing by two, and beside other work each waits for the other
    try:
        demo(asked.out, asked.seed, asked.rounds, asked.tune, asked.broker, asked.codec)
    except (TalariaError, OSError) as error:
        Console(stderr=True).print(f"demo: {error}", markup=False, highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)  # what was done so far lies in `out`; the next run puts it aside


def demo(out: Path, seed: int, rounds: int, tune: int, broker: str, codec: str = "fp16") -> dict[str, Any]:
    """The whole story; returns what it wrote to ``out/summary.json``."""
    began = time.time()
    data = datasets.load("smartwatch")
    run = replace(run_of(data, "hermes", seed, rounds, tune), codec=codec, download=codec)
    everyone = data.everyone
    hardware = hardware_of(data)
    plans = {name: plan_of(run, hardware[name]) for name in everyone}
    console.print(
        f"[bold]{len(data.clients)} wearers[/bold] train together, [bold]{len(data.newcomers)} newcomers[/bold] "
        f"arrive afterwards; {len(data.labels)} exercises, six axes at 50 Hz, seed {seed}"
    )
    folder = _fresh(out)
    for name, client in everyone.items():
        fleet.write_data(folder / f"{name}.npz", client)
    with Progress(
        TextColumn("{task.description:<34}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        learned = _learn(folder, run, data, plans, broker, progress)
        bar = progress.add_task("what they would have otherwise", total=2 * rounds, note="")

        def trained(method: str, round: int) -> None:
            done = round if method == "fedavg" else rounds + round
            progress.update(bar, completed=done, note=f"{method}, round {round}")

        dense = baselines(data, seed, rounds, tune, trained)
    summary = summary_of(run, data, hardware, learned, dense, seconds=time.time() - began)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    write_html(summary, out / "report.html")
    print_table(summary, console)
    console.print(f"{out / 'summary.json'}  {out / 'report.html'}  {out / 'bundles'}/*.talaria", highlight=False)
    return summary


def _fresh(out: Path) -> Path:
    """An empty folder for this run's devices; what an earlier run left is put aside, not deleted."""
    folder = out / "fleet"
    if folder.exists():
        os.rename(out, out.with_name(f"{out.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(out.stat().st_mtime))}"))
    (out / "bundles").mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True)
    return folder


def _learn(folder: Path, run: Any, data: Any, plans: Any, broker: str, progress: Progress) -> dict[str, Any]:
    """Members, then newcomers, over the broker; what came of each device, the broker's kind and the rounds' facts."""
    members, newcomers = list(data.clients), list(data.newcomers)
    config = fleet.fleet_toml(folder, run, members, broker)
    with fleet.coordinator(config) as (process, url, kind):
        made = {n: fleet.device_toml(folder, n, url, plans[n], data.labels) for n in (*members, *newcomers)}
        console.print(f"broker: {kind} at {url}", highlight=False)
        bar = progress.add_task("16 wearers learn over MQTT", total=run.rounds, note="waiting for devices")
        served = progress.add_task("their own models", total=len(members), note="")
        metrics: list[fleet.Event] = []

        def watch(event: fleet.Event) -> None:
            if event["event"] == "round-closed":
                progress.update(
                    bar, completed=event["round"], note=f"round {event['round']}: {event['counted']} counted"
                )
            elif event["event"] == "trained":
                metrics.append(event)
            elif event["event"] == "done" and "device" in event:
                progress.advance(served)
                progress.update(served, note=event["device"])

        groups = [[made[n] for n in members[i::2]] for i in range(2)]
        learned, peak = fleet.run_devices(groups, watch, process)
        arrive = progress.add_task("newcomers put on the watch", total=len(newcomers), note="one minute of labels each")

        def arrived(event: fleet.Event) -> None:
            if event["event"] == "done" and "device" in event:
                progress.advance(arrive)

        late, more = fleet.run_devices([[made[n] for n in newcomers[i::2]] for i in range(2)], arrived, process)
    peak = max(peak, more)
    console.print(f"no agent had torch; all that ran at the same time took at most {peak:.0f} MB", highlight=False)
    return {"devices": {**learned, **late}, "broker": kind, "metrics": metrics, "peak_mb": peak}


if __name__ == "__main__":
    main()
