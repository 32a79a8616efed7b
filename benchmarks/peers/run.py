"""What does simulating FedAvg cost in Talaria, in Flower, in Apple's pfl, and by hand? The same work, in turns.

    python benchmarks/peers/run.py [--only flower,pfl] [--data fashion-mnist] [--partition PARTITION.npz]
        [--pfllib CHECKOUT] [--plato CHECKOUT]

Every candidate trains all clients for one epoch a round in batches of 10 by SGD (.01), from the same first weights, and
is a process of its own with one thread of torch for each process that trains. A round's CPU seconds are those of the
process and all below it (Ray's, too); the table has the median of the rounds after the first, as ratios to the plain
loop of the same turn. `start` is what came until the first round was over, beyond that: imports, data, Ray and its
actors. Accuracy is the global model's after the last round; shuffles differ.

A peer is installed into a venv of its own in build/peers, with this Python's packages (torch, Talaria) behind its own.
PFLlib and Plato are imported from checkouts that the command line names; what they need comes from PyPI. Plato's server
listens at a port of this machine alone; its round takes minutes (`--rounds 2 --turns 1 --clients 4`).
`--only ray` has Talaria on Ray clusters of one and of two nodes on this machine, one CPU each: there the wall time of a
round says what a second node is worth, where two cores are free. Writes one JSON file and a plot beside it.
"""

import argparse
import json
import os
import platform
import site
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from talaria.data import load
from talaria.errors import TalariaError

HERE = Path(__file__).resolve().parent
VENVS = HERE.parents[1] / "build" / "peers"
NEEDS = {
    "flower": ["flwr[simulation]>=1.41,<2"],
    "pfl": ["pfl>=0.6,<0.7"],
    "ray": ["ray>=2.55"],
    "pfllib": ["scikit-learn", "h5py", "matplotlib"],
    "plato": [
        *("aiohttp", "boto3", "datasets", "evaluate", "gym", "opacus", "python-socketio", "pyyaml", "requests", "timm"),
        *("torch-optimizer", "torchvision", "transformers", "zstd"),
        "lightly>=1.5,<1.6",  # a loss that Plato names is gone since
    ],
}
CANDIDATES = {
    "loop": ("", "loop.py", "a plain loop by hand"),
    "talaria": ("", "talaria_alone.py", "talaria simulate"),
    "flower": ("flower", "flower_own.py", "Flower's FedAvg, Ray"),
    "talaria in flower": ("flower", "flower_talaria.py", "Talaria inside Flower, Ray"),
    "pfl": ("pfl", "pfl_own.py", "Apple pfl"),
    "pfllib": ("pfllib", "pfllib_own.py", "PFLlib"),
    "plato": ("plato", "plato_own.py", "Plato, two processes"),
    "ray, one node": ("ray", "ray_nodes.py 1", "talaria simulate --ray, one node"),
    "ray, two nodes": ("ray", "ray_nodes.py 2", "talaria simulate --ray, two nodes"),
}
"""Name -> the peer that it needs, its program with its arguments, what it is."""
CHECKOUTS = {"pfllib": "system/flcore/servers/serveravg.py", "plato": "plato/servers/fedavg.py"}
"""Peers that are imported from a checkout -> a file that it has."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="flower,pfl", help="with commas between: flower, pfl, ray")
    parser.add_argument("--pfllib", type=Path, help="a checkout of github.com/TsingZ0/PFLlib; runs it, too")
    parser.add_argument("--plato", type=Path, help="a checkout of github.com/TL-System/plato; runs it, too")
    parser.add_argument("--data", default="fashion-mnist", choices=("fashion-mnist", "smartwatch"))
    parser.add_argument("--partition", type=Path, help="npz with train_idx and test_idx per client")
    parser.add_argument("--clients", type=int, help="only so many of the clients (not with flower)")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/peers.json"))
    asked = parser.parse_args()
    peers = [name for name in asked.only.split(",") if name]
    if not set(peers) <= {"flower", "pfl", "ray"}:
        parser.error(f"--only {asked.only}: peers are flower, pfl and ray; --pfllib and --plato say where these are")
    if asked.clients is not None and "flower" in peers:
        parser.error(f"--clients {asked.clients}: Flower's candidates take all clients; leave flower out of --only")
    for name, sign in CHECKOUTS.items():
        if (place := getattr(asked, name)) is not None:
            if not (place / sign).exists():
                parser.error(f"--{name} {place}: has no {sign}; give a checkout")
            peers.append(name)
    for name in ("clients", "turns"):
        if (asked_for := getattr(asked, name)) is not None and asked_for < 1:
            parser.error(f"--{name} {asked_for}: take 1 at least")
    if asked.out.is_dir() or asked.out.suffix == ".svg":
        parser.error(f"--out {asked.out}: figures go there, and the plot beside them as .svg; name a .json file")
    if asked.rounds < 2:
        parser.error(f"--rounds {asked.rounds}: the first round is not counted; take 2 at least")
    try:  # before minutes of installing
        load(asked.data, **({} if asked.partition is None else {"partition": asked.partition}))
        asked.out.parent.mkdir(parents=True, exist_ok=True)
    except (TalariaError, OSError) as error:
        parser.error(str(error))
    pythons = {"": Path(sys.executable), **{peer: installed(peer) for peer in peers}}
    found: dict[str, list[dict[str, Any]]] = {}
    for turn in range(asked.turns):
        for name, (peer, program, _) in CANDIDATES.items():
            if peer in pythons:
                checkout = getattr(asked, peer) if peer in CHECKOUTS else None
                told = measured(pythons[peer], program, asked, checkout)
                found.setdefault(name, []).append(told)
                print(f"turn {turn + 1}: {name:18} {told['round_cpu_s']:7.2f} CPU s a round", flush=True)
    rows = {name: row(turns, found["loop"]) for name, turns in found.items()}
    for name, one in rows.items():
        print(
            f"{name:18} {one['ratio']:5.2f} of the loop's CPU ({one['cpu_s']:.2f} s a round)  "
            f"wall {one['wall_s']:.2f} s  start {one['start_cpu_s']:.1f} CPU s  "
            f"memory {one['memory_mb']:.0f} MB  accuracy {one['accuracy']:.3f}"
        )
    about = {
        "data": asked.data,
        "clients": asked.clients,
        "rounds": asked.rounds,
        "machine": machine(),
        "python": platform.python_version(),
    }
    asked.out.write_text(json.dumps({**about, "table": rows, "turns": found}, indent=1))
    plot(rows, asked.out.with_suffix(".svg"))


def installed(peer: str) -> Path:
    """The Python of the peer's venv, which is made where it is not there."""
    python = VENVS / peer / "bin" / "python"
    done = VENVS / peer / ".installed"
    if not done.exists():
        print(f"installing {', '.join(NEEDS[peer])} into {VENVS / peer}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENVS / peer)], check=True)
        own = subprocess.run(
            [str(python), "-c", "import site; print(site.getsitepackages()[0])"],
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        behind = "; ".join(f"site.addsitedir({folder!r})" for folder in site.getsitepackages())
        (Path(own) / "zz_behind.pth").write_text(f"import site; {behind}\n")  # first: torch is not installed again
        if subprocess.run([str(python), "-m", "pip", "install", "-qq", *NEEDS[peer]], check=False).returncode:
            raise SystemExit(f"{peer} could not be installed (above); mend that, or leave it out of --only")
        done.touch()
    return python


def measured(python: Path, program: str, asked: argparse.Namespace, checkout: Path | None) -> dict[str, Any]:
    """One run of a candidate."""
    file, *given = program.split()
    given += [] if checkout is None else [str(checkout.resolve())]
    words = [str(python), str(HERE / file), *given, asked.data]
    words += ["-" if asked.partition is None else str(asked.partition.resolve()), str(asked.rounds)]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    quiet["RAY_ADDRESS"] = "local"  # a cluster that somebody else runs here is not joined
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    one |= {} if asked.clients is None else {"PEERS_CLIENTS": str(asked.clients)}
    ran = subprocess.run(words, env=os.environ | quiet | one, capture_output=True, text=True, check=False)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("measured ")]
    if ran.returncode or not lines:
        raise SystemExit(f"{' '.join(words)}\n{ran.stdout[-2000:]}{ran.stderr[-4000:]}")
    told: dict[str, Any] = json.loads(lines[-1].removeprefix("measured "))
    first, *rest = told["rounds"]
    if len(rest) + 1 != asked.rounds:
        raise SystemExit(f"{program}: {len(rest) + 1} rounds instead of {asked.rounds}")
    cpu, wall = (median(one[name] for one in rest) for name in ("cpu_s", "wall_s"))
    memory = max(one["memory_mb"] for one in told["rounds"])
    return told | {"round_cpu_s": cpu, "wall_s": wall, "start_cpu_s": first["cpu_s"] - cpu, "memory_mb": memory}


def row(turns: list[dict[str, Any]], loop: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians over the turns; the ratio is to the loop of the same turn."""
    ratios = [one["round_cpu_s"] / base["round_cpu_s"] for one, base in zip(turns, loop, strict=True)]
    names = {"cpu_s": "round_cpu_s", "wall_s": "wall_s", "start_cpu_s": "start_cpu_s", "accuracy": "accuracy"}
    return {
        "ratio": median(ratios),
        "ratios": ratios,
        **{name: median(one[key] for one in turns) for name, key in names.items()},
        "memory_mb": max(one["memory_mb"] for one in turns),
        "bytes_up": turns[0].get("bytes_up"),
        "versions": turns[0]["versions"],
    }


def machine() -> str:
    """The processor, and how many there are."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "")
    return f"{os.cpu_count()} x {name or platform.machine()}"


def plot(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """CPU of a round as ratios to the loop's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 0.5 * len(rows) + 1.2), layout="constrained")
    names = [CANDIDATES[name][2] for name in rows][::-1]
    bars = axes.barh(names, [one["ratio"] for one in rows.values()][::-1], color="#4477aa")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1, color="#888888", linewidth=1)
    axes.set_xlabel("CPU of a round, as a ratio to the plain loop's")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
