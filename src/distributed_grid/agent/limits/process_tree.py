"""Process trees of jobs, read from /proc: descendants, signals, affinity.

A process is identified by pid and start time; no signal is sent on the pid alone. A grid daemon, spawner or memory
server (`GRID_ROLE` in its environment) that was started from inside a job is exempt: it is not part of the job, and
neither is anything below it.
"""

from __future__ import annotations

import os
import signal
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from distributed_grid.posix.private_files import read_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

EXEMPT = frozenset((b"GRID_ROLE=daemon", b"GRID_ROLE=spawner", b"GRID_ROLE=memory"))
TICK_MS = 1000 // os.sysconf("SC_CLK_TCK")


class Proc(NamedTuple):
    """One process, as in /proc/PID/stat."""

    pid: int
    parent: int
    start: int
    session: int
    dead: bool
    own_ticks: int
    waited_ticks: int
    environ_at: int


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
        own_ticks=int(field[11]) + int(field[12]),
        waited_ticks=int(field[13]) + int(field[14]),
        environ_at=int(field[47]) if len(field) > 47 else 0,
    )


def read_processes() -> dict[int, Proc]:
    """Every process of the machine."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {proc.pid: proc for proc in found if proc is not None}


def descendants(root: int, procs: Mapping[int, Proc] | None = None) -> list[Proc]:
    """All living descendants of `root`, parents first, without exempt ones.

    Reads the whole process table, and misses nothing that is not being born.
    """
    procs = read_processes() if procs is None else procs
    children: dict[int, list[Proc]] = {}
    for proc in procs.values():
        children.setdefault(proc.parent, []).append(proc)
    return _descend(root, lambda pid: children.get(pid, ()), is_exempt)


def listed_descendants(root: int) -> list[Proc]:
    """Like `descendants`, from the kernel's lists of children: cheap, and now and then a process short."""
    if not _has_children_lists():
        return descendants(root)
    return _descend(root, _listed_children, _was_exempt)


def _descend(root: int, children_of: Callable[[int], Iterable[Proc]], exempt: Callable[[Proc], bool]) -> list[Proc]:
    found: list[Proc] = []
    seen = {root}
    waiting = [root]
    while waiting:
        for proc in children_of(waiting.pop()):
            if proc.pid in seen or exempt(proc):
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


def is_exempt(proc: Proc) -> bool:
    """Whether this is a grid process of its own, not part of a job."""
    return not EXEMPT.isdisjoint(read_environ(proc.pid))


def _was_exempt(proc: Proc) -> bool:
    return _exempt_image(proc.pid, proc.start, proc.environ_at)


@lru_cache(maxsize=4096)
def _exempt_image(pid: int, start: int, environ_at: int) -> bool:  # an exec moves the environment
    return not EXEMPT.isdisjoint(read_environ(pid))


def find_attempt_processes(attempt_id: str, work: str, session: int = 0, since: int = 0) -> list[Proc]:
    """What is left of an attempt whose shim is gone: found by its environment or its session, and below those.

    The environment must name both its id and its directory: another grid of the same user may use the same id.
    `session` (0: unknown) is the command's; it counts only for processes not older than `since`.
    """
    marks = {f"GRID_ATTEMPT_ID={attempt_id}".encode(), f"GRID_JOB_DIR={work}".encode()}
    procs = read_processes()
    found: dict[int, Proc] = {}
    for proc in procs.values():
        pairs = read_environ(proc.pid)
        of_session = session != 0 and proc.session == session and proc.start >= since
        if (of_session or marks <= pairs) and EXEMPT.isdisjoint(pairs):
            found[proc.pid] = proc
            found.update((child.pid, child) for child in descendants(proc.pid, procs))
    return [proc for proc in found.values() if not proc.dead and proc.pid != os.getpid()]


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


def stop_tree(root: int) -> None:
    """Send SIGSTOP to every process below `root`, those born meanwhile included."""
    stopped: set[tuple[int, int]] = set()
    for _ in range(10):
        fresh = [proc for proc in descendants(root) if (proc.pid, proc.start) not in stopped]
        if not fresh:
            return
        signal_all(fresh, signal.SIGSTOP)
        stopped.update((proc.pid, proc.start) for proc in fresh)


def pin_tree(root: int, cores: Iterable[int]) -> None:
    """Let every thread below `root` run on these cores only."""
    for _ in range(2):  # a thread may be born of one not yet moved
        for proc in listed_descendants(root):
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
