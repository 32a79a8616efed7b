"""One device's training: batches, augmentation, the loop, steps as functions, frozen features, and evaluation.

Stands on models, masks and the runtime; knows no round and no fleet.
"""
