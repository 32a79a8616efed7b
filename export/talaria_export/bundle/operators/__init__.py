"""What ONNX operators make of shapes: each rule is a function, and each file ends with the operators that keep it."""
