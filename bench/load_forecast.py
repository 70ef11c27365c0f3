"""Forecast of load: three public series of 5-minute loads, forecast one step ahead by the class that ships.

The protocol of Gontarska et al. (IC2E'21): the error is sMAPE, mean |e| / (|y| + |p|), over the last 20 % of each
series. The forecaster sees each value after it has forecast it, and starts from nothing; the settings, the same for all
series, were chosen on the first 80 %. Last value and exponential smoothing are recomputed to check the protocol.
Printed beside: forecasts of all slots of an hour and of a day, one in every hour of the last 20 %.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import fmean

from bench.sizes import Unavailable, sized
from bench.table import Line
from bench.traces import TRACES, lines_of
from distributed_grid.prediction.load_forecast import LoadForecaster

PUBLISHED = {"alibaba": (3.49, 2.93, 2.17), "google": (2.91, 2.82, 2.56), "wiki_en": (1.19, 0.97, 0.93)}
"""sMAPE % of the last value, of exponential smoothing and of the GRU."""
ALLOWED = 1.05
"""Times the GRU's error."""
SMOOTHING = 0.4
MAX_STEP_MS = 0.2
SLOTS = sized(None, smoke=1_600)
"""Of each series; None: all."""
HOUR, DAY = 12, 288


def measure() -> list[Line]:
    """Each series, one step ahead, and the time of a step."""
    folder = TRACES / "load"
    if not folder.is_dir():
        raise Unavailable(f"no series at {folder}; see GRID_TRACES")
    print("  sMAPE %              last value      smoothing       ours, and GRU", file=sys.stderr)
    lines = []
    for name, (last_value, smoothing, gru) in PUBLISHED.items():
        loads = read(folder, name)
        first = len(loads) * 8 // 10
        tested = loads[first:]
        smoothed = smooth(loads)[first:]
        forecasts, step_ms = one_step_forecasts(loads)
        error = smape(tested, forecasts[first:])
        print(
            f"  {name:20} {smape(tested, loads[first - 1 : -1]):.2f} ({last_value:.2f})     "
            f"{smape(tested, smoothed):.2f} ({smoothing:.2f})     {error:.2f} ({gru:.2f})",
            file=sys.stderr,
        )
        lines += [
            Line(f"load one step ahead, {name}, sMAPE", error, round(gru * ALLOWED, 2), "%", True),
            Line("  relative to the published GRU", error / gru, 0, "×", True),
            Line("  forecast and learn", step_ms, MAX_STEP_MS, "ms", True),
        ]
        for steps, what in ((HOUR, "hour"), (DAY, "day")):
            ours, last, day_before = errors_ahead(loads, first, steps)
            print(
                f"    each slot of the next {what}: {ours:.2f}, last value {last:.2f}, day before {day_before:.2f}",
                file=sys.stderr,
            )
    return lines


def read(folder: Path, name: str) -> list[float]:
    """The loads of a series."""
    return [float(line.split(",")[1]) for line in lines_of(folder / f"{name}_5min.csv.gz")[1:][:SLOTS]]


def one_step_forecasts(loads: list[float]) -> tuple[list[float], float]:
    """Every slot as it was forecast, and the milliseconds of a step."""
    forecaster = LoadForecaster()
    forecasts = []
    started = time.process_time()
    for slot, load in enumerate(loads):
        forecasts += forecaster.forecast()
        forecaster.observe(slot, load)
    return forecasts, (time.process_time() - started) * 1000 / len(loads)


def errors_ahead(loads: list[float], first: int, steps: int) -> tuple[float, float, float]:
    """sMAPE of forecasts of so many steps, of the last value, and of the day before."""
    forecaster = LoadForecaster()
    ours, last, day_before = [], [], []
    for slot, load in enumerate(loads[: len(loads) - steps]):
        if slot >= first and slot % HOUR == 0:
            truth = loads[slot : slot + steps]
            ours.append(smape(truth, forecaster.forecast(steps)))
            last.append(smape(truth, [loads[slot - 1]] * steps))
            day_before.append(smape(truth, loads[slot - DAY : slot - DAY + steps]))
        forecaster.observe(slot, load)
    return fmean(ours), fmean(last), fmean(day_before)


def smooth(loads: list[float]) -> list[float]:
    """Exponential smoothing: the level before each value."""
    levels = [loads[0]]
    for load in loads[:-1]:
        levels.append(levels[-1] + SMOOTHING * (load - levels[-1]))
    return levels


def smape(truth: list[float], forecasts: list[float]) -> float:
    """Symmetric mean absolute percentage error as the series' authors define it."""
    pairs = zip(truth, forecasts, strict=True)
    return 100 * fmean(abs(load - forecast) / (abs(load) + abs(forecast)) for load, forecast in pairs)
