"""Sizing of memory: tasks of four nf-core workflows, each sized from those before it, and the memory × time wasted.

The protocol of the traces (Bader et al., Sizey, IEEE CLUSTER 2024): of every type of task, the first 70 % of a random
order come one by one, the rest is history. They are sized by `TaskPredictor` with its tiers, as jobs are in the daemon.
Before a task is sized, only its input bytes are seen; then what it used is learned. Too little memory fails an attempt,
which wastes its whole allocation for all of its run time (and for half of it, to see what that changes), and is tried
again bigger; enough wastes what is not used. Waste and failed attempts are means over ten seeds, beside those of the
published baselines, which are computed in the same run.
"""

from __future__ import annotations

import csv
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bench.sizes import Unavailable, sized
from bench.table import Line
from bench.traces import TRACES, lines_of
from distributed_grid.prediction.task_predictor import TaskPredictor
from distributed_grid.prediction.task_runs import TaskRun, Tier, TierSettings, limits_of

SEEDS = sized(range(10), smoke=range(1))
PUBLISHED: dict[str, dict[str, float]] = {
    "iwd": {"presets": 15.6, "percentile": 1.60, "line + std": 5.48, "line + std under": 7.46, "tovar": 6.96},
    "rnaseq": {"presets": 1248, "percentile": 129, "line + std": 192, "line + std under": 473, "tovar": 314},
    "eager": {"presets": 2233, "percentile": 830, "line + std": 1191, "line + std under": 3993, "tovar": 1049},
    "chipseq": {"presets": 263, "percentile": 99.6, "line + std": 125, "line + std under": 246, "tovar": 356},
}
"""GBh that the baselines waste."""
CLOSE = 0.01
"""So much apart, relative, a baseline is the published one: the published figures are rounded to three digits."""
MAX_RATIO, MAX_MEDIAN_RATIO, MAX_SUBMISSION_RATIO = 0.60, 0.33, 1.1
SETTINGS = TierSettings()
MIN_TASKS, HISTORY_SHARE = 34, 0.3
WORKFLOWS, TASKS_PER_TYPE = sized((None, None), smoke=(1, 40))
"""Of the traces; None: all."""
BIN, TRAINED = sized((1_000, 2_000), smoke=(20, 20))
NODE_BYTES = 128e9
"""What Tovar's rule gives a task that ran over the largest seen."""
BYTE_MS_PER_GBH = 1e9 * 3_600_000
Values = NDArray[np.float64]
Indexes = NDArray[np.int_]
Duration = tuple[float, float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tasks:
    """All tasks of one type: a value each."""

    input_bytes: Values
    used_bytes: Values
    peak_bytes: Values
    preset_bytes: Values
    run_ms: Values


@dataclass(slots=True)
class Waste:
    """Memory × time wasted by a way of sizing, and its failed attempts, over all seeds."""

    byte_ms: float = 0.0
    half_byte_ms: float = 0.0
    """The same if an attempt that fails does so after half of its run time."""
    failed: int = 0

    def add(self, allocations: list[float], used_bytes: float, run_ms: float) -> None:
        """One task: the attempts that failed, and the one that did not."""
        *failed, enough = allocations
        self.byte_ms += (sum(failed) + enough - used_bytes) * run_ms
        self.half_byte_ms += (sum(failed) / 2 + enough - used_bytes) * run_ms
        self.failed += len(failed)

    @property
    def gbh(self) -> float:
        """A seed's mean, in decimal GB × hours."""
        return self.byte_ms / BYTE_MS_PER_GBH / len(SEEDS)

    @property
    def half_gbh(self) -> float:
        """The same where attempts fail after half of their run time."""
        return self.half_byte_ms / BYTE_MS_PER_GBH / len(SEEDS)

    @property
    def failed_attempts(self) -> float:
        """A seed's mean."""
        return self.failed / len(SEEDS)


@dataclass(slots=True)
class Costs:
    """Seconds and CPU seconds that each prediction and each update took, and how often each tier predicted."""

    predictions: list[Duration] = field(default_factory=list)
    updates: list[Duration] = field(default_factory=list)
    tiers: Counter[Tier] = field(default_factory=Counter)
    judged: list[tuple[float, bool]] = field(default_factory=list)
    """The confidence that was said, and whether the first attempt then had enough."""

    def p95_ms(self, durations: list[Duration]) -> tuple[float, float]:
        """95th percentiles of both."""
        real, cpu = zip(*durations, strict=True)
        return 1000 * float(np.quantile(real, 0.95)), 1000 * float(np.quantile(cpu, 0.95))


def timed(work: Callable[[], T]) -> tuple[T, Duration]:
    """What work returns, and how long it took."""
    real, cpu = time.perf_counter(), time.thread_time()
    found = work()
    return found, (time.perf_counter() - real, time.thread_time() - cpu)


def measure() -> list[Line]:
    """Waste and failed attempts on every workflow beside the best baseline, and what predicting and learning cost."""
    folder = TRACES / "sizey"
    if not folder.is_dir():
        raise Unavailable(f"no traces of tasks at {folder}; see GRID_TRACES")
    lines: list[Line] = []
    ratios, half_ratios, costs = [], [], Costs()
    all_types: list[Tasks] = []
    for workflow, published in list(PUBLISHED.items())[:WORKFLOWS]:
        types = read(folder / f"trace_{workflow}.csv.gz")
        baselines = {name: _baseline(types, name) for name in published}
        ours = Waste()
        for tasks in types:
            for seed in SEEDS:
                _replay(tasks, seed, ours, costs)
        best = min(baselines.values(), key=lambda waste: waste.gbh)
        limit = baselines["percentile"].failed_attempts
        ratios.append(ours.gbh / best.gbh)
        half_ratios.append(ours.half_gbh / min(waste.half_gbh for waste in baselines.values()))
        apart = max(abs(waste.gbh / published[name] - 1) for name, waste in baselines.items())
        print(_row(workflow, ours, baselines), file=sys.stderr)
        lines += [
            Line(f"memory × time wasted, {workflow}, of the best baseline's", ratios[-1], MAX_RATIO, "×", True),
            Line("  the same, failing after half of the run time", half_ratios[-1], 0, "×", True),
            Line("  failed attempts, beside the 95th percentile's", ours.failed_attempts, limit, "", True),
            Line("  baselines apart from those published, at most", 100 * apart, 100 * CLOSE, "%", True),
        ]
        submitted, submitted_early = _replay_submissions(types)
        lines += [
            Line(
                "  in submission order without history, of the 95th percentile's",
                submitted,
                MAX_SUBMISSION_RATIO,
                "×",
                True,
            ),
            Line("    the same, the percentile from the first run on", submitted_early, 0, "×", True),
        ]
        all_types += types
    total = sum(costs.tiers.values())
    print("  sized by", ", ".join(f"{tier} {n / total:.0%}" for tier, n in costs.tiers.items()), file=sys.stderr)
    said, enough = (100 * float(np.mean(values)) for values in zip(*costs.judged, strict=True))
    predicted, updated = costs.p95_ms(costs.predictions), costs.p95_ms(costs.updates)
    all_types.sort(key=lambda tasks: -len(tasks.used_bytes))
    one, twenty = (timed(partial(_train, all_types[:count]))[1] for count in (1, 20))
    return [
        *lines,
        Line("median of the four ratios", median(ratios), MAX_MEDIAN_RATIO, "×", True),
        Line("  failing after half of the run time", median(half_ratios), 0, "×", True),
        Line("confidence that was said, mean", said, 0, "%"),
        Line("  first attempts that had enough", enough, 0, "%"),
        Line("  apart, in the worst thousand by confidence", _worst_bin(costs.judged), 0, "points", True),
        Line("size a task, 95th percentile", predicted[0], 5, "ms", True),
        Line("  its CPU time", predicted[1], 0, "ms", True),
        Line("learn from a task, 95th percentile", updated[0], 20, "ms", True),
        Line("  its CPU time", updated[1], 0, "ms", True),
        Line("learn from a history of 2,000 tasks of one type", one[0], 1.5, "s", True),
        Line("  its CPU time", one[1], 0, "s", True),
        Line("learn from a history of 2,000 tasks of 20 types", twenty[0], 1.5, "s", True),
        Line("  its CPU time", twenty[1], 0, "s", True),
    ]


def _worst_bin(judged: list[tuple[float, bool]]) -> float:
    """How far, in points, the confidence is from the share that had enough, in its worst bin of a thousand tasks."""
    order = sorted(judged, key=lambda one: one[0])
    bins = [order[at : at + BIN] for at in range(0, len(order) - BIN + 1, BIN)]
    return max(100 * abs(float(np.mean([s - e for s, e in one]))) for one in bins)


def read(file: Path) -> list[Tasks]:
    """The types of task of a workflow that the protocol keeps."""
    rows: dict[str, list[list[float]]] = defaultdict(list)
    for row in csv.DictReader(lines_of(file)):
        if float(row["rss"]) > 0:
            keys = ("rchar", "rss", "peak_rss", "memory", "realtime")
            rows[row["process"]].append([float(row[key]) for key in keys])
    types = [Tasks(*np.array(tasks[:TASKS_PER_TYPE]).T) for tasks in rows.values()]
    return [tasks for tasks in types if len(tasks.run_ms) >= MIN_TASKS and tasks.run_ms.all()]


def _order(tasks: Tasks, seed: int) -> tuple[Indexes, Indexes]:
    """Indexes of the history, and of the tasks that come, in order."""
    count = len(tasks.run_ms)
    order = np.random.RandomState(seed).permutation(count)
    split = math.ceil(round((1 - HISTORY_SHARE) * count, 6))
    return order[split:], order[:split]


def _replay(tasks: Tasks, seed: int, waste: Waste, costs: Costs) -> None:
    """Size every task by the class that ships, and learn what it used."""
    history, coming = _order(tasks, seed)
    predictor = TaskPredictor(SETTINGS)
    predictor.learn_all(_run(tasks, i, attempt=0) for i in history)
    for i in coming:
        waste.add(_attempts(predictor, tasks, i, costs), tasks.used_bytes[i], tasks.run_ms[i])


def _replay_submissions(types: list[Tasks]) -> tuple[float, float]:
    """Our waste relative to the 95th percentile's, in the order of the trace and with nothing known at the start.

    The daemon sets no limit until it knows five runs; those tasks have their presets here, in the first ratio on both
    sides. In the second one the percentile predicts from the first run on.
    """
    ours, baseline, early = Waste(), Waste(), Waste()
    for tasks in types:
        predictor, costs = TaskPredictor(SETTINGS), Costs()
        for i, (used, run_ms, preset) in enumerate(
            zip(tasks.used_bytes, tasks.run_ms, tasks.preset_bytes, strict=True)
        ):
            ours.add(_attempts(predictor, tasks, i, costs), used, run_ms)
            seen = tasks.used_bytes[:i]
            allocations = _doubled(float(np.percentile(seen, 95)), used, seen.max()) if i else [preset]
            early.add(allocations, used, run_ms)
            baseline.add(allocations if i >= SETTINGS.min_samples_for_stats else [preset], used, run_ms)
    return ours.byte_ms / baseline.byte_ms, ours.byte_ms / early.byte_ms


def _attempts(predictor: TaskPredictor, tasks: Tasks, i: int, costs: Costs) -> list[float]:
    """Memory of each attempt of a task in the daemon; they are learned."""
    used = int(tasks.used_bytes[i])
    prediction, took = timed(partial(predictor.predict, int(tasks.input_bytes[i])))
    costs.predictions.append(took)
    costs.tiers[prediction.tier if prediction else Tier.DEFAULTS] += 1
    allocations = [tasks.preset_bytes[i]]  # no limit is set: what the user would have asked for
    if prediction is not None:
        limits = iter(limits_of(prediction))
        allocations = [float(next(limits))]
        costs.judged.append((prediction.confidence, allocations[0] >= used))
        while allocations[-1] < used:
            predictor.learn_all([_run(tasks, i, attempt=len(allocations), limit=int(allocations[-1]))])
            allocations.append(float(next(limits, 2 * allocations[-1])))
    costs.updates.append(timed(partial(predictor.learn_all, [_run(tasks, i, attempt=0)]))[1])
    return allocations


def _run(tasks: Tasks, i: int, *, attempt: int, limit: int = 0) -> TaskRun:
    """A task as it is recorded; with a limit, an attempt that ran over it."""
    return TaskRun(
        task_id=f"task-{i}",
        attempt=attempt,
        user="user",
        key="type",
        input_bytes=int(tasks.input_bytes[i]),
        memory_bytes=limit or int(tasks.used_bytes[i]),
        run_ms=0 if limit else int(tasks.run_ms[i]),
        is_lower_bound=limit > 0,
    )


def _train(types: list[Tasks]) -> None:
    """Learn 2,000 runs, as many of each of these types."""
    for tasks in types:
        count = len(tasks.run_ms)
        runs = [_run(tasks, i % count, attempt=i) for i in range(TRAINED // len(types))]
        TaskPredictor(SETTINGS).learn_all(runs)


# ---------------------------------------------------------------- baselines


def _baseline(types: list[Tasks], name: str) -> Waste:
    """A published way of sizing on all types and seeds."""
    waste = Waste()
    for tasks in types:
        for seed in SEEDS:
            history, coming = _order(tasks, seed)
            if name == "presets":
                for i in coming:
                    waste.add([tasks.preset_bytes[i]], tasks.peak_bytes[i], tasks.run_ms[i])
            else:
                for i, allocations in BASELINES[name](tasks, history, coming):
                    waste.add(allocations, tasks.used_bytes[i], tasks.run_ms[i])
    return waste


def _doubled(first: float, used: float, largest: float) -> list[float]:
    """Attempts until one is enough, each twice the one before it."""
    allocations = [first]
    while allocations[-1] < used:
        allocations.append(2 * allocations[-1] if allocations[-1] > 0 else largest)
    return allocations


Attempts = Iterator[tuple[int, list[float]]]


def _percentile(tasks: Tasks, history: Indexes, coming: Indexes) -> Attempts:
    """The 95th percentile of all seen (Witt et al.), then doubling."""
    seen = np.concatenate([tasks.used_bytes[history], tasks.used_bytes[coming]])
    for number, i in enumerate(coming, len(history)):
        yield i, _doubled(float(np.percentile(seen[:number], 95)), tasks.used_bytes[i], seen[:number].max())


def _lines(tasks: Tasks, history: Indexes, coming: Indexes, under: bool) -> Attempts:
    """A straight line (Witt et al.), raised by the deviation of its relative errors, or of those where it was low."""
    order = np.concatenate([history, coming])
    x, y = tasks.input_bytes[order], tasks.used_bytes[order]
    errors: list[float] = []
    for number, i in enumerate(coming, len(history)):
        away = x[:number] - x[:number].mean()
        inertia = (away**2).sum()
        slope = (away * y[:number]).sum() / inertia if inertia else 0.0
        guess = y[:number].mean() + slope * (x[number] - x[:number].mean())
        counted = [error for error in errors if error > 0] if under else errors
        yield i, _doubled(guess * (1 + (np.std(counted) if counted else 0.0)), y[number], y[:number].max())
        errors.append((y[number] - guess) / y[number])


def _tovar(tasks: Tasks, history: Indexes, coming: Indexes) -> Attempts:
    """Least expected waste over what was seen (Tovar et al.), then the largest seen, then a whole node."""
    order = np.concatenate([history, coming])
    for number, i in enumerate(coming, len(history)):
        used, run_ms = tasks.used_bytes[order[:number]], tasks.run_ms[order[:number]]
        by_size = np.argsort(-used, kind="stable")
        above = np.cumsum(run_ms[by_size]) - run_ms[by_size]
        sizes, firsts = np.unique(-used[by_size], return_index=True)
        cost = -sizes * run_ms.sum() + used.max() * above[firsts]
        allocations = [-float(sizes[np.argmin(cost)])]
        while allocations[-1] < tasks.used_bytes[i]:
            allocations.append(float(used.max()) if allocations[-1] < used.max() else NODE_BYTES)
        yield i, allocations


BASELINES: dict[str, Callable[[Tasks, Indexes, Indexes], Attempts]] = {
    "percentile": _percentile,
    "line + std": lambda tasks, history, coming: _lines(tasks, history, coming, under=False),
    "line + std under": lambda tasks, history, coming: _lines(tasks, history, coming, under=True),
    "tovar": _tovar,
}


def _row(workflow: str, ours: Waste, baselines: dict[str, Waste]) -> str:
    ways = {"grid": ours, **baselines}
    cells = (f"{name} {way.gbh:.4g} / {way.half_gbh:.4g} ({way.failed_attempts:.0f})" for name, way in ways.items())
    return f"  {workflow}, GBh wasted / failing at half (failed attempts): {', '.join(cells)}"
