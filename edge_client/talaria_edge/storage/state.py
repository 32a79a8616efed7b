"""The persistent state of one device: private tensors, the round that awaits its receipt, the global model, the
protocol.

    private.safetensors           the private state after its latest round; replaced by rename only
    pending-private.safetensors   what replaces it once the coordinator has our update, or went on without us
    before-private.safetensors    the private state of the run before, where another was begun from its model
    update.bin                    the update of the latest round, to be offered again after a reboot
    model.bin, model-*.part       the newest global model received, and one on its way
    kit.bin, kit-*.part           the run's kit, where this device learns from one that the coordinator gave it
    protocol.bin                  the protocol's memory (boot counter, round, transfer)
    traffic.json                  bytes up and down by round
    privacy.json                  what differential privacy has cost this device
    secure.bin                    its part in a secure round
    left.json                     when its owner took it out of the fleet for good: no agent takes part from then on
    lock                          held by the process that uses the folder

Of all this only the update leaves the device.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from talaria import durable, time
from talaria.errors import StateError, WireError
from talaria.foreign import shown
from talaria.protocol.device.machine import DeviceState
from talaria.tensors import Tensors
from talaria.wire.changes import applied, are_changes, made_by
from talaria.wire.compact import model_of
from talaria_edge.storage import tensor_files

logger = logging.getLogger(__name__)

FORMAT = 2
LEFT, SECURE, PLAN = "left.json", "secure.bin", "plan.json"
KEPT = (
    "*private.safetensors", "personal.safetensors", "update.bin", "model.bin", "model-*.part", "kit.bin", "kit-*.part",
    "protocol.bin", "traffic.json", "privacy.json", SECURE, PLAN, "result.json", "body.bin", "body-*.part", ".*.part",
    "deployed.json", "deployed.lock", "waiting.json", "waiting.talaria", "candidate.talaria", "bundles/*.talaria",
    "bundles/.*.part",
)  # fmt: skip
"""What a device keeps in its folder, its earlier bundles too."""
_BEFORE = {"step": "round", "base": "base_digest"}
"""What format 1 called otherwise. Its tensors are the same."""


class UnfitError(StateError):
    """What came as changes of the global model does not fit the one on flash."""


@dataclass(frozen=True)
class Private:
    """The private tensors after round ``round``, trained from global model ``base_digest`` (hex) of run ``run`` (hex),
    for the coordinator of epoch ``epoch``."""

    tensors: Tensors = field(repr=False)
    round: int
    base_digest: str
    run: str
    epoch: int = 0
    follows: tuple[str, ...] = ()
    """Identities of the runs that its run goes on from."""


@dataclass(frozen=True)
class Trained:
    """A finished round's update, and which round it was."""

    update: bytes = field(repr=False)
    round: int
    base_digest: str
    run: str
    epoch: int = 0


class DeviceStore:
    """The state folder of one device, held by one process at a time (a context manager)."""

    def __init__(self, folder: Path, fleet: str, device: str) -> None:
        self.folder = folder
        self._facts: dict[str, Any] = {"format": FORMAT, "fleet": fleet, "device": device}
        self.private_path = folder / "private.safetensors"
        self._next = folder / "pending-private.safetensors"
        self.before_path = folder / "before-private.safetensors"
        self._update = folder / "update.bin"
        self._model = folder / "model.bin"
        self.kit_path = folder / "kit.bin"
        self._protocol = folder / "protocol.bin"
        self._traffic, self._spent = folder / "traffic.json", folder / "privacy.json"
        self._staging = threading.Lock()  # a round is staged by the worker, and its end may be told meanwhile
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            self._lock = durable.lock(folder / "lock", wait=False)
        except BlockingIOError:
            raise StateError(
                f"state: {folder} is in use by another process; stop that agent, or give this one its own folder"
            ) from None
        except OSError as error:
            raise StateError(
                f"state: cannot use {error.filename or folder}: {error.strerror}; give a folder to write to"
            ) from None

    def __enter__(self) -> DeviceStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process use the folder."""
        self._lock.close()

    # -- the private state

    def private(self) -> Private | None:
        """The private state in force, verified, or None on a device that never took part.

        Raises :class:`~talaria.errors.StateError`, with the mend, where it is damaged or another device's.
        """
        return self._read(self.private_path)

    def stage(self, trained: Trained, private: Tensors, follows: Sequence[str] = ()) -> None:
        """Keep a finished round until it is received. The private state in force is not touched."""
        facts = {"round": trained.round, "base_digest": trained.base_digest, "run": trained.run, "epoch": trained.epoch}
        with self._staging:
            tensor_files.remove(self._update)
            more = {"follows": list(follows)} if follows else {}
            tensor_files.write(self._next, tensor_files.pack(private, self._facts | facts | more))
            tensor_files.write(self._update, _sealed(facts, trained.update))

    def publish(self) -> bool:
        """The staged private state becomes the one in force, by one rename; False where none is staged.

        A half-written stage (no update beside it) was never offered: it is removed, and trained again.
        """
        with self._staging:
            trained, staged = self._opened_update(), self.staged()
            if staged is None or trained is None or _round(staged) != _round(trained):
                tensor_files.remove(self._next)
                return False
            held = self.private()
            if held is not None and held.run != staged.run:  # another run begins: the one before may be taken up again
                tensor_files.write(self.before_path, self.private_path.read_bytes())
            tensor_files.rename(self._next, self.private_path)
            return True

    def before(self) -> Private | None:
        """The private state of the run before the present one, or None."""
        return self._read(self.before_path)

    def take_back(self) -> None:
        """The state of the run before is in force again, and what was staged is let go of; where there is none, the
        device begins anew. What was in force is kept as ``called-off-private.safetensors``."""
        self.discard()
        kept = self.folder / "called-off-private.safetensors"
        if self.before_path.exists():
            tensor_files.write(kept, self.private_path.read_bytes())  # a kill here calls it off once more
            tensor_files.rename(self.before_path, self.private_path)
        else:
            tensor_files.rename(self.private_path, kept)

    def trained(self) -> Trained | None:
        """The latest finished round, published or not, or None. What is half-written counts as none."""
        trained = self._opened_update()
        if trained is None:
            return None
        for state in (self.staged(), self.private()):
            if state is not None and _round(state) == _round(trained):
                return trained
        return None

    def discard(self) -> None:
        """Let go of the staged round and its update; the private state in force stays."""
        with self._staging:
            tensor_files.remove(self._next)
            tensor_files.remove(self._update)

    def staged(self) -> Private | None:
        """The private state of the round that is staged, or None."""
        try:
            return self._read(self._next)
        except StateError as error:
            logger.warning("the unfinished round is trained again: %s", str(error).partition(";")[0])  # nothing is lost
            return None

    def _opened_update(self) -> Trained | None:
        if not self._update.exists():
            return None
        try:
            facts, update = _opened(tensor_files.read(self._update, "the round is trained again"))
            return Trained(update, facts["round"], facts["base_digest"], facts["run"], facts.get("epoch", 0))
        except (StateError, KeyError) as error:  # a key that is missing: an update of format 1
            logger.warning("the unfinished round is trained again: %s", error)
            return None

    def _read(self, path: Path) -> Private | None:
        if not path.exists():
            return None
        mend = (
            f"restore {path.name} from a backup, or move it away: this device then begins with a new private state "
            "and loses what it had personalized"
        )
        tensors, facts = tensor_files.unpack(tensor_files.read(path, mend), path, mend)
        if facts.get("format") == 1:
            facts = {_BEFORE.get(name, name): value for name, value in facts.items()} | {"format": FORMAT}
        if (found := facts.get("format")) != FORMAT:
            raise StateError(
                f"state: {path} is of format {shown(found)}, this Talaria reads {FORMAT}; update it, or {mend}"
            )
        for name, value in self._facts.items():
            if facts.get(name) != value:
                raise StateError(
                    f"state: {path} belongs to {name} {facts.get(name)!r}, not {value!r}; give this device its own "
                    f"state folder, or {mend}"
                )
        try:
            epoch = int(facts.get("epoch", 0))
            follows = tuple(map(str, facts.get("follows", ())))
            return Private(tensors, int(facts["round"]), str(facts["base_digest"]), str(facts["run"]), epoch, follows)
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"state: {path} is damaged ({error}); {mend}") from None

    # -- the global model

    def model_part(self, transfer: str) -> Path:
        """Where the global model of this transfer is put together."""
        return self.folder / f"model-{transfer}.part"

    def adopt_model(self, transfer: str, less: bool = False) -> bytes:
        """The finished transfer becomes the global model on flash, by one rename; of changes, what they make of the one
        that is there, whose sha256 is given back. Raises :class:`UnfitError` for changes to another. Only what came as
        ``less`` than the model may be changes: what is announced as a whole one and begins as they do is no model."""
        part = self.model_part(transfer)
        if not (less and self._are_changes(part)):
            tensor_files.rename(part, self._model)
            return b""
        try:
            found = tensor_files.read(part, "it is fetched again")
            after = applied(found, self.model())
        except (WireError, StateError) as error:
            raise UnfitError(f"what changed of the global model is of no use here: {error}") from None
        tensor_files.write(self._model, after)
        tensor_files.remove(part)
        return made_by(found)

    @staticmethod
    def _are_changes(part: Path) -> bool:
        try:
            with part.open("rb") as file:
                return are_changes(file.read(16))
        except OSError as error:
            raise StateError(f"state: {part} cannot be read: {error.strerror}; it is fetched again") from None

    def model_digests(self) -> tuple[bytes, bytes]:
        """sha256 of the global model on flash, or of the one that a part of lies there, read again, and of the file;
        empty where there is none."""
        if not self._model.exists():
            return b"", b""
        data = self.model()
        return model_of(data), hashlib.sha256(data).digest()

    def model(self) -> bytes:
        """The global model on flash, or what this device keeps of it."""
        return tensor_files.read(self._model, "delete it; it is fetched again")

    def clear_parts(self, keep: str = "") -> None:
        """Remove unfinished global models, except that of the transfer ``keep``, and bundles that a cut left half
        written."""
        before = (self.folder / "body.bin", *self.folder.glob("body-*.part"))  # what format 1 called them
        for old in (*before, *self.folder.glob(".candidate.*.part")):
            tensor_files.remove(old)
        for part in self.folder.glob("model-*.part"):
            if not keep or part != self.model_part(keep):
                tensor_files.remove(part)

    # -- the run's kit

    def kit_part(self, transfer: str) -> Path:
        """Where the kit of this transfer is put together."""
        return self.folder / f"kit-{transfer}.part"

    def adopt_kit(self, transfer: str) -> None:
        """The finished transfer becomes the kit on flash, by one rename; no other part of one stays."""
        tensor_files.rename(self.kit_part(transfer), self.kit_path)
        for part in self.folder.glob("kit-*.part"):
            tensor_files.remove(part)

    # -- the protocol's memory and the traffic

    def protocol(self) -> DeviceState:
        """The protocol's memory as it was saved last; a new one on a new device, or on one that has lost it: its boots
        count from the clock, in milliseconds, as it may have connected often before, also within this second."""
        if said := has_left(self.folder):
            raise StateError(f"state: {said}")
        if not self._protocol.exists():
            return DeviceState(boot=max(0, int(1000 * time.time())))
        mend = f"move {self._protocol} away; the device then introduces itself anew"
        data = tensor_files.read(self._protocol, mend)
        digest, rest = data[:32], data[32:]
        if hashlib.sha256(rest).digest() != digest:
            raise StateError(f"state: {self._protocol} is damaged; {mend}")
        try:
            return DeviceState.load(rest)
        except StateError as error:  # whole, as its checksum says
            reason = str(error).partition(";")[0]
            raise StateError(
                f"state: {self._protocol} is of another Talaria ({reason}); update this one, or {mend}"
            ) from None

    def save_protocol(self, state: DeviceState) -> None:
        """Keep the protocol's memory, durably."""
        data = state.dump()
        tensor_files.write(self._protocol, hashlib.sha256(data).digest() + data)

    # -- the end

    def left(self) -> None:
        """From now on this device takes part no more."""
        fleet = self._facts["fleet"]
        tensor_files.write(self.folder / LEFT, json.dumps({"fleet": fleet, "at": time.time()}).encode())

    def erase(self) -> None:
        """Remove all that this device learned and keeps in its folder; that it left stays known. Files of others stay,
        and so does the bundle in force, where predictors look for it."""
        try:
            for pattern in KEPT:
                for path in self.folder.glob(pattern):
                    path.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                (self.folder / "bundles").rmdir()
            durable.flush(self.folder)
        except OSError as error:
            raise tensor_files.DiskError(
                f"state: {self.folder} could not be erased: {error.strerror}; delete what is in it by hand"
            ) from None

    # -- what it cost

    def spent(self) -> dict[str, float | str]:
        """What differential privacy has cost this device, as its coordinator counts, and by whose noise; empty where
        nothing is counted."""
        with suppress(OSError, ValueError, AttributeError, TypeError, KeyError, OverflowError, RecursionError):
            found = json.loads(durable.read(self._spent))
            form = {"form": found["form"]} if isinstance(found.get("form"), str) else {}
            return {"epsilon": float(found["epsilon"]), "delta": float(found["delta"]), **form}
        return {}

    def keep_spent(self, spent: Mapping[str, float | str]) -> None:
        """Keep what the next round will have cost; nothing where nothing is counted."""
        if spent and spent != self.spent():
            tensor_files.write(self._spent, json.dumps(dict(spent)).encode())

    def traffic(self) -> dict[int, dict[str, int]]:
        """Bytes ``up`` and ``down`` by round; the global model that a round begins from is its own download, and the
        last global model stands under the round after the last."""
        with suppress(OSError, ValueError, AttributeError, TypeError, KeyError, OverflowError, RecursionError):
            found = json.loads(durable.read(self._traffic))
            return {int(k): {n: int(v[n]) for n in ("up", "down")} for k, v in found.items()}
        return {}

    def save_traffic(self, traffic: Mapping[int, Mapping[str, int]]) -> None:
        """Keep the traffic."""
        tensor_files.write(self._traffic, json.dumps({str(k): dict(v) for k, v in traffic.items()}).encode())


def has_left(folder: Path) -> str:
    """What to say of a device whose owner took it out of its fleet; empty for any other."""
    path = folder / LEFT
    if not os.path.exists(path):  # Path.exists raises where the folder is closed to this user
        return ""
    try:
        found = json.loads(durable.read(path))
        fleet, day = str(found["fleet"])[:36], datetime.fromtimestamp(float(found["at"])).date().isoformat()
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        fleet, day = "", ""
    where = f" {fleet!r} for good on {day}" if day else " for good"
    return (
        f"this device left its fleet{where}, by its owner's hand; to take part again, its operator readmits it "
        f"(`talaria coordinator readmit`), and {path} is deleted"
    )


def _round(record: Private | Trained) -> tuple[int, str, str]:
    return record.round, record.base_digest, record.run


def _sealed(facts: Mapping[str, Any], data: bytes) -> bytes:
    text = json.dumps(dict(facts), sort_keys=True).encode()
    return hashlib.sha256(text + b"\n" + data).hexdigest().encode() + b"\n" + text + b"\n" + data


def _opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    digest, _, rest = data.partition(b"\n")
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        raise StateError("state: the update on flash is damaged")
    text, _, update = rest.partition(b"\n")
    return json.loads(text), update
