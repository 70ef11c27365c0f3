"""Workers in allocations of a Slurm cluster: a pilot job runs `grid agent`, and ends when the agent ends.

Whose a job is, and by which order it was made, is in its comment, which is part of the call that submits it. Slurm has
no key that makes a submission idempotent, so an order looks for its job first, under a lock that a running `sbatch`
holds, too. Should two jobs be submitted for one worker all the same, they never run at once (`--dependency=singleton`,
both have the worker's name), and the second one has no token, or one that is spent, and ends by itself.

Slurm ends a job at its time limit, whatever happens to the control plane, and never starts it a second time.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from msgspec import Struct

from distributed_grid.adapters.clouds.slurm_pilot import (
    CPU_VARIABLE,
    MEMORY_VARIABLE,
    NOTICE_SIGNAL,
    Leftovers,
    PilotFiles,
    pilot_script,
)
from distributed_grid.adapters.clouds.slurm_queue import RunCommand, SlurmJob, SlurmNodes, SlurmQueue, run_command
from distributed_grid.config.providers import SlurmSettings, SlurmWorkerType, provider_settings
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import BadInput, Conflict, NoCapacity, Refused, Throttled, Unreachable
from distributed_grid.number_text import counted, plain_number, rounded
from distributed_grid.ports import JOIN_VARIABLE, CloudProviderBase, WorkerInstance, WorkerOffer, WorkerOrder

COMMENT_PREFIX = "distributed-grid"
DEFAULT_TYPES: Mapping[str, SlurmWorkerType] = {"cpu": SlurmWorkerType()}
MIB = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,62}", re.ASCII)
_ORDER_OF_LIFE = ("running", "starting", "stopping", "gone")


class _JobTag(Struct, frozen=True):
    """Whose a job is, and by which order it was submitted."""

    grid_id: str
    worker_id: str
    digest: str


class SlurmProvider(CloudProviderBase):
    """Submits and cancels pilot jobs, with the settings of `providers.slurm` or a mapping of its keys."""

    name = "slurm"
    is_consistent = True

    def __init__(
        self,
        settings: SlurmSettings | Mapping[str, Any],
        *,
        run: RunCommand | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`run` runs the commands of Slurm, `clock` is the time since 1970 in seconds."""
        self._settings = _checked(settings)
        self._directory = Path(self._settings.directory).expanduser()
        self._leftovers = Leftovers(self._directory)
        self._queue = SlurmQueue(run or partial(run_command, config_file=self._settings.config_file), clock=clock)

    def create(self, order: WorkerOrder) -> WorkerInstance:
        """Submit the pilot, unless there is one; while it is in the queue it `waits`, and `detail` says for what."""
        files = self._files(order.worker_id, order.grid_id)
        with files.locked() as lock:
            found = self._jobs(order.worker_id, order.grid_id)
            if any(tag.digest != order.digest[:16] for tag, _ in found):
                raise Conflict(f"there is a Slurm job {order.worker_id} that was ordered otherwise")
            if found:
                return self._instance(order.worker_id, order.grid_id, [job for _, job in found])
            files.write_token(order.environ.get(JOIN_VARIABLE, ""))
            try:
                job = self._queue.submit(self._options(order, files), self._script(order, files), [lock])
            except (Refused, NoCapacity, Throttled, BadInput):  # nothing was submitted
                files.remove()
                raise
            return self._submitted(order, files, job)

    def list(self, grid_id: str) -> Sequence[WorkerInstance]:
        """The jobs of this grid that are not over; one for each worker. The files of those that are are removed."""
        jobs: dict[str, list[SlurmJob]] = {}
        for tag, job in self._tagged():
            if tag.grid_id == grid_id:
                jobs.setdefault(tag.worker_id, []).append(job)
        self._leftovers.remove(grid_id, jobs.keys())
        alive = []
        for worker_id, mine in jobs.items():
            if all(job.phase == "gone" for job in mine):
                self._files(worker_id, grid_id).remove()
            else:
                alive.append(self._instance(worker_id, grid_id, mine))
        return alive

    def describe(self, worker_id: str, grid_id: str) -> WorkerInstance | None:
        """The job, with the last words of its pilot once it is over; None when Slurm has forgotten it. The files of one
        that is over are removed."""
        found = [job for _, job in self._jobs(worker_id, grid_id)]
        if not found:
            return None
        instance = self._instance(worker_id, grid_id, found)
        if instance.state == "gone":
            self._files(worker_id, grid_id).remove()
        return instance

    def terminate(self, worker_id: str, grid_id: str) -> None:
        """Cancel every job of the worker, those that wait included; its files go with the last one."""
        files = self._files(worker_id, grid_id)
        with files.locked():
            files.remove_token()
            alive = [job for _, job in self._jobs(worker_id, grid_id) if job.phase != "gone"]
            if alive:
                self._queue.cancel([job.id for job in alive])
            else:
                files.remove()

    def offers(self) -> Sequence[WorkerOffer]:
        """One for each type of worker; what the config leaves open is that of the partition's largest nodes."""
        return [self._offer(worker_type, chosen) for worker_type, chosen in self._types().items()]

    def check(self) -> Sequence[str]:
        """Ask Slurm for its version, for the nodes, and whether it would take a pilot of each type of worker."""
        lines = [self._queue.version()]
        for offer in self.offers():
            if offer.unavailable:
                raise Refused(f"{offer.id}: {offer.unavailable}")
            has = offer.resources
            size = f"{counted(has.cpu_milli // 1000, 'core')} and {rounded(has.memory_bytes / 2**30)} GB"
            order = WorkerOrder("worker-check", "grid-check", offer, has)
            files = self._files(order.worker_id, order.grid_id)
            said = self._queue.test(self._options(order, files), "#!/bin/sh\n")
            account = f"account {self._settings.account}" if self._settings.account else "the default account"
            lines.append(f"{offer.id}: {size} in partition {offer.zone}, {account}: {said}")
        command = self._command()[0]
        if not os.access(command, os.X_OK):
            raise BadInput(f"providers.slurm.command: {command} is not a program that can be run")
        return [*lines, f"compute nodes run {shlex.join(self._command())}, with private files in {self._directory}"]

    # ------------------------------------------------------------------ jobs

    def _tagged(self) -> Sequence[tuple[_JobTag, SlurmJob]]:
        """Every job that a grid has submitted, with what its comment says."""
        found = ((_read_comment(job.comment), job) for job in self._queue.jobs())
        return [(tag, job) for tag, job in found if tag is not None]

    def _jobs(self, worker_id: str, grid_id: str) -> Sequence[tuple[_JobTag, SlurmJob]]:
        return [(tag, job) for tag, job in self._tagged() if (tag.grid_id, tag.worker_id) == (grid_id, worker_id)]

    def _submitted(self, order: WorkerOrder, files: PilotFiles, job: str) -> WorkerInstance:
        """The job that was just submitted; one whose comment did not stay could never be found again."""
        try:
            found = next((one for one in self._queue.jobs() if one.id == job), None)
        except Unreachable:  # it is there: what state it is in is seen later
            found = None
        if found is None:
            return WorkerInstance(order.worker_id, order.grid_id, job, "starting", waits=True)
        if found.comment != _comment(order):
            self._queue.cancel([job])
            files.remove()
            changed = f"this Slurm cluster changes the comments of jobs (to {found.comment[:60]!r})"
            raise Refused(f"{changed}: the jobs of workers would not be found again")
        return self._instance(order.worker_id, order.grid_id, [found])

    def _instance(self, worker_id: str, grid_id: str, jobs: Sequence[SlurmJob]) -> WorkerInstance:
        """The machine of a worker: the job that is most alive; the others are named."""
        first, *others = sorted(jobs, key=lambda job: (_ORDER_OF_LIFE.index(job.phase), job.waits, int(job.id)))
        more = [job.id for job in others if job.phase != "gone"]
        detail = [self._detail(first, self._files(worker_id, grid_id))]
        detail += [f"and Slurm jobs {', '.join(more)} of the same worker"] if more else []
        ends_in = first.left_seconds if first.phase == "running" else None
        return WorkerInstance(
            worker_id,
            grid_id,
            first.id,
            first.phase,
            first.age_seconds,
            "; ".join(filter(None, detail)),
            ends_in,
            waits=first.waits,
        )

    def _detail(self, job: SlurmJob, files: PilotFiles) -> str:
        if job.waits:
            return f"it waits in Slurm's queue ({job.reason}), and costs nothing yet"
        if job.phase in ("stopping", "gone"):
            said = files.last_words(job.id)
            return f"Slurm: {job.state}" + (f" ({job.reason})" if job.reason != "None" else "") + (said and f": {said}")
        return ""

    # ------------------------------------------------------------------ orders

    def _options(self, order: WorkerOrder, files: PilotFiles) -> Sequence[str]:
        settings, chosen = self._settings, self._types().get(order.offer.worker_type, SlurmWorkerType())
        minutes = max(-(-round(order.offer.lifetime_seconds or settings.time_limit_seconds) // 60), 1)
        wanted: Sequence[tuple[str, str | None]] = [
            ("job-name", order.worker_id),
            ("comment", _comment(order)),
            ("partition", chosen.partition or settings.partition),
            ("account", settings.account),
            ("qos", settings.qos),
            ("constraint", chosen.constraint or settings.constraint),
            ("nodes", "1"),
            ("ntasks", "1"),
            ("cpus-per-task", str(_cpus(order))),
            ("mem", f"{_memory_mb(order)}M"),
            ("gres", f"gpu:{order.resources.gpu_count}" if order.resources.gpu_count else None),
            ("time", str(minutes)),
            ("signal", f"B:{NOTICE_SIGNAL}@{max(round(settings.notice_seconds), 1)}"),
            ("dependency", "singleton"),
            ("export", "ALL"),  # all of an environment that is made for it
            ("open-mode", "append"),
            ("output", f"{files.folder}/pilot-%j.log"),
            ("chdir", "/"),
        ]
        return ["--no-requeue", *(f"--{name}={value}" for name, value in wanted if value)]

    def _script(self, order: WorkerOrder, files: PilotFiles) -> str:
        environ = {name: value for name, value in order.environ.items() if name != JOIN_VARIABLE}
        environ |= {CPU_VARIABLE: str(1000 * _cpus(order)), MEMORY_VARIABLE: str(_memory_mb(order) * MIB)}
        return pilot_script(
            files,
            order.worker_id,
            self._command(),
            environ,
            scratch=self._settings.scratch,
            notice_seconds=self._settings.notice_seconds,
        )

    def _command(self) -> Sequence[str]:
        """How a compute node runs `grid`: by default from this installation, which it shares."""
        if self._settings.command:
            return shlex.split(self._settings.command)
        return [str(Path(sys.executable).with_name("grid"))]

    def _files(self, worker_id: str, grid_id: str) -> PilotFiles:
        if not _NAME.fullmatch(worker_id):
            raise BadInput(f"{worker_id!r} cannot be the name of a Slurm job")
        return PilotFiles(self._directory, worker_id, grid_id)

    # ------------------------------------------------------------------ offers

    def _types(self) -> Mapping[str, SlurmWorkerType]:
        return self._settings.worker_types or DEFAULT_TYPES

    def _offer(self, worker_type: str, chosen: SlurmWorkerType) -> WorkerOffer:
        settings = self._settings
        partition = chosen.partition or settings.partition
        nodes = self._queue.nodes(partition)
        cpus = chosen.cpus or max((one.cpus for one in nodes), default=0)
        memory_bytes = chosen.memory_bytes or max((one.memory_bytes for one in nodes), default=0)
        return WorkerOffer(
            f"slurm-{worker_type}",
            worker_type,
            WorkerResources(1000 * cpus, memory_bytes, chosen.gpus),
            round(settings.price_per_hour.get(worker_type, 0.0) * 1_000_000),
            zone=partition or ",".join(sorted({one.partition for one in nodes})),
            unavailable=_why_unavailable(nodes, partition, cpus, memory_bytes, settings.time_limit_seconds),
            lifetime_seconds=60.0 * -(-round(settings.time_limit_seconds) // 60),  # Slurm counts whole minutes
            queue_seconds=settings.queue_limit_seconds,
        )


def _checked(settings: SlurmSettings | Mapping[str, Any]) -> SlurmSettings:
    """The settings, read as those of a config where they are a mapping; BadInput where they contradict each other."""
    found = provider_settings(SlurmProvider.name, SlurmSettings, settings)
    if found.notice_seconds >= found.time_limit_seconds:
        raise BadInput("providers.slurm.notice_seconds must be shorter than providers.slurm.time_limit")
    for key, path in (("directory", os.path.expanduser(found.directory)), ("scratch", found.scratch or "/")):
        if not os.path.isabs(path):
            raise BadInput(f"providers.slurm.{key} must be an absolute path: compute nodes use it, too")
    return found


def _why_unavailable(
    nodes: Sequence[SlurmNodes], partition: str | None, cpus: int, memory_bytes: int, limit_seconds: float
) -> str:
    """Why allocations of this size cannot be had; empty where they can, as far as anybody knows."""
    name = f"partition {partition}" if partition else "the default partition"
    if not nodes:
        return f"Slurm has no {name}" if partition else "Slurm has no default partition; set providers.slurm.partition"
    up = [one for one in nodes if one.is_up]
    if not up:
        return f"{name} is not up"
    able = [one for one in up if one.can_work]
    if not able:
        return f"no node of {name} can run jobs: {', '.join(sorted({one.state for one in up}))}"
    if not any(one.cpus >= cpus and one.memory_bytes >= memory_bytes for one in able):
        largest = max(able, key=lambda one: (one.cpus, one.memory_bytes))
        return (
            f"no node of {name} has {counted(cpus, 'core')} and {rounded(memory_bytes / 2**30)} GB; "
            f"the largest has {largest.cpus} and {rounded(largest.memory_bytes / 2**30)} GB"
        )
    if all(one.limit_seconds is not None and one.limit_seconds < limit_seconds for one in able):
        longest = max(one.limit_seconds or 0.0 for one in able)
        allowed, limit = counted(longest / 60, "minute"), plain_number(limit_seconds / 60)
        return f"{name} allows {allowed}, and providers.slurm.time_limit is {limit}"
    return ""


def _cpus(order: WorkerOrder) -> int:
    """Whole cores: Slurm lends no parts of one."""
    return max(-(-(order.resources.cpu_milli or order.offer.resources.cpu_milli) // 1000), 1)


def _memory_mb(order: WorkerOrder) -> int:
    return max(-(-(order.resources.memory_bytes or order.offer.resources.memory_bytes) // MIB), 1)


def _comment(order: WorkerOrder) -> str:
    parts = (COMMENT_PREFIX, order.grid_id, order.worker_id, order.digest[:16])
    return "/".join(quote(part, safe="") for part in parts)


def _read_comment(comment: str) -> _JobTag | None:
    """What a comment says; None where it is not one of a grid."""
    parts = [unquote(part) for part in comment.strip().split("/")]
    if len(parts) != 4 or parts[0] != COMMENT_PREFIX or not _NAME.fullmatch(parts[2]):
        return None
    return _JobTag(parts[1], parts[2], parts[3])
