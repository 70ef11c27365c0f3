"""Attempts: their spec and reports, the state of a running one, and what can be read of them from disk."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.job_dir import JobDir
from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.limits.cgroups import Cgroup, group_name
from distributed_grid.agent.limits.process_tree import Exempt, GridProcesses, TreeMeter
from distributed_grid.agent.limits.timer import KILL_SIGNAL, STOP_SIGNALS
from distributed_grid.domain.jobs import MAX_DETAIL_CHARS, Ending, Outcome
from distributed_grid.posix.boot_clock import boot_id, boot_ms
from distributed_grid.posix.private_files import remove_file

EMPTY_SCANS = 4  # in a row, before nothing counts as left
TREE_OVERDUE_MS, SHIM_OVERDUE_MS = 2_000, 10_000  # after the grace, before the host kills tree and shim itself
ProcessNumber = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
Ticks = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
CoreNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
T = TypeVar("T")
STOP_ENDINGS = frozenset(
    {
        *(Ending.CANCELLED, Ending.PREEMPTED, Ending.RECLAIMED, Ending.OVER_LIMIT, Ending.TIMED_OUT),
        *(Ending.EXPIRED, Ending.LOST),
    }
)
"""Endings by a stop."""
EARLIER_WORDS: dict[object, dict[str, object]] = {
    "hold_expired": {"ending": "lost"},
    "over_disk_limit": {"ending": "over_limit", "is_disk_overrun": True},
    "start_expired": {"ending": "never_started", "node_fault": True},
    "no_room": {"ending": "never_started", "node_fault": True},
}
"""Fields of an `Outcome` for the `kind` in records of earlier versions."""


class AttemptSpec(msgspec.Struct, frozen=True):
    """Everything needed to run one attempt."""

    attempt_id: str
    job_id: str
    node: str
    fence: int
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    cwd: str | None = None
    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_indexes: tuple[int, ...] = ()
    timeout_ms: int = 0
    grace_ms: int = 10_000
    merge: bool = False  # stderr is written into stdout
    hold_ms: int = 0
    max_output_bytes: int = 0  # of stdout and of stderr; 0: no limit
    max_files_bytes: int = 0  # in its directories; 0: no limit
    start_by_boot_ms: int = 0
    """The command is not executed from then on; 0: at any time."""
    may_run_again: bool = False
    most_memory_bytes: int = 0
    """Its memory limit, where the memory of its lease is none; 0: that of its lease is."""

    def is_outgrown_by(self, memory_bytes: int) -> bool:
        return self.most_memory_bytes > 0 and memory_bytes > self.memory_bytes


class SpecRecord(AttemptSpec, frozen=True, kw_only=True):
    """An attempt as it is recorded before it is launched; its shim repeats `nonce` in all that it records, and
    believes the hold that has `hold_key`."""

    launched_boot_ms: int
    boot: str
    nonce: str
    hold_key: str
    cores: tuple[int, ...] = ()


class AttemptLaunch(msgspec.Struct, frozen=True, tag=True):
    """The command runs."""

    attempt_id: str
    fence: int
    pid: int
    cores: tuple[int, ...]
    at_boot_ms: int
    pid_start: int = 0


class AttemptExit(msgspec.Struct, frozen=True, tag=True):
    """End of an attempt: nothing of it runs any more."""

    attempt_id: str
    fence: int
    outcome: Outcome
    node: str = ""


class AttemptUsage(msgspec.Struct, frozen=True):
    """CPU time of an attempt's whole tree so far, its memory now, and its node."""

    cpu_ms: int
    memory_bytes: int
    node: str = ""


class ShimIdentity(msgspec.Struct, frozen=True):
    """Identity of a shim, as it wrote itself; `waited_ticks` were used by its earlier attempts."""

    boot: str
    pid: ProcessNumber
    start: Ticks
    waited_ticks: Ticks = 0


class StartRecord(msgspec.Struct, frozen=True):
    """Start of the command, written by its shim."""

    pid: ProcessNumber
    start: Ticks
    at_boot_ms: Ticks
    shim: ShimIdentity
    cores: tuple[CoreNumber, ...] = ()


class FenceRecord(msgspec.Struct, frozen=True):
    """A fence newer than the one in the spec."""

    fence: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    nonce: str


class MemoryRecord(msgspec.Struct, frozen=True):
    """The grown lease of an attempt, and the most memory that it may hold."""

    memory_bytes: Ticks
    most_memory_bytes: Ticks
    nonce: str


class ShimReport(msgspec.Struct, frozen=True):
    """A line on the channel of a shim: one of the two."""

    started: StartRecord | None = None
    ended: dict[str, Any] | None = None  # an `Outcome`


class StopRequest(msgspec.Struct):
    """Reason to stop an attempt, and time of its kill; `recorded` once that is in its directory."""

    ending: Ending
    detail: str
    kill_at_boot_ms: int
    is_disk_overrun: bool = False
    recorded: bool = False

    @property
    def outcome(self) -> Outcome:
        """Outcome by this stop, where no shim has recorded one."""
        return Outcome(self.ending, detail=self.detail, is_disk_overrun=self.is_disk_overrun)

    @property
    def content(self) -> dict[str, Any]:
        content = msgspec.structs.asdict(self)
        del content["recorded"]
        return content


class RunningAttempt:
    """An attempt from its launch, or from when it was found on the disk, until its end is reported."""

    def __init__(self, spec: AttemptSpec, fence: int, launched_boot_ms: int, grid: GridProcesses) -> None:
        self.spec = spec
        self._grid = grid
        self.fence = fence
        self.launched_boot_ms = launched_boot_ms
        self.recorded = False
        self.memory_recorded = True
        self.stop: StopRequest | None = None
        self.cores: tuple[int, ...] = ()
        self.started: AttemptLaunch | None = None
        self.start_record: StartRecord | None = None
        self.shim: process_tree.Proc | None = None
        self.watch_fd: int | None = None  # the channel, or the pidfd of an adopted shim
        self.received = b""
        self.sends = 0
        self.meter = TreeMeter()

    @property
    def id(self) -> str:
        return self.spec.attempt_id

    @property
    def is_start_expired(self) -> bool:
        return 0 < self.spec.start_by_boot_ms <= boot_ms()

    @property
    def exempt(self) -> Exempt:
        """Predicate for processes below its shim that are no part of it."""
        return self._grid.besides(self.started.pid if self.started is not None else 0)

    def enlarge(self, memory_bytes: int, most_memory_bytes: int) -> bool:
        """Raise its lease and its limit to these sizes; True if one of them was smaller. A limit that its
        lease sets stays."""
        spec = self.spec
        if not spec.most_memory_bytes:
            return False
        sizes = max(spec.memory_bytes, memory_bytes), max(spec.most_memory_bytes, most_memory_bytes)
        if sizes == (spec.memory_bytes, spec.most_memory_bytes):
            return False
        self.spec = msgspec.structs.replace(spec, memory_bytes=sizes[0], most_memory_bytes=sizes[1])
        return True

    def usage(self, now_ms: int) -> AttemptUsage:
        """Use of its tree; empty before its command runs."""
        used = self.meter.read(self.shim, self.exempt, now_ms) if self.shim else (0, 0)
        return AttemptUsage(*used, self.spec.node)

    def request_stop(self, request: StopRequest) -> StopRequest:
        """Request its stop. The first ending stays, and the earliest time to kill."""
        if self.stop is None:
            self.stop = request
        elif request.kill_at_boot_ms < self.stop.kill_at_boot_ms:
            self.stop.kill_at_boot_ms = request.kill_at_boot_ms
            self.stop.recorded = False
        return self.stop

    def signal_stop(self, now: int) -> None:
        """Signal the shim to stop, with the ending; before the start of the command, the signal follows after it.

        A stopped shim is resumed. A tree that outlives its grace is killed from here, and after that a shim
        that does not conclude.
        """
        if self.stop is None or self.shim is None:
            return
        overdue_ms = now - self.stop.kill_at_boot_ms
        signums = [STOP_SIGNALS.get((self.stop.ending, self.stop.is_disk_overrun), STOP_SIGNALS["cancelled", False])]
        signums += [KILL_SIGNAL] if overdue_ms >= 0 else []
        is_there = all(
            process_tree.send_signal(self.shim, number) for number in (*signums, signal.SIGUSR1, signal.SIGCONT)
        )
        if is_there and overdue_ms >= TREE_OVERDUE_MS:
            left = process_tree.descendants(self.shim.pid, self.exempt)
            process_tree.signal_all(left, signal.SIGKILL)
            if not left and overdue_ms >= SHIM_OVERDUE_MS:
                process_tree.send_signal(self.shim, signal.SIGKILL)

    def unwatch(self) -> None:
        """Stop reading its channel or pidfd. Safe twice."""
        if self.watch_fd is not None:
            asyncio.get_running_loop().remove_reader(self.watch_fd)
            os.close(self.watch_fd)
            self.watch_fd = None


# ------------------------------------------------------------------ recovery from disk


DAMAGED = "its record is damaged; nothing of it is left"


def read_unacknowledged(root: str, grid: GridProcesses) -> tuple[list[RunningAttempt], list[str]]:
    """The attempts whose end is not acknowledged, oldest first, each as ordered; and those whose record is damaged."""
    attempts, damaged = [], []
    for live in tuple(Path(root, job_dir.LIVE).iterdir()):
        try:
            with JobDir(root, live.name) as job:
                spec = read_spec(job)
                began = any(map(job.has, (job_dir.SPEC, job_dir.LOCK, job_dir.EXIT)))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            spec, began = None, False
        if spec is not None:
            attempts.append(RunningAttempt(spec, spec.fence, spec.launched_boot_ms, grid))
        elif began:
            damaged.append(live.name)
        else:  # the last agent died before it had written the spec
            remove_file(str(live))
    return sorted(attempts, key=lambda attempt: (attempt.launched_boot_ms, attempt.id)), damaged


def find_hold_key(attempts: list[RunningAttempt]) -> str:
    """Key of the hold of these attempts, of this boot; empty if there is none."""
    specs = (attempt.spec for attempt in attempts if isinstance(attempt.spec, SpecRecord))
    return next((spec.hold_key for spec in specs if spec.boot == boot_id()), "")


def restore_state(attempt: RunningAttempt, job: JobDir) -> None:
    """Set what changed after the order: a newer fence, other cores, a larger lease, a request to stop."""
    spec = read_spec(job)
    attempt.fence = max(attempt.fence, read_fence(job))
    attempt.cores = _convert(job.read(job_dir.CORES), tuple[int, ...]) or (spec.cores if spec is not None else ())
    memory = _convert(job.read(job_dir.MEMORY), MemoryRecord)
    if memory is not None and memory.nonce == job.nonce():
        attempt.enlarge(memory.memory_bytes, memory.most_memory_bytes)
    attempt.stop = read_stop(job)
    attempt.recorded = True


def read_spec(job: JobDir) -> SpecRecord | None:
    spec = _convert(job.read(job_dir.SPEC), SpecRecord)
    return spec if spec is not None and spec.attempt_id == job.attempt_id else None


def read_fence(job: JobDir) -> int:
    """Newest fence seen after the order; 0 if none."""
    record = _convert(job.read(job_dir.FENCE), FenceRecord)
    return record.fence if record is not None and record.nonce == job.nonce() else 0


def read_end(job: JobDir) -> Outcome | None:
    """Recorded end; None if there is no valid one."""
    return outcome_of(job.read_end())


def outcome_of(record: Any) -> Outcome | None:
    """The outcome that a shim or host has recorded; None if it is damaged."""
    record = _in_present_words(record)
    if isinstance(record, dict) and isinstance(detail := record.get("detail"), str):
        record |= {"detail": detail.encode("utf-8", "replace").decode()[:MAX_DETAIL_CHARS]}
    return _convert(record, Outcome)


def _in_present_words(record: Any) -> Any:
    """A record with the `ending` of an earlier version's `kind`."""
    if not isinstance(record, dict) or not isinstance(kind := record.get("kind"), str):
        return record
    return {**record, **EARLIER_WORDS.get(kind, {"ending": kind})}


def read_stop(job: JobDir) -> StopRequest | None:
    """The recorded request to stop it, if there is one."""
    try:
        request = msgspec.convert(_in_present_words(job.read(job_dir.STOP)), StopRequest)
    except msgspec.ValidationError:
        return None
    request.recorded = True
    return request


def read_exit(root: str, attempt_id: str) -> AttemptExit | None:
    """Recorded end of an attempt; None if there is none, or nothing of the attempt. An attempt that may have run and
    has no valid record has ended, too: it is never run again."""
    try:
        with JobDir(root, attempt_id) as job:
            spec, record, fence = read_spec(job), read_end(job), read_fence(job)
            is_damaged = spec is None and (job.has(job_dir.LOCK) or job.has(job_dir.EXIT))
    except (FileNotFoundError, NotADirectoryError):
        return None
    if is_damaged:
        return AttemptExit(attempt_id, fence, Outcome(Ending.LOST, detail=DAMAGED))
    return AttemptExit(attempt_id, max(fence, spec.fence), record) if spec is not None and record is not None else None


def read_shim(job: JobDir) -> ShimIdentity | None:
    return _convert(job.read(job_dir.LOCK), ShimIdentity)


def read_started(job: JobDir) -> StartRecord | None:
    return _convert(job.read(job_dir.STARTED), StartRecord)


def read_groups(job: JobDir, name: str) -> list[Cgroup]:
    """Control groups made for an attempt; groups of any other name are not its own."""
    recorded = _convert(job.read(job_dir.GROUPS), tuple[tuple[int, str], ...]) or ()
    return [Cgroup(version, path) for version, path in recorded if path.startswith("/") and path.endswith(f"/{name}")]


def _convert(content: object, kind: type[T]) -> T | None:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError:
        return None


def may_have_run(job: JobDir) -> bool:
    """True if the command may have run: a shim writes its identity first, and only a power failure undoes that."""
    if read_shim(job) is not None:
        return True
    spec = read_spec(job)
    return job.has(job_dir.LOCK) and (spec is None or spec.boot != boot_id())


async def kill_leftovers(attempt: RunningAttempt, job: JobDir) -> None:
    """Kill the processes that a dead shim left, control groups included; safe twice.

    The files say where to look, never which process to kill: a process is killed if the kernel shows it in the
    attempt's session or control group, if its environment names the attempt, if it was seen in the attempt's tree,
    or below those.
    """
    started = attempt.start_record or read_started(job)
    shim = started.shim if started is not None else read_shim(job)
    if shim is None or shim.boot != boot_id():  # another boot: pids mean nothing, all is gone
        return
    name = group_name(job.attempt_id, shim.pid)
    session, since = (started.pid, started.start) if started is not None else (0, 0)
    await _kill_processes(attempt, job.path, session, since, name)
    for group in read_groups(job, name):
        for pid in group.members():
            if process_tree.is_in_group(pid, name):
                group.release(pid)
        group.remove()


async def kill_damaged(job: JobDir, root: str, grid: GridProcesses) -> None:
    """Kill the holder of the lock of an attempt with a damaged record, and all processes left of the attempt."""
    for shim in process_tree.holders_of(f"{root}/{job_dir.CONTROL}/{job.attempt_id}/{job_dir.LOCK}"):
        process_tree.signal_all([shim, *process_tree.descendants(shim.pid, grid.besides(0))], signal.SIGKILL)
    spec = AttemptSpec(attempt_id=job.attempt_id, job_id="", node="", fence=0, argv=())
    await kill_without_record(RunningAttempt(spec, 0, 0, grid), root)


async def kill_without_record(attempt: RunningAttempt, root: str) -> None:
    """Kill processes of an attempt whose directory is gone, and its records with it."""
    name = group_name(attempt.id, attempt.shim.pid) if attempt.shim is not None else ""
    await _kill_processes(attempt, f"{root}/{attempt.id}", 0, 0, name)


async def _kill_processes(attempt: RunningAttempt, path: str, session: int, since: int, group: str) -> None:
    work, beyond = f"{path}/{job_dir.WORK}", set[process_tree.Proc]()
    seen = {(proc.pid, proc.start) for proc in attempt.meter.seen}
    empty_scans = 0
    while empty_scans < EMPTY_SCANS:  # one scan may miss a tree that forks and exits without end
        left = set(process_tree.find_attempt_processes(attempt.id, work, attempt.exempt, session, since, group))
        known = (proc for proc in map(process_tree.read_process, (pid for pid, _ in seen)) if proc is not None)
        left.update(proc for proc in known if (proc.pid, proc.start) in seen and not proc.dead)
        left -= beyond
        empty_scans = 0 if left else empty_scans + 1
        beyond.update(process_tree.signal_all(left, signal.SIGKILL))
        await asyncio.sleep(0.005)
