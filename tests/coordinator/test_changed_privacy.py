"""[privacy] of fleet.toml, changed while a run goes on: what it has cost stays counted, or the start is refused."""

from dataclasses import replace

import pytest

from talaria.errors import ConfigError, StateError
from talaria.federated import run_model
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.privacy.accounting import epsilon, ledger_in
from talaria.privacy.rule import Privacy
from talaria.protocol.actions import Counted
from talaria.protocol.coordinator.state import Attempt, CoordinatorState
from talaria.types import Update
from talaria.wire import codec
from talaria.wire.codec import encode_update
from talaria_coordinator.config.fleet import FleetConfig, load_config
from talaria_coordinator.config.privacy import PrivacyConfig
from talaria_coordinator.fleet.aggregation import Learning, NothingLeft
from talaria_coordinator.fleet.cohort import quorum
from talaria_coordinator.fleet.life import follow, learning_of
from talaria_coordinator.fleet.operator_commands import Order
from talaria_coordinator.fleet.scheduler import Conductor
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.records import Fleet
from talaria_coordinator.storage.store import Store

RUN = Run(spec=ModelSpec("imu_cnn", (6, 32), 3), algorithm="fedavg", rounds=3)
MEMBERS = ("anna", "bela", "carl")
NOISY = Privacy(clip=1.0, noise=1.0, epsilon=50.0)


class Desk:
    """A fleet that has learned a round with ``privacy``."""

    def __init__(self, folder, privacy):
        self.store, self.blobs, self.folder = Store(folder / "coordinator.db"), FolderBlobs(folder / "blobs"), folder
        learning = self.learning(privacy)
        self.store.fleets.enter("watch", RUN.to_json(), *learning.first())
        self.store.fleets.set_roster("watch", MEMBERS)
        ledger = ledger_in(learning._server(self.fleet))
        state = {} if ledger is None else ledger.after(MEMBERS).as_tensors()
        server = self.blobs.put(codec.encode_tensors(state))
        self.store.attempts.open("watch", 1, MEMBERS, self.fleet.model_digest)
        facts = {"server": server, "spent": learning.spent(server), "model_digest": self.fleet.model_digest}
        self.store.attempts.commit("watch", 1, epoch=self.fleet.epoch, counted=[], **facts)

    @property
    def fleet(self):
        return self.store.fleets.get("watch")

    def config(self, privacy):
        own = None if privacy is None else PrivacyConfig(rule=privacy)
        return FleetConfig(name="watch", run=RUN, state=self.folder, members=MEMBERS, privacy=own)

    def learning(self, privacy) -> Learning:
        return learning_of(self.config(privacy), RUN, self.blobs)


@pytest.fixture
def desk(tmp_path):
    made = []

    def make(privacy):
        made.append(Desk(tmp_path, privacy))
        return made[-1]

    yield make
    for one in made:
        one.store.close()


@pytest.mark.parametrize(("noise", "often"), [(2.0, 4), (0.5, 1), (1.0, 1), (1.2, 2)])
def test_rounds_go_on_with_another_noise_and_cost_no_less_than_they_did(desk, noise, often):
    """A round with noise 1 costs as much as four with noise 2: ``1 / noise^2`` adds up."""
    learned = desk(NOISY)
    now = learned.learning(replace(NOISY, noise=noise))
    now.require(learned.fleet)
    ledger = ledger_in(now._server(learned.fleet))
    assert (ledger.noise, dict(ledger.rounds)) == (noise, dict.fromkeys(MEMBERS, often))
    assert ledger.epsilon >= epsilon(1.0, 1, 1e-5) * (1 - 1e-9)
    if noise == 2.0:  # and the budget is held against both
        after = learned.learning(replace(NOISY, noise=noise, epsilon=epsilon(2.0, 5, 1e-5) * 0.999))
        assert "it is not opened" in after.unaffordable(learned.fleet, MEMBERS)


def test_noise_is_not_begun_nor_left_out_within_a_run(desk):
    """Else no noise would be on the sums, and nothing of the budget be counted, while the fleet says otherwise."""
    learned = desk(None)
    with pytest.raises(ConfigError, match=r"noise=1, and this run began without.*coordinator next"):
        learned.learning(NOISY).require(learned.fleet)
    learned.learning(Privacy(clip=1.0)).require(learned.fleet)
    learned.store.fleets.set_status("watch", "paused")
    follow(Order("next", rounds=3), learned.fleet, learned.config(NOISY), learned.store, learned.blobs)
    with_noise = learned.learning(NOISY)
    with_noise.require(learned.fleet)
    assert ledger_in(with_noise._server(learned.fleet)).noise == 1.0


@pytest.mark.parametrize("without", [None, Privacy(clip=1.0)])
def test_noise_that_is_counted_is_not_left_out_within_a_run(desk, without):
    learned = desk(NOISY)
    with pytest.raises(ConfigError, match=r"no noise is given, and this run counts .* noise=1:.*back as it was"):
        learned.learning(without).require(learned.fleet)
    learned.learning(without).require(replace(learned.fleet, round=RUN.rounds))  # it is served, and learns no more
    learned.store.fleets.set_status("watch", "paused")
    follow(Order("next", rounds=3), learned.fleet, learned.config(without), learned.store, learned.blobs)
    learned.learning(without).require(learned.fleet)


def test_a_length_that_moved_is_let_go_of_where_it_is_to_stay(desk):
    moving = replace(NOISY, quantile=0.5)
    learned = desk(moving)
    state = learned.learning(moving).first()[1]
    assert learned.learning(moving).spent(state).clip == 1.0
    assert learned.learning(NOISY).spent(state).clip is None


@pytest.mark.parametrize("phase", ["open", "closed"])
def test_a_secure_round_that_is_not_committed_is_not_folded_as_a_plain_one(desk, phase):
    """Its updates are masked: each would look like a lie, and its device be shut out."""
    learned = desk(None)
    state = CoordinatorState(epoch=learned.fleet.epoch, current=2)
    state.attempts[2] = Attempt(2, 1, b"", None, 3, 3, 0, {}, phase=phase, secure=60.0)
    learned.store.fleets.save_machine("watch", learned.fleet.epoch, state.dump())
    conductor = Conductor(learned.config(None), learned.store, learned.learning(None), None, 1.0)
    with pytest.raises(StateError, match=r"a secure round is open, or not committed yet.*secure = true once more"):
        conductor.inspect()
    state.attempts[2].phase = "committed"
    learned.store.fleets.save_machine("watch", learned.fleet.epoch, state.dump())
    assert conductor.inspect() == learned.fleet.epoch


def test_a_private_round_waits_for_as_many_as_hide_each_other(tmp_path):
    """With fewer it would close with a quorum and could only fail, again and again."""
    text = (
        '[fleet]\nname = "watch"\ndevices = {}\n[run]\nalgorithm = "fedavg"\n[run.spec]\nname = "imu_cnn"\n'
        "input_shape = [6, 32]\nclasses = 3\n[privacy]\nclip = 1.0\n"
    )
    path = tmp_path / "fleet.toml"
    path.write_text(text.format(4))
    assert quorum(load_config(path).draw, 4, 4) == 3
    path.write_text(text.format(2))
    with pytest.raises(ConfigError, match="privacy: 2 devices: of a sum of fewer than 3"):
        load_config(path)


@pytest.mark.parametrize("rules", [(None, "server_momentum:inner=mean"), ("server_adam:inner=mean", None)])
def test_a_round_is_counted_once_and_for_all_whatever_rule_stands_around_the_sums(tmp_path, rules):
    """Each rule keeps the ledger in a place of its own; of two the older one would be read."""
    blobs = FolderBlobs(tmp_path)
    shared = run_model.first_shared(RUN)
    entries = []
    for name in MEMBERS:
        data = encode_update(Update(tensors=shared, weight=4.0, client=name))
        entries.append(Counted(name, 1, 0, bytes.fromhex(blobs.put(data))))
    before, after = (Learning(RUN, blobs, rule, privacy=NOISY) for rule in rules)
    fleet = Fleet("watch", RUN.to_json(), 1, 0, 1, "running", *before.first(), ())
    for learning in (before, after, after, before):
        made = learning.fold(fleet, entries)
        fleet = replace(fleet, model_digest=made.model_digest, server=made.server, round=fleet.round + 1)
        assert dict(learning.spent(made.server).rounds) == dict.fromkeys(MEMBERS, fleet.round)


def test_a_budget_that_was_lowered_while_a_round_is_open_fails_it_and_blames_nobody(tmp_path):
    """The others alone could be afforded: who was counted most was taken for a liar."""
    blobs, five = FolderBlobs(tmp_path), ("anna", "bela", "carl", "dora", "emil")
    update = {name: Update(tensors=run_model.first_shared(RUN), weight=4.0, client=name) for name in five}
    entries = [Counted(n, 1, 0, bytes.fromhex(blobs.put(encode_update(update[n])))) for n in five]
    learning = Learning(RUN, blobs, privacy=replace(NOISY, epsilon=epsilon(1.0, 2, NOISY.delta)))
    fleet = Fleet("watch", RUN.to_json(), 1, 0, 1, "running", *learning.first(), ())
    ledger = ledger_in(learning._server(fleet)).after(("anna",)).after(("anna",))
    fleet = replace(fleet, server=blobs.put(codec.encode_tensors(ledger.as_tensors())))
    with pytest.raises(NothingLeft, match="this round would cost epsilon") as found:
        learning.fold(fleet, entries)
    assert found.value.left == ()


def test_a_private_round_of_too_few_names_who_spoiled_it(tmp_path):
    """Three are asked for and come, and one of them sent what cannot be read."""
    blobs = FolderBlobs(tmp_path)
    data = [encode_update(Update(tensors=run_model.first_shared(RUN), weight=4.0, client=name)) for name in MEMBERS]
    data[1] = b"junk"
    entries = [Counted(n, 1, 0, bytes.fromhex(blobs.put(d))) for n, d in zip(MEMBERS, data, strict=True)]
    learning = Learning(RUN, blobs, privacy=NOISY)
    with pytest.raises(NothingLeft, match="2 of 3 updates can be folded, and 3 are needed") as found:
        learning.fold(Fleet("watch", RUN.to_json(), 1, 0, 1, "running", *learning.first(), ()), entries)
    assert [out.entry.device for out in found.value.left] == ["bela"]
