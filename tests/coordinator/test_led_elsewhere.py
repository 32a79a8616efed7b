"""A coordinator's own files where somebody has put a link, a pipe or a folder in their place."""

import asyncio
import os
import pwd
import tempfile
from pathlib import Path

import pytest

from talaria.errors import ConfigError, StateError
from talaria_coordinator import broker
from talaria_coordinator.broker import find_mosquitto, mosquitto, open_broker
from talaria_coordinator.fleet.tidying import Tidying
from talaria_coordinator.fleet.uploads import Uploads
from talaria_coordinator.server.open_state import write_url
from talaria_coordinator.storage.blobs import FolderBlobs, key_of
from talaria_coordinator.storage.store import Store


@pytest.fixture
def precious(tmp_path):
    path = tmp_path / "precious"
    path.write_text("precious")
    return path


def put(path, kind):
    os.mkfifo(path) if kind == "pipe" else path.mkdir()


def test_urls_are_not_written_where_a_link_leads_to(tmp_path, precious):
    (tmp_path / "broker.url").symlink_to(precious)
    write_url(tmp_path, "broker.url", "mqtt://here")
    assert precious.read_text() == "precious"
    assert (tmp_path / "broker.url").read_text() == "mqtt://here\n"


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_something_else_in_the_place_of_a_url_is_named(tmp_path, kind):
    """The coordinator waited at a pipe, deaf to SIGTERM."""
    put(tmp_path / "api.url", kind)
    with pytest.raises(StateError, match=r"api\.url cannot be written"):
        write_url(tmp_path, "api.url", "http://here")


@pytest.mark.parametrize("name", ["port", "mosquitto.conf"])
def test_the_files_of_a_broker_follow_no_link(tmp_path, precious, name):
    (tmp_path / "broker").mkdir()
    (tmp_path / "broker" / name).symlink_to(precious)
    with open_broker("mosquitto", state=tmp_path / "broker") as found:
        assert precious.read_text() == "precious"
        assert found.url.rpartition(":")[2] == (tmp_path / "broker" / "port").read_text()


@pytest.mark.parametrize("name", ["port", "mosquitto.conf", "mosquitto.log"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_something_else_in_the_place_of_a_brokers_file_is_named(tmp_path, name, kind):
    (tmp_path / "broker").mkdir()
    put(tmp_path / "broker" / name, kind)
    with (
        pytest.raises(StateError, match=f"{name} cannot be written"),
        open_broker("mosquitto", state=tmp_path / "broker"),
    ):
        pass


@pytest.fixture
def keys(tmp_path):
    folder = tmp_path / "keys"
    folder.mkdir()
    for name in mosquitto.FILES:
        (folder / name).write_text(name)
    return folder


def test_the_list_of_rights_is_not_written_where_a_link_of_the_broker_leads_to(tmp_path, keys, precious):
    """The broker's folder is its account's, and the coordinator may be root."""
    data = tmp_path / "persistence"
    mosquitto.copy(keys, data)
    assert (data / "acl").read_text() == "acl"
    (data / "acl").unlink()
    (data / "acl").symlink_to(precious)
    with pytest.raises(StateError, match="acl cannot be written"):
        mosquitto.copy(keys, data)
    assert precious.read_text() == "precious"


def test_a_pipe_among_a_brokers_keys_is_not_waited_for(tmp_path, keys):
    (keys / "acl").unlink()
    os.mkfifo(keys / "acl")
    with pytest.raises(ConfigError, match="acl cannot be read"):
        mosquitto.copy(keys, tmp_path / "persistence")


def _account():
    try:
        return pwd.getpwnam("mosquitto")
    except KeyError:
        return None


@pytest.mark.skipif(os.geteuid() != 0 or _account() is None, reason="root gives the broker's account its folder")
def test_the_brokers_account_is_not_given_what_its_links_lead_to():
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        precious, data = Path(name) / "precious", Path(name) / "data"
        precious.write_text("precious")
        data.mkdir()
        (data / "mosquitto.db").symlink_to(precious)
        assert broker._account(data, find_mosquitto())[0] == "mosquitto"
        assert data.stat().st_uid == _account().pw_uid
        assert precious.stat().st_uid == 0


@pytest.fixture
def stuck(tmp_path):
    """A folder of blobs with one that nobody can remove as a file, and one that they can."""
    blobs = FolderBlobs(tmp_path / "blobs")
    (tmp_path / "blobs" / key_of("a" * 64)).mkdir(parents=True)
    os.utime(tmp_path / "blobs" / key_of("a" * 64), (0, 0))
    return blobs, blobs.put(b"left over")


def test_a_blob_that_cannot_be_removed_leaves_the_others_to_be(stuck):
    blobs, digest = stuck
    with pytest.raises(StateError, match=r"aa/a+ cannot be removed .*remove it by hand"):
        blobs.gc(())
    assert not blobs.has(digest)


def test_a_coordinator_tells_of_a_blob_that_cannot_be_removed(tmp_path, stuck):
    """It ended."""
    blobs, told = stuck[0], []
    with Store(tmp_path / "coordinator.db") as store:
        asyncio.run(Tidying(store, blobs, lambda kind, **facts: told.append((kind, facts)), alone=True).work())
    ((kind, facts),) = told
    assert kind == "error"
    assert "cannot be removed" in facts["error"]


def test_uploads_that_cannot_be_removed_are_in_nobodys_way(tmp_path):
    for name in ("carl.1.part", "dora.2.part"):
        (tmp_path / name).mkdir()
    uploads = Uploads(tmp_path, 1 << 20)
    assert uploads.resume({}) == {}
    uploads.drop(("carl", "1"))
