"""What a fold goes on without: the culprit that leaving out finds, and never an honest device."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from talaria.aggregate.partial_sum import partial_sum
from talaria.errors import AggregationError, StateError
from talaria.federated import rounds, run_model
from talaria.federated.run import Run
from talaria.model.spec import ModelSpec
from talaria.protocol.actions import Counted
from talaria.types import Update
from talaria.wire.codec import encode_update
from talaria.wire.partial_sums import encode_partial_sum
from talaria_coordinator.fleet.aggregation import Learning, NothingLeft
from talaria_coordinator.fleet.culprits import culprits
from talaria_coordinator.storage.blobs import FolderBlobs
from talaria_coordinator.storage.records import Fleet

RUN = Run(spec=ModelSpec("imu_cnn", (3, 16), 3), algorithm="fedavg", rounds=2)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=n // 2))))
def test_who_spoils_is_found_wherever_it_sorts_up_to_one_half(case):
    """Of two devices nobody was named: one of them could hold a trial up for good."""
    count, bad = case
    items = list(range(count))
    assert set(culprits(items, lambda kept: not bad & set(kept))) == bad


@settings(max_examples=100, deadline=None)
@given(st.integers(3, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))))
def test_of_those_that_do_not_go_together_the_one_against_many_is_named(case):
    count, odd = case
    found = culprits(list(range(count)), lambda kept: odd not in kept or len(kept) == 1)
    assert found == (odd,)


def test_where_it_is_one_word_against_another_nobody_is_named():
    assert culprits([1, 2], lambda kept: len(kept) < 2) == ()
    assert culprits([1, 2, 3], lambda kept: not kept) == ()


def test_one_culprit_among_many_takes_few_questions():
    asked = []
    assert culprits(list(range(1024)), lambda kept: asked.append(kept) or 777 not in kept) == (777,)
    assert len(asked) < 100


class Desk:
    """Updates of the first round, as they lie in the store."""

    def __init__(self, folder):
        self.blobs = FolderBlobs(folder)
        self.learning = Learning(RUN, self.blobs)
        model, server = self.learning.first()
        self.fleet = Fleet("watch", RUN.to_json(), 1, 0, 1, "running", model, server, ())
        self.shared = run_model.first_shared(RUN)

    def entry(self, name, **changes):
        update = Update(tensors=self.shared, weight=4.0, client=name).but(**changes)
        digest = self.blobs.put(encode_update(update, compress=False))
        return Counted(name, 1, 0, bytes.fromhex(digest))

    def fold(self, *entries):
        return self.learning.fold(self.fleet, entries)


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


@pytest.mark.parametrize("liar", ["aaron", "zoe"])
def test_a_lie_that_was_stored_already_costs_its_sender_and_not_the_round(desk, liar):
    """As an older coordinator stored it, which looked at less."""
    honest = [desk.entry("mia"), desk.entry("noah")]
    made = desk.fold(*sorted([*honest, desk.entry(liar, kind="delta")], key=lambda entry: entry.device))
    assert [(out.entry.device, out.liar) for out in made.left] == [(liar, True)]
    assert "kind 'delta'" in made.left[0].reason
    assert made.counted == tuple(honest)
    assert made.model_digest == desk.fold(*honest).model_digest


@pytest.mark.parametrize("liar", ["aaron", "zoe"])
def test_what_only_the_fold_refuses_is_found_by_leaving_out(desk, liar, monkeypatch):
    honest = [desk.entry(name) for name in ("mia", "noah", "olga")]
    close = rounds.close

    def refusing(run, shared, state, updates, aggregator=None):
        kept = list(updates)
        if any(update.client == liar for update in kept) and len(kept) > 1:
            raise RuntimeError("linalg.eigh: the algorithm failed to converge")
        return close(run, shared, state, kept, aggregator)

    monkeypatch.setattr(rounds, "close", refusing)
    made = desk.fold(*sorted([*honest, desk.entry(liar)], key=lambda entry: entry.device))
    assert [(out.entry.device, out.liar) for out in made.left] == [(liar, True)]
    assert made.counted == tuple(honest)


def test_a_rule_that_fails_whoever_comes_blames_nobody(desk, monkeypatch):
    """Folds take updates in the order of their names alone: asked in another one, the last name was to blame."""
    close = rounds.close

    def cannot_take_four(run, shared, state, updates, aggregator=None):
        kept = list(updates)
        if len(kept) == 4:
            raise ValueError("cannot split four")
        return close(run, shared, state, kept, aggregator)

    monkeypatch.setattr(rounds, "close", cannot_take_four)
    with pytest.raises(ValueError, match="cannot split four"):
        desk.fold(*[desk.entry(name) for name in ("mia", "noah", "olga", "pia")])


@pytest.mark.parametrize("liar", ["aaron", "noah", "zoe"])
def test_of_two_that_do_not_go_together_the_names_decide_nothing(desk, liar, monkeypatch):
    honest = [desk.entry(name) for name in ("mia", "olga", "pia")]
    close = rounds.close

    def refusing(run, shared, state, updates, aggregator=None):
        kept = list(updates)
        if {liar, "pia"} <= {update.client for update in kept}:
            raise AggregationError("these two do not go together")
        return close(run, shared, state, kept, aggregator)

    monkeypatch.setattr(rounds, "close", refusing)
    with pytest.raises(AggregationError, match="do not go together"):  # one word against another
        desk.fold(*sorted([*honest, desk.entry(liar)], key=lambda entry: entry.device))


def test_trouble_of_this_machine_is_nobodys_fault(desk, monkeypatch):
    entries = [desk.entry(name) for name in ("mia", "noah", "olga")]
    for trouble in (MemoryError(), OSError("disk"), RuntimeError("DefaultCPUAllocator: can't allocate memory")):

        def failing(*_, trouble=trouble):
            raise trouble

        monkeypatch.setattr(rounds, "close", failing)
        with pytest.raises(type(trouble)):
            desk.fold(*entries)


def test_where_nothing_is_left_the_round_fails_and_says_who_spoiled_it(desk):
    with pytest.raises(NothingLeft, match="0 of 2 updates") as caught:
        desk.fold(desk.entry("mia", kind="delta"), desk.entry("noah", kind="delta"))
    assert {out.entry.device for out in caught.value.left} == {"mia", "noah"}
    assert isinstance(caught.value, AggregationError)
    assert not isinstance(caught.value, StateError)


def test_differences_that_add_up_to_a_negative_variance_end_at_zero():
    """Honest ones may, asynchronously: each began from another version."""
    run = Run(spec=RUN.spec, algorithm="fedavg", codec="fp16", buffers="aggregate")
    shared = run_model.first_shared(run)
    name = next(n for n in shared if n.endswith("running_var"))
    steps = {n: np.zeros_like(v) for n, v in shared.items()} | {name: np.full_like(shared[name], -2.0)}
    after, _ = rounds.close(run, shared, {}, [Update(tensors=steps, weight=1.0, client="a", kind="delta")])
    assert float(after[name].min()) == 0.0


@pytest.mark.parametrize(
    "since", [{"max_update": 1024}, {"gateways": {"mia": 5}}, {"gateways": {"noah": 1}}, {"rule": "median"}]
)
def test_what_an_operator_bounds_otherwise_since_was_no_lie_when_it_came(desk, since):
    """All were checked as they came: three updates, and the partial sum of a gateway that spoke for three."""
    known = replace(desk.learning, gateways={"noah": 3})
    three = [Update(tensors=desk.shared, weight=4.0, client=f"noah-{i}") for i in range(3)]
    data = encode_partial_sum(partial_sum(desk.shared, three, "noah"), run_model.layout_of(RUN.spec))
    noah = Counted("noah", 1, 0, bytes.fromhex(desk.blobs.put(data)))
    entries = [desk.entry("mia"), noah, desk.entry("olga"), desk.entry("paul")]
    before = known.fold(desk.fleet, entries)
    assert (len(before.counted), before.left) == (4, ())
    changed = replace(known, **({"gateways": {}} | since))
    after = changed.fold(desk.fleet, entries)
    assert [(out.entry.device, out.liar) for out in after.left] == [("noah", False)] * ("rule" in since)
    assert "rule" in since or after.model_digest == before.model_digest


@pytest.mark.parametrize("before", [None, "server_momentum:inner=mean"])
def test_a_rule_that_remembers_more_than_the_one_before_it_begins_anew(desk, before):
    entries = [desk.entry("mia"), desk.entry("noah")]
    first = replace(desk.learning, rule=before)
    model, server = first.first()
    made = first.fold(replace(desk.fleet, model_digest=model, server=server), entries)
    fleet = replace(desk.fleet, model_digest=made.model_digest, server=made.server)
    now = replace(desk.learning, rule="server_adam:inner=mean").fold(fleet, entries)
    assert (now.counted, now.left) == (tuple(entries), ())
    again = replace(desk.learning, rule=before).fold(replace(fleet, server=now.server), entries)
    assert (again.counted, again.left) == (tuple(entries), ())
