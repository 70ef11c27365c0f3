"""What Ray's workers use counts as the borrower's, up to what is lent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from distributed_grid.agent.limits.process_tree import read_process
from distributed_grid.agent.owner.usage_meter import RayLoan, RayWorkers, find_raylets, total_loan
from distributed_grid.posix.boot_clock import boot_id

SPIN = "import time; block = bytearray(64 << 20); block[::4096] = b'x' * len(block[::4096])\nwhile True: pass"
MARKED = os.environ | {"GRID_RAY_MARK": "m"}


@pytest.fixture
def raylet() -> Iterator[int]:
    """A process called raylet, with a child that keeps a core busy and has 64 MB."""
    script = 'printf raylet > /proc/self/comm; "$0" -c "$1" & wait'
    shell = subprocess.Popen(["/bin/bash", "-c", script, sys.executable, SPIN], start_new_session=True, env=MARKED)
    yield shell.pid
    subprocess.run(["kill", "-9", "--", f"-{shell.pid}"], check=True)
    shell.wait()


@pytest.fixture
def record(raylet: int, tmp_path: Path) -> Path:
    """What the start of Ray has left: the raylet of this test, and no other on this machine, is the grid's."""
    path = tmp_path / "started.json"
    leader = read_process(raylet)
    assert leader is not None
    path.write_text(json.dumps({"boot": boot_id(), "leader": raylet, "leader_start": leader.start, "mark": "x"}))
    return path


def until(workers: RayWorkers, cpu_ms: int, memory_bytes: int) -> tuple[int, int]:
    """What counts as soon as it is so much, and no later than in ten seconds."""
    end = time.monotonic() + 10
    while True:
        found = workers.measure()
        if (found[0] >= cpu_ms and found[1] >= memory_bytes) or time.monotonic() > end:
            return found
        time.sleep(0.02)


def test_without_a_loan_nothing_counts(record):
    workers = RayWorkers(record)
    until(workers, 0, 0)
    assert workers.measure() == (0, 0)
    assert workers.pids() == set()


def test_what_is_lent_counts_and_no_more(record):
    workers = RayWorkers(record)
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


def test_the_pids_of_workers_are_told_where_a_gpu_is_lent(record):
    workers = RayWorkers(record)
    workers.loan = RayLoan(gpu_milli=1000)
    end = time.monotonic() + 10
    while not workers.pids() and time.monotonic() < end:
        time.sleep(0.02)
    assert len(workers.pids()) == 1


def test_the_loans_of_all_nodes_of_a_machine_are_one():
    assert total_loan([RayLoan(1, 2, 3), RayLoan(10, 20, 30)]) == RayLoan(11, 22, 33)
    assert total_loan([]) == RayLoan()


def found(raylet: int, record: Path | None = None, shims: Collection[int] = ()) -> bool:
    end = time.monotonic() + 5
    while Path(f"/proc/{raylet}/comm").read_text() != "raylet\n" and time.monotonic() < end:
        time.sleep(0.01)
    return raylet in find_raylets(record, shims)


def test_a_job_that_calls_itself_a_raylet_is_none(raylet: int, tmp_path: Path) -> None:
    assert found(raylet)
    assert not found(raylet, shims=(raylet,))
    assert not found(raylet, shims=(os.getpid(),))
    assert not found(raylet, shims=(os.getppid(),))
    assert found(raylet, tmp_path / "nowhere")


def test_where_the_grid_started_ray_no_other_raylet_counts(raylet: int, record: Path) -> None:
    assert found(raylet, record)
    content = json.loads(record.read_text())
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as other:
        elsewhere = content | {"leader": other.pid, "leader_start": start_of(other.pid)}
        record.write_text(json.dumps(elsewhere))
        is_found = found(raylet, record)
        record.write_text(json.dumps(elsewhere | {"mark": "m"}))
        is_found_by_mark = found(raylet, record)
        record.write_text(json.dumps(elsewhere | {"leader_start": 1}))  # what is not there any more says nothing
        is_found_without = found(raylet, record)
        other.kill()
    assert (is_found, is_found_by_mark, is_found_without) == (False, True, True)
    for text in (json.dumps(content | {"boot": "another"}), "{", "[]"):
        record.write_text(text)
        assert found(raylet, record)


def start_of(pid: int) -> int:
    proc = read_process(pid)
    return proc.start if proc is not None else 0
