"""The coordinator's durable memory: tables and their migrations, records, the audit log, and blobs by content.

Knows SQLite and PostgreSQL, a folder and S3; knows no protocol.
"""
