"""What may happen to a fleet, drawn from a seed: a list in order of time, from which any may be left out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from talaria_bench.history.exact import NAMES

COORDINATOR = "co"
ALL = "all"
SPAN_S = 60.0
"""Virtual seconds in which faults begin."""
KINDS: dict[str, int] = {
    "weather": 4,
    "cut": 3,
    "silence": 3,
    "broker": 2,
    "kill": 4,
    "kill-in-write": 5,
    "power": 4,
    "stop": 1,
    "gone": 2,
    "disk-full": 2,
    "failed-write": 3,
    "damage": 3,
    "backup": 3,
    "restore": 3,
    "lost-state": 2,
    "second": 2,
    "reimage": 3,
    "old-copy": 2,
    "no-protocol": 1,
    "new-keys": 3,
    "clock": 2,
    "lie": 2,
    "rubbish": 1,
}
"""Each kind, and how often it is drawn in relation to the others."""
LIFE: dict[str, int] = {"extend": 3, "next": 4, "retire": 3, "pause": 2, "join": 2}
"""What an operator does to a fleet that lives, in the same way. Who was retired is mostly taken in again."""
_OF_COORDINATOR = ("damage", "backup", "restore", "lost-state", "second")
_OF_DEVICE = ("gone", "reimage", "old-copy", "no-protocol", "new-keys", "lie", "rubbish")
_LIES = ("poison", "huge", "base", "name", "replay")


@dataclass(frozen=True)
class Fault:
    """``number`` is its place in what the seed drew. ``target`` is a machine, or ``all``. ``at`` and ``seconds`` are
    virtual seconds: when it begins and how long it lasts; ``strength`` and ``how`` mean what the kind says."""

    number: int
    at: float
    kind: str
    target: str
    seconds: float = 0.0
    strength: float = 0.0
    how: str = ""

    def __str__(self) -> str:
        who = "the coordinator" if self.target == COORDINATOR else self.target
        words = {
            "weather": f"for {self.seconds:.0f} s links lose {self.strength:.0%} of messages, double as many, and take "
            "up to 2 s",
            "cut": f"the link of {who} breaks",
            "silence": f"the link of {who} goes dead; the broker notices after 45 s",
            "broker": f"the broker dies for {self.seconds:.0f} s" + (" and forgets everything" * (self.how == "empty")),
            "kill": f"{who} is killed, and back after {self.seconds:.0f} s",
            "kill-in-write": f"{who} is killed in its write number {self.strength:.0f} from now, and back after "
            f"{self.seconds:.0f} s",
            "power": f"{who} loses power, and what was not flushed; back after {self.seconds:.0f} s",
            "stop": f"{who} is stopped in good order, and back after {self.seconds:.0f} s",
            "gone": f"{who} is switched off for good",
            "disk-full": f"the disk of {who} is full for {self.seconds:.0f} s",
            "failed-write": f"write number {self.strength:.0f} from now of {who} fails",
            "damage": "one stored update that is not yet folded is damaged on the coordinator's disk",
            "backup": "a backup of the coordinator is taken",
            "restore": f"the coordinator is restored from the {self.how} backup, if there is one",
            "lost-state": "the coordinator's folder is lost; it begins anew in an empty one",
            "second": "a second coordinator is started by mistake "
            + ("with another folder of blobs" if self.how == "wrong" else "on the same database and blobs"),
            "reimage": f"{who} gets an empty disk, keeps its keys, and is back after {self.seconds:.0f} s",
            "old-copy": f"{who} gets back its disk as it was after half of that time",
            "no-protocol": f"protocol.bin of {who} is moved away, as its own advice says",
            "new-keys": f"{who} gets an empty disk and is enrolled anew with new keys",
            "clock": f"the wall clock of {who} is set by {self.strength:+.0f} s",
            "lie": f"{who} lies from now on ({self.how})",
            "extend": f"the operator extends the run by {self.strength:.0f} rounds",
            "next": f"the operator begins another run, of {self.strength:.0f} rounds, from the last model"
            + {"": "", "yes": "; gates let it pass", "no": "; gates refuse it"}.get(self.how, ""),
            "retire": f"the operator lets {who} leave for good",
            "readmit": f"the operator takes {who} in again",
            "pause": f"the operator pauses the fleet for {self.seconds:.0f} s",
            "join": f"{who} comes for the first time",
            "rubbish": f"{who} says rubbish on its own topics",
        }
        return f"{self.at:6.1f} s  {words[self.kind]}"


@dataclass(frozen=True)
class Plan:
    """A history before it happens: who takes part, and what goes wrong. The first run has ``rounds``; where it
    ``grows``, whoever is to ``join`` comes later. A device that is away for ``away_s`` virtual seconds (0: any time) is
    not drawn; with ``canary`` each further run is tried by some first."""

    seed: int
    devices: tuple[str, ...]
    keyed: bool
    faults: tuple[Fault, ...]
    rounds: int = 1_000_000
    grows: bool = False
    away_s: float = 0.0
    canary: bool = False

    @property
    def first(self) -> tuple[str, ...]:
        """The devices that are there from the beginning."""
        late = {fault.target for fault in self.faults if fault.kind == "join"}
        return tuple(name for name in self.devices if name not in late)

    def only(self, numbers: frozenset[int]) -> Plan:
        """With these faults and no others."""
        return replace(self, faults=tuple(f for f in self.faults if f.number in numbers))


def draw(seed: int) -> Plan:
    """The plan of ``seed``: half of them have an operator, and a fleet that lives."""
    plan, random = still(seed), Random(f"{seed}/life")
    if random.random() < 0.5:
        return plan
    grows, canary = random.random() < 0.4 and len(plan.devices) > 2, random.random() < 0.6
    away_s = random.choice((0.0, 0.0, 30.0, 90.0))
    kinds = random.choices(list(LIFE), list(LIFE.values()), k=random.randint(2, 6))
    bad = {f.target for f in plan.faults if f.kind in ("gone", "lie", "rubbish")}
    found, retired, late = list(plan.faults), set[str](), set[str]()

    def add(at: float, kind: str, target: str, seconds: float = 0.0, strength: float = 0.0, how: str = "") -> None:
        found.append(Fault(1000 + len(found), round(at, 1), kind, target, seconds, strength, how))

    for kind in kinds:
        at, name = random.uniform(4.0, SPAN_S), random.choice(plan.devices)
        if kind == "extend":
            add(at, kind, COORDINATOR, strength=float(random.randint(1, 6)))
        elif kind == "next":
            how = random.choice(("yes", "no")) if canary else ""
            add(at, kind, COORDINATOR, strength=float(random.randint(2, 4)), how=how)
        elif kind == "pause":
            add(at, kind, COORDINATOR, round(random.uniform(1.0, 20.0), 1))
        elif kind == "retire" and 3 * len(bad) <= len(plan.devices) - len(retired) - 2 and name not in bad | retired:
            retired.add(name)
            add(at, kind, name)
            if random.random() < 0.7:
                add(random.uniform(at, SPAN_S + 5.0), "readmit", name)
        elif kind == "join" and grows and not late and name not in bad:
            late.add(name)
            found = [f for f in found if f.target != name or f.at > at + 1.0]
            add(at, kind, name)
    found.sort(key=lambda fault: (fault.at, fault.number))
    rounds = random.choice((2, 4, 8, plan.rounds))
    return replace(plan, faults=tuple(found), rounds=rounds, grows=grows, away_s=away_s, canary=canary)


def still(seed: int) -> Plan:
    """What goes wrong by ``seed``, in a fleet of one run that nobody ends."""
    random = Random(f"{seed}/faults")
    devices = NAMES[: random.choice((2, 3, 3, 4, 5))]
    keyed = random.random() < 0.5
    kinds = random.choices(list(KINDS), list(KINDS.values()), k=random.randint(1, 8))
    if "restore" in kinds and "backup" not in kinds:
        kinds.append("backup")
    times = sorted(round(random.uniform(2.0, SPAN_S), 1) for _ in kinds)
    if "restore" in kinds:  # the first backup comes before the first restore
        b, r = kinds.index("backup"), kinds.index("restore")
        if r < b:
            kinds[b], kinds[r] = kinds[r], kinds[b]
    faults = [_one(random, n, at, kind, devices) for n, (at, kind) in enumerate(zip(times, kinds, strict=True))]
    for fault in [f for f in faults if f.kind in ("reimage", "old-copy", "new-keys", "no-protocol")]:
        if random.random() < 0.5:  # it has been away before: what it loses says that
            at = round(random.uniform(1.0, fault.at), 1)
            faults.append(Fault(len(faults), at, "cut", fault.target))
    faults.sort(key=lambda fault: (fault.at, fault.number))
    if not keyed:
        faults = [f for f in faults if f.kind != "new-keys"]
    return Plan(seed, devices, keyed, tuple(_few(faults, len(devices))))


def _one(random: Random, number: int, at: float, kind: str, devices: tuple[str, ...]) -> Fault:
    target = random.choice((COORDINATOR, *devices))
    if kind in _OF_COORDINATOR:
        target = COORDINATOR
    elif kind in _OF_DEVICE:
        target = random.choice(devices)
    elif kind in ("weather", "broker"):
        target = ALL
    seconds = round(random.choice((random.uniform(0.5, 5), random.uniform(5, 40))), 1)
    strength, how = 0.0, ""
    match kind:
        case "weather":
            strength = round(random.uniform(0.02, 0.3), 2)
        case "kill-in-write" | "failed-write":
            strength = float(random.randint(1, 25))
        case "clock":
            strength = float(random.choice((-86400, -300, -5, 5, 300, 86400)))
        case "broker":
            how = random.choice(("", "empty"))
        case "restore":
            how = random.choice(("last", "first"))
        case "second":
            how = random.choice(("wrong", "same"))
        case "lie":
            how = random.choice(_LIES)
    return Fault(number, at, kind, target, seconds, strength, how)


def _few(faults: list[Fault], devices: int) -> list[Fault]:
    """At most a third of the devices may be gone or lie: the others keep the quorum, and learning must go on."""
    bad: set[str] = set()
    kept = []
    for fault in faults:
        if fault.kind in ("gone", "lie", "rubbish"):
            if fault.target not in bad and len(bad) + 1 > devices / 3:
                continue
            bad.add(fault.target)
        kept.append(fault)
    return kept
