"""One device's memory on flash: state, tensors with checksums, downloads on their way."""
