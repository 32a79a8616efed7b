"""HEART-PFL: the algorithm, what of a model it trains, and the class prototypes that it aligns with."""

from talaria.algorithms.heart_pfl.heart_pfl import HeartPFL as HeartPFL
from talaria.algorithms.heart_pfl.trained import trainable as trainable
