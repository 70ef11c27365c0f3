"""`Coordinator`: workers and tasks by messages, over the one ledger. Plain methods, safe in a running event loop.

`process_message` takes the dictionaries that workers send; `CoordinatorServer` takes them over WebSockets.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from distributed_grid.client.async_client import BlockingSession
from distributed_grid.errors import GridError
from distributed_grid.orchestration.coordinator_messages import (
    MESSAGE_TYPES,
    Reply,
    error_reply,
    parse_message,
    registration,
)
from distributed_grid.orchestration.coordinator_server import CoordinatorServer
from distributed_grid.orchestration.dynamic_resource_manager import DynamicResourceManager
from distributed_grid.orchestration.resource_performance_predictor import ResourcePerformancePredictor
from distributed_grid.orchestration.task_manager import Task, TaskManager, TaskReceipt
from distributed_grid.state_dir import StateDir

if TYPE_CHECKING:
    from distributed_grid.config import ClusterConfig

__all__ = ["MESSAGE_TYPES", "Coordinator", "CoordinatorServer", "Task", "TaskManager", "TaskReceipt", "WorkerManager"]


class WorkerManager:
    """Registers workers that have no agent."""

    def __init__(self, session: BlockingSession) -> None:
        self._session = session

    def register_worker(
        self,
        worker_id: str,
        hostname: str = "",
        capabilities: Mapping[str, Any] | None = None,
        websocket: object = None,
        tags: Sequence[str] | Mapping[str, str] = (),
        resources: Mapping[str, Any] | None = None,
        *,
        incarnation: str = "",
    ) -> bool:
        """Register a worker; True once that is durable.

        Another incarnation is another process: it replaces the one before, whose tasks are lost. Where none is named, a
        connection is one, and so is each call without a connection.
        """
        named = incarnation or connection_name(websocket)
        fields = registration(worker_id, hostname, capabilities, tags, resources, incarnation=named)
        self._session.register_pull_worker(**fields)
        return True

    def remove_worker(self, worker_id: str) -> None:
        """Remove a worker that runs nothing."""
        self._session.remove_pull_worker(worker_id=worker_id)


def connection_name(websocket: object) -> str:
    """Unique id of a connection; empty for no connection."""
    name = getattr(websocket, "id", None)
    return str(name) if name is not None else ""


class Coordinator:
    """Answers the messages of workers; its parts are those of the guides."""

    def __init__(
        self,
        cluster_config: ClusterConfig | None = None,
        *,
        state_dir: str | os.PathLike[str] | None = None,
        cloud_provider_manager: Any = None,
        resource_predictor: Any = None,
    ) -> None:
        self.config = cluster_config
        self.session = BlockingSession(cluster_config, state_dir=state_dir)
        self._predictor = resource_predictor
        self._state_dir = state_dir
        self.state_dir = StateDir(state_dir)
        self.cloud_provider_manager = cloud_provider_manager
        self.worker_manager = WorkerManager(self.session)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the started parts, and disconnect; workers and tasks stay. Safe to call twice."""
        manager = self.__dict__.get("dynamic_resource_manager")
        if manager is not None:
            manager.stop()
        predictor = self.__dict__.get("resource_predictor")
        if predictor is not None:
            predictor.close()
        self.session.close()

    @cached_property
    def dynamic_resource_manager(self) -> DynamicResourceManager:
        """The resources of the workers, and reservations on them."""
        return DynamicResourceManager(session=self.session)

    @cached_property
    def resource_predictor(self) -> Any:
        """Predictor of the needs of tasks."""
        return self._predictor or ResourcePerformancePredictor(self.config, state_dir=self._state_dir)

    @cached_property
    def task_manager(self) -> TaskManager:
        """The tasks of the grid's workers."""
        return TaskManager(session=self.session, resource_predictor=self.resource_predictor)

    def process_message(self, message: Mapping[str, Any], websocket: object = None) -> Reply:
        """The reply to a message of a worker; for an invalid message one of type `error`."""
        try:
            call = parse_message(message, connection=connection_name(websocket))
            return call.reply(self.session.call(call.op, **call.arguments))
        except GridError as error:
            return error_reply(error)

    _process_message = process_message
