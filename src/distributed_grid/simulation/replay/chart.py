"""A replay as a picture: what was in use and how many waited, over time, one line for each policy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from distributed_grid.simulation.canvas import GREY, HIGH, PALE, Canvas, Colour, width_of
from distributed_grid.simulation.replay.statistics import ReplayStatistics

COLOURS: tuple[Colour, ...] = (
    *((31, 119, 180), (214, 95, 14), (44, 140, 60), (170, 40, 60), (120, 90, 170), (110, 70, 50)),
    *((200, 90, 170), (90, 90, 90), (160, 150, 20), (20, 160, 170)),
)
WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 1100, 200, 110, 20, 30, 44
TICKS = 4
UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


class _Panel(Struct):
    """One chart: its title, what its top means, and the mean of each line in each column."""

    title: str
    most: float
    unit: str
    lines: list[NDArray[np.float64]]


def picture(replays: Sequence[tuple[str, ReplayStatistics]]) -> bytes:
    """The PNG of some replays of the same work, each with its name."""
    span_ms = max((_span(figures) for _, figures in replays), default=1)
    panels = _panels(replays, span_ms, WIDTH - LEFT - RIGHT)
    canvas = Canvas(WIDTH, TOP + len(panels) * (PANEL + GAP) + (len(replays) + 3) // 4 * 22 + 10)
    top = TOP
    for panel in panels:
        _draw(canvas, panel, top, span_ms)
        top += PANEL + GAP
    for place, (name, _) in enumerate(replays):
        x, y = LEFT + place % 4 * 240, top + place // 4 * 22
        canvas.box(x, y + 5, x + 24, y + 8, COLOURS[place % len(COLOURS)])
        canvas.write(x + 32, y, name[:16])
    return canvas.png()


def _panels(replays: Sequence[tuple[str, ReplayStatistics]], span_ms: int, columns: int) -> list[_Panel]:
    def means(figures: ReplayStatistics, values: array[int], has: int = 1) -> NDArray[np.float64]:
        return _means(figures, values, span_ms, columns) / max(has, 1)

    every = [figures for _, figures in replays]
    cpu = [100 * means(figures, figures.series.cpu_milli, figures.has[0]) for figures in every]
    panels = [_Panel("cpu in use", 100.0, "%", cpu)]
    if any(figures.has[1] for figures in every):
        gpu = [100 * means(figures, figures.series.gpu_milli, figures.has[1]) for figures in every]
        panels.append(_Panel("gpu in use", 100.0, "%", gpu))
    waiting = [means(figures, figures.series.waiting) for figures in every]
    most = max((float(line.max(initial=0)) for line in waiting), default=0.0)
    return [*panels, _Panel("waiting requests", _round_up(most), "", waiting)]


def _span(figures: ReplayStatistics) -> int:
    at = figures.series.at_ms
    return max(at[-1] - at[0], 1) if at else 1


def _means(figures: ReplayStatistics, values: array[int], span_ms: int, columns: int) -> NDArray[np.float64]:
    """The mean of a stepped line in each column; it is what it was last until the end."""
    if not values:
        return np.zeros(columns)
    at = np.array(figures.series.at_ms, dtype=np.float64)
    at -= at[0]
    steps = np.array(values, dtype=np.float64)
    times = np.append(at, max(at[-1], span_ms) + 1)
    areas = np.concatenate(([0.0], np.cumsum(steps * np.diff(times))))
    edges = np.linspace(0, span_ms, columns + 1)
    found: NDArray[np.float64] = np.diff(np.interp(edges, times, areas)) / (span_ms / columns)
    return found


def _draw(canvas: Canvas, panel: _Panel, top: int, span_ms: int) -> None:
    right, bottom = canvas.width - RIGHT, top + PANEL
    canvas.write(LEFT, top - 20, panel.title)
    for tick in range(TICKS + 1):
        y = bottom - PANEL * tick // TICKS
        canvas.box(LEFT, y, right, y, PALE)
        label = f"{panel.most * tick / TICKS:g}{panel.unit}"
        canvas.write(LEFT - 8 - width_of(label), y - HIGH, label, GREY)
    size, unit = next(((size, unit) for size, unit in UNITS if span_ms >= 2_000 * size), UNITS[-1])
    for time in _times(span_ms / 1000 / size):
        x = LEFT + round((right - LEFT) * time * 1000 * size / span_ms)
        canvas.box(x, top, x, bottom, PALE)
        label = f"{time:g} {unit}"
        canvas.write(min(x, canvas.width - width_of(label)), bottom + 6, label, GREY)
    for place, line in enumerate(panel.lines):
        heights = [bottom - round(PANEL * min(value / (panel.most or 1), 1.0)) for value in line.tolist()]
        canvas.trace(LEFT, heights, COLOURS[place % len(COLOURS)])


def _times(span: float) -> list[float]:
    """Round numbers from 0 on, a few of them within the span."""
    step = min((digit * 10.0**power for power in range(-3, 9) for digit in (1, 2, 5)), key=lambda s: abs(span / s - 5))
    return [number * step for number in range(int(span / step) + 1)]


def _round_up(most: float) -> float:
    """The next number that divides well into ticks."""
    size = 4.0
    while size < most:
        size *= 2.5 if str(size)[0] == "4" else 2.0
    return size
