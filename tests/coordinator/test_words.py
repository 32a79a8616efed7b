"""What is said in secure rounds, as the store keeps it."""

import pytest

from talaria.errors import StateError
from talaria.protocol import words
from talaria_coordinator.storage import updates
from talaria_coordinator.storage.store import Store

UPDATE = {"digest": "ab" * 32, "size": 1, "base_version": 0, "step": words.UPLOAD}


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "coordinator.db") as store:
        store.fleets.enter("watch", "{}", "a" * 64, "b" * 64)
        store.attempts.open("watch", 1, ["anna", "bela"], "a" * 64)
        store.words.keep("watch", 1, [(-1, "", b"terms")])
        yield store


def test_a_masked_update_is_kept_as_update_and_as_word_or_not_at_all(store, monkeypatch):
    """A disk that is full between the two must not leave a receipt for what no sum has."""

    def full(*said):
        raise StateError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(updates, "keep_words", full)
        with pytest.raises(StateError, match="full"):
            store.updates.keep("watch", 1, "anna", **UPDATE)
    assert store.updates.of("watch", 1) == []
    for _ in range(2):  # it comes again
        assert store.updates.keep("watch", 1, "anna", **UPDATE).status == "stored"
    assert store.words.of("watch", 1) == [(-1, "", b"terms"), (words.UPLOAD, "anna", b"\xab" * 32)]
    other = store.updates.keep("watch", 1, "anna", **{**UPDATE, "digest": "cd" * 32})
    assert other.digest == UPDATE["digest"]
    assert len(store.words.of("watch", 1)) == 2


def test_words_are_kept_together_in_their_order_and_each_once(store):
    said = [(0, "anna", b"a"), (0, "bela", b"b"), (0, "anna", b"c")]
    store.words.keep("watch", 1, said)
    store.words.keep("watch", 1, [*said, (1, "anna", b"d")])
    kept = [(-1, "", b"terms"), (0, "anna", b"a"), (0, "bela", b"b"), (1, "anna", b"d")]
    assert store.words.of("watch", 1) == kept
    store.words.keep("watch", 2, [(-1, "", b"others")])
    assert store.words.of("watch", 1) == []
