"""The shapes of the answers, for OpenAPI: the same fields that `--json` prints. Answers may have more than these."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Shape(BaseModel):
    """A JSON object."""

    model_config = ConfigDict(extra="allow")


class ErrorBody(Shape):
    type: str
    message: str
    reasons: list[str] = []


class Error(Shape):
    """Whatever went wrong."""

    error: ErrorBody


class Health(Shape):
    status: str = "ok"


class Node(Shape):
    node_id: str
    host: str
    role: str
    state: str
    cpu_cores: float
    memory_gb: float
    gpus: int
    custom: dict[str, int]
    cpu_lent: float
    memory_lent_gb: float
    gpus_lent: float
    pressure: float | None
    cpu_percent: float | None
    memory_used_gb: float | None
    seconds_since_heard: float | None


class Nodes(Shape):
    nodes: list[Node]


class OneNode(Shape):
    node: Node


class Offer(Shape):
    node_id: str
    resource_type: str
    amount: float
    generation: int
    expires_at: str | None


class Offers(Shape):
    offers: list[Offer]


class Allocation(Shape):
    allocation_id: str
    request_id: str
    job_id: str | None
    node_id: str | None
    target_node: str | None
    resource_type: str
    amount: float
    resources: dict[str, Any]
    user: str
    priority: str
    state: str
    fence: int
    requested_at: str | None
    allocated_at: str | None
    expires_at: str | None
    reason: str | None
    detail: str | None


class Allocations(Shape):
    allocations: list[Allocation]


class OneAllocation(Shape):
    allocation: Allocation
    reasons: list[str] = Field(default=[], description="Why it waits, node by node.")


class Outcome(Shape):
    outcome: str | None
    exit_code: int | None
    signal: int | None
    detail: str | None


class Attempt(Outcome):
    number: int
    allocation_id: str
    node_id: str
    fence: int
    pid: int | None
    cores: list[int]
    assigned_at: str | None
    started_at: str | None
    ended_at: str | None


class Job(Outcome):
    job_id: str
    uid: str
    command: str
    cwd: str | None
    environment_names: list[str]
    user: str
    state: str
    node_id: str | None
    resource_type: str
    amount: float
    resources: dict[str, Any]
    priority: str
    submitted_at: str | None
    ended_at: str | None
    attempts: list[Attempt]
    retries_left: int


class Jobs(Shape):
    jobs: list[Job]


class OneJob(Shape):
    job: Job
    reasons: list[str] = Field(default=[], description="Why it waits, node by node.")


class Event(Shape):
    seq: int
    time: str | None
    type: str
    user: str | None
    subject: str
    job_id: str | None
    node_id: str | None
    reason: str | None
    data: dict[str, Any]


class Joined(Shape):
    node: str
    joined_at: str | None
