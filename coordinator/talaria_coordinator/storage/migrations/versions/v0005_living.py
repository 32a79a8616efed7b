"""Room for what becomes of a fleet: a run that goes on or is followed by another, and devices that left for good."""

from alembic import op
from sqlalchemy import Column, Float, Text

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("fleets", Column("life", Text()))
    op.add_column("devices", Column("retired", Float()))
