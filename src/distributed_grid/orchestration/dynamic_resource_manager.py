"""`DynamicResourceManager`: the resources of workers, reservations on them, and when to scale; plain methods.

It has no state of its own: workers are nodes of the ledger, reservations are its leases, and the mappings are views of
both, read on each access. Two managers, other programs and the command line see the same.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from msgspec import Struct, field

from distributed_grid.api.answers.workers import ReservationRow, ScalingDecisionRow, WorkerFit
from distributed_grid.api.worker_resources import GROUPS, check_report, reported_resources, required_amounts
from distributed_grid.client.async_client import BlockingSession
from distributed_grid.client.conversation import as_object
from distributed_grid.client.pages import every_page
from distributed_grid.domain.workers import (
    DEFAULT_EVALUATION_WINDOW,
    DEFAULT_HISTORY_RETENTION,
    DEFAULT_SCALE_DOWN_COOLDOWN,
    DEFAULT_SCALE_DOWN_THRESHOLD,
    DEFAULT_SCALE_UP_COOLDOWN,
    DEFAULT_SCALE_UP_THRESHOLD,
    DEFAULT_TARGET_UTILIZATION,
    DEFAULT_WORKER_REASSESSMENT_INTERVAL,
)
from distributed_grid.errors import BadInput, GridError, NotFound

if TYPE_CHECKING:
    from distributed_grid.config import ClusterConfig

__all__ = [
    "DEFAULT_EVALUATION_WINDOW",
    "DEFAULT_HISTORY_RETENTION",
    "DEFAULT_SCALE_DOWN_COOLDOWN",
    "DEFAULT_SCALE_DOWN_THRESHOLD",
    "DEFAULT_SCALE_UP_COOLDOWN",
    "DEFAULT_SCALE_UP_THRESHOLD",
    "DEFAULT_TARGET_UTILIZATION",
    "DEFAULT_WORKER_REASSESSMENT_INTERVAL",
    "DynamicResourceManager",
    "ScalingDecision",
]

TRACKER_SECONDS = 10.0
log = logging.getLogger(__name__)
Resources = Mapping[str, Any]
_NOTHING = {"cpu": {}, "memory": {"total_mb": 0}, "gpu": {"devices": 0, "total_memory_mb": 0}}


class DynamicResourceManager:
    """Registers workers, reserves resources on them, and scores them for tasks; safe to use from several threads."""

    def __init__(
        self,
        cluster_config: ClusterConfig | None = None,
        *,
        state_dir: str | os.PathLike[str] | None = None,
        session: BlockingSession | None = None,
    ) -> None:
        self._session = session or BlockingSession(cluster_config, state_dir=state_dir)
        self._stopping = threading.Event()
        self.resource_tracker_thread: threading.Thread | None = None
        self.worker_reassessment_thread: threading.Thread | None = None
        self._utilization: dict[str, float] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the loops of tracking and reassessment. Safe to call twice."""
        if self.resource_tracker_thread is not None:
            return
        self._stopping.clear()
        scaling = self._session.get_config().config["scaling"]
        interval = float(scaling["worker_reassessment_interval_seconds"])
        self.resource_tracker_thread = self._run(self.resource_tracker, "resource_tracker", TRACKER_SECONDS)
        self.worker_reassessment_thread = self._run(self.worker_reassessment, "worker_reassessment", interval)

    def stop(self) -> None:
        """End the loops and disconnect; reservations stay. Safe to call twice."""
        self._stopping.set()
        for thread in (self.resource_tracker_thread, self.worker_reassessment_thread):
            if thread is not None and thread is not threading.current_thread():
                thread.join()
        self.resource_tracker_thread = self.worker_reassessment_thread = None
        self._session.close()

    def _run(self, loop: Callable[[float], None], name: str, seconds: float) -> threading.Thread:
        thread = threading.Thread(target=loop, args=(seconds,), name=name, daemon=True)
        thread.start()
        return thread

    def resource_tracker(self, seconds: float) -> None:
        """Read the utilization of all workers at once and then at intervals, until stopped."""
        while True:
            self._try(self.get_utilization)
            if self._stopping.wait(seconds):
                return

    def worker_reassessment(self, seconds: float) -> None:
        """Ask every worker for its resources at intervals, until stopped."""
        while not self._stopping.wait(seconds):
            self._try(self.reassess_workers)

    def _try(self, step: Callable[[], object]) -> None:
        try:
            step()
        except GridError as failure:  # the next round may well succeed
            log.warning("%s", failure)

    # ------------------------------------------------------------------ workers

    def register_worker(self, worker_id: str, resources: Resources) -> bool:
        """Register a worker, or update the resources of a registered one."""
        resources = _checked(resources, reported_resources)
        complete = {name: {**_NOTHING[name], **resources.get(name, {})} for name in GROUPS}
        try:
            return self.update_worker_resources(worker_id, complete)
        except NotFound:
            incarnation = uuid.uuid4().hex
            self._session.register_pull_worker(worker_id=worker_id, incarnation=incarnation, resources=dict(resources))
            return True

    def update_worker_resources(self, worker_id: str, resources: Resources) -> bool:
        """Report the free resources of a worker, as a heartbeat. Reservations on it stay, and are renewed.

        Totals that are left out stay as registered, and a group that is left out stays as last reported.
        """
        checked = _checked(resources, check_report)
        self._session.report_pull_worker(worker_id=worker_id, resources=dict(checked))
        return True

    def reassess_workers(self) -> int:
        """Ask every worker for its resources; the number of those without an agent, which are asked at their next
        heartbeat."""
        return self._session.reassess_workers().workers

    def get_utilization(self) -> dict[str, float]:
        """The part of all workers together that is in use or reserved: `cpu`, `memory`, `gpu` and `overall`."""
        self._utilization = utilization_of(self.worker_resources)
        return dict(self._utilization)

    @property
    def utilization(self) -> dict[str, float]:
        """The utilization that the tracker read last; empty before."""
        return dict(self._utilization)

    # ------------------------------------------------------------------ reservations

    def reserve_resources(self, worker_id: str, task_id: str, resource_requirements: Resources) -> str:
        """Reserve resources of a worker for a task; the id of the reservation. Refused has the reasons.

        It lasts an hour, and is renewed by the worker's heartbeats.
        """
        required_amounts(resource_requirements)
        answer = self._session.reserve_on_worker(
            request_id=uuid.uuid4().hex,
            worker_id=worker_id,
            task_id=task_id,
            requirements=dict(resource_requirements),
        )
        return answer.reservation.reservation_id

    def release_resources(self, reservation_id: str) -> bool:
        """Release a reservation; a second time is harmless, False for an unknown id.

        The reservation of a task that runs is the task's own: releasing it stops the task.
        """
        try:
            self._session.release_lease(allocation_id=reservation_id, exact=True)
        except NotFound:
            return False
        return True

    # ------------------------------------------------------------------ fitness and scaling

    def calculate_task_worker_fitness(self, worker_id: str, task_resources: Resources) -> float:
        """Fitness of a worker for a task: 0 where it is unknown or has no room, else from a half up to 1.

        That is `1 - m / 2`, m being the mean of `asked / free` over the resources that the task asks for.
        """
        return self._check(worker_id, task_resources).fitness

    def check_resource_availability(self, worker_id: str, requirements: Resources) -> dict[str, Any]:
        """Whether a worker has room now (`available`), and the `reasons` against it."""
        fit = self._check(worker_id, requirements)
        return {"available": fit.available, "reasons": fit.reasons}

    def _check(self, worker_id: str, requirements: Resources) -> WorkerFit:
        required_amounts(requirements)
        return self._session.check_worker_fit(worker_id=worker_id, requirements=dict(requirements))

    def evaluate_scaling(self) -> ScalingDecision:
        """The present decision of scaling, without acting."""
        return ScalingDecision.from_row(self._session.plan_scaling().plan.decision)

    # ------------------------------------------------------------------ views

    @property
    def worker_resources(self) -> Mapping[str, Resources]:
        """Total and free resources of every worker, by its id; read-only."""
        workers: dict[str, Any] = {}
        for page in every_page(self._session.list_worker_resources):
            workers |= as_object(page.workers)
        return MappingProxyType(workers)

    @property
    def resource_reservations(self) -> Mapping[str, Resources]:
        """Reservations for tasks, by their ids; read-only."""
        return MappingProxyType({row.reservation_id: as_object(row) for row in self._reservations()})

    @property
    def worker_tasks(self) -> Mapping[str, frozenset[str]]:
        """The tasks with a reservation on each worker; read-only."""
        tasks: dict[str, frozenset[str]] = {}
        for row in self._reservations():
            tasks[row.worker_id] = tasks.get(row.worker_id, frozenset()) | {row.task_id}
        return MappingProxyType(tasks)

    @property
    def task_reservation(self) -> Mapping[str, str]:
        """The reservation of each task; read-only."""
        return MappingProxyType({row.task_id: row.reservation_id for row in self._reservations()})

    def _reservations(self) -> list[ReservationRow]:
        return [row for page in every_page(self._session.list_worker_resources) for row in page.reservations]


def utilization_of(workers: Mapping[str, Resources]) -> dict[str, float]:
    """The used part of all workers together, by kind; a kind that no worker has is left out."""
    keys = {
        "cpu": ("cores", "available_cores"),
        "memory": ("total_mb", "available_mb"),
        "gpu": ("devices", "available_devices"),
    }
    used: dict[str, float] = {}
    for kind, (total, free) in keys.items():
        amount = sum(worker[kind][total] for worker in workers.values())
        if amount:
            used[kind] = 1 - sum(worker[kind][free] for worker in workers.values()) / amount
    if used:
        used["overall"] = sum(used.values()) / len(used)
    return used


def _checked(resources: Resources, check: Callable[[Resources], object]) -> Resources:
    if not isinstance(resources, Mapping):
        raise BadInput(f"the resources of a worker must be a mapping, not {type(resources).__name__}")
    check(resources)
    return resources


class ScalingDecision(Struct, frozen=True, kw_only=True):
    """Decision to start or terminate workers: `action` is `scale_up`, `scale_down` or `none`.

    With `scale_up`, `count` workers of `worker_type` with these `resource_requirements` are to be created by the
    `provider`; with `scale_down`, those of `worker_ids` are to be terminated. `utilization` is the mean of the window
    for the bottleneck, above 1 where the queue asks for more than all workers have.
    """

    action: str
    reason: str
    count: int = 0
    worker_ids: list[str] = field(default_factory=list)
    utilization: float = 0.0
    worker_type: str | None = None
    resource_requirements: dict[str, Any] | None = None
    provider: str | None = None

    @classmethod
    def from_row(cls, row: ScalingDecisionRow) -> ScalingDecision:
        needs = row.resource_requirements
        return cls(
            action=row.action,
            reason=row.reason,
            count=row.count,
            worker_ids=list(row.worker_ids),
            utilization=row.utilization,
            worker_type=row.worker_type,
            resource_requirements=None if needs is None else {**as_object(needs)},
            provider=row.provider,
        )
