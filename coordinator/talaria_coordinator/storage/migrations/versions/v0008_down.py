"""What of global models went down to devices for a round, and how large a whole one is."""

from alembic import op
from sqlalchemy import BigInteger, Column

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("attempts", Column("down", BigInteger))
    op.add_column("attempts", Column("dense", BigInteger))
