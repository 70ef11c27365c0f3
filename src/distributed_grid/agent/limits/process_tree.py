"""Process trees of jobs, read from /proc: descendants, signals, affinity.

A process is identified by pid and start time; no signal is sent on the pid alone. All that descends from an attempt's
shim belongs to the attempt, whatever it is called and whatever its environment says. Exempt, with all below it, is only
a process of this very grid, which a job may have started by using `grid`: see `GridProcesses`.
"""

from __future__ import annotations

import os
import re
import signal
import time
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

from distributed_grid.posix.private_files import read_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

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
    # The name in parentheses may itself hold spaces and parentheses; what follows the last one is numbers.
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
    """Every process of the machine."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {proc.pid: proc for proc in found if proc is not None}


class Exempt(Protocol):
    """Whether a process is none of an attempt's; where it need not be `fresh`, the answer may be a moment old."""

    def __call__(self, proc: Proc, *, fresh: bool = True) -> bool: ...


def nobody(proc: Proc, *, fresh: bool = True) -> bool:
    """Exempts no process."""
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
    """Like `descendants`, from the kernel's lists of children: cheap, and now and then a process short."""
    if not _has_children_lists():
        return descendants(root, exempt)
    return _descend(root, _listed_children, exempt, fresh=False)


def _descend(root: int, children_of: Callable[[int], Iterable[Proc]], exempt: Exempt, *, fresh: bool) -> list[Proc]:
    found: list[Proc] = []
    seen = {root}
    waiting = [root]
    while waiting:
        for proc in children_of(waiting.pop()):
            if proc.pid in seen or exempt(proc, fresh=fresh):
                continue
            seen.add(proc.pid)
            waiting.append(proc.pid)
            if not proc.dead:
                found.append(proc)
    return found


@lru_cache(maxsize=1)
def _has_children_lists() -> bool:
    return bool(os.access(f"/proc/self/task/{os.getpid()}/children", os.R_OK))


def children_of(pid: int) -> list[Proc]:
    """The direct children of a process, dead ones not collected yet included."""
    if _has_children_lists():
        return _listed_children(pid)
    return [proc for proc in read_processes().values() if proc.parent == pid]


def _listed_children(pid: int) -> list[Proc]:
    lists = (read_proc_file(f"/proc/{pid}/task/{thread}/children") for thread in threads(pid))
    found = (read_process(int(child)) for listed in lists for child in listed.split())
    return [proc for proc in found if proc is not None]


def threads(pid: int) -> list[int]:
    """Ids of a process's threads; none when it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def read_environ(pid: int) -> frozenset[bytes]:
    """The NAME=value pairs a process was started with; none when it is gone or not ours to read."""
    return frozenset(read_proc_file(f"/proc/{pid}/environ").split(b"\0"))


class GridProcesses:
    """The processes of this grid that may run below one of its jobs, known by the locks that the kernel says they hold.

    A job that uses `grid` may start the daemon; when that dies, its spawner, its memory server and its shims become
    children of the job's shim. Each of them leads a session and holds one of `locks`, of the daemon, the spawner and
    the memory server, or one of `shim_locks`, of live attempts. Nothing else is believed: no name, no environment, no
    command line. The locks of another grid are other files.
    """

    def __init__(self, locks: Iterable[str], shim_locks: Callable[[], Iterable[str]]) -> None:
        self.locks = tuple(locks)
        self._shim_locks = shim_locks
        self._recent: dict[tuple[int, int], tuple[int, bool]] = {}

    def besides(self, main: int) -> Exempt:
        """What is exempt from the attempt with this main process, which itself never is."""

        def exempt(proc: Proc, *, fresh: bool = True) -> bool:
            return proc.pid != main and proc.pid == proc.session and self._includes(proc, fresh)

        return exempt

    def _includes(self, proc: Proc, fresh: bool) -> bool:
        now = time.monotonic_ns() // 1_000_000
        at, answer = self._recent.get((proc.pid, proc.start), (now - RECENT_MS, False))
        if not fresh and now - at < RECENT_MS:
            return answer
        if len(self._recent) > 1000:
            self._recent.clear()
        held = held_locks(proc.pid)
        answer = bool(held) and not held.isdisjoint(map(_file_id, (*self.locks, *self._shim_locks())))
        self._recent[proc.pid, proc.start] = now, answer
        return answer


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
    """The processes, leaders of their sessions, that have this file exclusively locked."""
    leaders = (proc for proc in read_processes().values() if proc.pid == proc.session and not proc.dead)
    return [proc for proc in leaders if _file_id(path) in held_locks(proc.pid)]


_EXCLUSIVE = re.compile(rb"^lock:\s*\d+: FLOCK\s+ADVISORY\s+WRITE\s", re.MULTILINE)
_NO_FILE = (0, 0)


def _file_id(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return _NO_FILE
    return found.st_dev, found.st_ino


def find_attempt_processes(
    attempt_id: str, work: str, exempt: Exempt, session: int = 0, since: int = 0, group: str = ""
) -> list[Proc]:
    """What is left of an attempt whose shim is gone: found by its environment, session or control group, and below.

    The environment must name both its id and its directory: another grid of the same user may use the same id.
    `session` (0: unknown) is the command's; it counts only for processes not older than `since`. `group` is the name
    of its control group, which counts as the kernel says who is in it.
    """
    marks = {f"GRID_ATTEMPT_ID={attempt_id}".encode(), f"GRID_JOB_DIR={work}".encode()}
    procs = read_processes()
    found: dict[int, Proc] = {}
    for proc in procs.values():
        of_session = session != 0 and proc.session == session and proc.start >= since
        of_group = bool(group) and is_in_group(proc.pid, group)
        if (of_session or of_group or marks <= read_environ(proc.pid)) and not exempt(proc):
            found[proc.pid] = proc
            found.update((child.pid, child) for child in descendants(proc.pid, exempt, procs))
    return [proc for proc in found.values() if not proc.dead and proc.pid != os.getpid()]


def is_in_group(pid: int, name: str) -> bool:
    """Whether a process is in a control group of that name, or below one."""
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
