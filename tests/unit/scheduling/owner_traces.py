"""Made-up owners of machines, and a day with them: the reactor places work, the agent's own rules take it back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

from msgspec import Struct

from distributed_grid.agent.owner import yield_policy
from distributed_grid.agent.owner.yield_policy import Borrowed, Evict, UsageSample
from distributed_grid.domain.events import (
    AttemptEnded,
    AttemptStarted,
    HeartbeatReceived,
    JobSubmitted,
    NodeDeclared,
    TimePassed,
)
from distributed_grid.domain.jobs import Command, Ending, Outcome
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.domain.states import LeaseEnd
from distributed_grid.reactor import step
from distributed_grid.reactor.dispatch import StepResult
from distributed_grid.scheduling.placement.explanation import Choice
from distributed_grid.wire import OwnerRules
from tests.support.builders import GB, a_node, a_request, thresholds

BEAT_MS = 30_000
HOUR_MS = 3_600_000
CORES, MEMORY_GB = 16, 64
LIMITS = thresholds(cpu_busy_max=0.3, memory_used_max=0.5)
RULES = OwnerRules(
    cpu_busy_max_milli=300,
    memory_used_max_milli=500,
    memory_min_bytes=2 * GB,
    gpu_busy_max_milli=500,
    gpu_memory_min_bytes=2 * GB,
)


def visitors(dice: Random) -> Iterator[tuple[float, float]]:
    """An owner who comes every so often, every few hours or days, and takes all cores for a while."""
    per_hour = math.exp(dice.uniform(math.log(0.02), math.log(0.5)))
    busy_beats = 0
    while True:
        if busy_beats:
            busy_beats -= 1
        elif dice.random() < per_hour * BEAT_MS / HOUR_MS:
            busy_beats = dice.randint(5, 60)
        yield (1.0 if busy_beats else dice.uniform(0.0, 0.1)), dice.gauss(0.12, 0.001)


def sleepers(dice: Random) -> Iterator[tuple[float, float]]:
    """A machine in a corner, whose owner hardly ever comes."""
    busy_beats = 0
    while True:
        if busy_beats:
            busy_beats -= 1
        elif dice.random() < 0.005 * BEAT_MS / HOUR_MS:
            busy_beats = dice.randint(10, 200)
        yield (1.0 if busy_beats else dice.uniform(0.0, 0.02)), dice.gauss(0.1, 0.001)


def drifters(dice: Random) -> Iterator[tuple[float, float]]:
    """An owner whose memory grows and shrinks at random, a few percent of the machine an hour."""
    used, wide = dice.uniform(0.1, 0.4), dice.uniform(0.01, 0.08)
    while True:
        used = min(max(used + dice.gauss(0, wide * (BEAT_MS / HOUR_MS) ** 0.5), 0.03), 0.97)
        yield dice.uniform(0.02, 0.1), used


def fidgeters(dice: Random) -> Iterator[tuple[float, float]]:
    """An owner who wants all cores every few minutes, but for less than half a minute."""
    while True:
        yield (dice.uniform(0.3, 0.8) if dice.random() < 0.1 else dice.uniform(0.0, 0.1)), dice.gauss(0.15, 0.001)


KINDS = (visitors, visitors, sleepers, drifters, fidgeters)


class Fate(Struct, frozen=True):
    """A place that was chosen for a term, and whether its owner left it alone for that long."""

    confidence: float
    kept: bool
    kind: str


class Day:
    """So many machines with owners of all kinds; requests come at random and are placed by the reactor."""

    def __init__(self, seed: int, *, nodes: int) -> None:
        self._dice = Random(seed)
        self.ledger = Ledger()
        self.now = 1_000_000_000
        self.fates: list[Fate] = []
        self._granted: dict[str, tuple[Choice, int]] = {}
        self._asked = 0
        self._kinds = {f"n{i}": KINDS[i % len(KINDS)] for i in range(nodes)}
        self._owners = {name: kind(Random(seed * 1000 + i)) for i, (name, kind) in enumerate(self._kinds.items())}
        self._guards = {name: yield_policy.OwnerState() for name in self._kinds}
        for name in self._kinds:
            node = a_node(name, cores=CORES, memory_gb=MEMORY_GB, thresholds=LIMITS, hold_s=60)
            self._handle(NodeDeclared(node))

    def pass_by(self, hours: float, *, requests_per_hour: float = 0) -> None:
        """Beat after beat: owners do what they do, agents give way to them, work comes and ends."""
        for _ in range(round(hours * HOUR_MS / BEAT_MS)):
            self.now += BEAT_MS
            for name, owner in self._owners.items():
                self._beat(name, *next(owner))
            self._end_what_is_done()
            self._handle(TimePassed())
            due = requests_per_hour * BEAT_MS / HOUR_MS
            for _ in range(int(due) + (self._dice.random() < due % 1)):
                self._submit()

    def _beat(self, name: str, cpu: float, memory: float) -> None:
        usage = Usage(
            cpu_busy_milli=round(1000 * cpu),
            cpu_outside_milli=round(1000 * cpu),
            memory_bytes=(outside := round(memory * MEMORY_GB * GB)),
            memory_outside_bytes=outside,
        )
        running = [lease for lease in self.ledger.leases_of(name) if not lease.awaits]
        look = _look(running, cpu, usage.memory_outside_bytes, self.now)
        self._guards[name], actions = yield_policy.decide(self._guards[name], look, RULES, self.now)
        self._handle(HeartbeatReceived(name=name, usage=usage, yields=self._guards[name].yields))
        for action in actions:
            if isinstance(action, Evict):
                self._over(self.ledger.leases[action.attempt_id], Outcome(Ending.RECLAIMED, detail=action.why))

    def _submit(self) -> None:
        """A job of some size for minutes or hours; it asks for what it will use."""
        self._asked += 1
        dice = self._dice
        request = a_request(
            f"r{self._asked}",
            cores=dice.choice((0.5, 1, 2)),
            memory_gb=dice.choice((1, 4, 10)),
            strategy=dice.choice((Strategy.SPREAD, Strategy.BEST_FIT, Strategy.LOAD_BALANCED)),
            expects_ms=60_000 * dice.choice((5, 10, 20, 40, 80, 160)),
        )
        self._handle(JobSubmitted(id=f"j{self._asked}", command=Command(("work",)), request=request))

    def _end_what_is_done(self) -> None:
        for lease in list(self.ledger.leases.values()):
            if lease.holds and self.now >= lease.granted_at_ms + lease.request.expects_ms:
                self._over(lease, Outcome(Ending.EXITED, exit_code=0))

    def _over(self, lease: Lease, outcome: Outcome) -> None:
        attempt = self.ledger.jobs[lease.job].attempts[-1]
        self._handle(AttemptEnded(uid=lease.job, number=attempt.number, fence=attempt.fence, outcome=outcome))

    def _handle(self, event: object) -> None:
        stepped: StepResult = step(self.ledger, event, self.now)  # type: ignore[arg-type]
        for record in stepped.records:
            if record.type == "granted":
                self._granted[record.data["allocation_id"]] = (record.data["choice"], self.now)
                attempt = self.ledger.jobs[record.subject].attempts[-1]
                self._handle(AttemptStarted(uid=record.subject, number=attempt.number, fence=attempt.fence, pid=7))
        for row in stepped.changes:
            if isinstance(row, Lease) and row.is_over and row.id in self._granted:
                choice, _ = self._granted.pop(row.id)
                if choice.freshness == 1000:  # beats are far apart here; what is placed between them is old news
                    kept = row.end is not LeaseEnd.RECLAIMED
                    self.fates.append(Fate(choice.confidence / 1000, kept, self._kinds[row.node].__name__))


def _look(running: list[Lease], cpu: float, outside_bytes: int, now: int) -> UsageSample:
    """The agent's view: borrowed work that uses all it has leased, as far as the owner leaves it that."""
    attempts = tuple(
        Borrowed(
            lease.id,
            lease.node,
            lease.claim.cpu_milli,
            lease.claim.memory_bytes,
            lease.claim.memory_bytes,
            at_stake=lease.claim.cpu_milli * (now - lease.granted_at_ms),
        )
        for lease in running
        if lease.claim is not None
    )
    machine, outside = 1000 * CORES, round(1000 * CORES * cpu)
    own = min(sum(one.cpu_milli for one in attempts), machine - outside)
    used = outside_bytes + sum(one.memory_bytes for one in attempts)
    total = MEMORY_GB * GB
    return UsageSample(machine, outside, own, attempts, total, max(total - used, 0), outside_bytes)
