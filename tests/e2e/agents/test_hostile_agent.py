"""One node lies about everything its agent can say, while two honest ones run jobs: those do not notice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.agents.conftest import FarGrid, is_running, wait_until
from tests.support.hostile_agent import HostileAgent

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
Make = Callable[..., FarGrid]
HONEST = ("ash", "birch")
MAX_JOB_SECONDS = 20.0
"""For one `true` on a busy machine; a link that breaks costs more than that."""
PAUSE_SECONDS = 0.5
"""Between two jobs of the honest ones: the liar is what keeps the control plane busy here."""


def links_made(grid: FarGrid, name: str) -> int:
    """How often an agent has connected."""
    return grid.agents[name].log.count("linked to a control plane")


def test_an_agent_that_lies_about_everything_harms_nobody_else(far_grid: Make, tmp_path: Path) -> None:
    grid = far_grid(*HONEST, "liar")
    daemon = grid.daemon_pid()
    grid.agents["liar"].kill()
    quiet = ("--workdir", "none", "-a", "0.1")
    jobs = {
        name: grid.detach(
            *quiet, *grid.on(name), "sh", "-c", f"until test -e {tmp_path}/over; do sleep 0.2; done; exit 3"
        )
        for name in HONEST
    }
    for job in jobs.values():
        grid.pid_of(job)
    attempts = [grid.job(job)["attempts"][-1] for job in jobs.values()]
    before = {name: links_made(grid, name) for name in HONEST}
    victims = (*HONEST, "here", "", *(attempt["allocation_id"] for attempt in attempts))
    liar = HostileAgent(grid.host_dir / "links" / "liar.sock", "liar", victims, attempts[-1]["fence"])
    failures: list[BaseException] = []

    def tell() -> None:
        try:
            asyncio.run(liar.tell_all())
        except BaseException as failure:
            failures.append(failure)

    telling = threading.Thread(target=tell)
    telling.start()
    took: list[float] = []
    while telling.is_alive() or len(took) < 4:
        began = time.monotonic()
        assert grid("run-shared", *quiet, *grid.on(HONEST[len(took) % 2], "true")).returncode == 0
        took.append(time.monotonic() - began)
        telling.join(PAUSE_SECONDS)
    assert not failures, failures
    assert max(took) < MAX_JOB_SECONDS, took
    assert min(liar.heard[kind] for kind in ("taken", "rejected")) > 100, liar.heard
    assert sum(liar.heard.values()) > 1500, liar.heard

    assert grid.daemon_pid() == daemon
    assert {name: links_made(grid, name) for name in HONEST} == before, "an honest agent had to connect again"
    assert not [event for event in grid.events("node-suspect") if event["node_id"] in HONEST]
    assert [event["node_id"] for event in grid.events("agent-rejected")][:1] == ["liar"]
    for job in jobs.values():
        assert grid.job(job)["state"] == "running"
        assert len(grid.job(job)["attempts"]) == 1

    grid.kill_daemon()  # and what it has heard does no harm after a restart either
    grid.until_alive(*HONEST, seconds=60)
    (tmp_path / "over").touch()
    for name, job in jobs.items():
        assert grid("jobs", "wait", job, "--timeout", "60").returncode == 3, name
        assert len(grid.job(job)["attempts"]) == 1
        assert grid("run-shared", *quiet, *grid.on(name, "true")).returncode == 0
    grid.agents["liar"].start()
    grid.until_alive("liar", seconds=60)
    assert is_running(grid.daemon_pid())


def test_an_epoch_that_cannot_be_true_is_why_a_node_is_not_alive(far_grid: Make) -> None:
    grid = far_grid("ash", "liar")
    liar = grid.agents["liar"]
    liar.kill()
    wait_until(lambda: grid.state("liar") == "suspect", 30)
    (liar.folder / "epoch.json").write_text('{"epoch": 500000000}')
    liar.start()
    reason = wait_until(lambda: grid.node("liar")["rejected"], 30)
    assert "has seen epoch 500000000" in reason
    assert "remove that file" in reason
    wait_until(lambda: "epoch 500000000" in liar.log)  # it is recorded before the agent is told
    assert "epoch 500000000" in grid("status", check=0).stdout
    assert [event["node_id"] for event in grid.events("agent-rejected")] == ["liar"]
    assert grid("run-shared", "--workdir", "none", *grid.on("ash", "true")).returncode == 0
    refused = grid("run-shared", "--workdir", "none", "--wait", "0", *grid.on("liar", "true"))
    assert "epoch 500000000" in refused.stderr
    liar.kill()
    (liar.folder / "epoch.json").unlink()
    liar.start()
    grid.until_alive("liar", seconds=60)
    grid.kill_daemon()
    grid.until_alive("ash", "liar", seconds=60)
