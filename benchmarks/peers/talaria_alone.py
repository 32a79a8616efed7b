"""`talaria simulate`: every update is encoded, checked and decoded as over MQTT."""

import work

from talaria.model.state import load, to_arrays
from talaria.simulation.experiment import prepare
from talaria.simulation.run import course, learned, members_of

told = work.asked()
data = work.data_of(told["name"], told["partition"])
asked = prepare("fedavg", data, work.spec_of(data), rounds=told["rounds"], recipe=work.RECIPE, buffers="aggregate")
work.model_of(data)  # sets one thread
fleet, rounds = course(asked.run, members_of(data.clients))
meter = work.Meter()
for _ in rounds:
    meter.round()
model = work.model_of(data)
load(model, to_arrays(model.state_dict()) | learned(fleet).shared)  # which counts no batches
meter.tell(work.accuracy(model, data), ("talaria",), bytes_up=fleet.history[-1].bytes_up)
