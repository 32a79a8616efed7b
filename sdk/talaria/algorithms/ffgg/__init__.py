"""FFGG, and the gradient that it sends."""

from talaria.algorithms.ffgg.ffgg import FFGG as FFGG
