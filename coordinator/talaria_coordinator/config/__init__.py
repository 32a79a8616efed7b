"""The settings of fleet.toml, checked and frozen: the tables of the fleet, the store and the API.

Read once, at the top.
"""
