"""Process tree of an original: found, stopped as a whole, continued or killed. Standard library only.

The tree is the original, all its descendants, and the processes that lost their parent: members of a process group or a
session that one of the tree leads, and every process that was seen in the tree before. A descendant that left parent,
group and session before the first scan cannot be distinguished from a stranger.

A process is signalled by a pidfd whose start time was compared after it was opened, never by its pid. The tree is still
when a scan of all processes, begun while every thread of every known member was stopped, shows no other member: stopped
processes have no new children. Members that were stopped before are left alone, by `stop` and by `resume`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import TYPE_CHECKING

from distributed_grid.agent.limits.process_tree import (
    Proc,
    children_of,
    read_proc_file,
    read_process,
    read_processes,
    threads,
)
from distributed_grid.agent.offloading.guard_core import Member
from distributed_grid.posix.boot_clock import boot_ms

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_MEMBERS = 500
SETTLE_POLLS, POLL_SECONDS = 20, 0.0005
NUDGE_SECONDS = 0.002
KILL_POLL_MS = 50


class TreeNotFrozen(Exception):
    """The tree cannot be stopped as a whole, and why."""


class FrozenTree:
    """The processes of one original. `own` are processes of the grid that must not be among them."""

    def __init__(
        self, root: Member, *, known: Iterable[Member] = (), spared: Iterable[Member] = (), own: Iterable[int] = ()
    ) -> None:
        self._root = root
        self._own = frozenset((1, *own))
        self._pidfds: dict[Member, int] = {}
        self._known: set[Member] = {root, *known}
        self.spared: set[Member] = set(spared)
        self._session = 0

    @property
    def members(self) -> tuple[Member, ...]:
        """All that were seen in the tree and may still live."""
        return tuple(sorted(self._known))

    def living(self) -> tuple[Member, ...]:
        return tuple(sorted(member for member in self._known if self._is_left(member)))

    def exclude(self, pid: int) -> None:
        self._own |= {pid}

    def root_pidfd(self) -> int | None:
        """A descriptor that is readable once the original has ended; None when it has."""
        return self._pidfd(self._root)

    @property
    def is_alive(self) -> bool:
        return self._is_left(self._root)

    def observe(self) -> list[Proc]:
        """Find the living members; `TreeNotFrozen` names the obstacle to stopping them as a whole."""
        # Close the descriptors of those that have ended, but for the original's own.
        for member in [member for member, fd in self._pidfds.items() if member != self._root and _has_ended(fd)]:
            os.close(self._pidfds.pop(member))
        procs = self._find()
        self._check(procs)
        return procs

    def spare_stopped(self, procs: Iterable[Proc]) -> None:
        """Remember the members that were stopped already."""
        self.spared.update((proc.pid, proc.start) for proc in procs if proc.stopped)

    def stop(self, by_ms: int) -> None:
        """Stop every member, those born meanwhile included; `TreeNotFrozen` when that has not succeeded in time."""
        signalled: set[Member] = set()
        while True:
            fresh = self._fresh(signalled, self._children())
            if not fresh and not self._unsettled():  # still processes have no new children: any other is an orphan
                fresh = self._fresh(signalled, self.observe())
                if not fresh:
                    return
            for member in fresh:
                signalled.add(member)
                if member not in self.spared:
                    self._send(member, signal.SIGSTOP)
            for _ in range(SETTLE_POLLS):
                if not (late := self._unsettled()):
                    break
                time.sleep(POLL_SECONDS)
            else:
                # A process that waits for its child to exec (vfork) stops when that has happened, and a stopped child
                # never does: continue the children of those that do not stop for a moment.
                parents = {pid for pid, _ in late}
                children = [
                    member
                    for member in self._known - self.spared
                    if (proc := read_process(member[0])) is not None
                    and proc.start == member[1]
                    and proc.parent in parents
                ]
                for member in children:
                    self._send(member, signal.SIGCONT)
                time.sleep(NUDGE_SECONDS)
                for member in children:
                    self._send(member, signal.SIGSTOP)
            if boot_ms() >= by_ms:
                late = self._unsettled()
                raise TreeNotFrozen(
                    f"{_shown(late[0])} does not stop" if late else "it forks faster than it can be stopped"
                )

    def _fresh(self, signalled: set[Member], procs: Iterable[Proc]) -> list[Member]:
        """The members that were not signalled yet; those of them that are stopped already are spared."""
        fresh = [proc for proc in procs if (proc.pid, proc.start) not in signalled]
        self.spare_stopped(fresh)
        return [(proc.pid, proc.start) for proc in fresh]

    def is_still(self) -> bool:
        """True if every member is still, and there is no new one."""
        if self._unsettled():
            return False
        known = len(self._known)
        try:
            self.observe()
        except TreeNotFrozen:
            return False
        return len(self._known) == known and not self._unsettled()

    def resume(self) -> None:
        """Continue every stopped member, except those that were stopped before."""
        continued: set[Member] = set()
        while fresh := self._known - self.spared - continued:
            for member in fresh:
                with contextlib.suppress(TreeNotFrozen):  # another user's by now: it cannot have been stopped here
                    self._send(member, signal.SIGCONT)
            continued |= fresh
            self._find()  # the members of a guard that was killed before it had recorded them

    def kill(self, wait_ms: int) -> bool:
        """Kill every member; True if nothing of the tree is left. A zombie is dead."""
        end_ms = boot_ms() + wait_ms
        while boot_ms() <= end_ms:
            left = self.living()
            for member in left:
                with contextlib.suppress(TreeNotFrozen):  # it may end by itself yet
                    self._send(member, signal.SIGKILL)
            poll = select.poll()
            fds = [fd for member in left if (fd := self._pidfds.get(member)) is not None and not _has_ended(fd)]
            for fd in fds:
                poll.register(fd, select.POLLIN)
            poll_until_ms = boot_ms() + KILL_POLL_MS
            while fds and boot_ms() < poll_until_ms:
                for fd, _ in poll.poll(KILL_POLL_MS):
                    poll.unregister(fd)
                    fds.remove(fd)
            if not self.living() and not self._find():
                return True
        return False

    def close(self) -> None:
        """Close all descriptors. Safe twice."""
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()

    # ------------------------------------------------------------------ one process

    def _pidfd(self, member: Member) -> int | None:
        """A descriptor of exactly this process; None when it is gone."""
        known = self._pidfds.get(member)
        if known is not None:
            return known
        try:
            fd = os.pidfd_open(member[0])
        except ProcessLookupError:
            return None
        except OSError as error:  # too many open files: it may not be gone
            raise TreeNotFrozen(f"{_shown(member)} cannot be observed: {error.strerror}") from None
        now = read_process(member[0])
        if now is None or now.start != member[1]:  # compared after opening: this descriptor is of that process or none
            os.close(fd)
            return None
        self._pidfds[member] = fd
        return fd

    def _is_left(self, member: Member) -> bool:
        """True unless it has certainly ended."""
        try:
            fd = self._pidfd(member)
        except TreeNotFrozen:
            return True
        return fd is not None and not _has_ended(fd)

    def _send(self, member: Member, signum: int) -> None:
        fd = self._pidfd(member)
        if fd is None:
            return
        try:
            signal.pidfd_send_signal(fd, signum)
        except ProcessLookupError:
            pass
        except PermissionError:
            raise TreeNotFrozen(f"{_shown(member)} runs as another user") from None

    # ------------------------------------------------------------------ the whole tree

    def _find(self) -> list[Proc]:
        procs = find_members(self._known, read_processes())
        self._known.update((proc.pid, proc.start) for proc in procs)
        return procs

    def _check(self, procs: list[Proc]) -> None:
        if len(procs) > MAX_MEMBERS:
            raise TreeNotFrozen(f"it has more than {MAX_MEMBERS} processes")
        root = next((proc for proc in procs if proc.pid == self._root[0]), None)
        self._session = self._session or (root.session if root is not None else 0)
        if any(proc.pid in self._own for proc in procs):
            raise TreeNotFrozen("a process of the grid runs below it")
        for proc in procs:
            if self._session and proc.session != self._session:
                raise TreeNotFrozen(f"{_shown((proc.pid, proc.start))} is in another session")

    def _unsettled(self) -> list[Member]:
        """The members that live and have a thread that is not stopped."""
        return [member for member in self._known if self._is_left(member) and not _stands_still(member)]

    def _children(self) -> list[Proc]:
        """The members that descend from known ones, from the kernel's lists: quick, and complete once all are still."""
        procs: dict[int, Proc] = {}
        waiting = [
            proc for pid, start in self._known if (proc := read_process(pid)) is not None and proc.start == start
        ]
        while waiting:
            proc = waiting.pop()
            if proc.pid not in procs:
                procs[proc.pid] = proc
                waiting += children_of(proc.pid)
        living = [proc for proc in procs.values() if not proc.dead]
        self._known.update((proc.pid, proc.start) for proc in living)
        self._check(living)
        return living


def find_members(known: Iterable[Member], procs: Mapping[int, Proc]) -> list[Proc]:
    """The living members of a tree of which these are known, among all processes."""
    members: dict[int, Proc] = {}
    waiting = [proc for pid, start in known if (proc := procs.get(pid)) is not None and proc.start == start]
    pids = {pid for pid, _ in known}
    children: dict[int, list[Proc]] = {}
    groups: dict[int, list[Proc]] = {}
    sessions: dict[int, list[Proc]] = {}
    for proc in procs.values():
        children.setdefault(proc.parent, []).append(proc)
        groups.setdefault(proc.group, []).append(proc)
        sessions.setdefault(proc.session, []).append(proc)
    while waiting:
        proc = waiting.pop()
        if proc.pid in members:
            continue
        members[proc.pid] = proc
        pids.add(proc.pid)
        waiting += children.get(proc.pid, ())
        # The number of a living member's group or session belongs to no other process, though the leader may be gone.
        waiting += groups.get(proc.group, ()) if proc.group in pids else ()
        waiting += sessions.get(proc.session, ()) if proc.session in pids else ()
    return [proc for proc in members.values() if not proc.dead]


def _stands_still(member: Member) -> bool:
    """True if every thread of a process is stopped or dead."""
    proc = read_process(member[0])
    if proc is None or proc.start != member[1] or proc.dead:
        return True
    if proc.threads <= 1:
        return proc.stopped
    stats = (read_proc_file(f"/proc/{member[0]}/task/{thread}/stat") for thread in threads(member[0]))
    return all(text[text.rindex(b")") + 2 :][:1] in b"TtZXx" for text in stats if text)


def _has_ended(pidfd: int) -> bool:
    """True if the process of this descriptor is dead, all its threads included; a zombie is."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _shown(member: Member) -> str:
    name = read_proc_file(f"/proc/{member[0]}/comm").decode("utf-8", "replace").strip()
    return f"process {member[0]}" + (f" ({name})" if name else "")
