"""A stand-in of a Slurm cluster: it answers `sbatch`, `squeue`, `scancel` and `sinfo` with the texts of the real ones,
on a clock that is handed to it.

The rules of the real one are kept: a job is shown as soon as the controller has it, also when nobody heard the answer;
one of a name waits for all earlier ones of that name (`singleton`); it ends at its time limit; what is over is shown
for some minutes. A submission whose answer is lost may take effect late (`visible_after`). The second pilot of a worker
finds its token spent, and ends by itself.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from distributed_grid.adapters.clouds.slurm import SlurmProvider
from distributed_grid.adapters.clouds.slurm_queue import JOB_FORMAT, NODE_FORMAT, CommandResult
from distributed_grid.errors import Unreachable
from distributed_grid.ports import CloudProviderBase, WorkerInstance, WorkerOffer, WorkerOrder
from tests.support.clouds.stand_in import FaultScript, Machine

PARTITION = "debug"
MIN_JOB_AGE, SPENT_TOKEN_SECONDS = 300.0, 5.0
FAR_AWAY = 1e12
"""When a job starts of which nobody can know."""
SETTINGS: Mapping[str, Any] = {
    "partition": PARTITION,
    "worker_types": {"cpu": {"cpus": 2, "memory_gb": 4}, "gpu": {"cpus": 4, "memory_gb": 16, "gpus": 1}},
    "price_per_hour": {"cpu": 0.1, "gpu": 0.9},
}
_FAILED = "sbatch: error: Batch job submission failed: "
_SBATCH_FAULTS = {
    "lose_before": _FAILED + "Unable to contact slurm controller (connect failure)",
    "lose_after": _FAILED + "Socket timed out on send/recv operation",
    "fail": _FAILED + "Zero Bytes were transmitted or received",
    "throttle": _FAILED + "Resource temporarily unavailable",
    "no_capacity": _FAILED + "Requested node configuration is not available",
    "quota": _FAILED + "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
    "refuse": _FAILED + "User's group not permitted to use this partition",
}
_COUNTED = ("list", "describe")


@dataclass
class StandInJob:
    """A job of the stand-in; times are those of its clock."""

    id: int
    name: str
    comment: str
    submitted_at: float
    limit_seconds: float
    starts_after: float = 0.0
    start_at: float | None = None
    cancelled_at: float | None = None
    ended_at: float | None = None
    end: str = ""


class SlurmCommands:
    """A cluster with room for everybody. `queue_seconds` says how long the next job waits for its turn."""

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        *,
        visible_after: float = 0.0,
        stops_in: float = 0.0,
        queue_seconds: Callable[[], float] = lambda: 0.0,
        settings: Mapping[str, Any] = SETTINGS,
    ) -> None:
        self.clock = clock
        self.faults = FaultScript()
        self.visible_after = visible_after
        self.stops_in = stops_in
        self.jobs: list[StandInJob] = []
        self.commands: list[Sequence[str]] = []
        self._queue_seconds = queue_seconds
        self._settings = settings
        self._folder = tempfile.TemporaryDirectory(prefix="slurm-stand-in-")
        self._ids = itertools.count(1)
        self._lock = threading.RLock()

    def provider(self) -> CloudProviderBase:
        return _WatchedProvider(self, {**self._settings, "directory": f"{self._folder.name}/shared"})

    def machines(self) -> list[Machine]:
        """Every job there ever was; one that waits was made when its turn comes."""
        with self._lock:
            self._advance()
            return [self._machine(job) for job in self.jobs]

    def add_foreign(self) -> str:
        with self._lock:
            job = self._add("somebody's", "(null)", 1e9)
            return str(job.id)

    def take_away(self, instance: str) -> None:
        with self._lock:
            self._advance()
            for job in self.jobs:
                if str(job.id) == instance and job.ended_at is None:
                    job.ended_at, job.end = self.clock(), "PREEMPTED"

    def close(self) -> None:
        self._folder.cleanup()

    # ------------------------------------------------------------------ commands

    def run(self, method: str, command: Sequence[str], text: str) -> CommandResult:
        """Output of a command that a method of the port runs."""
        with self._lock:
            self.commands.append(command)
            self._advance()
            options = dict(word[2:].partition("=")[::2] for word in command[1:] if word.startswith("--"))
            match command[0]:
                case "sbatch" if "version" in options:
                    return CommandResult(0, "slurm-wlm 22.05.8\n")
                case "sbatch":
                    return self._sbatch(options, text)
                case "squeue":
                    return self._squeue(method, options)
                case "scancel":
                    return self._scancel([word for word in command[1:] if not word.startswith("--")])
                case "sinfo":
                    return self._sinfo(options)
        raise AssertionError(f"unknown command: {command}")

    def _sbatch(self, options: Mapping[str, str], script: str) -> CommandResult:
        assert script.startswith("#!/bin/sh\n"), "sbatch takes only scripts"
        if "test-only" in options:
            return CommandResult(0, errors="sbatch: Job 1 to start at 2026-01-01T00:00:00 using 2 processors\n")
        fault, _, _ = self.faults.next("create", options["job-name"]).partition(":")
        if fault and fault != "lose_after":
            return CommandResult(1, errors=_SBATCH_FAULTS[fault] + "\n")
        job = self._add(options["job-name"], options["comment"], 60.0 * int(options["time"]))
        if fault == "lose_after":
            job.submitted_at += self.visible_after
            return CommandResult(1, errors=_SBATCH_FAULTS[fault] + "\n")
        return CommandResult(0, f"{job.id}\n")

    def _squeue(self, method: str, options: Mapping[str, str]) -> CommandResult:
        assert (options["format"], options["states"]) == (JOB_FORMAT, "all")
        fault = self.faults.next(method) if method in _COUNTED else ""
        if fault.startswith("lose"):
            raise Unreachable("no answer of squeue within 15 s")
        if fault:
            failed = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
            return CommandResult(1, errors=failed)
        now = self.clock()
        shown = [job for job in self.jobs if job.submitted_at <= now < (job.ended_at or FAR_AWAY) + MIN_JOB_AGE]
        return CommandResult(0, "".join(f"{self._line(job)}\n" for job in shown))

    def _scancel(self, ids: Sequence[str]) -> CommandResult:
        fault = self.faults.next("terminate", " ".join(ids))
        errors = []
        for job_id in ids:
            job = next((one for one in self.jobs if str(one.id) == job_id), None)
            if fault in ("", "lose_after") and job is not None and job.ended_at is None and job.cancelled_at is None:
                job.cancelled_at = self.clock()
            if fault:
                why = "Access/permission denied" if fault == "refuse" else "Socket timed out on send/recv operation"
                errors.append(f"scancel: error: Kill job error on job id {job_id}: {why}\n")
        self._advance()
        return CommandResult(1 if errors else 0, errors="".join(errors))

    def _sinfo(self, options: Mapping[str, str]) -> CommandResult:
        assert options["format"] == NODE_FORMAT
        if self.faults.next("offers"):
            failed = "slurm_load_partitions: Unable to contact slurm controller (connect failure)\n"
            return CommandResult(1, errors=failed)
        known = PARTITION in options.get("partition", PARTITION).split(",")
        return CommandResult(0, f"{PARTITION}*|up|infinite|64|256000|mixed\n" if known else "")

    # ------------------------------------------------------------------ jobs

    def _add(self, name: str, comment: str, limit_seconds: float) -> StandInJob:
        job = StandInJob(next(self._ids), name, comment, self.clock(), limit_seconds, self._queue_seconds())
        self.jobs.append(job)
        self._advance()
        return job

    def _advance(self) -> None:
        """Start and end what the time calls for, in the order of the ids."""
        now = self.clock()
        for job in self.jobs:
            if job.ended_at is not None:
                continue
            earlier = [one for one in self.jobs if one.id < job.id and one.name == job.name]
            self._start(job, earlier, now)
            self._end(job, any(one.start_at is not None for one in earlier), now)

    def _start(self, job: StandInJob, earlier: Sequence[StandInJob], now: float) -> None:
        if job.start_at is not None or any(one.ended_at is None for one in earlier):
            return
        start_at = max([job.submitted_at + job.starts_after, *(one.ended_at or 0.0 for one in earlier)])
        if start_at <= now and (job.cancelled_at is None or start_at < job.cancelled_at):
            job.start_at = start_at

    def _end(self, job: StandInJob, is_second: bool, now: float) -> None:
        ends: list[tuple[float, str]] = []
        if job.cancelled_at is not None:
            ends.append((job.cancelled_at + (self.stops_in if job.start_at is not None else 0.0), "CANCELLED"))
        if job.start_at is not None:
            ends.append((job.start_at + job.limit_seconds, "TIMEOUT"))
            if is_second:
                ends.append((job.start_at + SPENT_TOKEN_SECONDS, "FAILED"))
        ended_at, end = min(ends, default=(FAR_AWAY, ""))
        if ended_at <= now:
            job.ended_at, job.end = ended_at, end

    def _machine(self, job: StandInJob) -> Machine:
        parts = job.comment.split("/")
        grid_id, worker_id = (parts[1], parts[2]) if len(parts) == 4 else ("", f"foreign-{job.id}")
        planned = job.submitted_at + job.starts_after
        waits_for_another = any(one.id < job.id and one.name == job.name and one.ended_at is None for one in self.jobs)
        made_at = job.start_at if job.start_at is not None else FAR_AWAY if waits_for_another else planned
        return Machine(worker_id, grid_id, str(job.id), made_at, job.ended_at, zone=PARTITION)

    def _line(self, job: StandInJob) -> str:
        now = self.clock()
        state, reason = "PENDING", "Priority"
        used = 0.0
        if job.ended_at is not None:
            state, reason = job.end, "None"
            used = job.ended_at - (job.start_at if job.start_at is not None else job.ended_at)
        elif job.start_at is not None:
            state, reason = "COMPLETING" if job.cancelled_at is not None else "RUNNING", "None"
            used = now - job.start_at
        submitted = datetime.fromtimestamp(job.submitted_at, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        left = slurm_time(max(job.limit_seconds - used, 0))
        return f"{job.id}|{state}|{slurm_time(used)}|{left}|{submitted}|{PARTITION}|{reason}|{job.comment}"


class _WatchedProvider(SlurmProvider):
    """The provider that ships; each command is known to be run for one method of the port."""

    def __init__(self, cloud: SlurmCommands, settings: Mapping[str, Any]) -> None:
        self._method = threading.local()
        super().__init__(
            settings,
            run=lambda command, text, keep_open: cloud.run(getattr(self._method, "name", ""), command, text),
            clock=cloud.clock,
        )

    def create(self, order: WorkerOrder) -> WorkerInstance:
        self._method.name = "create"
        return super().create(order)

    def list(self, grid_id: str) -> Sequence[WorkerInstance]:
        self._method.name = "list"
        return super().list(grid_id)

    def describe(self, worker_id: str, grid_id: str) -> WorkerInstance | None:
        self._method.name = "describe"
        return super().describe(worker_id, grid_id)

    def terminate(self, worker_id: str, grid_id: str) -> None:
        self._method.name = "terminate"
        super().terminate(worker_id, grid_id)

    def offers(self) -> Sequence[WorkerOffer]:
        self._method.name = "offers"
        return super().offers()


def slurm_time(seconds: float) -> str:
    """A duration as Slurm prints it."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}-{hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
