"""The hardware in the words of the guides, of this machine and of made-up ones."""

import json
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from distributed_grid.adapters.probes import procfs
from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.agent.hardware import HardwareDetector
from distributed_grid.domain.resources import Capacity, GpuDevice
from distributed_grid.errors import BadInput
from tests.support.nvml.nvml_machine import GIB, GpuMachine

MIB = 1024**2
RESOURCES = {
    "cpu": {"cores", "physical_cores", "available_cores"},
    "memory": {"total_mb", "available_mb"},
    "gpu": {"devices", "available_devices", "total_memory_mb", "available_memory_mb"},
}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[GpuMachine]:
    """A machine with two GPUs."""
    made = GpuMachine(tmp_path).has(0, 1)
    yield made
    made.close()


class Container:
    """A tree that looks like a container of half a core and 2 GiB on a large, loaded machine; time passes when told."""

    def __init__(self, root: Path) -> None:
        self.root, self.now_ms = root, 5_000
        self.write("proc/self/cgroup", "0::/\n")
        self.write("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
        self.write("proc/meminfo", f"MemTotal: {512 * MIB} kB\nMemAvailable: {300 * MIB} kB\nSwapTotal: 0 kB\n")
        self.write("sys/fs/cgroup/cpu.max", "50000 100000\n")
        self.write("sys/fs/cgroup/cpu.stat", "usage_usec 0\n")
        self.write("sys/fs/cgroup/memory.max", f"{2 * GIB}\n")
        self.write("sys/fs/cgroup/memory.current", f"{GIB // 2}\n")

    def write(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def detector(self) -> HardwareDetector:
        return HardwareDetector(MachineProbe(self.root, boottime=lambda: self.now_ms), declare_gpus=1)


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


def keys(resources: dict[str, dict[str, object]]) -> dict[str, set[str]]:
    return {name: set(amounts) for name, amounts in resources.items()}


def test_resources_have_exactly_the_keys_of_the_guide() -> None:
    detector = HardwareDetector()
    assert keys(detector.resources()) == RESOURCES
    assert keys(detector.get_hardware_metrics()["resources"]) == RESOURCES


def test_a_heartbeat_has_exactly_the_keys_of_the_guide() -> None:
    beat = HardwareDetector().heartbeat("worker-7")
    assert list(beat) == ["type", "worker_id", "timestamp", "resources", "hardware_metrics"]
    assert (beat["type"], beat["worker_id"]) == ("heartbeat", "worker-7")
    assert set(beat["hardware_metrics"]) == {"cpu_percent", "memory_percent", "gpu_utilization"}
    assert datetime.fromisoformat(beat["timestamp"]).tzinfo is not None
    assert keys(beat["resources"]) == RESOURCES


def test_this_machine_is_described_as_it_is() -> None:
    detector = HardwareDetector()
    probe = MachineProbe().capacity()
    found = detector.resources()
    assert found["cpu"]["cores"] == len(probe.cpu_cores) <= len(os.sched_getaffinity(0))
    assert 1 <= found["cpu"]["physical_cores"] <= found["cpu"]["cores"]
    assert 0.1 <= found["cpu"]["available_cores"] <= probe.cpu_milli / 1000
    assert found["memory"]["total_mb"] == probe.memory_bytes // MIB <= psutil.virtual_memory().total // MIB
    assert 0 < found["memory"]["available_mb"] <= found["memory"]["total_mb"]
    metrics = detector.get_hardware_metrics()
    assert 0 <= metrics["cpu_percent"] <= 100
    assert 0 < metrics["memory_percent"] <= 100


def test_capabilities_are_json_and_tell_processor_disks_and_limits() -> None:
    found = HardwareDetector().get_capabilities()
    assert json.loads(json.dumps(found)) == found
    assert found["hostname"]
    assert found["platform"].startswith("Linux")
    assert found["python"].count(".") == 2
    assert found["cpu"]["model"]
    assert set(found["limits"]) == {"cpu_cores", "memory_mb", "swap_mb"}
    root = next(disk for disk in found["disks"] if disk["mountpoint"] == "/")
    assert root["total_mb"] == psutil.disk_usage("/").total // MIB
    assert 0 <= root["free_mb"] <= root["total_mb"]
    assert len({disk["device"] for disk in found["disks"]}) == len(found["disks"])


def test_the_load_average_is_taken_off_the_cores_of_a_whole_machine() -> None:
    probe = MachineProbe()
    if not probe.sees_whole_machine:
        pytest.skip("only a part of this machine may be used here")
    detector = HardwareDetector(probe)
    for _ in range(3):  # the load average may change between two looks
        before = os.getloadavg()[0]
        found = detector.resources()["cpu"]
        if before == os.getloadavg()[0]:
            break
    assert found["available_cores"] == pytest.approx(max(0.1, found["cores"] - before), abs=0.011)


def test_in_a_container_of_2_gb_there_are_2_gb(container: Container) -> None:
    found = container.detector().get_capabilities()
    assert (found["memory"]["total_mb"], found["memory"]["available_mb"]) == (2048, 1536)
    assert found["limits"] == {"cpu_cores": 0.5, "memory_mb": 2048, "swap_mb": None}
    assert (found["cpu"]["cores"], found["cpu"]["usable_cores"]) == (1, 0.5)
    assert container.detector().get_hardware_metrics()["memory_percent"] == 25.0


def test_in_a_container_the_machines_load_does_not_count_but_its_own_does(container: Container) -> None:
    detector = container.detector()
    assert detector.get_hardware_metrics()["cpu_percent"] == 0, "nothing measured yet, and the load is not ours"
    container.now_ms += 1000
    assert detector.resources()["cpu"]["available_cores"] == 0.5
    container.write("sys/fs/cgroup/cpu.stat", "usage_usec 150000\n")
    container.now_ms += 500
    metrics = detector.get_hardware_metrics()
    assert metrics["cpu_percent"] == pytest.approx(20.0)
    assert metrics["resources"]["cpu"]["available_cores"] == 0.4
    container.write("sys/fs/cgroup/cpu.stat", "usage_usec 9000000\n")
    container.now_ms += 500
    assert detector.resources()["cpu"]["available_cores"] == 0.1, "never less"


def test_capacity_is_at_least_one_core_and_exact_above(container: Container) -> None:
    assert container.detector().capacity() == Capacity(1000, 2 * GIB, (GpuDevice(0, 0, "declared"),))
    if len(os.sched_getaffinity(0)) > 1:
        container.write("sys/fs/cgroup/cpu.max", "150000 100000\n")
        assert container.detector().capacity().cpu_milli == 1500


def test_declared_gpus_are_there_idle_and_need_no_driver() -> None:
    detector = HardwareDetector(declare_gpus=2)
    gpu = detector.resources()["gpu"]
    assert gpu == {"devices": 2, "available_devices": 2, "total_memory_mb": 0, "available_memory_mb": 0}
    assert detector.capacity().gpus == (GpuDevice(0, name="declared"), GpuDevice(1, name="declared"))
    assert detector.get_hardware_metrics()["gpu_utilization"] == 0
    assert detector.gpu_problem == ""
    assert detector.get_capabilities()["gpu"]["declared"]


def test_fewer_than_no_gpus_cannot_be_declared() -> None:
    with pytest.raises(BadInput, match="must not be negative"):
        HardwareDetector(declare_gpus=-1)


def test_without_gpus_every_key_says_zero(tmp_path: Path) -> None:
    machine = GpuMachine(tmp_path)
    try:
        found = machine.ask("capabilities")["gpu"]
        assert [found[key] for key in sorted(RESOURCES["gpu"])] == [0, 0, 0, 0]
        assert (found["names"], found["list"], found["declared"]) == ([], [], False)
        assert found["problem"] == "the NVIDIA driver sees no GPU"
        assert machine.ask("heartbeat", [])["hardware_metrics"]["gpu_utilization"] == 0
    finally:
        machine.close()


def test_gpus_are_told_with_names_and_memory(machine: GpuMachine) -> None:
    found = machine.ask("capabilities")["gpu"]
    assert found["names"] == ["Stand-in 0", "Stand-in 1"]
    assert (found["devices"], found["available_devices"]) == (2, 2)
    assert found["total_memory_mb"] == found["available_memory_mb"] == 32 * 1024
    assert found["list"][1]["uuid"] == "GPU-0001"
    assert machine.ask("capacity")["gpus"] == [
        {"index": number, "memory_bytes": 16 * GIB, "name": f"Stand-in {number}", "exclusive": False}
        for number in (0, 1)
    ]


def test_a_gpu_at_work_for_others_is_not_available_and_one_at_work_for_us_is(machine: GpuMachine) -> None:
    machine.update({"0.util": 80, "0.used": 4 * GIB, "0.compute": f"100:{4 * GIB}"})
    beat = machine.ask("heartbeat", [])
    gpu = beat["resources"]["gpu"]
    assert (gpu["available_devices"], gpu["available_memory_mb"]) == (1, 28 * 1024)
    assert beat["hardware_metrics"]["gpu_utilization"] == 40.0
    assert machine.ask("heartbeat", [100])["resources"]["gpu"]["available_devices"] == 2


def test_a_gpu_whose_memory_others_hold_is_not_available(machine: GpuMachine) -> None:
    machine.update({"1.used": 16 * GIB - 1000, "1.compute": f"100:{15 * GIB}"})
    assert machine.ask("heartbeat", [])["resources"]["gpu"]["available_devices"] == 1


def test_a_lost_gpu_is_left_out_and_a_prohibited_one_is_never_lent(machine: GpuMachine) -> None:
    machine["1.mode"] = 2
    found = machine.ask("heartbeat", [])["resources"]["gpu"]
    assert (found["devices"], found["available_devices"]) == (2, 1)
    assert [gpu["index"] for gpu in machine.ask("capacity")["gpus"]] == [0]
    machine["fail 0.nvmlDeviceGetMemoryInfo"] = 15
    found = machine.ask("heartbeat", [])["resources"]["gpu"]
    assert (found["devices"], found["available_devices"]) == (1, 0)
    assert machine.ask("capacity")["gpus"] == []
    assert machine.ask("capabilities")["gpu"]["problem"] == "GPU 0: GPU is lost"


def test_an_exclusive_gpu_and_one_cut_into_instances_are_only_lent_whole(machine: GpuMachine) -> None:
    machine.update({"0.mode": 3, "1.mig": 1})
    assert [gpu["exclusive"] for gpu in machine.ask("capacity")["gpus"]] == [True, True]


def test_hyper_threads_of_one_core_count_once(container: Container) -> None:
    for number, core in enumerate((0, 0, 1, 1)):
        container.write(f"sys/devices/system/cpu/cpu{number}/topology/physical_package_id", "0\n")
        container.write(f"sys/devices/system/cpu/cpu{number}/topology/core_id", f"{core}\n")
    assert procfs.physical_cores(container.root, (0, 1, 2, 3)) == 2
    assert procfs.physical_cores(container.root, (0, 2)) == 2
    assert procfs.physical_cores(container.root, (7, 8, 9)) == 3, "nobody says"


def test_a_processor_is_named_as_its_maker_does(container: Container) -> None:
    assert procfs.cpu_model(container.root), "the architecture, at least"
    assert procfs.cpu_max_mhz(container.root) is None
    container.write(
        "proc/cpuinfo", "processor\t: 0\nmodel name\t: Fine Chip 9\ncpu MHz\t\t: 2445.6\n\nprocessor\t: 1\n"
    )
    assert procfs.cpu_model(container.root) == "Fine Chip 9"
    assert procfs.cpu_max_mhz(container.root) == 2446
    container.write("sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "4700000\n")
    assert procfs.cpu_max_mhz(container.root) == 4700


def test_of_a_machine_of_which_a_part_is_allocated_there_is_only_that_part(container: Container) -> None:
    probe = MachineProbe(container.root)
    whole = HardwareDetector(probe).capacity()
    part = HardwareDetector(probe, allocated=Capacity(memory_bytes=GIB)).capacity()
    assert (part.cpu_milli, part.memory_bytes) == (whole.cpu_milli, GIB)
    assert HardwareDetector(probe, allocated=Capacity(64_000, 64 * GIB)).capacity() == whole
    assert HardwareDetector(allocated=Capacity(1000, GIB)).capacity().cpu_milli == 1000
