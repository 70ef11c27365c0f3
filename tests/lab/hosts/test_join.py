"""Joining without SSH: a host of the lab, its agent, and a token over TLS; and everybody who is not let in."""

from __future__ import annotations

import dataclasses
import json
import socket
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed_grid.agent.join_client import JoinToken
from tests.lab.commands import Command
from tests.lab.lab import Lab, problem
from tests.lab.lab_host import Host
from tests.support.project import PROJECT
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.lab
SHARED = {"/opt/grid/src": PROJECT / "src", "/opt/grid/packages": Path(sysconfig.get_path("purelib"))}
RUN = "import sys; from distributed_grid.cli.main import main; main(sys.argv[1:])"


@pytest.fixture(scope="module")
def machines() -> Iterator[Lab]:
    """Two hosts that have the package but no SSH for us: nobody gives them a config."""
    if reason := problem():
        pytest.skip(reason)
    with Lab(("box1", "box2"), share=SHARED) as lab:
        yield lab


class Joiner:
    """`grid agent` on hosts, ended with the test."""

    def __init__(self) -> None:
        self._running: list[Command] = []

    def start(self, host: Host, *words: str) -> Command:
        command = host.popen(["python3", "-c", RUN, "agent", *words], env={"PYTHONPATH": ":".join(SHARED)})
        self._running.append(command)
        return command

    def refused(self, host: Host, *words: str) -> str:
        """The one line with which an agent gave up."""
        done = host.run(["python3", "-c", RUN, "agent", *words], env={"PYTHONPATH": ":".join(SHARED)}, check=False)
        assert done.returncode == 1, done
        assert "Traceback" not in done.stderr
        return str(done.stderr)

    def close(self) -> None:
        for command in self._running:
            command.kill()
            command.wait()


@pytest.fixture
def joiner(machines: Lab) -> Iterator[Joiner]:
    joiner = Joiner()
    yield joiner
    joiner.close()
    for host in machines:
        host.run(["rm", "-rf", f"{host.home}/.distributed_grid"])


@pytest.fixture
def control(machines: Lab, tmp_path: Path) -> Iterator[Shell]:
    """A control plane outside the hosts that listens on their bridge, in TLS."""
    (tmp_path / "here").mkdir()
    shell = Shell(tmp_path / "state", tmp_path / "here")
    with socket.create_server((machines.address, 0)) as free:
        port = free.getsockname()[1]
    started = shell.json("daemon", "start", "--listen", f"{machines.address}:{port}")
    assert started["rest"] == f"https://{machines.address}:{port}"
    yield shell
    shell.close()


def token_of(control: Shell, *words: str) -> dict[str, Any]:
    made: dict[str, Any] = control.json("daemon", "join-token", "create", *words)
    return made


def node(control: Shell, name: str) -> dict[str, Any]:
    found = [row for row in control.observe("status")["nodes"] if row["node_id"] == name]
    return found[0] if found else {"state": "unknown"}


def is_alive(control: Shell, name: str) -> Callable[[], bool]:
    return lambda: bool(node(control, name)["state"] == "alive")


def test_a_host_joins_over_tls_works_and_comes_back_by_itself(control: Shell, machines: Lab, joiner: Joiner) -> None:
    host = machines.host("box1")
    made = token_of(control)
    agent = joiner.start(host, "--join", made["join_token"])
    wait_until(is_alive(control, "box1"), 30)
    ran = control("run-shared", "--strategy", "node_specific", "-n", "box1", "--workdir", "none", "hostname", check=0)
    assert ran.stdout == "box1\n"
    kept = json.loads(host.run(["cat", f"{host.home}/.distributed_grid/agent/joined.json"]).stdout)
    assert kept["node"] == "box1"
    assert (
        kept["key"]
        not in (control.host_dir / "tokens.json").read_text() + (control.host_dir / "daemon.log").read_text()
    )
    control("daemon", "stop", check=0)
    control("daemon", "start", "--listen", kept["address"], check=0)
    wait_until(is_alive(control, "box1"), 30)
    agent.terminate()
    agent.wait()
    joiner.start(host)  # the token is not needed any more
    wait_until(is_alive(control, "box1"), 30)


def test_a_token_lets_nobody_else_in(control: Shell, machines: Lab, joiner: Joiner) -> None:
    made = token_of(control)
    joiner.start(machines.host("box1"), "--join", made["join_token"])
    wait_until(is_alive(control, "box1"), 30)
    assert "used already" in joiner.refused(machines.host("box2"), "--join", made["join_token"])
    assert node(control, "box2")["state"] == "unknown"
    (listed,) = control.json("daemon", "join-token", "list")
    assert listed["used_by"] == "box1"


def test_invalid_join_token_is_refused_with_its_reason(control: Shell, machines: Lab, joiner: Joiner) -> None:
    host = machines.host("box1")
    made = token_of(control)
    good = JoinToken.parse(made["join_token"])
    wrong = dataclasses.replace(good, secret="guessed").text()
    assert "the join token is unknown" in joiner.refused(host, "--join", wrong)
    somebody_else = dataclasses.replace(good, fingerprint="0" * 64).text()
    assert "is not the control plane the token is for" in joiner.refused(host, "--join", somebody_else)
    control("daemon", "join-token", "revoke", made["token_id"], check=0)
    assert "was revoked" in joiner.refused(host, "--join", made["join_token"])
    short = token_of(control, "--ttl", "0.1")
    assert "has expired" in joiner.refused(host, "--join", short["join_token"])
    for_another = token_of(control, "--node", "box9")
    assert "is for the node box9" in joiner.refused(host, "--join", for_another["join_token"], "--name", "box1")
    assert [row["node_id"] for row in control.json("status")["nodes"]] == [socket.gethostname()]


def test_a_node_whose_key_was_revoked_is_out_at_once_and_stays_out(
    control: Shell, machines: Lab, joiner: Joiner
) -> None:
    host = machines.host("box2")
    made = token_of(control, "--node", "far")
    agent = joiner.start(host, "--join", made["join_token"])
    wait_until(is_alive(control, "far"), 30)
    control("daemon", "join-token", "revoke", made["token_id"], check=0)
    wait_until(lambda: node(control, "far")["state"] != "alive", 20)
    log = f"{host.home}/.distributed_grid/agent/agent.log"
    wait_until(lambda: "does not know the key of far" in host.run(["cat", log]).stdout, 20)
    assert node(control, "far")["state"] != "alive"
    again = token_of(control, "--node", "far")
    agent.terminate()
    agent.wait()
    joiner.start(host, "--join", again["join_token"])
    wait_until(is_alive(control, "far"), 30)
