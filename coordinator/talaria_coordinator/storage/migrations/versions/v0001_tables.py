"""The tables of the first version. Those that are there stay: a database from before migrations is taken as it is."""

from alembic import op
from sqlalchemy import BigInteger, Column, Float, ForeignKeyConstraint, Integer, LargeBinary, String, Text

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "fleets",
        Column("fleet", String(36), primary_key=True),
        Column("run", Text, nullable=False),
        Column("epoch", Integer, nullable=False),
        Column("step", Integer, nullable=False),
        Column("tried", Integer, nullable=False),
        Column("status", String(16), nullable=False),
        Column("roster", Text),
        Column("body", String(64), nullable=False),
        Column("server", String(64), nullable=False),
        Column("created", Float, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "rounds",
        Column("fleet", String(36), primary_key=True),
        Column("round", Integer, primary_key=True),
        Column("step", Integer, nullable=False),
        Column("cohort", Text, nullable=False),
        Column("base", String(64), nullable=False),
        Column("opened", Float, nullable=False),
        Column("closed", Float),
        Column("failure", Text),
        Column("body", String(64)),
        Column("server", String(64)),
        Column("counted", Text),
        Column("counted_sha256", String(64)),
        ForeignKeyConstraint(["fleet"], ["fleets.fleet"]),
        if_not_exists=True,
    )
    op.create_table(
        "devices",
        Column("fleet", String(36), primary_key=True),
        Column("device", String(36), primary_key=True),
        Column("boot", BigInteger, nullable=False),
        Column("online", Integer, nullable=False),
        Column("profile", Text, nullable=False),
        Column("joined", Float, nullable=False),
        Column("seen", Float, nullable=False),
        Column("quarantine", Text),
        ForeignKeyConstraint(["fleet"], ["fleets.fleet"]),
        if_not_exists=True,
    )
    op.create_table(
        "machines",
        Column("fleet", String(36), primary_key=True),
        Column("state", LargeBinary, nullable=False),
        ForeignKeyConstraint(["fleet"], ["fleets.fleet"]),
        if_not_exists=True,
    )
    op.create_table(
        "updates",
        Column("fleet", String(36), primary_key=True),
        Column("round", Integer, primary_key=True),
        Column("device", String(36), primary_key=True),
        Column("digest", String(64), nullable=False),
        Column("size", BigInteger, nullable=False),
        Column("base", Integer, nullable=False),
        Column("status", String(16), nullable=False),
        Column("reason", Text),
        Column("changed", Float, nullable=False),
        ForeignKeyConstraint(["fleet", "round"], ["rounds.fleet", "rounds.round"]),
        if_not_exists=True,
    )
    op.create_table(
        "findings",
        Column("fleet", String(36), primary_key=True),
        Column("round", Integer, primary_key=True),
        Column("device", String(36), primary_key=True),
        Column("found", Text, nullable=False),
        ForeignKeyConstraint(["fleet", "round", "device"], ["updates.fleet", "updates.round", "updates.device"]),
        if_not_exists=True,
    )
    op.create_table(
        "equivocations",
        Column("fleet", String(36), primary_key=True),
        Column("round", Integer, primary_key=True),
        Column("device", String(36), primary_key=True),
        Column("digest", String(64), primary_key=True),
        Column("seen", Float, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "events",
        Column("seq", Integer, primary_key=True, autoincrement=True),
        Column("at", Float, nullable=False),
        Column("fleet", String(36), nullable=False),
        Column("round", Integer),
        Column("device", String(36)),
        Column("kind", String(32), nullable=False),
        Column("detail", Text, nullable=False),
        Column("chain", String(64), nullable=False),
        if_not_exists=True,
    )
