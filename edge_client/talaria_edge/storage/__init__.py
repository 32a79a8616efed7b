"""The files of one device: its state, tensors with checksums, and partial downloads."""
