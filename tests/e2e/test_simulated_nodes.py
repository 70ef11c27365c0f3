"""The three nodes of the shipped config behave like three machines: each is measured by what its own work uses."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.project import PROJECT, set_rebalance_interval
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e

HOLD = "import time; kept = bytearray(300 << 20); print('full', flush=True); time.sleep(600)"
BACKGROUND = {"gpu-master": 23.3, "gpu1": 5.1, "gpu2": 3.6}
"""What the guide shows as used on each machine, in GB."""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A directory with the shipped configs, balanced every second instead of twice a minute."""
    folder: Path = tmp_path_factory.mktemp("simulated")
    shutil.copytree(PROJECT / "config", folder / "clone" / "config")
    set_rebalance_interval(folder / "clone" / "config", 1)
    shell = Shell(folder / "state", folder / "clone")
    shell("daemon", "start", "--config", "config/my-cluster-enhanced.yaml", check=0)
    yield shell
    shell.close()


def nodes(grid: Shell) -> dict[str, dict[str, Any]]:
    return {node["node_id"]: node for node in grid.observe("status")["nodes"]}


def used(grid: Shell) -> dict[str, float]:
    return {name: node["memory_used_gb"] for name, node in nodes(grid).items()}


def test_above_its_mark_the_master_borrows_memory_of_gpu2(clone: Shell) -> None:
    def automatic() -> list[dict[str, Any]]:
        return [one for one in clone.observe("status")["allocations"] if one["user"] == "grid"]

    lease = wait_until(automatic, seconds=30, pause=0.2)[0]
    assert (lease["target_node"], lease["node_id"], lease["resource_type"]) == ("gpu-master", "gpu2", "memory")
    (line,) = clone("events", "--type", "rebalanced", check=0).stdout.splitlines()[:1]
    assert "memory at 76.6 %, above the mark of 70 %" in line


def test_each_node_says_that_it_is_simulated_and_has_only_its_background_in_use(clone: Shell) -> None:
    shown = wait_until(lambda: {name: node for name, node in nodes(clone).items() if node["memory_used_gb"]})
    assert all(node["simulated"] for node in shown.values())
    assert {name: round(node["memory_used_gb"], 1) for name, node in shown.items()} == BACKGROUND
    text = clone("status", check=0).stdout
    assert text.count("alive, simulated") == 3


def test_offers_are_what_is_declared_less_the_background(clone: Shell) -> None:
    nodes_now = wait_until(lambda: {name: one for name, one in nodes(clone).items() if one["open"]})
    lent = {name: one["memory_free_gb"] + one["memory_lent_gb"] for name, one in nodes_now.items()}
    assert lent == pytest.approx({"gpu-master": 7.1, "gpu1": 10.0, "gpu2": 27.6}, abs=0.05)


def test_a_job_counts_on_its_own_node_and_on_no_other(clone: Shell) -> None:
    job = clone.start("run-shared", "-r", "memory", "-a", "0.5", "-n", "gpu1", sys.executable, "-c", HOLD)
    assert job.stdout is not None
    assert job.stdout.readline() == b"full\n"
    wait_until(lambda: used(clone)["gpu1"] >= BACKGROUND["gpu1"] + 0.29, seconds=30)
    assert round(used(clone)["gpu-master"], 1) == BACKGROUND["gpu-master"]
    assert round(used(clone)["gpu2"], 1) == BACKGROUND["gpu2"]
    job.kill()
    job.wait()


def test_a_block_counts_on_its_own_node_and_each_node_has_a_memory_server(clone: Shell) -> None:
    path = clone.cwd / "block"
    path.write_bytes(bytes(range(256)) * (1 << 19))
    for node in ("gpu1", "gpu2"):
        clone("memory", "store", node, str(path), "--node", node, check=0)
    wait_until(lambda: used(clone)["gpu2"] >= BACKGROUND["gpu2"] + 0.12, seconds=30)
    assert round(used(clone)["gpu-master"], 1) == BACKGROUND["gpu-master"]
    served = {path.parent.name for path in (clone.host_dir / "memory").glob("node-*/memory.sock")}
    assert served == {"node-gpu1", "node-gpu2"}


def test_more_memory_than_this_machine_has_is_refused_in_one_line(clone: Shell) -> None:
    path = clone.cwd / "config" / "huge.yaml"
    path.write_text("nodes:\n" + "".join(f"- {{name: {one}, host: local, memory_gb: 9000}}\n" for one in ("a", "b")))
    huge = Shell(clone.state_dir.with_name("huge"), clone.cwd)
    try:
        refused = huge("run-shared", "--config", str(path), "-r", "memory", "-a", "8000", "true", check=1)
        (line,) = refused.stderr.splitlines()
        assert "a: simulated on a machine with" in line
        assert line.endswith("8000.0 GB asked")
        reserved = huge.json("boost", "request", "a", "memory", "8000")
        assert reserved["source_node"] == "b"
    finally:
        huge.close()
