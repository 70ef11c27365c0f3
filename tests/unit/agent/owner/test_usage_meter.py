"""A simulated node is measured by what its own work uses of what it is declared to have."""

from __future__ import annotations

from distributed_grid.adapters.probes.gpu_probe import GpuProbe
from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.agent.execution.attempt import AttemptUsage
from distributed_grid.agent.owner.usage_meter import (
    OwnerBackground,
    RayWorkers,
    SimulatedNode,
    SimulatedUsageMeter,
    UsageMeter,
)
from distributed_grid.domain.nodes import GpuUsage, Usage
from distributed_grid.domain.resources import Capacity, GpuDevice

GB = 1024**3
BIG = Capacity(16_000, 30 * GB, (GpuDevice(0, 8 * GB),))
SMALL = Capacity(4_000, 10 * GB)

NONE = OwnerBackground()


def meter(capacity: Capacity, background: OwnerBackground = NONE) -> SimulatedUsageMeter:
    return SimulatedUsageMeter(SimulatedNode(capacity, background), RayWorkers())


def test_without_work_only_the_declared_background_is_in_use_and_it_is_the_owners():
    idle = meter(BIG, OwnerBackground(cpu_milli=50, memory_milli=766, gpu_milli=250))
    used = idle.usage([], 0, 1_000, 7 * GB)
    assert used == Usage(
        cpu_busy_milli=50,
        cpu_outside_milli=50,
        memory_bytes=BIG.memory_bytes * 766 // 1000,
        memory_outside_bytes=BIG.memory_bytes * 766 // 1000,
        gpus=(GpuUsage(0, 250, 2 * GB, 250, 2 * GB),), memory_room_bytes=7 * GB,
    )  # fmt: skip


def test_cpu_is_a_rate_of_its_own_attempts_over_the_declared_cores():
    node = meter(SMALL, OwnerBackground(cpu_milli=100))
    node.usage([AttemptUsage(5_000, 0)], 0, 10_000, None)
    used = node.usage([AttemptUsage(7_000, 0)], 0, 12_000, None)  # one core of four for two seconds
    assert (used.cpu_busy_milli, used.cpu_outside_milli) == (350, 100)


def test_an_attempt_that_ends_is_neither_forgotten_nor_counted_twice():
    node = meter(SMALL)
    node.usage([AttemptUsage(1_000, GB)], 0, 10_000, None)
    node.ended(3_000)
    used = node.usage([], 0, 12_000, None)
    assert (used.cpu_busy_milli, used.memory_bytes) == (250, 0)
    assert node.usage([], 0, 24_000, None).cpu_busy_milli == 0


def test_more_than_all_cores_is_all_of_them():
    node = meter(SMALL, OwnerBackground(cpu_milli=900))
    node.usage([], 0, 10_000, None)
    assert node.usage([AttemptUsage(8_000, 0)], 0, 12_000, None).cpu_busy_milli == 1000


def test_attempts_and_blocks_of_a_node_count_on_it_and_on_no_other():
    nodes = {"a": SimulatedNode(SMALL, OwnerBackground(memory_milli=100)), "b": SimulatedNode(BIG)}
    probe = MachineProbe()
    both = UsageMeter(probe, simulated=nodes)
    both.count_lent_memory("b", lambda: 2 * GB)
    both.count_lent_memory("", lambda: 5 * GB)
    usages = both.usages(("a", "b", "c"), {"one": AttemptUsage(0, 3 * GB, "a"), "two": AttemptUsage(0, GB, "b")})
    assert usages["a"].memory_bytes == 4 * GB
    assert usages["a"].memory_outside_bytes == GB
    assert (usages["b"].memory_bytes, usages["b"].memory_outside_bytes) == (3 * GB, 0)
    machine = usages["c"]
    assert machine.memory_room_bytes == probe.memory_bytes - machine.memory_outside_bytes
    assert usages["a"].memory_room_bytes == usages["b"].memory_room_bytes == machine.memory_room_bytes


def test_the_first_sample_knows_no_use_of_cpu_and_the_next_one_does():
    boot_ms = [1_000]
    machine = UsageMeter(MachineProbe(boottime=lambda: boot_ms[0]))
    assert not machine.usages(("a",), {})["a"].cpu_measured
    boot_ms[0] += 250
    assert machine.usages(("a",), {})["a"].cpu_measured


def test_gpus_are_not_measured_before_their_driver_was_asked():
    has_gpus = UsageMeter(MachineProbe(), GpuProbe())
    assert not has_gpus.usages(("a",), {})["a"].gpus_measured
    has_gpus.sample_gpus(())
    assert has_gpus.usages(("a",), {})["a"].gpus_measured
    assert UsageMeter(MachineProbe()).usages(("a",), {})["a"].gpus_measured
