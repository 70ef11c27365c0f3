"""What Ray's own workers use of what the grid has lent through Ray: it is the borrower's, never the owner's.

Rule 1. Without a loan nothing is looked at, and all that Ray does is its owner's doing.
Rule 2. Never more counts than is lent: what Ray does beyond that is somebody else's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from msgspec import Struct

from distributed_grid.agent.limits import process_tree
from distributed_grid.posix.boot_clock import boot_ms

RAYLET = b"raylet"
FIND_MS = 10_000
_TICK_MS = 1000 // os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class RayLoan(Struct, frozen=True):
    """What is lent through Ray on a node."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_milli: int = 0


def together(loans: Iterable[RayLoan]) -> RayLoan:
    """All of it on one machine."""
    each = list(loans)
    return RayLoan(
        sum(one.cpu_milli for one in each), sum(one.memory_bytes for one in each), sum(one.gpu_milli for one in each)
    )


class RayWorkers:
    """Counts the CPU time and the memory of Ray's workers, as far as they are lent."""

    def __init__(self, find: Callable[[], list[int]] | None = None) -> None:
        self.loan = RayLoan()
        self._find = find or raylets
        self._raylets: list[int] = []
        self._found_at = -FIND_MS
        self._last: tuple[int, dict[tuple[int, int], int]] | None = None
        self._counted_ms = 0
        self._memory_bytes = 0

    def look(self) -> tuple[int, int]:
        """The CPU time that counts, in all since the beginning, and the memory that counts now."""
        at_ms = boot_ms()
        if self.loan == RayLoan():
            self._last, self._memory_bytes = None, 0
            return self._counted_ms, 0
        used, memory = self._used(at_ms)
        if self._last is not None:
            before_ms, before = self._last
            spent = sum(max(cpu - before.get(key, 0), 0) for key, cpu in used.items())
            self._counted_ms += min(spent, self.loan.cpu_milli * max(at_ms - before_ms, 0) // 1000)
        self._last = at_ms, used
        self._memory_bytes = min(memory, self.loan.memory_bytes)
        return self._counted_ms, self._memory_bytes

    def pids(self) -> set[int]:
        """The workers, where a GPU is lent to them."""
        if not self.loan.gpu_milli:
            return set()
        return {proc.pid for pid in self._known(boot_ms()) for proc in process_tree.listed_descendants(pid)}

    def _known(self, at_ms: int) -> list[int]:
        if at_ms - self._found_at >= FIND_MS or any(process_tree.read_process(pid) is None for pid in self._raylets):
            self._raylets, self._found_at = self._find(), at_ms
        return self._raylets

    def _used(self, at_ms: int) -> tuple[dict[tuple[int, int], int], int]:
        """The CPU time of each process below a raylet, and the memory of all that nobody else has, too."""
        used: dict[tuple[int, int], int] = {}
        memory = 0
        for raylet in self._known(at_ms):
            for proc in process_tree.listed_descendants(raylet):
                used[proc.pid, proc.start] = (proc.own_ticks + proc.waited_ticks) * _TICK_MS
                memory += _private_bytes(proc.pid)
        return used, memory


def raylets() -> list[int]:
    """The pids of all raylets on this machine."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [pid for pid in pids if (process_tree.read_proc_file(f"/proc/{pid}/comm") or b"").strip() == RAYLET]


def _private_bytes(pid: int) -> int:
    fields = (process_tree.read_proc_file(f"/proc/{pid}/statm") or b"").split()
    return max(int(fields[1]) - int(fields[2]), 0) * _PAGE if len(fields) > 2 else 0
