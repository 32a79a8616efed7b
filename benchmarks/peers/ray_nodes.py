"""`talaria simulate --ray` on a cluster of so many nodes on this machine, each with one CPU."""

import sys

import work
from ray.cluster_utils import Cluster

from talaria.model.state import load, to_arrays
from talaria.simulation.experiment import prepare
from talaria.simulation.run import course, crew_of, learned, members_of

nodes = int(sys.argv.pop(1))
told = work.asked()
data = work.data_of(told["name"], told["partition"])
asked = prepare("fedavg", data, work.spec_of(data), rounds=told["rounds"], recipe=work.RECIPE, buffers="aggregate")
work.model_of(data)  # sets one thread
meter = work.Meter()
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
for _ in range(nodes - 1):
    cluster.add_node(num_cpus=1)
members = members_of(data.clients)
with crew_of(asked.run, members, data, 0, cluster.address) as crew:
    fleet, rounds = course(asked.run, members, crew=crew)
    for _ in rounds:
        meter.round()
cluster.shutdown()
model = work.model_of(data)
load(model, to_arrays(model.state_dict()) | learned(fleet).shared)  # which counts no batches
meter.tell(work.accuracy(model, data), ("ray", "talaria"), bytes_up=fleet.history[-1].bytes_up)
