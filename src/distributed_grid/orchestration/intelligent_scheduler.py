"""`IntelligentScheduler`: a place for a task, with the reasons for it; the task's own until it is completed.

The scheduler holds the way to the control plane, and nothing else. A task's place is a lease whose id is the task's:
asking again for the same is answered with the same, asking for something else under that id is a Conflict, and any
program can complete the task. Once completed, the id may be used again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from distributed_grid.domain.resources import Priority as TaskPriority
from distributed_grid.domain.strategies import Strategy as SchedulingStrategy
from distributed_grid.monitoring.scheduling_metrics import SchedulingFigures
from distributed_grid.orchestration.attaching import Attached
from distributed_grid.orchestration.scheduling_request import ResourceRequirement, SchedulingRequest
from distributed_grid.orchestration.shapes import AllocationRow, SchedulingStatus

__all__ = [
    "Alternative",
    "IntelligentScheduler",
    "ResourceRequirement",
    "SchedulingDecision",
    "SchedulingRequest",
    "SchedulingStatus",
    "SchedulingStrategy",
    "TaskPriority",
]


@dataclass(frozen=True, slots=True)
class Alternative:
    """A node that came after the chosen one, its score by the strategy, and why it was not chosen."""

    node_id: str
    score: float
    why: str


@dataclass(frozen=True, slots=True)
class SchedulingDecision:
    """Where a task goes and why. A dry run has no `allocation_id`; where it would have to wait, no `node_id` either.

    `nodes` are all places of a gang, the first being `node_id`. `confidence` is from 0 to 1; `docs/explain.md` says
    what it is made of.
    """

    task_id: str
    node_id: str | None
    confidence: float
    reasoning: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    estimated_start: datetime | None
    allocation_id: str | None
    strategy: SchedulingStrategy
    nodes: tuple[str, ...]


class IntelligentScheduler(Attached):
    """Gives tasks their places."""

    async def schedule_task(self, request: SchedulingRequest) -> SchedulingDecision:
        """The place of a task, once it has it. Raises Refused with the reasons where it gets none at once and may not
        wait, or never could, and TimedOut where the wait was in vain."""
        answer = await self._client.call("ask", **request.message())
        return decision_of(request.task_id, answer, dry_run=request.dry_run)

    async def complete_task(self, task_id: str) -> AllocationRow:
        """Give a task's place back, all of them of a gang. A second time is harmless; NotFound for no task at all."""
        answer = await self._client.call("release", allocation_id=task_id, exact=True)
        allocation: AllocationRow = answer["allocation"]
        return allocation

    async def get_scheduling_status(self) -> SchedulingStatus:
        """How well requests are served, who is open, what is held, and how many wait."""
        status = await self._client.call("status")
        figures: SchedulingFigures = (await self._client.call("metrics", kind="scheduling"))["scheduling"]
        sharing = (await self._client.call("config"))["config"]["resource_sharing"]
        return {
            **figures,
            "strategy": sharing["strategy"],
            "open_nodes": [node["node_id"] for node in status["nodes"] if node["open"]],
            "allocations": status["allocations"],
            "running_jobs": sum(1 for job in status["jobs"] if job["state"] == "running"),
            "waiting": status["waiting"],
        }


def decision_of(task_id: str, answer: Mapping[str, Any], *, dry_run: bool) -> SchedulingDecision:
    """The control plane's answer to an ask as Python programs see it."""
    told, allocation = answer["decision"], answer["allocation"]
    node, start = told["node_id"], told["estimated_start"]
    return SchedulingDecision(
        task_id=task_id,
        node_id=node,
        confidence=told["confidence"],
        reasoning=tuple(told["reasoning"]),
        alternatives=tuple(Alternative(one["node_id"], one["score"], one["why"]) for one in told["alternatives"]),
        estimated_start=None if start is None else datetime.fromisoformat(start),
        allocation_id=None if dry_run else allocation["allocation_id"],
        strategy=SchedulingStrategy(told["strategy"]),
        nodes=tuple(allocation["gang_nodes"] or ([node] if node else [])),
    )
