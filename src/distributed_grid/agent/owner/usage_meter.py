"""Usage meter: use of this machine, and the owner's part of it.

All use is the owner's except for the grid's own attempts, the memory lent here, and Ray's workers as far as their
resources are lent through Ray; without a loan Ray is not measured at all.

A simulated node of the machine is measured by itself: its own work within its declared capacity, and the declared use
of its owner. Nothing of the machine shows there: neither other use of it, nor the work of its other nodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.adapters.probes.gpu_probe import GpuProbe
from distributed_grid.adapters.probes.machine_probe import (
    SHORT_WINDOW_MS,
    CpuTimeWindows,
    MachineCapacity,
    MachineProbe,
)
from distributed_grid.adapters.probes.procfs import is_raylet
from distributed_grid.agent.execution.attempt import AttemptUsage
from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.owner.yield_policy import OwnerOnGpu, UsageSample
from distributed_grid.domain.nodes import GpuUsage, Usage
from distributed_grid.domain.resources import MAX_AMOUNT, Capacity
from distributed_grid.posix.boot_clock import boot_id, boot_ms

FIND_MS = 10_000
AGENT_WORDS = (b"DashboardAgent", b"RuntimeEnvAgent", b"/agent.py", b"/agent/main.py", b"PlacementGroupActor")
"""Marks in the command lines of Ray's agents: the title of one that has loaded, and its script before."""
_TICK_MS = 1000 // os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class RayLoan(Struct, frozen=True):
    """Resources lent through Ray on a node."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_milli: int = 0


def total_loan(loans: Iterable[RayLoan]) -> RayLoan:
    """All of it on one machine."""
    each = list(loans)
    return RayLoan(
        sum(loan.cpu_milli for loan in each),
        sum(loan.memory_bytes for loan in each),
        sum(loan.gpu_milli for loan in each),
    )


class RayWorkers:
    """Counts the CPU time and the memory of Ray's workers, as far as they are lent.

    A raylet runs the program of an installed Ray (`is_raylet`), under any name. It is one of those that the grid
    has started, if `record` has it (the file that its start has left); else any that is not part of a job. With
    `node_name`, only raylets that were started under this name count: those of a simulated node, of which
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
        measures_all = bool(self._node_name) and self._record is not None and self._record.exists()
        if self.loan == RayLoan() and not measures_all:
            self._last, self._memory_bytes, self._outside_bytes = None, 0, 0
            return self._counted_ms, 0
        below = (proc for raylet in self._known(at_ms) for proc in process_tree.listed_descendants(raylet, self.exempt))
        workers = {(proc.pid, proc.start): proc for proc in below if proc.pid not in self._agents}  # each once
        used = {key: (proc.own_ticks + proc.waited_ticks) * _TICK_MS for key, proc in workers.items()}
        statms = [process_tree.read_proc_file(f"/proc/{pid}/statm").split() for pid, _ in workers]
        memory = sum(max(int(pages[1]) - int(pages[2]), 0) * _PAGE for pages in statms if len(pages) > 2)  # private
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
        """Total CPU time, and memory at the last measurement, beyond the loan."""
        return self._outside_ms, self._outside_bytes

    def pids(self) -> set[int]:
        """The workers, where a GPU is lent to them."""
        if not self.loan.gpu_milli:
            return set()
        return {
            proc.pid for pid in self._known(boot_ms()) for proc in process_tree.listed_descendants(pid, self.exempt)
        }

    def _known(self, at_ms: int) -> list[int]:
        if at_ms - self._found_at >= FIND_MS or any(process_tree.read_process(pid) is None for pid in self._raylets):
            raylets = find_raylets(self._record, self.shims(), self.jobs)
            self._raylets = [pid for pid in raylets if not self._node_name or is_named(pid, self._node_name)]
            # Children of raylets that are parts of Ray itself, or the grid's own actor: they are no work.
            raylets = self._raylets if self._node_name else []
            children = [proc.pid for raylet in raylets for proc in process_tree.children_of(raylet)]
            commands = {pid: process_tree.read_proc_file(f"/proc/{pid}/cmdline") for pid in children}
            self._agents = {pid for pid, command in commands.items() if any(word in command for word in AGENT_WORDS)}
            self._found_at = at_ms
        return self._raylets


def find_raylets(record: Path | None, shims: Collection[int], jobs: Path | None = None) -> list[int]:
    """The raylets of this machine that may have been lent: see `RayWorkers`."""
    started = _read_record(record)
    procs = process_tree.read_processes()
    raylets = (proc for proc in procs.values() if is_raylet(proc.pid, besides=str(jobs or "")))
    outside = (proc for proc in raylets if not _is_below(proc, shims, procs))
    return [proc.pid for proc in outside if started is None or started.includes(proc, procs)]


def is_named(raylet: int, node_name: str) -> bool:
    arguments = process_tree.read_proc_file(f"/proc/{raylet}/cmdline").split(b"\0")
    return f"--node-name={node_name}".encode() in arguments


def _read_record(path: Path | None) -> _RayRecord | None:
    """Record of the start of Ray here by the grid; None without one, or after its end."""
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


MIN_FREE_INODES = 50
"""A file system on which no more files than this can be made is full."""


class OwnerBackground(Struct, frozen=True):
    """Permanent use by an owner, in thousandths of the node's capacity."""

    cpu_milli: int = 0
    memory_milli: int = 0
    gpu_milli: int = 0


class SimulatedNode(Struct, frozen=True):
    """A node that stands for a machine of its own: its capacity, and its owner's use of it."""

    capacity: Capacity
    background: OwnerBackground = OwnerBackground()


class SimulatedUsageMeter:
    """Measures one simulated node; keeps the CPU time of its ended attempts.

    Its GPUs are as busy as its owner makes them: no driver measures jobs on a declared device.
    """

    def __init__(self, node: SimulatedNode, ray: RayWorkers) -> None:
        self._node = node
        self._ray = ray
        self._ended_cpu_ms = 0
        self._windows = CpuTimeWindows(node.capacity.cpu_milli)

    def set_ray_loan(self, loan: RayLoan) -> None:
        self._ray.loan = loan

    def ended(self, cpu_ms: int) -> None:
        """Add the total CPU time of an ended attempt."""
        self._ended_cpu_ms += cpu_ms

    def usage(self, running: Iterable[AttemptUsage], blocks_bytes: int, at_ms: int, room_bytes: int | None) -> Usage:
        """Use, a rate being averaged over about ten seconds; `room_bytes` is the machine's."""
        ray_ms, memory = self._ray.measure()
        outside_ms, outside_bytes = self._ray.beyond_loan()  # use of Ray there without the grid
        cpu_ms, memory = self._ended_cpu_ms + ray_ms, memory + blocks_bytes
        for attempt in running:
            cpu_ms, memory = cpu_ms + attempt.cpu_ms, memory + attempt.memory_bytes
        has, owner = self._node.capacity, self._node.background
        window, _ = self._windows.windows(at_ms=at_ms, busy_ms=outside_ms, own_ms=cpu_ms)
        own_milli = ray_milli = 0
        if window is not None:
            there_was_ms = window.ms * max(has.cpu_milli, 1)
            own_milli, ray_milli = (1_000_000 * ms // there_was_ms for ms in (window.ours_ms, window.busy_ms))
        owner_bytes = has.memory_bytes * owner.memory_milli // 1000 + outside_bytes
        return Usage(
            cpu_busy_milli=min(owner.cpu_milli + own_milli + ray_milli, 1000),
            cpu_outside_milli=min(owner.cpu_milli + ray_milli, 1000),
            memory_bytes=owner_bytes + memory,
            memory_outside_bytes=owner_bytes,
            gpus=tuple(
                GpuUsage(
                    gpu.index,
                    owner.gpu_milli,
                    gpu.memory_bytes * owner.gpu_milli // 1000,
                    owner.gpu_milli,
                    gpu.memory_bytes * owner.gpu_milli // 1000,
                )
                for gpu in has.gpus
            ),
            memory_room_bytes=room_bytes,
        )


class UsageMeter:
    """Measures this machine and its simulated nodes; remembers the CPU time of attempts that have ended, so that it is
    never the owner's. The records say which Ray the grid has started, on the machine and on each simulated node."""

    def __init__(
        self,
        probe: MachineProbe,
        gpus: GpuProbe | None = None,
        ray_record: Path | None = None,
        simulated: Mapping[str, SimulatedNode] | None = None,
        node_records: Mapping[str, Path] | None = None,
    ) -> None:
        self.probe = probe
        self._gpus = gpus
        self._on_gpus: tuple[GpuUsage, ...] = ()
        self._gpus_measured = gpus is None
        self._jobs: Path | None = None
        self._disk_free_bytes = self._disk_bytes = 0
        self._ended_cpu_ms = 0
        self._capacity: MachineCapacity | None = None
        self._last: tuple[int, int] | None = None  # when, and own CPU time until then
        self._ray = RayWorkers(ray_record)
        self._loans: dict[str, RayLoan] = {}
        self._lent_memory: dict[str, Callable[[], int]] = {}
        rays = {name: RayWorkers((node_records or {}).get(name), name) for name in simulated or {}}
        self._rays = (self._ray, *rays.values())
        self._simulated = {name: SimulatedUsageMeter(node, rays[name]) for name, node in (simulated or {}).items()}

    def set_ray_loan(self, node: str, loan: RayLoan) -> None:
        """Set the loan of a node through Ray: the use of Ray's workers up to it is not the owner's."""
        self._loans[node] = loan
        self._ray.loan = total_loan(self._loans.values())
        if node in self._simulated:
            self._simulated[node].set_ray_loan(loan)

    def set_jobs(self, jobs: Path, shims: Callable[[], Collection[int]], exempt: process_tree.Exempt) -> None:
        """Processes below these shims are jobs, never Ray, and so is a program in the directory of jobs. Processes
        exempt from jobs are none of Ray's workers."""
        self._jobs = jobs
        for ray in self._rays:
            ray.jobs, ray.shims, ray.exempt = jobs, shims, exempt

    def count_lent_memory(self, node: str, measure: Callable[[], int]) -> None:
        """Add the memory of the block copies held for a node, which is not the owner's either."""
        self._lent_memory[node] = measure

    def ended(self, node: str, cpu_ms: int) -> None:
        """Add the total CPU time of an ended attempt of a node."""
        self._ended_cpu_ms += cpu_ms
        if node in self._simulated:
            self._simulated[node].ended(cpu_ms)

    def begin(self) -> None:
        """Take the first reading: rates are known from the second one on."""
        self.probe.sample(*self._own(()))

    def sample_gpus(self, own_pids: Collection[int]) -> None:
        """Measure the GPUs for the next `usages`. A driver may hang: call it from a thread."""
        if self._gpus is not None:
            own = {*own_pids, *self._ray.pids()}
            self._on_gpus = tuple(gpu.outside for gpu in self._gpus.sample(own))
            self._gpus_measured = True

    def sample_disk(self) -> None:
        """Sample the free room on the disk of the jobs; 0 if no more files can be made there."""
        if self._jobs is None:
            return
        disk = os.statvfs(self._jobs)
        has_inodes = disk.f_favail > MIN_FREE_INODES or not disk.f_files
        free_bytes = disk.f_bavail * disk.f_frsize if has_inodes else 0
        self._disk_free_bytes = min(free_bytes, MAX_AMOUNT)
        self._disk_bytes = min(disk.f_blocks * disk.f_frsize, MAX_AMOUNT)

    @property
    def gpu_memory_by_pid(self) -> Mapping[int, int]:
        return self._gpus.memory_by_pid if self._gpus is not None else {}

    def usages(self, nodes: Iterable[str], own: Mapping[str, AttemptUsage]) -> dict[str, Usage]:
        """Use of each of these nodes, rates averaged over about ten seconds; of the GPUs, as last sampled."""
        sample = self.probe.sample(*self._own(own.values()))
        machine = Usage(
            cpu_busy_milli=round(1000 * sample.cpu_ratio_total),
            cpu_outside_milli=round(1000 * sample.cpu_ratio_outside),
            memory_bytes=sample.memory_used_bytes,
            memory_outside_bytes=sample.memory_outside_bytes,
            gpus=self._on_gpus,
            memory_room_bytes=max(self.probe.memory_bytes - sample.memory_outside_bytes, 0),
            disk_free_bytes=self._disk_free_bytes,
            disk_bytes=self._disk_bytes,
            cpu_measured=sample.warm,
            gpus_measured=self._gpus_measured,
        )
        usages = dict.fromkeys(nodes, machine)
        for node in usages.keys() & self._simulated.keys():
            running = (attempt for attempt in own.values() if attempt.node == node)
            blocks = self._lent_memory.get(node, lambda: 0)()
            usage = self._simulated[node].usage(running, blocks, boot_ms(), machine.memory_room_bytes)
            usages[node] = replace(usage, disk_free_bytes=machine.disk_free_bytes, disk_bytes=machine.disk_bytes)
        return usages

    def now(self, own: Mapping[str, AttemptUsage]) -> UsageSample:
        """Use at this moment, without attempts and GPUs; rates over the time since the last call, and no less than
        200 ms."""
        if self._capacity is None:
            self._capacity = self.probe.capacity()
        there_is, at_ms = self._capacity, boot_ms()
        own_cpu_ms, own_memory_bytes = self._own(own.values())
        outside_milli = self.probe.outside_now(own_cpu_ms)
        sample = self.probe.sample(own_cpu_ms, own_memory_bytes)
        before_ms, before_cpu_ms = self._last or (at_ms, own_cpu_ms)
        self._last = at_ms, own_cpu_ms
        own_milli = 1000 * max(0, own_cpu_ms - before_cpu_ms) // max(at_ms - before_ms, SHORT_WINDOW_MS)
        return UsageSample(
            machine_milli=there_is.cpu_milli,
            outside_milli=outside_milli,
            own_milli=min(own_milli, there_is.cpu_milli - outside_milli),
            memory_bytes=there_is.memory_bytes,
            memory_available_bytes=there_is.memory_bytes - sample.memory_used_bytes,
            memory_outside_bytes=sample.memory_outside_bytes,
        )

    def memory(self, own: Mapping[str, AttemptUsage]) -> tuple[int, int, int]:
        """Bytes now: in all, used, and used by others than the grid."""
        used = self.probe.memory_used_bytes()
        _, own_bytes = self._own(own.values())
        return self.probe.memory_bytes, used, max(0, used - own_bytes)

    def owner_on_gpus(self, own_pids: Collection[int]) -> tuple[OwnerOnGpu, ...]:
        """Foreign use of the GPUs that can be measured. A driver may hang: call it from a thread."""
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
        cpu_ms = self._ended_cpu_ms + sum(attempt.cpu_ms for attempt in running) + ray_ms
        lent_bytes = sum(measure() for measure in self._lent_memory.values())
        return cpu_ms, sum(attempt.memory_bytes for attempt in running) + ray_bytes + lent_bytes
