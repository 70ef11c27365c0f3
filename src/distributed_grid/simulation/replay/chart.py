"""SVG chart of replays: what was in use and how many requests waited, over time, one line for each policy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from xml.sax.saxutils import escape

from msgspec import Struct

from distributed_grid.simulation.replay.replay_statistics import ReplayStatistics

COLOURS = (
    *("#1f77b4", "#d65f0e", "#2c8c3c", "#aa283c", "#785aaa", "#6e4632"),
    *("#c85aaa", "#5a5a5a", "#a09614", "#14a0aa"),
)
WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 1100, 200, 110, 20, 30, 44
TICKS = 4
UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


class _Panel(Struct):
    """One panel: its title, what its top means, and the mean of each line in each column."""

    title: str
    most: float
    unit: str
    lines: list[list[float]]


def chart(replays: Sequence[tuple[str, ReplayStatistics]]) -> str:
    """The SVG of some replays of the same work, each with its name."""
    span_ms = max((_span_ms(figures) for _, figures in replays), default=1)
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
        parts.append(f'<rect x="{x}" y="{y + 5}" width="24" height="4" fill="{_colour(place)}"/>')
        parts.append(_text(x + 32, y + 12, name))
    return "\n".join([*parts, "</svg>", ""])


def _panels(replays: Sequence[tuple[str, ReplayStatistics]], span_ms: int, columns: int) -> list[_Panel]:
    def means(figures: ReplayStatistics, values: array[int], whole: int) -> list[float]:
        found = _means(figures.series.at_ms, values, span_ms, columns)
        return [100 * value / max(whole, 1) for value in found]

    every = [figures for _, figures in replays]
    panels = [_Panel("CPU in use", 100.0, "%", [means(one, one.series.cpu_milli, one.has[0]) for one in every])]
    if any(figures.has[1] for figures in every):
        gpu = [means(one, one.series.gpu_milli, one.has[1]) for one in every]
        panels.append(_Panel("GPU in use", 100.0, "%", gpu))
    waiting = [_means(one.series.at_ms, one.series.waiting, span_ms, columns) for one in every]
    most = max((max(line) for line in waiting), default=0.0)
    return [*panels, _Panel("waiting requests", _round_up(most), "", waiting)]


def _span_ms(figures: ReplayStatistics) -> int:
    at = figures.series.at_ms
    return max(at[-1] - at[0], 1) if at else 1


def _means(at_ms: array[int], values: array[int], span_ms: int, columns: int) -> list[float]:
    """The mean of a stepped line in each column; it is what it was last until the end."""
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
    for time in _times(span_ms / 1000 / size):
        x = LEFT + round((right - LEFT) * time * 1000 * size / span_ms)
        parts.append(f'<path d="M{x} {top}V{bottom}" stroke="#e4e4e4"/>')
        parts.append(_text(x, bottom + 18, f"{time:g} {unit}", anchor="middle", fill="#828282"))
    for place, line in enumerate(panel.lines):
        heights = (bottom - round(PANEL * min(value / (panel.most or 1), 1.0)) for value in line)
        points = " ".join(f"{LEFT + column},{y}" for column, y in enumerate(heights))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{_colour(place)}" stroke-width="2"/>')
    return parts


def _text(x: int, y: int, text: str, *, anchor: str = "start", fill: str = "#1e1e1e") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


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
