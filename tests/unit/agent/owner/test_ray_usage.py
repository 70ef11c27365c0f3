"""What Ray's workers use counts as the borrower's, up to what is lent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distributed_grid.adapters.probes import procfs
from distributed_grid.agent.limits.process_tree import children_of, read_process
from distributed_grid.agent.owner.usage_meter import RayLoan, RayWorkers, find_raylets, is_named, total_loan
from distributed_grid.posix.boot_clock import boot_id
from tests.support.shell import wait_until

SPIN = "import time; block = bytearray(64 << 20); block[::4096] = b'x' * len(block[::4096])\nwhile True: pass"
OTHER_USER = 54321
MARKED = os.environ | {"GRID_RAY_MARK": "m"}


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[int]:
    """A process that runs the program of an installed Ray, with a child that keeps a core busy and has 64 MB."""
    with running(install_raylet(tmp_path)) as pid:
        yield pid


def install_raylet(folder: Path) -> Path:
    """A shell where Ray has its raylet."""
    program = folder / "site-packages/ray/core/src/ray/raylet/raylet"
    program.parent.mkdir(parents=True)
    shutil.copy("/bin/bash", program)
    program.chmod(0o755)
    return program


@contextmanager
def running(program: Path) -> Iterator[int]:
    """The pid of a shell that has named itself raylet."""
    script = 'printf raylet > /proc/self/comm; "$0" -c "$1" & wait'
    shell = subprocess.Popen([program, "-c", script, sys.executable, SPIN], start_new_session=True, env=MARKED)
    comm = Path(f"/proc/{shell.pid}/comm")
    try:
        wait_until(lambda: comm.read_text() == "raylet\n" and children_of(shell.pid))
        yield shell.pid
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


@pytest.fixture
def record(raylet: int, tmp_path: Path) -> Path:
    """The record of Ray's start: the raylet of this test, and no other on this machine, is the grid's."""
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


def found(raylet: int, record: Path | None = None, shims: Collection[int] = (), jobs: Path | None = None) -> bool:
    return raylet in find_raylets(record, shims, jobs)


def test_a_raylet_that_a_job_has_started_is_none(raylet: int, tmp_path: Path) -> None:
    assert found(raylet)
    assert not found(raylet, shims=(raylet,))
    assert not found(raylet, shims=(os.getpid(),))
    assert not found(raylet, shims=(os.getppid(),))
    assert found(raylet, tmp_path / "nowhere")


def test_a_raylet_that_a_job_has_installed_is_none(raylet: int, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "site-packages")
    assert not found(raylet, jobs=tmp_path)
    assert not found(raylet, jobs=tmp_path / "link")
    assert found(raylet, jobs=tmp_path / "site")


@pytest.mark.parametrize("program", ["/bin/bash", "bin/raylet", "fake/raylet/raylet"])
def test_a_process_that_only_calls_itself_raylet_is_none(program: str, tmp_path: Path) -> None:
    path = tmp_path / program
    if not path.exists():
        path.parent.mkdir(parents=True)
        shutil.copy("/bin/bash", path)
    with running(path) as pid:
        leader = {"boot": boot_id(), "leader": pid, "leader_start": start_of(pid), "mark": "m"}
        (tmp_path / "started.json").write_text(json.dumps(leader))
        assert not found(pid)
        assert not found(pid, tmp_path / "started.json")  # not even inside of the Ray that the grid has started
        assert pid not in set(procfs.find_raylets())


def test_a_raylet_that_anybody_could_have_replaced_is_none(tmp_path: Path) -> None:
    program = install_raylet(tmp_path)
    with running(program) as pid:
        assert pid in set(procfs.find_raylets())
        program.chmod(0o757)
        assert not found(pid)
        assert pid not in set(procfs.find_raylets())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize(("runner", "is_one"), [(0, True), (OTHER_USER, False)])
def test_a_raylet_of_another_user_is_one_unless_that_user_runs_it(runner: int, is_one: bool) -> None:
    """A Ray that an administrator has installed for all; and a program that its own user may have made."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        program = install_raylet(Path(folder))
        os.chown(program, OTHER_USER, OTHER_USER)
        with subprocess.Popen([program, "-c", "read x"], stdin=subprocess.PIPE, user=runner) as shell:
            try:
                wait_until(lambda: os.readlink(f"/proc/{shell.pid}/exe") == str(program))
                assert found(shell.pid) is is_one
            finally:
                shell.kill()


def test_a_worker_below_two_raylets_counts_once(tmp_path: Path) -> None:
    """A borrower's task can start Ray's own program."""
    program = install_raylet(tmp_path)
    script = f'"{program}" -c \'"$0" -c "$1" & wait\' "$0" "$1" & wait'
    shell = subprocess.Popen([program, "-c", script, sys.executable, SPIN], start_new_session=True)
    record = tmp_path / "started.json"
    record.write_text(
        json.dumps({"boot": boot_id(), "leader": shell.pid, "leader_start": start_of(shell.pid), "mark": "m"})
    )
    workers = RayWorkers(record)
    workers.loan = RayLoan(cpu_milli=64_000, memory_bytes=1 << 40)
    try:
        wait_until(lambda: len(find_raylets(record, ())) == 2 and workers.measure()[1] >= 64 << 20)
        assert workers.measure()[1] < 120 << 20
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


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


def test_on_a_simulated_node_what_is_not_lent_is_measured_too_and_rays_own_agents_are_not(tmp_path: Path) -> None:
    program = install_raylet(tmp_path)
    agent = "import time; agent = bytearray(400 << 20); time.sleep(1000)"
    script = '"$0" -c "$1" & exec -a ray::DashboardAgent "$0" -c "$2" & wait'
    words = [str(program), "-c", script, sys.executable, SPIN, agent, "--node-name=gpu1"]
    shell = subprocess.Popen(words, start_new_session=True, env=MARKED)
    try:
        wait_until(lambda: any(b"Dashboard" in _command(one.pid) for one in children_of(shell.pid)))
        record = tmp_path / "started.json"
        assert RayWorkers(record, "gpu1").measure() == (0, 0)  # nothing is recorded, nothing is lent
        note = {"boot": boot_id(), "leader": shell.pid, "leader_start": start_of(shell.pid), "mark": "m"}
        record.write_text(json.dumps(note))
        workers = RayWorkers(record, "gpu1")
        wait_until(lambda: workers.measure() == (0, 0) and workers.beyond_loan()[1] >= 60 << 20)
        assert workers.beyond_loan()[1] < 300 << 20
        wait_until(lambda: workers.measure() == (0, 0) and workers.beyond_loan()[0] > 0)
        workers.loan = RayLoan(cpu_milli=64_000, memory_bytes=1 << 40)
        before = workers.beyond_loan()[0]
        assert workers.measure()[1] >= 60 << 20
        assert workers.beyond_loan() == (before, 0)
        assert RayWorkers(record, "gpu2").measure() == (0, 0)
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def start_of(pid: int) -> int:
    proc = read_process(pid)
    return proc.start if proc is not None else 0


def test_a_raylet_belongs_to_the_node_whose_name_it_was_started_under(record, raylet):
    assert RayWorkers(record, "gpu1")._known(0) == []
    words = ["/bin/bash", "-c", "echo there; read line", "raylet", "--node-name=gpu1"]
    named = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert named.stdout is not None
        assert named.stdout.readline() == b"there\n"
        assert is_named(named.pid, "gpu1")
        assert not is_named(named.pid, "gpu")
        assert not is_named(raylet, "gpu1")
    finally:
        named.kill()
        named.communicate()
