"""What is said in secure rounds, as the store keeps it."""

import pytest

from talaria.errors import StateError
from talaria.protocol import words
from talaria_coordinator.storage import store as store_module
from talaria_coordinator.storage.store import Store

UPDATE = {"digest": "ab" * 32, "size": 1, "base_version": 0, "step": words.UPLOAD}


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "coordinator.db") as store:
        store.enter("watch", "{}", "a" * 64, "b" * 64)
        store.open_attempt("watch", 1, ["anna", "bela"], "a" * 64)
        store.keep_word("watch", 1, -1, "", b"terms")
        yield store


def test_a_masked_update_is_kept_as_update_and_as_word_or_not_at_all(store, monkeypatch):
    """A disk that is full between the two must not leave a receipt for what no sum has."""

    def full(*said):
        raise StateError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(store_module, "_keep_word", full)
        with pytest.raises(StateError, match="full"):
            store.keep_update("watch", 1, "anna", **UPDATE)
    assert store.updates("watch", 1) == []
    for _ in range(2):  # it comes again
        assert store.keep_update("watch", 1, "anna", **UPDATE).status == "stored"
    assert store.words("watch", 1) == [(-1, "", b"terms"), (words.UPLOAD, "anna", b"\xab" * 32)]
    other = store.keep_update("watch", 1, "anna", **{**UPDATE, "digest": "cd" * 32})
    assert other.digest == UPDATE["digest"]
    assert len(store.words("watch", 1)) == 2
