"""The port of REST and of agents that joined: the next control plane has the same, and agents follow where it moves."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed_grid.server.rest.listener import DEFAULT_PORT
from tests.e2e.crashes.conftest import needs_root
from tests.support.joined_agents import NO_CPU, JoinedAgent, start_lending
from tests.support.ports import free_port
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e


def port_of(grid: Shell) -> int:
    return int(grid.json("daemon", "status")["rest"].rpartition(":")[2])


def taken_port(port: int) -> socket.socket | None:
    """A listener of another program at a port; None as long as that is not free."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        return None


@pytest.fixture
def usual_port_taken() -> Iterator[None]:
    """Another program has 7433, as long as the test does not free it."""
    with contextlib.ExitStack() as taken:
        with contextlib.suppress(OSError):  # another program has it indeed
            taken.enter_context(socket.create_server(("127.0.0.1", DEFAULT_PORT)))
        yield


@pytest.fixture
def near(grid: Shell, tmp_path: Path) -> Iterator[JoinedAgent]:
    """An agent of the control plane's login, joined and connected."""
    agent = JoinedAgent(grid, "near", tmp_path / "agent")
    yield agent
    agent.stop()


@pytest.fixture
def apart(grid: Shell, tmp_path: Path) -> Iterator[JoinedAgent]:
    """An agent that cannot reach the state directory, only the network."""
    needs_root("mount over a folder for one process")
    agent = JoinedAgent(grid, "apart", tmp_path / "agent", hidden=grid.state_dir)
    yield agent
    agent.stop()


@pytest.mark.usefixtures("usual_port_taken")
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_the_next_control_plane_has_the_port_of_the_last(grid: Shell, end: str) -> None:
    grid("status", check=0)
    before = port_of(grid)
    assert before != DEFAULT_PORT
    grid("daemon", "stop", check=0) if end == "stop" else grid.kill_daemon()
    told = grid("status", check=0)
    assert port_of(grid) == before
    assert "port" not in told.stderr
    assert grid.json("daemon", "status")["warnings"] == []


@pytest.mark.usefixtures("usual_port_taken")
def test_a_job_outlives_a_port_that_another_program_took(grid: Shell, near: JoinedAgent, tmp_path: Path) -> None:
    start_lending(grid)
    before, gate = port_of(grid), tmp_path / "gate"
    near.join()
    near.until_linked()
    command = ["sh", "-c", f"until [ -e {gate} ]; do sleep 0.1; done"]
    job = grid.detach(*NO_CPU, "--strategy", "node_specific", "-n", "near", "--workdir", "none", *command)
    wait_until(lambda: grid.job(job)["state"] == "running", 60)
    grid.kill_daemon()
    with wait_until(lambda: taken_port(before)):
        said = grid("status", check=0).stderr
    after = port_of(grid)
    notice = f"port {before} of the last control plane is taken by another program"
    assert after != before
    assert notice in said
    assert notice in (grid.host_dir / "daemon.log").read_text()
    assert notice in grid("daemon", "status", check=0).stdout
    near.until_linked(2)
    wait_until(lambda: f"127.0.0.1:{after}" in near.joined["addresses"])
    gate.touch()
    grid("jobs", "wait", job, "--timeout", "60", check=0)
    assert len(grid.job(job)["attempts"]) == 1
    grid.kill_daemon()
    grid("status", check=0)
    assert port_of(grid) == after  # the new one is remembered, and nothing is wrong any more
    assert grid.json("daemon", "status")["warnings"] == []


@pytest.mark.usefixtures("usual_port_taken")  # which the grids of other tests take and free at any time
def test_a_named_port_wins_over_the_remembered_one(grid: Shell) -> None:
    grid("status", check=0)
    remembered, named = port_of(grid), free_port()
    grid("daemon", "start", "--listen", f"127.0.0.1:{named}", check=0)
    assert port_of(grid) == named
    grid("daemon", "stop", check=0)
    (grid.cwd / "c.yaml").write_text(f"server: {{port: {named}}}\n")
    grid("daemon", "start", "-c", "c.yaml", check=0)
    assert port_of(grid) == named
    grid("daemon", "stop", check=0)
    grid("daemon", "start", "-c", "none", check=0)
    assert port_of(grid) == remembered


def test_connected_agents_are_told_of_another_address_before_it_is_used(grid: Shell, apart: JoinedAgent) -> None:
    first, second = free_port(), free_port()
    grid("daemon", "start", "--listen", f"127.0.0.1:{first}", check=0)
    apart.join()
    apart.until_linked()
    assert apart.joined["address"] == f"127.0.0.1:{first}"
    grid("daemon", "start", "--listen", f"127.0.0.1:{second}", check=0)
    apart.until_linked(2)
    wait_until(lambda: apart.joined["address"] == f"127.0.0.1:{second}")
