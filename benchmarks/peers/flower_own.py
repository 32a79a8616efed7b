"""Flower's own FedAvg in its simulation, as its quickstart has it: Ray, one CPU for each client."""

import work
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from talaria.model.state import tensor_of

told = work.asked()
client, server = ClientApp(), ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """One epoch on one node's samples."""
    model, data = held()
    own = list(data.clients.values())[context.node_config["partition-id"]].train
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    work.epoch(model, tensor_of(own.x), tensor_of(own.y))
    told = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(own)})}
    return Message(RecordDict(told), reply_to=message)


def held():
    """The model and the data of this process, made once."""
    if not hasattr(work, "held"):
        data = work.data_of(told["name"], told["partition"])
        work.held = work.model_of(data), data
    return work.held


class Measured(FedAvg):
    """FedAvg that says when a round is over."""

    def aggregate_train(self, server_round, replies):
        """As FedAvg does."""
        replies = list(replies)
        self.bytes_up = sum(len(a.data) for one in replies for a in one.content["arrays"].values())
        found = super().aggregate_train(server_round, replies)
        meter.round()
        return found


@server.main()
def main(grid: Grid, context: Context) -> None:
    """All rounds, then the measure."""
    model, data = held()
    every = len(data.clients)
    strategy = Measured(fraction_evaluate=0.0, min_train_nodes=every, min_available_nodes=every)
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=told["rounds"])
    model.load_state_dict(result.arrays.to_torch_state_dict())
    meter.tell(work.accuracy(model, data), ("flwr", "ray"), bytes_up=strategy.bytes_up)


if __name__ == "__main__":
    meter = work.Meter()
    run_simulation(server, client, len(held()[1].clients), backend_config={"client_resources": {"num_cpus": 1}})
