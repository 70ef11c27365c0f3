"""Waiting times over two years of a parallel computer (SDSC SP2, 59,715 jobs on 128 processors).

Every job goes through the reactor as it does in the control plane, on one node of 128 cores and in virtual time. A
job's term is what its user estimated. With estimates nobody knows more than that; with predictions the grid also goes
by how long the user's last two jobs took. Published is EASY: first come first served, and who is over before the first
of the queue could start, by its estimate, may pass.

As is usual for this trace, what has no run time or no processors is left out, and an estimate that was too short counts
as the run time. Bounded slowdown is (wait + run) / max(run, 10 s), at least 1.
"""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import NamedTuple

from bench.sizes import Unavailable, sized
from bench.table import Line
from bench.traces import TRACES
from distributed_grid.domain.events import (
    AttemptEnded,
    Event,
    HeartbeatReceived,
    JobSubmitted,
    LeaseAsked,
    LeaseReleased,
)
from distributed_grid.domain.followups import ScanQueue
from distributed_grid.domain.jobs import Command, Ending, Outcome
from distributed_grid.domain.leases import MAX_DURATION_MS, Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Amounts, Capacity
from distributed_grid.reactor import step
from distributed_grid.replay.traces import read_trace

PROCESSORS = 128
EASY_WAIT_MIN, EASY_SLOWDOWN, EASY_LONGEST_H = 353, 93, 128
SHORT_S = 10
JOBS = sized(None, smoke=200)
"""Of the trace; None: all."""
TRUE = Command(("true",))


class SwfJob(NamedTuple):
    """A job of the trace: when it was asked for, in seconds, how large and long it was, and what its user thought."""

    at_s: int
    number: int
    run_s: int
    processors: int
    estimate_s: int
    user: str

    @property
    def request(self) -> Request:
        ask = Amounts(cpu_milli=1000 * self.processors)
        term_ms = 1000 * self.estimate_s
        return Request(id=f"r{self.number}", user=self.user, ask=ask, wait_ms=MAX_DURATION_MS, duration_ms=term_ms)


class Waits(NamedTuple):
    """What came of it: means, and the longest wait."""

    wait_min: float
    slowdown: float
    longest_h: float


def measure() -> list[Line]:
    """With the users' estimates, and with predictions; each against EASY, and predictions against estimates."""
    found = sorted(TRACES.glob("swf/*.swf.gz"))
    if not found:
        raise Unavailable(f"no trace at {TRACES / 'swf'}; see GRID_TRACES")
    jobs = _jobs(found[0])
    estimated, predicted = replay(jobs, LeasesAlone()), replay(jobs, Jobs())
    lines = []
    for name, waits, bars in (
        ("user estimates", estimated, (EASY_WAIT_MIN, EASY_SLOWDOWN)),
        ("predicted run times", predicted, (estimated.wait_min, estimated.slowdown)),
    ):
        lines += [
            Line(f"longest wait, {name}", waits.longest_h, 1.6 * EASY_LONGEST_H, "h", lower_is_better=True),
            Line(f"mean wait, {name}", waits.wait_min, round(bars[0], 1), "min", lower_is_better=True),
            Line(f"mean bounded slowdown, {name}", waits.slowdown, round(bars[1], 1), "", lower_is_better=True),
        ]
    return lines


class LeasesAlone:
    """Everybody asks for a lease with a term and gives it back: nobody can learn from that."""

    def ask(self, job: SwfJob) -> Event:
        return LeaseAsked(job.request)

    def end(self, job: SwfJob, lease: Lease) -> Event:
        return LeaseReleased(lease.id, job.user)


class Jobs:
    """Everybody submits a job, as `grid run-shared` does; its lease has the estimate as its term."""

    def ask(self, job: SwfJob) -> Event:
        return JobSubmitted(id=f"j{job.number}", command=TRUE, request=job.request)

    def end(self, job: SwfJob, lease: Lease) -> Event:
        outcome = Outcome(Ending.EXITED, exit_code=0, wall_ms=1000 * job.run_s)
        return AttemptEnded(uid=job.request.id, number=1, fence=lease.fence, outcome=outcome, pid=1)


def replay(jobs: list[SwfJob], way: LeasesAlone | Jobs) -> Waits:
    """Let every job be asked for at its time, and end when it has run for as long as it did."""
    node = Node(name="sp2", capacity=Capacity(1000 * PROCESSORS, 2**40), offer_ms=MAX_DURATION_MS)
    ledger = Ledger([node])
    step(ledger, HeartbeatReceived(name="sp2", usage=Usage()), 0)
    by_id = {job.request.id: job for job in jobs}
    ends: list[tuple[int, int, SwfJob, Lease]] = []
    started: dict[int, int] = {}
    ahead = iter(jobs)
    job = next(ahead, None)
    while job is not None or ends:
        if ends and (job is None or ends[0][0] <= job.at_s):
            now_s, _, over, lease = heapq.heappop(ends)
            event = way.end(over, lease)
        else:
            assert job is not None
            now_s, event = job.at_s, way.ask(job)
            job = next(ahead, None)
        changes = step(ledger, event, 1000 * now_s).changes
        changes += step(ledger, ScanQueue(), 1000 * now_s).changes  # a control plane looks every second
        for row in changes:
            if isinstance(row, Lease) and row.holds and row.request.id in by_id:
                one = by_id[row.request.id]
                if one.number not in started:
                    started[one.number] = now_s
                    heapq.heappush(ends, (now_s + one.run_s, one.number, one, row))
    return _waits(jobs, started)


def _waits(jobs: list[SwfJob], started: dict[int, int]) -> Waits:
    waits = [started[job.number] - job.at_s for job in jobs]
    slowdowns = [max(1.0, (wait + job.run_s) / max(job.run_s, SHORT_S)) for job, wait in zip(jobs, waits, strict=True)]
    return Waits(sum(waits) / len(jobs) / 60, sum(slowdowns) / len(jobs), max(waits) / 3600)


def _jobs(file: Path) -> list[SwfJob]:
    """The jobs of a trace in the standard workload format, in the order they were asked for."""
    return [
        SwfJob(
            one.at_ms // 1000,
            int(one.request.id.removeprefix("job")),
            one.run_ms // 1000,
            one.request.ask.cpu_milli // 1000,
            max(one.request.expects_ms, one.run_ms) // 1000,
            one.request.user,
        )
        for one in read_trace(str(file)).work[:JOBS]
    ]
