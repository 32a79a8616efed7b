"""Chunks: any order, any number of times, and after a restart."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from talaria.bitmaps import bits_of, indices_of
from talaria.errors import ConfigError, StateError, TooLarge, WireError
from talaria.wire.chunks import Assemblies, FileAssembly, TornError, describe
from talaria.wire.frames import MAX_PAYLOAD

DATA = bytes(range(256)) * 11


def pieces(data, chunk):
    return [(index, data[offset : offset + chunk]) for index, offset in enumerate(range(0, len(data), chunk))]


@given(data=st.binary(min_size=1, max_size=400), chunk=st.integers(1, 90), random=st.randoms())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_chunks_in_any_order_and_doubled_give_the_bytes_again(tmp_path, data, chunk, random):
    cut = describe(data, chunk)
    parts = pieces(data, chunk) * 2
    random.shuffle(parts)
    (tmp_path / "x").unlink(missing_ok=True)
    with FileAssembly(tmp_path / "x", cut, limit=len(data)) as whole:
        for i, part in parts:
            whole.put(i, part)
        assert whole.found() == set(range(cut.count))
        assert whole.joined() == data
        whole.finish()
    assert (tmp_path / "x").read_bytes() == data


def test_a_wrong_chunk_is_refused_and_changes_nothing(tmp_path):
    with FileAssembly(tmp_path / "x", describe(DATA, 1000), limit=10_000) as whole:
        for index, data in (
            (0, DATA[:999]),
            (0, b"x" * 1000),
            (1, DATA[:1000]),
            (3, b""),
            (-1, b""),
            (2, DATA[2000:] + b"x"),
        ):
            with pytest.raises(WireError):
                whole.put(index, data)
        assert whole.found() == set()
        with pytest.raises(WireError, match="whole sha256"):
            whole.finish()
    assert (tmp_path / "x").read_bytes() == bytes(len(DATA))


@pytest.mark.parametrize("index", [-1, 3, 4])
def test_no_chunk_before_the_first_or_after_the_last_has_a_place(index):
    cut = describe(DATA, 1000)
    assert [cut.place(i) for i in range(cut.count)] == [(0, 1000), (1000, 1000), (2000, 816)]
    with pytest.raises(WireError, match="this transfer has 3 chunks"):
        cut.place(index)


def test_a_wrong_whole_is_noticed(tmp_path):
    cut = describe(DATA, 1000)
    lying = type(cut)(cut.size, cut.chunk, bytes(32), cut.hashes)
    with FileAssembly(tmp_path / "x", lying, limit=10_000) as whole:
        for index, part in pieces(DATA, 1000):
            whole.put(index, part)
        for check in (whole.finish, whole.joined):
            with pytest.raises(WireError, match="whole sha256") as caught:
                check()
            assert not isinstance(caught.value, TornError)  # it is not the disk's fault


def test_bounds_hold_before_anything_is_allocated(tmp_path):
    cut = describe(DATA, 1000)
    huge = type(cut)(2**40, cut.chunk, cut.sha256, cut.hashes)
    with pytest.raises(TooLarge):
        FileAssembly(tmp_path / "x", huge, limit=2**20)
    assert not (tmp_path / "x").exists()
    with pytest.raises(TooLarge, match="3600"):
        describe(bytes(3601), 1)
    with pytest.raises(ConfigError):
        describe(b"", 10)
    with pytest.raises(ConfigError):
        describe(b"x", MAX_PAYLOAD + 1)


def test_a_file_picks_up_after_a_restart_and_believes_only_what_it_hashes(tmp_path):
    cut = describe(DATA, 500)
    path = tmp_path / "folder" / "body.part"
    with FileAssembly(path, cut, limit=10_000) as first:
        assert first.found() == set()
        for index, part in pieces(DATA, 500)[1:4]:
            first.put(index, part)
        first.put(2, DATA[1000:1500])
    with path.open("r+b") as file:  # a torn write before the power went
        file.seek(1700)
        file.write(b"torn")
    with FileAssembly(path, cut, limit=10_000) as second:
        assert second.found() == {1, 2}
        with pytest.raises(WireError, match="whole sha256"):
            second.finish()
        with pytest.raises(TornError) as torn:
            second.joined()
        assert torn.value.intact == {1, 2}
        for index, part in pieces(DATA, 500):
            second.put(index, part)
        assert second.found() == set(range(cut.count))
        second.finish()
    assert path.read_bytes() == DATA


def test_of_a_file_above_the_limit_nothing_is_found_as_where_that_is_lower_by_now(tmp_path):
    """A coordinator that was given a smaller `max_update`, and a device with a smaller `max_model`, did not start."""
    cut = describe(DATA, 500)
    for limit, expected in ((len(DATA), {3}), (len(DATA) - 1, set())):
        files = Assemblies(lambda key: tmp_path / key, limit)
        if expected:
            files.part("x", cut).put(3, DATA[1500:2000])
        assert files.found("x", cut) == expected
        files.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot open"):
        FileAssembly(tmp_path / "file" / "x", describe(DATA, 500), limit=10_000)


def test_a_disk_that_takes_no_more_says_so(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with FileAssembly(tmp_path / "x", describe(DATA, 500), limit=10_000) as whole:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
            with pytest.raises(StateError, match="free space"):
                whole.put(3, DATA[1500:2000])
            files = len(list(Path("/proc/self/fd").iterdir()))
            with pytest.raises(StateError, match="free space"):
                FileAssembly(tmp_path / "y", describe(DATA, 500), limit=10_000)
            assert len(list(Path("/proc/self/fd").iterdir())) == files
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        whole.put(3, DATA[1500:2000])
        assert whole.found() == {3}


@given(st.integers(1, 200), st.data())
def test_a_bitmap_comes_back(count, data):
    chosen = data.draw(st.sets(st.integers(0, count - 1)))
    bitmap = bits_of(chosen, count)
    assert len(bitmap) == -(-count // 8)
    assert indices_of(bitmap, count) == chosen


@pytest.mark.parametrize(("bitmap", "count"), [(b"", 1), (b"\x00\x00", 8), (b"\x02", 1), (b"\xff\xff", 15)])
def test_a_bitmap_of_another_length_is_refused(bitmap, count):
    with pytest.raises(WireError):
        indices_of(bitmap, count)
