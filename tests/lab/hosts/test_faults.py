"""Cables pulled, processes killed, clocks wrong, disks full, on real hosts: nothing is lost and nothing runs twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.clusters import AGENT, Cluster, agent_of
from tests.lab.lab import Lab
from tests.lab.lab_host import Host
from tests.support.processes import is_running
from tests.support.project import PROJECT
from tests.support.shell import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]
SHORT_HOLD = 10


@pytest.fixture(scope="module")
def cluster(shared_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three hosts with agents, and the usual hold of a minute."""
    made = Cluster(shared_lab, tmp_path_factory.mktemp("faults"))
    made("cluster", "start", check=0, timeout=120)
    yield made
    made.close()


@pytest.fixture(scope="module")
def hasty(shared_lab: Lab, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The same hosts in another grid, with a short hold."""
    made = Cluster(shared_lab, tmp_path_factory.mktemp("hasty"), top={"hold_seconds": SHORT_HOLD})
    made("cluster", "start", "gpu1", "gpu2", check=0, timeout=120)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def mended(shared_lab: Lab) -> Iterator[None]:
    yield
    shared_lab.mend()


def on(name: str, *words: str) -> list[str]:
    return ["--strategy", "node_specific", "-n", name, "--workdir", "none", *words]


def runs(host: Host, mark: str) -> bool:
    """Whether a command with this mark is there."""
    return bool(host.find(mark))


def test_a_job_goes_on_while_its_agent_is_killed_and_comes_back(cluster: Cluster, shared_lab: Lab) -> None:
    host = shared_lab.host("gpu1")
    job = cluster.detach(*on("gpu1", "sh", "-c", "echo begun; sleep 8; echo done; exit 3"))
    wait_until(lambda: cluster.job(job)["state"] == "running")
    host.kill(agent_of(host), signal.SIGKILL)
    wait_until(lambda: agent_of(host), 30)
    wait_until(lambda: cluster.is_alive("gpu1"), 30)
    assert cluster("jobs", "wait", job, "--timeout", "40").returncode == 3
    assert cluster("jobs", "logs", job, check=0).stdout.split() == ["begun", "done"]
    assert len(cluster.job(job)["attempts"]) == 1


def test_a_checkpoint_reaches_another_host_through_a_pulled_cable_and_a_killed_control_plane(
    cluster: Cluster, shared_lab: Lab
) -> None:
    script = """cd "$GRID_CHECKPOINT_DIR"; [ -e step ] && cat step part && exit 0
    head -c 1000000 /dev/zero | tr '\\0' x > part; hostname > new; mv new step; exec sleep 600"""
    job = cluster.detach("-a", "0.1", "-n", "gpu1", "--workdir", "none", "sh", "-c", script)
    attempt = wait_until(
        lambda: cluster.job(job)["node_id"] == "gpu1" and cluster.job(job)["attempts"][0]["allocation_id"]
    )
    host = shared_lab.host("gpu1")
    wait_until(lambda: host.run(["find", host.home, "-path", f"*{attempt}/checkpoints/step"]).stdout)
    shared_lab.slow(host, 2000)  # its checkpoint takes seconds
    cluster("resource-sharing", "cooldown", "--node", "gpu1", "--wait", "0")
    wait_until(lambda: (cluster.job(job)["checkpoint"] or {}).get("awaited_attempt") == 1, 30)
    shared_lab.cut(host)
    cluster.kill_daemon()
    assert cluster.job(job)["checkpoint"]["awaited_attempt"] == 1, "it came through before the cable was pulled"
    assert len([one for one in cluster.job(job)["attempts"] if one["started_at"]]) == 1
    shared_lab.mend()
    try:
        assert cluster("jobs", "wait", job, "--timeout", "60").returncode == 0
    finally:
        cluster("resource-sharing", "cooldown", "--node", "gpu1", "--off")
    assert cluster.job(job)["node_id"] != "gpu1"
    assert cluster("jobs", "logs", job, check=0).stdout == host.name + "\n" + "x" * 1_000_000


def test_the_control_plane_is_killed_during_fifty_jobs_over_three_nodes(cluster: Cluster, shared_lab: Lab) -> None:
    for host in shared_lab:
        host.run(["rm", "-f", f"{host.home}/tally"])
    script = "echo $GRID_JOB_ID >> ~/tally; sleep 4"
    jobs = [
        cluster.detach("-a", "0.1", "-j", f"fifty-{number}", "--workdir", "none", "sh", "-c", script)
        for number in range(25)
    ]
    cluster.kill_daemon()
    jobs += [
        cluster.detach("-a", "0.1", "-j", f"fifty-{number}", "--workdir", "none", "sh", "-c", script)
        for number in range(25, 50)
    ]
    time.sleep(2)
    cluster.kill_daemon()
    assert cluster("jobs", "wait", *jobs, "--timeout", "120", timeout=150).returncode == 0
    ran = Counter(
        word for host in shared_lab for word in host.run(["cat", f"{host.home}/tally"], check=False).stdout.split()
    )
    assert ran == Counter(f"fifty-{number}" for number in range(50))
    rows = {row["job_id"]: row for row in cluster.json("jobs", "list", "--all", "--limit", "1000")}
    assert len({rows[job]["node_id"] for job in jobs}) == 3


def test_a_partition_shorter_than_the_hold_costs_nothing(cluster: Cluster, shared_lab: Lab) -> None:
    follower = cluster.start(
        "run-shared", *on("gpu2", "sh", "-c", "for i in 1 2 3 4 5 6 7 8 9; do echo $i; sleep 1.6; done")
    )
    wait_until(lambda: cluster.node("gpu2")["jobs"] == 1)
    shared_lab.cut(shared_lab.host("gpu2"))
    wait_until(lambda: cluster.node("gpu2")["state"] == "suspect", 20)
    time.sleep(2)
    shared_lab.heal(shared_lab.host("gpu2"))
    out, _ = follower.communicate(timeout=90)
    assert follower.returncode == 0
    assert out.split() == [str(number).encode() for number in range(1, 10)]
    wait_until(lambda: cluster.is_alive("gpu2"), 40)


def test_a_partition_longer_than_the_hold_stops_the_job_there_before_anything_is_lent_again(
    hasty: Cluster, shared_lab: Lab
) -> None:
    host = shared_lab.host("gpu2")
    job = hasty.detach(*on("gpu2", "-a", "2", "--grace", "1", "sleep", "86411"))
    wait_until(lambda: runs(host, "sleep 86411"))
    shared_lab.cut(host)
    seen_over = []
    for _ in range(400):
        there, over = runs(host, "sleep 86411"), hasty.job(job)["state"] == "ended"
        assert not (there and over), "given up while it still ran"
        if over:
            seen_over.append(there)
            break
        time.sleep(0.1)
    assert seen_over == [False]
    assert hasty.job(job)["outcome"] == "lost"
    shared_lab.heal(host)
    wait_until(lambda: hasty.is_alive("gpu2"), 60)
    late = wait_until(lambda: hasty.events("late-report"), 20)
    assert late[0]["node_id"] == "gpu2"
    assert hasty.job(job)["outcome"] == "lost"
    assert hasty("run-shared", *on("gpu2", "-a", "1", "true"), timeout=90).returncode == 0


def test_with_the_agent_dead_too_the_shim_stops_the_job_when_the_hold_is_over(hasty: Cluster, shared_lab: Lab) -> None:
    host = shared_lab.host("gpu1")
    job = hasty.detach(*on("gpu1", "--grace", "1", "sleep", "86412"))
    wait_until(lambda: runs(host, "sleep 86412"))
    shared_lab.cut(host)
    for pid in host.find(AGENT):
        host.kill(pid, signal.SIGKILL)
    assert runs(host, "sleep 86412")
    wait_until(lambda: not runs(host, "sleep 86412"), SHORT_HOLD + 8)
    assert hasty.job(job)["state"] != "ended", "given up while it may still have run"
    assert wait_until(lambda: hasty.job(job)["outcome"], 30) == "lost"
    shared_lab.heal(host)
    wait_until(lambda: hasty.is_alive("gpu1"), 60)


def test_a_wrong_clock_on_a_node_changes_nothing(shared_lab: Lab, needs_skew: None, tmp_path: Path) -> None:
    skews = {"gpu1": 30, "gpu2": -30}
    for name, skew in skews.items():
        shared_lab.host(name).skew_seconds(skew)
    grid = Cluster(shared_lab, tmp_path, top={"hold_seconds": SHORT_HOLD})
    try:
        grid("cluster", "start", *skews, check=0, timeout=120)
        script = f"sleep {SHORT_HOLD + 3}; echo whole"
        for long in [grid.start("run-shared", *on(name, "sh", "-c", script)) for name in skews]:
            out, err = long.communicate(timeout=90)
            assert (long.returncode, out) == (0, b"whole\n"), err
        for name in skews:
            short = grid("run-shared", "--timeout", "1", *on(name, "sleep", "60"), timeout=90)
            assert short.returncode == 124
            assert grid.node(name)["state"] == "alive"
    finally:
        grid.close()


def test_a_node_whose_disk_is_full_says_so_and_works_again_afterwards(cluster: Cluster, shared_lab: Lab) -> None:
    host = shared_lab.host("gpu1")
    running = cluster.detach(*on("gpu1", "sh", "-c", "sleep 6; exit 5"))
    wait_until(lambda: cluster.job(running)["state"] == "running")
    host.fill_disk()
    wait_until(lambda: cluster.lends_nothing_because("gpu1", "disk"), 30)
    refused = cluster("run-shared", "-w", "1", *on("gpu1", "true"), timeout=90)
    assert refused.returncode == 124
    assert "disk" in refused.stderr, refused.stderr
    wait_until(lambda: not runs(host, "sleep 6"))
    assert cluster.is_alive("gpu1")
    host.free_disk()
    assert cluster("jobs", "wait", running, "--timeout", "60").returncode == 5
    assert cluster("run-shared", *on("gpu1", "true"), timeout=90).returncode == 0


def test_a_host_that_restarts_comes_back_and_what_ran_there_is_lost(cluster: Cluster, shared_lab: Lab) -> None:
    host = shared_lab.host("gpu2")
    job = cluster.detach(*on("gpu2", "sleep", "86413"))
    wait_until(lambda: runs(host, "sleep 86413"))
    host.reboot()
    assert not runs(host, "sleep 86413")
    wait_until(lambda: cluster.is_alive("gpu2"), 60)
    assert wait_until(lambda: cluster.job(job)["outcome"], 30) == "lost"
    assert cluster("run-shared", *on("gpu2", "true"), timeout=90).returncode == 0


def test_results_come_back_after_the_connection_was_lost(cluster: Cluster, shared_lab: Lab) -> None:
    (cluster.cwd / "train.py").write_text(
        "import os, time\nos.makedirs('out')\ntime.sleep(3)\n"
        "open('out/model', 'w').write('weights')\nprint('trained')\n"
    )
    words = ["-r", "cpu", "-a", "1", "-n", "gpu2", "--workdir", ".", "--fetch", "out/**", "python", "train.py"]
    run = cluster.start("run-shared", *words)
    wait_until(lambda: cluster.node("gpu2")["jobs"] == 1)
    shared_lab.cut(shared_lab.host("gpu2"))
    time.sleep(6)
    shared_lab.heal(shared_lab.host("gpu2"))
    out, err = run.communicate(timeout=90)
    assert (run.returncode, out) == (0, b"trained\n"), err
    assert (cluster.cwd / "out/model").read_text() == "weights"


def test_an_agent_that_lies_is_not_believed(cluster: Cluster, shared_lab: Lab) -> None:
    """It comes over a node's own socket and claims sizes, nodes and ends that are not its own."""
    link = cluster.host_dir / "links" / "gpu1.sock"
    liar = PROJECT / "tests/lab/hostile_agent.py"
    job = cluster.detach(*on("gpu2", "sleep", "86414"))
    wait_until(lambda: cluster.job(job)["state"] == "running")
    attempt = cluster.job(job)["attempts"][-1]
    said = subprocess.run(
        [sys.executable, str(liar), str(link), attempt["allocation_id"], str(attempt["fence"])],
        capture_output=True,
        text=True,
        timeout=60,
    )
    answers = json.loads(said.stdout)
    assert "not a message" in answers["absurd capacity"]
    assert "gpu1's, not gpu2's" in answers["another node"]
    assert "not a message" in answers["garbage"]
    assert "upgrade" in answers["another protocol"]
    assert answers["too large"]
    assert answers["somebody else's job"] == "no effect seen"
    assert cluster.job(job)["state"] == "running"
    assert is_running(cluster.daemon_pid())
    cluster("jobs", "cancel", job, check=0)
    wait_until(lambda: cluster.is_alive("gpu1"), 60)
