"""The distributed memory guide, walked from top to bottom in a clone: what each of its sections says has to happen.

The shipped config is used as it is, so the grid borrows for `gpu-master` after a minute: the sections about the pool
happen meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from distributed_grid.config import load_cluster_config
from distributed_grid.orchestration.distributed_memory_pool import DistributedMemoryPool
from tests.e2e.clones import UsedClone
from tests.e2e.guides import Guide, assert_within, load_config, run_block
from tests.support.shell import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = "config/my-cluster-enhanced.yaml"
INTERVAL_SECONDS = 30
USED = {"gpu-master": (30.4, 23.3), "gpu1": (15.1, 5.1), "gpu2": (31.2, 3.6)}
"""GB that each node has, and uses."""


def test_the_guide_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide, clone = Guide("distributed_memory"), UsedClone(tmp_path)
    clone.enter(monkeypatch)
    try:
        the_nodes_are_as_full_as_the_guide_shows(clone)
        assert "ray.remote" in guide.next("How to Use")  # run by the tests with a real Ray
        memory_is_lent_on_request(clone, guide.next("Manual Allocation"), "10 GB")
        assert_within(yaml.safe_load(guide.next("Automatic Rebalancing")), load_config("my-cluster-enhanced.yaml"))
        the_pool_keeps_bytes_on_gpu2(clone, guide.next("How to Use"))
        asyncio.run(asyncio.wait_for(an_array_comes_back(guide.next("Example: Numpy Arrays in Remote Memory")), 100))
        the_demo_gets_everything_back(clone, guide.next("Run the Demo"))
        above_70_percent_memory_is_borrowed_and_used(clone)
        memory_is_lent_on_request(clone, guide.next("Immediate Actions"), "15 GB")
        asyncio.run(asyncio.wait_for(a_model_has_room_on_gpu2(clone, guide.next("Immediate Actions")), 60))
        guide.assert_all_read()
        above_75_percent_there_is_an_alert(clone)
        too_much_is_refused_with_remedies_that_work(clone)
        allocations_survive_the_control_plane(clone)
    finally:
        clone.close()


def the_nodes_are_as_full_as_the_guide_shows(clone: UsedClone) -> None:
    nodes = wait_until(lambda: [one for one in clone.observe("status")["nodes"] if one["memory_used_gb"] is not None])
    shown = {node["node_id"]: (node["memory_gb"], round(node["memory_used_gb"], 1)) for node in nodes}
    assert shown == USED


def memory_is_lent_on_request(clone: UsedClone, script: str, amount: str) -> None:
    """By gpu2, until it is released; in the list of allocations meanwhile."""
    request, _, rest = script.partition("# Check status")
    status, _, release = rest.partition("# Release allocation")
    shown = clone.type(request)
    assert f"{amount} from gpu2 for gpu-master" in shown
    (allocation_id,) = re.findall(r"allocation ([0-9a-f]{32})", shown)
    assert re.search(rf"gpu2 +{amount} .* high +active", clone.type(status or "grid resource-sharing status"))
    release = release or "poetry run grid resource-sharing release <allocation_id>"
    assert clone.type(release.replace("<allocation_id>", allocation_id)).endswith(": released\n")
    assert allocation_id not in json.dumps(clone.json("shared-status"))


def the_pool_keeps_bytes_on_gpu2(clone: UsedClone, program: str) -> None:
    """The program as it is, and step by step with a look at the block before it is freed."""
    clone.type(f"python - <<'end of the program'\n{program}\nend of the program\n")
    body = program.partition("async def use_remote_memory():\n")[2].partition("\nasyncio.run")[0]
    steps = [line.strip() for line in body.splitlines() if line.strip()]
    last = next(place for place, line in enumerate(steps) if "deallocate" in line)
    names: dict[str, Any] = {}
    exec(program.partition("async def")[0], names)

    async def story() -> None:
        await run_block("\n".join(steps[:last]), names)
        assert names["retrieved"] == names["data"]
        (row,) = clone.json("memory", "list")
        assert (row["size"], row["nodes"], row["state"]) == (5 * 1024**3, ["gpu2"], "ready")
        await run_block("\n".join(steps[last:]), names)

    asyncio.run(asyncio.wait_for(story(), 60))
    assert clone.json("memory", "list") == []


async def an_array_comes_back(program: str) -> None:
    async with DistributedMemoryPool(load_cluster_config(CONFIG)) as pool:
        names: dict[str, Any] = {"pool": pool}
        await run_block(program, names)
        assert names["large_array"].nbytes == 800_000_000
        assert np.array_equal(names["retrieved_array"], names["large_array"])
        assert (await pool.find(names["block_id"]))["nodes"] == ["gpu2"]
        await pool.deallocate(names["block_id"])


def the_demo_gets_everything_back(clone: UsedClone, script: str) -> None:
    shown = clone.type(script)
    assert "byte for byte the same: True" in shown
    assert "back again the same: True" in shown
    assert "a block on gpu2 and gpu1" in shown
    assert shown.count("\n== ") == 5
    assert clone.json("memory", "list") == []


def above_70_percent_memory_is_borrowed_and_used(clone: UsedClone) -> None:
    """Nobody asks for it; it is from gpu2, and work of gpu-master runs there with a part of it."""

    def automatic() -> list[dict[str, Any]]:
        return [boost for boost in clone.observe("boost", "status")["boosts"] if boost["automatic"]]

    (boost,) = wait_until(automatic, seconds=3 * INTERVAL_SECONDS, pause=1)
    assert (boost["target_node"], boost["source_node"], boost["resource_type"]) == ("gpu-master", "gpu2", "memory")
    events = clone("events", "--type", "rebalanced", check=0).stdout
    assert "memory at 76.6 %, above the mark of 70 %" in events
    within = clone("boost", "run", boost["boost_id"], "--", "sh", "-c", "echo $GRID_NODE $GRID_BOOST", check=0)
    assert within.stdout.split() == ["gpu2", boost["boost_id"]]
    words = ("-j", "for-master", "--for", "gpu-master", "-r", "memory", "-a", "1")
    assert clone("run-shared", *words, "sh", "-c", "echo $GRID_NODE", check=0).stdout == "gpu2\n"
    assert f"carved out of {boost['boost_id']}" in clone("explain", "for-master", check=0).stdout
    (left,) = automatic()
    assert left["used_amount"] == pytest.approx(boost["used_amount"] + 1)  # perhaps blocks of the demo had some of it
    assert left["amount"] == pytest.approx(boost["amount"] - 1)


async def a_model_has_room_on_gpu2(clone: UsedClone, program: str) -> None:
    names: dict[str, Any] = {"DistributedMemoryPool": DistributedMemoryPool, "config": load_cluster_config(CONFIG)}
    await run_block(program, names)
    found = await names["pool"].find(names["model_block"])
    assert (found["size"], found["nodes"]) == (10 * 1024**3, ["gpu2"])
    await names["pool"].deallocate(names["model_block"])
    await names["pool"].shutdown()


def above_75_percent_there_is_an_alert(clone: UsedClone) -> None:
    (alert,) = clone("events", "--type", "alert-raised", check=0).stdout.splitlines()
    assert re.search(r"gpu-master: memory at 77 %, above the mark of 75 %", alert)


def too_much_is_refused_with_remedies_that_work(clone: UsedClone) -> None:
    refused = clone("memory", "allocate", "60GB", check=1)
    assert refused.stderr.startswith("grid: No available nodes for memory allocation: ")
    assert clone.type("poetry run grid distribute status").count(" alive ") == 3
    assert "memory at 77 %" in clone.type("poetry run grid resource-sharing status")
    clone("memory", "allocate", "1GB", "--key", "smaller", check=0)
    clone("memory", "deallocate", "smaller", check=0)


def allocations_survive_the_control_plane(clone: UsedClone) -> None:
    request = ("resource-sharing", "request", "--node", "gpu-master", "--type", "memory", "--amount", "2")
    allocation_id = clone.json(*request)["allocation_id"]
    kept = Path(clone.env["HOME"]) / ".distributed_grid" / "resource_boosts.json"
    wait_until(lambda: kept.exists() and allocation_id in kept.read_text())
    clone.kill_daemon()
    assert allocation_id in [row["allocation_id"] for row in clone.json("resource-sharing", "status")["allocations"]]
    clone("resource-sharing", "release", allocation_id, check=0)
