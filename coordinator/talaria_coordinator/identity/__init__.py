"""Who belongs to a fleet: its folder of keys, its own certificate authority, expiry and eviction.

Tells the broker; knows no round.
"""
