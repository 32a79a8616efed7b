"""The tables of the coordinator's state, in types that SQLite and PostgreSQL share. They are made by migrations."""

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Float,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

METADATA = MetaData()

# A device may claim any base_version, and epochs are milliseconds; the integers of SQLite hold them as they are.
CLAIMED = Integer().with_variant(BigInteger(), "postgresql")

# `round` counts the rounds of learning that are committed, `tried` the rounds that were opened: a round without
# quorum is tried again under a new number. `model_digest` and `server` are digests of what `round` rounds have learned.
# `privacy` is small JSON of what differential privacy has cost (records.Spent); NULL where nothing is counted.
# `life` is small JSON of what became of the run since (records.Life); NULL where it is the one that fleet.toml gave.
# `workers` is small JSON of the ingest workers while the fleet is served (records.Worker); NULL where there are none.
FLEETS = Table(
    "fleets",
    METADATA,
    Column("fleet", String(36), primary_key=True),
    Column("run", Text, nullable=False),
    Column("epoch", CLAIMED, nullable=False),
    Column("round", Integer, nullable=False),
    Column("tried", Integer, nullable=False),
    Column("status", String(16), nullable=False),
    Column("roster", Text),
    Column("model_digest", String(64), nullable=False),
    Column("server", String(64), nullable=False),
    Column("created", Float, nullable=False),
    Column("life", Text),
    Column("privacy", Text),
    Column("workers", Text),
)

ATTEMPTS = Table(
    "attempts",
    METADATA,
    Column("fleet", String(36), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("round", Integer, nullable=False),
    Column("cohort", Text, nullable=False),
    Column("base_digest", String(64), nullable=False),
    Column("opened", Float, nullable=False),
    Column("closed", Float),
    Column("failure", Text),
    Column("model_digest", String(64)),
    Column("server", String(64)),
    Column("counted", Text),
    Column("counted_sha256", String(64)),
    Column("down", BigInteger),
    Column("dense", BigInteger),
    Column("means", Text),
    ForeignKeyConstraint(["fleet"], ["fleets.fleet"]),
)

DEVICES = Table(
    "devices",
    METADATA,
    Column("fleet", String(36), primary_key=True),
    Column("device", String(36), primary_key=True),
    Column("boot", BigInteger, nullable=False),
    Column("online", Integer, nullable=False),
    Column("profile", Text, nullable=False),
    Column("joined", Float, nullable=False),
    Column("seen", Float, nullable=False),
    Column("quarantine", Text),
    Column("retired", Float),
    Column("left_by", String(16)),
    ForeignKeyConstraint(["fleet"], ["fleets.fleet"]),
)

MACHINES = Table(
    "machines",
    METADATA,
    Column("fleet", String(36), primary_key=True),
    Column("state", LargeBinary, nullable=False),
    ForeignKeyConstraint(["fleet"], ["fleets.fleet"]),
)

# `digest` is the sha256 of the update's bytes, and so the name of its blob.
UPDATES = Table(
    "updates",
    METADATA,
    Column("fleet", String(36), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("device", String(36), primary_key=True),
    Column("digest", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("base_version", CLAIMED, nullable=False),
    Column("status", String(16), nullable=False),
    Column("reason", Text),
    Column("changed", Float, nullable=False),
    ForeignKeyConstraint(["fleet", "attempt"], ["attempts.fleet", "attempts.attempt"]),
    Index("updates_by_status", "status"),
    Index("updates_by_device", "fleet", "device", "attempt"),
)

# What an update says of itself, as small JSON (update_summary.py): for people, never for the learning.
FINDINGS = Table(
    "findings",
    METADATA,
    Column("fleet", String(36), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("device", String(36), primary_key=True),
    Column("found", Text, nullable=False),
    ForeignKeyConstraint(["fleet", "attempt", "device"], ["updates.fleet", "updates.attempt", "updates.device"]),
)

EQUIVOCATIONS = Table(
    "equivocations",
    METADATA,
    Column("fleet", String(36), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("device", String(36), primary_key=True),
    Column("digest", String(64), primary_key=True),
    Column("seen", Float, nullable=False),
)

# What is said in a secure round, in this order, until another one begins: its terms (step -1), devices' words, and whom
# each step went on with (no device).
WORDS = Table(
    "words",
    METADATA,
    Column("fleet", String(36), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("step", Integer, nullable=False),
    Column("device", String(36), nullable=False),
    Column("data", LargeBinary, nullable=False),
)

EVENTS = Table(
    "events",
    METADATA,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("fleet", String(36), nullable=False),
    Column("attempt", Integer),
    Column("device", String(36)),
    Column("kind", String(32), nullable=False),
    Column("detail", Text, nullable=False),
    Column("chain", String(64), nullable=False),
    Index("events_by_fleet", "fleet", "seq"),
)


def of_attempt(table: Table, fleet: str, number: int) -> ColumnElement[bool]:
    """The rows of one attempt of a fleet, in any table that has both."""
    return (table.c.fleet == fleet) & (table.c.attempt == number)
