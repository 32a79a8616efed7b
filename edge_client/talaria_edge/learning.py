"""What a device computes: one round, and its personal model. Runs in a worker thread; touches no network."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from talaria import rounds
from talaria.bodies import decode_body
from talaria.errors import StateError, WireError
from talaria.rounds import Member, Run
from talaria.types import Tensors
from talaria.wire import codec
from talaria_edge import files
from talaria_edge.config import DeviceConfig
from talaria_edge.data import DeviceData, checked
from talaria_edge.deploy import deploy
from talaria_edge.state import DeviceStore, Private, Trained


@dataclass(frozen=True)
class Learner:
    """One device's learning, over its own store and data."""

    config: DeviceConfig
    store: DeviceStore
    run: Run

    @property
    def digest(self) -> str:
        """Which run the private state belongs to (hex sha256)."""
        return hashlib.sha256(self.run.to_json().encode()).hexdigest()

    def private(self) -> Private | None:
        """The private state in force. StateError where it belongs to another run."""
        found = self.store.private()
        if found is not None and found.run != self.digest:
            raise StateError(
                f"state: {self.store.private_path} belongs to another run of this fleet; give the device a new state "
                "folder for this run, or move the file away to begin anew"
            )
        return found

    def round(self, step: int, body: bytes) -> tuple[Trained, dict[str, float]]:
        """Learn round ``step`` from the body with this sha256, or find it done; ``(update, metrics)``.

        The update and the new private state are on flash when this returns.
        """
        done = self.store.trained()
        if done is not None and (done.step, done.base, done.run) == (step, body.hex(), self.digest):
            return done, {}
        # A round that was staged before this one is over, with us or without.
        self.store.publish()
        private = self.private()
        if private is not None and private.step >= step:
            raise StateError(
                f"round {step} was learned before, from another body (the private state is at round {private.step})"
            )
        member = self.member(self._data())
        own = None if private is None else private.tensors
        update, after = rounds.participate(self.run, member, self._shared(body), own, step)
        data = codec.encode_update(update, rounds.codec_of(self.run, member))
        trained = Trained(data, step, body.hex(), self.digest)
        self.store.stage(trained, after)
        return trained, dict(update.metrics)

    def member(self, data: DeviceData) -> Member:
        """This device's own side of a round."""
        return Member(self.config.device, data.train, data.val, self.config.plan)

    def _data(self) -> DeviceData:
        return checked(self.config.source.load(), self.run.spec.input_shape, self.run.spec.classes)

    def _shared(self, body: bytes) -> Tensors:
        data = self.store.body()
        if hashlib.sha256(data).digest() != body:
            raise WireError("the body on flash is another one by now; the coordinator will ask again")
        return decode_body(self.run, data)

    def finish(self, body: bytes) -> dict[str, Any]:
        """Personalize from the last body and the private state in force, and write what stays on this device:
        ``personal.safetensors`` and, where asked for, the bundle. Says where they are and what was measured."""
        self.store.publish()
        private, data = self.private(), self._data()
        tensors = None if private is None else private.tensors
        model = rounds.personalize(self.run, self.member(data), self._shared(body), tensors)
        path = self.store.folder / "personal.safetensors"
        files.write(path, files.pack(model.state_dict(), {"device": self.config.device, "run": self.digest}))
        found: dict[str, Any] = {
            "private": None if private is None else str(self.store.private_path),
            "steps": 0 if private is None else private.step,
            "personal": str(path),
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        return found | deploy(self.config, model, data, self.run)
