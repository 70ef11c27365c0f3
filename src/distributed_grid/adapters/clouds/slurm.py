"""Workers in allocations of a Slurm cluster: a pilot job runs `grid agent`, and ends when the agent ends.

The comment of a job has its grid, worker and order, and is part of the call that submits it. Slurm has no key that
makes a submission idempotent, so an order looks for its job first, under a lock that a running `sbatch` holds, too. If
two jobs are submitted for one worker all the same, they never run at once (`--dependency=singleton`, both have the
worker's name), and the second one has no token, or one that is spent, and ends by itself.

Slurm ends a job at its time limit, whatever happens to the control plane, and never starts it a second time.

For each worker there is a folder (0700) on the file system that the nodes share:

    lock           held by the process that submits or cancels, and by `sbatch` itself while it runs
    join-token     (0600) until the pilot has opened it; a second pilot finds none, or one that is spent
    pilot-ID.log   output of the pilot of this job

The token is neither in the script, which Slurm keeps and shows, nor in the environment or on a command line. The
agent's own directory is on the compute node, one for each job, and goes with it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from msgspec import Struct

from distributed_grid.adapters.clouds.slurm_queue import RunCommand, SlurmJob, SlurmNodes, SlurmQueue, run_command
from distributed_grid.config.providers import SlurmSettings, SlurmWorkerType, provider_settings
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import BadInput, Conflict, GridError, NoCapacity, Refused, Throttled, Unreachable
from distributed_grid.number_text import counted, plain_number, rounded
from distributed_grid.ports import JOIN_VARIABLE, CloudProviderBase, WorkerInstance, WorkerOffer, WorkerOrder
from distributed_grid.posix.private_files import open_regular, read_regular, try_lock, write_private

TOKEN_FILE, LOCK_FILE = "join-token", "lock"
CPU_VARIABLE, MEMORY_VARIABLE = "GRID_ALLOCATED_CPU_MILLI", "GRID_ALLOCATED_MEMORY_BYTES"
"""In the environment of the agent: the part of the node that is its own, where Slurm does not enforce that."""
NOTICE_SIGNAL = "USR1"
"""Signal that Slurm sends before the time limit to the shell of the script alone, which then sends the agent SIGTERM.
For a cancelled job Slurm sends SIGTERM to all processes: then the agent has to end, not only to announce it."""
NOTICE_VARIABLE = "GRID_NOTICE_SECONDS"
"""In the environment of the agent: seconds that it continues after SIGTERM has announced its end."""
LOCK_SECONDS, LOCK_PAUSE_SECONDS = 20.0, 0.05
MAX_MISSING = 100
"""Failures in a row to find the folder of a worker before it counts as one that cannot be made."""
LEFTOVER_SECONDS = 600.0
MAX_LOG_BYTES = 1 << 20
NO_LOCKS = frozenset((errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP))
"""Errors of locking on a file system that has no locks."""


class PilotFiles:
    """The folder of one worker below the provider's `directory`."""

    def __init__(self, directory: Path, worker_id: str, grid_id: str) -> None:
        self._directory = directory
        self.folder = directory / f"{worker_id}{_suffix(grid_id)}"
        self.token = self.folder / TOKEN_FILE

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Exclude other submissions and cancellations of this worker's jobs; yields the descriptor of the lock.

        A process that inherits the descriptor holds the lock, too, until it has ended.
        """
        descriptor = self._lock()
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _lock(self) -> int:
        deadline, missing = time.monotonic() + LOCK_SECONDS, 0
        while True:
            try:
                for folder in (self._directory, self.folder):
                    folder.mkdir(mode=0o700, parents=folder is self._directory, exist_ok=True)
                    status = folder.stat()
                    if status.st_uid != os.getuid():
                        raise GridError(f"{folder} belongs to another user")
                    if status.st_mode & 0o077:
                        folder.chmod(0o700)
                descriptor = open_regular(str(self.folder / LOCK_FILE), os.O_RDWR | os.O_CREAT)
            except FileNotFoundError as failure:
                missing += 1  # the folder was removed in between, or can never be made
                if missing < MAX_MISSING:
                    continue
                raise GridError(f"cannot use {self.folder}: {failure.strerror}") from failure
            except OSError as failure:
                raise GridError(f"cannot use {self.folder}: {failure.strerror}") from failure
            try:
                is_locked = try_lock(descriptor)
            except OSError as failure:
                is_locked = failure.errno in NO_LOCKS  # without locks nobody waits for one
                if not is_locked:
                    os.close(descriptor)
                    raise
            if is_locked and os.fstat(descriptor).st_nlink:
                return descriptor
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise Unreachable(f"{self.folder / LOCK_FILE} is locked: an sbatch of an earlier call still runs")
            time.sleep(LOCK_PAUSE_SECONDS)

    def write_token(self, token: str) -> None:
        try:
            write_private(self.token, token.encode())
        except OSError as failure:
            raise GridError(f"cannot write {self.token}: {failure.strerror}") from failure

    def last_words(self, job: str) -> str:
        """The last line of output of a job's pilot; empty where there is none."""
        with contextlib.suppress(OSError):
            text = read_regular(str(self.folder / f"pilot-{job}.log"), None, MAX_LOG_BYTES).decode(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return lines[-1][:300] if lines else ""
        return ""

    def remove_token(self) -> None:
        """Remove the token. Safe twice."""
        with contextlib.suppress(FileNotFoundError):
            self.token.unlink()

    def remove(self) -> None:
        """Remove the folder; only under the lock. Safe twice."""
        if self.folder.exists():
            shutil.rmtree(self.folder, ignore_errors=True)


def _suffix(grid_id: str) -> str:
    """Suffix of a grid's folders, so that two grids may share a directory."""
    return f"-{hashlib.sha256(grid_id.encode()).hexdigest()[:8]}"


class Leftovers:
    """Folders of workers whose jobs Slurm has forgotten. One is removed some time after it was first seen, by the
    monotonic clock: a worker that is being submitted is not known to Slurm yet, either."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._seen: dict[str, float] = {}

    def remove(self, grid_id: str, known: Collection[str]) -> None:
        """Remove the folders of a grid, but not those of the `known` workers."""
        suffix, now = _suffix(grid_id), self._clock()
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._directory):
                worker_id = entry.name.removesuffix(suffix)
                if worker_id == entry.name:
                    continue
                if worker_id in known:
                    self._seen.pop(entry.name, None)
                elif now - self._seen.setdefault(entry.name, now) > LEFTOVER_SECONDS:
                    shutil.rmtree(entry.path, ignore_errors=True)
                    del self._seen[entry.name]


def pilot_script(
    files: PilotFiles,
    worker_id: str,
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    scratch: str | None,
    notice_seconds: float,
) -> str:
    """The batch script: identical for identical orders, and without secrets.

    Its shell stays: it passes on the signal by which Slurm announces the time limit, and removes the agent's directory
    once the agent has ended. The directory of a job that was killed is removed by the next script.
    """
    agent = shlex.join([*command, "agent", "--join-file", "-", "--name", worker_id])
    exports = {**environ, NOTICE_VARIABLE: f"{notice_seconds:g}"}
    token = shlex.quote(str(files.token))
    folder = shlex.quote(scratch) if scratch else '"${TMPDIR:-/tmp}"'
    return "\n".join(
        [
            "#!/bin/sh",
            *(f"export {name}={shlex.quote(value)}" for name, value in sorted(exports.items())),
            f"exec 3< {token} || exit 1",
            f"rm -f {token}",
            f"homes={folder}/distributed-grid-$(id -u)",
            'for old in "$homes"-*; do',
            '  [ ! -L "$old" ] && [ -O "$old" ] && [ -f "$old/agent/agent.lock" ] &&',
            '    flock -n "$old/agent/agent.lock" rm -rf "$old"',
            "done",
            'home=$(mktemp -d "$homes-XXXXXX") || exit 1',
            f"""trap 'kill -TERM "$agent" 2>/dev/null' {NOTICE_SIGNAL}""",
            """trap '(for i in 1 2; do sleep 3; kill -TERM "$agent"; done) 2>/dev/null &' TERM""",
            f'{agent} --dir "$home/agent" <&3 3<&- &',
            "agent=$!",
            "exec 3<&-",
            'wait "$agent"; code=$?',
            'while kill -0 "$agent" 2>/dev/null; do wait "$agent"; code=$?; done',
            'rm -rf "$home"',
            'exit "$code"',
            "",
        ]
    )


COMMENT_PREFIX = "distributed-grid"
DEFAULT_TYPES: Mapping[str, SlurmWorkerType] = {"cpu": SlurmWorkerType()}
MIB = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,62}", re.ASCII)
_ORDER_OF_LIFE = ("running", "starting", "stopping", "gone")


class _JobTag(Struct, frozen=True):
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
        self._settings = settings = provider_settings(self.name, SlurmSettings, settings)
        if settings.notice_seconds >= settings.time_limit_seconds:
            raise BadInput("providers.slurm.notice_seconds must be shorter than providers.slurm.time_limit")
        for key, path in (("directory", os.path.expanduser(settings.directory)), ("scratch", settings.scratch or "/")):
            if not os.path.isabs(path):
                raise BadInput(f"providers.slurm.{key} must be an absolute path: compute nodes use it, too")
        self._types: Mapping[str, SlurmWorkerType] = settings.worker_types or DEFAULT_TYPES
        self._directory = Path(self._settings.directory).expanduser()
        self._leftovers = Leftovers(self._directory)
        self._queue = SlurmQueue(run or partial(run_command, config_file=self._settings.config_file), clock=clock)

    def create(self, order: WorkerOrder) -> WorkerInstance:
        """Submit the pilot, unless there is one; while it is in the queue it `waits`, and `detail` has the reason."""
        files = self._files(order.worker_id, order.grid_id)
        with files.locked() as lock:
            jobs = self._jobs(order.worker_id, order.grid_id)
            if any(tag.digest != order.digest[:16] for tag, _ in jobs):
                raise Conflict(f"there is a Slurm job {order.worker_id} that was ordered otherwise")
            if jobs:
                return self._instance(order.worker_id, order.grid_id, [job for _, job in jobs])
            files.write_token(order.environ.get(JOIN_VARIABLE, ""))
            try:
                environ = {name: value for name, value in order.environ.items() if name != JOIN_VARIABLE}
                environ |= {CPU_VARIABLE: str(1000 * _cpus(order)), MEMORY_VARIABLE: str(_memory_mb(order) * MIB)}
                job = self._queue.submit(
                    self._options(order, files),
                    pilot_script(
                        files,
                        order.worker_id,
                        self._command(),
                        environ,
                        scratch=self._settings.scratch,
                        notice_seconds=self._settings.notice_seconds,
                    ),
                    [lock],
                )
            except (Refused, NoCapacity, Throttled, BadInput):  # nothing was submitted
                files.remove()
                raise
            try:
                row = next((row for row in self._queue.jobs() if row.id == job), None)
            except Unreachable:  # the job exists: its state is seen later
                row = None
            if row is None:
                return WorkerInstance(order.worker_id, order.grid_id, job, "starting", waits=True)
            if row.comment != _comment(order):
                self._queue.cancel([job])
                files.remove()
                changed = f"this Slurm cluster changes the comments of jobs (to {row.comment[:60]!r})"
                raise Refused(f"{changed}: the jobs of workers would not be found again")
            return self._instance(order.worker_id, order.grid_id, [row])

    def list(self, grid_id: str) -> Sequence[WorkerInstance]:
        """The jobs of this grid that have not ended, one for each worker. Files of ended ones are removed."""
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
        """The job, with its pilot's last line once it has ended; None when Slurm has forgotten it. Files of an ended
        job are removed."""
        jobs = [job for _, job in self._jobs(worker_id, grid_id)]
        if not jobs:
            return None
        instance = self._instance(worker_id, grid_id, jobs)
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
        """One for each type of worker; by default of the size of the partition's largest nodes."""
        settings = self._settings
        offers = []
        for worker_type, chosen in self._types.items():
            partition = chosen.partition or settings.partition
            nodes = self._queue.nodes(partition)
            cpus = chosen.cpus or max((node.cpus for node in nodes), default=0)
            memory_bytes = chosen.memory_bytes or max((node.memory_bytes for node in nodes), default=0)
            offer = WorkerOffer(
                id=f"slurm-{worker_type}",
                worker_type=worker_type,
                resources=WorkerResources(1000 * cpus, memory_bytes, chosen.gpus),
                price_micro=round(settings.price_per_hour.get(worker_type, 0.0) * 1_000_000),
                zone=partition or ",".join(sorted({node.partition for node in nodes})),
                unavailable=_why_unavailable(nodes, partition, cpus, memory_bytes, settings.time_limit_seconds),
                lifetime_seconds=60.0 * -(-round(settings.time_limit_seconds) // 60),  # Slurm counts whole minutes
                queue_seconds=settings.queue_limit_seconds,
            )
            offers.append(offer)
        return offers

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
            answer = self._queue.test(self._options(order, files), "#!/bin/sh\n")
            account = f"account {self._settings.account}" if self._settings.account else "the default account"
            lines.append(f"{offer.id}: {size} in partition {offer.zone}, {account}: {answer}")
        command = self._command()[0]
        if not os.access(command, os.X_OK):
            raise BadInput(f"providers.slurm.command: {command} is not a program that can be run")
        return [*lines, f"compute nodes run {shlex.join(self._command())}, with private files in {self._directory}"]

    def _tagged(self) -> Sequence[tuple[_JobTag, SlurmJob]]:
        """Every job that a grid has submitted, with its tag."""
        tagged = []
        for job in self._queue.jobs():
            parts = [unquote(part) for part in job.comment.strip().split("/")]
            if len(parts) == 4 and parts[0] == COMMENT_PREFIX and _NAME.fullmatch(parts[2]):
                tagged.append((_JobTag(parts[1], parts[2], parts[3]), job))
        return tagged

    def _jobs(self, worker_id: str, grid_id: str) -> Sequence[tuple[_JobTag, SlurmJob]]:
        return [(tag, job) for tag, job in self._tagged() if (tag.grid_id, tag.worker_id) == (grid_id, worker_id)]

    def _instance(self, worker_id: str, grid_id: str, jobs: Sequence[SlurmJob]) -> WorkerInstance:
        """The machine of a worker: the job that is most alive; `detail` names the others."""
        first, *others = sorted(jobs, key=lambda job: (_ORDER_OF_LIFE.index(job.phase), job.waits, int(job.id)))
        details = []
        if first.waits:
            details.append(f"it waits in Slurm's queue ({first.reason}), and costs nothing yet")
        elif first.phase in ("stopping", "gone"):
            reason = f" ({first.reason})" if first.reason != "None" else ""
            last_words = self._files(worker_id, grid_id).last_words(first.id)
            details.append(f"Slurm: {first.state}{reason}" + (last_words and f": {last_words}"))
        if more := [job.id for job in others if job.phase != "gone"]:
            details.append(f"and Slurm jobs {', '.join(more)} of the same worker")
        return WorkerInstance(
            worker_id=worker_id,
            grid_id=grid_id,
            instance=first.id,
            state=first.phase,
            age_seconds=first.age_seconds,
            detail="; ".join(details),
            ends_in_seconds=first.left_seconds if first.phase == "running" else None,
            waits=first.waits,
        )

    def _options(self, order: WorkerOrder, files: PilotFiles) -> Sequence[str]:
        settings, chosen = self._settings, self._types.get(order.offer.worker_type, SlurmWorkerType())
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
            ("export", "ALL"),  # of an environment that is made for it
            ("open-mode", "append"),
            ("output", f"{files.folder}/pilot-%j.log"),
            ("chdir", "/"),
        ]
        return ["--no-requeue", *(f"--{name}={value}" for name, value in wanted if value)]

    def _command(self) -> Sequence[str]:
        """Command line of `grid` on a compute node: by default from this installation, which it shares."""
        if self._settings.command:
            return shlex.split(self._settings.command)
        return [str(Path(sys.executable).with_name("grid"))]

    def _files(self, worker_id: str, grid_id: str) -> PilotFiles:
        if not _NAME.fullmatch(worker_id):
            raise BadInput(f"{worker_id!r} cannot be the name of a Slurm job")
        return PilotFiles(self._directory, worker_id, grid_id)


def _why_unavailable(
    nodes: Sequence[SlurmNodes], partition: str | None, cpus: int, memory_bytes: int, limit_seconds: float
) -> str:
    """Reason why allocations of this size are impossible; empty where none is known."""
    name = f"partition {partition}" if partition else "the default partition"
    if not nodes:
        return f"Slurm has no {name}" if partition else "Slurm has no default partition; set providers.slurm.partition"
    up = [node for node in nodes if node.is_up]
    if not up:
        return f"{name} is not up"
    able = [node for node in up if node.can_work]
    if not able:
        return f"no node of {name} can run jobs: {', '.join(sorted({node.state for node in up}))}"
    if not any(node.cpus >= cpus and node.memory_bytes >= memory_bytes for node in able):
        largest = max(able, key=lambda node: (node.cpus, node.memory_bytes))
        return (
            f"no node of {name} has {counted(cpus, 'core')} and {rounded(memory_bytes / 2**30)} GB; "
            f"the largest has {largest.cpus} and {rounded(largest.memory_bytes / 2**30)} GB"
        )
    if all(node.limit_seconds is not None and node.limit_seconds < limit_seconds for node in able):
        longest = max(node.limit_seconds or 0.0 for node in able)
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
