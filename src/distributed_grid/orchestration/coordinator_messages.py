"""Messages of the coordinator: from a dictionary with a `type` to a request of the control plane, and its answer back.

Nothing here does input or output: `Coordinator` drives it with plain calls, `CoordinatorServer` with an event loop.
What is wrong with a message is one clear line, and changes nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from distributed_grid.api.worker_resources import check_report, reported_resources
from distributed_grid.errors import BadInput
from distributed_grid.orchestration.task_manager import checked_json, report_fields, submission_fields, task_of, words

Message = Mapping[str, Any]
Reply = dict[str, Any]
MAX_WAIT_SECONDS = 60.0


class CoordinatorCall(Struct, frozen=True):
    """One request to the control plane, and how its answer is told."""

    op: str
    arguments: dict[str, Any]
    reply: Callable[[dict[str, Any]], Reply]


def parse_message(message: Any, *, connection: str = "") -> CoordinatorCall:
    """What a message asks for; BadInput says what is wrong with it. `connection` names the process behind a connection
    that does not name itself."""
    if not isinstance(message, Mapping):
        raise BadInput(f"a message must be a mapping, not {type(message).__name__}")
    kind = message.get("type")
    parse = _PARSERS.get(kind) if isinstance(kind, str) else None
    if parse is None:
        shown = repr(kind[:40]) if isinstance(kind, str) else "None" if kind is None else type(kind).__name__
        raise BadInput(f"no message type {shown}; the types are: {', '.join(sorted(_PARSERS))}")
    try:
        call = parse(message, connection)
    except RecursionError:
        raise BadInput(f"the message {kind} is nested too deeply") from None
    checked_json(call.arguments, f"the message {kind}")
    return call


def error_reply(error: Exception) -> Reply:
    """How a refusal is told."""
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
    """The request that registers a worker; what it has comes from its resources, or else from its capabilities."""
    capabilities = _mapping(capabilities or {}, "capabilities")
    has = _mapping(resources or _resources_of(capabilities), "resources")
    reported_resources(has)
    fields = {
        "worker_id": worker_id,
        "incarnation": incarnation or uuid.uuid4().hex,
        "resources": dict(has),
        "hostname": hostname,
        "capabilities": dict(checked_json(capabilities, "capabilities")),
        "tags": _tags(tags),
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


def _register(message: Message, connection: str) -> CoordinatorCall:
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
        "register_pull_worker", arguments, lambda answer: {"type": "registered", "status": "ok", **answer["worker"]}
    )


def _heartbeat(message: Message, connection: str) -> CoordinatorCall:
    resources = _mapping(message.get("resources") or {}, "resources")
    if resources:
        check_report(resources)
        resources = _with_idle_cores(resources, message.get("hardware_metrics"))
    arguments = {**_worker(message, connection), "resources": dict(resources)}
    return CoordinatorCall(
        "report_pull_worker", arguments, lambda answer: {"type": "heartbeat_ack", "status": "ok", **answer["worker"]}
    )


def _with_idle_cores(resources: Mapping[str, Any], metrics: Any) -> Mapping[str, Any]:
    """The resources, where more cores are idle now than the load average, which lags, leaves available."""
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


def _get_task(message: Message, connection: str) -> CoordinatorCall:
    running = words(message.get("running") or (), "running must be a list of the ids of tasks")
    wait = message.get("wait_seconds", 0.0)
    if not isinstance(wait, int | float) or isinstance(wait, bool) or not 0 <= wait <= MAX_WAIT_SECONDS:
        raise BadInput(f"wait_seconds must be a number from 0 to {MAX_WAIT_SECONDS:g}")
    arguments = {**_worker(message, connection), "running": running, "wait_seconds": wait}

    def reply(answer: dict[str, Any]) -> Reply:
        return {"type": "task", "task": task_of(answer["task"]) if answer["task"] is not None else None}

    return CoordinatorCall("take_task", arguments, reply)


def _task_result(message: Message, connection: str) -> CoordinatorCall:
    status = message.get("status", "completed")
    if not isinstance(status, str) or status not in _STATUS:
        raise BadInput(f"no status {status!r}: use completed or failed")
    return _report(message, succeeded=_STATUS[status])


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
    return CoordinatorCall("report_task", arguments, lambda answer: {"type": "task_ack", **answer})


_STATUS = {"completed": True, "success": True, "failed": False, "failure": False, "error": False}


def _add_task(message: Message, connection: str) -> CoordinatorCall:
    arguments = submission_fields(_mapping(message.get("task"), "task"))
    return CoordinatorCall(
        "submit_task",
        arguments,
        lambda answer: {"type": "task_added", "task_id": answer["job"]["job_id"], "state": answer["job"]["state"]},
    )


def _unregister(message: Message, connection: str) -> CoordinatorCall:
    arguments = _worker(message, connection)
    return CoordinatorCall("remove_pull_worker", arguments, lambda answer: {"type": "unregistered", **answer})


def _task_status(message: Message, connection: str) -> CoordinatorCall:
    def reply(answer: dict[str, Any]) -> Reply:
        job = answer["job"]
        fields = ("state", "node_id", "outcome", "exit_code", "detail", "result", "retries_left")
        return {"type": "task_status", "task_id": job["job_id"], **{name: job[name] for name in fields}}

    return CoordinatorCall("get_job", {"job_id": _text(message, "task_id")}, reply)


def _status(message: Message, connection: str) -> CoordinatorCall:
    def reply(answer: dict[str, Any]) -> Reply:
        return {
            "type": "status",
            "workers": {node["node_id"]: node["state"] for node in answer["nodes"]},
            "tasks": sum(answer["job_states"].values()),
            "waiting": answer["waiting"],
        }

    return CoordinatorCall("get_status", {}, reply)


_PARSERS: dict[str, Callable[[Message, str], CoordinatorCall]] = {
    "register": _register,
    "heartbeat": _heartbeat,
    "get_task": _get_task,
    "next_task": _get_task,
    "get_next_task": _get_task,
    "task_result": _task_result,
    "complete": lambda message, connection: _report(message, succeeded=True),
    "complete_task": lambda message, connection: _report(message, succeeded=True),
    "fail": lambda message, connection: _report(message, succeeded=False),
    "fail_task": lambda message, connection: _report(message, succeeded=False),
    "add_task": _add_task,
    "task_status": _task_status,
    "status": _status,
    "unregister": _unregister,
}
MESSAGE_TYPES = tuple(_PARSERS)


def _worker(message: Message, connection: str) -> dict[str, str]:
    """Who speaks: a message that does not name its process is of the connection's, or of whoever is registered."""
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


def _tags(tags: Any) -> list[str]:
    if isinstance(tags, Mapping):
        return [f"{name}={value}" for name, value in tags.items()]
    return words(tags, "tags must be a list of words")
