"""Recording of runs in the predictor's history: its CPU time, relative to that of a whole job.

A job is a one-line command on two cores, as in `jobs`: the CPU time of the control plane, the spawner, the shims and
the commands, which is what bounds the jobs per second. Recording is all that is done for a run after its end is
durable: taking it from its row, storing and learning it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import psutil

from bench import jobs
from bench.control_plane import start_control_plane, temporary_grid
from bench.sizes import sized
from bench.table import Line
from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.adapters.stores.task_history import TaskHistory
from distributed_grid.api.answers.common import Viewer
from distributed_grid.client.client import Client
from distributed_grid.control.grid import Grid
from distributed_grid.domain.jobs import Attempt, Command, Ending, Job, JobEstimate, Outcome
from distributed_grid.domain.leases import Request
from distributed_grid.domain.resources import Amounts
from distributed_grid.prediction.task_runs import TierSettings
from distributed_grid.server.prediction.job_runs import RunRecorder
from distributed_grid.server.prediction.service import PredictionService
from distributed_grid.state_dir import StateDir

ROUNDS, COMMANDS = sized((4, 4), smoke=(2, 2))
SECONDS, JOBS_PER_SECOND = sized((20.0, 400), smoke=(0.5, 40))
MB = 1024**2


class _WallClock:
    """The time of this machine."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


def measure() -> list[Line]:
    """CPU time of a recorded run and of a job, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        run_s = asyncio.run(_recording_seconds(Path(folder)))
    with temporary_grid(jobs.TWO_CORES) as (state_dir, client_config):
        start_control_plane(state_dir, client_config)
        job_s = min(_job_seconds(state_dir) for _ in range(ROUNDS))
    return [
        Line("CPU time of recording a run", 1e6 * run_s, 0, "µs"),
        Line("CPU time of a one-line job without that", 1e6 * (job_s - run_s), 0, "µs"),
        Line("recording, relative to the job", 100 * run_s / (job_s - run_s), 3, "%", lower_is_better=True),
    ]


async def _recording_seconds(folder: Path) -> float:
    """CPU seconds of this process for each recorded run, while so many end as two cores can run, and learning goes on
    in the background as in the control plane."""
    clock = _WallClock()
    prediction = PredictionService(
        TaskHistory(folder / "predictions.db"),
        TierSettings(),
        update_interval_seconds=3600.0,
        now_ms=clock.now_ms,
        viewer=lambda: Viewer(0),
    )
    await prediction.start()
    recorder = RunRecorder(Grid(InMemoryStore(), clock), prediction)
    recorder.record_ended([_ended_job(number, clock.now_ms()) for number in range(50 * COMMANDS)])
    await prediction.store()
    for number in range(COMMANDS):  # as submissions do: a type that nobody asks for is stored, and not learned
        await prediction.run_ms("ann", _ended_job(number, 0).command.argv, 0)
    rows = [_ended_job(50 * COMMANDS + number, clock.now_ms()) for number in range(round(SECONDS * JOBS_PER_SECOND))]
    learning = asyncio.create_task(prediction.learn_forever())
    before, ended = time.process_time(), 0
    began = time.monotonic()
    while (passed := time.monotonic() - began) < SECONDS:
        due = round(JOBS_PER_SECOND * passed)
        recorder.record_ended(rows[ended:due])
        ended = due
        await asyncio.sleep(0.05)
    taken = (time.process_time() - before) / ended
    learning.cancel()
    await asyncio.gather(learning, return_exceptions=True)
    await prediction.stop()
    return taken


def _ended_job(number: int, now: int) -> Job:
    """One of some commands, with a number that differs from run to run."""
    command = Command(("tool", ("align", "sort", "merge", "call")[number % COMMANDS], "--size", str(number % 97)))
    outcome = Outcome(Ending.EXITED, 0, cpu_ms=900, max_memory_bytes=(200 + number % 97) * MB, wall_ms=1_000)
    attempt = Attempt(
        number=1,
        lease_id=f"u{number}.1",
        node="n1",
        fence=1,
        assigned_at_ms=now,
        started_at_ms=now,
        ended_at_ms=now,
        outcome=outcome,
        pid=1,
    )
    request = Request(id=f"u{number}", user="ann", ask=Amounts(cpu_milli=1000))
    estimate = JobEstimate(input_bytes=number % 89)
    return Job(
        uid=f"u{number}",
        id=f"j{number}",
        command=command,
        request=request,
        submitted_at_ms=now,
        attempts=(attempt,),
        estimate=estimate,
    )


def _job_seconds(state_dir: StateDir) -> float:
    """CPU seconds of the control plane and all below it for each job of a round."""
    with Client(state_dir) as client:
        pid = int(client.call("get_daemon_info")["pid"])
    before = _tree_seconds(pid)
    asyncio.run(jobs.run_round(state_dir))
    return (_tree_seconds(pid) - before) / jobs.JOBS


def _tree_seconds(pid: int) -> float:
    total = 0.0
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
