"""Statistics of a replay: waiting times, utilisation, lost work, and how evenly users were served.

`chart` draws usage and waiting requests over time as SVG, one line for each policy.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from xml.sax.saxutils import escape

from msgspec import Struct

from distributed_grid.domain.jobs import Ending
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.resources import WHOLE_GPU, Capacity

COLOURS = (
    *("#1f77b4", "#d65f0e", "#2c8c3c", "#aa283c", "#785aaa", "#6e4632"),
    *("#c85aaa", "#5a5a5a", "#a09614", "#14a0aa"),
)
WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 1100, 200, 110, 20, 30, 44
TICKS = 4
UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
SHORT_MS = 10_000
"""Work shorter than this counts as that long in the slowdown, so a moment of waiting is no slowdown of a thousand."""


class StatisticsTable(Struct, frozen=True):
    """Figures of one replay. Times are seconds, utilisations are parts of the lendable capacity."""

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


class _JobTimes(Struct):
    user: str
    asked_ms: int
    run_ms: int
    began_ms: int = -1
    ended_ms: int = -1


class Series(Struct):
    """Used amounts and waiting requests at every change."""

    at_ms: array[int]
    cpu_milli: array[int]
    gpu_milli: array[int]
    waiting: array[int]


class ReplayStatistics:
    def __init__(self, lends: Sequence[Capacity]) -> None:
        # the lendable capacity
        self.cpu_milli = sum(capacity.cpu_milli for capacity in lends)
        self.gpu_milli = WHOLE_GPU * sum(len(capacity.gpus) for capacity in lends)
        self._jobs: dict[str, _JobTimes] = {}
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
        self._jobs[request.id] = _JobTimes(request.user, now, run_ms)

    def began(self, uid: str, lease: Lease, now: int) -> None:
        job = self._jobs[uid]
        if job.began_ms < 0:
            job.began_ms = now
        self._use(lease, now, 1)

    def left(self, lease: Lease, now: int, *, lost_ms: int) -> None:
        """A run under a lease has ended; `lost_ms` of its work is lost."""
        self._use(lease, now, -1)
        if lost_ms:
            self._preemptions += 1
            self._lost_milli_ms += lost_ms * lease.request.ask.cpu_milli * lease.request.gang

    def over(self, uid: str, ending: Ending, now: int, *, refused: bool = False) -> None:
        job = self._jobs[uid]
        if refused:
            self._refused += 1
        elif ending is Ending.EXITED:
            self._finished += 1
            job.ended_ms = self._end_ms = now
        else:
            self._gave_up += 1

    def waits(self, now: int, count: int) -> None:
        if count != self._waiting:
            self._pass(now)
            self._waiting = count
            self._note(now)

    def close(self, now: int, *, waiting: int) -> None:
        """End the replay with `waiting` requests left."""
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

    # ------------------------------------------------------------------ results

    def table(self) -> StatisticsTable:
        waits = sorted(job.began_ms - job.asked_ms for job in self._jobs.values() if job.began_ms >= 0)
        done = [job for job in self._jobs.values() if job.ended_ms >= 0]
        slowdowns = [max(1.0, (job.ended_ms - job.asked_ms) / max(job.run_ms, SHORT_MS)) for job in done]
        makespan = max(self._end_ms - self._begin_ms, 0)
        # How evenly users were served, 1 at best: the part of its time in the grid that their work ran.
        ran_ms: dict[str, int] = {}
        stayed_ms: dict[str, int] = {}
        for job in done:
            ran_ms[job.user] = ran_ms.get(job.user, 0) + job.run_ms
            stayed_ms[job.user] = stayed_ms.get(job.user, 0) + max(job.ended_ms - job.asked_ms, 1)
        shares = [ran_ms[user] / stayed_ms[user] for user in ran_ms]
        squared = sum(share * share for share in shares)
        return StatisticsTable(
            jobs=len(self._jobs),
            finished=self._finished,
            refused=self._refused,
            gave_up=self._gave_up,
            waiting=self._left,
            mean_wait_s=_mean(waits) / 1000,
            median_wait_s=_part(waits, 0.5) / 1000,
            p95_wait_s=_part(waits, 0.95) / 1000,
            bounded_slowdown=_mean(slowdowns),
            cpu_utilisation=_ratio(self._cpu_ms, self.cpu_milli * makespan),
            gpu_utilisation=_ratio(self._gpu_ms, self.gpu_milli * makespan) if self.gpu_milli else None,
            makespan_s=makespan / 1000,
            preemptions=self._preemptions,
            cpu_seconds_lost=self._lost_milli_ms / 1_000_000,
            jain=sum(shares) ** 2 / (len(shares) * squared) if squared else 1.0,
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _part(ordered: Sequence[int], part: float) -> float:
    """Quantile of ordered values, interpolated."""
    if not ordered:
        return 0.0
    place = part * (len(ordered) - 1)
    before = int(place)
    after = min(before + 1, len(ordered) - 1)
    return ordered[before] + (place - before) * (ordered[after] - ordered[before])


def _ratio(of: int, whole: int) -> float:
    return of / whole if whole else 0.0


class _Panel(Struct):
    """One panel: its title, its upper bound, and the mean of each line in each column."""

    title: str
    most: float
    unit: str
    lines: list[list[float]]


def chart(replays: Sequence[tuple[str, ReplayStatistics]]) -> str:
    """The SVG of some replays of the same work, each with its name."""
    times = [figures.series.at_ms for _, figures in replays]
    span_ms = max([1, *(at_ms[-1] - at_ms[0] for at_ms in times if at_ms)])
    panels = _panels(replays, span_ms, WIDTH - LEFT - RIGHT)
    height = TOP + len(panels) * (PANEL + GAP) + (len(replays) + 3) // 4 * 22 + 10
    size = f'width="{WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14">',
        f'<rect {size} fill="white"/>',
    ]
    top = TOP
    for panel in panels:
        parts += _drawn(panel, top, span_ms)
        top += PANEL + GAP
    for place, (name, _) in enumerate(replays):
        x, y = LEFT + place % 4 * 240, top + place // 4 * 22
        parts.append(f'<rect x="{x}" y="{y + 5}" width="24" height="4" fill="{COLOURS[place % len(COLOURS)]}"/>')
        parts.append(_text(x + 32, y + 12, name))
    return "\n".join([*parts, "</svg>", ""])


def _panels(replays: Sequence[tuple[str, ReplayStatistics]], span_ms: int, columns: int) -> list[_Panel]:
    def means(figures: ReplayStatistics, values: array[int], whole: int) -> list[float]:
        return [100 * mean / max(whole, 1) for mean in _means(figures.series.at_ms, values, span_ms, columns)]

    every = [figures for _, figures in replays]
    cpu = [means(figures, figures.series.cpu_milli, figures.cpu_milli) for figures in every]
    panels = [_Panel("CPU in use", 100.0, "%", cpu)]
    if any(figures.gpu_milli for figures in every):
        gpu = [means(figures, figures.series.gpu_milli, figures.gpu_milli) for figures in every]
        panels.append(_Panel("GPU in use", 100.0, "%", gpu))
    waiting = [_means(figures.series.at_ms, figures.series.waiting, span_ms, columns) for figures in every]
    most = max((max(line) for line in waiting), default=0.0)
    # The next number that divides well into ticks.
    size = 4.0
    while size < most:
        size *= 2.5 if str(size)[0] == "4" else 2.0
    return [*panels, _Panel("waiting requests", size, "", waiting)]


def _means(at_ms: array[int], values: array[int], span_ms: int, columns: int) -> list[float]:
    """Mean of a stepped line in each column; it keeps its last value until the end."""
    areas = [0.0] * columns
    width = span_ms / columns
    for place, value in enumerate(values):
        begin = at_ms[place] - at_ms[0]
        end = at_ms[place + 1] - at_ms[0] if place + 1 < len(values) else span_ms
        first, last = int(begin / width), min(int(end / width), columns - 1)
        for column in range(first, last + 1) if value else ():
            covered = min(end, (column + 1) * width) - max(begin, column * width)
            areas[column] += value * max(covered, 0.0)
    return [area / width for area in areas]


def _drawn(panel: _Panel, top: int, span_ms: int) -> list[str]:
    right, bottom = WIDTH - RIGHT, top + PANEL
    parts = [_text(LEFT, top - 8, panel.title)]
    for tick in range(TICKS + 1):
        y = bottom - PANEL * tick // TICKS
        parts.append(f'<path d="M{LEFT} {y}H{right}" stroke="#e4e4e4"/>')
        parts.append(_text(LEFT - 8, y + 5, f"{panel.most * tick / TICKS:g}{panel.unit}", anchor="end", fill="#828282"))
    size, unit = next(((size, unit) for size, unit in UNITS if span_ms >= 2_000 * size), UNITS[-1])
    for time in round_times(span_ms / 1000 / size):
        x = LEFT + round((right - LEFT) * time * 1000 * size / span_ms)
        parts.append(f'<path d="M{x} {top}V{bottom}" stroke="#e4e4e4"/>')
        parts.append(_text(x, bottom + 18, f"{time:g} {unit}", anchor="middle", fill="#828282"))
    for place, line in enumerate(panel.lines):
        heights = (bottom - round(PANEL * min(value / (panel.most or 1), 1.0)) for value in line)
        points = " ".join(f"{LEFT + column},{y}" for column, y in enumerate(heights))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{COLOURS[place % len(COLOURS)]}" stroke-width="2"/>'
        )
    return parts


def _text(x: int, y: int, text: str, *, anchor: str = "start", fill: str = "#1e1e1e") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'


def round_times(span: float) -> list[float]:
    """A few round numbers from 0 on within the span."""
    step = min((digit * 10.0**power for power in range(-3, 9) for digit in (1, 2, 5)), key=lambda s: abs(span / s - 5))
    return [number * step for number in range(int(span / step) + 1)]
