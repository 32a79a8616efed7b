"""Rewrites of an ONNX graph that keep its numbers."""
