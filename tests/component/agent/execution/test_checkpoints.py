"""Checkpoint marks and notices with real commands: a job's files, and an agent's reports about them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_grid import wire
from distributed_grid.agent.agent import Agent
from distributed_grid.agent.execution.host import AttemptHost
from distributed_grid.domain.jobs import Command, Ending
from distributed_grid.domain.resources import Claim
from tests.component.agent.execution.test_refusals import Control, until, with_an_agent

pytestmark = pytest.mark.e2e
RULES = wire.OwnerRules(
    cpu_busy_max_milli=1000,
    memory_used_max_milli=1000,
    memory_min_bytes=0,
    gpu_busy_max_milli=1000,
    gpu_memory_min_bytes=0,
    throttle=False,
    pause=False,
    evict=False,
    notice_ms=1_200,
)


def a_start(script: str, *, lease: str = "a.1", cwd: str = "") -> wire.StartAttemptOrder:
    command = Command(("/bin/sh", "-c", script), (("PATH", "/usr/bin:/bin"),), cwd=cwd, grace_ms=5_000)
    return wire.StartAttemptOrder(
        node="gpu1", lease_id=lease, fence=7, job_id="job", command=command, claim=Claim(), hold_ms=0
    )


def a_stop(ending: Ending = Ending.PREEMPTED, *, lease: str = "a.1") -> wire.StopAttemptOrder:
    return wire.StopAttemptOrder(lease, 7, ending, "made room for urgent request vip", 5_000)


def marks(control: Control) -> list[wire.CheckpointAge]:
    return [mark for message in control.messages if isinstance(message, wire.Heartbeat) for mark in message.marks]


def out(root: Path, lease: str = "a.1") -> Callable[[], str]:
    return lambda: (root / lease / "stdout").read_text() if (root / lease / "stdout").exists() else ""


@pytest.mark.parametrize("private", [True, False], ids=["in its own directory", "in the current directory"])
def test_a_mark_is_told_with_a_heartbeat(tmp_path: Path, private: bool) -> None:
    async def scenario(agent: Agent, host: AttemptHost, control: Control) -> None:
        agent.send(a_start('touch "$GRID_CHECKPOINT"; ls -A; exec sleep 1000', cwd="" if private else str(here)))
        await until(lambda: marks(control))
        mark = marks(control)[0]
        assert (mark.lease_id, mark.fence) == ("a.1", 7)
        assert mark.age_ms < 20_000
        assert list(here.iterdir()) == []
        assert out(tmp_path / "jobs")() == ""

    here = tmp_path / "here"
    here.mkdir()
    with_an_agent(tmp_path / "jobs", scenario)


def test_the_last_mark_is_told_with_the_end(tmp_path: Path) -> None:
    async def scenario(agent: Agent, host: AttemptHost, control: Control) -> None:
        agent.send(a_start('trap "touch $GRID_CHECKPOINT; exit 4" TERM; echo up; while :; do sleep 0.05; done'))
        await until(lambda: control.starts() and out(tmp_path / "jobs")())
        agent.send(a_stop(Ending.CANCELLED))
        await until(control.ends)
        end = control.ends()[0]
        assert end.outcome.exit_code == 4
        assert end.mark_age_ms is not None
        assert end.mark_age_ms < 5_000
        agent.send(a_start("true", lease="a.2"))
        await until(lambda: len(control.ends()) == 2)
        assert control.ends()[1].mark_age_ms is None

    with_an_agent(tmp_path / "jobs", scenario)


READS_ITS_NOTICE = """
trap 'cat "$GRID_NOTICE"; exit 4' TERM
echo up
while [ ! -e "$GRID_NOTICE" ]; do sleep 0.02; done
date +%s.%N > noticed
while :; do sleep 0.02; done
"""


def test_who_is_displaced_gets_a_notice_before_it_is_stopped(tmp_path: Path) -> None:
    async def scenario(agent: Agent, host: AttemptHost, control: Control) -> None:
        agent.guard.rules = RULES
        agent.send(a_start(READS_ITS_NOTICE))
        await until(lambda: control.starts() and out(tmp_path / "jobs")())
        for _ in range(3):  # the same order again changes nothing
            agent.send(a_stop())
        await until(control.ends)
        end = control.ends()[0]
        assert (end.outcome.ending, end.outcome.exit_code) == (Ending.PREEMPTED, 4)
        notice = json.loads(out(tmp_path / "jobs")().splitlines()[1])
        assert notice["reason"] == "made room for urgent request vip"
        noticed = float((tmp_path / "jobs/a.1/work/noticed").read_text())
        assert noticed < notice["deadline"] <= noticed + 1.3
        assert len(control.ends()) == 1

    with_an_agent(tmp_path / "jobs", scenario)


def test_without_rules_it_is_stopped_at_once_and_knows_why(tmp_path: Path) -> None:
    async def scenario(agent: Agent, host: AttemptHost, control: Control) -> None:
        agent.send(a_start(READS_ITS_NOTICE))
        await until(lambda: control.starts() and out(tmp_path / "jobs")())
        agent.send(a_stop())
        await until(control.ends)
        assert json.loads(out(tmp_path / "jobs")().splitlines()[1])["reason"] == "made room for urgent request vip"

    with_an_agent(tmp_path / "jobs", scenario)


def test_who_is_cancelled_during_its_notice_is_stopped_at_once(tmp_path: Path) -> None:
    async def scenario(agent: Agent, host: AttemptHost, control: Control) -> None:
        agent.guard.rules = wire.OwnerRules(
            cpu_busy_max_milli=1000,
            memory_used_max_milli=1000,
            memory_min_bytes=0,
            gpu_busy_max_milli=1000,
            gpu_memory_min_bytes=0,
            evict=False,
            notice_ms=3_600_000,
        )
        agent.send(a_start("echo up; exec sleep 1000"))
        await until(lambda: control.starts() and out(tmp_path / "jobs")())
        agent.send(a_stop())
        await until(lambda: (tmp_path / "jobs/a.1/notice").exists())
        agent.send(a_stop(Ending.CANCELLED))
        await until(control.ends)
        assert control.ends()[0].outcome.ending is Ending.CANCELLED

    with_an_agent(tmp_path / "jobs", scenario)


def test_who_ends_by_itself_during_its_notice_has_ended_by_itself(tmp_path: Path) -> None:
    async def scenario(agent: Agent, host: AttemptHost, control: Control) -> None:
        agent.guard.rules = wire.OwnerRules(
            cpu_busy_max_milli=1000,
            memory_used_max_milli=1000,
            memory_min_bytes=0,
            gpu_busy_max_milli=1000,
            gpu_memory_min_bytes=0,
            evict=False,
            notice_ms=3_600_000,
        )
        agent.send(a_start('echo up; while [ ! -e "$GRID_NOTICE" ]; do sleep 0.02; done; exit 9'))
        await until(lambda: control.starts() and out(tmp_path / "jobs")())
        agent.send(a_stop())
        await until(control.ends)
        assert (control.ends()[0].outcome.ending, control.ends()[0].outcome.exit_code) == (Ending.EXITED, 9)

    with_an_agent(tmp_path / "jobs", scenario)
