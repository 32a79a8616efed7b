"""PFLlib's FedAvg, from a checkout (github.com/TsingZ0/PFLlib): its server and clients as they are, its evaluation left
out. Each client reads its own npz in each round, as PFLlib's do."""

import os
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import work

source = Path(sys.argv.pop(1)).resolve()
sys.path.insert(0, str(source / "system" if (source / "system").is_dir() else source))
from flcore.servers.serveravg import FedAvg  # noqa: E402


class Measured(FedAvg):
    """FedAvg that says when a round is over."""

    def aggregate_parameters(self):
        """As FedAvg does."""
        super().aggregate_parameters()
        meter.round()

    def evaluate(self, *_):
        """Nobody is measured within a round; PFLlib asks for the best accuracy at the end."""
        self.rs_test_acc.append(0.0)


def settings(rounds: int, clients: int, classes: int) -> Namespace:
    """What PFLlib's main.py would hand over, with its own defaults where the work does not say otherwise."""
    said = {"dataset": "own", "algorithm": "FedAvg", "device": "cpu", "num_classes": classes, "num_clients": clients}
    said |= {"batch_size": work.BATCH, "local_learning_rate": work.LR, "local_epochs": 1, "join_ratio": 1.0}
    said |= {"global_rounds": rounds - 1, "eval_gap": 1 << 30, "save_folder_name": "items"}  # it trains one round more
    off = ("random_join_ratio", "time_select", "auto_break", "dlg_eval", "learning_rate_decay", "few_shot")
    off += ("client_drop_rate", "train_slow_rate", "send_slow_rate", "num_new_clients", "fine_tuning_epoch_new")
    said |= dict.fromkeys(off, 0) | {"learning_rate_decay_gamma": 0.99, "time_threthold": 10000, "top_cnt": 100}
    return Namespace(**said, goal="test", dlg_gap=100, batch_num_per_client=2)


told = work.asked()
data = work.data_of(told["name"], told["partition"])
args = settings(told["rounds"], len(data.clients), data.classes)
args.model = work.model_of(data)
with tempfile.TemporaryDirectory() as folder:
    for part in ("train", "test"):
        place = Path(folder) / "dataset" / args.dataset / part
        place.mkdir(parents=True)
        for number, client in enumerate(data.clients.values()):
            own = getattr(client, part)
            np.savez_compressed(place / f"{number}.npz", data={"x": own.x, "y": own.y})
    (Path(folder) / "system").mkdir()
    os.chdir(Path(folder) / "system")  # from where PFLlib looks for its data
    meter = work.Meter()
    server = Measured(args, 0)
    server.train()
    os.chdir("/")
meter.tell(work.accuracy(server.global_model, data))
