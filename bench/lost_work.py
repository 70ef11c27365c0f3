"""Work lost to urgent requests and to owners, by the choice of victims: ours beside youngest-first.

Machines of others, kept full (`owner_traces.py` says of what); urgent jobs arrive, owners need memory back. Whoever has
to go is back in the queue and goes on from its last mark. Everything is decided by the real reactor, and for owners by
the agent's own rule, in virtual time; only the order of victims differs. Urgent jobs have to start at the same moments
in all runs, or nothing is compared. An urgent job whose machine is taken back is done with.

There are two ways to take the youngest first, and ours is held against the better of the two:
`youngest` is the rule as it was: as few as possible, and of those the youngest.
`youngest until it fits` takes the youngest of the least important one after the other, spares who was not needed, and
makes room for urgent work where the fewest go.

A ratio is a mean over the seeds, with its standard deviation. What urgent work costs is a choice among all machines;
what an owner costs is a choice on one machine, and none at all where all of it is needed (`whole`).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from bench.owner_traces import BATCH, LOADS, LONG, MINUTE, PODS, PUBLIC, WHOLE, Trace, Work
from bench.sizes import sized
from bench.table import Line
from distributed_grid.agent.owner.yield_policy import Borrowed, cheapest
from distributed_grid.domain import events
from distributed_grid.domain.indexes.columns import Column
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.jobs import Command, Ending, Job, Outcome
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Amounts, Capacity, Priority
from distributed_grid.domain.rows import Row
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.domain.states import LeaseState
from distributed_grid.reactor import step
from distributed_grid.reactor.effects import StartAttempt, attempt_effects
from distributed_grid.reactor.lease_transitions import grant, preempt_victims
from distributed_grid.replay.event_queue import EventQueue, ScheduledEvent
from distributed_grid.scheduling.placement.placement import Placement, find_placement
from distributed_grid.scheduling.preemption.preemption import PreemptionPlan, plan_preemption
from distributed_grid.scheduling.preemption.victims import Slots

BEAT = 30 * MINUTE
SEEDS = sized(10, smoke=2)
WAITING = 3
"""So many jobs wait at any time: the grid is full."""
LONG_RESERVATION = SchedulingPolicy(reserve_after_ms=LONG)
"""Who waits gets one place kept at most; that is about the line, and takes most of the time here."""
FOREVER = 10**12
DONE = Outcome(Ending.EXITED, exit_code=0)

Choose = Callable[[Ledger, Request, int], PreemptionPlan | None]
Evict = Callable[[Sequence[Borrowed], int], Sequence[Borrowed]]


class VictimRule(NamedTuple):
    """Who goes for urgent work, and who for an owner: of those given, the last are the first to go."""

    choose: Choose
    evict: Evict
    by_work: bool = False


@dataclass(slots=True)
class Lost:
    """CPU-seconds that have to be done again, and when the urgent started."""

    to_urgent: float = 0.0
    to_owners: float = 0.0
    displaced: int = 0
    reclaimed: int = 0
    starts: dict[str, int] = field(default_factory=dict)

    @property
    def in_all(self) -> float:
        return self.to_urgent + self.to_owners


def measure() -> list[Line]:
    """The bar is about all that is lost; where that is missed it says so."""
    lines = [*_lines(BATCH, "urgent jobs and owners of a part"), *_print_runs(WHOLE)]
    if PODS.exists() and LOADS.exists():
        lines += _lines(PUBLIC, "jobs of openb, owners of PlanetLab")
    else:
        print(f"{PODS.parent.parent} is not there: the public traces are left out", file=sys.stderr)
    return lines


def _lines(trace: Trace, what: str) -> list[Line]:
    runs = _runs(trace)
    in_all = _ratio(runs, lambda one: one.in_all, "all")
    urgent = _ratio(runs, lambda one: one.to_urgent, "to urgent jobs")
    _ratio(runs, lambda one: one.to_owners, "to owners")
    return [
        Line(f"CPU time lost, of youngest-first's: {what}", in_all, 0.5, "×", lower_is_better=True),
        Line("  the part lost to urgent jobs", urgent, 0.5, "×", lower_is_better=True),
    ]


def _print_runs(trace: Trace) -> list[Line]:
    """No line: where there is no choice, no bar can be set."""
    _ratio(_runs(trace), lambda one: one.to_owners, "to owners")
    return []


def _runs(trace: Trace) -> list[dict[str, Lost]]:
    """Lost work of each way, seed by seed."""
    ways = {
        "ours": VictimRule(plan_preemption, cheapest, by_work=True),
        "youngest": VictimRule(lambda ledger, request, now: plan_preemption(ledger, request, now, cost=_age), _fewest),
        "youngest until it fits": VictimRule(_youngest_until_it_fits, _until_enough),
    }
    runs = []
    for seed in range(SEEDS):
        found = {name: _Run(trace, seed, way).all() for name, way in ways.items()}
        assert all(one.starts == found["ours"].starts for one in found.values()), "urgent work started at other times"
        runs.append(found)
    urgent = sum(len(one["ours"].starts) for one in runs)
    print(f"{trace.name}: core-hours lost in {SEEDS} runs of a day, {urgent:,} urgent jobs", file=sys.stderr)
    for name in ways:
        lost = [sum(getattr(one[name], what) for one in runs) for what in Lost.__slots__[:4]]
        to_urgent, to_owners = (f"{seconds / 3600:>9,.1f}" for seconds in lost[:2])
        print(
            f"  {name:<24}{to_urgent} by {lost[2]:,} for urgent work,{to_owners} by {lost[3]:,} for owners",
            file=sys.stderr,
        )
    return runs


def _ratio(runs: list[dict[str, Lost]], of: Callable[[Lost], float], what: str) -> float:
    """Ours as a part of the better of the others, as a mean over the seeds."""
    total = {name: sum(of(one[name]) for one in runs) for name in runs[0]}
    better = min((name for name in total if name != "ours"), key=lambda name: total[name])
    found = [_part(of(one["ours"]), of(one[better])) for one in runs]
    mean, deviation = statistics.mean(found), statistics.stdev(found)
    print(
        f"  {what}: {mean:.2f} of `{better}`, seed by seed {min(found):.2f} to {max(found):.2f} "
        f"(deviation {deviation:.2f}); all together {_part(total['ours'], total[better]):.2f}",
        file=sys.stderr,
    )
    return mean


def _part(ours: float, theirs: float) -> float:
    """Ours as a part of theirs; 1 where neither lost anything."""
    return ours / theirs if theirs else 1.0 if not ours else float("inf")


def _fewest(attempts: Sequence[Borrowed], short_bytes: int) -> Sequence[Borrowed]:
    """As few as hold enough together, the last where it is the same."""
    left, gone = list(attempts), []
    while short_bytes > 0 and left:
        enough = [one for one in left if one.memory_bytes >= short_bytes]
        most = max(one.memory_bytes for one in left)
        gone.append((enough or [one for one in left if one.memory_bytes == most])[-1])
        left.remove(gone[-1])
        short_bytes -= gone[-1].memory_bytes
    return gone


def _until_enough(attempts: Sequence[Borrowed], short_bytes: int) -> Sequence[Borrowed]:
    """The last ones until it is enough; who turns out not to be needed is spared."""
    gone: list[Borrowed] = []
    for one in reversed(attempts):
        if short_bytes > 0:
            gone.append(one)
            short_bytes -= one.memory_bytes
    for one in gone[:]:
        if short_bytes + one.memory_bytes <= 0:
            gone.remove(one)
            short_bytes += one.memory_bytes
    return gone


def _age(ledger: Ledger, slots: Slots, now: int) -> Column:
    """The cost by which the youngest go first."""
    age: Column = now - ledger.running.column("started")[slots]
    return age


def _youngest_until_it_fits(ledger: Ledger, request: Request, now: int) -> PreemptionPlan | None:
    found = []
    for name in ledger.nodes:
        lends, leases = ledger.lends(name), list(ledger.leases_of(name))
        claims = NodeClaims(lease.claim for lease in leases if lease.claim is not None)
        gone: list[Lease] = []
        for lease in sorted((one for one in leases if _may_go(ledger, one, request, now)), key=_youngest_first):
            if claims.claim_for(request.ask, lends) is not None:
                break
            assert lease.claim is not None
            claims.remove(lease.claim)
            gone.append(lease)
        if claims.claim_for(request.ask, lends) is None:
            continue
        for lease in reversed(gone[:]):
            assert lease.claim is not None
            claims.add(lease.claim)
            if claims.claim_for(request.ask, lends) is not None:
                gone.remove(lease)
            else:
                claims.remove(lease.claim)
        claim = claims.claim_for(request.ask, lends)
        assert claim is not None
        ids = tuple(lease.id for lease in gone)
        worst = max((lease.request.priority for lease in gone), default=Priority.LOW)
        age = sum(now - lease.granted_at_ms for lease in gone)
        found.append(((worst, len(gone), age, name), PreemptionPlan(name, claim, ids, ids)))
    return min(found, key=lambda entry: entry[0])[1] if found else None


def _may_go(ledger: Ledger, lease: Lease, request: Request, now: int) -> bool:
    job = ledger.jobs.get(lease.job)
    ends = [one.outcome.ending for one in job.attempts if one.outcome is not None] if job is not None else []
    old_enough = now - lease.granted_at_ms >= ledger.policy.minimum_run_ms
    spared = ends.count(Ending.PREEMPTED) >= ledger.policy.preemptions_max
    return lease.state is LeaseState.ACTIVE and lease.request.priority < request.priority and old_enough and not spared


def _youngest_first(lease: Lease) -> tuple[int, int, str]:
    return (int(lease.request.priority), -lease.granted_at_ms, lease.id)


class _Run:
    """One life of the grid under one choice of victims."""

    def __init__(self, trace: Trace, seed: int, way: VictimRule) -> None:
        self.lost = Lost()
        self._trace = trace
        self._way = way
        self._queue = EventQueue()
        has = Capacity(trace.cpu_milli, trace.memory_bytes)
        self._ledger = Ledger(Node(name=name, capacity=has) for name in trace.nodes)
        self._coming = trace.jobs(seed)
        self._work: dict[str, Work] = {}
        self._left: dict[str, int] = {}
        self._since: dict[str, int] = {}  # when it started or marked its last checkpoint
        self._ahead: dict[str, list[ScheduledEvent]] = {}  # its end and its next mark
        self._owners: set[str] = set()
        step(self._ledger, events.PolicySet(LONG_RESERVATION), 0)
        for name, at, takes_bytes in trace.owners(seed):
            self._queue.at(at, partial(self._owner, name, takes_bytes))
        for at in range(0, LONG, BEAT):
            self._queue.at(at, self._beat)
        for at, work in trace.urgent(seed):
            self._queue.at(at, partial(self._arrive, work))

    def all(self) -> Lost:
        """Lost work until the end."""
        while self._queue.run_next(LONG):
            while len(self._ledger.waiting) < WAITING:
                self._arrive(next(self._coming))
        return self.lost

    def _handle(self, event: events.Event) -> None:
        self._perform(step(self._ledger, event, self._queue.now).changes)

    def _perform(self, changed: Sequence[Row]) -> None:
        """The agents do at once what the rows call for."""
        for effect in attempt_effects(self._ledger, changed):
            if isinstance(effect, StartAttempt):
                self._start(effect.job)
            else:
                self._end(effect.job, Outcome(Ending.SIGNALLED, signal=15))

    # what happens

    def _beat(self) -> None:
        for name in self._trace.nodes:
            self._heartbeat(name)

    def _heartbeat(self, name: str) -> None:
        there = name in self._owners
        self._handle(
            events.HeartbeatReceived(
                name=name, usage=Usage(), beat=self._queue.now, generation=self._queue.now if there else 0, yields=there
            )
        )

    def _owner(self, name: str, takes_bytes: int) -> None:
        """An owner comes and takes so much memory, or goes (0)."""
        (self._owners.add if takes_bytes else self._owners.discard)(name)
        self._heartbeat(name)
        here = [self._ledger.jobs[lease.job] for lease in self._ledger.leases_of(name)]
        for job in [job for job in here if job.request.priority is Priority.URGENT and takes_bytes]:
            self._end(job, DONE)
            here.remove(job)
        attempts = [
            Borrowed(job.uid, name, memory_bytes=job.request.ask.memory_bytes, at_stake=self._to_lose(job.uid))
            for job in here
        ]
        attempts.sort(key=lambda one: one.at_stake, reverse=True)
        short = takes_bytes - self._trace.memory_bytes + sum(one.memory_bytes for one in attempts)
        for one in self._way.evict(attempts, short) if takes_bytes else ():
            self._end(self._ledger.jobs[one.attempt_id], Outcome(Ending.RECLAIMED))

    def _to_lose(self, uid: str) -> int:
        """The work of a job that would be lost now; in runs that end the youngest first, its age."""
        attempt = self._ledger.jobs[uid].attempt
        assert attempt is not None
        if self._way.by_work:
            return self._work[uid].cpu_milli * (self._queue.now - self._since[uid])
        return self._queue.now - attempt.started_at_ms

    def _arrive(self, work: Work) -> None:
        """A job is submitted; an urgent one displaces by our choice where it has to."""
        now, ledger = self._queue.now, self._ledger
        self._work[work.uid], self._left[work.uid] = work, work.takes_ms
        request = Request(
            id=work.uid,
            user="ada",
            ask=Amounts(work.cpu_milli, work.memory_bytes),
            priority=work.priority,
            wait_ms=FOREVER,
        )
        way = None
        if work.priority is Priority.URGENT and find_placement(ledger, request) is None:
            way = self._way.choose(ledger, request, now)
        if way is None:
            self._handle(events.JobSubmitted(id=work.uid, command=Command(("true",)), request=request))
            return
        lease = Lease(id=f"{work.uid}.1", request=request, asked_at_ms=now, job=work.uid)
        job = Job(
            uid=work.uid,
            id=work.uid,
            command=Command(("true",)),
            request=request,
            submitted_at_ms=now,
            lease_id=lease.id,
        )
        leaving, awaits = preempt_victims(ledger, way, lease, now)
        decision, _, _ = grant(ledger, lease, Placement(node=way.node, claim=way.claim), now, job=job, awaits=awaits)
        ledger.apply(changes := leaving.changes + decision.changes)
        self._perform(changes)

    # what becomes of a job

    def _start(self, job: Job) -> None:
        now, attempt = self._queue.now, job.attempt
        assert attempt is not None
        work = self._work[job.uid]
        if work.priority is Priority.URGENT:
            self.lost.starts[job.uid] = now
        self._since[job.uid] = now
        self._ahead[job.uid] = [self._queue.after(self._left[job.uid], partial(self._is_done, job.uid))]
        if work.marks_ms:
            self._ahead[job.uid].append(self._queue.after(work.marks_ms, partial(self._mark, job.uid)))
        self._handle(events.AttemptStarted(uid=job.uid, number=attempt.number, fence=attempt.fence, pid=1))

    def _mark(self, uid: str) -> None:
        """Work up to now is safe."""
        attempt = self._ledger.jobs[uid].attempt
        assert attempt is not None
        self._left[uid] -= self._queue.now - self._since[uid]
        self._since[uid] = self._queue.now
        self._ahead[uid][1] = self._queue.after(self._work[uid].marks_ms, partial(self._mark, uid))
        self._handle(events.AttemptMarked(uid, attempt.number, attempt.fence, 0))

    def _is_done(self, uid: str) -> None:
        self._end(self._ledger.jobs[uid], DONE)

    def _end(self, job: Job, outcome: Outcome) -> None:
        attempt = job.attempt
        assert attempt is not None
        for planned in self._ahead.pop(job.uid):
            planned.cancel()
        lost = (self._queue.now - self._since.pop(job.uid)) * self._work[job.uid].cpu_milli / 1_000_000
        if job.stop is not None and job.stop.ending is Ending.PREEMPTED:
            self.lost.to_urgent += lost
            self.lost.displaced += 1
        elif outcome.ending is Ending.RECLAIMED:
            self.lost.to_owners += lost
            self.lost.reclaimed += 1
        self._handle(events.AttemptEnded(uid=job.uid, number=attempt.number, fence=attempt.fence, outcome=outcome))
