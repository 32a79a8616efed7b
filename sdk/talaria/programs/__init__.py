"""A training step as one standard ONNX graph: made where torch is, run where only onnxruntime and numpy are.

:mod:`.build` and what stands beside it need torch; :mod:`.program` and all below it never import it.
"""
