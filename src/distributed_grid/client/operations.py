"""Requests as methods of the clients: `client.get_job(job_id=x)` sends `get_job` and returns its answer.

The stub beside this file has their signatures and the types of their answers, for mypy and editors. Both the stub and
the names at the end of this file are written by `scripts/generate_client.py` from the endpoint table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from distributed_grid.client.conversation import JsonObject, is_last


class Operations:
    """Every request of the control plane as a method, over `call` and `stream` of a blocking client."""

    def __getattr__(self, op: str) -> Any:
        if op in STREAMS:
            return partial(self.stream, op)
        if op in PROGRESS:
            return partial(self._progress, op)
        if op in OPERATIONS:
            return partial(self.call, op)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {op!r}", name=op, obj=self)

    def _progress(self, op: str, report: Callable[[Any], object], **arguments: Any) -> JsonObject:
        for _, part in self.stream(op, **arguments):
            if not is_last(part):
                report(part)
        part.pop("done", None)
        return part


class AsyncOperations(Operations):
    """The same methods as coroutines and asynchronous iterators, over those of an asyncio client."""

    async def _progress(self, op: str, report: Callable[[Any], object], **arguments: Any) -> JsonObject:
        async for _, part in self.stream(op, **arguments):
            if not is_last(part):
                report(part)
        part.pop("done", None)
        return part


def keeps_config(op: str) -> bool:
    """Whether a request starts nothing: the control plane may answer it with another config than the named one."""
    return op in KEEPING_CONFIG


# Generated below this line.
STREAMS = frozenset(
    {
        *("fetch_files", "list_events", "read_logs"),
    }
)
PROGRESS = frozenset(
    {
        *("attach_ray", "detach_ray", "drain_node", "manage_cluster", "train_predictor"),
    }
)
KEEPING_CONFIG = frozenset(
    {
        *("advise_command", "cancel_job", "cancel_move", "check_worker_fit", "detach_ray", "drain_node", "explain"),
        *("fetch_files", "find_block", "free_block", "get_auto_offload", "get_batch_scaling", "get_boost"),
        *("get_clocks", "get_config", "get_daemon_info", "get_job", "get_lease", "get_lending_report"),
        *("get_memory_stats", "get_metrics", "get_move", "get_node", "get_scaling", "get_status", "get_worker"),
        *("list_blocks", "list_boosts", "list_consents", "list_events", "list_jobs", "list_join_tokens"),
        *("list_leases", "list_live_jobs", "list_moves", "list_nodes", "list_offers", "list_recommendations"),
        *("list_task_types", "list_tasks", "list_tokens", "list_worker_offers", "list_worker_resources"),
        *("list_workers", "plan_scaling", "predict_task", "read_logs", "release_boost", "release_lease"),
        *("reload_config", "remove_pull_worker", "renew_blocks", "report_pull_worker", "report_task"),
        *("revoke_join_token", "revoke_token", "scan_offload", "stop_daemon", "terminate_workers"),
        *("wait_for_delivery", "wait_for_job", "withdraw_ask", "withdraw_consent"),
    }
)
STARTING = frozenset(
    {
        *("allocate_block", "attach_ray", "confirm_clocks", "create_join_token", "create_token", "create_workers"),
        *("detach_job", "execute_offload", "extend_boost", "extend_lease", "identify_token", "keep_running"),
        *("manage_cluster", "name_block", "reassess_workers", "record_execution", "record_fetch"),
        *("register_pull_worker", "request_boost", "request_lease", "reserve_on_worker", "run_in_boost"),
        *("run_in_lease", "run_scaling", "set_auto_offload", "submit_job", "submit_task", "take_task"),
        *("train_predictor",),
    }
)
OPERATIONS = KEEPING_CONFIG | STARTING
