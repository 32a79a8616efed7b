"""A fleet as one deterministic history: coordinator, devices, broker and disks in one process, on a virtual clock."""
