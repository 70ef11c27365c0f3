"""The owner of a machine comes first: real processes, real shares, read back from the kernel."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from bench.exclusive_cgroup import exclusive_cgroup
from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.agent.agent import AsyncioTasks
from distributed_grid.agent.execution.attempt import AttemptExit
from distributed_grid.agent.files import job_dir
from distributed_grid.agent.limits import process_tree
from distributed_grid.agent.owner.borrowed_work import HostedWork
from distributed_grid.agent.owner.guard import OwnerGuard
from distributed_grid.agent.owner.usage_meter import UsageMeter
from distributed_grid.agent.owner.yield_policy import YieldStep
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.wire import OwnerRules
from tests.component.agent.execution.conftest import Driver, a_spec, is_alive, python
from tests.component.agent.execution.test_cpu_control import allowed
from tests.support.shell import wait_until

CORES = sorted(os.sched_getaffinity(0))
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")]
alone = pytest.mark.alone  # they keep every core busy

GB = 1024**3
RULES = OwnerRules(
    cpu_busy_max_milli=300,
    memory_used_max_milli=1000,
    memory_min_bytes=0,
    gpu_busy_max_milli=1000,
    gpu_memory_min_bytes=0,
    notice_ms=1500,
    grace_ms=3000,
)
SPIN = "while True: pass"
SPIN_EVERYWHERE = f"import os\nfor _ in range({len(CORES) - 1}):\n    if os.fork() == 0: break\n{SPIN}"


@pytest.fixture
def room() -> Iterator[None]:
    """Nobody else's work and memory in sight; where that cannot be arranged, a machine that is quiet enough."""
    with exclusive_cgroup(len(CORES), 10 * GB) as alone:
        if not alone:
            probe = MachineProbe()
            probe.outside_now(0)
            time.sleep(1)
            if probe.outside_now(0) > 200:
                pytest.skip("others use this machine, and it has no control groups to keep them apart")
        yield


class Guarded:
    """A guard over a driver's host, and what it has reported."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.pauses: list[tuple[str, bool, str]] = []
        self.changes: list[bool] = []
        self.guard = OwnerGuard(
            HostedWork(driver.host, UsageMeter(MachineProbe())),
            boot_ms,
            report_pause=self._paused,
            on_change=lambda: self.changes.append(self.guard.yields),
        )
        self.guard.rules = RULES
        self.watching = driver.loop.create_task(self.guard.watch(AsyncioTasks().sleep))

    def _paused(self, attempt_id: str, fence: int, paused: bool, detail: str) -> None:
        assert fence == 1
        self.pauses.append((attempt_id, paused, detail))

    def stop(self) -> None:
        self.watching.cancel()
        self.driver.run_coroutine(asyncio.gather(self.watching, return_exceptions=True))
        self.guard.release()


@pytest.fixture
def guarded(room: None, new_driver: Callable[..., Driver]) -> Iterator[Guarded]:
    driver = new_driver(real_cores=CORES)
    guarded = Guarded(driver)
    yield guarded
    guarded.stop()
    driver.finish()


@contextmanager
def an_owner(threads: int) -> Iterator[list[int]]:
    """Processes of somebody else that want a core each."""
    running = [subprocess.Popen([sys.executable, "-S", "-c", SPIN]) for _ in range(threads)]
    try:
        yield [one.pid for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()


def ran_ms(*pids: int) -> int:
    found = (process_tree.read_process(pid) for pid in pids)
    return sum(proc.own_ticks for proc in found if proc is not None) * process_tree.TICK_MS


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def own_ms(driver: Driver) -> int:
    return sum(one.cpu_ms for one in driver.host.usage().values())


def owners_share(driver: Driver, owner: list[int], seconds: float) -> float:
    """The owner's part of what both used in the next seconds."""
    before, own_before = ran_ms(*owner), own_ms(driver)
    driver.pass_time(seconds)
    owners, own = ran_ms(*owner) - before, own_ms(driver) - own_before
    return owners / max(1, owners + own)


@alone
def test_the_owner_has_its_machine_back_within_a_second_and_lends_it_again_afterwards(guarded: Guarded) -> None:
    driver, guard = guarded.driver, guarded.guard
    job = driver.launch("a.1", *python(SPIN_EVERYWHERE), cpu_milli=1000 * len(CORES))
    driver.pass_time(2)
    assert not guard.yields
    before = own_ms(driver)
    driver.pass_time(0.5)
    assert own_ms(driver) > before + 300, "borrowed work has the machine while nobody else wants it"
    with an_owner(len(CORES)) as owner:
        began = time.monotonic()
        while owners_share(driver, owner, 0.25) < 0.9:
            assert time.monotonic() - began < 3  # a second is promised; this machine may be busy with other tests
        assert (guard.yields, guarded.changes) == (True, [True])
        assert guard.generation > 0
        assert len(allowed(job.pid)) == 1
        assert owners_share(driver, owner, 1.5) >= 0.9
    driver.until(lambda: not guard.yields, timeout_s=15)
    assert allowed(job.pid) == set(CORES)
    before = own_ms(driver)
    driver.pass_time(1)
    assert own_ms(driver) > before + 600
    assert guarded.changes == [True, False]


@alone
def test_an_owner_who_wants_half_shares_the_machine(guarded: Guarded) -> None:
    driver = guarded.driver
    half = len(CORES) // 2
    driver.launch("a.1", *python(SPIN_EVERYWHERE), cpu_milli=1000 * len(CORES))
    driver.pass_time(1)
    with an_owner(half) as owner:
        driver.until(lambda: guarded.guard.yields, timeout_s=5)
        driver.pass_time(1)
        before, own_before, began = ran_ms(*owner), own_ms(driver), time.monotonic()
        driver.pass_time(3)
        took_ms = 1000 * (time.monotonic() - began)
        assert ran_ms(*owner) - before > 0.8 * half * took_ms
        assert own_ms(driver) - own_before > 0.4 * (len(CORES) - half) * took_ms
        assert guarded.pauses == []


@alone
def test_an_owner_who_takes_it_all_pauses_everything_until_it_goes(guarded: Guarded) -> None:
    driver, guard = guarded.driver, guarded.guard
    driver.launch("a.1", *python(SPIN_EVERYWHERE), cpu_milli=1000)
    driver.launch("a.2", *python(SPIN), cpu_milli=500)
    driver.pass_time(1)
    with an_owner(2 * len(CORES)):
        driver.until(lambda: len(guarded.pauses) == 2, timeout_s=15)
        assert guard.state.step is YieldStep.PAUSED
        assert {(name, paused) for name, paused, _ in guarded.pauses} == {("a.1", True), ("a.2", True)}
        assert all(f"of {len(CORES)} cores" in why for _, _, why in guarded.pauses)
        driver.pass_time(0.2)
        before = own_ms(driver)
        driver.pass_time(1)
        assert own_ms(driver) <= before + 20
    driver.until(lambda: len(guarded.pauses) == 4, timeout_s=15)
    assert set(guarded.pauses[2:]) == {("a.1", False, ""), ("a.2", False, "")}
    before = own_ms(driver)
    driver.until(lambda: own_ms(driver) > before + 300)
    driver.until(lambda: not guard.yields, timeout_s=15)
    assert not is_marked(driver.root)


def is_marked(root: Path) -> bool:
    return (root / job_dir.THROTTLED).exists()


def weights(root: Path) -> dict[str, str]:
    """CPU weights in the control groups of all attempts."""
    paths = [path for file in root.glob(".control/*/groups.json") for _, path in json.loads(file.read_text())]
    files = [Path(path, name) for path in paths for name in ("cpu.shares", "cpu.weight")]
    return {str(file): file.read_text() for file in files if file.exists()}


@alone
def test_pins_and_weights_come_back_exactly_as_they_were(guarded: Guarded) -> None:
    driver = guarded.driver
    jobs = [
        driver.launch("a.1", *python(SPIN), cpu_milli=1000),
        driver.launch("a.2", *python(SPIN), cpu_milli=700),
        driver.launch("a.3", *python(SPIN), cpu_milli=300),
        driver.launch("a.4", "sleep", "1000"),
    ]
    pins, before = [allowed(job.pid) for job in jobs], weights(driver.root)
    driver.pass_time(0.5)
    with an_owner(len(CORES)):
        driver.until(lambda: guarded.guard.yields, timeout_s=5)
        assert len(set.union(*(allowed(job.pid) for job in jobs))) == 1
        late = driver.launch("a.5", *python(SPIN))
        assert len(allowed(late.pid)) == 1
    driver.until(lambda: not guarded.guard.yields, timeout_s=15)
    assert [allowed(job.pid) for job in jobs] == pins
    assert allowed(late.pid) == set(CORES)
    assert weights(driver.root) == before


@alone
def test_a_slowed_job_can_still_be_cancelled_and_clean_up(guarded: Guarded) -> None:
    driver = guarded.driver
    polite = "trap 'for i in 1 2 3 4 5; do sleep 0.05; done; echo bye; exit 3' TERM; echo 1; while :; do :; done"
    driver.launch("a.1", "/bin/sh", "-c", polite, cpu_milli=1000 * len(CORES))
    driver.numbers("a.1", 1)
    with an_owner(2 * len(CORES)):
        driver.until(lambda: guarded.guard.yields, timeout_s=5)
        ended = driver.stop("a.1", grace_ms=10_000)
    assert (ended.ending, ended.exit_code, driver.out("a.1")) == ("cancelled", 3, "1\nbye\n")


@alone
def test_without_rules_nobody_gives_way(guarded: Guarded) -> None:
    guarded.guard.rules = None
    driver = guarded.driver
    driver.launch("a.1", *python(SPIN_EVERYWHERE), cpu_milli=1000 * len(CORES))
    with an_owner(len(CORES)) as owner:
        driver.pass_time(1)
        assert owners_share(driver, owner, 1) < 0.8
    assert (guarded.changes, guarded.guard.generation) == ([], 0)


@alone
def test_letting_go_lets_everything_run(guarded: Guarded) -> None:
    driver = guarded.driver
    job = driver.launch("a.1", *python(SPIN_EVERYWHERE), cpu_milli=1000 * len(CORES))
    driver.pass_time(0.5)
    with an_owner(2 * len(CORES)):
        driver.until(lambda: guarded.pauses, timeout_s=15)
        assert state_of(job.pid) == "T"
        guarded.stop()
        assert (state_of(job.pid), allowed(job.pid)) == ("R", set(CORES))
        assert guarded.pauses[-1] == ("a.1", False, "")
        guarded.stop()


HOLDS_MEMORY = """
import json, os, signal, sys, time
held = b"x" * 200_000_000
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
while not os.path.exists(os.environ["GRID_NOTICE"]):
    time.sleep(0.01)
notice = json.load(open(os.environ["GRID_NOTICE"]))
print(notice["reason"], "in", round(notice["deadline"] - time.time(), 1), flush=True)
time.sleep(1000)
"""


def test_memory_comes_back_by_eviction_after_a_notice(guarded: Guarded) -> None:
    driver, guard = guarded.driver, guarded.guard
    driver.launch("small", "sleep", "1000")
    driver.launch("large", *python(HOLDS_MEMORY))
    driver.numbers("large", 1)
    everything = MachineProbe().capacity().memory_bytes
    # Beside other tests a job may be scheduled a second late, so its notice is longer than that.
    rules = msgspec.structs.replace(RULES, memory_min_bytes=everything, memory_used_max_milli=0, notice_ms=4000)
    guard.rules = rules
    ended = driver.ended("large")
    assert (ended.ending, ended.exit_code) == ("reclaimed", 5)
    assert ended.detail.startswith("its owner needs here's memory: ")
    reason, _, left = driver.out("large").splitlines()[1].rpartition(" in ")
    # Told with the figures of its moment: others use memory, too, between the notice and the end.
    assert re.fullmatch(r"its owner needs here's memory: [\d.]+ GB free, [\d.]+ GB must be", reason), reason
    assert 0.2 < float(left) <= 4
    assert driver.host.running() == ("small",)
    # The end of a large process may look like a moment of somebody else's CPU use, so it may yield for that, too.
    driver.until(lambda: guarded.changes[:2] == [True, False] and not guard.yields)


def test_a_notice_is_taken_back_when_the_need_passes(guarded: Guarded) -> None:
    driver, guard = guarded.driver, guarded.guard
    driver.launch("a.1", *python(HOLDS_MEMORY))
    driver.numbers("a.1", 1)
    short = msgspec.structs.replace(RULES, memory_min_bytes=1 << 60, memory_used_max_milli=0, notice_ms=60_000)
    guard.rules = short
    driver.until(lambda: (driver.root / "a.1/notice").exists())
    guard.rules = RULES
    driver.until(lambda: not (driver.root / "a.1/notice").exists())
    driver.until(lambda: not guard.yields)
    assert driver.host.running() == ("a.1",)


@alone
def test_where_only_eviction_is_allowed_the_youngest_goes(guarded: Guarded) -> None:
    driver = guarded.driver
    guarded.guard.rules = msgspec.structs.replace(RULES, throttle=False, pause=False, notice_ms=200)
    driver.launch("old", *python(SPIN), cpu_milli=1000 * (len(CORES) - 1))
    driver.launch("young", *python(SPIN), cpu_milli=1000)
    driver.pass_time(0.5)
    with an_owner(len(CORES)):
        ended = driver.until(lambda: driver.find(AttemptExit, "young"), timeout_s=60).outcome
        assert ended.ending == "reclaimed"
        assert "its owner needs here's CPU: " in ended.detail
        assert is_alive(driver.shim_pid("old"))


AGENT = """
import asyncio, msgspec, sys
from pathlib import Path
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.agent.execution.attempt import AttemptSpec
from distributed_grid.agent.execution.cpu_control import Throttler

async def main():
    host = AttemptHost(Path(sys.argv[1]), report=lambda report: None)
    await host.start()
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=AttemptSpec)
    await host.launch(spec)
    while not host.running_trees():
        await asyncio.sleep(0.01)
    throttler = Throttler(host)
    throttler.throttle(1, 50)
    throttler.pause()
    print(host.running_trees()[0].shim.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_what_a_killed_agent_left_stopped_goes_on_under_the_next(root: Path, new_driver: Callable[..., Driver]) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    spec = a_spec("a.1", *python(SPIN_EVERYWHERE), cpu_milli=1000 * len(CORES))
    try:
        assert agent.stdin
        assert agent.stdout
        agent.stdin.write(msgspec.json.encode(spec))
        agent.stdin.close()
        shim = int(agent.stdout.readline())
    finally:
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        agent.stdout.close()
    left = [proc.pid for proc in process_tree.descendants(shim, process_tree.nobody)]
    assert left
    wait_until(lambda: {state_of(pid) for pid in left} == {"T"})
    driver = new_driver()
    driver.until(lambda: "T" not in {state_of(pid) for pid in left})
    assert all(allowed(pid) == set(CORES) for pid in left)
    assert not is_marked(root)


def test_watching_costs_next_to_nothing_while_nothing_is_borrowed(guarded: Guarded) -> None:
    driver = guarded.driver
    driver.pass_time(1)
    before = time.process_time()
    driver.pass_time(4)
    assert time.process_time() - before < 0.02
