"""Memory limit of an attempt: enforced by the kernel in a control group, or by polling what its tree holds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from distributed_grid.agent.limits.process_tree import Exempt, listed_descendants

if TYPE_CHECKING:
    from distributed_grid.agent.limits.cgroups import Cgroup
    from distributed_grid.agent.limits.memory_usage import TreeMemory

GB = 1024**3
POLL_FAST_MS, POLL_SLOW_MS = 50, 200


class CgroupMemoryLimit:
    """A limit that the kernel enforces; this notices when it did, and polls a tree of which some left the group."""

    def __init__(self, limit_bytes: int, group: Cgroup, usage: TreeMemory) -> None:
        self.limit_bytes = limit_bytes
        self.next_check_ms = POLL_SLOW_MS
        self._group = group
        self._usage = usage
        self._polled: PolledMemoryLimit | None = None

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
    """The message for people, in GB with as many decimals as the limit needs."""
    limit = limit_bytes / GB
    decimals = 1 if abs(round(limit, 1) - limit) < 0.01 else 2
    return f"over limit: used {used_bytes / GB:.{decimals}f} GB of {limit:.{decimals}f} GB"
