"""The real grid balances itself: a node that fills its memory gets some of another's, and gives it back."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.shell import Shell, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("own_cgroup")]

HOLD_GB = 2.0
HOLDER = """
import mmap, sys
kept = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
print("full", flush=True)
input()
"""
OWN = "thresholds: {cpu_percent_max: 100, memory_percent_max: 100, cpu_min_cores: 0, memory_min_gb: 0, dwell: 0}"
CONFIG = f"""
nodes:
- {{name: small, host: local, simulated: false, memory_gb: SMALL, trust_declared: true, {OWN}}}
- {{name: large, host: local, simulated: false, memory_gb: 4000, trust_declared: true, {OWN}}}
resource_sharing:
  mode: MODE
  policy: aggressive
  rebalance_interval: 0.5
  thresholds: {{memory_pressure_high: HIGH, memory_pressure_low: LOW, cpu_pressure_high: 1.0, gpu_pressure_high: 1.0}}
"""


@contextlib.contextmanager
def memory_in_use() -> Iterator[None]:
    """So much memory is really taken, by a process that the grid knows nothing of."""
    command = [sys.executable, "-c", HOLDER, str(round(HOLD_GB * 1024**3))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"full\n"
            yield
        finally:
            holder.kill()


def begin(grid: Shell, mode: str) -> None:
    """A grid whose node `small` is below its marks by nearly half of the holder's memory, and above them by half of it
    while that is in use."""
    used = wait_until(lambda: grid.observe("status")["nodes"][0]["memory_used_gb"])
    size = used + 3 * HOLD_GB
    numbers = {
        "SMALL": size,
        "MODE": mode,
        "LOW": (used + 0.45 * HOLD_GB) / size,
        "HIGH": (used + 0.5 * HOLD_GB) / size,
    }
    text = CONFIG
    for word, number in numbers.items():
        text = text.replace(word, number if isinstance(number, str) else f"{number:.4f}")
    (grid.cwd / "two.yaml").write_text(text)
    grid("daemon", "stop", check=0)  # a command that only shows something does not change its config
    grid("status", "--config", "two.yaml", check=0)


def borrowed(grid: Shell) -> list[dict[str, Any]]:
    return [lease for lease in grid.observe("status")["allocations"] if lease["user"] == "grid"]


def test_memory_pressure_makes_an_automatic_lease_appear_and_its_end_makes_it_go(grid: Shell) -> None:
    begin(grid, "share_and_offload")
    wait_until(lambda: grid.observe("status")["nodes"][0]["memory_used_gb"])
    assert borrowed(grid) == []
    with memory_in_use():
        lease = wait_until(lambda: borrowed(grid), seconds=40, pause=0.2)[0]
        assert (lease["target_node"], lease["node_id"], lease["resource_type"]) == ("small", "large", "memory")
        assert lease["allocation_id"].startswith("auto-small-memory-")
        (advice,) = wait_until(lambda: grid.observe("status")["recommendations"])
        assert (advice["source_node"], advice["target_node"], advice["cause"]) == ("small", "large", "memory")
        assert "SHOULD MOVE" in grid("status", check=0).stdout
        assert _over_rest(grid, "/v1/recommendations")["recommendations"] == [advice]
    wait_until(lambda: not borrowed(grid), seconds=40, pause=0.2)
    actions = [line["data"]["action"] for line in grid.events("rebalanced")]
    count = len(actions) // 2  # the memory fills up while it is looked at, so it may have been asked for in parts
    assert actions == [*(count * ["asked"]), *(count * ["given_back"])]
    counted = _over_rest(grid, "/v1/metrics/rebalancing")["rebalancing"]
    assert (counted["asked"], counted["given_back"], counted["rebalances_per_hour"]) == (count, count, 2 * count)


def test_a_mode_that_only_recommends_borrows_nothing(grid: Shell) -> None:
    begin(grid, "offload_only")
    with memory_in_use():
        wait_until(lambda: grid.observe("status")["recommendations"], seconds=40, pause=0.2)
    wait_until(lambda: not grid.observe("status")["recommendations"], seconds=40, pause=0.2)
    assert borrowed(grid) == []
    assert len(grid.events("recommended")) == 1
    assert grid.events("rebalanced") == []


def test_what_the_grid_holds_neither_keeps_a_user_from_running_nor_another_config_from_being_used(grid: Shell) -> None:
    begin(grid, "share_and_offload")
    with memory_in_use():
        lease = wait_until(lambda: borrowed(grid), seconds=40, pause=0.2)[0]
        offers = grid.json("shared-status")["offers"]
        (left,) = [one["amount"] for one in offers if (one["node_id"], one["resource_type"]) == ("large", "memory")]
        more = f"{left + lease['amount'] / 2:.3f}"
        grid("run-shared", "-r", "memory", "-a", more, "-n", "large", "-w", "0", "true", check=0)
        assert "made room for medium request" in grid.events("preempted")[0]["reason"]
        wait_until(lambda: borrowed(grid), seconds=40, pause=0.2)
        (grid.cwd / "other.yaml").write_text("nodes: [{name: other, host: local}]")
        grid("run-shared", "--config", "other.yaml", "true", check=0)
        assert "other" in [node["node_id"] for node in grid.json("status")["nodes"]]


def _over_rest(grid: Shell, path: str) -> dict[str, Any]:
    token = (grid.host_dir / "token").read_text().strip()
    url = str(grid.json("daemon", "status")["rest"]) + path
    headers = {"Authorization": f"Bearer {token}"}
    answer = httpx.get(url, headers=headers, timeout=30, trust_env=False, verify=grid.trust)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found
