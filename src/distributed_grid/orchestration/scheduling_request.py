"""What the scheduler is asked, in the words of Python programs: a task, what it needs, and where it may go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distributed_grid.domain.resources import Priority as TaskPriority
from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.strategies import Strategy as SchedulingStrategy
from distributed_grid.errors import BadInput
from distributed_grid.orchestration.placing import Moment, Placing, Span, amount_of, kind_of, seconds_of, wishes


@dataclass(frozen=True, slots=True)
class ResourceRequirement:
    """So much of one kind: cores, GB, GPUs or a declared resource. For GPUs also which, and the GB on each."""

    resource_type: ResourceType | str
    amount: float
    gpu_models: Sequence[str] = ()
    gpu_memory_gb: float = 0.0


Requirements = Sequence[ResourceRequirement] | Mapping[str, float] | Mapping[ResourceType, float]


@dataclass(frozen=True, slots=True)
class SchedulingRequest:
    """A task that wants a place.

    `preferred_nodes` are a wish; `required_nodes`, `labels`, `affinity` and `anti_affinity` are musts, and the last
    two name nodes, jobs, tasks or groups. A `gang` is so many places on as many nodes, all of them or none. Without a
    strategy the grid's own counts; with `node_specific` the preferred nodes are musts. The task `expects` to take so
    long and must be over at its `deadline`. After `duration` the place is taken back, else it is the task's until
    `complete_task`. `target_node` is the node it is for, which `local_first` goes by. `wait_seconds=0` is refused
    at once where nothing is free, and `dry_run` only asks what would happen.
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
        """The request as the socket takes it; the task's id is the name of its lease."""
        needs = _each_once(_listed(self.requirements))
        main = needs.pop(0)
        everything = (main, *needs)
        where: Placing = {
            "strategy": self.strategy,
            "required_nodes": self.required_nodes,
            "also": {kind_of(need.resource_type): need.amount for need in needs},
            "gpu_models": [model for need in everything for model in need.gpu_models],
            "gpu_memory_gb": max(need.gpu_memory_gb for need in everything),
            "labels": self.labels,
            "affinity": self.affinity,
            "anti_affinity": self.anti_affinity,
            "group": self.group,
            "expects": self.expects,
            "deadline": self.deadline,
        }
        return {
            **wishes(where, self.preferred_nodes),
            "request_id": self.task_id,
            "again": True,
            "resource_type": kind_of(main.resource_type),
            "amount": amount_of(main.amount),
            "priority": TaskPriority.parse(self.priority).name.lower(),
            "gang": self.gang,
            "duration_seconds": seconds_of(self.duration, "a duration") if self.duration is not None else 0.0,
            "target": self.target_node,
            "wait_seconds": self.wait_seconds,
            "dry_run": self.dry_run,
        }


def _listed(requirements: Requirements) -> Iterator[ResourceRequirement]:
    if isinstance(requirements, Mapping):
        return (ResourceRequirement(kind, amount) for kind, amount in requirements.items())
    return iter(requirements)


def _each_once(requirements: Iterator[ResourceRequirement]) -> list[ResourceRequirement]:
    """The requirements, if there are any and none is about the same as another."""
    needs = list(requirements)
    kinds = [kind_of(need.resource_type) for need in needs]
    if not needs:
        raise BadInput("a task needs at least one requirement, such as ResourceRequirement('cpu', 1)")
    if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
        raise BadInput(f"a resource is asked for twice: {', '.join(twice)}")
    return needs
