"""What the input and the output of every exported file are called."""

INPUT, OUTPUT = "input", "logits"
