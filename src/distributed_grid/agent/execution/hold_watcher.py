"""Hold watcher: the second process that ends attempts at the end of their hold, where their shim does not.

The spawner forks it when an attempt with a hold is launched. It outlives agent and spawner, and ends when no attempt
with a hold is left. Standard library only.

- A shim kills its tree at the end of the hold. A shim that is stopped (SIGSTOP, a debugger, a swap storm) cannot. Half
  a second later this process kills the tree, and the shim if it is stopped: the control plane lends the resources
  again two seconds after the hold at the earliest.
- It keeps no state of its own: the directories of the attempts and `.hold` say everything. So it may be killed at any
  time; the spawner forks another, and the next spawner replaces one of an earlier agent.
- Processes of this grid are exempt, as for a shim.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any, Final, NamedTuple, NoReturn

from distributed_grid.agent.execution.shim import is_valid_spec
from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.job_dir import JobDir
from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.limits.cgroups import group_name
from distributed_grid.agent.limits.process_tree import GridProcesses, Proc
from distributed_grid.agent.limits.timer import signal_parent_death
from distributed_grid.posix.boot_clock import boot_id, boot_ms
from distributed_grid.posix.private_files import open_regular, try_lock

OVERDUE_MS: Final = 500
"""After the end of a hold; the control plane waits two seconds."""
LOOK_MS: Final = 1000
MAX_LOOK_MS: Final = 10_000  # while attempts are over that nobody has recorded yet
MAX_KILL_ROUNDS: Final = 500
KILL_PAUSE_S: Final = 0.005
PARENT_DIED: Final = signal.SIGUSR1


def is_hold_pending(root: str) -> bool:
    """Whether the deadline in the file, of whichever attempts, is still to come or has just passed."""
    return job_dir.read_hold_record(root)[0] + OVERDUE_MS > boot_ms()


class HeldAttempt(NamedTuple):
    """An attempt with a hold that has not ended."""

    attempt_id: str
    work: str
    until_boot_ms: int
    shim: Proc | None  # None: it is dead
    shim_pid: int
    main_pid: int
    main_start: int

    @property
    def is_overdue(self) -> bool:
        return boot_ms() >= self.until_boot_ms + OVERDUE_MS


class HoldWatcher:
    """Ends the attempts of a root whose hold has been over for a moment."""

    def __init__(self, root: str, grid: GridProcesses) -> None:
        self._root = root
        self._grid = grid
        self._boot = boot_id()
        self._held_until: dict[str, int] = {}  # by the key of the hold; it never gets earlier

    def serve(self) -> NoReturn:
        """Watch until no attempt with a hold is left."""
        gc.enable()
        spawner = os.getppid()
        signal.pthread_sigmask(signal.SIG_BLOCK, {PARENT_DIED})
        signal_parent_death(PARENT_DIED)
        self._replace_predecessor()
        look_ms = LOOK_MS
        while True:
            left_ms = self._read_hold() + OVERDUE_MS - boot_ms()
            is_orphan = os.getppid() != spawner
            if left_ms <= 0 or is_orphan:
                held = self._held_attempts()
                has_killed = self._end_overdue(held)
                left = [one for one in held if one.shim is not None or not one.is_overdue]
                if not left and not has_killed and (is_orphan or not is_hold_pending(self._root)):
                    os._exit(0)
                look_ms = LOOK_MS if has_killed else min(2 * look_ms, MAX_LOOK_MS)
                left_ms = min((one.until_boot_ms for one in left), default=0) + OVERDUE_MS - boot_ms()
            wait_ms = min(left_ms, LOOK_MS) if left_ms > 0 else look_ms
            signal.sigtimedwait({PARENT_DIED}, wait_ms / 1000)

    def _replace_predecessor(self) -> None:
        """Hold the lock by which this process is known to belong to the grid; the watcher of an earlier agent ends."""
        path = f"{self._root}/{job_dir.WATCH_LOCK}"
        try:
            lock = open_regular(path, os.O_RDWR | os.O_CREAT)
        except OSError:  # a full disk, or no root any more
            return
        while not try_lock(lock):
            process_tree.signal_all(process_tree.holders_of(path), signal.SIGKILL)
            time.sleep(KILL_PAUSE_S)

    def _read_hold(self) -> int:
        """The deadline of the hold that attempts here believe; 0 where it is not known yet or belongs to none."""
        until, key = job_dir.read_hold_record(self._root)
        if key not in self._held_until:
            return 0
        self._held_until[key] = max(self._held_until[key], until)
        return self._held_until[key]

    def _held_attempts(self) -> list[HeldAttempt]:
        try:
            names = os.listdir(f"{self._root}/{job_dir.LIVE}")
        except OSError:  # the root was removed
            return []
        found = []
        for name in names:
            try:
                with JobDir(self._root, name) as job:
                    attempt = self._read_attempt(job)
            except (OSError, ValueError):
                continue
            if attempt is not None:
                found.append(attempt)
        return found

    def _read_attempt(self, job: JobDir) -> HeldAttempt | None:
        """None for one without a hold, one that has ended, one that no shim has begun, and one of another boot."""
        if job.has(job_dir.EXIT) or not job.has(job_dir.LOCK):
            return None
        spec, shim = job.read(job_dir.SPEC), job.read(job_dir.LOCK)
        if not is_valid_spec(spec, job.attempt_id) or spec["boot"] != self._boot or not spec["hold_ms"]:
            return None
        key = spec["hold_key"]
        held_until = max(self._held_until.get(key, 0), job_dir.read_hold(self._root, key))
        self._held_until[key] = held_until
        started = _fields(job.read(job_dir.STARTED))
        shim_pid, shim_start = _fields(shim)
        proc = process_tree.read_process(shim_pid) if shim_pid and job.is_locked() else None
        return HeldAttempt(
            attempt_id=job.attempt_id,
            work=f"{job.path}/{job_dir.WORK}",
            until_boot_ms=held_until or spec["launched_boot_ms"] + spec["hold_ms"],
            shim=proc if proc is not None and proc.start == shim_start else None,
            shim_pid=shim_pid,
            main_pid=started[0],
            main_start=started[1],
        )

    def _end_overdue(self, held: list[HeldAttempt]) -> bool:
        """Kill the trees whose hold is over, then their shims that are stopped; whether there was anything to kill."""
        overdue = [one for one in held if one.is_overdue]
        has_killed = False
        beyond: set[Proc] = set()
        for _ in range(MAX_KILL_ROUNDS if overdue else 0):
            procs = process_tree.read_processes()
            left = [proc for one in overdue for proc in self._tree(one, procs) if proc not in beyond]
            if not left:
                break
            has_killed = True
            beyond.update(process_tree.signal_all(left, signal.SIGKILL))
            time.sleep(KILL_PAUSE_S)
        for one in overdue:
            shim = process_tree.read_process(one.shim.pid) if one.shim is not None else None
            if shim is not None and shim.stopped and one.shim is not None and shim.start == one.shim.start:
                has_killed = True
                process_tree.signal_all([shim], signal.SIGKILL)
        return has_killed

    def _tree(self, attempt: HeldAttempt, procs: dict[int, Proc]) -> list[Proc]:
        exempt = self._grid.besides(attempt.main_pid)
        if attempt.shim is not None:
            return process_tree.descendants(attempt.shim.pid, exempt, procs)
        return process_tree.find_attempt_processes(
            attempt.attempt_id,
            attempt.work,
            exempt,
            attempt.main_pid,
            attempt.main_start,
            group_name(attempt.attempt_id, attempt.shim_pid),
        )


def _fields(record: Any) -> tuple[int, int]:
    """Pid and start time from a part of the journal; zeros where it says none."""
    if not isinstance(record, dict):
        return 0, 0
    pid, start = record.get("pid"), record.get("start")
    return (pid, start) if isinstance(pid, int) and isinstance(start, int) else (0, 0)
