"""A module that cannot be imported."""

raise RuntimeError("nothing works today")
