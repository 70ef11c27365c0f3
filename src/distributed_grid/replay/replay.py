"""Replay of logged work under another policy: the real reactor on a virtual clock, without faults.

- Jobs run for as long as they were logged to (divided by the speed of their node), never for as long as their users
  expected; nothing is stopped for taking longer.
- Orders take no time, stopping a job takes a second. A job that was displaced starts from its beginning, or from its
  last checkpoint where jobs are said to make some.
- Nodes are there all the time. A heartbeat is handled only when the owner of its node comes or goes. Time passes for
  the ledger when something is due and, while somebody waits, at least once in `TICK_MS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.events import (
    AttemptEnded,
    AttemptMarked,
    AttemptStarted,
    ControlPlaneStarted,
    Event,
    HeartbeatReceived,
    JobSubmitted,
    LeaseAsked,
    LeaseReleased,
    NodeDeclared,
    PolicySet,
    TimePassed,
)
from distributed_grid.domain.jobs import Command, Ending, Job, Outcome
from distributed_grid.domain.leases import MAX_DURATION_MS, Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.domain.states import JobState, LeaseEnd, LeaseState
from distributed_grid.errors import GridError, IllegalStep
from distributed_grid.reactor import step_through
from distributed_grid.reactor.effects import StartAttempt, StopAttempt, attempt_effects
from distributed_grid.replay.candidates import Candidate
from distributed_grid.replay.event_queue import EventQueue, ScheduledEvent
from distributed_grid.replay.replay_statistics import ReplayStatistics
from distributed_grid.replay.traces import PATIENT_MS, LoggedJob, Trace

OWNER_STAYS_MS = 3_600_000
DAY_MS = 86_400_000


class Presence(Struct, frozen=True):
    """The owner of a node uses it between two moments; borrowed work has to go."""

    node: str
    from_ms: int
    to_ms: int


def owner_presences(seed: int, node: str, *, per_day: float, lasts_ms: int, begin_ms: int) -> Iterator[Presence]:
    """When an owner comes, without end: so often a day that it is away, at random, for a while around `lasts_ms`."""
    random = Random(f"{seed}/owner/{node}")
    at = begin_ms
    while per_day > 0:
        at += max(1, round(random.expovariate(per_day / DAY_MS)))
        stays = max(1_000, round(lasts_ms * random.uniform(0.1, 1.9)))
        yield Presence(node, at, at + stays)
        at += stays


BEGIN_MS = 1_000_000_000
AHEAD_MS = MAX_DURATION_MS
TICK_MS = 60_000
MAX_TICKS = 5_000
STUCK_MS = 7 * 86_400_000  # when nothing has moved for so long, nothing will: a line's patience is shorter
STOP_MS = 1_000
NOTICE_MS = 5_000
COMMAND = Command(("simulated",))
Progress = Callable[[int, int], None]  # hears how many requests of how many are over


class _Run:
    def __init__(self, job: Job, lease: Lease, began_ms: int) -> None:
        attempt = job.attempts[-1]
        self.uid, self.number, self.fence = job.uid, attempt.number, attempt.fence
        self.node = attempt.node
        self.lease = lease
        self.began_ms = self.kept_ms = began_ms
        self.plans: list[ScheduledEvent] = []

    def over(self, outcome: Outcome) -> AttemptEnded:
        return AttemptEnded(uid=self.uid, number=self.number, fence=self.fence, outcome=outcome, nodes=(self.node,))


class Replay:
    def __init__(
        self,
        work: Sequence[LoggedJob],
        nodes: Sequence[Node],
        policy: SchedulingPolicy,
        *,
        owners: Iterable[Iterator[Presence]] = (),
        checkpoint_ms: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self._work = work
        self._origin = work[0].at_ms if work else 0
        self._queue = EventQueue(BEGIN_MS)
        self._ledger = Ledger()
        # The node as it is replayed: never lost, with an unchanging offer until its owner comes.
        self._nodes = {
            node.name: replace(
                node, hold_ms=0, offer_ms=2 * AHEAD_MS, refresh_ms=2 * AHEAD_MS, thresholds=None, wanted=True
            )
            for node in nodes
        }
        self._policy = policy
        self._owners = owners
        self._checkpoint_ms = checkpoint_ms
        self._progress = progress
        self._runs: dict[str, _Run] = {}
        self._left_ms: dict[str, int] = {}
        self._held: dict[str, None] = {}
        self._logged = {job.request.id: job for job in work}
        self._generations = dict.fromkeys(self._nodes, 0)
        self._ahead = 0
        self._open = len(work)
        self._tick: ScheduledEvent | None = None
        self._tick_at = 0
        span = work[-1].at_ms - self._origin if work else 0
        self._tick_ms = max(TICK_MS, span // MAX_TICKS)
        self.figures = ReplayStatistics([node.lendable for node in self._nodes.values()])

    def run(self) -> ReplayStatistics:
        """Replay the trace until everything has ended, or nothing left can ever end."""
        self._tell(ControlPlaneStarted(1))
        self._tell(PolicySet(self._policy))
        for node in self._nodes.values():
            self._tell(NodeDeclared(node))
            self._hear(node.name, yields=False)
        self._plan_arrival(0)
        for coming in self._owners:
            self._plan_owner(coming)
        moved_ms = BEGIN_MS
        while self._open and self._queue.now - moved_ms <= STUCK_MS:
            if not self._queue.run_next(self._queue.now + AHEAD_MS):
                break
            # True if something is held, planned, or will time out; without that a waiting request waits forever.
            due = self._ledger.next_due_ms()
            if self._runs or self._held or self._ahead or (due and due - self._queue.now < PATIENT_MS // 2):
                moved_ms = self._queue.now
        self.figures.close(self._queue.now, waiting=self._open)
        return self.figures

    def _hear(self, name: str, *, yields: bool) -> None:
        """Report a node now, with a timestamp ahead of all time without news of it."""
        self._tell(HeartbeatReceived(name=name, usage=Usage(), generation=self._generations[name], yields=yields))
        self._ledger.apply([replace(self._ledger.observations[name], at_ms=self._queue.now + AHEAD_MS)])

    # ------------------------------------------------------------------ what is asked for

    def _plan_arrival(self, place: int) -> None:
        if place < len(self._work):
            self._ahead += 1
            self._queue.at(BEGIN_MS + self._work[place].at_ms - self._origin, lambda: self._arrive(place))

    def _arrive(self, place: int) -> None:
        self._ahead -= 1
        logged, now = self._work[place], self._queue.now
        self._plan_arrival(place + 1)
        request = logged.request
        if logged.deadline_in_ms:
            request = replace(request, deadline_ms=now + logged.deadline_in_ms)
        self.figures.asked(request, now, logged.run_ms)
        self._left_ms[request.id] = logged.run_ms
        job = JobSubmitted(
            id=request.id, command=COMMAND, request=request, retries=logged.retries, restartable=True
        )  # an owner only delays it
        event = job if logged.is_job else LeaseAsked(request)
        try:
            self._tell(event)
        except IllegalStep:
            raise  # a bug, not a refusal
        except GridError:
            self._is_over(request.id, Ending.WAITED_TOO_LONG, refused=True)

    def _is_over(self, uid: str, ending: Ending, *, refused: bool = False) -> None:
        self._open -= 1
        self.figures.over(uid, ending, self._queue.now, refused=refused)
        if self._progress is not None:
            self._progress(len(self._work) - self._open, len(self._work))

    # ------------------------------------------------------------------ what the grid makes of it

    def _tell(self, event: Event) -> None:
        """Decide an event and perform its effects at once."""
        ahead: list[Event] = [event]
        while ahead:
            changes = step_through(self._ledger, ahead.pop(0), self._queue.now).changes
            for row in changes:
                if isinstance(row, Job) and row.is_over:
                    assert row.outcome is not None
                    self._is_over(row.uid, row.outcome.ending)
                elif isinstance(row, Lease) and not row.job:
                    self._see_lease(row)
            for effect in attempt_effects(self._ledger, changes):
                if isinstance(effect, StartAttempt):
                    if effect.lease.id not in self._runs:
                        ahead.append(self._begin(effect))
                elif isinstance(effect, StopAttempt):
                    self._stop(effect.job)
        self.figures.waits(self._queue.now, len(self._ledger.waiting))
        # Schedule the next `TimePassed`: at the next due moment, and at intervals while requests wait.
        due = self._ledger.next_due_ms()
        when = self._queue.now + self._tick_ms if self._ledger.waiting else None
        if due is not None:
            when = due if when is None else min(due, when)
        if when is None or (self._tick is not None and self._tick.is_pending and self._tick_at <= when):
            return
        if self._tick is not None:
            self._tick.cancel()
        self._tick_at = when
        self._tick = self._queue.at(when, lambda: self._tell(TimePassed()))

    def _begin(self, effect: StartAttempt) -> AttemptStarted:
        now, uid = self._queue.now, effect.job.uid
        run = self._runs[effect.lease.id] = _Run(effect.job, effect.lease, now)
        speed = self._nodes[run.node].speed_milli
        takes_ms = -(-self._left_ms[uid] * 1000 // speed)
        run.plans.append(self._queue.after(takes_ms, lambda: self._end(run, Outcome(Ending.EXITED, exit_code=0))))
        if self._checkpoint_ms:
            self._plan_mark(run)
        self.figures.began(uid, effect.lease, now)
        return AttemptStarted(uid=run.uid, number=run.number, fence=run.fence, pid=1, cores=(), nodes=(run.node,))

    def _end(self, run: _Run, outcome: Outcome) -> None:
        """End an attempt on its node; work since the last checkpoint is lost."""
        if self._runs.pop(run.lease.id, None) is None:
            return
        for planned in run.plans:
            planned.cancel()
        now = self._queue.now
        ran_ms = (run.kept_ms - run.began_ms) * self._nodes[run.node].speed_milli // 1000
        self._left_ms[run.uid] = max(self._left_ms[run.uid] - ran_ms, 1)
        lost_ms = 0 if outcome.ending is Ending.EXITED else now - run.kept_ms
        self.figures.left(run.lease, now, lost_ms=lost_ms)
        self._tell(run.over(replace(outcome, wall_ms=now - run.began_ms)))

    def _stop(self, job: Job) -> None:
        attempt, stop = job.attempts[-1], job.stop
        run = self._runs.get(attempt.lease_id)
        assert stop is not None
        if run is None:  # assigned, and not begun yet
            ended = AttemptEnded(
                uid=job.uid,
                number=attempt.number,
                fence=attempt.fence,
                outcome=Outcome(stop.ending),
                nodes=(attempt.node,),
            )
            self._queue.after(0, lambda: self._tell(ended))
        elif job.state is JobState.STOPPING:
            run.plans.append(self._queue.after(STOP_MS, lambda: self._end(run, Outcome(stop.ending))))

    def _plan_mark(self, run: _Run) -> None:
        run.plans.append(self._queue.after(self._checkpoint_ms, lambda: self._mark(run)))

    def _mark(self, run: _Run) -> None:
        run.kept_ms = self._queue.now
        self._tell(AttemptMarked(run.uid, run.number, run.fence, 0, (run.node,)))
        self._plan_mark(run)

    def _see_lease(self, lease: Lease) -> None:
        """A plain lease begins when it is active, and is given back when it was."""
        uid, now = lease.request.id, self._queue.now
        if lease.id != uid:
            return
        if lease.is_over:
            done = lease.end in (LeaseEnd.RELEASED, LeaseEnd.EXPIRED)
            if uid in self._held:
                del self._held[uid]
                self.figures.left(lease, now, lost_ms=0 if done else now - lease.granted_at_ms)
            self._is_over(uid, Ending.EXITED if done else Ending.PREEMPTED)
        elif lease.state is LeaseState.ACTIVE and uid not in self._held:
            self._held[uid] = None
            self.figures.began(uid, lease, now)
            self._queue.after(self._left_ms[uid], lambda: self._give_back(uid))

    def _give_back(self, uid: str) -> None:
        if uid in self._ledger.leases:
            self._tell(LeaseReleased(uid, self._logged[uid].request.user))

    # ------------------------------------------------------------------ owners and time

    def _plan_owner(self, coming: Iterator[Presence]) -> None:
        """One owner comes, leaves, and comes again."""
        presence = next(coming, None)
        if presence is None:
            return

        def leave() -> None:
            self._hear(presence.node, yields=False)
            self._plan_owner(coming)

        self._queue.at(presence.from_ms, lambda: self._owner_comes(presence.node))
        self._queue.at(presence.to_ms, leave)

    def _owner_comes(self, name: str) -> None:
        """Withdraw the node's offer and end its runs after a notice."""
        self._generations[name] += 1
        self._hear(name, yields=True)
        for run in [run for run in self._runs.values() if run.node == name]:
            run.plans.append(self._queue.after(NOTICE_MS, partial(self._end, run, Outcome(Ending.RECLAIMED))))


def replay_candidates(
    trace: Trace, policies: Sequence[Candidate], *, seed: int, owners_per_day: float, progress: Progress | None = None
) -> Iterator[tuple[str, ReplayStatistics]]:
    """Each policy's name and its statistics; owners come and go the same for all of them."""
    for policy in policies:
        owners = [
            owner_presences(seed, node.name, per_day=owners_per_day, lasts_ms=OWNER_STAYS_MS, begin_ms=BEGIN_MS)
            for node in policy.nodes
        ]
        replay = Replay(policy.work(trace.work), policy.nodes, policy.policy, owners=owners, progress=progress)
        yield policy.name, replay.run()
