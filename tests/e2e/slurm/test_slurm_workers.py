"""Workers in allocations of a real Slurm cluster: from a task that waits to the allocation that is given back, with
pilots that are real agents, and whatever dies in between."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.guides import page_blocks
from tests.support.ports import free_port
from tests.support.shell import Shell, wait_until
from tests.support.slurm_cluster import PARTITION, SlurmCluster

GUIDE = "docs/guide/slurm.md"


class PilotedGrid(Shell):
    """A grid of one core, whose workers are pilots with two."""

    def __init__(self, folder: Path, cluster: SlurmCluster) -> None:
        (folder / "here").mkdir(parents=True)
        super().__init__(folder / "state", folder / "here")
        self.cluster = cluster
        self.shared = folder / "shared"
        self.scratch = folder / "scratch"
        self.scratch.mkdir()

    def configure(self, *, slurm: dict[str, Any] | None = None, **sections: Any) -> None:
        settings = {
            "config_file": str(self.cluster.config),
            "partition": PARTITION,
            "time_limit": "0:30:00",
            "notice_seconds": 20,
            "worker_types": {"cpu": {"cpus": 2, "memory_gb": 1}},
            "directory": str(self.shared),
            "scratch": str(self.scratch),
        }
        config: dict[str, Any] = {
            "name": "piloted",
            "nodes": [{"name": "home", "host": "local", "cpu_count": 1, "memory_gb": 4, "trust_declared": True}],
            "server": {"host": "0.0.0.0", "port": free_port()},
            "workers": {"consistency_seconds": 1, "call_seconds": 20, "exit_seconds": 60},
            "scaling": {
                "provider": "slurm",
                "max_workers": 1,
                "evaluation_window_seconds": 2,
                "scale_up_cooldown_seconds": 0,
                "scale_down_cooldown_seconds": 1,
            },
            "providers": {"slurm": settings | (slurm or {})},
        }
        for name, section in sections.items():
            config[name] = config.get(name, {}) | section
        (self.cwd / "cluster.yaml").write_text(yaml.safe_dump(config))
        self.env["GRID_CONFIG"] = str(self.cwd / "cluster.yaml")
        self("daemon", "start", "--config", "cluster.yaml", check=0)
        if config["scaling"]["provider"]:
            wait_until(lambda: not self.observe("scale", "status")["problem"])

    def workers(self, *words: str) -> dict[str, dict[str, Any]]:
        return {one["worker_id"]: one for one in self.observe("workers", "list", *words)["workers"]}

    def new_worker(self) -> str:
        (made,) = self.json("workers", "create", "--yes", "--wait", "60", timeout=90)["workers"]
        assert made["state"] == "joined"
        return str(made["worker_id"])

    def end(self, *workers: str) -> None:
        self("workers", "terminate", *workers, "--force", "--discard-results", "--wait", "60", check=0, timeout=90)

    def job_of(self, worker: str) -> str:
        """The Slurm job of a worker."""
        (found,) = self.cluster.ask("squeue", "-h", f"--name={worker}", "-o", "%i").split()
        return found

    def until_clean(self) -> None:
        """Wait until no allocation, no private file and no directory of an agent is left."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.leftovers(), 30)
        assert self.leftovers() == []

    def leftovers(self) -> list[str]:
        return [
            *self.cluster.jobs(),
            *(str(path) for folder in (self.shared, self.scratch) for path in folder.rglob("*")),
        ]


@pytest.fixture
def make(tmp_path: Path, cluster: SlurmCluster) -> Iterator[Callable[..., PilotedGrid]]:
    grids: list[PilotedGrid] = []

    def made(**settings: Any) -> PilotedGrid:
        grids.append(PilotedGrid(tmp_path / f"grid-{len(grids)}", cluster))
        grids[-1].configure(**settings)
        return grids[-1]

    yield made
    for grid in grids:
        grid.close()
    ids = list(cluster.jobs())
    if ids:
        cluster.ask("scancel", *ids)
        wait_until(lambda: not cluster.jobs(), 30)


def test_the_guide_leads_from_nothing_to_a_task_in_an_allocation(cluster: SlurmCluster, tmp_path: Path) -> None:
    (config, *_), (walk,) = page_blocks(GUIDE, "yaml"), page_blocks(GUIDE, "bash")
    shell = Shell(tmp_path / "state", tmp_path)
    shell.env |= {"SLURM_CONF": str(cluster.config)}
    (tmp_path / "slurm.yaml").write_text(config.replace("host: 0.0.0.0", "host: 0.0.0.0\n  port: 0"))
    try:
        done = subprocess.run(
            ["sh", "-ec", walk], env=shell.env, cwd=tmp_path, capture_output=True, text=True, timeout=170
        )
    finally:
        shell.close()
    assert done.returncode == 0, done.stderr + done.stdout
    (worker,) = set(re.findall(r"^on (worker-\w+)$", done.stdout, re.MULTILINE))
    assert f"{worker}: gone" in done.stdout
    assert "in partition debug, the default account" in done.stdout
    assert not cluster.jobs()
    assert not list(Path(shell.env["HOME"], ".distributed_grid", "slurm").iterdir())


def test_a_task_that_fits_nowhere_becomes_an_allocation_which_is_given_back(make: Callable[..., PilotedGrid]) -> None:
    grid = make()
    blocker = grid.detach("-r", "cpu", "-a", "1", "sleep", "300")
    script = "echo on $GRID_NODE; echo 42 > result.txt"
    task = grid.detach("-r", "cpu", "-a", "2", "sh", "-c", script)
    wait_until(grid.cluster.jobs, 30)
    grid("jobs", "wait", task, "--timeout", "60", check=0, timeout=90)
    worker = grid.job(task)["node_id"]
    row = grid.workers()[worker]
    assert (row["state"], row["provider"], row["offer"], row["price_per_hour"]) == ("joined", "slurm", "slurm-cpu", 0)
    assert row["zone"] == PARTITION
    wait_until(lambda: not grid.workers(), 60)
    grid.until_clean()
    (gone,) = grid.events("worker-gone")
    assert gone["subject"] == worker
    assert grid("jobs", "logs", task, check=0).stdout == f"on {worker}\n"
    grid("jobs", "fetch", task, "--to", "fetched", check=0)
    assert (grid.cwd / "fetched" / "result.txt").read_text() == "42\n"
    assert grid.job(blocker)["state"] == "running"


def test_a_pilot_is_found_again_by_a_control_plane_that_was_killed_and_so_is_one_without_an_answer(
    make: Callable[..., PilotedGrid], tmp_path: Path
) -> None:
    grid = make(scaling={"provider": None})
    worker = grid.new_worker()
    grid.kill_daemon()
    assert grid.workers()[worker]["state"] == "joined"
    grid("workers", "terminate", worker, "--force", check=0)
    grid.kill_daemon()  # before, in or after scancel
    wait_until(lambda: not grid.workers(), 40)
    grid.until_clean()
    begun = tmp_path / "begun"
    slow = _slow_sbatch(tmp_path / "bin", begun)
    grid("daemon", "stop", check=0)
    grid.env["PATH"] = f"{slow}:{grid.env['PATH']}"
    grid("workers", "create", "--yes", check=0)
    wait_until(begun.exists, 30)
    grid.kill_daemon()  # in sbatch, which goes on and submits
    (other,) = wait_until(grid.workers, 30)
    wait_until(lambda: grid.workers()[other]["state"] == "joined", 60)
    assert len(grid.cluster.jobs()) == 1
    grid.end(other)
    grid.until_clean()


def test_a_second_pilot_with_a_spent_token_ends_by_itself(make: Callable[..., PilotedGrid]) -> None:
    grid = make(scaling={"provider": None})
    options = ["--parsable", "--export=ALL", "--mem=64M", "--output=/dev/null"]
    blocker = grid.cluster.ask("sbatch", *options, "--cpus-per-task=8", "--wrap=sleep 300").strip()
    wait_until(lambda: grid.cluster.jobs()[blocker] == "RUNNING")
    (made,) = grid.json("workers", "create", "--yes")["workers"]
    worker = made["worker_id"]
    (token,) = wait_until(lambda: list(grid.shared.glob(f"{worker}-*/join-token")))
    wait_until(lambda: "it waits in Slurm's queue" in (grid.workers()[worker]["reason"] or ""))
    job, text = grid.job_of(worker), token.read_text()
    grid.cluster.ask("scancel", blocker)
    wait_until(lambda: grid.workers()[worker]["state"] == "joined", 60)
    assert not token.exists(), "the pilot has taken it"
    script = grid.cwd / "second.sh"
    grid.cluster.ask("scontrol", "write", "batch_script", job, str(script))
    for content, said in ((text, "was used"), (None, "join-token")):
        if content is not None:
            token.write_text(content)
        log = grid.cwd / "second.log"
        second = grid.cluster.ask("sbatch", *options[:3], f"--output={log}", str(script)).strip()
        wait_until(lambda second=second: second not in grid.cluster.jobs(), 40)
        assert "FAILED" in grid.cluster.ask("squeue", "-h", "-t", "all", "-j", second, "-o", "%T")
        assert said in log.read_text()
        log.unlink()
    assert grid.workers()[worker]["state"] == "joined", "the first one goes on"
    assert grid.cluster.jobs() == {job: "RUNNING"}
    grid.end(worker)
    grid.until_clean()


def test_a_pilot_that_somebody_cancels_is_gone_and_its_task_runs_again(make: Callable[..., PilotedGrid]) -> None:
    grid = make()
    began = grid.cwd / "began"
    task = grid.detach("-r", "cpu", "-a", "2", "sh", "-c", f"[ -e {began} ] || {{ touch {began}; sleep 300; }}")
    wait_until(began.exists, 60)
    wait_until(lambda: grid.job(task)["state"] == "running", 60)
    worker = grid.job(task)["node_id"]
    grid.cluster.ask("scancel", grid.job_of(worker))
    grid("jobs", "wait", task, "--timeout", "90", check=0, timeout=120)
    assert [event["subject"] for event in grid.events("requeued")] == [grid.job(task)["uid"]]
    nodes = [one["node_id"] for one in grid.job(task)["attempts"]]
    assert (nodes[0], len(nodes)) == (worker, 2), "the pilot has said that it ends before its task did"
    assert nodes[1] != worker
    wait_until(lambda: worker not in grid.workers(), 60)


def test_the_signal_before_the_time_limit_drains_the_worker_and_its_job_goes_on_elsewhere(
    make: Callable[..., PilotedGrid],
) -> None:
    grid = make(scaling={"max_workers": 2})
    told = grid.cwd / "told"
    script = f"[ -e {told} ] && exit 0; while [ ! -e $GRID_NOTICE ]; do sleep 0.1; done; touch {told}; sleep 300"
    task = grid.detach("-r", "cpu", "-a", "2", "sh", "-c", script)
    wait_until(lambda: grid.job(task)["state"] == "running", 60)
    worker = grid.job(task)["node_id"]
    job = grid.job_of(worker)
    grid.cluster.ask("scancel", "--batch", "--signal=USR1", job)
    grid("jobs", "wait", task, "--timeout", "60", check=0, timeout=90)
    assert grid.job(task)["node_id"] != worker
    assert told.exists()
    assert [event["subject"] for event in grid.events("end-announced")] == [worker]
    wait_until(lambda: job not in grid.cluster.jobs(), 40)


def test_a_controller_that_is_down_for_a_while_loses_nothing(make: Callable[..., PilotedGrid]) -> None:
    grid = make(scaling={"provider": None})
    worker = grid.new_worker()
    grid.cluster.until_saved()
    grid.cluster.kill_controller()
    on_it = ["--strategy", "node_specific", "-n", worker]
    done = grid("run-shared", "-r", "cpu", "-a", "1", *on_it, "echo", "still here", check=0)
    assert done.stdout == "still here\n"
    grid("workers", "terminate", worker, "--force", check=0)
    wait_until(lambda: "Unable to contact slurm controller" in (grid.workers()[worker]["problem"] or ""), 40)
    grid.cluster.start_controller()
    wait_until(lambda: not grid.workers(), 90)
    grid.until_clean()


def test_the_token_of_a_pilot_is_nowhere_to_be_read_and_core_hours_are_a_hard_limit(
    make: Callable[..., PilotedGrid],
) -> None:
    grid = make(scaling={"provider": None}, slurm={"budget_core_hours": 1.5})
    worker = grid.new_worker()
    refused = grid("workers", "create", "--yes", check=1)
    assert "providers.slurm.budget_core_hours is 1.5" in refused.stderr
    assert list(grid.workers()) == [worker]
    (node,) = [one for one in grid.json("status")["nodes"] if one["node_id"] == worker]
    assert (node["cpu_cores"], node["memory_gb"]) == (2, 1), "no more than its allocation"
    (spent,) = grid.json("scale", "status")["spending"]
    assert (spent["provider"], spent["budget_core_hours"]) == ("slurm", 1.5)
    assert 0 <= spent["core_hours_today"] < 1.5
    for words in (("scale", "status"), ("workers", "list")):
        last = grid(*words, check=0).stdout.splitlines()[-1]
        assert "slurm: " in last
        assert last.endswith(" by midnight UTC) of 1.5")
    job = grid.job_of(worker)
    shown = grid.cluster.ask("scontrol", "show", "job", "-dd", job)
    shown += grid.cluster.ask("scontrol", "write", "batch_script", job, "-")
    shown += (grid.host_dir / "daemon.log").read_text()
    assert worker in shown
    kept = [path for folder in (grid.cluster.folder, grid.shared) for path in folder.rglob("*") if path.is_file()]
    kept += grid.host_dir.glob("grid.db*")
    said = [shown.encode(), *(path.read_bytes() for path in kept)]
    for entry in Path("/proc").glob("[0-9]*"):
        if str(grid.scratch).encode() in (_read(entry / "cmdline")):
            said += [_read(entry / "cmdline"), _read(entry / "environ")]
    assert len(said) > len(kept) + 1, "the pilot's processes were looked at"
    assert b"gridjoin1_" not in b"".join(said)
    grid.end(worker)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _slow_sbatch(folder: Path, begun: Path) -> Path:
    """A folder for PATH whose `sbatch` takes two seconds longer."""
    folder.mkdir()
    program = folder / "sbatch"
    program.write_text(f'#!/bin/sh\ntouch {begun}\nsleep 2\nPATH=/usr/bin:/bin\nexec sbatch "$@"\n')
    program.chmod(0o755)
    return folder
