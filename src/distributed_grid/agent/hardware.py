"""Hardware inventory and metrics of this machine as plain dictionaries, in megabytes and percent.

Only what may be used counts: in a container of 2 GB the machine has 2 GB. Declared GPUs replace detected ones, are
never busy, and need no driver. Where there are no GPUs, every GPU key is still there and is 0.
"""

from __future__ import annotations

import platform
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from distributed_grid.adapters.probes import procfs
from distributed_grid.adapters.probes.gpu_probe import Gpu, GpuProbe, GpuSample
from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.domain.resources import NOTHING, Capacity
from distributed_grid.errors import BadInput

MIB = 1024**2
MIN_CORES = 0.1
IDLE_GPU_MILLI = 200
FREE_GPU_MEMORY_BYTES = 1024 * MIB


class HardwareDetector:
    """Detects the capacity of this machine, and its free part."""

    def __init__(
        self,
        probe: MachineProbe | None = None,
        gpus: GpuProbe | None = None,
        declare_gpus: int = 0,
        *,
        allocated: Capacity = NOTHING,
    ) -> None:
        """Without probes it makes its own; `declare_gpus` GPUs are claimed to be there, for laboratories. If only a
        part of the machine is `allocated` to the caller, it has no more than that; 0 is all of it."""
        if declare_gpus < 0:
            raise BadInput(f"{declare_gpus} GPUs cannot be declared: the number must not be negative")
        self._probe = probe or MachineProbe()
        self._allocated = allocated
        self._gpus = gpus or GpuProbe()
        self._declared = tuple(
            Gpu(index, uuid=f"declared-{index}", name="declared", memory_bytes=0) for index in range(declare_gpus)
        )
        self._probe.totals()  # so that the first answer already has something to compare with

    @property
    def gpu_problem(self) -> str:
        return "" if self._declared else self._gpus.problem

    def capacity(self) -> Capacity:
        """Capacity of the machine for the ledger; at least one core."""
        machine = self._probe.capacity()
        gpus = tuple(gpu.device for gpu in self._devices() if not gpu.prohibited)
        cpu_milli = min(machine.cpu_milli, self._allocated.cpu_milli or machine.cpu_milli)
        memory_bytes = min(machine.memory_bytes, self._allocated.memory_bytes or machine.memory_bytes)
        return Capacity(max(1000, cpu_milli), memory_bytes, gpus)

    def get_capabilities(self) -> dict[str, Any]:
        """Everything about the machine, as JSON values; measured anew at each call."""
        machine, limits, root = self._probe.capacity(), self._probe.limits(), self._probe.root
        now, devices = self.resources(), self._devices()
        return {
            "hostname": machine.hostname,
            "platform": platform.platform(),
            "python": platform.python_version(),
            "cpu": now["cpu"]
            | {
                "usable_cores": machine.cpu_milli / 1000,
                "model": procfs.cpu_model(root),
                "max_mhz": procfs.cpu_max_mhz(root),
            },
            "memory": now["memory"] | {"swap_total_mb": machine.swap_bytes // MIB},
            "gpu": now["gpu"]
            | {
                "names": [gpu.name for gpu in devices],
                "list": [
                    (
                        {
                            "index": gpu.index,
                            "uuid": gpu.uuid,
                            "name": gpu.name,
                            "memory_mb": gpu.memory_bytes // MIB,
                            "exclusive": gpu.exclusive,
                            "mig": gpu.mig,
                            "prohibited": gpu.prohibited,
                        }
                    )
                    for gpu in devices
                ],
                "declared": bool(self._declared),
                "problem": self.gpu_problem,
            },
            "disks": [
                {
                    "mountpoint": disk.mountpoint,
                    "device": disk.device,
                    "type": disk.kind,
                    "total_mb": disk.total_bytes // MIB,
                    "free_mb": disk.free_bytes // MIB,
                }
                for disk in procfs.disks()
            ],
            "limits": {
                "cpu_cores": None if limits.cpu_milli is None else limits.cpu_milli / 1000,
                "memory_mb": None if limits.memory_bytes is None else limits.memory_bytes // MIB,
                "swap_mb": None if limits.swap_bytes is None else limits.swap_bytes // MIB,
            },
        }

    def resources(self) -> dict[str, dict[str, Any]]:
        """All resources and free ones, with the keys of the guides."""
        metrics: dict[str, dict[str, Any]] = self.get_hardware_metrics()["resources"]
        return metrics

    def get_hardware_metrics(self, own_pids: Collection[int] = ()) -> dict[str, Any]:
        """How busy the machine is, and its resources; `own_pids` are the grid's own, which leave a GPU available."""
        sample, machine = self._probe.totals(), self._probe.capacity()
        if self._declared:
            gpus = tuple(GpuSample(gpu.index, 0, 0, 0, 0) for gpu in self._declared)
        else:
            gpus = tuple(measured for measured in self._gpus.sample(own_pids) if measured.measured)
        # Cores in use: the load average, which counts all of the machine; if only a part is ours, the measured use.
        load = sample.load1 if self._probe.sees_whole_machine else sample.cpu_ratio_total * (machine.cpu_milli / 1000)
        # A device is available when others leave it nearly idle and a gigabyte of its memory free.
        devices = self._devices()
        seen = {gpu.index: gpu for gpu in gpus}
        used = {gpu.index: seen[gpu.index].memory_bytes if gpu.index in seen else gpu.memory_bytes for gpu in devices}
        available = 0
        for gpu in devices:
            if gpu.index in seen and not gpu.prohibited:
                free = gpu.memory_bytes - seen[gpu.index].outside_memory_bytes
                is_idle = seen[gpu.index].outside_busy_milli <= IDLE_GPU_MILLI
                available += is_idle and free >= min(FREE_GPU_MEMORY_BYTES, gpu.memory_bytes)
        # How busy the processor is; in the first moment, before anything could be measured, by its load.
        return {
            "timestamp": datetime.now(UTC).isoformat(),
            "cpu_percent": round(100 * (sample.cpu_ratio_total if sample.warm else min(1.0, load / sample.cores)), 1),
            "memory_percent": round(100 * sample.memory_used_bytes / max(1, machine.memory_bytes), 1),
            "gpu_utilization": round(sum(gpu.busy_milli for gpu in gpus) / 10 / len(gpus), 1) if gpus else 0,
            "resources": {
                "cpu": {
                    "cores": len(machine.cpu_cores),
                    "physical_cores": procfs.physical_cores(self._probe.root, machine.cpu_cores),
                    "available_cores": round(max(MIN_CORES, machine.cpu_milli / 1000 - load), 2),
                },
                "memory": {
                    "total_mb": machine.memory_bytes // MIB,
                    "available_mb": (machine.memory_bytes - sample.memory_used_bytes) // MIB,
                },
                "gpu": {
                    "devices": len(devices),
                    "available_devices": available,
                    "total_memory_mb": sum(gpu.memory_bytes // MIB for gpu in devices),
                    "available_memory_mb": sum(max(0, gpu.memory_bytes - used[gpu.index]) // MIB for gpu in devices),
                },
            },
        }

    def heartbeat(self, worker_id: str, own_pids: Collection[int] = ()) -> dict[str, Any]:
        """The heartbeat message of a worker, with what it has free."""
        metrics = self.get_hardware_metrics(own_pids)
        return {
            "type": "heartbeat",
            "worker_id": worker_id,
            "timestamp": metrics["timestamp"],
            "resources": metrics["resources"],
            "hardware_metrics": {key: metrics[key] for key in ("cpu_percent", "memory_percent", "gpu_utilization")},
        }

    def _devices(self) -> tuple[Gpu, ...]:
        return self._declared or self._gpus.devices()
