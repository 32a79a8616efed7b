"""Run by alembic: the migrations, on the connection and in the transaction that the store began."""

from alembic import context

from talaria_coordinator.storage.tables import METADATA

# SQLite too takes back changes of tables, because the store begins its transactions itself.
context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
