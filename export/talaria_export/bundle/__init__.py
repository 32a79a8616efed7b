"""A bundle on disk: archive, manifest, checks of the ONNX file in it. Nothing in it is trusted. No torch."""
