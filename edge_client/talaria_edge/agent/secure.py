""":class:`Part`: a device's part in secure rounds, in a worker thread and without network.

``secure.bin`` in the state folder holds it: the terms, the protocol's half with its secrets
(:mod:`talaria.privacy.device`), and whether it has helped to open a sum. It is on flash before a word is said: a
reboot says the same once more, and no mask covers two updates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock

import msgpack

from talaria.errors import ConfigError, StateError, WireError
from talaria.federated.private_rule import coordinates_of
from talaria.federated.run import Run
from talaria.identity import badges
from talaria.identity.credentials import Credentials
from talaria.privacy.device import DeviceHalf, Identity, require_company
from talaria.privacy.in_process import Contribution
from talaria.privacy.messages import Agreed, Masked, Message, Opening, Shares, decode
from talaria.privacy.terms import Terms
from talaria.protocol import words
from talaria_edge.config import DeviceConfig
from talaria_edge.storage import tensor_files
from talaria_edge.storage.state import SECURE

FORMAT = 1
MARK, MOST_MARKS = 8, 1 << 14
Bring = Callable[[Terms], Contribution]
_STEPS: dict[type, int] = {Shares: 1, Masked: words.UPLOAD, Agreed: 3, Opening: 4}


@dataclass(frozen=True)
class Said:
    """This device's word of ``step``, which is on flash."""

    step: int
    data: bytes


@dataclass(frozen=True)
class _Kept:
    terms: bytes
    base_digest: str
    half: bytes
    masked: bytes = b""
    opened: bool = False
    past: bytes = b""
    """Which sums it has helped to open before this one, newest last, :data:`MARK` bytes each: a coordinator that goes
    back in time, restored or not, asks for those rounds again."""


class Part:
    """One device's part in its fleet's secure rounds, one at a time."""

    def __init__(self, config: DeviceConfig) -> None:
        self.config, self._path = config, config.state / SECURE
        self._half: DeviceHalf | None = None
        self._line = Lock()  # two words may be worked out at once, each in a thread of its own

    def require_wanted(self, terms: bytes) -> None:
        """Raise :class:`ConfigError` where this device must not take part in a round of such ``terms``, for which it
        then need not train: its owner wants more company or noise."""
        self._require_wanted(Terms.decode(terms))

    def upload(self, attempt: int) -> bytes:
        """The masked update of ``attempt`` that is on flash, or nothing; nothing too where its owner wants more company
        or noise by now."""
        kept = self._read()
        if kept is None or (asked := Terms.decode(kept.terms)).attempt != attempt:
            return b""
        try:
            self._require_wanted(asked)
        except ConfigError:
            return b""
        return kept.masked

    def begin(self, run: Run, terms: bytes, attempt: int, round: int, base_digest: str, bring: Bring) -> Said:
        """The first word in ``attempt``, to which ``bring`` gives what was learned in ``round``; after a reboot the
        same once more, or the masked update where that is on flash.

        Raises :class:`ConfigError` where this device must not take part: its owner wants more company or noise, or it
        has helped to open a sum of this round already. :class:`WireError` for terms that are not of this round.
        """
        with self._line:
            return self._begin(run, Terms.decode(terms), terms, attempt, round, base_digest, bring)

    def answer(self, run: Run, attempt: int, data: bytes) -> Said | None:
        """What to say to the coordinator's word; None where nothing is known of that round any more.

        Raises :class:`WireError` for what must not be answered, and :class:`ConfigError` where this device's owner
        wants more company or noise by now.
        """
        with self._line:
            return self._answer(run, attempt, data)

    def _begin(
        self, run: Run, asked: Terms, terms: bytes, attempt: int, round: int, base_digest: str, bring: Bring
    ) -> Said:
        if (asked.fleet, asked.attempt, asked.round) != (self.config.fleet, attempt, round):
            raise WireError("secure: these are the terms of another round")
        self._require_wanted(asked)
        coordinates, identity, kept = coordinates_of(run), self._identity(), self._read()
        if kept is not None and kept.terms == terms:
            self._half = DeviceHalf.load(kept.half, asked, coordinates, identity)
            if kept.masked:
                return Said(words.UPLOAD, kept.masked)
        else:
            past = b"" if kept is None else _opened(kept)
            if _mark(round, base_digest) in _marks(past):
                raise ConfigError(
                    f"{words.OPENED} of round {round}; a second one, of almost the same devices, could show what one "
                    "of them sent"
                )
            one = bring(asked)
            self._half = DeviceHalf.begin(
                asked, coordinates, identity, one.tensors,
                mask=one.mask, weight=one.weight, metrics=one.metrics, least=self.config.least,
            )  # fmt: skip
            self._write(_Kept(terms, base_digest, self._half.save(), past=past))
        return Said(0, self._half.advert().encode())

    def _answer(self, run: Run, attempt: int, data: bytes) -> Said | None:
        kept = self._read()
        if kept is None:
            return None
        terms = Terms.decode(kept.terms)
        if terms.attempt != attempt:
            return None
        self._require_wanted(terms)
        if self._half is None or self._half.terms != terms:
            self._half = DeviceHalf.load(kept.half, terms, coordinates_of(run), self._identity())
        said: Message = self._half.receive(decode(data, words.MOST))
        after = replace(kept, half=self._half.save(), opened=kept.opened or isinstance(said, Opening))
        if isinstance(said, Masked):
            after = replace(after, masked=said.encode())
        if after != kept:
            self._write(after)
        return Said(_STEPS[type(said)], said.encode())

    def _require_wanted(self, asked: Terms) -> None:
        """Raise :class:`ConfigError` where this device's owner wants more company or noise, perhaps only by now. What
        the coordinator adds to a sum that it sees does not count: no device knows of it."""
        require_company(asked, self.config.least)
        have = asked.noise_by_devices
        if have < self.config.least_noise:
            raise ConfigError(
                f"secure: this device's owner wants noise of {self.config.least_noise:g} by devices ([privacy] "
                f"least_noise), and this round has {have:.3g}"
            )

    def _identity(self) -> Identity:
        folder = self.config.identity
        if folder is None:
            raise ConfigError(
                "secure: this device has no keys that others could know it by; join the fleet with `talaria edge join`"
            )
        own = Credentials.load(folder)
        badge, authority = badges.read(folder / "tls.crt", folder / "ca.crt", own.fleet, own.device)
        return Identity(own.device, own.signer, badge, authority)

    def _read(self) -> _Kept | None:
        """What is on flash; None where there is nothing, or it is damaged: the device then takes part anew, with new
        keys."""
        if not self._path.exists():
            return None
        try:
            data = tensor_files.read(self._path, "delete it; this device then takes part anew")
            if hashlib.sha256(data[32:]).digest() != data[:32]:
                return None
            form, *values = msgpack.unpackb(data[32:])
            return _Kept(*values) if form == FORMAT else None
        except (StateError, ValueError, TypeError, msgpack.exceptions.UnpackException):
            return None

    def _write(self, kept: _Kept) -> None:
        data = msgpack.packb([FORMAT, kept.terms, kept.base_digest, kept.half, kept.masked, kept.opened, kept.past])
        tensor_files.write(self._path, hashlib.sha256(data).digest() + data)


def _opened(kept: _Kept) -> bytes:
    """The marks of all sums that it has helped to open by now."""
    last = _mark(Terms.decode(kept.terms).round, kept.base_digest) if kept.opened else b""
    return (kept.past + last)[-MARK * MOST_MARKS :]


def _mark(round: int, base_digest: str) -> bytes:
    return hashlib.sha256(f"{round}/{base_digest}".encode()).digest()[:MARK]


def _marks(past: bytes) -> set[bytes]:
    return {past[i : i + MARK] for i in range(0, len(past), MARK)}
