""":class:`Secure`: the coordinator's side of secure rounds, over the store. It uses no network.

What is said is kept before it is answered, in order: after a crash the same words, given to the same state machine
(:mod:`talaria.privacy.coordinator`), are the same round. Masked updates are kept as any others are; a word of that step
is the digest of one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from threading import Condition, RLock

import msgpack

from talaria import time
from talaria.aggregate.base import Aggregator
from talaria.errors import AggregationError, StateError, WireError
from talaria.federated import rounds
from talaria.federated.private_rule import coordinates_of
from talaria.federated.run import Run
from talaria.model.masks import ChannelMask
from talaria.privacy.clipping import WITHIN
from talaria.privacy.coordinator import CoordinatorHalf, NoSecretError, Opened
from talaria.privacy.messages import Masked, Message, decode
from talaria.privacy.rule import inner_of, with_sum
from talaria.privacy.terms import Terms
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol import words
from talaria.tensors import Tensors
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.identity.membership import badge_key
from talaria_coordinator.storage.blobs import Blobs
from talaria_coordinator.storage.database import SilentError
from talaria_coordinator.storage.store import Store

PHASES = ("adverts", "shares", "masked", "agreed", "openings", "done")
TERMS = -1
MOST_WEIGHT = 4096
"""The largest weight of a device, in samples, where the fleet does not say it."""


class Secure:
    """The secure rounds of one fleet, one at a time. Its methods may be called from several threads."""

    def __init__(self, fleet: str, run: Run, rule: Aggregator, authority: bytes, store: Store, blobs: Blobs) -> None:
        """``rule`` is private (:func:`talaria.privacy.rule.private`); ``authority`` signs members' badges."""
        self.fleet, self.run, self.rule, self.authority = fleet, run, rule, authority
        self.store, self.blobs = store, blobs
        self._mean = inner_of(rule)
        self._line = RLock()
        self._half: tuple[int, CoordinatorHalf] | None = None
        self._settled, self._unsettled = Condition(self._line), 0
        """How many masked updates are in the sum and not in the store yet."""

    def begin(self, attempt: int, round: int, devices: int, clip: float | None = None) -> Terms:
        """The terms of a new attempt at a round that ``devices`` are asked for; kept before they are told. ``clip``
        is the length of differences, where it moves.

        Raises :class:`AggregationError` where these are too few to hide each other.
        """
        most = 0
        if self._mean.weighted:
            most = min(self._mean.privacy.most_weight or MOST_WEIGHT, (1 << 31) // devices - 1)
        coordinates, nonce = coordinates_of(self.run), secrets.token_bytes(16)
        terms = self._mean.terms(
            coordinates, devices, most, clip, fleet=self.fleet, round=round, attempt=attempt, nonce=nonce
        )
        with self._line:
            self._settle()
            self.store.words.keep(self.fleet, attempt, [(TERMS, "", terms.encode())])
            self._half = attempt, CoordinatorHalf(terms, coordinates, self.authority)
        return terms

    def said(self, heard: Sequence[a.WordSaid]) -> list[e.WordKept | e.WordRefused]:
        """Check and keep devices' words, those of an attempt together: one answer for each, in their order."""
        answers: list[e.WordKept | e.WordRefused] = []
        with self._line:
            for attempt, each in groupby(heard, lambda word: word.attempt):
                new = list[tuple[int, str, bytes]]()
                answers += [self._taken(word, new) for word in each]
                if new:
                    try:
                        self.store.words.keep(self.fleet, attempt, new)
                    except StateError:
                        self._half = None  # kept they are not, so they are not said
                        raise
        return answers

    def _taken(self, word: a.WordSaid, new: list[tuple[int, str, bytes]]) -> e.WordKept | e.WordRefused:
        """Check one word and let the round hear it; one that is to be kept is added to ``new``."""
        now, stale = time.monotonic(), False
        try:
            half = self._known(word.attempt)
        except GoneError as error:
            return e.WordRefused(now, word.attempt, word.device, str(error), offence=False)
        try:
            message = decode(word.data, words.MOST)
            stale = getattr(message, "terms", b"") != half.terms.digest
            self._require_own(word, message)
            # A device that lost its state has new keys: no offence, and nothing that could go on.
            stale = stale or (word.step == 0 and word.device in half.came)
            if half.receive(message):
                new.append((word.step, word.device, word.data))
        except (WireError, AggregationError) as error:
            offence = not stale and isinstance(error, WireError)
            return e.WordRefused(now, word.attempt, word.device, str(error), offence)
        return e.WordKept(now, word.attempt, word.device, word.step)

    @contextmanager
    def masked(self, attempt: int, device: str, data: bytes) -> Iterator[ChannelMask | None]:
        """Take a masked update, which is to be kept inside of this: a step ends before or after both, and other
        updates are taken meanwhile. It gives the mask that the device said.

        Raises :class:`WireError` where it does not fit, :class:`LateError` where the sum is made already, and
        :class:`GoneError` where it is for another attempt."""
        with self._line:
            half = self._known(attempt)
            if half.phase != "masked":
                raise LateError("the others went on")
            message = decode(data)
            if not isinstance(message, Masked):  # what a device said in another step is known, and would pass
                raise WireError(f"secure: {message.TYPE!r} in the place of a masked update")
            if message.terms != half.terms.digest:
                raise GoneError(f"attempt {attempt}: a masked update of another attempt that had this number")
            if message.device != device:
                raise WireError("secure: a masked update under another device's name")
            half.receive(message)
            mask = half.masks[device]
            self._unsettled += 1
        kept = False
        try:
            yield mask
            kept = True
        finally:
            with self._line:
                self._unsettled -= 1
                self._settled.notify_all()
                if not kept:
                    self._half = None  # the round is as the store has it

    def _settle(self) -> None:
        """Wait, with the line, until all that was taken is kept."""
        self._settled.wait_for(lambda: not self._unsettled)

    def step_over(self, over: a.StepOver) -> tuple[e.NextStep | e.AbortRound, Mapping[str, str]]:
        """Go on with those who have said their word. Beside, who was found to lie, and how."""
        with self._line:
            self._settle()
            liars = dict[str, str]()
            try:
                half = self._known(over.attempt)
            except GoneError as error:  # it was called off while the disk refused, and another has begun since
                return e.AbortRound(time.monotonic(), over.attempt, str(error)), liars
            if PHASES.index(half.phase) == over.step:
                came = half.came
                try:
                    said = half.proceed()
                    if half.phase == "openings":
                        half.require_holders()
                    if half.phase == "done":
                        half.opened()
                        liars.update(half.liars)
                except (AggregationError, WireError) as error:
                    self._half = None  # what went on in memory alone is forgotten
                    if isinstance(error, NoSecretError):
                        liars[error.device] = str(error)
                    return e.AbortRound(time.monotonic(), over.attempt, str(error)), liars
                self.store.words.keep(self.fleet, over.attempt, [(over.step, "", msgpack.packb(list(came)))])
                written = {id(message): message.encode() for message in said.values()}
                told = {name: written[id(message)] for name, message in said.items()}
                step = PHASES.index(half.phase)
                now = time.monotonic()
                return e.NextStep(now, over.attempt, step, frozenset(came), frozenset(), told), liars
            return self._where(over.attempt, half), liars

    def resume(self, attempt: int, cohort: Sequence[str]) -> e.NextStep | e.AbortRound:
        """After a start: where an attempt that is open stands."""
        with self._line:
            try:
                half = self._known(attempt)
            except SilentError:  # nothing is lost, and all begins anew once it answers
                raise
            except StateError as error:
                return e.AbortRound(time.monotonic(), attempt, str(error))
            return self._where(attempt, half, cohort)

    def is_agreed(self, attempt: int) -> bool:
        """Whether devices were asked to open the sum of an attempt."""
        with self._line:
            try:
                return self._known(attempt).phase in PHASES[4:]
            except SilentError:
                raise
            except StateError:
                return False

    def survivors(self, attempt: int) -> tuple[str, ...]:
        """Whose updates are in the sum that devices were asked to open."""
        with self._line:
            return self._known(attempt).survivors

    def fold(self, attempt: int, shared: Tensors, server: Tensors) -> tuple[Tensors, Tensors, Opened]:
        """The global model and server state after a round whose sum is open, and that sum."""
        with self._line:
            half = self._known(attempt)
            opened: Opened = half.opened()
            kept = [half.masks[name] for name in opened.survivors]
        rule = with_sum(self.rule, half.coordinates, opened, kept, secrets.randbits(62))
        after, state = rounds.close(self.run, shared, server, (), rule)
        return after, state, opened

    @staticmethod
    def told(opened: Opened) -> dict[str, float]:
        """The means that may be told as they are: how many were cut has its noise yet to come."""
        return {name: value for name, value in opened.metrics.items() if name != WITHIN}

    def _where(self, attempt: int, half: CoordinatorHalf, cohort: Sequence[str] = ()) -> e.NextStep:
        step, came = PHASES.index(half.phase), frozenset(half.came)
        again = half.again()
        members = frozenset(cohort) if step == 0 else came | frozenset(again)
        told = {name: message.encode() for name, message in again.items()}
        return e.NextStep(time.monotonic(), attempt, step, members, came, told)

    def _known(self, attempt: int) -> CoordinatorHalf:
        """The round as it was said so far; from memory, or from the store once more."""
        if self._half is not None and self._half[0] == attempt:
            return self._half[1]
        self._settle()
        half = None
        for step, device, data in self.store.words.of(self.fleet, attempt):
            if step == TERMS:
                terms = Terms.decode(data)
                half = CoordinatorHalf(terms, coordinates_of(self.run), self.authority)
            elif half is not None and device:
                half.receive(decode(self.blobs.get(data.hex(), again=False) if step == words.UPLOAD else data))
            elif half is not None:
                self._went_on(half, msgpack.unpackb(data))
        if half is None:
            raise GoneError(f"attempt {attempt}: what was said in this secure round is not in the store")
        self._half = attempt, half
        return half

    @staticmethod
    def _went_on(half: CoordinatorHalf, came: Sequence[str]) -> None:
        if list(half.came) != list(came):
            raise StateError("secure: the words in the store are not those that a round went on with; restore a backup")
        half.proceed()

    @staticmethod
    def _require_own(word: a.WordSaid, message: Message) -> None:
        kinds = ("advert", "shares", "masked", "agreed", "opening")
        if kinds[word.step] != message.TYPE or word.step == words.UPLOAD:
            raise WireError(f"secure: {message.TYPE!r} as the word of step {word.step}")
        if getattr(message, "device", "") != word.device:
            raise WireError(f"secure: {word.device!r} speaks for {getattr(message, 'device', '')!r}")


def secured(secure: Secure | None) -> Secure:
    """Who adds up a secure round. Raises :class:`~talaria.errors.StateError` where the fleet's rounds are not secure
    any more: nobody else can read what came in for it."""
    if secure is None:
        raise StateError(
            "a secure round is open, or not committed yet, and this fleet's rounds are not secure any more: set "
            "[privacy] secure = true once more until it is over, or was called off by `talaria coordinator abort`"
        )
    return secure


class GoneError(StateError):
    """Nothing is known of this attempt at a secure round: another one has begun since."""


class LateError(StateError):
    """A masked update came when those who are there had gone on."""


def secure_of(config: FleetConfig, rule: Aggregator | None, store: Store, blobs: Blobs) -> Secure | None:
    """What makes a fleet's sums, where only sums may open; ``rule`` is private then. Raises
    :class:`~talaria.errors.ConfigError` where its keys are from before there were badges."""
    if config.privacy is None or not config.privacy.rule.secure or config.identity is None or rule is None:
        return None
    return Secure(config.name, config.run, rule, badge_key(config.identity, config.name), store, blobs)
