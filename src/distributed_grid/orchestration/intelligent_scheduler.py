"""`IntelligentScheduler`: placement of tasks, with the reasons; a task keeps its place until it is completed.

A task's place is a lease whose id is the task's: the same request again has the same answer, another request under that
id is a Conflict, and any program can complete the task. A completed id may be used again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from distributed_grid.api.answers.leases import AllocationDetail
from distributed_grid.api.answers.metrics import SchedulingFigures
from distributed_grid.client.async_client import GridSession
from distributed_grid.client.conversation import JsonObject, as_object, as_objects, required
from distributed_grid.client.pages import whole_status_async
from distributed_grid.client.placement_arguments import (
    PlacementArguments,
    finite_amount,
    placement_fields,
    positive_seconds,
    resource_name,
)
from distributed_grid.domain.resources import Priority as TaskPriority
from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.scheduling_policy import Strategy as SchedulingStrategy
from distributed_grid.errors import BadInput

if TYPE_CHECKING:
    from distributed_grid.client.placement_arguments import Moment
    from distributed_grid.quantities import Span

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
class ResourceRequirement:
    """An amount of one resource: cores, GB, GPUs or a declared resource; for GPUs also their models, and the GB on
    each."""

    resource_type: ResourceType | str
    amount: float
    gpu_models: Sequence[str] = ()
    gpu_memory_gb: float = 0.0


Requirements = Sequence[ResourceRequirement] | Mapping[str, float] | Mapping[ResourceType, float]


@dataclass(frozen=True, slots=True)
class SchedulingRequest:
    """A task to be placed.

    `preferred_nodes` are preferences; `required_nodes`, `labels`, `affinity` and `anti_affinity` are requirements,
    and the last two name nodes, jobs, tasks or groups. A `gang` is a number of places on as many nodes, all of them or
    none. Without a strategy the config's counts; with `node_specific` the preferred nodes are required. `expects` is
    the expected duration of the task, `deadline` its latest end. After `duration` the place is released, else at
    `complete_task`. `target_node` is the node that the task is for; `local_first` starts there. `wait_seconds=0` is
    refused at once where nothing is free, and `dry_run` changes nothing.
    """

    task_id: str
    requirements: Requirements
    priority: TaskPriority | str = TaskPriority.MEDIUM
    strategy: SchedulingStrategy | str | None = None
    preferred_nodes: Sequence[str] = ()
    required_nodes: Sequence[str] = ()
    affinity: Sequence[str] = ()
    anti_affinity: Sequence[str] = ()
    labels: Mapping[str, str] | Sequence[str] = ()
    group: str = ""
    gang: int = 1
    deadline: Moment | None = None
    expects: Span | None = None
    duration: Span | None = None
    target_node: str = ""
    wait_seconds: float = 300.0
    dry_run: bool = False

    def message(self) -> dict[str, Any]:
        """The fields of the request; the task's id is the name of its lease."""
        if isinstance(self.requirements, Mapping):
            needs = [ResourceRequirement(kind, amount) for kind, amount in self.requirements.items()]
        else:
            needs = list(self.requirements)
        kinds = [resource_name(need.resource_type) for need in needs]
        if not needs:
            raise BadInput("a task needs at least one requirement, such as ResourceRequirement('cpu', 1)")
        if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            raise BadInput(f"a resource is asked for twice: {', '.join(twice)}")
        main = needs[0]
        where: PlacementArguments = {
            "strategy": SchedulingStrategy.parse(self.strategy) if self.strategy else None,
            "required_nodes": self.required_nodes,
            "also": {resource_name(need.resource_type): need.amount for need in needs[1:]},
            "gpu_models": [model for need in needs for model in need.gpu_models],
            "gpu_memory_gb": max(need.gpu_memory_gb for need in needs),
            "labels": self.labels,
            "affinity": self.affinity,
            "anti_affinity": self.anti_affinity,
            "group": self.group,
            "expects": self.expects,
            "deadline": self.deadline,
        }
        return {
            **placement_fields(where, self.preferred_nodes),
            "request_id": self.task_id,
            "again": True,
            "resource_type": resource_name(main.resource_type),
            "amount": finite_amount(main.amount),
            "priority": TaskPriority.parse(self.priority).name.lower(),
            "gang": self.gang,
            "duration_seconds": positive_seconds(self.duration, "a duration") if self.duration is not None else 0.0,
            "target": self.target_node,
            "wait_seconds": self.wait_seconds,
            "dry_run": self.dry_run,
        }


@dataclass(frozen=True, slots=True)
class Alternative:
    """A node that ranked below the chosen one, its score by the strategy, and the reason."""

    node_id: str
    score: float
    why: str


@dataclass(frozen=True, slots=True)
class SchedulingDecision:
    """Place of a task, with the reasons. A dry run has no `allocation_id`; one that would wait has no `node_id` either.

    `nodes` are all places of a gang, the first being `node_id`. `confidence` is from 0 to 1; `docs/guide/explain.md`
    lists its parts.
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


class SchedulingStatus(SchedulingFigures):
    """Scheduling figures, with the present leases, jobs and requests."""

    strategy: str
    open_nodes: list[str]
    allocations: list[JsonObject]
    running_jobs: int
    waiting: int


class IntelligentScheduler(GridSession):
    """Places tasks and releases their places."""

    async def schedule_task(self, request: SchedulingRequest) -> SchedulingDecision:
        """The place of a task, once it is granted. Raises Refused with the reasons where none is free and it may not
        wait, or where none can ever be, and TimedOut at the end of its wait."""
        answer = await self._client.request_lease(**request.message())
        return decision_of(request.task_id, answer, dry_run=request.dry_run)

    async def complete_task(self, task_id: str) -> JsonObject:
        """Release a task's place, all places of a gang. A second time is harmless; NotFound for an unknown task."""
        return as_object((await self._client.release_lease(allocation_id=task_id, exact=True)).allocation)

    async def get_scheduling_status(self) -> SchedulingStatus:
        """Figures of the scheduler, open nodes, leases, and numbers of running jobs and waiting requests."""
        status = await whole_status_async(self._client)
        figures = required((await self._client.get_metrics(kind="scheduling")).scheduling)
        config = (await self._client.get_config()).config
        return {
            **figures,
            "strategy": config["resource_sharing"]["strategy"],
            "open_nodes": [node.node_id for node in status.nodes if node.open],
            "allocations": as_objects(status.allocations),
            "running_jobs": status.job_states.get("running", 0),
            "waiting": status.waiting,
        }


def decision_of(task_id: str, answer: AllocationDetail, *, dry_run: bool) -> SchedulingDecision:
    """The decision in the answer to a lease request."""
    decision, allocation = required(answer.decision), answer.allocation
    node, start = decision.node_id, decision.estimated_start
    return SchedulingDecision(
        task_id=task_id,
        node_id=node,
        confidence=decision.confidence,
        reasoning=tuple(decision.reasoning),
        alternatives=tuple(Alternative(node.node_id, node.score, node.why) for node in decision.alternatives),
        estimated_start=None if start is None else datetime.fromisoformat(start),
        allocation_id=None if dry_run else allocation.allocation_id,
        strategy=SchedulingStrategy(decision.strategy),
        nodes=tuple(allocation.gang_nodes or ([node] if node else [])),
    )
