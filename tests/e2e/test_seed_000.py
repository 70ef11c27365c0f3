"""The resource sharing guide, walked from top to bottom in a clone: what each of its sections says has to happen."""

from __future__ import annotations

import asyncio
import getpass
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from distributed_grid.config import ClusterConfig
from distributed_grid.core import GridOrchestrator
from distributed_grid.orchestration.resource_sharing import ResourceType
from tests.e2e.clones import UsedClone
from tests.e2e.guides import Guide, assert_within, load_config, run_block
from tests.support.shell import wait_until

pytestmark = pytest.mark.e2e

CORES = len(os.sched_getaffinity(0))
NODES = {"gpu-master", "gpu1", "gpu2"}
WHERE = 'import os; print(os.environ["GRID_NODE"], '
SCRIPTS = {
    "train.py": f'{WHERE}"trains on GPU", os.environ["CUDA_VISIBLE_DEVICES"])',
    "train_model.py": f'{WHERE}"trains on GPU", os.environ["CUDA_VISIBLE_DEVICES"])',
    "process_data.py": f'{WHERE}"has processed the data")',
    "process_large_dataset.py": "hold = bytearray(64 * 1024**2); print(len(hold))",
    "parallel_task.py": f"{WHERE}len(os.sched_getaffinity(0)))",
    "compute_task.py": "import sys, time; time.sleep(1); print(sys.argv[1], int(sys.argv[2]) ** 2)",
}


def test_the_guide_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide, clone = Guide("resource_sharing"), UsedClone(tmp_path)
    clone.enter(monkeypatch)
    for name, text in SCRIPTS.items():
        (clone.cwd / name).write_text(text)
    try:
        assert_within(yaml.safe_load(guide.next("Configuration")), load_config("cluster_config.yaml"))
        commands_run_with_what_was_lent(clone, guide.next("Run a command with shared resources"))
        offers_shrink_while_a_job_runs(clone, guide.next("Check resource sharing status"))
        urgent_work_preempts_and_the_rest_goes_by_priority(clone)
        troubles_have_a_remedy(clone)
        jobs_run_as_the_user_in_a_directory_of_their_own(clone)
        asyncio.run(asyncio.wait_for(programs(clone, guide), 90))
        guide.assert_all_read()
    finally:
        clone.close()


def commands_run_with_what_was_lent(clone: UsedClone, script: str) -> None:
    """GPUs are set in the environment, cores are pinned, and each command's lease is over with it."""
    gpu, memory, cpu, named = clone.type(script).splitlines()
    assert gpu.removeprefix("gpu2").removeprefix("gpu1") == " trains on GPU 0"
    assert memory.split()[0] in NODES
    assert cpu.split()[0] in NODES
    assert int(cpu.split()[1]) == min(2, CORES)
    assert named.split()[0] in ("gpu1", "gpu2")
    jobs = sorted(clone.json("jobs", "list"), key=lambda job: job["submitted_at"])
    asked = [(job["resource_type"], job["amount"], job["priority"], job["exit_code"]) for job in jobs]
    assert asked == [("gpu", 1, "high", 0), ("memory", 4, "medium", 0), ("cpu", 2, "low", 0), ("gpu", 1, "medium", 0)]
    assert leases(clone) == []


def offers_shrink_while_a_job_runs(clone: UsedClone, script: str) -> None:
    before = offered(clone)
    assert {node for node, _ in before} == NODES
    job = clone.detach("-r", "gpu", "-a", "1", "-n", "gpu1", "sleep", "60")
    lease = wait_until(lambda: leases(clone))[0]
    assert (lease["job_id"], lease["node_id"], lease["amount"]) == (job, "gpu1", 1)
    shown = clone.type(script)
    assert "gpu2        2 GPUs" in shown
    assert "gpu1        1 GPU" not in shown
    assert "no active allocations" not in shown
    assert before[("gpu1", "gpu")] == 1
    assert ("gpu1", "gpu") not in offered(clone)
    clone("jobs", "cancel", job, check=0)
    wait_until(lambda: offered(clone).get(("gpu1", "gpu")) == 1)
    assert leases(clone) == []


def urgent_work_preempts_and_the_rest_goes_by_priority(clone: UsedClone) -> None:
    """All 24 cores are lent; what waits for them starts in the order of its priority, and urgent work at once."""
    for node, cores in (("gpu2", 14), ("gpu1", 6), ("gpu-master", 4)):
        words = ("-a", str(cores), "--strategy", "node_specific", "-n", node, "-p", "low")
        clone.detach("-j", f"fills-{node}", *words, "sleep", "60")
    wait_until(lambda: all(clone.job(f"fills-{node}")["state"] == "running" for node in NODES))
    for priority in ("low", "medium", "high"):
        clone.detach("-j", f"waits-{priority}", "-a", "12", "-p", priority, "sh", "-c", "sleep 0.1")
    wait_until(lambda: clone.observe("status")["waiting"] == 3)
    urgent = clone("run-shared", "-j", "urgent", "-a", "14", "-p", "urgent", "echo", "at once", check=0)
    assert urgent.stdout == "at once\n"
    assert clone.job("fills-gpu2")["attempts"][0]["outcome"] == "preempted"
    clone("jobs", "cancel", *(f"fills-{node}" for node in NODES), check=0)
    clone("jobs", "wait", "waits-low", "waits-medium", "waits-high", check=0)
    started = {level: clone.job(f"waits-{level}")["attempts"][0]["started_at"] for level in ("low", "medium", "high")}
    assert started["high"] < started["medium"] < started["low"]


def troubles_have_a_remedy(clone: UsedClone) -> None:
    assert clone.type("grid status").count("alive, simulated") == 3
    clone.detach("-j", "fills", "-r", "gpu", "-a", "2", "sleep", "60")
    none_left = clone("run-shared", "-r", "gpu", "-a", "2", "-w", "0", "true", check=1)
    assert "No resource offers available" in none_left.stderr
    clone("jobs", "cancel", "fills", check=0)
    clone("jobs", "wait", "fills")
    failed = clone("run-shared", "-j", "fails", "sh", "-c", "echo no such thing >&2; exit 3", check=3)
    assert failed.stderr == "no such thing\n"
    assert clone("jobs", "logs", "fails").stderr == "no such thing\n"


def jobs_run_as_the_user_in_a_directory_of_their_own(clone: UsedClone) -> None:
    typed = ("run-shared", "--isolated", "sh", "-c", "pwd; id -un; ls -A")
    (first, *one), (second, *other) = (clone(*typed, check=0).stdout.splitlines() for _ in range(2))
    assert one == other == [getpass.getuser()], "the directories are empty"
    assert len({first, second, str(clone.cwd)}) == 3


async def programs(clone: UsedClone, guide: Guide) -> None:
    names: dict[str, Any] = {}
    await run_block(guide.next("Programmatic Usage"), names)
    result, status = names["result"], names["status"]
    assert (result.job_id, result.exit_code, result.outcome) == ("training_001", 0, "exited")
    assert result.stdout == f"{result.node_id} trains on GPU 0\n"
    assert {offer["node_id"] for offer in status["offers"]} == NODES
    assert status["allocations"] == []
    job = clone.job("training_001")
    assert (job["resource_type"], job["amount"], job["priority"]) == ("gpu", 1.0, "high")

    config = ClusterConfig.from_yaml("config/cluster_config.yaml")
    names |= {"ResourceType": ResourceType, "asyncio": asyncio, "local_gpu_utilization": 95}
    async with GridOrchestrator(config) as names["orchestrator"]:
        await run_block(guide.next("1. Dynamic Training Job Offloading"), names)
        assert names["result"].node_id != "gpu-master"
        assert names["result"].stdout == f"{names['result'].node_id} trains on GPU 0\n"
        await run_block(guide.next("2. Batch Processing with Available Memory"), names)
        assert names["result"].stdout == f"{64 * 1024**2}\n"
        await run_block(guide.next("3. Parallel Computation"), names)
    results = names["results"]
    assert [result.stdout for result in results] == [f"--task-id {i * i}\n" for i in range(4)]
    assert len({result.node_id for result in results}) > 1, "parallel tasks run on multiple nodes"
    jobs = [clone.job(result.job_id) for result in results]
    assert max(job["submitted_at"] for job in jobs) < min(job["ended_at"] for job in jobs)
    assert leases(clone) == []


def leases(clone: UsedClone) -> list[dict[str, Any]]:
    """Leases of users, without those of the grid itself."""
    return [lease for lease in clone.json("shared-status")["allocations"] if lease["user"] != "grid"]


def offered(clone: UsedClone) -> dict[tuple[str, str], float]:
    offers = clone.json("shared-status")["offers"]
    return {(offer["node_id"], offer["resource_type"]): offer["amount"] for offer in offers}
