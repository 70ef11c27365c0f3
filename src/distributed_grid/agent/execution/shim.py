"""Shim: the parent process of one command, which enforces its limits, reaps its tree and records its end.

- The attempt is recorded in its directory before the command runs. A power failure may undo that: the grid knows by the
  boot id that such an attempt may have run, and does not order it again.
- The end is reported only when nothing of the tree is left, and it is recorded before it is reported. Without an agent
  to read the report, it is on the disk before the shim ends; else the agent sees to that (`AttemptHost`).
- Time-out, hold, memory limit and output limit are enforced without agent and control plane.
- The time to start the command is checked immediately before it is executed, and after the shim has recorded its
  identity. So an attempt without an identity by then never starts.
- If its directory is removed its record is lost to all readers: the shim kills its tree and ends.
- A stop is signalled first, with its ending, and written afterwards, when there is room: it needs no disk.

It runs in a process that was forked before its attempt was known (`spawner.py`), so it imports only the standard
library.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from typing import Any, Final

from distributed_grid.agent.execution.launch import LaunchFailed, is_node_fault, open_output, start_command
from distributed_grid.agent.execution.output_limit import OutputLimit
from distributed_grid.agent.files import job_dir
from distributed_grid.agent.files.job_dir import JobDir
from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.limits.cgroups import Cgroup, Controllers, group_name
from distributed_grid.agent.limits.core_allocation import cgroup_weight, niceness
from distributed_grid.agent.limits.process_tree import (
    FIRST_MS,
    CgroupMemoryLimit,
    PolledMemoryLimit,
    TreeMemory,
    next_reading_ms,
    over_limit_message,
)
from distributed_grid.agent.limits.timer import KILL_SIGNAL, STOP_SIGNALS, DeadlineTimer
from distributed_grid.posix.boot_clock import boot_ms

SETTLE_MS: Final = 200  # time for remaining processes to finish by themselves: `exec > >(tee log)`
REMOVE_TRIES: Final = 3
LEFTOVER_GRACE_MS: Final = 1000
ALONE_SCANS, MAX_KILL_ROUNDS = 5, 500
MAX_RECORD_TRIES: Final = 60_000  # about a week
REMOVED_POLL_MS: Final = 5_000  # how often to see whether the directory is still there
REMOVED_GRACE_MS: Final = 1_000
MAX_LIMIT_BYTES: Final = 1 << 62
REMOVED: Final = "its directory was removed"
ASKED_TO_STOP: Final = "its shim was asked to stop"
MACHINE_ENDS: Final = "its machine ends, and has told all processes so"
NOTICE_VARIABLE: Final = "GRID_NOTICE_SECONDS"
"""In the environment where SIGTERM says that the machine ends, as in a batch system, and not that a job is to stop."""
HOLD_EXPIRED: Final = "its hold expired: no answer from the control plane"


class TreeStop:
    """Reason for the end of the tree, and time of the kill; `signalled` until the file of the request is read."""

    def __init__(
        self, ending: str, detail: str, kill_at: int, *, is_disk_overrun: bool = False, signalled: bool = False
    ) -> None:
        self.ending = ending
        self.detail = detail
        self.kill_at = kill_at
        self.is_disk_overrun = is_disk_overrun
        self.signalled = signalled


class Shim:
    """Runs one attempt from record to record."""

    def __init__(self, root: str, attempt_id: str, lock: int, channel: int, grid: process_tree.GridProcesses) -> None:
        self.root = root
        self.ends_with_machine = bool(os.environ.get(NOTICE_VARIABLE))
        self.attempt_id = attempt_id
        self.lock = lock
        self.channel = channel
        self.grid = grid
        self.groups: list[Cgroup] = []
        self.memory: CgroupMemoryLimit | PolledMemoryLimit | None = None
        self.most_memory_bytes = 0  # of an attempt whose lease may grow, and whose limit is not that
        self.output: OutputLimit | None = None
        self.paused_until = 0  # because its output cannot be dropped; 0: it is not
        self.stop: TreeStop | None = None
        self.main = 0
        self.main_status: int | None = None
        self.began = self.ended = 0
        self.beyond: set[int] = set()
        self.used_s = 0.0
        self.usage = TreeMemory()
        self.next_reading_ms = 0
        self.largest_bytes = 0  # of one process, by the kernel's mark
        self.nonce = ""
        self.held_until = 0  # it never gets earlier, even if the file is damaged

    def run(self, identity: dict[str, str | int], timer: DeadlineTimer, controllers: Controllers) -> bool:
        """Run the attempt; True if this process is clean afterwards and can run another."""
        self.identity, self.timer, self.controllers = identity, timer, controllers
        try:
            self.job = JobDir(self.root, self.attempt_id)
        except FileNotFoundError:
            self._report(job_dir.journal_entry("ended", {"ending": "never_started", "detail": REMOVED}))
            return False
        with self.job:
            self._run_to_completion()
        return self.stop is None and self.memory is None and not self.groups and self.main > 0 and not self._reap()

    def _run_to_completion(self) -> None:
        self.spec: dict[str, Any] = self.job.read(job_dir.SPEC)
        self.began = self.ended = boot_ms()
        if not is_valid_spec(self.spec, self.attempt_id):
            self._conclude("never_started", REMOVED if self.job.is_removed else "its record is damaged")
            return
        self.nonce = self.spec["nonce"]
        job_dir.append_entry(self.lock, job_dir.journal_entry("shim", self.identity, self.nonce))
        self._read_stop_request()
        if self.stop is None and 0 < self._hold_deadlines()[1] <= self.began:  # it took too long to get here
            self._begin_stop("lost", HOLD_EXPIRED, self.began)
        if self.stop is not None:
            self._conclude(self.stop.ending, self.stop.detail)
            return
        moved = self.job.read(job_dir.CORES)
        cores = moved if moved and is_list_of(int, moved) else self.spec["cores"]
        try:
            self._make_groups(len(cores))
            self.began = self.ended = boot_ms()
            output = open_output(self.job)
            limit = self.spec.get("max_output_bytes", 0)
            try:
                self.main = start_command(self.spec, self.job, output.values(), cores, self.groups)
                if limit > 0:
                    self.output, output = OutputLimit(limit, self.job, output), {}
            finally:
                for fd in output.values():
                    os.close(fd)
            if isinstance(self.memory, CgroupMemoryLimit):
                self.memory.enforce()
        except LaunchFailed as error:
            self.main_status = error.exit_code << 8
            removed = self.job.is_removed
            reason = REMOVED if removed else str(error)
            self._conclude("never_started", reason, node_fault=error.node_fault and not removed)
            return
        except OSError as error:  # its groups could not be recorded
            problem = f"could not be recorded: {error.strerror}"
            self._conclude("never_started", problem, node_fault=is_node_fault(error))
            return
        if cores and not self.controllers.cpu:
            own = os.getpriority(os.PRIO_PROCESS, 0)  # only root may lower the niceness
            os.setpriority(os.PRIO_PROCESS, self.main, max(niceness(self.spec["cpu_milli"]), own))
        command = process_tree.read_process(self.main)
        started = {
            "pid": self.main,
            "start": command.start if command else 0,
            "at_boot_ms": self.began,
            "cores": cores,
            "shim": self.identity,
        }
        line = job_dir.journal_entry("started", started, self.nonce)
        with contextlib.suppress(OSError):  # a full disk: a host that adopts it waits for its end instead
            job_dir.append_entry(self.lock, line)
        self._report(line)
        self.next_reading_ms = self.began + FIRST_MS
        while self.main_status is None:
            self._check_limits()
            self._reap()
            if self.main_status is None:
                self.timer.wait(self._next_check_ms(), REMOVED_POLL_MS)
        self.ended = boot_ms()
        self._stop_leftovers()
        if self.output is not None:
            self.output.check(self.ended)
            self.output.close()
        self._conclude(*self._exit_reason())

    # ------------------------------------------------------------------ starting

    def _make_groups(self, cores: int) -> None:
        self.most_memory_bytes = self._read_most_memory()
        limit, milli = self.most_memory_bytes or self.spec["memory_bytes"], self.spec["cpu_milli"]
        weight = cgroup_weight(milli, cores)
        if limit and not self.controllers.memory:
            self.memory = PolledMemoryLimit(limit, self.usage)
        name = group_name(self.job.attempt_id, os.getpid())
        by_path: dict[str, Cgroup] = {}
        memory, cpu = self.controllers.memory if limit else None, self.controllers.cpu if weight else None
        for controller in filter(None, (memory, cpu)):
            path = f"{controller.base}/{name}"
            by_path.setdefault(path, Cgroup(controller.version, path))
        if not by_path:
            return
        self.job.write(job_dir.GROUPS, [[group.version, path] for path, group in by_path.items()])
        self.groups = list(by_path.values())
        for group in self.groups:
            group.make()
        if memory:
            self.memory = CgroupMemoryLimit(limit, by_path[f"{memory.base}/{name}"], self.usage)
        if cpu:
            by_path[f"{cpu.base}/{name}"].weigh_cpu(weight)

    # ------------------------------------------------------------------ limits and requests

    def _check_limits(self) -> None:
        """Stop the tree where a request or a limit demands it; the first reason stays."""
        self._read_stop_request()
        now = boot_ms()
        if self.job.is_removed and self.stop is None:
            self._begin_stop("lost", REMOVED, now + min(self.spec["grace_ms"], REMOVED_GRACE_MS))
        elif self.job.is_removed and self.stop is not None:
            self.stop.kill_at = min(self.stop.kill_at, now + REMOVED_GRACE_MS)
        if self.memory:
            # Raise the limit to the one that the agent has recorded since; it never gets smaller.
            most = self._read_most_memory() if self.most_memory_bytes else 0
            if most > self.most_memory_bytes:
                self.most_memory_bytes = most
                self.memory.raise_limit(most)
            overrun = self.memory.overrun(os.getpid(), self._is_exempt)
            if overrun is not None and self.stop is not None:
                self.stop.kill_at = now
            elif overrun is not None:
                self._begin_stop("over_limit", overrun, now)
            self._release_exempt()
        elif now >= self.next_reading_ms:
            self.usage.read(process_tree.listed_descendants(os.getpid(), self._is_exempt), now)
        if now >= self.next_reading_ms:
            self.next_reading_ms = now + next_reading_ms(now - self.began, boot_ms() - now)
        self._check_output(now)
        if self.stop is None and signal.SIGTERM in self.timer.received:
            ending, detail = ("reclaimed", MACHINE_ENDS) if self.ends_with_machine else ("cancelled", ASKED_TO_STOP)
            self._begin_stop(ending, detail, now + self.spec["grace_ms"])
        if self.stop is None and self.spec["timeout_ms"] and now >= self.began + self.spec["timeout_ms"]:
            detail = f"timed out after {self.spec['timeout_ms'] / 1000:.12g} s"
            self._begin_stop("timed_out", detail, now + self.spec["grace_ms"])
        if self.stop is None:
            term_at, kill_at = self._hold_deadlines()
            if term_at and now >= term_at:
                self._begin_stop("lost", HOLD_EXPIRED, kill_at)
        if self.stop is not None and now >= self._kill_at(self.stop.kill_at):
            self._signal_tree(signal.SIGKILL)

    def _read_most_memory(self) -> int:
        """Memory limit of an attempt whose lease may grow; 0 if its lease is its limit."""
        most: int = self.spec.get("most_memory_bytes", 0)
        if not most:
            return 0
        recorded = self.job.read(job_dir.MEMORY)
        if isinstance(recorded, dict) and has_fields(recorded, {"most_memory_bytes": int, "nonce": str}):
            most = max(most, recorded["most_memory_bytes"]) if recorded["nonce"] == self.nonce else most
        return min(most, MAX_LIMIT_BYTES)

    def _check_output(self, now: int) -> None:
        """Drop output above its limit. If that is impossible the tree is paused for its grace, and ended if the file is
        still too long then."""
        if self.output is None or now < self.output.next_check_ms:
            return
        overrun = self.output.check(now)
        if overrun is None:
            if self.paused_until and self.stop is None:
                self._signal_tree(signal.SIGCONT)
            self.paused_until = 0
        elif self.stop is not None:
            self.stop.kill_at = min(self.stop.kill_at, now)
        elif self.paused_until and now >= self.paused_until:
            self._begin_stop("over_limit", overrun, now, is_disk_overrun=True)
        else:
            self.paused_until = self.paused_until or now + self.spec["grace_ms"]
            process_tree.stop_tree(os.getpid(), self._is_exempt)

    def _read_stop_request(self) -> None:
        """Begin a requested stop; a signal has only the ending, the later file the rest."""
        request = self._recorded_stop()
        if request is not None:
            kill_at = request["kill_at_boot_ms"]
            if self.stop is None:
                is_disk_overrun = request.get("is_disk_overrun") is True
                self._begin_stop(request["ending"], request["detail"], kill_at, is_disk_overrun=is_disk_overrun)
            elif self.stop.signalled:
                self.stop.detail, self.stop.kill_at, self.stop.signalled = request["detail"], kill_at, False
            else:
                self.stop.kill_at = min(self.stop.kill_at, kill_at)
        signalled = next((stop for stop, signum in STOP_SIGNALS.items() if signum in self.timer.received), None)
        if self.stop is None and signalled is not None:
            ending, is_disk_overrun = signalled
            kill_at = boot_ms() + self.spec["grace_ms"]
            self._begin_stop(ending, "", kill_at, is_disk_overrun=is_disk_overrun, signalled=True)
        if self.stop is not None and KILL_SIGNAL in self.timer.received:
            self.stop.kill_at = min(self.stop.kill_at, boot_ms())

    def _recorded_stop(self) -> dict[str, Any] | None:
        request = self.job.read(job_dir.STOP)
        return request if isinstance(request, dict) and has_fields(request, STOP_FIELDS) else None

    def _hold_deadlines(self) -> tuple[int, int]:
        """Times to terminate and to kill, so that the tree is gone by the end of the hold; (0, 0): never."""
        hold_ms = self.spec["hold_ms"]
        if not hold_ms:
            return 0, 0
        self.held_until = max(self.held_until, job_dir.read_hold(self.root, self.spec["hold_key"]))
        until = self.held_until or self.spec["launched_boot_ms"] + hold_ms
        return until - min(self.spec["grace_ms"], hold_ms // 4), until

    def _kill_at(self, kill_at: int) -> int:
        """Time of the kill, at the latest that of the hold: a grace may be longer."""
        return min(kill_at, self._hold_deadlines()[1] or kill_at)

    def _next_check_ms(self) -> int:
        """Time of the next check of the limits, in boot milliseconds; 0: never."""
        now = boot_ms()
        times = [max(self.next_reading_ms, now + 1)]
        if self.memory:
            times.append(now + self.memory.next_check_ms)
        if self.output is not None:
            times.append(self.output.next_check_ms)
        if self.stop is not None:
            kill_at = self._kill_at(self.stop.kill_at)
            times.append(kill_at if now < kill_at else now + 20)
        else:
            if self.spec["timeout_ms"]:
                times.append(self.began + self.spec["timeout_ms"])
            times.append(self._hold_deadlines()[0])
        return min(filter(None, times), default=0)

    def _begin_stop(
        self, ending: str, detail: str, kill_at: int, *, is_disk_overrun: bool = False, signalled: bool = False
    ) -> None:
        self.stop = TreeStop(ending, detail, kill_at, is_disk_overrun=is_disk_overrun, signalled=signalled)
        if self.main and boot_ms() < kill_at:
            self._signal_tree(signal.SIGTERM, signal.SIGCONT)

    def _signal_tree(self, *signums: int) -> list[process_tree.Proc]:
        left = [proc for proc in process_tree.descendants(os.getpid(), self._is_exempt) if proc.pid not in self.beyond]
        self.beyond.update(proc.pid for proc in process_tree.signal_all(left, *signums))
        return left

    def _reap(self) -> bool:
        """Reap dead children; False when there is no child left at all."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self.used_s += usage.ru_utime + usage.ru_stime
            self.largest_bytes = max(self.largest_bytes, usage.ru_maxrss * 1024)
            if pid == self.main:
                self.main_status = status

    def _is_exempt(self, proc: process_tree.Proc, *, fresh: bool = True) -> bool:
        """True if a process below this one belongs to the grid; the command itself never does."""
        return self.grid.besides(self.main)(proc, fresh=fresh)

    def _release_exempt(self, *, orphans: bool = False) -> None:
        """Take exempt processes, and those below them, out of the attempt's groups; with `orphans` even if nothing in a
        group is exempt any more."""
        for group in self.groups:
            members = group.members()
            procs = filter(None, map(process_tree.read_process, members))
            if (members and orphans) or any(self._is_exempt(proc, fresh=False) for proc in procs):
                ours = {proc.pid for proc in process_tree.descendants(os.getpid(), self._is_exempt)}
                for pid in members:
                    if pid not in ours:
                        group.release(pid)

    # ------------------------------------------------------------------ the end

    def _stop_leftovers(self) -> None:
        """Wait a moment, terminate, then kill, until nothing of the tree is left."""
        now = boot_ms()
        term_at, kill_at = now + SETTLE_MS, now + SETTLE_MS + min(LEFTOVER_GRACE_MS, self.spec["grace_ms"])
        if self.stop is not None:
            term_at = kill_at = self.stop.kill_at  # all were terminated when main was
        pause_ms = 1
        while self._reap():
            now = boot_ms()
            request = self._recorded_stop()
            if request is not None and request["kill_at_boot_ms"] < kill_at:
                term_at, kill_at = min(term_at, now), request["kill_at_boot_ms"]
            if KILL_SIGNAL in self.timer.received:
                term_at, kill_at = min(term_at, now), min(kill_at, now)
            elif self.job.is_removed:
                term_at, kill_at = min(term_at, now), min(kill_at, now + REMOVED_GRACE_MS)
            kill_at = self._kill_at(kill_at)
            left = self._signal_tree(*([signal.SIGKILL] if now >= kill_at else []))
            if not left and self._is_alone():
                return
            if now >= kill_at:
                self._kill_children()
            if term_at <= now < kill_at:
                process_tree.signal_all(left, signal.SIGTERM, signal.SIGCONT)
                term_at = kill_at
            self.timer.wait(now + pause_ms)
            pause_ms = min(50, 2 * pause_ms)

    def _is_alone(self) -> bool:
        """True if only foreign processes are left; one scan may miss a tree that forks and exits without end."""
        for _ in range(ALONE_SCANS):
            if not self._reap():
                return True
            children = process_tree.children_of(os.getpid())
            ours = [proc for proc in children if proc.pid not in self.beyond and not self._is_exempt(proc)]
            if ours or not children:  # a child that the list does not show is one of ours
                return False
            time.sleep(0.001)
        return True

    def _kill_children(self) -> None:
        """Kill direct children as fast as they come: a tree that forks and exits is a child of ours in between."""
        for _ in range(MAX_KILL_ROUNDS):
            children = process_tree.children_of(os.getpid())
            ours = [proc for proc in children if proc.pid not in self.beyond and not self._is_exempt(proc)]
            self.beyond.update(proc.pid for proc in process_tree.signal_all(ours, signal.SIGKILL))
            if not ours or not self._reap():
                return

    def _peak_bytes(self) -> int:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return self.usage.peak_with_mark(self.largest_bytes, own)

    def _exit_reason(self) -> tuple[str, str]:
        """Ending and detail of the outcome."""
        assert self.main_status is not None
        signalled = os.WIFSIGNALED(self.main_status)
        if self.stop is None and self.memory:
            overrun = (
                self.memory.overrun(os.getpid(), self._is_exempt)
                if isinstance(self.memory, CgroupMemoryLimit)
                else None
            )
            if overrun is None and signalled and os.WTERMSIG(self.main_status) == signal.SIGKILL:
                # It grew faster than we poll, and the machine ran out: the kernel killed the one we would have.
                limit = self.memory.limit_bytes
                peak = self._peak_bytes()
                overrun = over_limit_message(peak, limit) if peak > limit else None
            if overrun is not None:
                return "over_limit", overrun
        if self.stop is not None:
            return self.stop.ending, self.stop.detail
        # Whether the command has ended because its machine ends: a batch system sends SIGTERM to all processes of the
        # machine, to the command sometimes a moment before it sends it to this one.
        is_terminated = signalled and os.WTERMSIG(self.main_status) == signal.SIGTERM
        if self.ends_with_machine and is_terminated and signal.SIGTERM not in self.timer.received:
            self.timer.wait(boot_ms() + SETTLE_MS)
        if self.ends_with_machine and signal.SIGTERM in self.timer.received:
            return "reclaimed", MACHINE_ENDS
        return ("signalled", signal_name(os.WTERMSIG(self.main_status))) if signalled else ("exited", "")

    def _conclude(self, ending: str, detail: str, *, node_fault: bool = False) -> None:
        """Record and report the end, in the words of `Outcome` (`domain/jobs.py`)."""
        status = self.main_status
        peak = self._peak_bytes()
        for group in self.groups:
            for _ in range(REMOVE_TRIES):  # released processes may have forked meanwhile
                self._release_exempt(orphans=True)
                if group.remove():
                    break
        record = {
            "ending": ending,
            "exit_code": os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else None,
            "signal": os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None,
            "detail": detail,
            "cpu_ms": round(self.used_s * 1000),
            "max_memory_bytes": peak,
            "wall_ms": self.ended - self.began,
            "node_fault": node_fault,
            "is_disk_overrun": self.stop is not None and self.stop.is_disk_overrun,
        }
        # Write the end, then report it; on a full disk report first and retry: it must not be lost.
        line = job_dir.journal_entry("ended", record)
        for attempt in range(MAX_RECORD_TRIES):
            try:
                self.job.write_end(self.lock, record, self.nonce)
                if attempt > 0 or not self._report(line):
                    self.job.sync_end()
                return
            except OSError:
                if attempt == 0:
                    self._report(line)
                if self.job.is_removed:
                    return
                time.sleep(min(attempt + 1, 10))

    def _report(self, line: bytes) -> bool:
        """False without a reader; then the directory has it, too."""
        try:
            os.write(self.channel, line)
        except BrokenPipeError:
            return False
        return True


SPEC_FIELDS: Final = {
    "job_id": str,
    "node": str,
    "env": dict,
    "cpu_milli": int,
    "memory_bytes": int,
    "timeout_ms": int,
    "grace_ms": int,
    "hold_ms": int,
    "start_by_boot_ms": int,
    "launched_boot_ms": int,
    "boot": str,
    "nonce": str,
    "hold_key": str,
}
STOP_FIELDS: Final = {"ending": str, "detail": str, "kill_at_boot_ms": int}


def is_valid_spec(spec: Any, attempt_id: str) -> bool:
    """True if this is a valid spec of that attempt."""
    return (
        isinstance(spec, dict)
        and spec.get("attempt_id") == attempt_id
        and has_fields(spec, SPEC_FIELDS)
        and (spec.get("cwd") is None or isinstance(spec["cwd"], str))
        and is_list_of(str, spec.get("argv"))
        and is_list_of(str, [*spec["env"].keys(), *spec["env"].values()])
        and is_list_of(int, spec.get("gpu_indexes"))
        and is_list_of(int, spec.get("cores"))
    )


def has_fields(content: dict[str, Any], fields: dict[str, type]) -> bool:
    return all(type(content.get(name)) is kind for name, kind in fields.items())


def is_list_of(kind: type, content: Any) -> bool:
    return isinstance(content, list) and all(type(item) is kind for item in content)


def signal_name(signum: int) -> str:
    """A signal in the words of a message."""
    try:
        return f"killed by {signal.Signals(signum).name}"
    except ValueError:
        return f"killed by signal {signum}"
