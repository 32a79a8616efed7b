"""Models: the zoo, body and head, masks, pruning, adapters.

Uses torch; knows no data and no training.
"""
