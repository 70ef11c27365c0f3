"""Work that comes and goes in virtual time, through the real reactor: who starts when is what the line decides.

Agents are prompt: what is to start has started, what is to stop is gone, within the same moment. A job that was
displaced begins anew.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable

from msgspec import Struct

from distributed_grid.domain.events import (
    AttemptEnded,
    AttemptStarted,
    Event,
    HeartbeatReceived,
    JobSubmitted,
    NodeDeclared,
    PolicySet,
    TimePassed,
)
from distributed_grid.domain.jobs import Command, Ending, Outcome
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.reactor import step_through
from distributed_grid.reactor.effects import StartAttempt, attempt_effects

DONE = Outcome(Ending.EXITED, exit_code=0)
STOPPED = Outcome(Ending.SIGNALLED, signal=15)


class WorkloadJob(Struct, frozen=True):
    """A job that somebody will submit, and how long it will really run."""

    at_ms: int
    request: Request
    run_ms: int


class Workload:
    """A ledger with work ahead; `starts` are the moments when each job was started, in order."""

    def __init__(self, nodes: Iterable[Node], policy: SchedulingPolicy | None = None, *, tick_ms: int = 1_000) -> None:
        self.ledger = Ledger()
        self.now = 0
        self.starts: dict[str, list[int]] = {}
        self.ends: dict[str, int] = {}
        self._tick_ms = tick_ms
        self._work: dict[str, WorkloadJob] = {}
        self._ahead: list[tuple[int, int, Event | None]] = []
        self._number = itertools.count()
        self._nodes = tuple(node.name for node in nodes_of(nodes, self._handle))
        if policy is not None:
            self._handle(PolicySet(policy))

    def submit(self, *work: WorkloadJob) -> None:
        for one in work:
            self._work[one.request.id] = one
            self._plan(
                one.at_ms, JobSubmitted(id=f"job-{one.request.id}", command=Command(("true",)), request=one.request)
            )

    def run(self, until_ms: int, *, watch: Callable[[Workload], None] | None = None) -> None:
        """Let everything happen up to a moment, and time pass while anybody waits; `watch` looks on after each."""
        next_tick = self.now + self._tick_ms
        while True:
            event_at = self._ahead[0][0] if self._ahead else until_ms
            self.now = min(event_at, next_tick, until_ms)
            if self.now == next_tick:
                next_tick += self._tick_ms
                self._tick()
            elif not self._ahead or event_at > until_ms:
                return
            else:
                event = heapq.heappop(self._ahead)[2]
                assert event is not None
                self._handle(event)
            if watch is not None:
                watch(self)

    def _plan(self, at_ms: int, event: Event) -> None:
        heapq.heappush(self._ahead, (at_ms, next(self._number), event))

    def _tick(self) -> None:
        for name in self._nodes:
            self._handle(HeartbeatReceived(name=name, usage=Usage()))
        self._handle(TimePassed())

    def _handle(self, event: Event) -> None:
        if isinstance(event, AttemptEnded) and not self._is_going_on(event):
            return
        changed = step_through(self.ledger, event, self.now).changes
        if isinstance(event, AttemptEnded) and event.uid not in self.ledger.jobs:
            self.ends[event.uid] = self.now
        for effect in attempt_effects(self.ledger, changed):
            attempt = effect.job.attempt
            assert attempt is not None
            uid, number, fence = effect.job.uid, attempt.number, attempt.fence
            if isinstance(effect, StartAttempt):
                if not attempt.pid:
                    self.starts.setdefault(uid, []).append(self.now)
                    self._plan(
                        self.now + self._work[uid].run_ms,
                        AttemptEnded(uid=uid, number=number, fence=fence, outcome=DONE),
                    )
                    self._handle(AttemptStarted(uid=uid, number=number, fence=fence, pid=1))
            else:
                self._handle(AttemptEnded(uid=uid, number=number, fence=fence, outcome=STOPPED))

    def _is_going_on(self, event: AttemptEnded) -> bool:
        job = self.ledger.jobs.get(event.uid)
        return job is not None and job.attempt is not None and job.attempt.fence == event.fence


def nodes_of(nodes: Iterable[Node], tell: Callable[[Event], None]) -> tuple[Node, ...]:
    """Have these nodes declared and heard."""
    known = tuple(nodes)
    for node in known:
        tell(NodeDeclared(node))
        tell(HeartbeatReceived(name=node.name, usage=Usage()))
    return known
