"""What fits a device: its profile, the latency and memory of models on it, and the plan for a budget.

Stands on models and ONNX Runtime.
"""
