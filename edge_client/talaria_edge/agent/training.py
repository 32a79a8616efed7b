""":class:`Learner`: computes a device's rounds and its personal model, in a worker thread and without network."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from talaria.errors import AggregationError, ConfigError, DataError, ModelError, StateError, TalariaError, WireError
from talaria.federated import device_task, rounds, run_model, warm_start
from talaria.federated.global_model import decode_held
from talaria.federated.kit import open_kit
from talaria.federated.run import Member, Run
from talaria.model import masks
from talaria.model.masks import ChannelMask
from talaria.model.weights import Model, Served
from talaria.model.widths import widths_of
from talaria.planning.budget import AccuracyCheck
from talaria.planning.plan import Plan
from talaria.plugins import has_torch
from talaria.tensors import Tensors
from talaria.training.engine import state_of
from talaria.training.evaluation import evaluate
from talaria.wire import codec
from talaria.wire.compact import model_of
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, checked
from talaria_edge.deployment.deploy import VARIANT_DROP, Candidate, deploy
from talaria_edge.storage import tensor_files
from talaria_edge.storage.state import DeviceStore, Private, Trained

if TYPE_CHECKING:
    from talaria.privacy.in_process import Contribution
    from talaria.privacy.terms import Terms

logger = logging.getLogger(__name__)


class Narrow(TalariaError):  # noqa: N818 - it says what is
    """What is on flash of the global model is not enough for this device; it is fetched whole."""


class Diverged(DataError):  # noqa: N818 - it says what is
    """What was learned is nothing that a coordinator takes: training went astray."""


@dataclass(frozen=True)
class Learner:
    """One device's learning, over its own store and data."""

    config: DeviceConfig
    store: DeviceStore
    run: Run
    keep: Callable[[Model], None] = lambda model: None
    """Given the personal model, in eval mode, when it is whole."""

    def __post_init__(self) -> None:
        """Raises :class:`~talaria.errors.ConfigError` where the kit that the configuration names is of another run, and
        where torch is to learn and is not there."""
        if self.config.kit is not None:
            run_model.equip(self.run, open_kit(self.config.kit))
        elif self.config.engine != "onnx" and not has_torch():
            raise ConfigError(
                f"device: engine={self.config.engine!r} learns with torch, which is not installed here; leave [device] "
                "engine out, and it learns from the kit that the coordinator gives it, or pip install 'talaria[torch]'"
            )

    @property
    def digest(self) -> str:
        """Which run the private state belongs to: its identity, however many rounds it goes on for."""
        return self.run.identity

    def private(self) -> Private | None:
        """The private state in force: of this run, or of one that it follows. Where a run was called off that followed
        this one, or one before it while this device was away, the state before comes back. StateError where it belongs
        to another run."""
        while (found := self.store.private()) is not None and self._is_called_off(found):
            logger.info("%s: the run that it learned since was called off", self.config.device)
            self.store.take_back()
        if found is not None and not self.run.is_named(found.run) and found.run not in self.run.follows:
            raise StateError(
                f"state: {self.store.private_path} belongs to another run of this fleet; give the device a new state "
                "folder for this run, or move the file away to begin anew"
            )
        return found

    def _is_called_off(self, private: Private) -> bool:
        """Whether it is of a run that went on from ours, or from one that ours follows, and that ours does not."""
        ours = {self.digest, *self.run.follows}
        return private.run not in ours and not self.run.is_named(private.run) and not ours.isdisjoint(private.follows)

    def learn(
        self, round: int, model_digest: bytes, after: int | None = None, epoch: int = 0
    ) -> tuple[Trained, dict[str, float]]:
        """Learn round ``round`` from the global model with this sha256, or find it done; what was trained, and metrics.
        ``after`` is this device's last round that counted, where the run is asynchronous; ``epoch`` is the
        coordinator's. A later one may have gone back to an older record of the fleet: the private state goes on from
        what it has learned.

        The update and the new private state are on flash when this returns.
        """
        done = self.store.trained()
        asked = (round, model_digest.hex())
        if done is not None and (done.round, done.base_digest) == asked and self.run.is_named(done.run):
            return done, {}
        self._settle(after)
        private = self.private()
        if private is not None and private.round >= round and private.epoch < epoch:
            logger.warning(
                "%s: the fleet is back at round %d (its coordinator was restored or begun anew), and this device at "
                "round %d; its private state stays as it is and goes on from there",
                self.config.device, round, private.round,
            )  # fmt: skip
        elif private is not None and private.round >= round:
            raise StateError(
                f"round {round} was learned before, from another model (the private state is at round {private.round})"
            )
        data, moved, metrics = self._trained(round, model_digest, self._own(private, model_digest))
        trained = Trained(data, round, model_digest.hex(), self.digest, epoch)
        self.store.stage(trained, moved, self.run.follows)
        return trained, metrics

    def _trained(self, round: int, model_digest: bytes, own: Tensors | None) -> tuple[bytes, Tensors, dict[str, float]]:
        """The update as it travels, the new private tensors and the metrics of round ``round``."""
        samples = self._data()
        member = self.member(samples)
        shared = self._shared(model_digest, own)
        update, moved = rounds.participate(self.run, member, shared, own, round)
        if samples.told:
            update = replace(update, metrics={**update.metrics, **samples.told})
        data = codec.encode_update(update, device_task.codec_of(self.run, member))
        self._require_sound(shared, data)
        return data, moved, dict(update.metrics)

    def contribution(self, model_digest: bytes, update: bytes, terms: Terms) -> Contribution:
        """What this device brings to a secure round of an update that it made from this global model."""
        from talaria.federated.private_rule import coordinates_of
        from talaria.privacy.rule import contribution

        schema, layout = run_model.update_schema(self.run), run_model.layout_of(self.run.spec)
        sent = codec.decode_update(update, schema=schema, layout=layout, client=self.config.device)
        return contribution(self._held(model_digest)[0], coordinates_of(self.run), terms, sent)

    def _own(self, private: Private | None, model_digest: bytes) -> Tensors | None:
        """The private tensors as this run has them, of a run before it what fits; and as the present plan has them,
        which may be another one since the device was started again."""
        if private is None:
            return None
        own = private.tensors
        if not self.run.is_named(private.run):
            found = warm_start.private_of(self.run, self.member(self._data()), self._whole(model_digest), own)
            logger.info("%s: carried over from the run before: %s", self.config.device, found.facts())
            own = found.tensors
        now = warm_start.mask_now(self.run, self.config.plan, own)
        if now == warm_start.mask_before(self.run, own):
            return own
        shared, kept = self._held(model_digest)
        if kept is not None and not now.within(kept):
            raise Narrow("the part of the global model on flash lacks channels that this device's plan keeps by now")
        logger.info("%s: its plan has other widths by now; what is private is cut or grown to them", self.config.device)
        return warm_start.under_plan(self.run, self.member(self._data()), shared, own)

    def _require_sound(self, shared: Tensors, data: bytes) -> None:
        """Nothing leaves that the coordinator would refuse, and shut this device out for: training that went astray,
        on a global model that a liar spoiled, costs a round and not the place in the fleet (:class:`Diverged`)."""
        schema, layout = run_model.update_schema(self.run), run_model.layout_of(self.run.spec)
        try:
            sent = codec.decode_update(data, schema=schema, layout=layout, client=self.config.device)
            rounds.require_update(self.run, shared, sent)
        except (WireError, AggregationError) as error:
            raise Diverged(f"what was learned cannot be sent: {error}") from error

    def _settle(self, after: int | None) -> None:
        """A round that was staged before this one is over, with us or without, and comes into force. Asynchronously
        only where it is the one that counted last, ``after``: so the private state is what the fleet's record says."""
        trained = self.store.trained()
        if after is None or (trained is not None and trained.round == after):
            self.store.publish()
        else:
            self.store.discard()

    def member(self, data: DeviceData) -> Member:
        """This device's own side of a round."""
        own = self.config
        return Member(own.device, data.train, data.val, own.plan, own.engine, unlabelled=data.unlabelled)

    def _data(self) -> DeviceData:
        spec, parts = self.run.spec, run_model.named_inputs(self.run)
        return checked(self.config.source.load(), spec.input_shape, spec.classes, self.run.task, parts)

    def _held(self, model_digest: bytes) -> tuple[Tensors, ChannelMask | None]:
        """The global model on flash, dense; where that is a part, with the mask beyond which all is zero."""
        return decode_held(self.run, self.model(model_digest))

    def model(self, digest: bytes) -> bytes:
        """The global model with this sha256, or the part of it, as it lies on flash. Raises :class:`Narrow` where it
        does not."""
        try:
            data = self.store.model()
        except StateError as error:
            raise Narrow(str(error)) from error
        if model_of(data) != digest:
            raise Narrow("the global model on flash is another one by now, or damaged")
        return data

    def _shared(self, model_digest: bytes, own: Tensors | None) -> Tensors:
        """What a device with these private tensors needs of the global model. Raises :class:`Narrow`."""
        shared, kept = self._held(model_digest)
        if kept is not None:
            need = device_task.mask_under(self.run, self.config.plan, own)
            if need is None or not need.within(kept):
                raise Narrow("the part of the global model on flash lacks channels that this device keeps")
        return shared

    def _whole(self, model_digest: bytes) -> Tensors:
        shared, kept = self._held(model_digest)
        if kept is not None:
            raise Narrow("a part of the global model is on flash, and all of it is needed")
        return shared

    def keeps(self, last: bool = False) -> bytes:
        """The channels, packed, that this device will need of the next global model; ``last``: of the one after the
        last round. Empty where it needs all, or cannot tell yet."""
        plan = self.config.plan
        if last and plan is not None and plan.accuracy_drop is not None:
            return b""  # it compares the planned model with its dense twin
        try:
            states = [state for state in (self.store.staged(), self.store.private()) if state is not None]
            if not all(self.run.is_named(state.run) for state in states):
                return b""
            # In rounds what is staged comes into force; asynchronously only where it counted.
            sure = states if self.run.asynchronous else states[:1]
            if not sure and (plan is None or not plan.widths):
                return b""  # also where it will prune; nothing is built here of a model that its samples may not fit
            found: list[ChannelMask | None] = [warm_start.mask_now(self.run, plan, own.tensors) for own in sure]
            if plan is not None and not found:
                device_task.require_plan(self.run, plan)
                found = [device_task.mask_under(self.run, plan, None)]
        except TalariaError as error:
            logger.info("%s: which channels it keeps is not known yet: %s", self.config.device, error)
            return b""
        mask = found[0]
        if mask is None or mask.is_full or any(other != mask for other in found[1:]):
            return b""
        return masks.pack(mask)

    def finish(self, model_digest: bytes) -> dict[str, Any]:
        """Personalize from the last global model and the private state in force, and write what stays on this device:
        ``personal.safetensors`` and, where asked for, the bundle. Says where they are and what was measured."""
        if self.run.asynchronous:
            self.store.discard()  # what is staged still, did not count
        else:
            self.store.publish()
        private, data = self.private(), self._data()
        member, tensors = self.member(data), self._own(private, model_digest)
        twin = member.plan is not None and member.plan.accuracy_drop is not None
        shared = self._whole(model_digest) if twin else self._shared(model_digest, tensors)
        model = rounds.personalize(self.run, member, shared, tensors)
        self.keep(model)
        state = state_of(model)
        plan = self._outcome(member, shared, model)
        card = {
            "device": self.config.device,
            "algorithm": self.run.algorithm,
            "rounds": self.run.rounds,
            "seed": self.run.seed,
            "model": self.run.spec.to_json(),
            "samples": {"train": len(data.train), "validation": len(data.val)},
            "plan": None if self.config.plan is None else self.config.plan.to_json(),
            "planned": plan,
        }
        if spent := self.store.spent():
            card["privacy"] = spent
        path = self.store.folder / "personal.safetensors"
        facts = {
            "device": self.config.device,
            "run": self.digest,
            "labels": list(self.config.labels[: self.run.spec.classes]),
            "card": card,
            "task": self.run.task,
        }
        packed = tensor_files.pack(state, facts)
        tensor_files.write(path, packed)
        found: dict[str, Any] = {
            "private": None if private is None else str(self.store.private_path),
            "rounds": 0 if private is None else private.round,
            "personal": str(path),
            "parameters": model.size if isinstance(model, Served) else sum(p.numel() for p in model.parameters()),
        }
        found |= self._kept(model)
        accuracy = None if plan is None else plan["accuracy"]
        spare = VARIANT_DROP if accuracy is None else min(VARIANT_DROP, accuracy["left"])
        dense = run_model.unpruned(self.run) if isinstance(model, Served) else None
        candidate = Candidate(model, self.run.spec, _named(state), card, spare, self.run.task, dense)
        return found | ({} if plan is None else {"plan": plan}) | deploy(self.config, candidate, data)

    def _kept(self, model: Model) -> dict[str, float]:
        """The share of the model's channels that this device kept; nothing where it cannot be told."""
        layout = run_model.layout_of(self.run.spec)
        try:
            kept = widths_of(layout, state_of(model))
        except ModelError:  # an algorithm may serve a network of its own
            return {}
        whole = sum(layout.sizes.values())
        return {"channels_kept": sum(kept.values()) / whole} if whole else {}

    def _outcome(self, member: Member, shared: Tensors, model: Model) -> dict[str, Any] | None:
        """What became of the plan: groups that stayed wider than planned, and what it cost in accuracy."""
        plan = member.plan
        if plan is None:
            return None
        layout = run_model.layout_of(self.run.spec)
        try:
            kept = widths_of(layout, state_of(model))
        except ModelError as error:  # an algorithm may serve a network of its own
            logger.info("%s: the served model's widths are not told: %s", self.config.device, error)
            kept = {}
        wider = {g: [n, kept[g]] for g, n in sorted(plan.widths.items()) if kept.get(g, 0) > n}
        check = None
        if plan.accuracy_drop is not None:
            check = self._check(plan.accuracy_drop, member, shared, model, pruned=kept != dict(layout.sizes))
        return {"wider_than_planned": wider, "accuracy": check}

    def _check(self, allowed: float, member: Member, shared: Tensors, model: Model, *, pruned: bool) -> dict[str, Any]:
        """The planned model against its dense twin on this user's validation samples.

        The twin is the best that this device could run without pruning: the fleet's global model with all its channels,
        personalized from the same samples as on a device that never took part. What the device learned privately is as
        narrow as its model, and cannot be widened.
        """
        if not len(member.val):
            return AccuracyCheck(0.0, 0.0, allowed, 0).to_json()
        planned = dense = evaluate(model, member.val, task=self.run.task).accuracy
        if pruned:
            whole = replace(member.plan or Plan(), widths=dict(run_model.layout_of(self.run.spec).sizes))
            twin = rounds.personalize(self.run, replace(member, plan=whole), shared, None)
            dense = evaluate(twin, member.val, task=self.run.task).accuracy
        return AccuracyCheck(planned, dense, allowed, len(member.val)).to_json()


def equipped(store: DeviceStore, run: Run) -> bool:
    """Whether a kit of ``run`` lies on flash, from which it is then learned."""
    if not store.kit_path.exists():
        return False
    try:
        run_model.equip(run, open_kit(store.kit_path))
    except TalariaError as error:
        logger.info("the kit on flash is not used: %s", error)
        return False
    return True


def _named(state: Tensors) -> str:
    """A name for these weights: equal weights, equal names."""
    return hashlib.sha256(tensor_files.pack(state, {})).hexdigest()[:32]
