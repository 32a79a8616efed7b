"""What FFGG sends is of the loss that its private part was fitted to, and its two variants count the same steps."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from talaria.algorithms.ffgg import FFGG
from talaria.model.state import load, tensor_of
from talaria.seeds import Draws
from talaria.tensors import Array
from talaria.training import augment


def noisy(x: Array, draws: Draws) -> Array:
    """An augmentation that no gradient of the plain inputs would match."""
    return 2 * x + draws.normal(*x.shape).astype(np.float32)


@pytest.mark.parametrize(("smoothing", "change"), [(0.0, "none"), (0.3, "none"), (0.0, "noisy"), (0.3, "noisy")])
def test_the_gradient_sent_is_of_the_loss_that_the_head_was_fitted_to(monkeypatch, tiny, smoothing, change):
    monkeypatch.setitem(augment.AUGMENTATIONS, "noisy", noisy)
    task = tiny(count=40, smoothing=smoothing, augment=change)
    algorithm = FFGG(form="gradient", gamma=0.5)
    shared, private = algorithm.init(task.model, task.split)
    update, kept = algorithm.fit(task, shared, private)

    module = load(task.model, {**shared, **kept}).double().eval().requires_grad_(True)
    module.zero_grad(set_to_none=True)
    x = tensor_of(augment.get(change)(task.train.x, task.draws("gradient")))
    F.cross_entropy(module(x.double()), tensor_of(task.train.y), label_smoothing=smoothing).backward()
    for name, parameter in module.named_parameters():
        if name in update.tensors:
            torch.testing.assert_close(
                tensor_of(update.tensors[name]).double() / -0.5, parameter.grad, rtol=1e-4, atol=1e-6
            )


@pytest.mark.parametrize("count", [33, 32, 31, 5, 1])
def test_fitting_the_head_before_each_step_counts_the_steps_of_the_recipe(monkeypatch, tiny, count):
    """One sample left over joins the batch before it: 33 samples in batches of 32 are one step an epoch, not two."""
    task = tiny(count=count, batch=32, epochs=2)
    purposes, trained = [], FFGG._trained

    def watched(self, task, state, names, recipe, purpose):
        purposes.append(purpose)
        return trained(self, task, state, names, recipe, purpose)

    monkeypatch.setattr(FFGG, "_trained", watched)
    algorithm = FFGG(refit=True)
    algorithm.fit(task, *algorithm.init(task.model, task.split))
    assert [p for p in purposes if p.startswith("body")] == ["body 0", "body 1"]
