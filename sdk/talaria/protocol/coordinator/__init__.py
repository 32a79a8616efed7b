"""The coordinator's half of the protocol: a machine without input or output, and the state that it keeps."""
