"""One name for each thing: tables and columns get the names that docs/glossary.md gives them.

The saved states of the protocol are of a format that is not read any more: they are let go of. What was under way is
then tried again, and who is shut out still stands in ``devices``.
"""

from alembic import op

from talaria_coordinator.storage.migrate import RENAMED, RENAMED_TABLES

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    for old, new in RENAMED_TABLES:
        op.execute(f"ALTER TABLE {old} RENAME TO {new}")
    # Both databases rename a column in keys and indexes too.
    for table, old, new in RENAMED:
        op.execute(f"ALTER TABLE {table} RENAME COLUMN {old} TO {new}")
    op.execute("DELETE FROM machines")
