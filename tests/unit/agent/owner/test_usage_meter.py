"""What Ray's workers use counts as the borrower's, up to what is lent."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from distributed_grid.agent.owner.usage_meter import RayLoan, RayWorkers, total_loan

SPIN = "import time; block = bytearray(64 << 20); block[::4096] = b'x' * len(block[::4096])\nwhile True: pass"


@pytest.fixture
def raylet() -> Iterator[int]:
    """A process with a child that keeps a core busy and has 64 MB."""
    shell = subprocess.Popen(["/bin/sh", "-c", '"$0" -c "$1" & wait', sys.executable, SPIN], start_new_session=True)
    yield shell.pid
    subprocess.run(["kill", "-9", "--", f"-{shell.pid}"], check=True)
    shell.wait()


def until(workers: RayWorkers, cpu_ms: int, memory_bytes: int) -> tuple[int, int]:
    """What counts as soon as it is so much, and no later than in ten seconds."""
    end = time.monotonic() + 10
    while True:
        found = workers.measure()
        if (found[0] >= cpu_ms and found[1] >= memory_bytes) or time.monotonic() > end:
            return found
        time.sleep(0.02)


def test_without_a_loan_nothing_counts(raylet):
    workers = RayWorkers(lambda: [raylet])
    until(workers, 0, 0)
    assert workers.measure() == (0, 0)
    assert workers.pids() == set()


def test_what_is_lent_counts_and_no_more(raylet):
    workers = RayWorkers(lambda: [raylet])
    workers.loan = RayLoan(cpu_milli=64_000, memory_bytes=1 << 40)
    cpu_ms, memory = until(workers, 100, 60 << 20)
    assert cpu_ms >= 100
    assert memory >= 60 << 20
    workers.loan = RayLoan(cpu_milli=1, memory_bytes=1000)
    began, before = time.monotonic(), workers.measure()[0]
    time.sleep(0.3)
    after, memory = workers.measure()
    assert after - before <= (time.monotonic() - began) * 1000 / 1000 + 1
    assert memory == 1000


def test_the_pids_of_workers_are_told_where_a_gpu_is_lent(raylet):
    workers = RayWorkers(lambda: [raylet])
    workers.loan = RayLoan(gpu_milli=1000)
    end = time.monotonic() + 10
    while not workers.pids() and time.monotonic() < end:
        time.sleep(0.02)
    assert len(workers.pids()) == 1


def test_the_loans_of_all_nodes_of_a_machine_are_one():
    assert total_loan([RayLoan(1, 2, 3), RayLoan(10, 20, 30)]) == RayLoan(11, 22, 33)
    assert total_loan([]) == RayLoan()
