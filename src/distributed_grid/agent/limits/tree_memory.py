"""Memory that the processes of an attempt hold together, the highest amount of it, and the limit of it.

One definition for all attempts: anonymous and shared memory of the whole tree at one moment, each shared page counted
once. The contents of mapped files do not count, since the machine can drop them at any time. A memory limit is about
the same amount; it is enforced by the kernel in a control group, or by polling what the tree holds.

The amount is read from the attempt's control group where there is one with a limit, else from its processes, each
shared page by its share (PSS). Readings come at intervals of a quarter of the attempt's age, from `FIRST_MS` on. What
no reading saw is bounded from below by the kernel's mark of the largest process (`ru_maxrss`), less the pages of files
in it.
"""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING

from distributed_grid.agent.limits.process_tree import (
    TICK_MS,
    Exempt,
    Proc,
    listed_descendants,
    read_proc_file,
    read_process,
    send_signal,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distributed_grid.agent.limits.cgroups import Cgroup

FIRST_MS, MAX_INTERVAL_MS = 20, 1_000
SHARES_STALE_MS = 2_000
"""How old the shares of a tree may be, unless reading them takes long."""
COST_FACTOR = 50
"""A reading is so many times as far from the next as it takes."""
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
        """What these processes hold together; of several it is exact where it has changed, or is above the limit."""
        found = [resident_and_file_bytes(proc.pid) for proc in procs]
        rough = sum(resident for resident, _ in found)
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
        self.add(self._held, max((file for _, file in found), default=0))
        return self._held

    def add(self, held_bytes: int, file_bytes: int = 0) -> None:
        """A reading by somebody else: what is held, and how much of files some process has mapped."""
        self.peak_bytes = max(self.peak_bytes, held_bytes)
        self._file_bytes = max(self._file_bytes, file_bytes)

    def peak_with_mark(self, mark_bytes: int, supervisor_bytes: int) -> int:
        """The peak, with the kernel's mark of the largest process; one that is not above the supervisor's own was
        inherited from it, and is only better than nothing."""
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
    """In how many milliseconds to read a tree of this age again; reading takes 2 % of the time at most."""
    return max(min(max(FIRST_MS, age_ms // 4), MAX_INTERVAL_MS), COST_FACTOR * cost_ms)


def resident_bytes(pid: int) -> int:
    """Anonymous and shared memory of one process, shared pages counted whole. Cheap."""
    return resident_and_file_bytes(pid)[0]


def resident_and_file_bytes(pid: int) -> tuple[int, int]:
    """The same, and the pages of mapped files that it has in memory."""
    found = _kilobytes(f"/proc/{pid}/status", (b"RssAnon:", b"RssShmem:", b"RssFile:"))
    file = found.pop(b"RssFile:", 0)
    return sum(found.values()) * 1024, file * 1024


def share_bytes(pid: int) -> int:
    """Anonymous and shared memory of one process, shared pages counted by share. Walks its page tables."""
    found = _kilobytes(f"/proc/{pid}/smaps_rollup", (b"Pss:", b"Pss_Anon:", b"Pss_Shmem:"))
    if not found:
        return resident_bytes(pid)
    if b"Pss_Anon:" not in found:  # before Linux 5.4
        return found[b"Pss:"] * 1024
    return (found[b"Pss_Anon:"] + found.get(b"Pss_Shmem:", 0)) * 1024


def _kilobytes(path: str, keys: tuple[bytes, ...]) -> dict[bytes, int]:
    found = {}
    for line in read_proc_file(path).splitlines():
        key, _, rest = line.partition(b":")
        key += b":"
        if key in keys:
            found[key] = int(rest.split()[0])
    return found


class CgroupMemoryLimit:
    """A limit that the kernel enforces; this notices when it did, and polls a tree of which some left the group."""

    def __init__(self, limit_bytes: int, group: Cgroup, usage: TreeMemory) -> None:
        self.limit_bytes = limit_bytes
        self.next_check_ms = POLL_SLOW_MS
        self._group = group
        self._usage = usage
        self._polled: PolledMemoryLimit | None = None
        group.limit_memory(max(limit_bytes, START_BYTES))

    def enforce(self) -> None:
        """Lower the kernel's limit to that of the attempt, once the shim is out of the group. A kernel that refuses,
        because more is held already, keeps the limit of the start; `overrun` finds the attempt above its own."""
        if self.limit_bytes < START_BYTES:
            with contextlib.suppress(OSError):
                self._group.limit_memory(self.limit_bytes)

    def raise_limit(self, limit_bytes: int) -> None:
        """Let the tree hold more than until now."""
        self._group.raise_memory_limit(limit_bytes)
        self.limit_bytes = limit_bytes
        if self._polled is not None:
            self._polled.raise_limit(limit_bytes)

    def overrun(self, root: int, exempt: Exempt) -> str | None:
        """The message about an overrun, None while there was none."""
        held, files = self._group.held_and_file_bytes()
        self._usage.add(held, files)
        if held > self.limit_bytes:  # somebody has raised the kernel's limit
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
        """Put what has left the group back into it; whether there was anything."""
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
        """Let the tree hold more than until now."""
        self.limit_bytes = limit_bytes

    def overrun(self, root: int, exempt: Exempt) -> str | None:
        """The message about an overrun of the tree below `root`, None while there is none."""
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
