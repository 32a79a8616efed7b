"""The plain loop: one model, its weights loaded for each client, SGD, a mean. Nothing is encoded, checked or kept."""

import torch
import work

from talaria.model.state import tensor_of

told = work.asked()
data = work.data_of(told["name"], told["partition"])
model = work.model_of(data)
shared = {k: v.clone() for k, v in model.state_dict().items()}
samples = [(tensor_of(c.train.x), tensor_of(c.train.y)) for c in data.clients.values()]
total = sum(len(y) for _, y in samples)
meter = work.Meter()
for _ in range(told["rounds"]):
    summed = {k: torch.zeros_like(v, dtype=torch.float32) for k, v in shared.items()}
    for x, y in samples:
        model.load_state_dict(shared)
        work.epoch(model, x, y)
        for k, v in model.state_dict().items():
            summed[k] += v * (len(y) / total)
    shared = {k: v.to(shared[k].dtype) for k, v in summed.items()}
    meter.round()
model.load_state_dict(shared)
meter.tell(work.accuracy(model, data))
