"""`TaskManager`: tasks for workers, as dictionaries. A task is a job of the grid: all its state is in the ledger."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from distributed_grid.api.worker_resources import required_amounts
from distributed_grid.client.async_client import BlockingSession
from distributed_grid.client.conversation import as_object
from distributed_grid.client.pages import every_page
from distributed_grid.domain.resources import Priority
from distributed_grid.errors import BadInput

if TYPE_CHECKING:
    from distributed_grid.config import ClusterConfig

Task = dict[str, Any]
_REQUIREMENTS = ("requirements", "resource_requirements")
_RETRIES = ("retries", "max_retries")
_TIMEOUT = ("timeout_seconds", "timeout")


@dataclass(frozen=True, slots=True)
class TaskReceipt:
    """Answer to a report; false where it changed nothing, with the `reason`. `state` is the present one of the task."""

    accepted: bool
    repeated: bool = False
    reason: str | None = None
    state: str | None = None

    def __bool__(self) -> bool:
        return self.accepted


class TaskManager:
    """Adds tasks, hands them out and takes their results in."""

    def __init__(
        self,
        cluster_config: ClusterConfig | None = None,
        *,
        state_dir: str | os.PathLike[str] | None = None,
        session: BlockingSession | None = None,
        resource_predictor: Any = None,
    ) -> None:
        self._session = session or BlockingSession(cluster_config, state_dir=state_dir)
        self.resource_predictor = resource_predictor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; a later call connects again. Safe to call twice."""
        self._session.close()

    @property
    def task_queue(self) -> list[Task]:
        """The waiting tasks, the oldest first; changing the list changes nothing."""
        pages = every_page(self._session.list_tasks)
        return [task_of(as_object(task)) for page in pages for task in page.tasks]

    def add_task(self, task: Mapping[str, Any]) -> str:
        """Queue a task; its id. Further keys of the dictionary are for the worker. A task without requirements is sized
        from the earlier runs of its type or command.

        `task_id` (made where missing), `requirements`, `priority`, `retries`, `timeout_seconds`, `labels`, and
        `command` (a list of words) with `env`, which lets nodes with an agent run it, too.
        """
        return self._session.submit_task(**submission_fields(task)).job.job_id

    def get_next_task(
        self,
        worker_id: str,
        worker_capabilities: object = None,
        worker_resources: Mapping[str, Any] | None = None,
        *,
        incarnation: str = "",
        running: Sequence[str] = (),
        wait_seconds: float = 0.0,
    ) -> Task | None:
        """The next task of a worker, or None; the same one again until it is reported, or named as running.

        Resources, where they are given, are reported first. Capabilities count from the registration.
        """
        if worker_resources:
            self._session.report_pull_worker(
                worker_id=worker_id, incarnation=incarnation, resources=dict(worker_resources)
            )
        task = self._session.take_task(
            worker_id=worker_id, incarnation=incarnation, running=list(running), wait_seconds=wait_seconds
        ).task
        return task_of(as_object(task)) if task is not None else None

    def complete_task(
        self,
        task: Mapping[str, Any] | str,
        worker_id: str = "",
        result: Any = None,
        *,
        fence: int | None = None,
        cpu_seconds: float = 0.0,
        peak_memory_mb: float = 0.0,
    ) -> TaskReceipt:
        """Report the success of a task, with its result. Its reservation ends. By its id a task needs its fence."""
        fields = report_fields(task, worker_id, fence)
        fields |= {"succeeded": True, "result": checked_json(result, "the result")}
        return self._report(fields, cpu_seconds, peak_memory_mb)

    def fail_task(
        self,
        task: Mapping[str, Any] | str,
        worker_id: str = "",
        error: str = "",
        *,
        fence: int | None = None,
        result: Any = None,
        over_limit: bool = False,
        cpu_seconds: float = 0.0,
        peak_memory_mb: float = 0.0,
    ) -> TaskReceipt:
        """Report the failure of a task; it runs again where it has retries left, or with more memory where the grid has
        sized it and it was `over_limit`. Its reservation ends with the attempt."""
        fields = report_fields(task, worker_id, fence)
        fields |= {
            "succeeded": False,
            "over_limit": over_limit,
            "error": str(error),
            "result": checked_json(result, "the result"),
        }
        return self._report(fields, cpu_seconds, peak_memory_mb)

    def get_task_result(self, task_id: str) -> Any:
        """The reported result of a task; None before its report."""
        return self._session.get_job(job_id=task_id).job.result

    def _report(self, fields: dict[str, Any], cpu_seconds: float, peak_memory_mb: float) -> TaskReceipt:
        answer = self._session.report_task(**fields, cpu_seconds=cpu_seconds, peak_memory_mb=peak_memory_mb)
        return TaskReceipt(answer.accepted, answer.repeated, answer.reason, answer.state)

    def _estimate_task_resources(self, task: Mapping[str, Any], resource_predictor: Any = None) -> dict[str, Any]:
        """Needs of a task: as it states, else as predicted, else one core."""
        stated = _first(task, _REQUIREMENTS)
        if stated is not None:
            return dict(_mapping(stated, "the requirements of a task"))
        predictor = resource_predictor or self.resource_predictor
        if predictor is None:
            return {"cpu_cores": 1}
        try:
            predicted = predictor.predict_resource_requirements(task)
        except BadInput:  # it has neither a type nor a command
            return {"cpu_cores": 1}
        known = ("memory_mb", "gpu_memory_mb") if predicted["tier"] != "defaults" else ()
        return {"cpu_cores": 1, **{name: predicted[name] for name in known if predicted[name]}}


def submission_fields(task: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a task's request; BadInput for an invalid task."""
    task = _mapping(task, "a task")
    requirements = _mapping(_first(task, _REQUIREMENTS) or {}, "the requirements of a task")
    required_amounts(requirements)
    env, priority = _mapping(task.get("env") or {}, "the environment of a task"), task.get("priority", "medium")
    if not isinstance(priority, str | int):
        raise BadInput("the priority of a task must be a word")
    try:
        level = Priority.parse(priority).name.lower()
    except ValueError:  # a number without a name
        raise BadInput(f"no priority {priority}: use low, medium (normal), high or urgent (critical)") from None
    return {
        "request_id": uuid.uuid4().hex,
        "task_id": str(task.get("task_id") or ""),
        "payload": checked_json(dict(task), "the task"),
        "argv": words(task.get("command") or (), "the command of a task must be a list of words"),
        "env": dict(env),
        "requirements": dict(requirements),
        "priority": level,
        "retries": _first(task, _RETRIES) or 0,
        "timeout_seconds": _first(task, _TIMEOUT) or 0.0,
        "labels": words(task.get("labels") or (), "the labels of a task must be a list of words"),
    }


def task_of(view: Mapping[str, Any]) -> Task:
    """A task as a worker gets it: the dictionary that was added, with the fields of the grid."""
    payload = view["payload"]
    added = payload if isinstance(payload, dict) else {"payload": payload}
    return {**added, **{name: value for name, value in view.items() if name != "payload"}}


def report_fields(task: Mapping[str, Any] | str, worker_id: str, fence: int | None) -> dict[str, Any]:
    """The attempt of a report; BadInput where it does not name one."""
    if isinstance(task, Mapping):
        task_id, worker_id = str(task.get("task_id", "")), worker_id or str(task.get("worker_id", ""))
        fence = task.get("fence") if fence is None else fence
    else:
        task_id = task
    if not task_id or not worker_id:
        raise BadInput("a report needs the ids of its task and of its worker")
    if isinstance(fence, bool) or not isinstance(fence, int):
        raise BadInput(f"a report needs the fence that {task_id} was handed out with")
    return {"task_id": task_id, "worker_id": worker_id, "fence": fence}


def checked_json(value: Any, what: str) -> Any:
    """The value, if it can be written as JSON."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"{what} cannot be written as JSON: {error}") from None
    return value


def words(value: Any, problem: str) -> list[str]:
    """A list of words; BadInput with the problem where it is none."""
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise BadInput(problem)
    return list(value)


def _first(task: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((task[name] for name in names if task.get(name) is not None), None)


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadInput(f"{what} must be a mapping, not {type(value).__name__}")
    return value
