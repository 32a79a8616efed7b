"""The agent of one device, which takes part in rounds, and several agents in one process."""
