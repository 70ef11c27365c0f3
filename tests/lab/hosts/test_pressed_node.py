"""A pressed node with five pieces of work: the two that can leave are proposed, moved, and finish exactly once."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.clusters import Cluster
from tests.lab.lab import Lab
from tests.lab.lab_host import Host
from tests.support.shell import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(240)]

MARKS = {"memory_pressure_high": 0.4, "memory_pressure_low": 0.15}
"""Of the 3 GB of a host: each of the two that can leave holds a quarter."""
COMPUTE = """
import time
with open("starts", "a") as file: file.write("started\\n")
held = b"x" * 800_000_000
is_first = len(open("starts").readlines()) == 1  # the first run is at work until it is moved
time.sleep(200 if is_first else 1)
found = 0
for number in range(1_000_000): found = (found * 31 + number) % 1000003
with open("result.txt", "w") as file: file.write(f"{found}\\n")
print("the result is", found, flush=True)
"""
COUNTING = """
import os, pathlib, time
saved = pathlib.Path(os.environ["GRID_CHECKPOINT_DIR"], "step")
step = int(saved.read_text()) if saved.exists() else 0
print("begins at", step, "on", os.environ["GRID_NODE"], flush=True)
held = b"x" * 800_000_000
while step < 60:
    time.sleep(3 if os.environ["GRID_NODE"] == "gpu-master" else 0.05)
    step += 1
    new = saved.with_suffix(".new")
    new.write_text(str(step))
    new.rename(saved)
    pathlib.Path(os.environ["GRID_CHECKPOINT"]).touch()
print("counted to", step, flush=True)
"""
SERVER = "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); time.sleep(600)"
LOCKING = "import fcntl, time; f = open('/tmp/elsewhere.lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX); time.sleep(600)"
TYPING = "import pty, sys; pty.spawn([sys.executable, '-c', 'import time; time.sleep(600)', 'interactive-of-the-test'])"


@pytest.fixture(scope="module")
def cluster(shared_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    top = {"execution": {"resource_sharing": {"thresholds": MARKS}}}
    made = Cluster(shared_lab, tmp_path_factory.mktemp("pressed"), top=top)
    made("cluster", "start", check=0, timeout=120)
    wait_until(lambda: all(made.is_alive(name) for name in ("gpu-master", "gpu1", "gpu2")), 60)
    yield made
    made.close()


@pytest.fixture
def others(shared_lab: Lab) -> Iterator[dict[str, subprocess.Popen[Any]]]:
    """The three processes on gpu-master that have to stay."""
    host = shared_lab.host("gpu-master")
    programs = {"typing": TYPING, "server": SERVER, "locking": LOCKING}
    started = {
        name: host.popen(["setsid", "-w", "python3", "-c", f"mark = '{name}-of-the-test'\n{program}"], stdin=-3)
        for name, program in programs.items()
    }
    yield started
    for one in started.values():
        one.kill()
    for pid in [pid for name in programs for pid in host.find(f"{name}-of-the-test")]:
        with contextlib.suppress(ProcessLookupError):
            host.kill(pid)
    for one in started.values():
        one.wait()


def compute(host: Host) -> int:
    """Start the computation in the background, as a person would; its pid."""
    folder = f"{host.home}/computation"
    host.run(["mkdir", "-p", folder])
    host.run(["sh", "-c", f"cat > {folder}/compute.py"], input=COMPUTE)
    host.run(["sh", "-c", f"cd {folder} && setsid -f python3 compute.py > out.log 2>&1 < /dev/null"])
    (pid,) = wait_until(lambda: host.find(" compute.py"))
    assert isinstance(pid, int)
    return pid


def expected_result() -> int:
    found = 0
    for number in range(1_000_000):
        found = (found * 31 + number) % 1000003
    return found


def memory_level(grid: Cluster, name: str) -> float:
    (row,) = [row for row in grid.observe("status")["nodes"] if row["node_id"] == name]
    return float(row["memory_used_gb"] / row["memory_gb"])


def test_the_right_two_of_five_are_moved_and_finish_exactly_once(
    cluster: Cluster, shared_lab: Lab, others: dict[str, subprocess.Popen[Any]]
) -> None:
    host = shared_lab.host("gpu-master")
    words = (
        "-n",
        "gpu-master",
        "-r",
        "memory",
        "-a",
        "1",
        "--workdir",
        "none",
        "-j",
        "counting",
        "python3",
        "-c",
        COUNTING,
    )
    cluster.detach(*words)
    wait_until(lambda: cluster.job("counting")["attempts"][-1]["checkpoint_at"], 60)
    assert cluster.job("counting")["node_id"] == "gpu-master"
    pid = compute(host)

    found: list[dict[str, Any]] = []

    def are_advised() -> bool:
        found[:] = cluster.json("offload", "scan", "-n", "gpu-master")["proposals"]
        return sum(row["recommended"] for row in found) >= 2

    try:
        wait_until(are_advised, 90, pause=1)
    except AssertionError:
        pytest.fail(f"the last proposals: {found}; the nodes: {cluster.observe('status')['nodes']}")
    chosen = {row["job_id"] or row["pid"] for row in found if row["recommended"]}
    assert chosen == {"counting", pid}
    ways = {row["job_id"] or row["pid"]: row["way"] for row in found}
    assert (ways["counting"], ways[pid]) == ("checkpoint_restart", "process_restart")
    stays = {name: _row(found, f"{name}-of-the-test") for name in ("interactive", "server", "locking")}
    assert not any(row["movable"] for row in stays.values())
    assert "terminal" in " ".join(stays["interactive"]["obstacles"])
    assert "listens" in " ".join(stays["server"]["obstacles"])
    assert "/tmp/elsewhere.lock" in " ".join(stays["locking"]["obstacles"])

    moves = cluster.json("offload", "execute", "--all-recommended", "-n", "gpu-master", "--consent", timeout=120)
    assert {move["target_node"] for move in moves} <= {"gpu1", "gpu2"}
    assert not host.find(" compute.py")
    wait_until(lambda: cluster.job("counting")["state"] == "ended", 120, pause=0.5)
    wait_until(lambda: not cluster.observe("offload", "status"), 120, pause=0.5)

    ended = cluster.json("offload", "status", "--all")
    assert [(move["end"], move["problem"]) for move in ended] == [("done", None)] * 2
    folder = f"{host.home}/computation"
    assert host.run(["cat", f"{folder}/out.log"]).stdout.startswith("the result is ")
    assert int(host.run(["cat", f"{folder}/result.txt"]).stdout) == expected_result()
    assert host.run(["cat", f"{folder}/starts"]).stdout == "started\nstarted\n"  # here, and once elsewhere
    job = cluster.job("counting")
    assert (job["exit_code"], len(job["attempts"])) == (0, 2)
    output = cluster("jobs", "logs", "counting", check=0).stdout.splitlines()
    assert output[-1] == "counted to 60"
    assert output[-2].startswith("begins at ")
    assert int(output[-2].split()[2]) > 0
    assert all(one.poll() is None for one in others.values())
    low = MARKS["memory_pressure_low"]
    wait_until(lambda: memory_level(cluster, "gpu-master") < low, 30, pause=1)


def _row(found: list[dict[str, Any]], mark: str) -> dict[str, Any]:
    """The row of the process with this mark in its command: the innermost where it was started by another."""
    rows = [row for row in found if row["process"] and any(mark in word for word in row["process"]["argv"])]
    return max(rows, key=lambda row: int(row["pid"]))
