"""`grid cluster` on real hosts by real SSH: from nothing to running agents and back, and bad nodes."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.clusters import AGENT, Cluster, agent_of, remains
from tests.lab.lab import Lab
from tests.support.project import PROJECT
from tests.support.shell import wait_until

pytestmark = pytest.mark.lab


Starter = Callable[..., Cluster]


@pytest.fixture
def a_cluster(lab: Lab, tmp_path: Path) -> Iterator[Starter]:
    """Makes a cluster of the lab's hosts, each node with these keys more in the config."""
    made: list[Cluster] = []

    def make(**nodes: dict[str, Any]) -> Cluster:
        made.append(Cluster(lab, tmp_path, **nodes))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()
        assert cluster.clear_leftovers() == {}


@pytest.fixture(scope="module")
def shared_cluster(shared_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The control plane of the tests that do not mind what it did before."""
    made = Cluster(shared_lab, tmp_path_factory.mktemp("shared"))
    yield made
    made.close()


@pytest.fixture
def grid(shared_cluster: Cluster, lab: Lab) -> Iterator[Cluster]:
    """The hosts of the lab as its nodes, with nothing on them before and after a test."""
    yield shared_cluster
    shared_cluster.purge_nodes()
    assert shared_cluster.clear_leftovers() == {}


# ---------------------------------------------------------------- the way it is meant


def test_three_hosts_go_from_nothing_to_running_and_back_to_nothing(grid: Cluster, lab: Lab) -> None:
    grid("config", "check", check=0)
    installed = grid.results("install")
    assert all(row["ok"] and "installed 0." in row["detail"] for row in installed.values())
    assert [agent_of(host) for host in lab] == [0, 0, 0]
    started = grid.results("start")
    assert all(row["ok"] and "was there already" in row["detail"] for row in started.values())
    assert [(row["node_id"], row["state"]) for row in grid.json("status")["nodes"]] == [
        (host.name, "alive") for host in lab
    ]
    ran = grid("run-shared", "--strategy", "node_specific", "-n", "gpu2", "sh", "-c", "hostname; whoami", check=0)
    assert ran.stdout.split() == ["gpu2", lab.user]
    for host in lab:
        sockets = host.run(["find", host.home, "-type", "s", "-printf", "%m %h\n"]).stdout.splitlines()
        assert [line.split()[0] for line in sockets] == ["600", "600"], "the link's, and the desk for memory"
        for line in sockets:
            assert host.run(["stat", "-c", "%a", line.split()[1]]).stdout.strip() == "700"
    stopped = grid.results("stop")
    assert {row["detail"] for row in stopped.values()} == {"stopped"}
    for host in lab:
        assert remains(host)[0] == []
        assert host.run(["find", host.home, "-type", "s"]).stdout == ""
    assert {row["detail"] for row in grid.results("stop", "--purge").values()} == {"nothing ran there, removed"}
    assert [remains(host) for host in lab] == [([], [])] * 3


def test_a_purge_removes_no_result_that_was_never_fetched(grid: Cluster, lab: Lab) -> None:
    gpu1, gpu2 = lab.host("gpu1"), lab.host("gpu2")
    assert all(row["ok"] for row in grid.results("start", "gpu1", "gpu2").values())
    (grid.cwd / "shipped.txt").write_text("shipped\n")
    script = "mkdir __pycache__; echo x > __pycache__/y; echo 42 > model.bin; echo trained; echo careful >&2"
    for node in ("gpu1", "gpu2"):
        grid("run-shared", "-j", f"train-{node}", "-n", node, "-w", "60", "sh", "-c", script, check=0)
    grid("run-shared", "-j", "plain", "-n", "gpu1", "-w", "60", "cat", "shipped.txt", check=0)
    # The agent of gpu2 is down: SSH looks there.
    assert grid.results("stop", "gpu2")["gpu2"]["ok"]
    agent = agent_of(gpu1)
    for options in ((), ("--force",)):
        refused = grid.results("stop", "--purge", *options, "gpu1", "gpu2", check=1)
        for node in ("gpu1", "gpu2"):
            assert refused[node]["results"] == [{"job_id": f"train-{node}", "files": 1, "bytes": 3}]
            assert refused[node]["detail"] == (
                f"{node} has results that were never fetched: train-{node} (1 file, 3 bytes); "
                "fetch them with: grid jobs fetch JOB, or remove them with --discard-results"
            )
    assert agent_of(gpu1) == agent
    assert grid.is_alive("gpu1"), "not even drained"
    for host in (gpu1, gpu2):
        assert host.run(["find", host.home, "-name", "model.bin", "-size", "-4c"]).stdout.count("\n") == 1
    # What was fetched may go, and what was printed is read here from now on.
    grid("jobs", "fetch", "train-gpu1", "--to", "results", check=0)
    assert (grid.cwd / "results/model.bin").read_text() == "42\n"
    # A job that ends while its node is drained has results, too: the node is stopped and keeps them.
    go_on = f"{gpu1.home}/go-on"
    last_words = f"until test -e {go_on}; do sleep 0.05; done; echo 7 > late.bin; echo late; exit 0"
    code = f"trap '{last_words}' TERM; echo ready; while :; do sleep 0.05; done"
    grid.detach("-j", "late", "-n", "gpu1", "-w", "60", "--grace", "60", "sh", "-c", code)
    wait_until(lambda: grid("jobs", "logs", "late").stdout == "ready\n")
    grid("jobs", "cancel", "late", check=0)
    with ThreadPoolExecutor() as threads:
        purge = threads.submit(grid.results, "stop", "--purge", "gpu1", check=1)
        wait_until(lambda: grid.node("gpu1")["state"] == "draining")
        gpu1.run(["touch", go_on])
        late = purge.result()["gpu1"]
    assert late["detail"].startswith(
        "stopped, but nothing was removed: gpu1 has results that were never fetched: late "
    )
    assert late["results"] == [{"job_id": "late", "files": 1, "bytes": 2}]
    assert not agent_of(gpu1)
    assert grid.results("start", "gpu1")["gpu1"]["ok"]
    grid("jobs", "fetch", "late", "--to", "results", check=0)
    assert grid.results("stop", "--purge", "gpu1")["gpu1"]["detail"] == "stopped, removed"
    assert "needs --purge" in grid("cluster", "stop", "--discard-results", "gpu2", check=2).stderr
    insisted = grid.results("stop", "--purge", "--discard-results", "gpu2")
    assert insisted["gpu2"]["detail"] == "nothing ran there, removed"
    assert [remains(host) for host in (gpu1, gpu2)] == [([], [])] * 2
    for node in ("gpu1", "gpu2"):
        logs = grid("jobs", "logs", f"train-{node}", check=0)
        assert (logs.stdout, logs.stderr) == ("trained\n", "careful\n")
    assert grid("jobs", "logs", "plain", check=0).stdout == "shipped\n"
    assert grid("jobs", "logs", "late", check=0).stdout == "ready\nlate\n"


def test_what_the_page_about_clusters_tells_to_type_works(grid: Cluster) -> None:
    page = (PROJECT / "docs/guide/cluster.md").read_text()
    typed = re.findall(r"^\$ grid (.*)$", page, re.MULTILINE)
    assert len(typed) > 5
    for line in typed:
        said = grid(*shlex.split(line), check=0, timeout=120).stdout
        if line.startswith("run-shared"):
            assert said == "gpu2\n"


def test_what_the_readme_tells_to_type_about_three_machines_works(grid: Cluster) -> None:
    readme = (PROJECT / "README.md").read_text()
    block = readme[readme.index("## Three machines") :].split("```text\n")[1].split("```")[0]
    (grid.cwd / "train.py").write_text(
        "import pathlib, socket\npathlib.Path('out').mkdir()\n"
        "pathlib.Path('out/result.txt').write_text(f'trained on {socket.gethostname()}\\n')\n"
    )
    typed = re.findall(r"^\$ grid (.*)$", block, re.MULTILINE)
    assert [line.split()[0] for line in typed] == ["cluster", "status", "run-shared", "cluster"]
    for line in typed:
        grid(*shlex.split(line), check=0, timeout=120)
    assert (grid.cwd / "out/result.txt").read_text() == block.split("$ cat out/result.txt\n")[1].split("$")[0]


def test_the_steps_of_each_node_are_told(grid: Cluster) -> None:
    lines = grid("cluster", "start", "gpu1", check=0).stdout.splitlines()
    for step in ("connecting", "sending 7 of 7 wheels", "building the environment", "starting the agent"):
        assert f"gpu1: {step}" in lines
    assert lines[-1].split()[:2] == ["gpu1", "done"]
    again = grid("cluster", "start", "gpu1", check=0).stdout
    assert "wheels" not in again
    assert "building" not in again


def test_status_says_where_each_node_is_and_what_runs_there(a_cluster: Starter, lab: Lab) -> None:
    grid = a_cluster()
    (before,) = grid.json("cluster", "status", "gpu1")
    assert (before["state"], before["wanted"], before["link"]) == ("joining", False, None)
    assert (before["stopped"], before["keeps"]) == (True, ["stopped; type: grid cluster start gpu1"])
    assert "stopped" in grid("cluster", "status", "gpu1", check=0).stdout
    grid.results("start", "gpu1")
    (row,) = grid.json("cluster", "status", "gpu1")
    assert row["address"] == f"{lab.user}@{lab.host('gpu1').address}"
    assert (row["state"], row["wanted"], row["link"], row["jobs"]) == ("alive", True, "up", 0)
    assert row["stopped"] is False
    assert row["version"].startswith("0.")
    assert row["python"].startswith("3.")
    assert "gpu1" in grid("cluster", "status", check=0).stdout


def test_the_agent_of_a_node_that_leaves_the_config_is_stopped(a_cluster: Starter, lab: Lab) -> None:
    grid = a_cluster()
    grid.results("start", "gpu1", "gpu2")
    grid.detach("-j", "work", "-n", "gpu2", "-w", "600", "sleep", "300")
    wait_until(lambda: grid.job("work")["state"] == "running")
    assert grid.job("work")["node_id"] == "gpu2"
    grid("daemon", "stop", check=0)
    whole = grid.file.read_text()
    document = yaml.safe_load(whole)
    document["nodes"] = [node for node in document["nodes"] if node["name"] != "gpu2"]
    grid.file.write_text(yaml.safe_dump(document))
    grid("daemon", "start", check=0)
    wait_until(lambda: not lab.host("gpu2").find(AGENT), 60)
    wait_until(lambda: grid.job("work")["node_id"] != "gpu2", 60)
    assert agent_of(lab.host("gpu1"))
    grid("jobs", "cancel", "work", check=0)
    grid("daemon", "stop", check=0)
    grid.file.write_text(whole)  # so that what was installed there is removed with the rest


def test_a_node_of_this_machine_needs_nothing(a_cluster: Starter) -> None:
    grid = a_cluster(gpu2={"host": "local"})
    for verb in ("install", "start"):
        assert grid.results(verb, "gpu2")["gpu2"] == {
            "node_id": "gpu2",
            "ok": True,
            "detail": "runs inside the control plane",
        }


# ---------------------------------------------------------------- one bad node


def test_bad_nodes_are_told_and_never_stop_the_others(a_cluster: Starter, lab: Lab, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    grid = a_cluster(gpu1={"port": 2299}, gpu2={"ssh_key_path": str(tmp_path / "other")})
    found = grid.results("start", check=1)
    assert found["gpu-master"]["ok"]
    assert (
        found["gpu1"]["detail"]
        == f"{lab.host('gpu1').address} port 2299 refused the connection: is sshd running there?"
    )
    assert f"permission denied for {lab.user}@{lab.host('gpu2').address}" in found["gpu2"]["detail"]
    assert grid.is_alive("gpu-master")
    assert not grid.node("gpu1")["wanted"]


def test_a_node_without_the_python_that_was_named_says_so(a_cluster: Starter) -> None:
    grid = a_cluster(gpu1={"python": "/nowhere/bin/python3; touch /tmp/grid-was-here"})
    found = grid.results("install", "gpu1", "gpu2", check=1)
    assert found["gpu1"]["detail"].startswith("it has no /nowhere/bin/python3; touch")
    assert found["gpu2"]["ok"]  # and nothing of the name was run, or `remains` finds it


def test_a_host_that_does_not_answer_fails_alone_and_in_time(a_cluster: Starter, lab: Lab) -> None:
    grid = a_cluster()
    lab.cut("gpu1")
    began = time.monotonic()
    found = grid.results("install", check=1)
    assert time.monotonic() - began < 20
    assert [found[name]["ok"] for name in ("gpu-master", "gpu1", "gpu2")] == [True, False, True]
    assert "no answer from" in found["gpu1"]["detail"] or "cannot be reached" in found["gpu1"]["detail"]


def test_a_full_disk_is_told(grid: Cluster, lab: Lab) -> None:
    lab.host("gpu1").fill_disk()
    found = grid.results("install", "gpu1", check=1)
    assert "free" in found["gpu1"]["detail"] or "No space" in found["gpu1"]["detail"]
    lab.host("gpu1").free_disk()
    grid.results("install", "gpu1")


# ---------------------------------------------------------------- host keys


def test_a_host_never_seen_is_refused_with_its_fingerprint(a_cluster: Starter, tmp_path: Path) -> None:
    known = tmp_path / "known"
    grid = a_cluster(gpu1={"known_hosts": str(known)})
    detail = grid.results("install", "gpu1", check=1)["gpu1"]["detail"]
    assert "is not known (ssh-ed25519 SHA256:" in detail
    assert "ssh-keyscan" in detail
    assert not known.exists()


def test_with_accept_new_the_first_key_is_written_down_and_another_is_refused(
    a_cluster: Starter, lab: Lab, tmp_path: Path
) -> None:
    known, host = tmp_path / "ours" / "known", lab.host("gpu1")
    grid = a_cluster(gpu1={"known_hosts": str(known), "accept_new": True})
    grid.results("install", "gpu1")
    assert known.stat().st_mode & 0o777 == 0o600
    (line,) = known.read_text().splitlines()
    assert line.split()[:2] == [host.address, "ssh-ed25519"]
    grid.results("install", "gpu1")
    assert known.read_text() == line + "\n"
    host.new_host_key()
    time.sleep(4)  # until the connection of before is closed
    detail = grid.results("install", "gpu1", check=1)["gpu1"]["detail"]
    assert f"the host key of {host.address} has changed" in detail
    assert f"ssh-keygen -R '{host.address}' -f {known}" in detail
    assert detail.count("SHA256:") == 2
    assert known.read_text() == line + "\n"
    known.unlink()
    grid.results("install", "gpu1")


# ---------------------------------------------------------------- the way there


def test_a_node_behind_another_is_reached_through_it(a_cluster: Starter, lab: Lab) -> None:
    grid = a_cluster(gpu1={"proxy_jump": "gpu2"})
    grid.results("start", "gpu1")
    assert grid.is_alive("gpu1")
    accepted = [
        line for line in lab.host("gpu1").outside("/var/log/sshd.log").read_text().splitlines() if "Accepted" in line
    ]
    assert f"from {lab.host('gpu2').address} " in accepted[-1]


def test_sshs_own_configuration_says_what_the_cluster_file_does_not(a_cluster: Starter, lab: Lab) -> None:
    grid = a_cluster(gpu1={"host": "box", "user": None, "ssh_key_path": None, "known_hosts": None})
    text = grid.file.read_text()
    grid.file.write_text("\n".join(line for line in text.splitlines() if not line.endswith(" null")) + "\n")
    ssh = Path(grid.env["HOME"]) / ".ssh"
    ssh.mkdir(mode=0o700, parents=True)
    (ssh / "known_hosts").write_text(lab.known_hosts.read_text())
    (ssh / "config").write_text(
        f"Host box\n  HostName {lab.host('gpu1').address}\n  User {lab.user}\n  IdentityFile {lab.key_path}\n"
        f"  ProxyJump {lab.user}@{lab.host('gpu2').address}\n"
        f"Host {lab.host('gpu2').address}\n  IdentityFile {lab.key_path}\n"
    )
    grid.results("start", "gpu1")
    assert grid.is_alive("gpu1")


def test_a_server_that_forwards_nothing_is_told(a_cluster: Starter, lab: Lab) -> None:
    grid, host = a_cluster(), lab.host("gpu1")
    config = host.outside("/etc/ssh/lab_sshd_config")
    before = config.read_text()
    config.write_text(before + "AllowStreamLocalForwarding no\n")
    try:
        host.restart_sshd()
        found = grid.results("start", "gpu1", check=1)["gpu1"]["detail"]
        assert "its sshd does not forward Unix sockets: allow it there (AllowStreamLocalForwarding yes" in found
    finally:
        config.write_text(before)
        host.restart_sshd()
