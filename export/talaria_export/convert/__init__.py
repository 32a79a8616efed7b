"""From a torch module to ONNX files: export, graph passes, quantized forms, ExecuTorch."""
