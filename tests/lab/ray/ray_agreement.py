"""Whether grid and Ray say the same of a boost."""

from __future__ import annotations

import contextlib

from tests.lab.lab import Lab
from tests.lab.lab_host import Host
from tests.lab.ray.ray_grids import Console, RayGrid
from tests.support.shell import wait_until

SOON = 120.0
"""What the grid promises."""


class Agreement:
    """Asks grid and Ray about a boost; of Ray by one program for as long as that lives."""

    def __init__(self, grid: RayGrid, lab: Lab, boost_id: str) -> None:
        self._grid, self._lab, self._boost_id = grid, lab, boost_id
        self._console: Console | None = None

    def is_held(self) -> bool | None:
        """Whether both say that the boost is held, or both that it is not; None where they differ."""
        rows = {row["boost_id"]: row for row in self._grid.observe("boost", "status")["boosts"]}
        row = rows.get(self._boost_id)
        if row is not None and (row["state"] != "active" or row["placement_group"] is None):
            return None
        groups = self._groups()
        wanted = {row["placement_group"]: row["source_node"]} if row is not None else {}
        return bool(groups) if groups == wanted else None

    def _groups(self) -> dict[str, str] | None:
        """The groups that Ray has of the boost; None while Ray is not back."""
        try:
            if self._console is None:
                self._console = Console(self._grid, self._lab.host("gpu-master"))
            return {name: node for name, node in self._console.groups().items() if self._boost_id in name}
        except (EOFError, AssertionError, BrokenPipeError):
            self.close()
            return None

    def close(self) -> None:
        if self._console is not None:
            self._console.close()
            self._console = None


def held(grid: RayGrid, lab: Lab, boost_id: str) -> bool:
    """Whether a boost is held, when both agree within the promised time."""
    agreement = Agreement(grid, lab, boost_id)
    found: list[bool] = []

    def agreed() -> bool:
        is_held = agreement.is_held()
        if is_held is not None:
            found.append(is_held)
        return bool(found)

    with contextlib.closing(agreement):
        wait_until(agreed, SOON, 0.5)
    return found[-1]


def kill_and_wait(grid: RayGrid, host: Host, program: str) -> None:
    """Kill a process of Ray, and wait until the grid has started another: before that Ray may not have noticed."""
    killed = host.find(program)
    assert len(killed) == 1
    for pid in killed:
        host.kill(pid)
    wait_until(lambda: host.find(program) not in ([], killed), 110)
    wait_until(lambda: grid.node(host.name)["ray"]["state"] == "running", 110)  # `ray start` has come to its end
