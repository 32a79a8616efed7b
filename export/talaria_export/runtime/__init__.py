"""Runs a bundle and proves it: predictor, session, timing, verification. The predictor needs numpy and onnxruntime."""
