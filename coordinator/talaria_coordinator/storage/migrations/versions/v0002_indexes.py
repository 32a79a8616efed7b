"""Indexes for what is asked for all the time, and room for any ``base`` that a device may claim.

SQLite's integers have that room already, and its tables cannot be altered in place.
"""

from alembic import op
from sqlalchemy import BigInteger, Integer

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_index("updates_by_status", "updates", ["status"])
    op.create_index("updates_by_device", "updates", ["fleet", "device", "round"])
    op.create_index("events_by_fleet", "events", ["fleet", "seq"])
    if op.get_context().dialect.name == "postgresql":
        op.alter_column("updates", "base", existing_type=Integer(), type_=BigInteger(), existing_nullable=False)
