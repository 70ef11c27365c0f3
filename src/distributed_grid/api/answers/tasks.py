"""Tasks: jobs that pull workers ask for."""

from __future__ import annotations

from typing import Any

import msgspec

from distributed_grid.api.answers.common import Answer
from distributed_grid.api.worker_resources import requirements_view
from distributed_grid.domain.jobs import Job


class TaskRow(Answer, frozen=True, kw_only=True):
    """A waiting task."""

    task_id: str
    payload: Any
    command: list[str]
    env: dict[str, str]
    timeout_seconds: float
    requirements: dict[str, float]
    priority: str
    retries_left: int

    @classmethod
    def of(cls, job: Job) -> TaskRow:
        return cls(**_task_fields(job))


class AssignedTask(TaskRow, frozen=True, kw_only=True):
    """A task as its worker gets it, with its fence and the reservation that it runs under."""

    worker_id: str
    attempt: int
    fence: int
    resource_reservation_id: str

    @classmethod
    def of(cls, job: Job) -> AssignedTask:
        attempt = job.attempts[-1]
        return cls(
            worker_id=attempt.node,
            attempt=attempt.number,
            fence=attempt.fence,
            resource_reservation_id=attempt.lease_id,
            **_task_fields(job),
        )


def _task_fields(job: Job) -> dict[str, Any]:
    command = job.command
    return {
        "task_id": job.id,
        "payload": msgspec.json.decode(command.payload or "{}"),
        "command": list(command.argv),
        "env": dict(command.env),
        "timeout_seconds": command.timeout_ms / 1000,
        "requirements": requirements_view(job.sized_request.ask),
        "priority": job.request.priority.name.lower(),
        "retries_left": job.retries_left,
    }


class TaskList(Answer, frozen=True):
    tasks: list[TaskRow]
    more: bool
    total: int  # in all pages
    next: str | None


class TaskAssignment(Answer, frozen=True):
    """The task that a worker is to run now, or none."""

    task: AssignedTask | None
    ask_id: str


class AskWithdrawn(Answer, frozen=True):
    worker_id: str


class TaskReportAnswer(Answer, frozen=True, kw_only=True):
    """Whether a report was taken in, and the state of the task; else the reason."""

    accepted: bool
    repeated: bool = False
    reason: str | None = None
    state: str | None = None
