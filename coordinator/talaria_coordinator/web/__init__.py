"""The operator's side over HTTP: API, metrics and dashboard, on a thread of its own.

Reads the store and gives orders to the fleet; never touches the learning.
"""
