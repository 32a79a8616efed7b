"""One run of federated learning: what all agree on, and a round seen from each side, as plain functions.

Simulation and fleet call these same functions; it uses algorithms, aggregation, training, models and codecs.
"""
