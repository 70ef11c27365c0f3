"""Agents that `grid cluster` has started on real hosts: what goes wrong with them later, and stopping them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.clusters import AGENT, Cluster, agent_of, remains
from tests.lab.lab import Lab
from tests.support.processes import is_running
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def cluster(shared_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(shared_lab, tmp_path_factory.mktemp("agents"))
    yield made
    made.close()
    assert made.clear_leftovers() == {}


@pytest.fixture
def grid(cluster: Cluster, lab: Lab) -> Iterator[Cluster]:
    """One grid for all of these; each test begins with an agent on gpu1, and ends without jobs."""
    cluster.results("start", "gpu1")
    yield cluster
    if left := [job["uid"] for job in cluster.json("jobs", "list") if job["state"] != "ended"]:
        cluster("jobs", "cancel", *left, check=0)


def test_a_name_that_no_node_has_is_refused(grid: Cluster) -> None:
    done = grid("cluster", "start", "gpu9", check=1)
    assert "no node is called gpu9; the nodes are: gpu-master, gpu1, gpu2" in done.stderr


def test_an_agent_that_is_killed_is_started_again(grid: Cluster, lab: Lab) -> None:
    host = lab.host("gpu1")
    first = agent_of(host)
    host.kill(first)
    wait_until(lambda: agent_of(host) not in (0, first) and grid.is_alive("gpu1"), 20)


def test_a_connection_that_breaks_is_made_again_and_the_agent_does_not_notice(grid: Cluster, lab: Lab) -> None:
    host = lab.host("gpu1")
    agent = agent_of(host)
    session = host.find(f"sshd: {lab.user}@")
    host.restart_sshd()
    for pid in session:
        host.kill(pid)
    wait_until(lambda: host.find(f"sshd: {lab.user}@") not in ([], session) and grid.is_alive("gpu1"), 20)
    assert agent_of(host) == agent
    sockets = host.run(["find", host.home, "-type", "s", "-path", "*/run/*"]).stdout.splitlines()
    assert len(sockets) == 1  # that of before is gone


def test_a_host_that_was_rebooted_gets_its_agent_back(grid: Cluster, lab: Lab) -> None:
    host = lab.host("gpu1")
    host.reboot()
    assert agent_of(host) == 0
    wait_until(lambda: agent_of(host) and grid.is_alive("gpu1"), 60, 0.5)


def test_the_ssh_process_may_die(grid: Cluster, lab: Lab) -> None:
    host = lab.host("gpu1")
    agent = agent_of(host)
    child = ssh_child_of(grid)
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: ssh_child_of(grid) not in (0, child) and grid.is_alive("gpu1"), 30)
    assert agent_of(host) == agent
    assert grid("run-shared", "--strategy", "node_specific", "-n", "gpu1", "hostname", check=0).stdout == "gpu1\n"


def test_the_control_plane_may_die_and_its_ssh_process_dies_with_it(grid: Cluster, lab: Lab) -> None:
    host = lab.host("gpu1")
    agent, child = agent_of(host), ssh_child_of(grid)
    grid.kill_daemon()
    wait_until(lambda: not is_running(child), 10)
    grid("status", check=0)
    wait_until(lambda: grid.is_alive("gpu1"), 30)
    assert agent_of(host) == agent


def ssh_child_of(grid: Cluster) -> int:
    """The pid of the control plane's SSH process; 0 where there is none just now."""
    pid = grid.daemon_pid()
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in found:
        if b"distributed_grid.adapters.ssh" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return 0


# ---------------------------------------------------------------- stopping


def test_stopping_a_node_puts_its_jobs_back_into_the_line(grid: Cluster, lab: Lab) -> None:
    grid.results("start", "gpu2")
    job = grid.detach("-n", "gpu1", "--", "sh", "-c", "hostname; sleep 30 # run-of-a-job")
    wait_until(lambda: grid.job(job)["state"] == "running")
    assert grid.job(job)["node_id"] == "gpu1"
    assert grid.results("stop", "gpu1")["gpu1"]["ok"]
    assert remains(lab.host("gpu1"))[0] == []
    moved = wait_until(lambda: (found := grid.job(job))["state"] == "running" and found)
    assert [attempt["node_id"] for attempt in moved["attempts"]] == ["gpu1", "gpu2"]


def test_force_stops_at_once_whatever_still_runs(grid: Cluster, lab: Lab) -> None:
    stubborn = "trap '' TERM; while :; do sleep 1; done # run-of-a-job"
    job = grid.detach("-n", "gpu1", "--", "sh", "-c", stubborn)
    wait_until(lambda: grid.job(job)["state"] == "running")
    began = time.monotonic()
    assert grid.results("stop", "gpu1", "--force")["gpu1"]["ok"]
    assert time.monotonic() - began < 30
    assert remains(lab.host("gpu1"))[0] == []


def test_a_host_that_cannot_be_reached_is_not_called_stopped(grid: Cluster, lab: Lab) -> None:
    lab.cut("gpu1")
    found = grid.results("stop", "gpu1", "--force", check=1)
    assert "its agent may still run there" in found["gpu1"]["detail"]
    assert not grid.node("gpu1")["wanted"]
    lab.heal("gpu1")
    assert grid.results("stop", "gpu1")["gpu1"]["ok"]


def test_two_grids_share_a_node_without_harm(grid: Cluster, lab: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "second"
    folder.mkdir()
    second = Cluster(lab, folder)
    try:
        found = second.results("start", "gpu1")["gpu1"]
        assert "installed" in found["detail"] or "was there already" in found["detail"]
        assert len(lab.host("gpu1").find(AGENT)) == 2
        assert second.results("stop", "gpu1", "--purge")["gpu1"]["ok"]
        assert grid.is_alive("gpu1")
        assert grid("run-shared", "--strategy", "node_specific", "-n", "gpu1", "hostname", check=0).stdout == "gpu1\n"
    finally:
        Shell.close(second)


def test_a_link_whose_host_has_changed_says_so_and_comes_back_when_that_is_settled(grid: Cluster, lab: Lab) -> None:
    host = lab.host("gpu1")
    agent, session = agent_of(host), host.find(f"sshd: {lab.user}@")
    host.new_host_key()
    for pid in session:
        host.kill(pid)
    row = wait_until(lambda: (row := grid.node("gpu1"))["link"] == "down" and "changed" in row["detail"] and row)
    assert f"the host key of {host.address} has changed" in row["detail"]
    lab.trust()
    began = time.monotonic()
    grid.results("start", "gpu1")
    assert time.monotonic() - began < 15
    assert agent_of(host) == agent


def test_a_control_plane_with_wanted_nodes_is_not_idle(grid: Cluster) -> None:
    grid.kill_daemon()
    grid("status", check=0, env={"GRID_IDLE_SECONDS": "1"})
    pid = grid.daemon_pid()
    time.sleep(2.5)  # in which it must not leave
    assert is_running(pid)
    grid.results("stop")
    wait_until(lambda: not is_running(pid))
