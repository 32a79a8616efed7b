import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from talaria.errors import ConfigError, StateError
from talaria_edge.deployment import gate
from talaria_edge.deployment.gate import Deployed, decide
from talaria_edge.storage import tensor_files
from talaria_edge.storage.state import DeviceStore
from talaria_export.bundle.bundle import save

share = st.floats(0, 1)


@given(new=share, old=share, samples=st.integers(1, 10_000), margin=st.floats(0, 0.5))
def test_only_what_is_better_by_more_than_the_margin_is_deployed(
    new: float, old: float, samples: int, margin: float
) -> None:
    decision = decide(new, old, samples, margin)
    assert decision.deploy == (new > old + margin)
    assert decision.worse == (new < old)
    assert str(samples) in decision.reason


def test_the_first_model_is_deployed_and_nothing_is_replaced_unmeasured() -> None:
    assert decide(0.1, None, 0)
    assert not decide(1.0, 0.0, 0)
    assert decide(1.0, 0.0, 0).worse is None
    assert not decide(0.5, 0.5, 10)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -0.1, 1.1])
def test_a_figure_that_is_no_accuracy_is_never_deployed(broken: float) -> None:
    assert not decide(broken, 0.1, 10)
    assert not decide(broken, None, 10)
    assert decide(broken, None, 10).worse


def test_a_margin_that_means_nothing_is_refused() -> None:
    for margin in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError, match="margin"):
            decide(0.5, 0.4, 10, margin)


def test_deploy_then_rollback_gives_the_first_bundle_again(tmp_path: Path) -> None:
    state, bundle = tmp_path / "state", tmp_path / "out" / "me.talaria"
    state.mkdir()
    gate.deploy(state, b"one", bundle)
    gate.deploy(state, b"two", bundle)
    assert bundle.read_bytes() == b"two"
    assert gate.rollback(state, bundle).previous is None
    assert bundle.read_bytes() == b"one"
    with pytest.raises(StateError, match="no earlier bundle"):
        gate.rollback(state, bundle)
    assert bundle.read_bytes() == b"one"


def test_deploying_the_same_bundle_twice_keeps_the_way_back(tmp_path: Path) -> None:
    bundle = tmp_path / "me.talaria"
    for data in (b"one", b"two", b"two"):
        gate.deploy(tmp_path, data, bundle)
    gate.rollback(tmp_path, bundle)
    assert bundle.read_bytes() == b"one"


def test_no_more_than_two_bundles_are_kept(tmp_path: Path) -> None:
    for number in range(4):
        gate.deploy(tmp_path, bytes([number]), tmp_path / "me.talaria")
    assert len(list((tmp_path / "bundles").iterdir())) == 2


@pytest.mark.parametrize("cut", range(4))
def test_a_cut_while_deploying_leaves_a_whole_bundle_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    bundle = tmp_path / "me.talaria"
    gate.deploy(tmp_path, b"old", bundle)
    writes = 0
    real = tensor_files.write

    def failing(path: Path, data: bytes) -> None:
        nonlocal writes
        if writes == cut:
            raise StateError("power cut")
        writes += 1
        real(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(tensor_files, "write", failing)
        try:
            gate.deploy(tmp_path, b"new", bundle)
        except StateError:
            assert cut < 3
    assert bundle.read_bytes() in (b"old", b"new")
    gate.settle(tmp_path, bundle)
    assert bundle.read_bytes() == (b"old" if cut < 2 else b"new")


def test_what_a_cut_left_of_bundles_is_gone_after_the_next_start(tmp_path: Path, monkeypatch) -> None:
    """Each kill or power cut that met a bundle being written left it on flash for ever."""
    state, bundle = tmp_path / "state", tmp_path / "me.talaria"
    with DeviceStore(state, "watch", "anna") as store:
        gate.deploy(state, b"first", bundle)

        def cut(_: int) -> None:
            raise KeyboardInterrupt  # what nothing on the way catches

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", cut)
            for work in (lambda: gate.deploy(state, b"second", bundle), lambda: save(state / "candidate.talaria", b"")):
                with pytest.raises(KeyboardInterrupt):
                    work()
        assert len([*state.rglob(".*.part")]) == 2
        gate.settle(state, bundle)  # as an agent begins
        store.clear_parts()
    assert [*state.rglob(".*.part")] == []
    assert gate.in_force(state) == bundle.read_bytes() == b"first"


def test_a_bundle_that_someone_replaced_is_put_back(tmp_path: Path) -> None:
    bundle = tmp_path / "me.talaria"
    gate.deploy(tmp_path, b"ours", bundle)
    bundle.write_bytes(b"theirs")
    gate.settle(tmp_path, bundle)
    assert bundle.read_bytes() == b"ours"


def test_a_folder_where_the_bundle_goes_is_told_at_each_start(tmp_path: Path) -> None:
    bundle = tmp_path / "me.talaria"
    bundle.mkdir()
    with pytest.raises(StateError, match=r"me\.talaria: Is a directory; name a file"):
        gate.deploy(tmp_path, b"one", bundle)
    with pytest.raises(StateError, match=r"me\.talaria: Is a directory; name a file"):
        gate.settle(tmp_path, bundle)
    bundle.rmdir()
    gate.settle(tmp_path, bundle)
    assert bundle.read_bytes() == b"one"


def test_damage_is_told_with_the_file(tmp_path: Path) -> None:
    bundle = tmp_path / "me.talaria"
    gate.deploy(tmp_path, b"one", bundle)
    gate.deploy(tmp_path, b"two", bundle)
    previous = gate.read(tmp_path).previous
    (tmp_path / "bundles" / f"{previous}.talaria").write_bytes(b"rot")
    with pytest.raises(StateError, match="not what was deployed"):
        gate.rollback(tmp_path, bundle)
    assert bundle.read_bytes() == b"two"
    assert gate.read(tmp_path).previous == previous


def test_the_weights_that_were_rolled_back_are_remembered(tmp_path: Path) -> None:
    bundle = tmp_path / "me.talaria"
    gate.deploy(tmp_path, b"one", bundle, "1" * 32)
    gate.deploy(tmp_path, b"two", bundle, "2" * 32)
    assert gate.read(tmp_path).refused is None
    assert gate.rollback(tmp_path, bundle).refused == "2" * 32
    assert gate.deploy(tmp_path, b"three", bundle, "3" * 32).refused == "2" * 32


def test_a_bundle_that_nobody_entered_counts_as_in_force(tmp_path: Path) -> None:
    bundle = tmp_path / "me.talaria"
    assert gate.adopt(tmp_path, bundle) == Deployed()
    assert gate.in_force(tmp_path) is None
    bundle.write_bytes(b"by hand")
    gate.adopt(tmp_path, bundle)
    assert gate.in_force(tmp_path) == b"by hand"
    bundle.write_bytes(b"again by hand")
    gate.adopt(tmp_path, bundle)
    assert gate.in_force(tmp_path) == b"by hand"


def test_a_rollback_waits_for_a_deployment_that_is_under_way(tmp_path: Path) -> None:
    bundle = tmp_path / "me.talaria"
    for data in (b"one", b"two"):
        gate.deploy(tmp_path, data, bundle)
    with (tmp_path / "deployed.lock").open("wb") as lock, ThreadPoolExecutor(1) as other:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = other.submit(gate.rollback, tmp_path, bundle)
        with pytest.raises(TimeoutError):
            done.result(0.2)
        assert bundle.read_bytes() == b"two"
        fcntl.flock(lock, fcntl.LOCK_UN)
        done.result(10)
    assert bundle.read_bytes() == b"one"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"current": 3, "previous": null}', '{"current": "../../x", "previous": null}']
)
def test_a_damaged_ledger_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / gate.LEDGER).write_text(text)
    with pytest.raises(StateError, match=r"deployed\.json"):
        gate.read(tmp_path)


def test_a_new_device_has_nothing_deployed(tmp_path: Path) -> None:
    assert gate.read(tmp_path) == Deployed()
    gate.settle(tmp_path, tmp_path / "me.talaria")
    assert not (tmp_path / "me.talaria").exists()
    assert set(vars(Deployed()).values()) == {None}


def test_a_bundle_waits_until_it_is_installed(tmp_path: Path) -> None:
    bundle = tmp_path / "model.talaria"
    with pytest.raises(StateError, match="no bundle waits"):
        gate.install(tmp_path, bundle)
    gate.deploy(tmp_path, b"one", bundle, "1" * 32)
    held = gate.hold(tmp_path, b"two", "2" * 32, "better")
    assert bundle.read_bytes() == b"one"
    assert gate.waiting(tmp_path) == held
    assert gate.install(tmp_path, bundle).model == "2" * 32
    assert bundle.read_bytes() == b"two"
    assert gate.waiting(tmp_path) is None
    assert gate.rollback(tmp_path, bundle).refused == "2" * 32
    assert bundle.read_bytes() == b"one"


def test_what_waits_is_gone_once_a_newer_one_was_deployed(tmp_path: Path) -> None:
    """Where ``ask`` was taken back: it waited to replace what runs no more, and may do worse than what runs now."""
    bundle = tmp_path / "model.talaria"
    gate.deploy(tmp_path, b"one", bundle, "1" * 32)
    gate.hold(tmp_path, b"two", "2" * 32, "better")
    gate.deploy(tmp_path, b"three", bundle, "3" * 32)
    assert gate.waiting(tmp_path) is None
    with pytest.raises(StateError, match="no bundle waits"):
        gate.install(tmp_path, bundle)
    assert bundle.read_bytes() == b"three"


@pytest.mark.parametrize(
    "ledger",
    [
        b"",
        b"\xff",
        b"[" * 5000,
        b'{"digest": 3, "model": 4, "reason": 5}',
        b'{"digest": "../../x", "model": "", "reason": ""}',
    ],
)
def test_what_waits_and_is_damaged_is_never_installed(tmp_path: Path, ledger: bytes) -> None:
    bundle = tmp_path / "model.talaria"
    gate.deploy(tmp_path, b"one", bundle)
    gate.hold(tmp_path, b"two", "2" * 32, "better")
    (tmp_path / "waiting.talaria").write_bytes(b"three")
    with pytest.raises(StateError, match="is not what was kept"):
        gate.install(tmp_path, bundle)
    (tmp_path / gate.WAITING).write_bytes(ledger)
    with pytest.raises(StateError, match="no bundle waits"):
        gate.install(tmp_path, bundle)
    assert bundle.read_bytes() == b"one"
