"""Plato's FedAvg, from a checkout (github.com/TL-System/plato): its server, and two processes that play its clients by
turns; each training is a process of its own, as Plato has it. Every process reads this file again."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import work
import yaml
from torch.utils.data import SubsetRandomSampler, TensorDataset

if len(sys.argv) > 1:  # the first process: Plato reads the command line itself, in every process
    source = str(Path(sys.argv.pop(1)).resolve())
    os.environ["PEER_TOLD"] = "\n".join([source, *sys.argv[1:]])
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
source, *sys.argv[1:] = os.environ["PEER_TOLD"].split("\n")
told = work.asked()
del sys.argv[1:]
sys.path.insert(0, source)


def settings(clients: int, folder: str) -> dict:
    """Plato's configuration: all clients in each round, two at once, nobody is measured."""
    return {
        "clients": {"type": "simple", "total_clients": clients, "per_round": clients, "do_test": False},
        "server": {"address": "127.0.0.1", "port": work.free_port(), "do_test": False},
        "data": {"datasource": "own", "sampler": "own"},
        "trainer": {
            "type": "basic",
            "rounds": told["rounds"],
            "max_concurrency": 2,
            "model_name": "own",
            "epochs": 1,
            "batch_size": work.BATCH,
            "optimizer": "SGD",
        },
        "algorithm": {"type": "fedavg"},
        "parameters": {"optimizer": {"lr": work.LR, "momentum": 0.0, "weight_decay": 0.0}},
        "general": {"base_path": folder},
        "results": {"types": "round, comm_overhead"},
    }


CONFIG = "config_file"  # where Plato looks
if CONFIG not in os.environ:
    folder = tempfile.TemporaryDirectory(prefix="plato-")
    os.environ[CONFIG] = str(Path(folder.name) / "own.yml")
    count = len(work.data_of(told["name"], told["partition"]).clients)
    Path(os.environ[CONFIG]).write_text(yaml.safe_dump(settings(count, folder.name)))

from plato.clients import simple  # noqa: E402
from plato.samplers import base as sampling  # noqa: E402
from plato.samplers import registry  # noqa: E402
from plato.servers import fedavg  # noqa: E402


def model() -> torch.nn.Module:
    """The model that all candidates begin with."""
    return work.model_of(work.data_of(told["name"], told["partition"]))


class Source:
    """All clients' training samples, one client's after the other's; Plato's samplers say whose are whose."""

    def __init__(self) -> None:
        clients = work.data_of(told["name"], told["partition"]).clients.values()
        self.sizes = [len(one.train) for one in clients]
        x, y = (torch.cat([torch.from_numpy(getattr(one.train, k)) for one in clients]) for k in ("x", "y"))
        self.samples = TensorDataset(x, y)

    def get_train_set(self):
        """All samples."""
        return self.samples

    def num_train_examples(self) -> int:
        """How many there are."""
        return len(self.samples)


class Sampler(sampling.Sampler):
    """One client's own samples, in another order each time."""

    def __init__(self, datasource, client_id, testing=False) -> None:
        super().__init__()
        start = sum(datasource.sizes[: client_id - 1])
        self.own = range(start, start + datasource.sizes[client_id - 1])

    def get(self):
        """What a data loader takes."""
        return SubsetRandomSampler(self.own)

    def num_samples(self) -> int:
        """How many the client has."""
        return len(self.own)


registry.registered_samplers["own"] = Sampler


class Measured(fedavg.Server):
    """Plato's server that says when a round is over."""

    def clients_processed(self) -> None:
        """A round is over."""
        meter.round()

    def server_will_close(self) -> None:
        """Plato ends the process right after this."""
        data = work.data_of(told["name"], told["partition"])
        meter.tell(work.accuracy(self.trainer.model, data), plato_megabytes=self.comm_overhead)
        folder.cleanup()


if __name__ == "__main__":
    meter = work.Meter(reaped=True)
    Measured(model=model).run(simple.Client(model=model, datasource=Source))
