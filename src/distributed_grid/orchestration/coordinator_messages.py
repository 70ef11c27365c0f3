"""Messages of the coordinator: from a dictionary with a `type` to a request of the control plane, and its answer back.

Nothing here does input or output: `Coordinator` drives it with plain calls, `CoordinatorServer` with an event loop.
An invalid message is refused in one line, and changes nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from distributed_grid.api import requests
from distributed_grid.api.worker_resources import check_report, reported_resources
from distributed_grid.client.conversation import JsonObject
from distributed_grid.errors import BadInput
from distributed_grid.orchestration.task_manager import checked_json, report_fields, submission_fields, task_of, words

Message = Mapping[str, Any]
Reply = dict[str, Any]
MAX_WAIT_SECONDS = 60.0


class CoordinatorCall(Struct, frozen=True):
    """One request to the control plane, and the conversion of its answer."""

    request: type[requests.Message]
    arguments: dict[str, Any]
    reply: Callable[[JsonObject], Reply]

    @property
    def op(self) -> str:
        return str(self.request.__struct_config__.tag)


MESSAGE_TYPES = (
    *("register", "heartbeat", "get_task", "next_task", "get_next_task", "task_result", "complete", "complete_task"),
    *("fail", "fail_task", "add_task", "task_status", "status", "unregister"),
)


def parse_message(message: Any, *, connection: str = "") -> CoordinatorCall:
    """The request of a message; BadInput for an invalid one. `connection` names the process of a message that names
    none."""
    if not isinstance(message, Mapping):
        raise BadInput(f"a message must be a mapping, not {type(message).__name__}")
    kind = message.get("type")
    if not isinstance(kind, str) or kind not in MESSAGE_TYPES:
        shown = repr(kind[:40]) if isinstance(kind, str) else "None" if kind is None else type(kind).__name__
        raise BadInput(f"no message type {shown}; the types are: {', '.join(sorted(MESSAGE_TYPES))}")
    try:
        call = _call_of(kind, message, connection)
    except RecursionError:
        raise BadInput(f"the message {kind} is nested too deeply") from None
    checked_json(call.arguments, f"the message {kind}")
    return call


def _call_of(kind: str, message: Message, connection: str) -> CoordinatorCall:
    match kind:
        case "register":
            arguments = registration(
                _text(message, "worker_id"),
                _text(message, "hostname", ""),
                message.get("capabilities"),
                message.get("tags") or (),
                message.get("resources"),
                incarnation=_text(message, "incarnation", "") or connection,
                hold_seconds=message.get("hold_seconds", 0.0),
            )
            return CoordinatorCall(
                requests.RegisterPullWorker,
                arguments,
                lambda answer: {"type": "registered", "status": "ok", **answer.worker},
            )
        case "heartbeat":
            resources = _mapping(message.get("resources") or {}, "resources")
            if resources:
                check_report(resources)
                resources = _with_idle_cores(resources, message.get("hardware_metrics"))
            return CoordinatorCall(
                requests.ReportPullWorker,
                {**_worker(message, connection), "resources": dict(resources)},
                lambda answer: {"type": "heartbeat_ack", "status": "ok", **answer.worker},
            )
        case "get_task" | "next_task" | "get_next_task":
            running = words(message.get("running") or (), "running must be a list of the ids of tasks")
            wait = message.get("wait_seconds", 0.0)
            if not isinstance(wait, int | float) or isinstance(wait, bool) or not 0 <= wait <= MAX_WAIT_SECONDS:
                raise BadInput(f"wait_seconds must be a number from 0 to {MAX_WAIT_SECONDS:g}")
            return CoordinatorCall(
                requests.TakeTask,
                {**_worker(message, connection), "running": running, "wait_seconds": wait},
                lambda answer: {"type": "task", "task": task_of(answer.task) if answer.task is not None else None},
            )
        case "task_result":
            status = message.get("status", "completed")
            if not isinstance(status, str) or status not in _STATUS:
                raise BadInput(f"no status {status!r}: use completed or failed")
            return _report(message, succeeded=_STATUS[status])
        case "complete" | "complete_task":
            return _report(message, succeeded=True)
        case "fail" | "fail_task":
            return _report(message, succeeded=False)
        case "add_task":
            return CoordinatorCall(
                requests.SubmitTask,
                submission_fields(_mapping(message.get("task"), "task")),
                lambda answer: {"type": "task_added", "task_id": answer.job.job_id, "state": answer.job.state},
            )
        case "task_status":
            fields = ("state", "node_id", "outcome", "exit_code", "detail", "result", "retries_left")
            return CoordinatorCall(
                requests.GetJob,
                {"job_id": _text(message, "task_id")},
                lambda answer: {
                    "type": "task_status",
                    "task_id": answer.job.job_id,
                    **{name: answer.job[name] for name in fields},
                },
            )
        case "unregister":
            return CoordinatorCall(
                requests.RemovePullWorker,
                _worker(message, connection),
                lambda answer: {"type": "unregistered", **answer},
            )
        case _:
            return CoordinatorCall(
                requests.GetStatus,
                {},
                lambda answer: {
                    "type": "status",
                    "workers": {node.node_id: node.state for node in answer.nodes},
                    "tasks": sum(answer.job_states.values()),
                    "waiting": answer.waiting,
                },
            )


def _with_idle_cores(resources: Mapping[str, Any], metrics: Any) -> Mapping[str, Any]:
    """The resources, with the idle cores where these are more than the lagging load average leaves available."""
    percent = metrics.get("cpu_percent") if isinstance(metrics, Mapping) else None
    cpu = resources.get("cpu", {})
    if (
        not isinstance(percent, int | float)
        or not 0 <= percent <= 100
        or not {"cores", "available_cores"} <= cpu.keys()
    ):
        return resources
    idle = cpu["cores"] * (1 - percent / 100)
    return {**resources, "cpu": {**cpu, "available_cores": max(cpu["available_cores"], idle)}}


_STATUS = {"completed": True, "success": True, "failed": False, "failure": False, "error": False}


def _report(message: Message, *, succeeded: bool) -> CoordinatorCall:
    arguments = report_fields(_text(message, "task_id"), _text(message, "worker_id"), message.get("fence"))
    arguments["succeeded"] = succeeded
    arguments["result"] = checked_json(message.get("result"), "the result")
    if not succeeded:
        arguments["error"] = str(message.get("error") or "")
        arguments["over_limit"] = bool(message.get("over_limit"))
    for name in ("cpu_seconds", "peak_memory_mb"):
        if name in message:
            arguments[name] = message[name]
    return CoordinatorCall(requests.ReportTask, arguments, lambda answer: {"type": "task_ack", **answer})


def error_reply(error: Exception) -> Reply:
    """The reply that carries a refusal."""
    return {"type": "error", "error": type(error).__name__, "message": str(error)}


def registration(
    worker_id: str,
    hostname: str,
    capabilities: Mapping[str, Any] | None,
    tags: Any,
    resources: Mapping[str, Any] | None,
    *,
    incarnation: str = "",
    hold_seconds: float = 0.0,
) -> dict[str, Any]:
    """The fields that register a worker, with its resources, or else those of its capabilities."""
    capabilities = _mapping(capabilities or {}, "capabilities")
    has = _mapping(resources or _resources_of(capabilities), "resources")
    reported_resources(has)
    fields = {
        "worker_id": worker_id,
        "incarnation": incarnation or uuid.uuid4().hex,
        "resources": dict(has),
        "hostname": hostname,
        "capabilities": dict(checked_json(capabilities, "capabilities")),
        "tags": [f"{name}={value}" for name, value in tags.items()]
        if isinstance(tags, Mapping)
        else words(tags, "tags must be a list of words"),
        "hold_seconds": hold_seconds,
    }
    checked_json(fields, "a registration")
    return fields


def _resources_of(capabilities: Mapping[str, Any]) -> dict[str, Any]:
    """The resources among the capabilities that a `HardwareDetector` finds."""
    keys = {
        "cpu": ("cores", "physical_cores", "available_cores"),
        "memory": ("total_mb", "available_mb"),
        "gpu": ("devices", "available_devices", "total_memory_mb", "available_memory_mb"),
    }
    groups = {kind: capabilities.get(kind) for kind in keys}
    if not isinstance(groups["cpu"], Mapping):
        raise BadInput("a worker must say what it has: resources are missing")
    return {
        kind: {key: group[key] for key in keys[kind] if key in group}
        for kind, group in groups.items()
        if isinstance(group, Mapping)
    }


def _worker(message: Message, connection: str) -> dict[str, str]:
    """Worker and process of a message: where it names no process, that of the connection, or the registered one."""
    return {
        "worker_id": _text(message, "worker_id"),
        "incarnation": _text(message, "incarnation", "") or connection,
    }


def _text(message: Message, name: str, default: str | None = None) -> str:
    value = message.get(name, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise BadInput(f"{name} is missing" if value is None else f"{name} must be text")
    return value


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadInput(f"{what} must be a mapping, not {type(value).__name__}")
    return value
