"""Whether grid and Ray say the same of a boost."""

from __future__ import annotations

from typing import Any

from tests.lab.lab import Lab
from tests.lab.lab_host import Host
from tests.lab.ray.ray_grids import Console, RayGrid
from tests.support.shell import wait_until

SOON = 120.0
"""What the grid promises."""


def settled(grid: RayGrid, lab: Lab, boost_id: str) -> dict[str, str] | None:
    """The groups of a boost when grid and Ray agree about it, else None."""
    rows = {row["boost_id"]: row for row in grid.json("boost", "status")["boosts"]}
    try:
        ray = Console(grid, lab.host("gpu-master"))
    except (EOFError, AssertionError):
        return None  # Ray is not back yet
    try:
        groups: dict[str, str] = {name: node for name, node in ray.groups().items() if boost_id in name}
    except (EOFError, AssertionError, BrokenPipeError):
        return None
    finally:
        ray.close()
    row: dict[str, Any] | None = rows.get(boost_id)
    if row is None:
        return groups if not groups else None
    if row["state"] != "active" or groups != {row["placement_group"]: row["source_node"]}:
        return None
    return groups


def held(grid: RayGrid, lab: Lab, boost_id: str) -> bool:
    """Whether a boost is held, when both agree within the promised time."""
    found: list[dict[str, str]] = []

    def agreed() -> bool:
        groups = settled(grid, lab, boost_id)
        if groups is not None:
            found.append(groups)
        return bool(found)

    wait_until(agreed, SOON, 0.5)
    return bool(found[-1])


def kill_and_wait(host: Host, program: str) -> None:
    """Kill a process of Ray, and wait until the grid has started another: before that Ray may not have noticed."""
    killed = host.find(program)
    assert len(killed) == 1
    for pid in killed:
        host.kill(pid)
    wait_until(lambda: host.find(program) not in ([], killed), 110)
