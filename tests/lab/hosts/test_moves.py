"""Processes moved between real hosts: cables pulled, agents and guards killed, hosts restarted at states of a move.

Whatever happens: never two of it, never none for longer than it may stand still, and the result once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.clusters import AGENT, Cluster
from tests.lab.lab import Lab
from tests.lab.lab_host import Host
from tests.support.processes import is_running
from tests.support.shell import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]
FREEZE_SECONDS = 5
COMPUTE = """
import os, pathlib, sys, time
mark, where = sys.argv[1], os.environ.get("GRID_NODE", "here")
with open(os.path.expanduser(f"~/{mark}.begun"), "a") as file:
    file.write(where + "\\n")
n = 0
while not pathlib.Path("go").exists() and not pathlib.Path(os.path.expanduser(f"~/{mark}.go")).exists():
    n += 1
    pathlib.Path("n.new").write_bytes(str(n).encode().ljust(1 << 20))
    os.replace("n.new", "n")
    time.sleep(0.05)
pathlib.Path("result").write_text("from " + where)
print("finished on", where)
"""
STARTER = """
import subprocess, sys
with open("out.log", "wb") as out:
    null = subprocess.DEVNULL
    found = subprocess.Popen(sys.argv[1:], stdin=null, stdout=out, stderr=null, start_new_session=True)
    print(found.pid)
    found.returncode = 0
"""


@pytest.fixture(scope="module")
def cluster(shared_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three hosts with agents."""
    made = Cluster(shared_lab, tmp_path_factory.mktemp("moves"))
    made("cluster", "start", check=0, timeout=120)
    yield made
    made.close()


class Work:
    """A process of its own on a host, in a directory of its own."""

    def __init__(self, host: Host, mark: str) -> None:
        self.host, self.mark = host, mark
        self.cwd = f"{host.home}/{mark}"
        host.run(["mkdir", self.cwd])
        host.run(["tee", f"{self.cwd}/compute.py"], input=COMPUTE)
        command = ["python3", "-c", STARTER, "python3", "compute.py", mark]
        self.pid = int(host.run(command, cwd=self.cwd).stdout)
        wait_until(lambda: host.outside(f"{self.cwd}/n").exists())

    def read(self, name: str) -> str:
        return self.host.outside(f"{self.cwd}/{name}").read_text()

    def state(self) -> str:
        """Its state in /proc; empty where it is gone."""
        with contextlib.suppress(OSError):
            return self.host.outside(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return ""

    def goes_on(self) -> bool:
        """Whether it writes."""
        before = self.read("n")
        return bool(wait_until(lambda: self.read("n") != before, FREEZE_SECONDS + 10))

    def begun(self, lab: Lab) -> list[str]:
        """Where it began, on any host."""
        files = [host.outside(f"{host.home}/{self.mark}.begun") for host in lab]
        return [line for file in files if file.exists() for line in file.read_text().split()]

    def let_finish(self, *hosts: Host) -> None:
        for host in hosts:
            host.run(["touch", f"{host.home}/{self.mark}.go"])


@pytest.fixture
def work(shared_lab: Lab, request: pytest.FixtureRequest) -> Iterator[Work]:
    host = shared_lab.host("gpu1")
    made = Work(host, f"work-{abs(hash(request.node.name)) % 10**6}")
    yield made
    shared_lab.mend()
    made.let_finish(*shared_lab)
    for one in shared_lab:
        for pid in one.find(f"compute.py {made.mark}"):
            with contextlib.suppress(ProcessLookupError):
                one.kill(pid)


def execute(cluster: Cluster, work: Work, *words: str) -> str:
    freeze = ("--freeze", str(FREEZE_SECONDS))
    options = ("-n", "gpu1", "-t", "gpu2", "--consent", "--no-wait", *freeze)
    row = cluster.json("offload", "execute", str(work.pid), *options, *words)
    return str(row["move_id"])


def move_of(cluster: Cluster, move_id: str) -> dict[str, Any]:
    found = cluster.query("get_move", move_id=move_id)
    row: dict[str, Any] = found["move"] if found else cluster.json("offload", "status", move_id)
    return row


def ended(cluster: Cluster, move_id: str) -> dict[str, Any]:
    def over() -> dict[str, Any] | None:
        row = move_of(cluster, move_id)
        return row if row["end"] is not None else None

    return wait_until(over, 60, pause=0.2)


def settled(cluster: Cluster, move_id: str) -> dict[str, Any]:
    """The move once its job runs, or it has failed."""

    def row() -> dict[str, Any] | None:
        found = move_of(cluster, move_id)
        return found if found["end"] is not None or found["state"] == "running" else None

    return wait_until(row, 90, pause=0.2)


def test_a_process_goes_from_one_host_to_another_and_its_files_come_back(
    cluster: Cluster, shared_lab: Lab, work: Work
) -> None:
    move_id = execute(cluster, work)
    wait_until(lambda: move_of(cluster, move_id)["state"] == "running", 60)
    assert work.state() == ""
    work.let_finish(shared_lab.host("gpu2"))
    row = ended(cluster, move_id)
    assert (row["end"], row["result"], row["problem"]) == ("done", "exited 0", None)
    assert (work.read("result"), work.read("out.log")) == ("from gpu2", "finished on gpu2\n")
    assert work.begun(shared_lab) == ["here", "gpu2"]


def test_a_process_leaves_the_control_plane_s_own_machine_and_another_comes_there(
    shared_lab: Lab, tmp_path: Path
) -> None:
    """The files of one come out of the local agent and return to it, those of the other are laid out by it."""
    grid = Cluster(shared_lab, tmp_path)
    settings = yaml.safe_load(grid.file.read_text())
    here = {"name": "here", "host": "local", "simulated": True, "cpu_count": 2, "memory_gb": 4}
    grid.file.write_text(yaml.safe_dump({**settings, "nodes": [*settings["nodes"], here]}))
    script = '[ -n "$GRID_NODE" ] && exec cp input result; while :; do sleep 0.2; done'
    words = ["-c", STARTER, "/bin/sh", "work.sh"]  # a program that every host has
    cwd = tmp_path / "work"
    cwd.mkdir()
    (cwd / "input").write_text("forty-two")
    (cwd / "work.sh").write_text(script)
    local = int(subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, check=True).stdout)
    host = shared_lab.host("gpu1")
    there = f"{host.home}/from-gpu1"
    host.run(["mkdir", there])
    host.run(["tee", f"{there}/work.sh"], input=script)
    host.run(["tee", f"{there}/input"], input="forty-three")
    far = int(host.run(["python3", *words], cwd=there).stdout)
    try:
        grid("cluster", "start", "gpu1", "gpu2", check=0, timeout=120)
        for pid, source, target in ((local, "here", "gpu2"), (far, "gpu1", "here")):
            row = grid.json("offload", "execute", str(pid), "-n", source, "-t", target, "--consent", "--no-wait")
            row = ended(grid, row["move_id"])
            assert (row["end"], row["result"], row["problem"]) == ("done", "exited 0", None)
        assert (cwd / "result").read_text() == "forty-two"
        assert host.outside(f"{there}/result").read_text() == "forty-three"
    finally:
        if is_running(local):
            os.kill(local, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            host.kill(far)
        grid.close()


def test_a_source_that_is_cut_off_is_waited_for_and_the_original_goes_on(
    cluster: Cluster, shared_lab: Lab, work: Work
) -> None:
    shared_lab.slow("gpu1", 2000)
    # After the link is healed all has to happen within one freeze; on a busy machine 5 s may not be enough for that.
    move_id = execute(cluster, work, "--freeze", "30")
    shared_lab.cut("gpu1")
    wait_until(lambda: "not connected" in (move_of(cluster, move_id)["waits_for"] or ""), 60)
    assert work.goes_on()
    shared_lab.slow("gpu1", None)
    shared_lab.heal("gpu1")
    row = settled(cluster, move_id)
    assert (row["state"], row["end"]) == ("running", None), row
    work.let_finish(shared_lab.host("gpu2"))
    assert ended(cluster, move_id)["end"] == "done"
    assert work.begun(shared_lab) == ["here", "gpu2"]


@pytest.mark.parametrize("victim", ["cable", "agent", "guards"])
def test_whatever_its_host_loses_while_it_stands_still_it_goes_on_there_or_elsewhere_and_once(
    cluster: Cluster, shared_lab: Lab, work: Work, victim: str
) -> None:
    host = shared_lab.host("gpu1")
    move_id = execute(cluster, work)
    wait_until(lambda: work.state() != "S" and work.state() != "R", 60, pause=0.001)  # stands still, or is dead
    if victim == "cable":
        shared_lab.cut("gpu1")
    else:
        for pid in host.find(AGENT if victim == "agent" else move_id):
            with contextlib.suppress(ProcessLookupError):
                host.kill(pid, signal.SIGKILL)
    wait_until(lambda: work.state() != "T", FREEZE_SECONDS + 10)  # by itself: nobody can tell it while it is cut off
    shared_lab.heal("gpu1")
    row = settled(cluster, move_id)
    if row["end"] is None:
        assert work.state() == ""
        work.let_finish(shared_lab.host("gpu2"))
        assert ended(cluster, move_id)["end"] == "done"
        assert (work.read("result"), work.begun(shared_lab)) == ("from gpu2", ["here", "gpu2"])
    else:
        assert row["end"] == "failed", row
        assert work.goes_on()
        work.let_finish(host)
        wait_until(lambda: work.state() == "")
        assert (work.read("result"), work.begun(shared_lab)) == ("from here", ["here"])


def test_a_target_that_dies_after_the_decision_gives_the_work_to_another_node(
    cluster: Cluster, shared_lab: Lab, work: Work
) -> None:
    move_id = execute(cluster, work)
    wait_until(lambda: move_of(cluster, move_id)["state"] == "running", 60)
    shared_lab.host("gpu2").reboot()
    job = move_of(cluster, move_id)["job_id"]
    wait_until(lambda: len(cluster.job(job)["attempts"]) == 2, 90)
    work.let_finish(*shared_lab)
    row = ended(cluster, move_id)
    assert (row["end"], row["result"]) == ("done", "exited 0")
    first, last = (attempt["node_id"] for attempt in cluster.job(job)["attempts"])
    assert (first, work.read("result")) == ("gpu2", f"from {last}")
    assert sorted(work.begun(shared_lab)).count(last) == 1
