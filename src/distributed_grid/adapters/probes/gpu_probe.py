"""NVIDIA GPUs through NVML: which there are, how busy they are, and with whose work.

Nothing is raised: without GPUs, or with lost ones, `problem` is the reason. A device that was seen once and cannot be
measured counts as full of outside work, so it lends nothing; it keeps its index as long as this probe lives, even when
a lost one makes NVML count anew. After a failure NVML is opened again at most once a minute: that can take seconds.

A driver may hang. Calls are made one after the other, and one that waits for another longer than a second gives up, so
call from a thread and never from the event loop.

Usage is divided between the grid and everybody else. Use of unknown origin is somebody else's, unless every process on
the device is the grid's.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from msgspec import Struct

from distributed_grid.domain.nodes import GpuUsage
from distributed_grid.domain.resources import GpuDevice

LIBRARY = "libnvidia-ml.so.1"
REOPEN_SECONDS = 60.0
LOCK_TIMEOUT_SECONDS = 1.0
UTILISATION_WINDOW_US = 1_000_000

T = TypeVar("T")
FULL_MILLI = 1000


class Gpu(Struct, frozen=True):
    """A device as NVML describes it; `mig` is split into instances, `prohibited` runs no computations."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    exclusive: bool = False
    mig: bool = False
    prohibited: bool = False

    @property
    def device(self) -> GpuDevice:
        return GpuDevice(self.index, self.memory_bytes, self.name, exclusive=self.exclusive or self.mig)


class GpuSample(Struct, frozen=True):
    """How busy a device is: in all, and with work outside the grid. One that is not measured counts as full."""

    index: int
    busy_milli: int
    memory_bytes: int
    outside_busy_milli: int
    outside_memory_bytes: int
    measured: bool = True

    @property
    def outside(self) -> GpuUsage:
        return GpuUsage(
            self.index, self.outside_busy_milli, self.outside_memory_bytes, self.busy_milli, self.memory_bytes
        )


class GpuObservation(Struct, frozen=True):
    """Raw counters of a device; None where the driver does not report one."""

    memory_bytes: int
    busy_milli: int | None
    processes: Mapping[int, int | None] | None
    """Bytes held, by pid."""
    busy_by_pid: Mapping[int, int]
    """Thousandths of the device, by pid; empty when the driver does not report it."""


def split_usage(index: int, seen: GpuObservation, own_pids: Collection[int]) -> GpuSample:
    """Divide a device's use between the grid and everybody else."""
    running = seen.processes or {}
    ours = {pid: held for pid, held in running.items() if pid in own_pids}
    others = {pid: held for pid, held in running.items() if pid not in own_pids}
    busy = seen.busy_milli
    if busy is None:  # unknown: busy when anything runs, or might run unseen
        busy = FULL_MILLI if running or seen.processes is None else 0
    measured = {pid: milli for pid, milli in seen.busy_by_pid.items() if pid in running}
    outside_busy = busy
    if ours and not others:
        outside_busy = 0
    elif ours and measured:
        outside_busy = min(busy, sum(milli for pid, milli in measured.items() if pid in others))
    if None in ours.values() and None not in others.values():
        outside_bytes = sum(held or 0 for held in others.values())
    else:  # all memory minus that of the grid: the driver's own share counts as outside
        outside_bytes = seen.memory_bytes - sum(held or 0 for held in ours.values())
    return GpuSample(index, busy, seen.memory_bytes, outside_busy, min(seen.memory_bytes, max(0, outside_bytes)))


def unmeasured_sample(gpu: Gpu) -> GpuSample:
    """Known device that cannot be measured: it counts as full of outside work, and lends nothing."""
    return GpuSample(gpu.index, FULL_MILLI, gpu.memory_bytes, FULL_MILLI, gpu.memory_bytes, measured=False)


class GpuProbe:
    """The GPUs of this machine; opens NVML when first asked."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._nvml: Any = None  # the module, while NVML is open
        self._opened_at: float | None = None  # or when opening failed
        self._handles: dict[str, Any] = {}  # by uuid, of the devices that answer
        self._known: dict[str, Gpu] = {}  # by uuid, all that were ever seen
        self._newest_us: dict[str, int] = {}  # by uuid, of the driver's utilisation samples
        self._held_by_pid: dict[int, int] = {}
        self._failure = ""  # of NVML as a whole
        self._device_problems: dict[str, str] = {}  # by uuid or number
        self._hangs = False

    @property
    def problem(self) -> str:
        """Reason why there are no GPUs, or which are lost; empty without a problem."""
        if self._hangs:
            return "NVML does not answer"
        return self._failure or "; ".join(self._device_problems.values())

    @property
    def memory_by_pid(self) -> Mapping[int, int]:
        """Bytes of each process on all devices at the last `sample`, if the driver shows them."""
        return self._held_by_pid

    def devices(self) -> tuple[Gpu, ...]:
        return self._with_lock(self._devices, ())

    def sample(self, own_pids: Collection[int] = ()) -> tuple[GpuSample, ...]:
        """Use of every device ever seen, by index; `own_pids` are all processes of the grid's jobs."""
        own = frozenset(own_pids)
        return self._with_lock(lambda: self._samples(own), tuple(unmeasured_sample(gpu) for gpu in self._in_order()))

    def close(self) -> None:
        """Shut NVML down; a later call opens it again. Safe twice."""
        self._with_lock(self._reset, None)

    def _with_lock(self, work: Callable[[], T], otherwise: T) -> T:
        if not self._lock.acquire(timeout=0 if self._hangs else LOCK_TIMEOUT_SECONDS):
            self._hangs = True
            return otherwise
        try:
            self._hangs = False
            return work()
        finally:
            self._lock.release()

    def _devices(self) -> tuple[Gpu, ...]:
        if self._is_open():
            self._query_each(self._describe)
        return tuple(gpu for gpu in self._in_order() if gpu.uuid in self._handles)

    def _samples(self, own: frozenset[int]) -> tuple[GpuSample, ...]:
        sample_of: dict[str, GpuSample] = {}
        held: dict[int, int] = {}

        def measure(uuid: str, handle: Any) -> None:
            nvml = self._nvml
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            rates = self._query(nvml.nvmlDeviceGetUtilizationRates, handle, otherwise=None)
            # Each process's average over the last second of driver samples.
            since = max(0, self._newest_us.get(uuid, 0) - UTILISATION_WINDOW_US)
            samples = self._query(self._nvml.nvmlDeviceGetProcessUtilization, handle, since, otherwise=[])
            newest = max((sample.timeStamp for sample in samples), default=0)
            self._newest_us[uuid] = newest
            by_pid: dict[int, list[int]] = {}
            for sample in samples:
                # Some drivers return slots that were never filled: impossible percentages.
                if sample.timeStamp > newest - UTILISATION_WINDOW_US and sample.smUtil <= 100:
                    by_pid.setdefault(sample.pid, []).append(sample.smUtil)
            seen = GpuObservation(
                memory_bytes=memory.used,
                busy_milli=None if rates is None else min(FULL_MILLI, 10 * rates.gpu),
                processes=self._processes(handle),
                busy_by_pid={pid: 10 * sum(percents) // len(percents) for pid, percents in by_pid.items()},
            )
            for pid, size in (seen.processes or {}).items():
                held[pid] = held.get(pid, 0) + (size or 0)
            sample_of[uuid] = split_usage(self._known[uuid].index, seen, own)

        if self._is_open():
            self._query_each(measure)
        self._held_by_pid = held
        return tuple(sample_of.get(gpu.uuid) or unmeasured_sample(gpu) for gpu in self._in_order())

    def _in_order(self) -> list[Gpu]:
        return sorted(self._known.values(), key=lambda gpu: gpu.index)

    def _query_each(self, ask: Callable[[str, Any], None]) -> None:
        """Query every device that answers; one that fails is dropped, and when NVML itself fails, all are."""
        nvml = self._nvml
        for uuid, handle in tuple(self._handles.items()):
            try:
                ask(uuid, handle)
            except nvml.NVMLError as error:
                if error.value in _library_errors(nvml):
                    self._shut_down()
                    self._failure = f"NVML failed: {error}"
                    return
                del self._handles[uuid]
                self._device_problems[uuid] = f"GPU {self._known[uuid].index}: {error}"

    def _describe(self, uuid: str, handle: Any) -> None:
        nvml, index = self._nvml, self._known[uuid].index
        mode = self._query(nvml.nvmlDeviceGetComputeMode, handle, otherwise=nvml.NVML_COMPUTEMODE_DEFAULT)
        self._known[uuid] = Gpu(
            index=index,
            uuid=uuid,
            name=self._query(nvml.nvmlDeviceGetName, handle, otherwise=""),
            memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
            exclusive=mode in (nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, nvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD),
            mig=self._query(nvml.nvmlDeviceGetMigMode, handle, otherwise=[0, 0])[0] == 1,
            prohibited=mode == nvml.NVML_COMPUTEMODE_PROHIBITED,
        )

    def _processes(self, handle: Any) -> dict[int, int | None] | None:
        """Bytes held by pid, of compute and graphics processes; None when the driver does not report them."""
        compute, graphics = self._running("Compute", handle), self._running("Graphics", handle)
        if compute is None:
            return None
        held: dict[int, int | None] = {}
        for process in (*compute, *(graphics or ())):  # a process of both kinds is in both, with the same memory
            reported, before = process.usedGpuMemory, held.get(process.pid)
            held[process.pid] = reported if before is None else max(before, reported or 0)
        return held

    def _running(self, kind: str, handle: Any) -> list[Any] | None:
        """NVML's process list, by the newest call this driver knows."""
        newest, older = (
            getattr(self._nvml, f"nvmlDeviceGet{kind}RunningProcesses_{version}") for version in ("v3", "v2")
        )
        processes: list[Any] | None = self._query(
            newest, handle, otherwise=lambda: self._query(older, handle, otherwise=None)
        )
        return processes

    def _query(self, query: Callable[..., Any], *arguments: Any, otherwise: Any) -> Any:
        """The result of a query; `otherwise` (called if callable) where this driver or device does not support it."""
        nvml = self._nvml
        try:
            return query(*arguments)
        except nvml.NVMLError as error:
            if error.value not in (
                nvml.NVML_ERROR_NOT_SUPPORTED,
                nvml.NVML_ERROR_NO_PERMISSION,
                nvml.NVML_ERROR_NOT_FOUND,
                nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                nvml.NVML_ERROR_NO_DATA,
                nvml.NVML_ERROR_INSUFFICIENT_SIZE,  # grew between two queries
                nvml.NVML_SUCCESS,  # pynvml raises this for an empty list
            ):
                raise
        except UnicodeDecodeError:
            pass
        return otherwise() if callable(otherwise) else otherwise

    def _is_open(self) -> bool:
        """True if NVML can be queried; opens it when that is due."""
        if self._nvml is not None and not self._device_problems:
            return True
        now = self._monotonic()
        if self._opened_at is None or now - self._opened_at >= REOPEN_SECONDS:
            self._shut_down()
            self._opened_at = now
            self._open()
        return self._nvml is not None

    def _open(self) -> None:
        try:
            ctypes.CDLL(LIBRARY)  # without it pynvml, which is large, need not be imported
            import pynvml as nvml
        except OSError:
            self._failure = f"no NVIDIA driver: {LIBRARY} cannot be loaded"
            return
        except ImportError:
            self._failure = "nvidia-ml-py is not installed"
            return
        try:
            nvml.nvmlInit()
            self._nvml = nvml
            self._failure = ""
            unnamed: dict[str, str] = {}
            before, self._device_problems = self._device_problems, {}
            count = nvml.nvmlDeviceGetCount()
            for number in range(count):
                try:
                    handle = nvml.nvmlDeviceGetHandleByIndex(number)
                    uuid: str = self._query(nvml.nvmlDeviceGetUUID, handle, otherwise=f"number {number}")
                    if uuid not in self._known:
                        taken = {gpu.index for gpu in self._known.values()}
                        index = number if number not in taken else max(taken) + 1
                        self._known[uuid] = Gpu(index, uuid, name="", memory_bytes=0)
                    self._handles[uuid] = handle
                except nvml.NVMLError as error:
                    if error.value in _library_errors(nvml):
                        raise
                    unnamed[str(number)] = f"GPU {number}: {error}"
            self._query_each(self._describe)
            for uuid, gpu in self._known.items():
                if uuid not in self._handles:
                    self._device_problems.setdefault(uuid, before.get(uuid, f"GPU {gpu.index}: is gone"))
            if len(unnamed) > len(self._device_problems):
                self._device_problems |= unnamed
            if count == 0 and not self._known:
                self._shut_down()  # so that it is opened again later
                self._failure = "the NVIDIA driver sees no GPU"
        except nvml.NVMLError as error:
            self._shut_down()
            self._failure = f"NVML cannot be opened: {error}"

    def _reset(self) -> None:
        self._shut_down()
        self._opened_at = None

    def _shut_down(self) -> None:
        nvml, self._nvml = self._nvml, None
        self._handles = {}
        if nvml is not None:
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError:
                pass  # already down


def _library_errors(nvml: Any) -> tuple[int, ...]:
    """Errors after which no device can be queried any more."""
    return (
        nvml.NVML_ERROR_UNINITIALIZED,
        nvml.NVML_ERROR_DRIVER_NOT_LOADED,
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    )
