"""The coordinator's durable memory: the record, by subject (`store.py` joins them), tables and migrations, and blobs.

Knows SQLite and PostgreSQL, a folder and S3; knows no protocol.
"""
