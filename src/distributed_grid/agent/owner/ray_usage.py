"""Usage of Ray's workers on a machine, as far as it is lent: of all raylets, or of the one of a simulated node."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from distributed_grid.adapters.probes.procfs import is_raylet
from distributed_grid.agent.limits import process_tree
from distributed_grid.posix.boot_clock import boot_id, boot_ms

FIND_MS = 10_000
AGENT_WORDS = (b"DashboardAgent", b"RuntimeEnvAgent", b"/agent.py", b"/agent/main.py", b"PlacementGroupActor")
"""What the command lines of these tell; one of Ray's is its title once it has loaded, and its script before."""
_TICK_MS = 1000 // os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class RayLoan(Struct, frozen=True):
    """What is lent through Ray on a node."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_milli: int = 0


def total_loan(loans: Iterable[RayLoan]) -> RayLoan:
    """All of it on one machine."""
    each = list(loans)
    return RayLoan(
        sum(one.cpu_milli for one in each), sum(one.memory_bytes for one in each), sum(one.gpu_milli for one in each)
    )


class RayWorkers:
    """Counts the CPU time and the memory of Ray's workers, as far as they are lent.

    A raylet runs the program of an installed Ray (`is_raylet`), whatever it is called. It is one of those that the grid
    has started, where `record` says so (the file that its start has left); else any that is not part of a job.
    With `node_name`, only raylets that were started under this name count: those of a simulated node, of which
    everything that the grid has started is measured, lent or not.
    """

    def __init__(self, record: Path | None = None, node_name: str = "") -> None:
        self.loan = RayLoan()
        self.jobs: Path | None = None
        self.shims: Callable[[], Collection[int]] = tuple
        self.exempt: process_tree.Exempt = process_tree.nobody
        self._record = record
        self._node_name = node_name
        self._raylets: list[int] = []
        self._agents: set[int] = set()
        self._found_at = -FIND_MS
        self._last: tuple[int, dict[tuple[int, int], int]] | None = None
        self._counted_ms = self._outside_ms = 0
        self._memory_bytes = self._outside_bytes = 0

    def measure(self) -> tuple[int, int]:
        """The CPU time that counts, in all since the beginning, and the memory that counts now."""
        at_ms = boot_ms()
        if self.loan == RayLoan() and not self._measures_all():
            self._last, self._memory_bytes, self._outside_bytes = None, 0, 0
            return self._counted_ms, 0
        used, memory = self._used(at_ms)
        if self._last is not None:
            before_ms, before = self._last
            spent = sum(max(cpu - before.get(key, 0), 0) for key, cpu in used.items())
            lent = min(spent, self.loan.cpu_milli * max(at_ms - before_ms, 0) // 1000)
            self._counted_ms += lent
            self._outside_ms += spent - lent
        self._last = at_ms, used
        self._memory_bytes = min(memory, self.loan.memory_bytes)
        self._outside_bytes = memory - self._memory_bytes
        return self._counted_ms, self._memory_bytes

    def beyond_loan(self) -> tuple[int, int]:
        """The CPU time, in all, and the memory of the last measurement that were more than is lent."""
        return self._outside_ms, self._outside_bytes

    def _measures_all(self) -> bool:
        return bool(self._node_name) and self._record is not None and self._record.exists()

    def pids(self) -> set[int]:
        """The workers, where a GPU is lent to them."""
        if not self.loan.gpu_milli:
            return set()
        return {
            proc.pid for pid in self._known(boot_ms()) for proc in process_tree.listed_descendants(pid, self.exempt)
        }

    def _known(self, at_ms: int) -> list[int]:
        if at_ms - self._found_at >= FIND_MS or any(process_tree.read_process(pid) is None for pid in self._raylets):
            found = find_raylets(self._record, self.shims(), self.jobs)
            self._raylets = [pid for pid in found if not self._node_name or is_named(pid, self._node_name)]
            self._agents = set(_find_agents(self._raylets)) if self._node_name else set()
            self._found_at = at_ms
        return self._raylets

    def _used(self, at_ms: int) -> tuple[dict[tuple[int, int], int], int]:
        """The CPU time of each process below a raylet, and the memory of all that nobody else has, too."""
        below = (proc for raylet in self._known(at_ms) for proc in process_tree.listed_descendants(raylet, self.exempt))
        workers = {(proc.pid, proc.start): proc for proc in below if proc.pid not in self._agents}  # each once
        used = {key: (proc.own_ticks + proc.waited_ticks) * _TICK_MS for key, proc in workers.items()}
        return used, sum(_private_bytes(pid) for pid, _ in workers)


def find_raylets(record: Path | None, shims: Collection[int], jobs: Path | None = None) -> list[int]:
    """The raylets of this machine that may have been lent: see `RayWorkers`."""
    started = _read_record(record)
    procs = process_tree.read_processes()
    raylets = (proc for proc in procs.values() if is_raylet(proc.pid, besides=str(jobs or "")))
    outside = (proc for proc in raylets if not _is_below(proc, shims, procs))
    return [proc.pid for proc in outside if started is None or started.includes(proc, procs)]


def is_named(raylet: int, node_name: str) -> bool:
    """Whether a raylet was started under this name."""
    arguments = process_tree.read_proc_file(f"/proc/{raylet}/cmdline").split(b"\0")
    return f"--node-name={node_name}".encode() in arguments


def _find_agents(raylets: Iterable[int]) -> Iterator[int]:
    """The children of raylets that are parts of Ray itself, or the grid's own actor, and no work of anybody's."""
    for proc in (proc for raylet in raylets for proc in process_tree.children_of(raylet)):
        command = process_tree.read_proc_file(f"/proc/{proc.pid}/cmdline")
        if any(word in command for word in AGENT_WORDS):
            yield proc.pid


def _read_record(path: Path | None) -> _RayRecord | None:
    """What was recorded when the grid started Ray here; None where nothing was, or it does not run any more."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=_RayRecord) if path is not None else None
    except (OSError, msgspec.DecodeError):
        return None
    if record is None or record.boot != boot_id() or not record.leader:
        return None
    leader = process_tree.read_process(record.leader)
    return record if leader is None or leader.start == record.leader_start else None


class _RayRecord(Struct):
    """The note of `adapters/node/node_script_ray.py`: in which session, and with which mark, Ray was started."""

    boot: str = ""
    leader: int = 0
    leader_start: int = 0
    mark: str = ""

    def includes(self, proc: process_tree.Proc, procs: Mapping[int, process_tree.Proc]) -> bool:
        if proc.session == self.leader or _is_below(proc, (self.leader,), procs):
            return True
        return bool(self.mark) and f"GRID_RAY_MARK={self.mark}".encode() in process_tree.read_environ(proc.pid)


def _is_below(proc: process_tree.Proc | None, roots: Collection[int], procs: Mapping[int, process_tree.Proc]) -> bool:
    seen: set[int] = set()
    while proc is not None and proc.pid not in seen:
        if proc.pid in roots:
            return True
        seen.add(proc.pid)
        proc = procs.get(proc.parent)
    return False


def _private_bytes(pid: int) -> int:
    fields = (process_tree.read_proc_file(f"/proc/{pid}/statm") or b"").split()
    return max(int(fields[1]) - int(fields[2]), 0) * _PAGE if len(fields) > 2 else 0
