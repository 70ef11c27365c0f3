"""Process trees of jobs, read from /proc: descendants, signals, affinity, memory and its limit.

A process is identified by pid and start time; no signal is sent on the pid alone. All that descends from an attempt's
shim belongs to the attempt, under any name and with any environment. Exempt, with all below it, is only
a process of this very grid, which a job may have started by using `grid`: see `GridProcesses`.

Memory of an attempt, one definition for all: anonymous and shared memory of the whole tree at one moment, each shared
page counted once. The contents of mapped files do not count, since the machine can drop them at any time. A memory
limit is about the same amount; it is enforced by the kernel in a control group, or by polling the tree. The amount is
read from the attempt's control group where there is one with a limit, else from its processes, each shared page by its
share (PSS). Readings come at intervals of a quarter of the attempt's age, from `FIRST_MS` on. Peaks between readings
are bounded from below by the kernel's mark of the largest process (`ru_maxrss`), less the pages of files in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from distributed_grid.posix.private_files import read_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distributed_grid.agent.limits.cgroups import Cgroup

RECENT_MS = 100
TICK_MS = 1000 // os.sysconf("SC_CLK_TCK")


class Proc(NamedTuple):
    """One process, as in /proc/PID/stat."""

    pid: int
    parent: int
    start: int
    session: int
    dead: bool
    stopped: bool
    own_ticks: int
    waited_ticks: int
    group: int = 0
    threads: int = 1


def read_process(pid: int) -> Proc | None:
    """The process with that pid as it is now; None when there is none."""
    text = read_proc_file(f"/proc/{pid}/stat")
    if not text:
        return None
    # The name in parentheses may itself hold spaces and parentheses; after the last one there are only numbers.
    field = text[text.rindex(b")") + 2 :].split()
    threads = int(field[17])
    return Proc(
        pid=pid,
        parent=int(field[1]),
        start=int(field[19]),
        session=int(field[3]),
        dead=field[0] in b"ZXx" and threads <= 1,
        stopped=field[0] in b"Tt",
        own_ticks=int(field[11]) + int(field[12]),
        waited_ticks=int(field[13]) + int(field[14]),
        group=int(field[2]),
        threads=threads,
    )


def read_processes() -> dict[int, Proc]:
    procs = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {proc.pid: proc for proc in procs if proc is not None}


class Exempt(Protocol):
    """True if a process does not belong to an attempt; unless `fresh`, the answer may be a moment old."""

    def __call__(self, proc: Proc, *, fresh: bool = True) -> bool: ...


def nobody(proc: Proc, *, fresh: bool = True) -> bool:
    return False


def descendants(root: int, exempt: Exempt, procs: Mapping[int, Proc] | None = None) -> list[Proc]:
    """All living descendants of `root`, parents first, without exempt ones and those below them.

    Reads the whole process table, and misses nothing that is not being born.
    """
    procs = read_processes() if procs is None else procs
    children: dict[int, list[Proc]] = {}
    for proc in procs.values():
        children.setdefault(proc.parent, []).append(proc)
    return _descend(root, lambda pid: children.get(pid, ()), exempt, fresh=True)


def listed_descendants(root: int, exempt: Exempt) -> list[Proc]:
    """`descendants` by the kernel's lists of children: cheap, and sometimes a process is missing."""
    if not _has_children_lists():
        return descendants(root, exempt)
    return _descend(root, _listed_children, exempt, fresh=False)


def _descend(root: int, children_of: Callable[[int], Iterable[Proc]], exempt: Exempt, *, fresh: bool) -> list[Proc]:
    procs: list[Proc] = []
    seen = {root}
    waiting = [root]
    while waiting:
        for proc in children_of(waiting.pop()):
            if proc.pid in seen or exempt(proc, fresh=fresh):
                continue
            seen.add(proc.pid)
            waiting.append(proc.pid)
            if not proc.dead:
                procs.append(proc)
    return procs


@lru_cache(maxsize=1)
def _has_children_lists() -> bool:
    return bool(os.access(f"/proc/self/task/{os.getpid()}/children", os.R_OK))


def children_of(pid: int) -> list[Proc]:
    """Direct children of a process, dead ones not collected yet included."""
    if _has_children_lists():
        return _listed_children(pid)
    return [proc for proc in read_processes().values() if proc.parent == pid]


def _listed_children(pid: int) -> list[Proc]:
    lists = (read_proc_file(f"/proc/{pid}/task/{thread}/children") for thread in threads(pid))
    procs = (read_process(int(child)) for listed in lists for child in listed.split())
    return [proc for proc in procs if proc is not None]


def threads(pid: int) -> list[int]:
    """Ids of a process's threads; none when it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def read_environ(pid: int) -> frozenset[bytes]:
    """NAME=value pairs at the start of a process; none when it is gone or not ours to read."""
    return frozenset(read_proc_file(f"/proc/{pid}/environ").split(b"\0"))


class GridProcesses:
    """The processes of this grid that may run below one of its jobs, known by their locks in the kernel.

    A job that uses `grid` may start the daemon; when that dies, its spawner, its memory server and its shims become
    children of the job's shim. Each of them leads a session and holds one of `locks`, of the daemon, the spawner
    and the memory server, or one of `shim_locks`, of live attempts. No other sign counts: no name, no environment,
    no command line. The locks of another grid are other files.
    """

    def __init__(self, locks: Iterable[str], shim_locks: Callable[[], Iterable[str]]) -> None:
        self.locks = tuple(locks)
        self._shim_locks = shim_locks
        self._recent: dict[tuple[int, int], tuple[int, bool]] = {}

    def besides(self, main: int) -> Exempt:
        """Exemptions from the attempt with this main process, which itself is never exempt."""

        def exempt(proc: Proc, *, fresh: bool = True) -> bool:
            if proc.pid == main or proc.pid != proc.session:
                return False
            now = time.monotonic_ns() // 1_000_000
            read_at, answer = self._recent.get((proc.pid, proc.start), (now - RECENT_MS, False))
            if not fresh and now - read_at < RECENT_MS:
                return answer
            if len(self._recent) > 1000:
                self._recent.clear()
            held = held_locks(proc.pid)
            answer = bool(held) and not held.isdisjoint(map(_file_id, (*self.locks, *self._shim_locks())))
            self._recent[proc.pid, proc.start] = now, answer
            return answer

        return exempt


def held_locks(pid: int) -> set[tuple[int, int]]:
    """The files (device and inode) that a process has open and exclusively locked with flock."""
    held = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fdinfo"):
            info = read_proc_file(f"/proc/{pid}/fdinfo/{fd}")
            if b"\nlock:" in info and _EXCLUSIVE.search(info):
                held.add(_file_id(f"/proc/{pid}/fd/{fd}"))
    except OSError:  # ended, or another user's
        pass
    return held - {_NO_FILE}


def holders_of(path: str) -> list[Proc]:
    """Session leaders that have this file exclusively locked."""
    leaders = (proc for proc in read_processes().values() if proc.pid == proc.session and not proc.dead)
    return [proc for proc in leaders if _file_id(path) in held_locks(proc.pid)]


_EXCLUSIVE = re.compile(rb"^lock:\s*\d+: FLOCK\s+ADVISORY\s+WRITE\s", re.MULTILINE)
_NO_FILE = (0, 0)


def _file_id(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return _NO_FILE
    return status.st_dev, status.st_ino


def find_attempt_processes(
    attempt_id: str, work: str, exempt: Exempt, session: int = 0, since: int = 0, group: str = ""
) -> list[Proc]:
    """Processes left of an attempt whose shim is gone: found by its environment, session or control group, and below.

    The environment must name both its id and its directory: another grid of the same user may use the same id.
    `session` (0: unknown) is the command's; it counts only for processes not older than `since`. `group` is the
    name of its control group, with the members that the kernel lists.
    """
    marks = {f"GRID_ATTEMPT_ID={attempt_id}".encode(), f"GRID_JOB_DIR={work}".encode()}
    procs = read_processes()
    procs_by_pid: dict[int, Proc] = {}
    for proc in procs.values():
        of_session = session != 0 and proc.session == session and proc.start >= since
        of_group = bool(group) and is_in_group(proc.pid, group)
        if (of_session or of_group or marks <= read_environ(proc.pid)) and not exempt(proc):
            procs_by_pid[proc.pid] = proc
            procs_by_pid.update((child.pid, child) for child in descendants(proc.pid, exempt, procs))
    return [proc for proc in procs_by_pid.values() if not proc.dead and proc.pid != os.getpid()]


def is_in_group(pid: int, name: str) -> bool:
    return f"/{name}/".encode() in read_proc_file(f"/proc/{pid}/cgroup").replace(b"\n", b"/\n")


def send_signal(proc: Proc, signum: int) -> bool:
    """Signal exactly that process; False when it is gone. `PermissionError` when it is not ours."""
    try:
        fd = os.pidfd_open(proc.pid)
    except ProcessLookupError:
        return False
    try:
        now = read_process(proc.pid)
        if now is None or now.start != proc.start:
            return False
        signal.pidfd_send_signal(fd, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def signal_all(procs: Iterable[Proc], *signums: int) -> list[Proc]:
    """Signal each; returns those that refused because they are no longer this user's."""
    beyond = []
    for proc in procs:
        try:
            for signum in signums:
                send_signal(proc, signum)
        except PermissionError:
            beyond.append(proc)
    return beyond


def stop_tree(root: int, exempt: Exempt) -> None:
    """Send SIGSTOP to every process below `root`, those born meanwhile included."""
    stopped: set[tuple[int, int]] = set()
    for _ in range(10):
        fresh = [proc for proc in descendants(root, exempt) if (proc.pid, proc.start) not in stopped]
        if not fresh:
            return
        signal_all(fresh, signal.SIGSTOP)
        stopped.update((proc.pid, proc.start) for proc in fresh)


def pin_tree(root: int, cores: Iterable[int], exempt: Exempt) -> None:
    """Let every thread below `root` run on these cores only."""
    for _ in range(2):  # a thread may be born of one not yet moved
        for proc in listed_descendants(root, exempt):
            for thread in threads(proc.pid):
                try:
                    os.sched_setaffinity(thread, cores)
                except (ProcessLookupError, PermissionError):  # gone, or no longer this user's
                    continue


def read_proc_file(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # ended, or another user's
        return b""
    try:
        return read_all(fd)
    except OSError:
        return b""
    finally:
        os.close(fd)


FIRST_MS, MAX_INTERVAL_MS = 20, 1_000
SHARES_STALE_MS = 2_000
"""How old the shares of a tree may be, unless reading them takes long."""
COST_FACTOR = 50
"""Interval between two readings, in multiples of the time that one takes."""
MB, GB = 1024**2, 1024**3
START_BYTES = 64 * MB
"""The kernel's limit while a command starts, where its own is lower: until then the shim is in its control group, and
the kernel would end the shim rather than a small command."""
POLL_FAST_MS, POLL_SLOW_MS = 50, 200


class TreeMemory:
    """Readings of one attempt's tree, and the highest of them."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._file_bytes = 0
        self._resident = self._held = 0
        self._stale_at_ms = 0

    def read(self, procs: Sequence[Proc], now_ms: int, *, limit_bytes: int = 0) -> int:
        """Memory of these processes together; of several it is exact if it has changed, or is above the limit."""
        readings = [resident_and_file_bytes(proc.pid) for proc in procs]
        rough = sum(resident for resident, _ in readings)
        if len(procs) < 2:
            self._held = self._resident = rough
        elif (
            abs(rough - self._resident) > self._resident // 20
            or now_ms >= self._stale_at_ms
            or (limit_bytes and rough > limit_bytes)
        ):
            began = time.monotonic_ns()
            self._held = sum(share_bytes(proc.pid) for proc in procs)  # walks page tables
            cost_ms = (time.monotonic_ns() - began) // 1_000_000
            self._resident, self._stale_at_ms = rough, now_ms + max(SHARES_STALE_MS, COST_FACTOR * cost_ms)
        self.add(self._held, max((file for _, file in readings), default=0))
        return self._held

    def add(self, held_bytes: int, file_bytes: int = 0) -> None:
        """Add a reading made elsewhere: memory, and mapped files of a process."""
        self.peak_bytes = max(self.peak_bytes, held_bytes)
        self._file_bytes = max(self._file_bytes, file_bytes)

    def peak_with_mark(self, mark_bytes: int, supervisor_bytes: int) -> int:
        """Peak, with the kernel's mark of the largest process. A mark that is not above the supervisor's own was
        inherited from it, and counts only without any other reading."""
        if not self.peak_bytes:
            return mark_bytes
        return max(self.peak_bytes, mark_bytes - self._file_bytes if mark_bytes > supervisor_bytes else 0)


class TreeMeter:
    """CPU and memory usage of the tree below one shim; cheap enough to read every second."""

    def __init__(self) -> None:
        self.memory = TreeMemory()
        self.cpu_ms = 0
        self.seen: list[Proc] = []

    def read(self, shim: Proc, exempt: Exempt, now_ms: int) -> tuple[int, int]:
        """CPU milliseconds since `shim` was read, and bytes held now."""
        now = read_process(shim.pid)
        if now is None or now.start != shim.start:
            return 0, 0
        if now.stopped:  # by its own job: the limits are kept by a shim that runs
            send_signal(now, signal.SIGCONT)
        procs = self.seen = listed_descendants(shim.pid, exempt)
        ticks = now.waited_ticks - shim.waited_ticks + sum(proc.own_ticks + proc.waited_ticks for proc in procs)
        self.cpu_ms = max(self.cpu_ms, ticks * TICK_MS)
        return ticks * TICK_MS, self.memory.read(procs, now_ms)


def next_reading_ms(age_ms: int, cost_ms: int) -> int:
    """Time until the next reading of a tree of this age; reading takes 2 % of the time at most."""
    return max(min(max(FIRST_MS, age_ms // 4), MAX_INTERVAL_MS), COST_FACTOR * cost_ms)


def resident_bytes(pid: int) -> int:
    """Anonymous and shared memory of one process, shared pages counted whole. Cheap."""
    return resident_and_file_bytes(pid)[0]


def resident_and_file_bytes(pid: int) -> tuple[int, int]:
    """Resident bytes, and the pages of mapped files in memory."""
    sizes = _kilobytes(f"/proc/{pid}/status", (b"RssAnon:", b"RssShmem:", b"RssFile:"))
    file = sizes.pop(b"RssFile:", 0)
    return sum(sizes.values()) * 1024, file * 1024


def share_bytes(pid: int) -> int:
    """Anonymous and shared memory of one process, shared pages counted by share. Walks its page tables."""
    sizes = _kilobytes(f"/proc/{pid}/smaps_rollup", (b"Pss:", b"Pss_Anon:", b"Pss_Shmem:"))
    if not sizes:
        return resident_bytes(pid)
    if b"Pss_Anon:" not in sizes:  # before Linux 5.4
        return sizes[b"Pss:"] * 1024
    return (sizes[b"Pss_Anon:"] + sizes.get(b"Pss_Shmem:", 0)) * 1024


def _kilobytes(path: str, keys: tuple[bytes, ...]) -> dict[bytes, int]:
    sizes = {}
    for line in read_proc_file(path).splitlines():
        key, _, rest = line.partition(b":")
        key += b":"
        if key in keys:
            sizes[key] = int(rest.split()[0])
    return sizes


class CgroupMemoryLimit:
    """A limit that the kernel enforces; detects its kills, and polls a tree of which some processes left the group."""

    def __init__(self, limit_bytes: int, group: Cgroup, usage: TreeMemory) -> None:
        self.limit_bytes = limit_bytes
        self.next_check_ms = POLL_SLOW_MS
        self._group = group
        self._usage = usage
        self._polled: PolledMemoryLimit | None = None
        group.limit_memory(max(limit_bytes, START_BYTES))

    def enforce(self) -> None:
        """Lower the kernel's limit to that of the attempt, once the shim is out of the group.

        A kernel that refuses, because the group holds more already, keeps the limit of the start; `overrun`
        finds the attempt above its own.
        """
        if self.limit_bytes < START_BYTES:
            with contextlib.suppress(OSError):
                self._group.limit_memory(self.limit_bytes)

    def raise_limit(self, limit_bytes: int) -> None:
        """Raise the limit of the tree."""
        self._group.raise_memory_limit(limit_bytes)
        self.limit_bytes = limit_bytes
        if self._polled is not None:
            self._polled.raise_limit(limit_bytes)

    def overrun(self, root: int, exempt: Exempt) -> str | None:
        """Message about an overrun; None before one."""
        held, files = self._group.held_and_file_bytes()
        self._usage.add(held, files)
        if held > self.limit_bytes:  # the kernel's limit was raised from outside
            return over_limit_message(held, self.limit_bytes)
        if self._group.kills():
            self._usage.add(self.limit_bytes)
            return f"{over_limit_message(self._usage.peak_bytes, self.limit_bytes)} and asked for more"
        if self._polled is None and self._return_escaped(root, exempt):
            self._polled = PolledMemoryLimit(self.limit_bytes, self._usage)
        if self._polled is None:
            return None
        self._return_escaped(root, exempt)
        overrun = self._polled.overrun(root, exempt)
        self.next_check_ms = self._polled.next_check_ms
        return overrun

    def _return_escaped(self, root: int, exempt: Exempt) -> bool:
        """Put processes that have left the group back into it; True if there were any."""
        tree = listed_descendants(root, exempt)
        inside = set(self._group.members())
        escaped = [proc for proc in tree if proc.pid not in inside]
        for proc in escaped:
            self._group.add(proc.pid)
        return bool(escaped)


class PolledMemoryLimit:
    """A limit enforced by polling: often while the tree is near it or growing, seldom while it is not."""

    def __init__(self, limit_bytes: int, usage: TreeMemory) -> None:
        self.limit_bytes = limit_bytes
        self.next_check_ms = POLL_FAST_MS
        self._usage = usage
        self._last_bytes = 0

    def raise_limit(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes

    def overrun(self, root: int, exempt: Exempt) -> str | None:
        """Message about an overrun of the tree below `root`; None without one."""
        began = time.monotonic_ns()
        tree = listed_descendants(root, exempt)
        used = self._usage.read(tree, began // 1_000_000, limit_bytes=self.limit_bytes)
        cost_ms = (time.monotonic_ns() - began) // 1_000_000
        calm = used < self.limit_bytes // 2 and used - self._last_bytes < self.limit_bytes // 8
        self._last_bytes = used
        self.next_check_ms = max(POLL_SLOW_MS if calm else POLL_FAST_MS, 10 * cost_ms)
        return over_limit_message(used, self.limit_bytes) if used > self.limit_bytes else None


def over_limit_message(used_bytes: int, limit_bytes: int) -> str:
    """The message for people, in GB with as many decimals as the limit needs, a small one in MB."""
    if limit_bytes < START_BYTES:
        return f"over limit: used {used_bytes / MB:.3g} MB of {limit_bytes / MB:.3g} MB"
    limit = limit_bytes / GB
    decimals = 1 if abs(round(limit, 1) - limit) < 0.01 else 2
    return f"over limit: used {used_bytes / GB:.{decimals}f} GB of {limit:.{decimals}f} GB"
