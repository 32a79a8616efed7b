"""pFedGM: the algorithm, its navigator, Gaussian statistics and head, and what a round is trained on."""

from talaria.algorithms.pfedgm.pfedgm import PFedGM as PFedGM
