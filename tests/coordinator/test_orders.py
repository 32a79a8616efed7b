"""Orders from a shell to a fleet that nobody serves, or that ends meanwhile: what does not fit says what does."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from talaria.cli.main import main
from talaria.errors import StateError
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria_coordinator.cli.orders import given
from talaria_coordinator.config.fleet import load_config
from talaria_coordinator.fleet import order_box
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.server.open_state import held
from talaria_coordinator.storage.devices import Sight
from talaria_coordinator.storage.store import Store

RUN = Run(spec=ModelSpec("mlp", (4,), 3), algorithm="fedavg", rounds=2)
CONFIG = """
[fleet]
name = "watch"
devices = 2
state = "."
[run]
algorithm = "fedavg"
rounds = 2
[run.spec]
name = "mlp"
input_shape = [4]
classes = 3
"""


@pytest.fixture
def order(tmp_path, monkeypatch, capsys):
    """Gives an order to a fleet that has a status by now; what is said of it."""
    path = tmp_path / "fleet.toml"
    path.write_text(CONFIG)
    with Store(tmp_path / "coordinator.db") as store:
        store.fleets.enter("watch", RUN.to_json(), "", "")
        store.devices.see("watch", Sight("anna", 1, {}))

    def give(status, *words):
        with Store(tmp_path / "coordinator.db") as store:
            store.fleets.set_status("watch", status)
        monkeypatch.setattr("sys.argv", ["talaria", "coordinator", words[0], str(path), *words[1:]])
        with pytest.raises(SystemExit) as ended:
            main()
        out = capsys.readouterr()
        return ended.value.code, out.out + out.err

    return give


@pytest.mark.parametrize("verb", ["pause", "resume", "abort"])
def test_a_run_that_is_over_is_told_what_goes_on_from_it(order, verb):
    status, said = order("done", verb)
    assert status == 1
    assert f"'watch' is done, it cannot {verb}: " in said
    assert "`extend`" in said
    assert "`next`" in said


def test_what_a_refusal_tells_to_do_first_is_not_refused_itself(order):
    for words in (("next", "--rounds", "1"), ("extend", "--rounds", "1"), ("pause",)):
        status, said = order("aborted", *words)
        assert status == 1
        assert "`resume`" in said
    for verb in ("resume", "pause"):
        assert order("aborted" if verb == "resume" else "running", verb)[0] in (0, None)


@pytest.mark.parametrize("verb", ["retire", "readmit"])
def test_a_device_by_a_wrong_name_is_answered_with_where_names_are(order, verb):
    assert (
        "device 'ana' is not known to the fleet; `talaria coordinator status` lists" in order("running", verb, "ana")[1]
    )


def test_what_was_done_is_told_by_the_device_that_it_is_about(order):
    assert order("running", "retire", "anna")[1] == "fleet watch: retire anna; the fleet is running.\n"
    said = order("running", "readmit", "anna", "--json")[1]
    assert json.loads(said) == {"fleet": "watch", "order": "readmit", "device": "anna", "status": "running"}
    assert order("running", "pause")[1] == "fleet watch: pause; the fleet is paused.\n"


@pytest.mark.parametrize("verb", ["quarantine", "release"])
def test_who_is_shut_out_is_said_to_a_coordinator_that_runs(order, verb):
    status, said = order("running", verb, "anna")
    assert status == 1
    assert f"{verb}: no coordinator serves fleet 'watch' now" in said


def test_an_order_that_its_operator_gives_up_is_never_carried_out(tmp_path, monkeypatch):
    """A coordinator that hangs would find it when it goes on, and extend the run once more."""

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(order_box.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        order_box.put(tmp_path, Order("extend", rounds=5), lambda: False)
    assert list(order_box.take(tmp_path)) == []
    assert list((tmp_path / "orders").iterdir()) == []


@pytest.mark.parametrize("took", [False, True])
def test_who_waits_too_long_for_an_answer_is_told_whether_the_order_was_taken(tmp_path, took):
    """Told that it was not, an operator gave it again, and the run was extended twice."""
    taken = []

    def looked():
        taken.extend(order_box.take(tmp_path) if took else ())
        return False

    said = "took the order and did not answer" if took else "did not take the order .* try again"
    with pytest.raises(StateError, match=said):
        order_box.put(tmp_path, Order("extend", rounds=5), looked, wait_s=0.2)
    assert [one.rounds for one in taken] == [5] * took
    assert list(order_box.take(tmp_path)) == []


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("took", [False, True])
def test_a_coordinator_that_ends_over_an_order_is_not_waited_for(tmp_path, took):
    """Killed before it took the order, it is carried out here; killed over it, nobody knows, and that is said: to give
    it again could extend the run twice."""
    config = load_config(tmp_path / "fleet.toml")
    with ThreadPoolExecutor(1) as shell:
        with held(config.state):  # as the coordinator that runs does
            answer = shell.submit(given, config, Order("extend", rounds=5))
            while not list(tmp_path.glob("orders/*.json")):
                time.sleep(0.01)
            taken = list(order_box.take(tmp_path)) if took else []
        if took:
            assert [one.rounds for one in taken] == [5]
            with pytest.raises(StateError, match="ended while it carried the order out; `talaria coordinator status`"):
                answer.result(30)
        else:
            assert answer.result(30) == "running"
    with Store(tmp_path / "coordinator.db") as store:
        assert Run.from_json(store.fleets.get("watch").run).rounds == (2 if took else 7)
    assert list((tmp_path / "orders").iterdir()) == []
