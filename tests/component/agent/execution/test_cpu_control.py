"""Leased cores are real, distinct, and given back; read back from the kernel."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.component.agent.execution.conftest import Driver, python

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
]
FIRST, SECOND = sorted(os.sched_getaffinity(0))[:2]


def allowed(pid: int, thread: int | None = None) -> set[int]:
    """The cores a process (or thread) may run on, as the kernel lists them."""
    text = Path(f"/proc/{pid}/task/{thread or pid}/status").read_text()
    ranges = text.split("Cpus_allowed_list:")[1].split()[0].split(",")
    bounds = [tuple(map(int, (part + "-" + part).split("-")[:2])) for part in ranges]
    return {core for low, high in bounds for core in range(low, high + 1)}


@pytest.fixture
def two_cores(new_driver: Callable[..., Driver]) -> Driver:
    return new_driver(real_cores=(FIRST, SECOND))


def test_whole_cores_are_distinct_while_they_last(two_cores: Driver) -> None:
    one = two_cores.launch("a.1", "sleep", "1000", cpu_milli=1000)
    two = two_cores.launch("a.2", "sleep", "1000", cpu_milli=1000)
    assert {one.cores, two.cores} == {(FIRST,), (SECOND,)}
    assert allowed(one.pid) == set(one.cores)
    assert allowed(two.pid) == set(two.cores)
    free = two_cores.launch("a.3", "sleep", "1000")
    assert (free.cores, allowed(free.pid)) == ((), os.sched_getaffinity(0))


def test_more_than_there_is_gets_all_there_is(two_cores: Driver) -> None:
    many = two_cores.launch("a.1", "sleep", "1000", cpu_milli=64_000)
    assert allowed(many.pid) == {FIRST, SECOND}


def test_fractions_share_a_core_by_weight(two_cores: Driver) -> None:
    spin = python("while True: pass")
    small = two_cores.launch("a.1", *spin, cpu_milli=200)
    big = two_cores.launch("a.2", *spin, cpu_milli=800)
    assert allowed(small.pid) == allowed(big.pid) == set(small.cores)
    start = two_cores.host.usage()
    two_cores.pass_time(1.5)
    usage = two_cores.host.usage()
    used = [usage[name].cpu_ms - start[name].cpu_ms for name in ("a.1", "a.2")]
    assert 2.2 < used[1] / used[0] < 7, used


def test_without_control_groups_niceness_weighs(new_driver: Callable[..., Driver]) -> None:
    driver = new_driver(real_cores=(FIRST, SECOND), use_cgroups=False)
    half = driver.launch("a.1", "sleep", "1000", cpu_milli=500)
    whole = driver.launch("a.2", "sleep", "1000", cpu_milli=1000)
    assert os.getpriority(os.PRIO_PROCESS, half.pid) == 3
    assert os.getpriority(os.PRIO_PROCESS, whole.pid) == 0


def test_fractions_make_room_for_a_whole_core_with_all_their_threads(two_cores: Driver) -> None:
    two_cores.launch("a.1", "sleep", "1000", cpu_milli=600)
    twice = (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\nprint(1)\ntime.sleep(1000)"
    )
    moved = two_cores.launch("a.2", *python(twice), cpu_milli=500)
    two_cores.numbers("a.2", 1)
    two_cores.stop("a.1")
    two_cores.launch("a.3", "sleep", "1000", cpu_milli=400)
    whole = two_cores.launch("a.4", "sleep", "1000", cpu_milli=1000)
    (other,) = {FIRST, SECOND} - set(whole.cores)
    for thread in Path(f"/proc/{moved.pid}/task").iterdir():
        assert allowed(moved.pid, int(thread.name)) == {other}


def test_cores_spread_again_when_somebody_leaves(two_cores: Driver) -> None:
    started = [two_cores.launch(f"a.{n}", "sleep", "1000", cpu_milli=1000) for n in (1, 2, 3)]
    assert started[2].cores == started[0].cores
    two_cores.stop("a.2")
    assert allowed(started[0].pid) | allowed(started[2].pid) == {FIRST, SECOND}
    assert allowed(started[0].pid) & allowed(started[2].pid) == set()


def test_pins_are_known_again_after_a_restart(new_driver: Callable[..., Driver]) -> None:
    first = new_driver(real_cores=(FIRST, SECOND))
    one = first.launch("a.1", "sleep", "1000", cpu_milli=1000)
    first.close()
    second = new_driver(real_cores=(FIRST, SECOND))
    two = second.launch("a.2", "sleep", "1000", cpu_milli=1000)
    assert set(one.cores) | set(two.cores) == {FIRST, SECOND}


def test_cores_it_was_moved_to_are_known_again_after_a_restart(new_driver: Callable[..., Driver]) -> None:
    first = new_driver(real_cores=(FIRST, SECOND))
    started = [first.launch(f"a.{n}", "sleep", "1000", cpu_milli=1000) for n in (1, 2, 3)]
    first.stop("a.2")
    stayed, moved = sorted((started[0], started[2]), key=lambda report: allowed(report.pid) != set(report.cores))
    first.close()
    second = new_driver(real_cores=(FIRST, SECOND))
    second.stop(stayed.attempt_id)
    other = second.launch("a.4", "sleep", "1000", cpu_milli=1000)
    assert allowed(moved.pid) | allowed(other.pid) == {FIRST, SECOND}
    assert allowed(moved.pid) != set(moved.cores)
