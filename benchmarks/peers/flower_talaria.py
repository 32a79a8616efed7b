"""Talaria's FedAvg inside Flower's simulation, with the same Ray."""

import work
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from talaria.flower import TalariaStrategy, client_app
from talaria.flower.server import experiment_of
from talaria.model.state import load, to_arrays

told = work.asked()
options = {} if told["partition"] is None else {"partition": told["partition"]}
server = ServerApp()


class Measured(TalariaStrategy):
    """The strategy, saying when a round is over; nothing is evaluated on nodes."""

    def aggregate_train(self, server_round, replies):
        """As TalariaStrategy does."""
        found = super().aggregate_train(server_round, replies)
        meter.round()
        return found

    def configure_evaluate(self, *_):
        """Nobody is measured."""
        return []


@server.main()
def main(grid: Grid, context: Context) -> None:
    """All rounds, then the measure."""
    data = work.data_of(told["name"], told["partition"])
    asked = {"rounds": told["rounds"], "recipe": work.RECIPE, "buffers": "aggregate", "model": work.spec_of(data)}
    strategy = Measured(experiment_of({"algorithm": "fedavg", "data": data, **asked}).run)
    strategy.start(grid)
    model = work.model_of(data)
    load(model, to_arrays(model.state_dict()) | strategy.shared)  # which counts no batches
    meter.tell(work.accuracy(model, data), ("flwr", "ray", "talaria"), bytes_up=strategy.history[-1].bytes_up)


if __name__ == "__main__":
    meter = work.Meter()
    nodes = len(work.data_of(told["name"], told["partition"]).clients)
    app = client_app(told["name"], data_options=options)
    run_simulation(server, app, nodes, backend_config={"client_resources": {"num_cpus": 1}})
