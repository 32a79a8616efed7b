"""Real processes, real brokers: a coordinator and agents as they are started by hand, on a model that trains fast."""

import gc
import json
import os
import queue
import resource
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from keyed import Keyed
from nursery import nursery
from servers import still

from talaria.federated import global_model
from talaria.federated.run import Member, Run
from talaria.model.spec import ModelSpec
from talaria.planning.plan import Plan
from talaria.simulation.run import simulate
from talaria.types import Recipe
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store
from talaria_edge.data import NpzSource
from talaria_edge.storage.state import DeviceStore

DEVICES = ("anna", "bela", "carl", "dora")


def environment():
    """That of the programs: what the tests have now, one thread, nothing held back."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Program:
    """A process that tells its events as JSON lines."""

    def __init__(self, *args, process=None):
        self.process = process or nursery().start([*map(str, args)], environment())
        self.events, self._new, self.errors = [], queue.Queue(), ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._complainer = threading.Thread(target=self._complain, daemon=True)
        self._reader.start()
        self._complainer.start()

    def _read(self):
        for line in self.process.stdout:
            self._new.put(json.loads(line))
        self._new.put(None)

    def _complain(self):
        self.errors = self.process.stderr.read()

    def wait_for(self, event, seconds=90, **facts):
        """The next event of this kind with these facts."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                item = self._new.get(timeout=end - time.monotonic())
            except queue.Empty:
                break
            if item is None:
                self._complainer.join(5)
                ended = f"it ended ({self.process.wait(20)}) before {event} {facts}"
                raise AssertionError(f"{ended}: {self.errors}\n{self.events[-8:]}")
            self.events.append(item)
            if item["event"] == event and all(item.get(k) == v for k, v in facts.items()):
                return item
        raise AssertionError(f"no {event} {facts} within {seconds} s; the last were {self.events[-8:]}")

    def limit_files(self, size):
        """As if the disk were full: no file of this process may grow beyond ``size`` bytes (None: no limit)."""
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))

    def stopped(self):
        """It does nothing meanwhile, though its links stay open."""
        return still(self.process.pid)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)

    def end(self, seconds=90):
        """Its exit status, once it ends by itself."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.events += [item for item in self._new.queue if item]
            raise AssertionError(f"it did not end within {seconds} s; its last events: {self.events[-12:]}") from None
        self._reader.join(5)
        self._complainer.join(5)
        while (item := self._new.get()) is not None:
            self.events.append(item)
        return status

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(5)
        self._complainer.join(5)
        self.process.stdout.close()
        self.process.stderr.close()


@dataclass
class Fleet:
    """A folder with the files of one fleet, and what runs on it."""

    folder: Path
    run: Run
    broker: str = "mosquitto"
    devices: tuple[str, ...] = DEVICES
    widths: dict = field(default_factory=dict)
    port: int = 0
    extra: str = ""
    engine: str = "torch"

    def __post_init__(self):
        self.programs = []
        for i, device in enumerate(self.devices):
            self.write_data(device, i)

    def write_data(self, device, seed, classes=3):
        rng = np.random.default_rng(seed)
        y = np.arange(30) % classes
        x = (rng.standard_normal((30, 6, 32)) + y[:, None, None]).astype(np.float32)
        np.savez(
            self.folder / f"{device}.npz",
            x_train=x[:18], y_train=y[:18], x_val=x[18:24], y_val=y[18:24], x_test=x[24:], y_test=y[24:],
        )  # fmt: skip

    @property
    def config(self):
        path = self.folder / "fleet.toml"
        spec, recipe = self.run.spec, self.run.recipe
        hparams = "\n".join(f"{k} = {json.dumps(v)}" for k, v in self.run.hparams.items())
        path.write_text(
            f"""
[fleet]
name = "watch"
members = {json.dumps(list(self.devices))}
stay = false
[broker]
url = "{self.broker}"
port = {self.port}
[rounds]
retry_s = 0.3
{self.extra}
[run]
algorithm = "{self.run.algorithm}"
rounds = {self.run.rounds}
seed = {self.run.seed}
[run.spec]
name = "{spec.name}"
input_shape = {list(spec.input_shape)}
classes = {spec.classes}
seed = {spec.seed}
[run.recipe]
epochs = {recipe.epochs}
batch = {recipe.batch}
lr = {recipe.lr}
augment = "{recipe.augment}"
[run.hparams]
{hparams}
"""
        )
        return path

    def device_config(self, device, url):
        path = self.folder / f"{device}.toml"
        widths = "\n".join(f'"{g}" = {n}' for g, n in self.widths.get(device, {}).items())
        path.write_text(
            f"""
[device]
id = "{device}"
engine = "{self.engine}"
[fleet]
name = "watch"
broker = "{url}"
retry_s = 0.3
[data]
source = "npz"
path = "{device}.npz"
[plan.widths]
{widths}
"""
        )
        return path

    def serve(self):
        return self._start("coordinator", "serve", self.config, "--json")

    def agents(self, url, *devices):
        files = [self.device_config(d, url) for d in devices or self.devices]
        return self._start("edge", "run", *files, "--json")

    def _start(self, *args):
        program = Program(*args)
        self.programs.append(program)
        return program

    def close(self):
        for program in self.programs:
            program.close()

    def state_of(self, device):
        return self.folder / "state" / device

    def shared(self, database=None, blobs=None):
        """The last global model, from the store of ``[store]`` where that is not the state folder."""
        store = Store(database or self.folder / "state" / "coordinator.db")
        try:
            fleet = store.fleets.get("watch")
            assert fleet.round == self.run.rounds
            store.audit.verify()
            shared_model = (blobs or FolderBlobs(self.folder / "state" / "blobs")).get(fleet.model_digest)
            return global_model.decode_model(self.run, shared_model)
        finally:
            store.close()

    def private(self, device):
        with DeviceStore(self.state_of(device), "watch", device) as store:
            return store.private().tensors

    def members(self):
        found = {}
        for device in self.devices:
            data = NpzSource(self.folder / f"{device}.npz").load()
            widths = self.widths.get(device)
            found[device] = Member(device, data.train, data.val, Plan(widths=widths) if widths else None, self.engine)
        return found

    def simulated(self, rounds=None):
        from dataclasses import replace

        run = self.run if rounds is None else replace(self.run, rounds=rounds)
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return simulate(run, self.members())
        finally:
            torch.set_num_threads(before)


def a_run(algorithm="fedavg", rounds=3, epochs=1, **hparams):
    spec = ModelSpec("imu_cnn", (6, 32), 3, seed=1)
    return Run(
        spec=spec, algorithm=algorithm, rounds=rounds, seed=5, recipe=Recipe(batch=8, epochs=epochs), hparams=hparams
    )


@pytest.fixture
def command():
    """Runs ``talaria ...`` to its end: exit status, stdout and stderr."""

    def run(*args, seconds=120):
        program = nursery().start([*map(str, args)], environment())
        out, errors = program.communicate(seconds)
        return program.returncode, out, errors

    return run


@pytest.fixture(name="a_run")
def _a_run():
    return a_run


@pytest.fixture
def fleet(tmp_path):
    """Makes fleets and ends all that they started."""
    made = []

    def make(run=None, **options):
        made.append(Fleet(tmp_path, run or a_run(), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def one_thread():
    """As the programs train."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def keyed(tmp_path, one_thread):
    """Makes fleets with keys, in this process, and ends all that they started."""
    made = []

    def make(rounds=3, algorithm="fedavg", **options):
        made.append(Keyed(tmp_path, a_run(algorithm, rounds=rounds), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    gc.collect()
