"""What fleet.toml says, checked and frozen; the fleet, the store and the API each have their table.

Read once, at the top.
"""
