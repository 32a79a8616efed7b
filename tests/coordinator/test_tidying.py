"""What nothing names is freed now and then, not after each round: a fleet's blobs are many."""

import asyncio

from talaria.errors import StateError
from talaria_coordinator.fleet.tidying import EVERY_S, Tidying
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store


def test_all_blobs_are_looked_through_once_in_a_while(tmp_path, monkeypatch):
    swept, told = [], []
    monkeypatch.setattr(FolderBlobs, "gc", lambda self, keep, older_s: swept.append((set(keep), older_s)))
    monkeypatch.setattr("talaria.time.monotonic", lambda: 1000.0)
    with Store(tmp_path / "store.db") as store:
        tidying = Tidying(store, FolderBlobs(tmp_path / "blobs"), lambda event, **facts: told.append(facts))
        assert tidying.due(0.0)
        assert not tidying.due(1e9), "it has not ended yet"
        asyncio.run(tidying.work())
        assert swept == [(set(), 3600.0)]
        assert [tidying.due(1000.0 + EVERY_S + more) for more in (-0.1, 0.0, 1.0)] == [False, True, False]

        def silent(*_, **__):
            raise StateError("blobs: the bucket does not answer")

        monkeypatch.setattr(FolderBlobs, "gc", silent)
        asyncio.run(tidying.work())
        assert told == [{"error": "blobs: the bucket does not answer"}]
        assert tidying.due(1e9)
