"""The intelligent sharing guide, walked from top to bottom in a clone: what each of its sections says has to happen."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from distributed_grid.config import load_cluster_config
from distributed_grid.core import SSHManager
from distributed_grid.orchestration.enhanced_offloading_executor import OffloadingMode
from distributed_grid.orchestration.intelligent_scheduler import SchedulingRequest
from distributed_grid.orchestration.offloading_detector import OffloadingDetector, Way
from tests.e2e.clones import UsedClone
from tests.e2e.guides import Guide, assert_within, load_config, run_block
from tests.support.project import PROJECT, set_rebalance_interval
from tests.support.shell import wait_until

pytestmark = pytest.mark.e2e

PAGE = (PROJECT / "docs/guide/resource-sharing.md").read_text()
NODES = {"gpu-master", "gpu1", "gpu2"}
PARTS = ("Cluster status", "Resource monitoring", "Resource requests", "Intelligent scheduling", "Load balancing")
ON_THE_PAGE = ("Basic Usage", "Debug Commands", "Testing")
BLOCKS = Guide("intelligent_sharing").blocks


def test_the_guide_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide, clone = Guide("intelligent_sharing"), UsedClone(tmp_path)
    clone.enter(monkeypatch)
    try:
        for heading in ("Enable Resource Sharing", "Node-Specific Settings"):
            assert_within(yaml.safe_load(guide.next(heading)), load_config("my-cluster.yaml"))
        asyncio.run(asyncio.wait_for(the_program_borrows_for_the_master(guide.next("Basic Usage")), 60))
        asyncio.run(
            asyncio.wait_for(the_executor_moves_what_the_detector_found(guide.next("Enhanced Offloading"), clone), 60)
        )
        pressure_has_the_weights_of_the_guide(clone)
        the_debug_commands_show_the_nodes(guide.next("Debug Commands"), clone)
        the_demo_borrows_because_of_pressure_and_places_by_strategy(clone)
        guide.next("Testing")  # typed by the test below
        guide.assert_all_read()
    finally:
        clone.close()


async def the_program_borrows_for_the_master(program: str) -> None:
    """The documented methods of the reference, with the orchestrator of the guide."""
    config = load_cluster_config("config/my-cluster-enhanced.yaml")
    names: dict[str, Any] = {"cluster_config": config, "ssh_manager": SSHManager(config)}
    await run_block(program, names)
    orchestrator, request_id = names["orchestrator"], names["request_id"]
    assert {node["node_id"] for node in names["status"]["nodes"]} == NODES
    assert set(names["snapshots"]) == NODES
    held = next(row for row in await allocations(orchestrator) if row["allocation_id"] == request_id)
    assert (held["target_node"], held["amount"], held["priority"]) == ("gpu-master", 2.0, "high")
    assert held["node_id"] in ("gpu1", "gpu2")
    assert set(orchestrator.metrics.get_all_latest_snapshots()) == NODES
    assert orchestrator.metrics.get_resource_trend("gpu2", "memory").node_id == "gpu2"
    assert orchestrator.metrics.get_cluster_summary()["cpu"]["total"] == 40
    decision = await orchestrator.scheduler.schedule_task(SchedulingRequest("walk", {"cpu": 2.0}))
    assert decision.node_id in NODES
    assert 0 < decision.confidence <= 1
    assert "walk" in [row["allocation_id"] for row in await allocations(orchestrator)]
    await orchestrator.scheduler.complete_task("walk")
    figures = await orchestrator.scheduler.get_scheduling_status()
    assert figures["allocation_success_rate"] == 1
    assert figures["rebalances_per_hour"] == 0
    await orchestrator.release_resources(request_id)
    assert await allocations(orchestrator) == []
    await orchestrator.stop()


async def the_executor_moves_what_the_detector_found(program: str, clone: UsedClone) -> None:
    """The block as it stands, but for the import of `OffloadingMode` that it lacks; a job leaves the pressed master."""
    script = "echo on $GRID_NODE; until [ -e finish ]; do sleep 0.05; done"
    wanted = ("-j", "walker", "--restartable", "-n", "gpu-master", "-r", "memory", "-a", "2")
    clone("run-shared", "--detach", *wanted, "sh", "-c", script, check=0)
    wait_until(lambda: clone.json("jobs", "show", "walker")["state"] == "running")
    config = load_cluster_config("config/my-cluster-enhanced.yaml")
    manager = SSHManager(config)
    detector = OffloadingDetector(manager, config)
    recommendation = next(one for one in await detector.scan_cluster("gpu-master") if one.job_id == "walker")
    assert (recommendation.is_movable, recommendation.way) == (True, Way.RESTART)
    names: dict[str, Any] = {"ssh_manager": manager, "cluster_config": config, "recommendation": recommendation}
    names["OffloadingMode"] = OffloadingMode
    await run_block(program, names)
    executor, task_id = names["executor"], names["task_id"]
    moved = await executor.wait_for_offloading(task_id, timeout_seconds=30)
    assert (moved["job_id"], moved["source_node"], moved["problem"]) == ("walker", "gpu-master", None)
    assert clone.json("offload", "status", task_id)["target_node"] == moved["target_node"] != "gpu-master"
    (clone.cwd / "finish").touch()
    clone("jobs", "wait", "walker", check=0)
    assert clone("jobs", "logs", "walker", check=0).stdout == f"on gpu-master\non {moved['target_node']}\n"


async def allocations(orchestrator: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await orchestrator.sharing.get_resource_status())["allocations"]
    return [row for row in rows if row["user"] != "grid"]


def pressure_has_the_weights_of_the_guide(clone: UsedClone) -> None:
    """30 % CPU, 30 % memory, 40 % GPU; nothing but memory is in use."""
    pressure = {node["node_id"]: node["pressure"] for node in clone.json("status")["nodes"]}
    assert pressure == pytest.approx({"gpu-master": 0.3 * 0.766, "gpu1": 0.3 * 0.34, "gpu2": 0.3 * 0.116}, abs=0.02)


def the_debug_commands_show_the_nodes(script: str, clone: UsedClone) -> None:
    shown = clone.type(script)
    assert "== Cluster status ==" in shown
    assert re.search(r"gpu2 +alive +14 cores, 27\.6 GB, 2 GPUs to lend", shown)
    assert "== Resource monitoring ==" in shown
    assert re.search(r"look 3: gpu-master CPU \d+ %, memory 77 %; gpu1 CPU \d+ %, memory 34 %", shown)
    looks = [dict(re.findall(r"([\w-]+) CPU (\d+) %", line)) for line in shown.splitlines() if line.startswith("look ")]
    loaded = re.search(r"^the job ran on ([\w-]+)$", shown, re.MULTILINE)
    assert loaded is not None, shown
    before, *during = (int(look[loaded[1]]) for look in looks)
    assert max(during) > before, "a load that does not move shows nothing"


def the_demo_borrows_because_of_pressure_and_places_by_strategy(clone: UsedClone) -> None:
    """With a tuned rebalancing frequency, as the guide says that it may be."""
    clone("daemon", "stop", check=0)
    set_rebalance_interval(clone.cwd / "config", 2)
    shown = clone.type("poetry run python examples/intelligent_sharing_demo.py")
    assert tuple(re.findall(r"^== (.+) ==$", shown, re.MULTILINE)) == PARTS
    for asked in ("2 cores", "4 GB", "1 GPU"):
        assert re.search(rf"^{asked} for gpu-master: lent by gpu[12] as \w+, released$", shown, re.MULTILINE), asked
    assert "10000 cores for gpu-master: refused" in shown
    places = dict(re.findall(r"^(\w+): ([\w-]+), confidence ", shown, re.MULTILINE))
    assert len(places) == 8
    assert (places["load_balanced"], places["local_first"], places["best_fit"]) == ("gpu2", "gpu-master", "gpu-master")
    for node in NODES:
        assert f"  {node:<12} ## 2\n" in shown
    assert "gpu-master: memory at 76.6 %, above its mark of 70 %\n" in shown
    boost = re.search(
        r"^  (auto-gpu-master-memory-\d+): [\d.]+ GB of gpu2 for gpu-master, borrowed by the grid", shown, re.MULTILINE
    )
    assert boost is not None, shown
    assert re.search(r"^  work of gpu-master that needs [\d.]+ GB: ran on gpu2$", shown, re.MULTILINE)
    assert re.search(r"^  auto-gpu-master-memory-\d+: [\d.]+ GB of it used$", shown, re.MULTILINE)
    assert {lease["user"] for lease in clone.json("shared-status")["allocations"]} <= {"grid"}


@pytest.mark.parametrize(
    "block", [block for block in Guide("intelligent_sharing").blocks if block.heading in ON_THE_PAGE]
)
def test_the_page_has_the_guides_blocks_unchanged(block: Any) -> None:
    assert block.text in PAGE


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_test_commands_of_the_guide(tmp_path: Path) -> None:
    (script,) = (block.text for block in BLOCKS if block.heading == "Testing")
    commands = [shlex.split(line, comments=True) for line in script.splitlines() if line and not line.startswith("#")]
    assert [words[:3] for words in commands] == [["poetry", "run", "pytest"]] * 3
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_", "GRID_"))}
    environment = ours | {"COVERAGE_FILE": str(tmp_path / "coverage")}
    for words in commands[1:]:  # the first is what `make test` does with that file
        done = subprocess.run(
            [sys.executable, "-m", *words[2:], "-p", "no:cacheprovider"],
            cwd=PROJECT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    total = re.search(r"^TOTAL .* (\d+)%$", done.stdout, re.MULTILINE)
    assert total is not None, done.stdout
    assert int(total[1]) >= 90
