"""Forward and backward of each kind of layer as ONNX operators, one family a file; :mod:`.table` knows them all.

Maps lie channels first, (channels, batch, space), so that a convolution is one matrix product over columns that its
forward pass and its weight gradient share. Channels and batch stay unknown: one file serves every mask and batch.
"""
