"""What a gateway saves on its site's link: the same fleet twice over real brokers, the site's devices at the
coordinator themselves, and behind a gateway. Bytes are those that devices and gateway count, with topics and frames.

    python benchmarks/gateway.py --site 3 10 --codec raw int8
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from talaria.config import write_toml
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec

TALARIA = "from talaria.cli.main import main; main()"
DIRECT = ("anna", "bela")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Programs:
    """``talaria ...`` processes in ``folder``; none is left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, list[subprocess.Popen[str]]()

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.running:
            if one.poll() is None:
                one.terminate()  # its broker ends with it
            one.communicate()

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        """One more."""
        command = [sys.executable, "-c", TALARIA, *map(str, words), "--json"]
        one = subprocess.Popen(command, cwd=self.folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
        self.running.append(one)
        return one

    @staticmethod
    def broker(one: subprocess.Popen[str]) -> str:
        """The URL of the broker that it serves at; what else it tells is let go by."""
        assert one.stdout is not None
        for line in one.stdout:
            if json.loads(line)["event"] == "ready":
                return str(json.loads(line)["broker"])
        raise SystemExit("it ended before it was ready")

    def end(self) -> None:
        """Wait until all have ended by themselves."""
        for one in self.running:
            one.communicate(timeout=600)
            if one.returncode:
                raise SystemExit(f"{one.args} ended with status {one.returncode}")


def device(folder: Path, name: str, seed: int, fleet: str, url: str) -> Path:
    """A device with random windows."""
    rng, y = np.random.default_rng(seed), np.arange(30) % 7
    x = (rng.standard_normal((30, 6, 100)) + y[:, None, None]).astype(np.float32)
    np.savez(folder / f"{name}.npz", x_train=x[:20], y_train=y[:20], x_val=x[20:], y_val=y[20:])
    tables = {"device": {"id": name}, "fleet": {"name": fleet, "broker": url, "retry_s": 0.5}}
    path = folder / f"{name}.toml"
    path.write_text(write_toml({**tables, "data": {"source": "npz", "path": f"{name}.npz"}}))
    return path


def fleet(folder: Path, members: Sequence[str], run: Run, gateways: dict[str, int]) -> Path:
    """The fleet's settings."""
    path = folder / "fleet.toml"
    path.write_text(
        write_toml(
            {
                "fleet": {"name": "watch", "members": list(members), "stay": False},
                "rounds": {"quorum": 1.0, "retry_s": 0.5},
                "gateways": gateways,
                "run": {"algorithm": run.algorithm, "rounds": run.rounds, "codec": run.codec},
                "run.spec": {"name": "imu_cnn", "input_shape": [6, 100], "classes": 7},
            }
        )
    )
    return path


def traffic(folder: Path, names: Sequence[str]) -> dict[str, int]:
    """Bytes of these members over all rounds."""
    found = {"up": 0, "down": 0}
    for name in names:
        for round in json.loads((folder / "state" / name / "result.json").read_bytes())["traffic"].values():
            found = {way: found[way] + round[way] for way in found}
    return found


def flat(folder: Path, site: Sequence[str], run: Run) -> dict[str, int]:
    """The site's devices at the coordinator."""
    with Programs(folder) as programs:
        url = programs.broker(programs.start("coordinator", "serve", fleet(folder, [*DIRECT, *site], run, {})))
        every = [device(folder, name, seed, "watch", url) for seed, name in enumerate((*DIRECT, *site))]
        programs.start("edge", "run", *every)
        programs.end()
    return traffic(folder, site)


def behind_a_gateway(folder: Path, site: Sequence[str], run: Run) -> dict[str, int]:
    """The same devices, with a gateway before them."""
    with Programs(folder) as programs:
        above = fleet(folder, [*DIRECT, "site"], run, {"site": len(site)})
        url = programs.broker(programs.start("coordinator", "serve", above))
        path = folder / "site.toml"
        path.write_text(
            write_toml(
                {
                    "fleet": {"name": "garden", "members": list(site), "state": "garden", "stay": False},
                    "rounds": {"deadline_s": 300, "quorum": 1.0, "retry_s": 0.5},
                    "upstream.device": {"id": "site"},
                    "upstream.fleet": {"name": "watch", "broker": url, "retry_s": 0.5},
                }
            )
        )
        gateway = programs.start("gateway", "run", path)
        programs.start("edge", "run", *(device(folder, name, seed, "watch", url) for seed, name in enumerate(DIRECT)))
        inside = programs.broker(gateway)
        programs.start(
            "edge", "run", *(device(folder, name, seed, "garden", inside) for seed, name in enumerate(site, 2))
        )
        programs.end()
    return traffic(folder, ["site"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=int, nargs="+", default=[3, 10], help="devices of the site")
    parser.add_argument("--codec", nargs="+", default=["raw", "int8"], help="how updates of devices travel")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{'codec':6} {'site':>4} {'up KiB':>17} {'ratio':>6} {'down KiB':>17} {'ratio':>6}")
    for codec in args.codec:
        for count in args.site:
            run = Run(spec=ModelSpec("imu_cnn", (6, 100), 7), algorithm="fedavg", rounds=args.rounds, codec=codec)
            site = [f"d{n:03}" for n in range(count)]
            with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
                for folder in (one, two):
                    os.chmod(folder, 0o711)  # so that Mosquitto, where root starts it, can be another user
                without, with_it = flat(Path(one), site, run), behind_a_gateway(Path(two), site, run)
            figures = [
                f"{without[way] / 1024:8.1f} {with_it[way] / 1024:8.1f} {with_it[way] / without[way]:6.3f}"
                for way in ("up", "down")
            ]
            print(f"{codec:6} {count:4} {' '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
