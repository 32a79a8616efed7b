"""What nothing names is freed now and then, not after each round: a fleet's blobs are many."""

import asyncio
import os
import time

import pytest

from talaria.errors import StateError
from talaria_coordinator.fleet.tidying import EVERY_S, Tidying
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.store import Store


def test_all_blobs_are_looked_through_once_in_a_while(tmp_path, monkeypatch):
    swept, told = [], []
    monkeypatch.setattr(FolderBlobs, "gc", lambda self, keep, older_s: swept.append((set(keep), older_s)))
    monkeypatch.setattr("talaria.time.monotonic", lambda: 1000.0)
    with Store(tmp_path / "store.db") as store:
        blobs = FolderBlobs(tmp_path / "blobs")
        tidying = Tidying(store, blobs, lambda event, **facts: told.append(facts), alone=False)
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


@pytest.mark.parametrize(("alone", "left"), [(True, {"new"}), (False, {"new", "folded"})])
def test_who_puts_blobs_alone_frees_them_soon(tmp_path, alone, left):
    """A disk then holds the updates of minutes, not of an hour; what was just put stays, whatever its age."""
    blobs = FolderBlobs(tmp_path / "blobs")
    with Store(tmp_path / "store.db") as store:
        tidying = Tidying(store, blobs, lambda event, **facts: None, alone=alone)
        names = {blobs.put(b"folded"): "folded"}
        for _ in range(2):  # what was put before the sweep before is known to be no longer on its way
            asyncio.run(tidying.work())
        names[blobs.put(b"new")] = "new"
        for digest in names:
            os.utime(blobs.folder / digest[:2] / digest[2:], (time.time() - 600,) * 2)
        asyncio.run(tidying.work())
    assert {names[digest] for digest in blobs.digests()} == left
