"""Usage meter: what is in use on this machine, and which part of it is the owner's.

Everything is the owner's but what the grid's own attempts use, the memory lent here, and what Ray's workers use of what
is lent through Ray: never more than is lent, and without a loan Ray is not measured at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from distributed_grid.adapters.probes.gpu_probe import GpuProbe
from distributed_grid.adapters.probes.machine_probe import SHORT_WINDOW_MS, MachineCapacity, MachineProbe
from distributed_grid.adapters.probes.raylet_probe import is_raylet
from distributed_grid.agent.execution.attempt import AttemptUsage
from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.owner.eviction import OwnerOnGpu
from distributed_grid.domain.nodes import GpuUsage, Usage
from distributed_grid.posix.boot_clock import boot_id, boot_ms

FIND_MS = 10_000
_TICK_MS = 1000 // os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class UsageSnapshot(Struct, frozen=True):
    """Who uses what right now: thousandths of cores, and bytes."""

    machine_milli: int
    outside_milli: int
    own_milli: int
    memory_bytes: int
    memory_available_bytes: int
    memory_outside_bytes: int


class UsageMeter:
    """Measures this machine; remembers the CPU time of attempts that have ended, so that it is never the owner's."""

    def __init__(self, probe: MachineProbe, gpus: GpuProbe | None = None, ray_record: Path | None = None) -> None:
        self.probe = probe
        self._gpus = gpus
        self._on_gpus: tuple[GpuUsage, ...] = ()
        self._ended_cpu_ms = 0
        self._capacity: MachineCapacity | None = None
        self._last: tuple[int, int] | None = None  # when, and own CPU time until then
        self._ray = RayWorkers(ray_record)
        self._lent_memory_bytes: Callable[[], int] = lambda: 0

    def set_ray_loan(self, loan: RayLoan) -> None:
        """So much is lent through Ray on this machine: what Ray's workers use of it is not the owner's."""
        self._ray.loan = loan

    def set_jobs(self, jobs: Path, shims: Callable[[], Collection[int]], exempt: process_tree.Exempt) -> None:
        """What is below these shims is a job, never Ray, and so is a program in the directory of jobs.

        What is exempt from jobs is none of Ray's workers.
        """
        self._ray.jobs, self._ray.shims, self._ray.exempt = jobs, shims, exempt

    def count_lent_memory(self, measure: Callable[[], int]) -> None:
        """The copies of memory blocks that are held here use so much: that is not the owner's either."""
        self._lent_memory_bytes = measure

    def ended(self, cpu_ms: int) -> None:
        """An attempt has ended that used so much in all."""
        self._ended_cpu_ms += cpu_ms

    def sample_gpus(self, own_pids: Collection[int]) -> None:
        """Measure the GPUs for the next `usage`. A driver may hang: call it from a thread."""
        if self._gpus is not None:
            own = {*own_pids, *self._ray.pids()}
            self._on_gpus = tuple(one.outside for one in self._gpus.sample(own))

    def usage(self, own: Mapping[str, AttemptUsage]) -> Usage:
        """What is in use, averaged over about ten seconds where it is a rate; of the GPUs, as last sampled."""
        sample = self.probe.sample(*self._own(own.values()))
        return Usage(
            cpu_busy_milli=round(1000 * sample.cpu_ratio_total),
            cpu_outside_milli=round(1000 * sample.cpu_ratio_outside),
            memory_bytes=sample.memory_used_bytes,
            memory_outside_bytes=sample.memory_outside_bytes,
            gpus=self._on_gpus,
        )

    def now(self, own: Mapping[str, AttemptUsage]) -> UsageSnapshot:
        """Who uses what at this moment; rates over the time since the last call, and no less than 200 ms."""
        if self._capacity is None:
            self._capacity = self.probe.capacity()
        there_is, at_ms = self._capacity, boot_ms()
        own_cpu_ms, own_memory_bytes = self._own(own.values())
        outside_milli = self.probe.outside_now(own_cpu_ms)
        sample = self.probe.sample(own_cpu_ms, own_memory_bytes)
        before_ms, before_cpu_ms = self._last or (at_ms, own_cpu_ms)
        self._last = at_ms, own_cpu_ms
        own_milli = 1000 * max(0, own_cpu_ms - before_cpu_ms) // max(at_ms - before_ms, SHORT_WINDOW_MS)
        return UsageSnapshot(
            machine_milli=there_is.cpu_milli,
            outside_milli=outside_milli,
            own_milli=min(own_milli, there_is.cpu_milli - outside_milli),
            memory_bytes=there_is.memory_bytes,
            memory_available_bytes=there_is.memory_bytes - sample.memory_used_bytes,
            memory_outside_bytes=sample.memory_outside_bytes,
        )

    def memory(self, own: Mapping[str, AttemptUsage]) -> tuple[int, int, int]:
        """Bytes now: all there is, what is used of it, and by others than the grid."""
        used = self.probe.memory_used_bytes()
        _, own_bytes = self._own(own.values())
        return self.probe.memory_bytes, used, max(0, used - own_bytes)

    def owner_on_gpus(self, own_pids: Collection[int]) -> tuple[OwnerOnGpu, ...]:
        """What others use of the GPUs that can be measured. A driver may hang: call it from a thread."""
        if self._gpus is None:
            return ()
        size = {gpu.index: gpu.memory_bytes for gpu in self._gpus.devices()}
        return tuple(
            OwnerOnGpu(one.index, one.outside_busy_milli, size[one.index] - one.outside_memory_bytes)
            for one in self._gpus.sample({*own_pids, *self._ray.pids()})
            if one.measured and one.index in size
        )

    def _own(self, running: Collection[AttemptUsage]) -> tuple[int, int]:
        """The CPU time of the grid's own, in all, and its memory: of attempts, and of what is lent through Ray."""
        ray_ms, ray_bytes = self._ray.measure()
        cpu_ms = self._ended_cpu_ms + sum(one.cpu_ms for one in running) + ray_ms
        return cpu_ms, sum(one.memory_bytes for one in running) + ray_bytes + self._lent_memory_bytes()


# ------------------------------------------------------------------ Ray


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
    """

    def __init__(self, record: Path | None = None) -> None:
        self.loan = RayLoan()
        self.jobs: Path | None = None
        self.shims: Callable[[], Collection[int]] = tuple
        self.exempt: process_tree.Exempt = process_tree.nobody
        self._record = record
        self._raylets: list[int] = []
        self._found_at = -FIND_MS
        self._last: tuple[int, dict[tuple[int, int], int]] | None = None
        self._counted_ms = 0
        self._memory_bytes = 0

    def measure(self) -> tuple[int, int]:
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
        return {
            proc.pid for pid in self._known(boot_ms()) for proc in process_tree.listed_descendants(pid, self.exempt)
        }

    def _known(self, at_ms: int) -> list[int]:
        if at_ms - self._found_at >= FIND_MS or any(process_tree.read_process(pid) is None for pid in self._raylets):
            self._raylets, self._found_at = find_raylets(self._record, self.shims(), self.jobs), at_ms
        return self._raylets

    def _used(self, at_ms: int) -> tuple[dict[tuple[int, int], int], int]:
        """The CPU time of each process below a raylet, and the memory of all that nobody else has, too."""
        below = (proc for raylet in self._known(at_ms) for proc in process_tree.listed_descendants(raylet, self.exempt))
        workers = {(proc.pid, proc.start): proc for proc in below}  # each once, should a raylet be below another
        used = {key: (proc.own_ticks + proc.waited_ticks) * _TICK_MS for key, proc in workers.items()}
        return used, sum(_private_bytes(pid) for pid, _ in workers)


def find_raylets(record: Path | None, shims: Collection[int], jobs: Path | None = None) -> list[int]:
    """The raylets of this machine that may have been lent: see `RayWorkers`."""
    started = _read_record(record)
    procs = process_tree.read_processes()
    raylets = (proc for proc in procs.values() if is_raylet(proc.pid, besides=str(jobs or "")))
    outside = (proc for proc in raylets if not _is_below(proc, shims, procs))
    return [proc.pid for proc in outside if started is None or started.includes(proc, procs)]


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
