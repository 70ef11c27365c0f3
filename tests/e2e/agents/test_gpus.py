"""GPUs end to end: measured through NVML (a stand-in for the library), offered, lent, and given back to their owner."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed_grid.reactor.jobs import NOT_RUN_AGAIN
from tests.e2e.agents.conftest import CONFIG, FarAgent, FarGrid, wait_until
from tests.support.nvml.nvml_machine import GIB, GpuMachine

pytestmark = pytest.mark.e2e
NODE = """\
- name: gpu2
  host: 127.0.0.1
  cpu_count: 4
  memory_gb: 2
  trust_declared: true
  thresholds: {cpu_percent_max: 100, cpu_min_cores: 0, memory_percent_max: 100, memory_min_gb: 0, dwell_seconds: 2}
  owner_policy: {throttle: false, pause: false, evict: true, notice_seconds: 0, grace_seconds: 1}
"""


@pytest.fixture
def machine(tmp_path: Path, own_cgroup: None) -> Iterator[GpuMachine]:
    made = GpuMachine(tmp_path).has(0, 1)
    yield made
    made.close()


@pytest.fixture
def grid(tmp_path: Path, machine: GpuMachine) -> Iterator[FarGrid]:
    (tmp_path / "here").mkdir()
    made = FarGrid(tmp_path / "state", tmp_path / "here")
    config = tmp_path / "far.yaml"
    config.write_text(CONFIG.format(hold=60, start=60, far=NODE))
    made.env["GRID_CONFIG"] = str(config)
    made("daemon", "start", check=0)
    agent = FarAgent("gpu2", tmp_path / "gpu2", made.host_dir / "links" / "gpu2.sock")
    made.agents = {"gpu2": agent.start(**machine.environment)}
    made.until_alive("gpu2")
    yield made
    made.close()


def test_gpus_are_found_lent_whole_and_measured(grid: FarGrid, machine: GpuMachine) -> None:
    assert grid.node("gpu2")["gpus"] == 2
    done = grid(
        "run-shared", "-r", "gpu", "-a", "2", "--workdir", "none", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES", check=0
    )
    assert done.stdout == "0,1\n"
    machine.update({"1.util": 95, "1.used": 8 * GIB, "1.compute": f"1:{8 * GIB}"})

    def offered() -> list[float]:
        rows = grid.json("shared-status")["offers"]
        return [row["amount"] for row in rows if (row["node_id"], row["resource_type"]) == ("gpu2", "gpu")]

    wait_until(lambda: offered() == [1.0], 30)


def test_a_job_gives_its_gpu_back_to_the_owner_and_goes_on_another(grid: FarGrid, machine: GpuMachine) -> None:
    script = "echo $CUDA_VISIBLE_DEVICES; exec sleep 1000"
    words = ("-r", "gpu", "-a", "1", "--workdir", "none", "--restartable", "sh", "-c", script)
    job = grid.detach(*words)
    pid = grid.pid_of(job)
    machine.update({"0.util": 90, "0.used": 4 * GIB, "0.compute": f"{pid}:{4 * GIB}"})
    time.sleep(5)
    assert [attempt["outcome"] for attempt in grid.job(job)["attempts"]] == [None], "its own use is not the owner's"
    machine.update({"0.used": 15 * GIB, "0.compute": f"{pid}:{4 * GIB} 1:{11 * GIB}"})
    wait_until(lambda: len(grid.job(job)["attempts"]) == 2, 30)
    first = grid.job(job)["attempts"][0]
    assert first["outcome"] == "reclaimed"
    assert "GPU 0" in first["detail"]
    wait_until(lambda: grid("jobs", "logs", job, check=0).stdout.split() == ["0", "1"], 30)
    assert grid("jobs", "logs", job, check=0).stderr == f"grid: ---- {job}: attempt 2 on gpu2 ----\n"
    grid("jobs", "cancel", job, check=0)
    followed = grid("jobs", "logs", "-f", job, check=0).stderr.splitlines()
    assert followed == [
        f"grid: {job} ended on gpu2 and is run again: its owner needs gpu2's GPU 0",
        f"grid: ---- {job}: attempt 2 on gpu2 ----",
    ]


def test_a_job_that_may_not_run_again_ends_when_its_gpu_goes_back(grid: FarGrid, machine: GpuMachine) -> None:
    running = grid.start("run-shared", "-r", "gpu", "-a", "2", "--workdir", "none", "-j", "once", "sleep", "1000")
    wait_until(lambda: grid("jobs", "show", "once").returncode == 0, 30)
    pid = grid.pid_of("once")
    machine.update({"0.util": 90, "0.used": 15 * GIB, "0.compute": f"{pid}:{4 * GIB} 1:{11 * GIB}"})
    said = running.communicate(timeout=60)[1].decode()
    assert said.splitlines()[-1] == f"grid: its owner needs gpu2's GPU 0; {NOT_RUN_AGAIN}"
    job = grid.job("once")
    assert (job["outcome"], len(job["attempts"])) == ("reclaimed", 1)
