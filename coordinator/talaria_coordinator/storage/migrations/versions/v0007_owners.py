"""By whose hand a device left for good: the operator's, as until now, or its owner's."""

from alembic import op
from sqlalchemy import Column, String

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("devices", Column("left_by", String(16)))
    op.execute("UPDATE devices SET left_by = 'operator' WHERE retired IS NOT NULL")
