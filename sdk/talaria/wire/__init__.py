"""Bytes on the wire: topics, signed frames, messages, chunks, codecs of tensors, and the links that carry them.

Knows MQTT; knows no round and no algorithm.
"""
