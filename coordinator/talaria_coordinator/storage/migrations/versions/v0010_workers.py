"""A fleet's ingest workers as they were last seen, as small JSON."""

from alembic import op
from sqlalchemy import Column, Text

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("fleets", Column("workers", Text))
