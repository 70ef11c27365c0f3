"""`grid simulate`: replay of a workload log under one or several policies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_grid.cli.command_line import Argument, FloatRange, IntRange, Option, command
from distributed_grid.cli.output import ProgressLine, echo, format_span, print_answer, progress_bar, table
from distributed_grid.cli.session import CliSession
from distributed_grid.errors import BadInput, GridError

if TYPE_CHECKING:
    from distributed_grid.domain.resources import Capacity
    from distributed_grid.replay.replay_statistics import StatisticsTable


@command(
    Argument("trace"),
    Option("--compare", metavar="A,B,…", help="Strategies and cluster files to compare, separated by commas."),
    Option("--seed", type=IntRange(at_least=0), default=0, show_default=True, help="For the owners' coming."),
    Option("--limit", type=IntRange(at_least=1), metavar="N", help="Only the first N requests."),
    Option(
        "--owners",
        type=FloatRange(0, 1000),
        default=0.0,
        metavar="N",
        help="Each machine's owner comes back N times a day, for about an hour (default: never).",
    ),
    Option("--plot", metavar="FILE.svg", help="Draw use and waiting over time."),
)
def simulate(
    session: CliSession,
    trace: str,
    compare: str | None,
    seed: int,
    limit: int | None,
    owners: float,
    plot: str | None,
) -> int:
    """Replay the work of a log under a policy, with the real scheduler on a virtual clock.

    TRACE is a log in the Standard Workload Format, an openb list of pods, or the output of `grid events --json`, packed
    with gzip or not; - is the standard input. The nodes are those of --config, else those of the log.
    """
    words = tuple(word.strip() for word in (compare or "").split(",") if word.strip())
    if compare is not None and not words:
        raise BadInput("--compare names nothing: strategies and cluster files, separated by commas")
    if plot:
        folder = Path(plot).parent
        if Path(plot).is_dir():
            raise BadInput(f"cannot write {plot}: it is a directory")
        target = plot if Path(plot).exists() else folder
        if not folder.is_dir() or not os.access(target, os.W_OK):
            why = "no such folder" if not folder.is_dir() else "not allowed"
            raise GridError(f"cannot write {plot}: {why}")
    bar = _ProgressBar()
    try:
        from distributed_grid.replay.traces import read_trace

        recorded = read_trace(trace).first(limit)
        from distributed_grid.replay.candidates import candidates

        policies = candidates(recorded, session.config, words, _this_machine)
        from distributed_grid.replay.replay import replay_candidates  # last: the scheduler is heavy

        replays = []
        bar.policies = [policy.name for policy in policies]
        for name, figures in replay_candidates(recorded, policies, seed=seed, owners_per_day=owners, progress=bar.show):
            replays.append((name, figures))
            bar.next()
        if plot:
            from distributed_grid.replay.replay_statistics import chart

            try:
                Path(plot).write_text(chart(replays), encoding="utf-8")
            except OSError as failure:
                raise GridError(f"cannot write {plot}: {failure.strerror}") from None
    except KeyboardInterrupt:
        bar.clear()
        echo("grid: stopped; a simulation changes nothing", err=True)
        return 130
    tables = [(name, figures.table()) for name, figures in replays]
    from msgspec.structs import asdict

    def rounded(figures: StatisticsTable) -> dict[str, Any]:
        fields = asdict(figures)
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()}

    data = {
        "trace": recorded.name,
        "left_out": dict(recorded.left_out),
        "policies": [{"policy": name, **rounded(figures)} for name, figures in tables],
        "plot": plot,
    }
    rows = [
        ("requests", *(f"{figures.jobs:,}" for _, figures in tables)),
        ("finished", *(f"{figures.finished:,}" for _, figures in tables)),
        ("refused", *(f"{figures.refused:,}" for _, figures in tables)),
        ("gave up or failed", *(f"{figures.gave_up:,}" for _, figures in tables)),
        ("still waiting at the end", *(f"{figures.waiting:,}" for _, figures in tables)),
        ("mean wait", *(format_span(figures.mean_wait_s, ".1f") for _, figures in tables)),
        ("median wait", *(format_span(figures.median_wait_s, ".1f") for _, figures in tables)),
        ("95 % wait less than", *(format_span(figures.p95_wait_s, ".1f") for _, figures in tables)),
        ("mean bounded slowdown", *(f"{figures.bounded_slowdown:.2f}" for _, figures in tables)),
        ("CPU in use", *(_percent(figures.cpu_utilisation) for _, figures in tables)),
        ("GPU in use", *(_percent(figures.gpu_utilisation) for _, figures in tables)),
        ("makespan", *(format_span(figures.makespan_s, ".1f") for _, figures in tables)),
        ("runs cut short", *(f"{figures.preemptions:,}" for _, figures in tables)),
        ("CPU time lost with them", *(format_span(figures.cpu_seconds_lost, ".1f") for _, figures in tables)),
        ("evenness between users (Jain)", *(f"{figures.jain:.3f}" for _, figures in tables)),
    ]
    lines = [table(("", *(policy_name for policy_name, _ in tables)), rows, empty="")]
    lines += [f"left out: {count:,} request{'s' * (count != 1)} {reason}" for reason, count in recorded.left_out]
    print_answer(session, data, "\n".join([*lines, *([f"wrote {plot}"] if plot else [])]))
    return 0


def _this_machine() -> Capacity:
    from distributed_grid.adapters.probes.gpu_probe import GpuProbe
    from distributed_grid.adapters.probes.machine_probe import MachineProbe
    from distributed_grid.agent.hardware import HardwareDetector

    return HardwareDetector(MachineProbe(), GpuProbe()).capacity()


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.1f} %"


class _ProgressBar:
    def __init__(self) -> None:
        self.policies: list[str] = []
        self._finished = 0
        self._line = ProgressLine()

    def show(self, done: int, total: int) -> None:
        count = len(self.policies)
        policy = f"{self.policies[self._finished]}, {self._finished + 1} of {count}: " if count > 1 else ""
        self._line.draw(lambda: f"{policy}{progress_bar(done, total)} {done:,} of {total:,}")

    def next(self) -> None:
        self.clear()
        self._finished += 1

    def clear(self) -> None:
        self._line.clear()
