"""Ingest workers: processes of one fleet that receive, check and keep the updates of the devices they own, and
fold its rounds in turn. The coordinator's own process has the protocol and the record. May use what the fleet may.
"""
