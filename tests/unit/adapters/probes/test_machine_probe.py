"""Resources and users of a machine, on this machine and on made-up ones."""

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distributed_grid.adapters.probes.machine_probe import Cgroups, MachineProbe
from distributed_grid.adapters.probes.procfs import TICK_MS

CORES = sorted(os.sched_getaffinity(0))
GIB = 1024**3


class FakeMachine:
    """A tree with a /proc of its own; time passes when told to."""

    def __init__(self, root: Path) -> None:
        self.root, self.now_ms, self.busy_ms = root, 5_000, 70_000
        self.write("proc/self/cgroup", "")
        self.write("proc/self/mountinfo", "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n")
        self.write(
            "proc/meminfo", f"MemTotal: {64 * 1024**2} kB\nMemAvailable: {48 * 1024**2} kB\nSwapTotal: 1000 kB\n"
        )
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
    assert (capacity.cpu_cores, capacity.cpu_milli) == (tuple(CORES), 1000 * len(CORES))
    assert (capacity.memory_bytes, capacity.swap_bytes) == (64 * GIB, 1_024_000)
    assert machine.probe().sample(0, 0).memory_used_bytes == 16 * GIB


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
    assert (cpu.value, cpu.group.name) == (1500, "user.slice")
    assert (memory.value, memory.group.name) == (1_000_000_000, "grid.scope")
    assert groups.swap_bytes() == 5000
    assert groups.cpu_used_ms(cpu.group) == 7000
    assert groups.memory_used_bytes(memory.group) == 500_000
    capacity = machine.probe().capacity()
    assert capacity.memory_bytes == 1_000_000_000
    assert capacity.swap_bytes == 5000
    assert (len(capacity.cpu_cores), capacity.cpu_milli) == (1, 1500), "whole cores, and the exact quota beside them"
    limits = machine.probe().limits()
    assert (limits.cpu_milli, limits.memory_bytes, limits.swap_bytes) == (1500, 1_000_000_000, 5000)


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
    limit = groups.cpu()
    assert limit is not None
    assert (limit.value, groups.cpu_used_ms(limit.group)) == (500, 3000)
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
    limit = Cgroups(machine.root).memory()
    assert limit is not None
    assert (limit.value, limit.group) == (4096, machine.root / "sys/fs/cgroup")


def test_a_mount_of_somebody_elses_group_is_left_aside(machine: FakeMachine) -> None:
    v2_tree(machine, "/mine")
    with (machine.root / "proc/self/mountinfo").open("a") as mountinfo:
        mountinfo.write("50 23 0:28 /theirs /mnt/their\\040group rw - cgroup2 cgroup2 rw\n")
    machine.write("sys/fs/cgroup/mine/memory.max", "8192\n")
    machine.write("mnt/their group/memory.max", "4096\n")
    limit = Cgroups(machine.root).memory()
    assert limit is not None
    assert limit.value == 8192


def test_a_quota_above_what_there_is_does_not_bind(machine: FakeMachine) -> None:
    v2_tree(machine, "/")
    machine.write("sys/fs/cgroup/cpu.max", "100000000 100000\n")
    machine.write("sys/fs/cgroup/memory.max", f"{1 << 50}\n")
    capacity = machine.probe().capacity()
    assert capacity.cpu_cores == tuple(CORES)
    assert capacity.memory_bytes == 64 * GIB
    assert machine.probe().limits().cpu_milli is None


def test_a_quota_of_all_there_is_still_hides_the_neighbours(machine: FakeMachine) -> None:
    v2_tree(machine, "/lab/host")
    group = "sys/fs/cgroup/lab/host"
    machine.write(f"{group}/cpu.max", f"{100_000 * len(CORES)} 100000\n")
    machine.write(f"{group}/cpu.stat", "usage_usec 0\n")
    machine.write(f"{group}/memory.max", f"{64 * GIB}\n")
    machine.write(f"{group}/memory.current", f"{20 * GIB}\n")
    probe = machine.probe()
    assert probe.capacity().cpu_cores == tuple(CORES)
    assert not probe.sees_whole_machine
    probe.sample(0, 0)
    machine.passes(1000, busy=1.0)
    sample = probe.sample(0, 0)
    assert (sample.cpu_ratio_total, probe.outside_now(0)) == (0.0, 0)
    assert sample.memory_used_bytes == 20 * GIB


def test_with_equal_quotas_the_inner_group_is_measured(machine: FakeMachine) -> None:
    v2_tree(machine, "/lab/host")
    for group in ("lab", "lab/host"):
        machine.write(f"sys/fs/cgroup/{group}/cpu.max", "100000 100000\n")
    limit = Cgroups(machine.root).cpu()
    assert limit is not None
    assert limit.group.name == "host"


def test_v1_time_is_counted_in_a_hierarchy_of_its_own(machine: FakeMachine) -> None:
    machine.write("proc/self/cgroup", "2:cpuacct:/lab/host\n1:cpu:/lab/host/inner\n0::/\n")
    machine.write(
        "proc/self/mountinfo",
        "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "33 31 0:30 / /sys/fs/cgroup/cpuacct rw - cgroup cgroup rw,cpuacct\n",
    )
    machine.write("sys/fs/cgroup/cpu/lab/host/inner/cpu.cfs_quota_us", "-1\n")
    machine.write("sys/fs/cgroup/cpu/lab/host/cpu.cfs_quota_us", "100000\n")
    machine.write("sys/fs/cgroup/cpu/lab/host/cpu.cfs_period_us", "100000\n")
    machine.write("sys/fs/cgroup/cpu/lab/host/cpu.stat", "nr_periods 1\n")
    machine.write("sys/fs/cgroup/cpuacct/lab/host/cpuacct.usage", "7000000000\n")
    groups = Cgroups(machine.root)
    limit = groups.cpu()
    assert limit is not None
    assert (limit.value, groups.cpu_used_ms(limit.group)) == (1000, 7000)


def test_use_under_a_quota_is_that_of_the_group(machine: FakeMachine) -> None:
    v2_tree(machine, "/")
    machine.write("sys/fs/cgroup/cpu.max", "50000 100000\n")
    machine.write("sys/fs/cgroup/cpu.stat", "usage_usec 0\n")
    probe = machine.probe()
    probe.sample(0, 0)
    machine.passes(1000, busy=1.0)
    machine.write("sys/fs/cgroup/cpu.stat", "usage_usec 250000\n")
    assert probe.sample(0, 0).cpu_ratio_total == pytest.approx(0.5), "of what may be used"


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
    for _ in range(600):
        machine.passes(10)
        probe.sample(0, 0)
    assert len(probe._times._readings) <= 202


def test_what_the_grid_used_is_not_outside_and_outside_is_never_negative(machine: FakeMachine) -> None:
    probe = machine.probe()
    probe.sample(1_000_000, 0)
    machine.passes(10_000, busy=0.5)
    half = 5_000 * len(CORES)
    assert probe.sample(1_000_000 + half // 2, 0).cpu_ratio_outside == pytest.approx(0.25, abs=0.02)
    machine.passes(10_000, busy=0.5)
    assert probe.sample(1_000_000 + 9 * half, 1 << 60).cpu_ratio_outside == 0.0
    assert probe.sample(1_000_000 + 9 * half, 1 << 60).memory_outside_bytes == 0


@pytest.mark.parametrize("told_ms", [0, 1 << 40], ids=["steps back", "runs away"])
def test_own_time_that_cannot_be_true_spoils_one_step_only(machine: FakeMachine, told_ms: int) -> None:
    probe, own_ms = machine.probe(), 5_000_000
    probe.sample(own_ms, 0)

    def goes_on() -> float:
        """A quarter of a second with every core busy, half of it with our work."""
        nonlocal own_ms
        own_ms += 125 * len(CORES)
        machine.passes(250, busy=1.0)
        return probe.outside_now(own_ms) / 1000 / len(CORES)

    assert goes_on() == pytest.approx(0.5, abs=0.05)
    machine.passes(250, busy=1.0)
    probe.outside_now(told_ms)
    own_ms = told_ms
    for _ in range(5):
        assert goes_on() == pytest.approx(0.5, abs=0.05)
    assert probe.sample(own_ms, 0).cpu_ratio_outside == pytest.approx(0.5, abs=0.13), "six steps of seven are right"


def test_asking_for_totals_does_not_spoil_what_is_known_of_our_work(machine: FakeMachine) -> None:
    probe, own_ms = machine.probe(), 5_000_000
    probe.totals()
    probe.sample(own_ms, 0)
    for _ in range(10):
        machine.passes(250, busy=0.8)
        own_ms += 200 * len(CORES)
        assert probe.outside_now(own_ms) <= 60 * len(CORES)
        assert probe.totals().cpu_ratio_total == pytest.approx(0.8, abs=0.05)
    assert probe.sample(own_ms, 0).cpu_ratio_outside < 0.05


def test_what_others_use_now_shows_at_once_and_is_gone_at_once(machine: FakeMachine) -> None:
    probe = machine.probe()
    assert probe.outside_now(0) == 0, "nothing to compare with yet"
    for _ in range(20):
        machine.passes(250)
        assert probe.outside_now(0) == 0
    machine.passes(250, busy=0.8)
    assert probe.outside_now(0) == pytest.approx(800 * len(CORES), abs=50 * len(CORES))
    assert probe.sample(0, 0).cpu_ratio_outside < 0.1, "the long average hardly noticed"
    machine.passes(250)
    assert probe.outside_now(0) == 0


def test_the_short_window_is_never_shorter_than_200_ms(machine: FakeMachine) -> None:
    probe = machine.probe()
    probe.outside_now(0)
    for _ in range(20):
        machine.passes(20)
        probe.outside_now(0)
    machine.passes(20, busy=1.0)
    assert probe.outside_now(0) <= 1000 * len(CORES) * 20 // 200


@pytest.fixture
def busy_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield process
        process.kill()


def test_a_real_busy_process_shows_and_is_not_outside_when_it_is_ours(
    busy_process: subprocess.Popen[bytes],
) -> None:
    theirs, ours = MachineProbe(), MachineProbe()
    if theirs._cpu_limit:
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


def test_a_real_neighbour_shows_within_a_quarter_of_a_second(busy_process: subprocess.Popen[bytes]) -> None:
    probe = MachineProbe()
    if probe._cpu_limit:
        pytest.skip("a CPU quota limits this machine's tests")
    probe.outside_now(0)
    used_ms = psutil.Process(busy_process.pid).cpu_times().user
    time.sleep(0.25)
    spent = psutil.Process(busy_process.pid).cpu_times().user - used_ms
    assert probe.outside_now(0) >= 1000 * spent / 0.25 - 250


CPU, COUNTER, MEMORY = (Path("/sys/fs/cgroup", controller) for controller in ("cpu", "cpuacct", "memory"))

PROBING = """
import json, sys, time
from distributed_grid.adapters.probes.machine_probe import MachineProbe
probe = MachineProbe()
probe.sample(0, 0)
time.sleep(0.6)
now, sample, capacity = probe.outside_now(0), probe.sample(0, 0), probe.capacity()
print(json.dumps([now, sample.cpu_ratio_total, sample.memory_used_bytes, capacity.memory_bytes, capacity.cpu_milli]))
"""


@pytest.fixture
def lab_host() -> Iterator[str]:
    """The name of real control groups, v1, two levels deep: all the CPU there is, 2 GiB of memory."""
    if os.geteuid() != 0 or not all((place / "cgroup.procs").exists() for place in (CPU, COUNTER, MEMORY)):
        pytest.skip("needs root and control groups v1")
    outer = f"grid-test-{os.getpid()}-{next(_numbers)}"
    inner = f"{outer}/inner"
    for name, place in itertools.product((outer, inner), (CPU, COUNTER, MEMORY)):
        (place / name).mkdir()
    (CPU / outer / "cpu.cfs_period_us").write_text("100000")
    (CPU / outer / "cpu.cfs_quota_us").write_text(str(100_000 * len(CORES)))
    (MEMORY / outer / "memory.limit_in_bytes").write_text(str(2 * GIB))
    yield inner
    for name, place in itertools.product((inner, outer), (CPU, COUNTER, MEMORY)):
        for _ in range(50):  # the kernel may need a moment to let go of what just ended
            try:
                (place / name).rmdir()
                break
            except OSError:
                time.sleep(0.05)


_numbers = itertools.count()


@pytest.fixture(params=["root", "nobody"])
def nobody(request: pytest.FixtureRequest) -> list[str]:
    """What to put before a command so that an unprivileged user runs it, or nothing."""
    if request.param == "root":
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("changing the user needs setpriv")
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    if subprocess.run([*command, sys.executable, "-c", "import distributed_grid"], check=False).returncode:
        pytest.skip("nobody may not read this installation")
    return command


def test_in_a_real_container_of_2_gb_the_machine_has_2_gb_and_no_neighbours(
    lab_host: str, busy_process: subprocess.Popen[bytes], nobody: list[str]
) -> None:
    go = "".join(f"echo $$ > {place / lab_host / 'cgroup.procs'} && " for place in (CPU, COUNTER, MEMORY))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        ["sh", "-c", f'{go} exec "$@"', "sh", *nobody, sys.executable, "-c", PROBING],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    now, total, used, memory, cpu = json.loads(done.stdout)
    assert (memory, cpu) == (2 * GIB, 1000 * len(CORES))
    assert used < GIB, "what others hold is theirs"
    assert busy_process.poll() is None
    assert (now, total) == (pytest.approx(0, abs=60), pytest.approx(0, abs=0.05)), (
        "somebody else is busy, not this host"
    )


def test_a_sample_is_cheap() -> None:
    probe = MachineProbe()
    took = []
    for _ in range(50):
        start = time.perf_counter()
        probe.sample(0, 0)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.0005, statistics.median(took)
