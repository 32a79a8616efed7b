"""Room for what is said in a secure round, until it is over, and for what privacy has cost."""

from alembic import op
from sqlalchemy import Column, Integer, LargeBinary, String, Text

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("fleets", Column("privacy", Text()))
    op.create_table(
        "words",
        Column("fleet", String(36), primary_key=True),
        Column("attempt", Integer, primary_key=True),
        Column("seq", Integer, primary_key=True),
        Column("step", Integer, nullable=False),
        Column("device", String(36), nullable=False),
        Column("data", LargeBinary, nullable=False),
    )
