"""Light devices with real bytes on a real coordinator, in small; and a global model over a link that is cut."""

import json

import pytest


@pytest.mark.timeout(600)
def test_light_devices_lose_nothing(command, tmp_path):
    status, out, errors = command(
        "bench", "load", "--devices", 12, "--rounds", 3, "--ask", 4, "--model-mib", 0.3, "--processes", 2,
        "--retry-s", 3, "--plot", tmp_path / "found.svg", "--json", seconds=580,
    )  # fmt: skip
    found = json.loads(out)
    assert status == 0, (found["wrong"], errors[-2000:])
    drawn = (tmp_path / "found.svg").read_text()
    assert all(word in drawn for word in ("12 devices, 4 asked", "coordinator", "broker", "plain: socket receive"))
    assert found["counted"] == found["receipts"] == 12
    assert found["outcomes"] == {"stored": 12}
    assert (found["rounds"], found["lost"], found["twice"], found["links_lost"]) == (3, 0, 0, 0)
    assert found["up_mib"] >= 12 * 0.29
    assert found["down_mib"] >= 24 * 0.29, (
        "each update began with a global model, and every device left with the last one"
    )
    assert 12 * 0.29 <= found["last_models_mib"] <= 12 * 0.31
    assert 0.97 <= found["down_of_asked"] <= 2, "3 where everybody downloads each model"
    assert found["coordinator_ms_per_mib"] > 0


@pytest.mark.timeout(600)
def test_a_body_survives_cuts_with_two_windows_each(command):
    status, out, errors = command("bench", "load", "--model-mib", 12, "--cuts", 3, "--json", seconds=580)
    found = json.loads(out)
    assert status == 0, (found["wrong"], errors[-2000:])
    assert found["cuts"] >= 3
    assert found["chunks"] == 103
    assert found["chunks_sent_again"] <= found["allowed_again"] == 48
    assert found["receiver_grew_mib"] <= 12 + 32


@pytest.mark.timeout(600)
def test_light_devices_add_up_what_nobody_sees_with_some_neighbours_each(command):
    status, out, errors = command(
        "bench", "load", "--secure", "--devices", 9, "--rounds", 2, "--ask", 9, "--degree", 4, "--model-mib", 0.2,
        "--processes", 2, "--retry-s", 3, "--json", seconds=580,
    )  # fmt: skip
    found = json.loads(out)
    assert status == 0, (found["wrong"], errors[-2000:])
    assert found["secure"] == {"degree": 4, "leaving": 0}
    assert found["counted"] == found["receipts"] == 18
    assert (found["rounds"], found["lost"], found["twice"]) == (2, 0, 0)
