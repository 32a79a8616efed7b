"""Somebody else's package: what the tests plug into Talaria from outside."""
