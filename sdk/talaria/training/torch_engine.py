"""Torch as the engine of a task: the loop, and kept features where only upper layers train."""

from talaria.training.frozen_features import train as train_upper
from talaria.training.loop import calibrate, gradient, served, train

__all__ = ["calibrate", "gradient", "served", "train", "train_upper"]
