"""Why a device declines is told the fleet in words that quote nothing of what it learns from."""

import numpy as np
import pytest

from talaria_edge.data import NamedSource, NpzSource


def unreadable(*_):
    raise ValueError("could not convert string to float: 'epilepsy'")


def labelled(folder):
    np.savez(folder / "own.npz", x=np.zeros((4, 6, 32), np.float32), y=np.array(["walk", "epilepsy"] * 2))
    return NpzSource(folder / "own.npz", "anna", ("walk",)).load()


def named(_):
    return NamedSource("tests.edge_client.test_private_words:unreadable", "anna", allow=("tests",)).load()


class Refusing(dict):
    """Samples by device; of anna's, ``load`` says why there are none."""

    def __getitem__(self, name):
        return self.load() if name == "anna" else super().__getitem__(name)


@pytest.mark.parametrize(
    ("load", "heard"), [(unreadable, "ValueError"), (labelled, "QuotesSamplesError"), (named, "ValueError")]
)
def test_what_its_samples_hold_stays_on_a_device_that_cannot_learn_from_them(
    house, run_all, a_run, tmp_path, load, heard
):
    one = house(a_run(), quorum=0.5)
    one.data = Refusing(one.data)
    one.data.load = lambda: load(tmp_path)
    run_all(one.serve(), one.agent("anna"), one.agent("bela"))
    (declined,) = (told for told in one.of("progress", "anna") if told["phase"] == "declined")
    assert declined["reason"] == f"{heard}, whose words stay on the device: see its own journal"
    assert "epilepsy" in one.of("error", "anna")[0]["error"]
    assert one.store.attempts.of("watch")[0].counted == ((1, "bela"),)
