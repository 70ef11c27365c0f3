"""Statistics of a replay: waiting times, utilisation, lost work, and how evenly users were served."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from msgspec import Struct

from distributed_grid.domain.jobs import Ending
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.resources import WHOLE_GPU, Capacity

SHORT_MS = 10_000
"""Work shorter than this counts as that long in the slowdown, or a blink of waiting would be a thousandfold."""


class StatisticsTable(Struct, frozen=True):
    """The figures of one replay. Times are seconds, utilisations are parts of what can be lent."""

    jobs: int
    finished: int
    refused: int
    gave_up: int
    waiting: int
    mean_wait_s: float
    median_wait_s: float
    p95_wait_s: float
    bounded_slowdown: float
    cpu_utilisation: float
    gpu_utilisation: float | None
    makespan_s: float
    preemptions: int
    cpu_seconds_lost: float
    jain: float


class _JobTimes:
    """One request: when it was made, began and ended."""

    __slots__ = ("asked_ms", "began_ms", "ended_ms", "run_ms", "user")

    def __init__(self, user: str, asked_ms: int, run_ms: int) -> None:
        self.user = user
        self.asked_ms = asked_ms
        self.run_ms = run_ms
        self.began_ms = -1
        self.ended_ms = -1


class Series(Struct):
    """What was in use, and how many waited, at every moment that changed it."""

    at_ms: array[int]
    cpu_milli: array[int]
    gpu_milli: array[int]
    waiting: array[int]


class ReplayStatistics:
    """Counts while a replay runs."""

    def __init__(self, lends: Sequence[Capacity]) -> None:
        self._cpu_has = sum(one.cpu_milli for one in lends)
        self._gpu_has = WHOLE_GPU * sum(len(one.gpus) for one in lends)
        self._lives: dict[str, _JobTimes] = {}
        self._cpu = self._gpu = self._waiting = 0
        self._cpu_ms = self._gpu_ms = 0
        self._last_ms = self._begin_ms = self._end_ms = -1
        self._refused = self._gave_up = self._finished = self._left = 0
        self._preemptions = self._lost_milli_ms = 0
        self.series = Series(array("q"), array("q"), array("q"), array("q"))

    # ------------------------------------------------------------------ counting

    def asked(self, request: Request, now: int, run_ms: int) -> None:
        if self._begin_ms < 0:
            self._begin_ms = now
        self._lives[request.id] = _JobTimes(request.user, now, run_ms)

    def began(self, uid: str, lease: Lease, now: int) -> None:
        life = self._lives[uid]
        if life.began_ms < 0:
            life.began_ms = now
        self._use(lease, now, 1)

    def left(self, lease: Lease, now: int, *, lost_ms: int) -> None:
        """What ran under a lease runs no more; where it was cut short, so much of its work is lost."""
        self._use(lease, now, -1)
        if lost_ms:
            self._preemptions += 1
            self._lost_milli_ms += lost_ms * lease.request.ask.cpu_milli * lease.request.gang

    def over(self, uid: str, ending: Ending, now: int, *, refused: bool = False) -> None:
        life = self._lives[uid]
        if refused:
            self._refused += 1
        elif ending is Ending.EXITED:
            self._finished += 1
            life.ended_ms = self._end_ms = now
        else:
            self._gave_up += 1

    def waits(self, now: int, count: int) -> None:
        """So many wait from now on."""
        if count != self._waiting:
            self._pass(now)
            self._waiting = count
            self._note(now)

    def close(self, now: int, *, waiting: int) -> None:
        """The replay is over; so many were left waiting."""
        self._pass(now)
        self._left = waiting

    def _use(self, lease: Lease, now: int, sign: int) -> None:
        self._pass(now)
        ask = lease.request.ask
        self._cpu += sign * ask.cpu_milli * lease.request.gang
        self._gpu += sign * ask.gpu_milli * lease.request.gang
        self._note(now)

    def _pass(self, now: int) -> None:
        if self._last_ms >= 0:
            passed = now - self._last_ms
            self._cpu_ms += passed * self._cpu
            self._gpu_ms += passed * self._gpu
        self._last_ms = now

    def _note(self, now: int) -> None:
        series = self.series
        if series.at_ms and series.at_ms[-1] == now:
            series.cpu_milli[-1], series.gpu_milli[-1], series.waiting[-1] = self._cpu, self._gpu, self._waiting
            return
        series.at_ms.append(now)
        series.cpu_milli.append(self._cpu)
        series.gpu_milli.append(self._gpu)
        series.waiting.append(self._waiting)

    # ------------------------------------------------------------------ telling

    @property
    def has(self) -> tuple[int, int]:
        """What there is to lend: millicores, thousandths of GPUs."""
        return self._cpu_has, self._gpu_has

    def table(self) -> StatisticsTable:
        """The figures so far."""
        waits = sorted(life.began_ms - life.asked_ms for life in self._lives.values() if life.began_ms >= 0)
        done = [life for life in self._lives.values() if life.ended_ms >= 0]
        slowdowns = [max(1.0, (life.ended_ms - life.asked_ms) / max(life.run_ms, SHORT_MS)) for life in done]
        makespan = max(self._end_ms - self._begin_ms, 0)
        return StatisticsTable(
            jobs=len(self._lives),
            finished=self._finished,
            refused=self._refused,
            gave_up=self._gave_up,
            waiting=self._left,
            mean_wait_s=_mean(waits) / 1000,
            median_wait_s=_part(waits, 0.5) / 1000,
            p95_wait_s=_part(waits, 0.95) / 1000,
            bounded_slowdown=_mean(slowdowns),
            cpu_utilisation=_ratio(self._cpu_ms, self._cpu_has * makespan),
            gpu_utilisation=_ratio(self._gpu_ms, self._gpu_has * makespan) if self._gpu_has else None,
            makespan_s=makespan / 1000,
            preemptions=self._preemptions,
            cpu_seconds_lost=self._lost_milli_ms / 1_000_000,
            jain=_jain(done),
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _part(ordered: Sequence[int], part: float) -> float:
    """The value that so much of them are below: between two of them, so far from the one to the other."""
    if not ordered:
        return 0.0
    place = part * (len(ordered) - 1)
    before = int(place)
    after = min(before + 1, len(ordered) - 1)
    return ordered[before] + (place - before) * (ordered[after] - ordered[before])


def _ratio(of: int, whole: int) -> float:
    return of / whole if whole else 0.0


def _jain(done: Sequence[_JobTimes]) -> float:
    """How evenly users were served, 1 at best: by how much of the time that their work was in the grid it ran."""
    ran: dict[str, int] = {}
    stayed: dict[str, int] = {}
    for life in done:
        ran[life.user] = ran.get(life.user, 0) + life.run_ms
        stayed[life.user] = stayed.get(life.user, 0) + max(life.ended_ms - life.asked_ms, 1)
    served = [ran[user] / stayed[user] for user in ran]
    squares = sum(one * one for one in served)
    return sum(served) ** 2 / (len(served) * squares) if squares else 1.0
