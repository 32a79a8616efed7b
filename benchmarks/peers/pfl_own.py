"""Apple's pfl: its FederatedAveraging on its simulated backend."""

import numpy as np
import torch
import work
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn import functional as F

from talaria.model.state import tensor_of

told = work.asked()
data = work.data_of(told["name"], told["partition"])


class Net(torch.nn.Module):
    """The model with the two methods that pfl asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = work.model_of(data)

    def forward(self, x):
        """The model's outputs."""
        return self.inner(x)

    def loss(self, x, y, **_):
        """Cross entropy."""
        self.train()
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x, y, **_):
        """Accuracy."""
        self.eval()
        return {"accuracy": Weighted(float((self(x).argmax(1) == y).sum()), len(y))}


class Rounds(TrainingProcessCallback):
    """Says when a round is over."""

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """A round is over."""
        meter.round()
        return False, Metrics()


def samples(name: str) -> Dataset:
    """One client's, shuffled as every other candidate's are."""
    own = data.clients[name].train
    index = torch.randperm(len(own))
    return Dataset([tensor_of(own.x)[index], tensor_of(own.y)[index]], user_id=name)


np.random.seed(0)
names = list(data.clients)
federated = FederatedDataset(samples, get_user_sampler("minimize_reuse", names))
net = Net()
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0))
meter = work.Meter()
FederatedAveraging().run(
    NNAlgorithmParams(told["rounds"], evaluation_frequency=1 << 30, train_cohort_size=len(names), val_cohort_size=0),
    SimulatedBackend(training_data=federated, val_data=federated),
    model,
    NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.LR, local_batch_size=work.BATCH),
    callbacks=[Rounds()],
)
meter.tell(work.accuracy(net.inner, data), ("pfl",))
