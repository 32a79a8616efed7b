"""Ingest workers: processes of one fleet that receive, check and keep the updates of the devices they own. What the
coordinator's own process has is the protocol, the record and the fold. May use what the fleet may.
"""
