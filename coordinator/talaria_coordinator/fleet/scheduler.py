""":class:`Conductor`: opens the rounds of a fleet, folds those that closed, and retries what failed.

In an asynchronous run a round is a buffer (:mod:`talaria.protocol.coordinator.async_rounds`), and each that fills makes
a version.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from talaria import seeds, time
from talaria.errors import StateError, TalariaError, said
from talaria.protocol import actions as a
from talaria.protocol import events as e
from talaria.protocol.coordinator.machine import CoordinatorState
from talaria.protocol.coordinator.presence import LEFT
from talaria.protocol.coordinator.state import LIVE, Attempt, Peer
from talaria_coordinator.config.fleet import FleetConfig
from talaria_coordinator.fleet import cohort
from talaria_coordinator.fleet.aggregation import Learning, LeftOut, Made, NothingLeft, passing
from talaria_coordinator.fleet.briefing import briefing
from talaria_coordinator.fleet.hands import AGAIN_S, Hands, leaves_within
from talaria_coordinator.fleet.life import gates
from talaria_coordinator.fleet.notices import Folded, FoldFailed
from talaria_coordinator.fleet.operator_commands import CALLED_OFF
from talaria_coordinator.fleet.secure import Secure, secured
from talaria_coordinator.fleet.waiting import Gathering, Patience, waits
from talaria_coordinator.storage.records import Fleet, Spent
from talaria_coordinator.storage.runs import require_same_run
from talaria_coordinator.storage.store import Store

logger = logging.getLogger(__name__)

AWAY_S = 120.0
"""Seconds after which somebody else tries a run in the place of a device that is away."""
REST_S = 60.0
"""Seconds after which it is looked again who is away for a season."""
UNANNOUNCED = "the coordinator or its database stopped before it was announced"

FoldedElsewhere = Callable[[Fleet, Sequence[a.Counted]], Coroutine[Any, Any, Made | None]]


class Conductor:
    """One fleet's rounds. ``fleet`` is its record as it was last read."""

    def __init__(
        self, config: FleetConfig, store: Store, learning: Learning, hands: Hands, grace: float,
        secure: Secure | None = None, folded: FoldedElsewhere | None = None,
    ) -> None:  # fmt: skip
        """A device that has been away for ``grace`` seconds has left. With ``secure`` nobody sees single updates.
        ``folded`` has others fold updates; None, and what it leaves undone: it is done here."""
        self.config, self.store, self._learning, self._hands = config, store, learning, hands
        self._draw, self._secure, self._folded, self._run = config.draw, secure, folded, config.run.to_json()
        self._grace, self._not_before, self._failures = grace, 0.0, 0
        self._remembered: Collection[int] = ()
        """The attempts that the protocol's machine knows: of some a device may still deliver."""
        self._called_off: set[int] = set()
        self._here, self._shut_out, self._retired = set[str](), set[str](), set[str]()
        self._resting: frozenset[str] = frozenset()
        self._look_again = 0.0
        self._begun = 0.0, 0.0
        """When it began to serve, and when the last of all devices was seen until then."""
        self._waiting, self._gathering = Patience(), Gathering()
        self.down = 0
        """Bytes of global models that went to devices since the last round was committed."""

    def inspect(self) -> int:
        """Read all that serving needs, before anything is said or written: another coordinator must not end for one
        that cannot go on. The fleet's last epoch; 0 where it is new.

        Raises :class:`~talaria.errors.ConfigError` where the stored fleet learns another run, and
        :class:`~talaria.errors.StateError` where something is missing or damaged, or cannot be what it seems.
        """
        known = self.store.fleets.get(self.config.name)
        _ = self._learning.aggregator
        if known is None:
            others = self.store.fleets.all()
            if not others:
                self._learning.require_unused()
            self._learning.require_beside(others)
            return 0
        require_same_run(known, self.config.run.to_json())
        self._learning.require(known)
        state = self._machine()
        current = state.attempt
        if current is not None and current.secure and current.phase in ("open", "closed"):
            secured(self._secure)
        return known.epoch

    def begin(self, above: int = 0) -> CoordinatorState:
        """Enter the store as a new epoch, above ``above``; the machine as it was saved last."""
        name, run = self.config.name, self.config.run.to_json()
        known = self.store.fleets.get(name)
        model_digest, server = (known.model_digest, known.server) if known else self._learning.first()
        self.fleet: Fleet = self.store.fleets.enter(name, run, model_digest, server, above=above)
        self.refresh()
        self._begun = time.time(), max((d.seen for d in self.store.devices.of(name)), default=0.0)
        state = self._machine()
        self._remembered = state.attempts
        return state

    def _machine(self) -> CoordinatorState:
        saved = self.store.fleets.machine(self.config.name)
        if saved:
            return CoordinatorState.load(saved)
        # A new fleet, or one whose protocol state a migration let go of: the store knows who is shut out.
        devices = self.store.devices.of(self.config.name)
        return CoordinatorState(peers={d.device: Peer(out=d.quarantine) for d in devices if d.quarantine})

    def refresh(self) -> None:
        """Read the fleet's record again."""
        fleet = self.store.fleets.get(self.config.name)
        if fleet is None:
            raise StateError(f"fleet {self.config.name!r} is gone from the store; restore it from a backup")
        self.fleet = fleet
        self._retired = self.store.devices.retired(self.config.name)

    def left(self, device: str) -> None:
        """Its owner took a device out of the fleet for good; said twice, it is kept once."""
        if device not in self._retired:
            self.store.devices.retire(self.config.name, device, True, by="owner")
            self._hands.tell("left", device=device, reason=LEFT)
            self.refresh()

    @property
    def over(self) -> bool:
        """Whether all rounds are done."""
        return self.fleet.round >= self.config.run.rounds

    def stored(self, state: CoordinatorState) -> dict[tuple[int, str], bytes]:
        """The sha256 of the updates in the store that may still count, by (round, device)."""
        stale = [number for number, machine in state.attempts.items() if machine.stale]
        found = {}
        for row in self.store.attempts.unclosed(self.config.name, stale):
            for update in self.store.updates.of(self.config.name, row.attempt):
                if update.status == "stored":
                    found[row.attempt, update.device] = bytes.fromhex(update.digest)
        return found

    def settle(self, state: CoordinatorState) -> None:
        """After a start: fail what was open in the store and is not in the machine, and call off there what an order
        has called off while nobody served the fleet, or was about to when this coordinator was killed."""
        name, current = self.config.name, state.attempt
        for left in self.store.attempts.unclosed(name):
            machine = state.attempts.get(left.attempt)
            gone = machine is None or machine.phase in ("failed", "carried")
            if gone and self._is_agreed(left.attempt):
                self._pass(left.attempt, UNANNOUNCED)
            elif gone:
                self.store.attempts.fail(name, left.attempt, UNANNOUNCED, self._remembered)
        if current is None or current.phase not in ("open", "closed"):
            return
        row = self.store.attempts.get(name, current.number)
        off = self.fleet.status == "aborted" or (row is not None and row.failure is not None)
        if off and self.call_off(current.number, CALLED_OFF):
            self._hands.feed(e.AbortRound(time.monotonic(), current.number, CALLED_OFF))

    def amended(self, state: CoordinatorState) -> e.Amend:
        """What of a round that is open has changed since it was opened: in fleet.toml, or by an order."""
        now, roster = time.monotonic(), self.fleet.roster
        named = tuple(sorted(set(self.config.members) - self._retired))
        if roster and named and named != roster:
            self._fix(named)
            roster = named
        asked = {name for attempt in state.attempts.values() for name in attempt.cohort}
        gone = frozenset(asked - set(roster) if roster else ())
        current = state.attempt
        quorum = target = None
        if current is not None and not (current.secure or current.stale):
            stay = sum(name not in gone or part.phase == "stored" for name, part in current.cohort.items())
            target = min(current.target, stay)
            quorum = cohort.quorum(self._draw, stay, target)
        return e.Amend(now, quorum, target, self._seconds(), gone, "this device is no member of the fleet any more")

    def caught_up(self) -> None:
        """The fleet's record has moved on to a later global model, and the next round may begin from that."""
        self.refresh()
        self.at_once()

    # -- opening

    def at_once(self) -> None:
        """Do not wait any longer before the next try."""
        self._not_before, self._failures = 0.0, 0

    def advance(self, state: CoordinatorState) -> None:
        """Open the next round where nothing stands in the way."""
        current = state.attempt
        busy = current is not None and current.phase in ("open", "closed")
        if current is not None and current.phase == "open" and self.fleet.life.canary:
            self._relieve(state, current)
        # Where the fleet learns another run by now, rounds of that are for who begins anew with it.
        goes_on = (self.fleet.status, self.fleet.run) == ("running", self._run)
        if busy or self.over or not goes_on or time.monotonic() < self._not_before:
            return
        online = {name for name, peer in state.peers.items() if peer.online}
        self._here, self._shut_out = online, set(state.quarantined())
        now = time.monotonic()
        roster = self._awake(self._refilled() or self._gathered(), now)
        tried, draw = self.fleet.life.canary, self._draw
        if tried:
            roster = self._trying(roster, state, now)
            draw = replace(draw, run=replace(draw.run, fraction=1.0), over=0.0)
        gone = {name for name in roster if name not in state.peers or state.peers[name].away(now, self._grace)}
        asked = cohort.ask(draw, self.fleet.round + 1, roster, online, state.quarantined(), gone)
        if asked is None:
            self._wait(roster)
            return
        self._waiting.over(time.monotonic())
        if reason := self._learning.unaffordable(self.fleet, asked.cohort):
            self._end(reason)
            return
        row = self.store.attempts.open(self.config.name, asked.round, asked.cohort, self.fleet.model_digest)
        self._hands.tell(
            "round-opened", attempt=row.attempt, round=asked.round, cohort=len(asked.cohort), online=asked.online
        )
        terms, seconds = self._terms(row.attempt, asked), self._seconds()
        told = briefing(asked, terms, self.fleet, self._learning, self.store)
        step_s = 0.0 if self._secure is None or self.config.privacy is None else self.config.privacy.step_s
        since = self.fleet.life.tried + 1
        opened = e.OpenRound(
            time.monotonic(), row.attempt, told, seconds, asked.quorum, asked.target, asked.stale, step_s, since
        )
        self._hands.feed(opened)

    def _seconds(self) -> float | None:
        """How long a round that opens now waits; None without end."""
        return self.config.deadline_s or None

    def _terms(self, attempt: int, asked: cohort.Asked) -> dict[str, str]:
        """What all devices of a secure round agree on, as they are told it."""
        if self._secure is None:
            return {}
        terms = self._secure.begin(attempt, asked.round, len(asked.cohort), self._learning.clip(self.fleet))
        return {"secure": base64.b64encode(terms.encode()).decode()}

    def _end(self, reason: str) -> None:
        """No round follows, though some were asked for: the fleet serves what it has learned."""
        self.store.fleets.set_status(self.config.name, "paused")
        self.refresh()
        self._hands.tell("budget-spent", round=self.fleet.round, reason=reason)

    def _wait(self, roster: Sequence[str]) -> None:
        """Tell what is waited for: nobody should have to guess who is missing."""
        if not self._waiting.due(time.monotonic()):
            return
        devices = self.store.devices.of(self.config.name)
        found = waits(self._draw, self.fleet.round + 1, roster, devices, self._here)
        if found is not None:
            self._hands.tell("waiting", **found.facts())

    def _refilled(self) -> tuple[str, ...]:
        """The roster, if there is one, without those who were shut out since and whose place another waits for."""
        roster = self.fleet.roster
        found, stay = roster, len(set(roster) - self._shut_out)
        if roster and self.config.grows:
            found = tuple(sorted({*roster, *self._new}))
        elif not self.config.members and (
            (stay < len(roster) and self.store.devices.able(self.config.name) > stay)
            or (roster and self._free and self._new)
        ):
            found = cohort.refilled(roster, self.store.devices.of(self.config.name), self._free)
        if found != roster:
            self._fix(found)
        return self.fleet.roster

    @property
    def _new(self) -> set[str]:
        """Who is here without a place in the roster, and may have one."""
        return self._here - set(self.fleet.roster) - self._shut_out - self._retired

    @property
    def _free(self) -> int:
        """Places that fleet.toml has by now beside those of the roster, which was fixed with fewer ``devices``."""
        config, taken = self.config, len(self.fleet.roster) + len(self._retired)
        return 0 if config.members or config.grows else max(0, config.devices - taken)

    def _awake(self, roster: tuple[str, ...], now: float) -> tuple[str, ...]:
        """The roster without those who are away for longer than a season; looked up again after a while."""
        if not self.config.away_days:
            return roster
        if now >= self._look_again:
            self._look_again = now + REST_S
            devices = self.store.devices.of(self.config.name)
            found = cohort.resting(roster, devices, self.config.away_days, time.time(), *self._begun)
            if found != self._resting:
                self._hands.tell("resting", devices=sorted(found))
            self._resting = found
        return tuple(name for name in roster if name not in self._resting or name in self._here)

    def _relieve(self, state: CoordinatorState, current: Attempt) -> None:
        """Call off a trial's round that waits for nobody but devices that are gone: others try in their place."""
        now = time.monotonic()
        late = [name for name, part in current.cohort.items() if part.phase in LIVE]
        others = {name for name in self.fleet.roster if name in state.peers and state.peers[name].online}
        if late and others - set(current.cohort) and all(_is_away(state, name, now) for name in late):
            reason = f"{', '.join(late)} of those who try the run are away; others try it in their place"
            if self.call_off(current.number, reason):
                self._hands.feed(e.AbortRound(now, current.number, reason))

    def _trying(self, roster: tuple[str, ...], state: CoordinatorState, now: float) -> tuple[str, ...]:
        """Those of the roster who try the run. Whoever of them left for good, was shut out or has been away for a good
        while gives its place to another that is here: a trial by nobody would never end. Who has refused the run is
        asked no more: it has said what there is to say, and one whose training diverges would let each round fail."""
        mine = set(self.fleet.life.canary["members"])
        away = {name for name in mine if _is_away(state, name, now)}
        stay = (mine & set(roster)) - self._shut_out - away
        free = sorted((set(roster) & self._here) - mine - self._shut_out)
        if len(stay) < len(mine) and free:
            order = seeds.order(len(free), self.config.run.seed, "", self.fleet.round + 1, "canary")
            mine = stay | {free[i] for i in order[: len(mine) - len(stay)]}
            self.store.runs.replace_canary(self.config.name, sorted(mine))
            self.refresh()
            self._hands.tell("canary-members", members=sorted(mine))
        said = gates(self.fleet, self.store)
        return tuple(name for name in roster if name in mine and said.get(name, True))

    def _fix(self, roster: tuple[str, ...]) -> None:
        self.store.fleets.set_roster(self.config.name, roster)
        self.refresh()
        self._hands.tell("roster", devices=list(roster))
        for name in sorted(self._here - set(roster)):
            self.not_asked(name)

    def not_asked(self, device: str) -> None:
        """Tell a device, and the operator, that no round will ask it, and why."""
        reason = cohort.why_not(self.config.members, self.fleet.roster, device, device in self._retired)
        if (self.config.grows or self._free) and device not in self._retired:
            return  # the next round asks it
        if self.fleet.roster and reason:
            self._hands.tell("not-asked", device=device, reason=reason)
            self._hands.feed(e.Tell(time.monotonic(), device, reason))

    def _gathered(self) -> tuple[str, ...]:
        """The roster, fixed once all that are waited for have come, or have been waited for long enough."""
        if not self.config.members and self.store.devices.able(self.config.name) < self.config.devices:
            return ()  # counted first, as this is asked each time that one of thousands comes
        devices, now = self.store.devices.of(self.config.name), time.monotonic()
        named = [name for name in self.config.members if name not in self._retired]
        if self.config.members and not named:
            return ()  # all have left for good
        roster = cohort.roster(named, self.config.devices, devices)
        if not roster and named:
            come = {d.device for d in devices if d.able}
            if self._gathering.over(self._draw, self.fleet.round + 1, come, self._here, now):
                roster = tuple(sorted(named))
                self._hands.tell("begun-without", missing=sorted(set(roster) - come))
        if roster:
            self._fix(roster)
        return roster

    # -- closing

    def closed(self, action: a.RoundClosed) -> None:
        """Fold a round that closed, unless that is done."""
        row = self.store.attempts.get(self.config.name, action.attempt)
        if row is None or row.closed is not None:
            # Committed before a crash that the machine does not remember.
            self._hands.feed(e.Committed(time.monotonic(), action.attempt))
            return
        self._hands.spawn(self._fold(action))

    def leave(self) -> None:
        """Try no fold anew that a full disk, say, has refused: it is made at the next start, as after a crash."""
        self._hands.leaving.set()

    async def _fold(self, action: a.RoundClosed) -> None:
        wait = AGAIN_S[0]
        while action.attempt not in self._called_off:
            try:
                folded = None if self._folded is None else await self._folded(self.fleet, action.counted)
                made = await asyncio.to_thread(self._commit, action, folded)
            except Exception as error:
                if action.attempt in self._called_off:
                    return
                if not passing(error):
                    if not isinstance(error, TalariaError):  # where, for the author of a rule
                        logger.error("%s: attempt %d: not foreseen", self.config.name, action.attempt, exc_info=error)
                    left = error.left if isinstance(error, NothingLeft) else ()
                    await self._hands.put(FoldFailed(action.attempt, said(error), left))
                    return
                now = self.store.fleets.get(self.config.name)
                if now is None or now.epoch != self.fleet.epoch:
                    raise
                self._hands.tell("error", attempt=action.attempt, error=said(error))
                if await leaves_within(self._hands.leaving, wait):
                    return
                wait = min(2 * wait, AGAIN_S[1])
            else:
                await self._hands.put(Folded(action.attempt, len(made.counted), action.missing, made.left))
                return

    def _commit(self, action: a.RoundClosed, folded: Made | None) -> Made:
        if folded is not None:
            made = folded
        elif action.secure:
            made = self._learning.fold_sum(self.fleet, action.counted, secured(self._secure), action.attempt)
        else:
            made = self._learning.fold(self.fleet, action.counted)
        self._record(action.attempt, made)
        return made

    def _record(self, attempt: int, made: Made) -> None:
        for out in made.left:
            self.store.updates.leave_out(self.config.name, out.entry.attempt, out.entry.device, out.reason)
        down = self.down
        self.store.attempts.commit(
            self.config.name,
            attempt,
            epoch=self.fleet.epoch,
            counted=[(entry.attempt, entry.device) for entry in made.counted],
            model_digest=made.model_digest,
            server=made.server,
            spent=self._learning.spent(made.server) if made.counted else self._paid(attempt),
            down=down,
            dense=self._learning.dense,
            means=made.means,
        )
        self.down -= down

    def _paid(self, attempt: int) -> Spent | None:
        """What privacy has cost with a sum that devices were asked to open and that is not used: as much."""
        return None if self._secure is None else self._learning.paid(self.fleet, self._secure.survivors(attempt))

    def folded(self, event: Folded) -> None:
        """A round is committed."""
        self.refresh()
        self._failures = 0
        facts: Mapping[str, Any] = {
            "counted": event.counted,
            "missing": list(event.missing),
            "model_digest": self.fleet.model_digest,
        }
        if self.config.gateways:
            facts = {**facts, "clients": self.store.updates.clients(self.config.name, event.number)}
        self._hands.tell("round-closed", attempt=event.number, round=self.fleet.round, **facts)
        self._hands.feed(e.Committed(time.monotonic(), event.number))
        self._left_out(event.number, event.left)

    def spoiled(self, event: FoldFailed) -> None:
        """Nothing came of a round; who is to blame for it takes part in no other."""
        if event.number in self._called_off:
            return
        for out in event.left:
            self.store.updates.leave_out(self.config.name, out.entry.attempt, out.entry.device, out.reason)
        self.failed(event.number, event.reason)
        self._hands.feed(e.Committed(time.monotonic(), event.number))
        self._left_out(event.number, event.left)

    def _left_out(self, number: int, left: Sequence[LeftOut]) -> None:
        for out in left:
            self._hands.tell("left-out", attempt=number, device=out.entry.device, reason=out.reason)
            if out.liar:
                self._hands.feed(e.Revoke(time.monotonic(), out.entry.device, out.reason))

    def call_off(self, number: int, reason: str) -> bool:
        """Fail a round that is open, or closed and not yet committed; False where it was committed first."""
        if self._is_agreed(number):
            try:
                self._pass(number, reason)
            except StateError:
                return False
        else:
            self.store.attempts.fail(self.config.name, number, reason, self._remembered)
            row = self.store.attempts.get(self.config.name, number)
            if row is None or row.failure is None:
                return False
        self._called_off.add(number)
        return True

    def _is_agreed(self, number: int) -> bool:
        return self._secure is not None and self._secure.is_agreed(number)

    def _pass(self, number: int, reason: str) -> None:
        """End a round whose sum devices have opened, or some of them: it is paid for, and not made again with almost
        the same ones."""
        self._record(number, Made(self.fleet.model_digest, self.fleet.server, (), ()))
        self._hands.tell("round-passed", attempt=number, reason=reason)
        self.refresh()

    def failed(self, number: int, reason: str, opened: bool = False) -> None:
        """Retry after a pause, under a new number; each failure in a row doubles the pause. Not a secure round whose
        sum devices have ``opened``, now or before this record of the fleet was restored."""
        if number not in self._called_off and (opened or self._is_agreed(number)):
            self._pass(number, reason)
            return
        self.store.attempts.fail(self.config.name, number, reason, self._remembered)
        wait = min(AGAIN_S[1], AGAIN_S[0] * 2 ** min(self._failures, 32))
        self._failures += 1
        self._not_before = time.monotonic() + wait
        self._hands.tell("round-failed", attempt=number, reason=reason, again_in_s=wait)


def _is_away(state: CoordinatorState, device: str, now: float) -> bool:
    return device not in state.peers or state.peers[device].away(now, AWAY_S)
