"""Memory limit of an attempt: enforced by the kernel in a control group, or by polling; usage of its tree.

Polling counts what only the job holds: anonymous and shared memory, each shared page by its share (PSS), not
the contents of files it has mapped, which the machine can drop at any time.
"""

from __future__ import annotations

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
    from distributed_grid.agent.limits.cgroups import Cgroup

GB = 1024**3
POLL_FAST_MS, POLL_SLOW_MS = 50, 200
SHARES_STALE_MS = 10_000


class CgroupMemoryLimit:
    """A limit that the kernel enforces; this notices when it did, and polls a tree of which some left the group."""

    def __init__(self, limit_bytes: int, group: Cgroup) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self.next_check_ms = POLL_SLOW_MS
        self._group = group
        self._polled: PolledMemoryLimit | None = None

    def overrun(self, root: int, exempt: Exempt) -> str | None:
        """The message about an overrun, None while there was none."""
        held = self._group.held_bytes()
        self.peak_bytes = max(self.peak_bytes, held)
        if held > self.limit_bytes:  # somebody has raised the kernel's limit
            return over_limit_message(held, self.limit_bytes)
        if self._group.kills():
            self.peak_bytes = max(self.peak_bytes, self.limit_bytes)
            return f"{over_limit_message(self.peak_bytes, self.limit_bytes)} and asked for more"
        if self._polled is None and self._return_escaped(root, exempt):
            self._polled = PolledMemoryLimit(self.limit_bytes)
        if self._polled is None:
            return None
        self._return_escaped(root, exempt)
        overrun = self._polled.overrun(root, exempt)
        self.peak_bytes = max(self.peak_bytes, self._polled.peak_bytes)
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

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self.next_check_ms = POLL_FAST_MS
        self._last_bytes = 0

    def overrun(self, root: int, exempt: Exempt) -> str | None:
        """The message about an overrun of the tree below `root`, None while there is none."""
        began = time.monotonic_ns()
        used = held_bytes(listed_descendants(root, exempt), self.limit_bytes)
        cost_ms = (time.monotonic_ns() - began) // 1_000_000
        calm = used < self.limit_bytes // 2 and used - self._last_bytes < self.limit_bytes // 8
        self._last_bytes = used
        self.peak_bytes = max(self.peak_bytes, used)
        self.next_check_ms = max(POLL_SLOW_MS if calm else POLL_FAST_MS, 10 * cost_ms)
        return over_limit_message(used, self.limit_bytes) if used > self.limit_bytes else None


class TreeMeter:
    """CPU and memory usage of the tree below one shim; cheap enough to read every second."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.seen: list[Proc] = []
        self._resident = self._shares = self._read_at_ms = 0

    def read(self, shim: Proc, exempt: Exempt, now_ms: int) -> tuple[int, int]:
        """CPU milliseconds since `shim` was read, and bytes held now."""
        now = read_process(shim.pid)
        if now is None or now.start != shim.start:
            return 0, 0
        if now.stopped:  # by its own job: the limits are kept by a shim that runs
            send_signal(now, signal.SIGCONT)
        procs = self.seen = listed_descendants(shim.pid, exempt)
        ticks = now.waited_ticks - shim.waited_ticks + sum(proc.own_ticks + proc.waited_ticks for proc in procs)
        rough = sum(resident_bytes(proc.pid) for proc in procs)
        if len(procs) < 2:
            self._shares = rough
        elif abs(rough - self._resident) > self._resident // 20 or now_ms - self._read_at_ms > SHARES_STALE_MS:
            self._shares = held_bytes(procs, 0)  # walks page tables, so only when something changed
            self._resident, self._read_at_ms = rough, now_ms
        self.peak_bytes = max(self.peak_bytes, self._shares)
        return ticks * TICK_MS, self._shares


def over_limit_message(used_bytes: int, limit_bytes: int) -> str:
    """The message for people, in GB with as many decimals as the limit needs."""
    limit = limit_bytes / GB
    decimals = 1 if abs(round(limit, 1) - limit) < 0.01 else 2
    return f"over limit: used {used_bytes / GB:.{decimals}f} GB of {limit:.{decimals}f} GB"


def held_bytes(procs: list[Proc], enough_bytes: int) -> int:
    """What these processes hold together; exact only above `enough_bytes`, at most that much below."""
    rough = sum(resident_bytes(proc.pid) for proc in procs)
    if rough <= enough_bytes or len(procs) == 1:
        return rough
    return sum(share_bytes(proc.pid) for proc in procs)


def resident_bytes(pid: int) -> int:
    """Anonymous and shared memory of one process, shared pages counted whole. Cheap."""
    found = _kilobytes(f"/proc/{pid}/status", (b"RssAnon:", b"RssShmem:"))
    return sum(found.values()) * 1024


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
