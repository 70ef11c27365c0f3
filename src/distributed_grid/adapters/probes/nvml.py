"""NVIDIA's GPUs through NVML: which there are, how busy they are, and with whose work.

Rule 1. Nothing is raised: where there are no GPUs, or some are lost, `problem` says why.
Rule 2. A device that was there and cannot be measured counts as full of somebody else's work: it lends nothing.
Rule 3. A device keeps its index as long as this probe lives, even when a lost one makes NVML count anew.
Rule 4. After a failure NVML is opened again at most once a minute: that can take seconds.

A driver may hang. Calls are made one after the other, and one that has to wait for another longer than a second
gives up (Rule 2), so call from a thread and never from the loop.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from distributed_grid.adapters.probes.gpus import FULL, Gpu, GpuObservation, GpuSample, divided, unmeasured

LIBRARY = "libnvidia-ml.so.1"
REOPEN_SECONDS = 60.0
PATIENCE_SECONDS = 1.0
UTILISATION_WINDOW_US = 1_000_000

T = TypeVar("T")


class GpuProbe:
    """The GPUs of this machine; opens NVML when first asked."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._nvml: Any = None  # the library, while it is open
        self._opened_at: float | None = None  # or tried in vain
        self._handles: dict[str, Any] = {}  # by uuid, of the devices that answer
        self._known: dict[str, Gpu] = {}  # by uuid, all that were ever seen
        self._newest_us: dict[str, int] = {}  # by uuid, of the driver's utilisation samples
        self._failure = ""  # of NVML as a whole
        self._ailing: dict[str, str] = {}  # what is wrong with a device, by uuid or number
        self._hangs = False

    @property
    def problem(self) -> str:
        """Why there are no GPUs, or which are lost; empty when all is well."""
        if self._hangs:
            return "NVML does not answer"
        return self._failure or "; ".join(self._ailing.values())

    def devices(self) -> tuple[Gpu, ...]:
        """The devices that answer, by index; none when there are none to use. A second call asks anew."""
        return self._in_turn(self._devices, ())

    def sample(self, own_pids: Collection[int] = ()) -> tuple[GpuSample, ...]:
        """How busy every device ever seen is, by index; `own_pids` are all processes of the grid's jobs."""
        own = frozenset(own_pids)
        return self._in_turn(lambda: self._samples(own), tuple(unmeasured(gpu) for gpu in self._in_order()))

    def close(self) -> None:
        """Give NVML back; a later call opens it again. Safe twice."""
        self._in_turn(self._forget, None)

    # ------------------------------------------------------------------ asking, with the lock held

    def _in_turn(self, work: Callable[[], T], otherwise: T) -> T:
        if not self._lock.acquire(timeout=0 if self._hangs else PATIENCE_SECONDS):
            self._hangs = True
            return otherwise
        try:
            self._hangs = False
            return work()
        finally:
            self._lock.release()

    def _devices(self) -> tuple[Gpu, ...]:
        if self._is_open():
            self._of_each(self._describe)
        return tuple(gpu for gpu in self._in_order() if gpu.uuid in self._handles)

    def _samples(self, own: frozenset[int]) -> tuple[GpuSample, ...]:
        found: dict[str, GpuSample] = {}

        def measure(uuid: str, handle: Any) -> None:
            found[uuid] = divided(self._known[uuid].index, self._look(uuid, handle), own)

        if self._is_open():
            self._of_each(measure)
        return tuple(found.get(gpu.uuid) or unmeasured(gpu) for gpu in self._in_order())

    def _in_order(self) -> list[Gpu]:
        return sorted(self._known.values(), key=lambda gpu: gpu.index)

    def _of_each(self, ask: Callable[[str, Any], None]) -> None:
        """Ask every device that answers; one that fails is set aside, and when NVML itself fails, all are."""
        nvml = self._nvml
        for uuid, handle in tuple(self._handles.items()):
            try:
                ask(uuid, handle)
            except nvml.NVMLError as error:
                if error.value in _of_the_library(nvml):
                    self._shut()
                    self._failure = f"NVML failed: {error}"
                    return
                del self._handles[uuid]
                self._ailing[uuid] = f"GPU {self._known[uuid].index}: {error}"

    def _describe(self, uuid: str, handle: Any) -> None:
        nvml, index = self._nvml, self._known[uuid].index
        mode = self._maybe(nvml.nvmlDeviceGetComputeMode, handle, otherwise=nvml.NVML_COMPUTEMODE_DEFAULT)
        self._known[uuid] = Gpu(
            index=index,
            uuid=uuid,
            name=self._maybe(nvml.nvmlDeviceGetName, handle, otherwise=""),
            memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
            exclusive=mode in (nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, nvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD),
            mig=self._maybe(nvml.nvmlDeviceGetMigMode, handle, otherwise=[0, 0])[0] == 1,
            prohibited=mode == nvml.NVML_COMPUTEMODE_PROHIBITED,
        )

    def _look(self, uuid: str, handle: Any) -> GpuObservation:
        nvml = self._nvml
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        rates = self._maybe(nvml.nvmlDeviceGetUtilizationRates, handle, otherwise=None)
        return GpuObservation(
            memory_bytes=memory.used,
            busy_milli=None if rates is None else min(FULL, 10 * rates.gpu),
            processes=self._processes(handle),
            busy_by_pid=self._busy_by_pid(uuid, handle),
        )

    def _processes(self, handle: Any) -> dict[int, int | None] | None:
        """Bytes held by pid, of those that compute and those that draw; None when the driver does not say."""
        computing, drawing = self._running("Compute", handle), self._running("Graphics", handle)
        if computing is None:
            return None
        held: dict[int, int | None] = {}
        for process in (*computing, *(drawing or ())):  # one that does both is in both, with the same memory
            said, before = process.usedGpuMemory, held.get(process.pid)
            held[process.pid] = said if before is None else max(before, said or 0)
        return held

    def _running(self, kind: str, handle: Any) -> list[Any] | None:
        """NVML's own list, by the newest call this driver knows."""
        newest, older = (
            getattr(self._nvml, f"nvmlDeviceGet{kind}RunningProcesses_{version}") for version in ("v3", "v2")
        )
        found: list[Any] | None = self._maybe(
            newest, handle, otherwise=lambda: self._maybe(older, handle, otherwise=None)
        )
        return found

    def _busy_by_pid(self, uuid: str, handle: Any) -> dict[int, int]:
        """Each process's average over the last second the driver knows of."""
        since = max(0, self._newest_us.get(uuid, 0) - UTILISATION_WINDOW_US)
        samples = self._maybe(self._nvml.nvmlDeviceGetProcessUtilization, handle, since, otherwise=[])
        newest = max((sample.timeStamp for sample in samples), default=0)
        self._newest_us[uuid] = newest
        by_pid: dict[int, list[int]] = {}
        for sample in samples:
            # Some drivers hand out slots that were never filled; they show as impossible percentages.
            if sample.timeStamp > newest - UTILISATION_WINDOW_US and sample.smUtil <= 100:
                by_pid.setdefault(sample.pid, []).append(sample.smUtil)
        return {pid: 10 * sum(percents) // len(percents) for pid, percents in by_pid.items()}

    def _maybe(self, query: Callable[..., Any], *arguments: Any, otherwise: Any) -> Any:
        """What the query says; `otherwise`, called when it can be, where this driver or device does not say."""
        nvml = self._nvml
        try:
            return query(*arguments)
        except nvml.NVMLError as error:
            if error.value not in _unsaid(nvml):
                raise
        except UnicodeDecodeError:
            pass
        return otherwise() if callable(otherwise) else otherwise

    # ------------------------------------------------------------------ opening

    def _is_open(self) -> bool:
        """Whether NVML can be asked, after opening it when it is time to (Rule 4)."""
        if self._nvml is not None and not self._ailing:
            return True
        now = self._monotonic()
        if self._opened_at is None or now - self._opened_at >= REOPEN_SECONDS:
            self._shut()
            self._opened_at = now
            self._open()
        return self._nvml is not None

    def _open(self) -> None:
        try:
            ctypes.CDLL(LIBRARY)  # where there is none, pynvml need not be loaded: it is large
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
            self._find_devices()
        except nvml.NVMLError as error:
            self._shut()
            self._failure = f"NVML cannot be opened: {error}"

    def _find_devices(self) -> None:
        nvml, nameless = self._nvml, {}
        before, self._ailing = self._ailing, {}
        count = nvml.nvmlDeviceGetCount()
        for number in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(number)
                self._handles[self._name(number, handle)] = handle
            except nvml.NVMLError as error:
                if error.value in _of_the_library(nvml):
                    raise
                nameless[str(number)] = f"GPU {number}: {error}"
        self._of_each(self._describe)
        for uuid, gpu in self._known.items():
            if uuid not in self._handles:
                self._ailing.setdefault(uuid, before.get(uuid, f"GPU {gpu.index}: is gone"))
        if len(nameless) > len(self._ailing):
            self._ailing |= nameless
        if count == 0 and not self._known:
            self._shut()  # so that it is looked for again
            self._failure = "the NVIDIA driver sees no GPU"

    def _name(self, number: int, handle: Any) -> str:
        """The device's uuid, with an index of its own from now on (Rule 3)."""
        uuid: str = self._maybe(self._nvml.nvmlDeviceGetUUID, handle, otherwise=f"number {number}")
        if uuid not in self._known:
            taken = {gpu.index for gpu in self._known.values()}
            index = number if number not in taken else max(taken) + 1
            self._known[uuid] = Gpu(index, uuid, name="", memory_bytes=0)
        return uuid

    def _forget(self) -> None:
        self._shut()
        self._opened_at = None

    def _shut(self) -> None:
        nvml, self._nvml = self._nvml, None
        self._handles = {}
        if nvml is not None:
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError:
                pass  # it was dead already


def _unsaid(nvml: Any) -> tuple[int, ...]:
    """Errors that mean: not here, but all is well."""
    return (
        nvml.NVML_ERROR_NOT_SUPPORTED,
        nvml.NVML_ERROR_NO_PERMISSION,
        nvml.NVML_ERROR_NOT_FOUND,
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        nvml.NVML_ERROR_NO_DATA,
        nvml.NVML_ERROR_INSUFFICIENT_SIZE,  # grew between two looks
        nvml.NVML_SUCCESS,  # pynvml raises this for an empty list
    )


def _of_the_library(nvml: Any) -> tuple[int, ...]:
    """Errors after which no device can be asked any more."""
    return (
        nvml.NVML_ERROR_UNINITIALIZED,
        nvml.NVML_ERROR_DRIVER_NOT_LOADED,
        nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    )
