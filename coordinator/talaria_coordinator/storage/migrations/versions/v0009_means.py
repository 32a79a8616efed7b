"""The means of what devices told within a secure round's sum, as small JSON."""

from alembic import op
from sqlalchemy import Column, Text

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("attempts", Column("means", Text))
