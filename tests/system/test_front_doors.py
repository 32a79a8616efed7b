"""The programs from Python: devices, a coordinator and a Personalizer that joins, over a real broker."""

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
from keyed import data_of
from torch import nn

import talaria
import talaria_coordinator
import talaria_edge
import talaria_export
from talaria import tensors
from talaria.errors import ConfigError, DataError, ModelError
from talaria.federated.kit import open_kit
from talaria.federated.run import Member
from talaria.model.state import state_of
from talaria.programs.program import Program
from talaria.simulation.run import simulate
from talaria_coordinator.identity import membership
from talaria_edge.data import NpzSource

pytestmark = pytest.mark.usefixtures("one_thread")


class Serving:
    """A coordinator in a task of this event loop."""

    def __init__(self, one):
        self.events, self._ready = [], asyncio.get_running_loop().create_future()
        config = talaria_coordinator.load_config(one.config)
        self.task = asyncio.ensure_future(talaria_coordinator.serve(config, self._told))
        self.task.add_done_callback(lambda _: self._ready.cancelled() or self._ready.done() or self._ready.cancel())

    def _told(self, event):
        self.events.append(event)
        if event["event"] == "ready":
            self._ready.set_result(event["broker"])

    async def broker(self):
        return await self._ready


def device(one, url, name, data, **more):
    return talaria_edge.Device(url, fleet="watch", id=name, data=data, state=one.state_of(name), retry_s=0.3, **more)


def test_devices_and_a_coordinator_learn_a_run_to_its_end_and_to_the_byte(fleet, a_run):
    one = fleet(a_run("fedper"), devices=("anna", "bela"))
    known, told = NpzSource(one.folder / "bela.npz").load(), []

    async def story():
        serving = Serving(one)
        url = await serving.broker()
        async with (
            device(one, url, "anna", f"npz:{one.folder / 'anna.npz'}", report=told.append) as anna,
            device(one, url, "bela", lambda: (known.train, (known.val.x, known.val.y))) as bela,
        ):
            with pytest.raises(ModelError, match="run"):
                _ = anna.model
            found = await asyncio.gather(anna.run(), bela.run())
        await serving.task
        return found, (anna, bela)

    found, both = asyncio.run(asyncio.wait_for(story(), 120))
    assert [one_found["rounds"] for one_found in found] == [3, 3]
    assert "done" in {event["event"] for event in told}
    simulated = one.simulated()
    assert tensors.equal(one.shared(), simulated.shared)
    for name, program in zip(one.devices, both, strict=True):
        assert tensors.equal(one.private(name), simulated.private[name])
        assert tensors.equal(state_of(program.model), state_of(simulated.personal(simulated.members[name])))


def test_a_device_that_is_stopped_goes_on_where_it_was(fleet, a_run):
    one = fleet(a_run("fedper"), devices=("anna",))

    async def story():
        serving = Serving(one)
        url = await serving.broker()

        def stop_after_a_round(event):
            if event["event"] == "received":
                first.stop()

        def not_now(run):
            raise OSError(f"{run.algorithm}: not now")

        with pytest.raises(OSError, match="fedper: not now"):  # an app's own: it was taken for a failure of the hour
            await device(one, url, "anna", one.folder / "anna.npz", require=not_now).run()
        first = device(one, url, "anna", one.folder / "anna.npz", report=stop_after_a_round)
        assert await first.run() is None
        first.stop()  # again, where nothing runs: nothing happens
        async with device(one, url, "anna", one.folder / "anna.npz") as again:
            found = await again.run()
        await serving.task
        return found

    assert asyncio.run(asyncio.wait_for(story(), 120))["rounds"] == 3
    assert tensors.equal(one.shared(), one.simulated().shared)


@pytest.mark.parametrize("kind", [RuntimeError, asyncio.CancelledError])
def test_a_report_that_raises_ends_no_learning(fleet, a_run, caplog, kind):
    """What is raised of another task that was cancelled was taken for the end of this one."""
    one = fleet(a_run("fedper"), devices=("anna",))

    def broken(event):
        raise kind("the app's own fault")

    async def story():
        serving = Serving(one)
        async with device(one, await serving.broker(), "anna", one.folder / "anna.npz", report=broken) as anna:
            found = await anna.run()
        await serving.task
        return found

    assert asyncio.run(asyncio.wait_for(story(), 120))["rounds"] == 3
    assert "anna: report failed on the event 'connected'" in caplog.text


def test_leaving_the_block_ends_what_still_runs(tmp_path):
    async def story():
        told = asyncio.Event()
        async with talaria_edge.Device(
            "mqtt://127.0.0.1:9", fleet="watch", data=(np.zeros((9, 4)), np.arange(9) % 3), state=tmp_path,
            report=lambda event: told.set(),
        ) as one:  # fmt: skip
            running = asyncio.ensure_future(one.run())
            await told.wait()
        return await running

    assert asyncio.run(asyncio.wait_for(story(), 60)) is None


def test_a_device_is_left_in_one_event_loop_after_another(tmp_path):
    """As in a program that calls asyncio.run for each session: the second one ended in "bound to a different event
    loop"."""
    told = []
    one = talaria_edge.Device(
        "mqtt://127.0.0.1:9", fleet="watch", data=(np.zeros((9, 4)), np.arange(9) % 3), state=tmp_path,
        report=lambda event: told[-1].set(),
    )  # fmt: skip

    async def story():
        told.append(asyncio.Event())
        async with one:
            running = asyncio.ensure_future(one.run())
            await told[-1].wait()
        return await running

    for _ in range(2):
        assert asyncio.run(asyncio.wait_for(story(), 60)) is None


def test_another_thread_may_stop_a_device(tmp_path):
    """A loop in which nothing else happens hears of it too: debug mode refuses what another thread does to a task."""
    begun = threading.Event()
    given = {"fleet": "watch", "data": (np.zeros((9, 4)), np.arange(9) % 3), "state": tmp_path}
    one = talaria_edge.Device("mqtt://127.0.0.1:9", **given, report=lambda event: begun.set())
    found = []
    running = threading.Thread(
        target=lambda: found.append(asyncio.run(asyncio.wait_for(one.run(), 60), debug=True)), daemon=True
    )
    running.start()
    assert begun.wait(60)
    one.stop()
    running.join(60)
    assert found == [None]


class Coordinator(threading.Thread):
    """A coordinator beside a program without an event loop."""

    def __init__(self, one):
        super().__init__(daemon=True)
        self.url, self._ready = "", threading.Event()
        self._config = talaria_coordinator.load_config(one.config)
        self.start()
        assert self._ready.wait(60)

    def _told(self, event):
        if event["event"] == "ready":
            self.url = event["broker"]
            self._ready.set()

    def run(self):
        asyncio.run(talaria_coordinator.serve(self._config, self._told))


@pytest.mark.parametrize("given", ["spec", "module"])
def test_a_personalizer_joins_a_fleet_for_real(fleet, a_run, given):
    one = fleet(a_run("fedavg", rounds=6, epochs=4), devices=("anna",))
    data, spec = NpzSource(one.folder / "anna.npz").load(), one.run.spec
    model = spec if given == "spec" else talaria.model.zoo.build(spec)
    personal = talaria.Personalizer(model).fit(data.train, data.val, epochs=0)
    before, untrained = personal.model, personal.accuracy
    coordinator = Coordinator(one)
    assert personal.join(coordinator.url, "watch", device="anna", state=one.state_of("anna"), retry_s=0.3) is personal
    coordinator.join(60)
    simulated = simulate(one.run, {"anna": Member("anna", data.train, data.val, personal.plan)})
    assert tensors.equal(one.shared(), simulated.shared)
    learned = simulated.personal(simulated.members["anna"])
    assert personal.accuracy > untrained
    assert personal.model is not before
    assert tensors.equal(state_of(personal.model), state_of(learned))


def test_a_personalizer_brings_a_fleet_what_nobody_has_labelled(fleet, a_run):
    one = fleet(a_run("ffgg"), devices=("anna",))  # its heads are fitted on the calibrated body
    data = NpzSource(one.folder / "anna.npz").load()
    personal = talaria.Personalizer(one.run.spec).fit(data.train, data.val, epochs=0)
    with pytest.raises(DataError, match=r"unlabelled is float32 \(5, 6, 31\), but the model takes .*\(N, 6, 32\)"):
        personal.join("mqtt://127.0.0.1:1", "watch", unlabelled=np.zeros((5, 6, 31)))
    rest = np.random.default_rng(1).normal(size=(20, 6, 32)) + 3
    coordinator = Coordinator(one)
    personal.join(
        coordinator.url, "watch", device="anna", unlabelled=rest.tolist(), state=one.state_of("anna"), retry_s=0.3
    )
    coordinator.join(60)

    def simulated(unlabelled):
        member = Member("anna", data.train, data.val, personal.plan, unlabelled=unlabelled)
        return simulate(one.run, {"anna": member}).shared

    assert tensors.equal(one.shared(), simulated(rest.astype(np.float32)))
    assert not tensors.equal(one.shared(), simulated(None))


def test_a_personalizer_is_told_that_the_fleet_learns_another_model(fleet, a_run):
    one = fleet(a_run("fedavg", rounds=1), devices=("anna",))
    data = NpzSource(one.folder / "anna.npz").load()
    coordinator = Coordinator(one)

    def joined(model, head=None, **more):
        personal = talaria.Personalizer(model, head=head).fit(data.train, data.val, epochs=0)
        return personal.join(coordinator.url, "watch", device="anna", state=one.state_of("anna"), **more)

    with pytest.raises(ConfigError, match=r"classes=4, the fleet's is 3; make the Personalizer"):
        joined(talaria.ModelSpec("imu_cnn", (6, 32), 4))
    with pytest.raises(ConfigError, match=r"'1.weight' has shape \(8, 192\).* None in the fleet's 'imu_cnn'"):
        joined(nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Linear(8, 3)), head="2")
    with pytest.raises(ConfigError, match=r"statt='here' is unknown; choose of .*state"):
        joined(one.run.spec, statt="here")
    with pytest.raises(ConfigError, match=r"kit='watch.kit' gives a model without torch.*; leave kit out"):
        joined(one.run.spec, engine="onnx", kit="watch.kit")
    with pytest.raises(ConfigError, match="to_thread"):
        asyncio.run(in_a_loop(lambda: joined(one.run.spec)))
    joined(one.run.spec, retry_s=0.3)
    coordinator.join(60)
    assert one.shared()


async def in_a_loop(call):
    return call()


async def never_awaited(*_):
    pass


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"broker": "nowhere"}, "broker='nowhere' is no broker's URL"),
        ({"broker": "mqtts://broker.example"}, r"without \[identity\]"),
        ({"broker": 5}, "broker=5 must be text"),
        ({"id": "Anna"}, "id='Anna' must be 1 to 36"),
        ({"id": 3}, "id=3 must be text"),
        ({"keys": 3}, "keys=3 must be a path"),
        ({"bundle": 3}, "bundle=3 must be a path"),
        ({"kit": ["a"]}, "must be a path"),
        ({"allow": "mypkg"}, "allow='mypkg' must be a list"),
        ({"allow": ["my.pkg"]}, "name of a package"),
        ({"keys": "nowhere"}, "talaria edge join"),
        ({"plan": "nowhere.json"}, "talaria plan --json"),
        ({"labels": 3}, "labels=3 must be a list of words"),
        ({"guard": 3}, r"guard=3 must be Rules, such as Rules\(min_battery=0.3\)"),
        ({"colour": "red"}, "colour='red' is unknown; choose of engine, guard_every_s"),
        ({"retry_s": "soon"}, "retry_s='soon'"),
        ({"stay": "yes"}, "stay='yes'"),
        ({"insecure": "no"}, "insecure='no' must be true or false"),
        ({"report": 3}, "report=3 must be a function"),
        ({"require": never_awaited}, "require is an async function, and nobody would await it"),
        ({"data": never_awaited}, "data is an async function"),
        ({"profile": None}, "profile=None must be a table of what JSON has"),
        ({"profile": {"room": {1, 2}}}, "must be a table of what JSON has"),
        ({"username": 3}, "username=3 must be text"),
    ],
)
def test_what_a_device_cannot_take_is_said(change, said):
    given = {"broker": "mqtt://127.0.0.1", "fleet": "watch", "data": "smartwatch", **change}
    with pytest.raises(ConfigError, match=said):
        talaria_edge.Device(given.pop("broker"), **given)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: talaria.data.load(Path("a.npz")), "must be text: a dataset's name, or npz:FILE"),
        (lambda: talaria_coordinator.load_config(3), "settings: path=3 must be a path"),
        (lambda: talaria_edge.load_config(3), "settings: path=3 must be a path"),
        (lambda: talaria_edge.join(3, "code"), "join: folder=3 must be a path"),
        (lambda: talaria_edge.accept_answer("identity", 3), "join: answer=3 must be a path"),
        (lambda: NpzSource(3), "data: path=3 must be a path"),
        (lambda: talaria_edge.FolderSource(3), "data: path=3 must be a path"),
        (lambda: talaria_export.Predictor(3), "bundle: path=3 must be a path"),
        (lambda: talaria_export.verify_bundle(3), "bundle: path=3 must be a path"),
        (lambda: talaria_export.make_bundle(3, nn.Linear(4, 2), example=np.zeros((1, 4))), "bundle: path=3 must be a"),
        (lambda: open_kit(3), "kit: path=3 must be a path"),
        (lambda: Program.open(3), "program: path=3 must be a path"),
    ],
)
def test_what_is_no_path_is_said(call, said):
    with pytest.raises(ConfigError, match=said):
        call()


@pytest.mark.parametrize("given", [3, "fleet.toml"])
def test_what_is_no_fleet_to_serve_is_said(given):
    with pytest.raises(ConfigError, match=rf"serve: config={given!r} must be a FleetConfig; load_config reads one"):
        asyncio.run(talaria_coordinator.serve(given))


def test_samples_are_taken_in_every_form():
    x, y = np.random.default_rng(0).standard_normal((40, 4)), np.arange(40) % 2
    samples = talaria.Samples.of(x, y)
    given = talaria_edge.DeviceData(samples, samples)

    def sizes(data):
        source = talaria_edge.Device("mqtt://127.0.0.1", fleet="watch", data=data).config.source
        found = source.load()
        return len(found.train), len(found.val), None if found.test is None else len(found.test)

    assert sizes((x, y)) == sizes(samples) == sizes(lambda: [x, y]) == (28, 4, 8)
    assert sizes((samples, samples)) == sizes(given) == sizes(lambda: ((x, y), samples)) == (40, 40, None)
    assert sizes([samples, (x, y), samples]) == (40, 40, 40)
    for wrong in (5, (x,), lambda: None, (x[:1], y[:1])):
        with pytest.raises(DataError, match="data:"):
            sizes(wrong)


def test_what_is_no_device_data_is_said():
    x, y = np.zeros((40, 4)), np.arange(40) % 2
    with pytest.raises(DataError, match=r"data: train is a tuple; give Samples, as of Samples.of\(x, y\)"):
        talaria_edge.DeviceData((x, y), (x, y))
    with pytest.raises(DataError, match="y: is no array"):
        talaria_edge.Device("mqtt://127.0.0.1", fleet="watch", data=[[x, y], [x, y]])


def test_a_device_stays_in_its_folders_when_its_program_goes_to_another(tmp_path, monkeypatch):
    """As one that becomes a service does: what was relative was looked for there, and the private state begun anew."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    monkeypatch.chdir(here)
    source = talaria_edge.FolderSource("windows", most=500)
    one = talaria_edge.Device(
        "mqtt://127.0.0.1:9", fleet="watch", data=source, labels=["rest", "walk"], bundle="me.talaria", kit="a.kit",
        engine="onnx", report=lambda event: one.stop(),
    )  # fmt: skip
    monkeypatch.chdir(there)
    for label in ("rest", np.str_("walk"), np.int64(1)):
        one.record(np.zeros((6, 32), np.float32), label)
    source.record(np.zeros((6, 32), np.float32), 0)  # the app's own object is of the same folder
    assert asyncio.run(asyncio.wait_for(one.run(), 60)) is None
    assert (here / "state" / "device" / "lock").is_file()
    found = one.config.source.load()
    assert sorted([*found.train.y.tolist(), *found.val.y.tolist()]) == [0, 0, 1, 1]
    assert (one.config.bundle, one.config.kit) == (here / "me.talaria", here / "a.kit")
    assert not list(there.iterdir())


def test_a_device_joins_with_keys_and_is_named_by_them(keyed, monkeypatch):
    one = keyed(rounds=1, members=("anna",))
    monkeypatch.chdir(one.folder)
    request = talaria_edge.join("identity", membership.enroll(one.keys, "anna").text())
    one.folder.joinpath("anna.answer").write_bytes(membership.admit(one.keys, request.read_bytes()).encode())
    assert talaria_edge.accept_answer("identity", "anna.answer").fleet == "watch"

    async def story():
        serving = asyncio.ensure_future(one.serve())
        async with talaria_edge.Device(one.url, fleet="watch", data=data_of(0), retry_s=0.2) as device:
            assert (device.config.device, device.config.state) == ("anna", one.folder / "state" / "anna")
            found = await device.run()
        await serving
        return found

    assert asyncio.run(asyncio.wait_for(story(), 120))["rounds"] == 1
    assert one.learned_what_simulation_learns()
