"""A whole fleet's learning in one process, with the seeds and the bytes of the real one.

Stands on the rounds of :mod:`talaria.federated`; makes reports of what a run came to.
"""
