"""Room for epochs that count milliseconds.

SQLite's integers have that room already, and its tables cannot be altered in place.
"""

from alembic import op
from sqlalchemy import BigInteger, Integer

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        op.alter_column("fleets", "epoch", existing_type=Integer(), type_=BigInteger(), existing_nullable=False)
