"""What a machine has and who uses it, on this machine and on made-up ones."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distributed_grid.adapters.probes.cgroups import Cgroups
from distributed_grid.adapters.probes.machine import TICK_MS, MachineProbe

CORES = sorted(os.sched_getaffinity(0))


class FakeMachine:
    """A tree with a /proc of its own; time passes when told to."""

    def __init__(self, root: Path) -> None:
        self.root, self.now_ms, self.busy_ms = root, 5_000, 70_000
        self.write("proc/self/cgroup", "")
        self.write("proc/self/mountinfo", "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n")
        self.passes(0)

    def write(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def passes(self, ms: int, *, busy: float = 0.0) -> None:
        """Let every core be busy for that share of the time."""
        self.now_ms += ms
        self.busy_ms += int(ms * busy)
        ticks = self.busy_ms // TICK_MS
        lines = [f"cpu{core} {ticks - 30} 10 5 9999 777 4 6 5 3 3" for core in (*CORES, max(CORES) + 1)]
        self.write("proc/stat", "\n".join(["cpu  1 1 1 1 1 1 1 1 1 1", *lines, "intr 1 2 3"]) + "\n")

    def probe(self) -> MachineProbe:
        return MachineProbe(self.root, boottime=lambda: self.now_ms)


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def v2_tree(machine: FakeMachine, path: str = "/user.slice/grid.scope") -> None:
    machine.write("proc/self/cgroup", f"0::{path}\n")
    machine.write(
        "proc/self/mountinfo",
        "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
    )
    machine.write("sys/fs/cgroup/cgroup.controllers", "cpu memory\n")


def v1_tree(machine: FakeMachine, *, top: str, path: str) -> None:
    machine.write("proc/self/cgroup", f"5:memory:{path}\n4:cpu,cpuacct:{path}\n1:name=systemd:/x\n0::/\n")
    machine.write(
        "proc/self/mountinfo",
        f"32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
        f"33 31 0:30 {top} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    )


def test_without_control_groups_nothing_is_limited(machine: FakeMachine) -> None:
    groups = Cgroups(machine.root)
    assert (groups.cpu(), groups.memory(), groups.swap_bytes()) == (None, None, None)
    capacity = machine.probe().capacity()
    assert capacity.cpu_cores == tuple(CORES)
    assert capacity.memory_bytes == psutil.virtual_memory().total


def test_v2_limits_hold_from_anywhere_up_the_hierarchy(machine: FakeMachine) -> None:
    v2_tree(machine)
    machine.write("sys/fs/cgroup/user.slice/cpu.max", "150000 100000\n")
    machine.write("sys/fs/cgroup/user.slice/memory.max", "max\n")
    machine.write("sys/fs/cgroup/user.slice/cpu.stat", "usage_usec 7000500\nuser_usec 1\n")
    machine.write("sys/fs/cgroup/user.slice/grid.scope/cpu.max", "max 100000\n")
    machine.write("sys/fs/cgroup/user.slice/grid.scope/memory.max", "1000000000\n")
    machine.write("sys/fs/cgroup/user.slice/grid.scope/memory.swap.max", "5000\n")
    machine.write("sys/fs/cgroup/user.slice/grid.scope/memory.current", "700000\n")
    machine.write("sys/fs/cgroup/user.slice/grid.scope/memory.stat", "anon 1\ninactive_file 200000\n")
    groups = Cgroups(machine.root)
    cpu, memory = groups.cpu(), groups.memory()
    assert cpu is not None
    assert memory is not None
    assert (cpu.limit, cpu.group.name) == (1500, "user.slice")
    assert (memory.limit, memory.group.name) == (1_000_000_000, "grid.scope")
    assert groups.swap_bytes() == 5000
    assert groups.cpu_used_ms(cpu.group) == 7000
    assert groups.memory_used_bytes(memory.group) == 500_000
    capacity = machine.probe().capacity()
    assert capacity.memory_bytes == 1_000_000_000
    assert capacity.swap_bytes <= 5000
    assert len(capacity.cpu_cores) == 1


@pytest.mark.parametrize("top", ["/", "/docker/abc"], ids=["whole hierarchy", "container's part"])
def test_v1_limits_hold_as_seen_from_host_or_container(machine: FakeMachine, top: str) -> None:
    v1_tree(machine, top=top, path="/docker/abc")
    here = "" if top != "/" else "/docker/abc"
    cpu, memory = f"sys/fs/cgroup/cpu,cpuacct{here}", f"sys/fs/cgroup/memory{here}"
    machine.write(f"{cpu}/cpu.cfs_quota_us", "50000\n")
    machine.write(f"{cpu}/cpu.cfs_period_us", "100000\n")
    machine.write(f"{cpu}/cpuacct.usage", "3000000000\n")
    machine.write(f"{memory}/memory.limit_in_bytes", "2000000\n")
    machine.write(f"{memory}/memory.memsw.limit_in_bytes", "2500000\n")
    machine.write(f"{memory}/memory.usage_in_bytes", "1500000\n")
    machine.write(f"{memory}/memory.stat", "inactive_file 9\ntotal_inactive_file 100000\n")
    groups = Cgroups(machine.root)
    fence = groups.cpu()
    assert fence is not None
    assert (fence.limit, groups.cpu_used_ms(fence.group)) == (500, 3000)
    assert groups.swap_bytes() == 500_000
    probe = machine.probe()
    assert len(probe.capacity().cpu_cores) == 1
    assert probe.capacity().memory_bytes == 2_000_000
    assert probe.sample(0, 0).memory_used_bytes == 1_400_000


def test_v1_without_limits_says_so_with_huge_and_negative_numbers(machine: FakeMachine) -> None:
    v1_tree(machine, top="/", path="/")
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{0x7FFFFFFFFFFFF000}\n")
    groups = Cgroups(machine.root)
    assert (groups.cpu(), groups.memory(), groups.swap_bytes()) == (None, None, None)


def test_a_group_outside_the_namespace_is_taken_at_the_top(machine: FakeMachine) -> None:
    v2_tree(machine, "/../../elsewhere")
    machine.write("sys/fs/cgroup/memory.max", "4096\n")
    fence = Cgroups(machine.root).memory()
    assert fence is not None
    assert (fence.limit, fence.group) == (4096, machine.root / "sys/fs/cgroup")


def test_a_mount_of_somebody_elses_group_is_left_aside(machine: FakeMachine) -> None:
    v2_tree(machine, "/mine")
    with (machine.root / "proc/self/mountinfo").open("a") as mountinfo:
        mountinfo.write("50 23 0:28 /theirs /mnt/their\\040group rw - cgroup2 cgroup2 rw\n")
    machine.write("sys/fs/cgroup/mine/memory.max", "8192\n")
    machine.write("mnt/their group/memory.max", "4096\n")
    fence = Cgroups(machine.root).memory()
    assert fence is not None
    assert fence.limit == 8192


def test_a_quota_above_what_there_is_does_not_bind(machine: FakeMachine) -> None:
    v2_tree(machine, "/")
    machine.write("sys/fs/cgroup/cpu.max", "100000000 100000\n")
    machine.write("sys/fs/cgroup/memory.max", f"{1 << 50}\n")
    capacity = machine.probe().capacity()
    assert capacity.cpu_cores == tuple(CORES)
    assert capacity.memory_bytes == psutil.virtual_memory().total


def test_use_under_a_quota_is_that_of_the_group(machine: FakeMachine) -> None:
    v2_tree(machine, "/")
    machine.write("sys/fs/cgroup/cpu.max", "50000 100000\n")
    machine.write("sys/fs/cgroup/cpu.stat", "usage_usec 0\n")
    probe = machine.probe()
    probe.sample(0, 0)
    machine.passes(1000, busy=1.0)
    machine.write("sys/fs/cgroup/cpu.stat", "usage_usec 250000\n")
    assert probe.sample(0, 0).cpu_ratio_total == pytest.approx(0.25)


def test_the_first_sample_is_not_warm_and_neither_is_one_right_after(machine: FakeMachine) -> None:
    probe = machine.probe()
    first = probe.sample(0, 0)
    assert (first.warm, first.cpu_ratio_total, first.cpu_ratio_outside) == (False, 0.0, 0.0)
    machine.passes(50, busy=1.0)
    assert not probe.sample(0, 0).warm
    machine.passes(950, busy=1.0)
    second = probe.sample(0, 0)
    assert (second.warm, second.cpu_ratio_total) == (True, 1.0)
    assert (second.at_boot_ms, second.cores) == (6_000, len(CORES))


def test_use_is_an_average_over_ten_seconds(machine: FakeMachine) -> None:
    probe = machine.probe()
    probe.sample(0, 0)
    machine.passes(2000, busy=1.0)
    assert probe.sample(0, 0).cpu_ratio_total == pytest.approx(1.0)
    for expected in (0.5, 1 / 3, 0.25, 0.2, 0.0):
        machine.passes(2000)
        assert probe.sample(0, 0).cpu_ratio_total == pytest.approx(expected, abs=0.001)
    machine.passes(60_000, busy=0.5)
    assert probe.sample(0, 0).cpu_ratio_total == pytest.approx(0.5, abs=0.001)


def test_many_samples_do_not_pile_up(machine: FakeMachine) -> None:
    probe = machine.probe()
    for _ in range(3000):
        machine.passes(10)
        probe.sample(0, 0)
    assert len(probe._ring) <= 52


def test_what_the_grid_used_is_not_outside_and_outside_is_never_negative(machine: FakeMachine) -> None:
    probe = machine.probe()
    probe.sample(1_000_000, 0)
    machine.passes(10_000, busy=0.5)
    half = 5_000 * len(CORES)
    assert probe.sample(1_000_000 + half // 2, 0).cpu_ratio_outside == pytest.approx(0.25, abs=0.02)
    assert probe.sample(1_000_000 + 9 * half, 1 << 60).cpu_ratio_outside == 0.0
    assert probe.sample(0, 1 << 60).memory_outside_bytes == 0
    assert probe.sample(0, 0).cpu_ratio_outside == pytest.approx(0.5, abs=0.02)


@pytest.fixture
def busy_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield process
        process.kill()


def test_a_real_busy_process_shows_and_is_not_outside_when_it_is_ours(
    busy_process: subprocess.Popen[bytes],
) -> None:
    theirs, ours = MachineProbe(), MachineProbe()
    if theirs._cpu_fence:
        pytest.skip("a CPU quota limits this machine's tests")

    def used_ms() -> int:
        times = psutil.Process(busy_process.pid).cpu_times()
        return int((times.user + times.system) * 1000)

    start_ms, first = used_ms(), theirs.sample(0, 0)
    ours.sample(start_ms, 0)
    time.sleep(1.5)
    end_ms, outside = used_ms(), theirs.sample(0, 0)
    inside = ours.sample(end_ms, 0)
    share = (end_ms - start_ms) / (outside.at_boot_ms - first.at_boot_ms) / outside.cores
    assert share > 0
    assert outside.cpu_ratio_total >= share - 0.05
    assert outside.cpu_ratio_outside - inside.cpu_ratio_outside == pytest.approx(share, abs=0.06)
    assert inside.cpu_ratio_total == pytest.approx(outside.cpu_ratio_total, abs=0.05)


def test_real_memory_held_by_our_jobs_is_not_outside() -> None:
    probe = MachineProbe()
    sample = probe.sample(0, 0)
    assert 0 < sample.memory_used_bytes <= probe.capacity().memory_bytes
    held = sample.memory_outside_bytes // 2
    assert probe.sample(0, held).memory_outside_bytes == pytest.approx(held, rel=0.2)


def test_a_sample_is_cheap() -> None:
    probe = MachineProbe()
    took = []
    for _ in range(50):
        start = time.perf_counter()
        probe.sample(0, 0)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.001, statistics.median(took)
