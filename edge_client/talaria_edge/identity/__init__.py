"""A device's keys and its way to the broker: joining a fleet, connecting to it."""
