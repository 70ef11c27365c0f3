"""`DynamicResourceManager`: the resources of workers, reservations on them, and when to scale; plain methods.

Nothing is kept here: workers are nodes of the ledger, reservations are its leases, and the mappings are views of both,
read when they are asked for. Two managers, other programs and the command line see the same.
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

from distributed_grid.api.worker_resources import GROUPS, check_report, reported_resources, required_amounts
from distributed_grid.client.async_client import BlockingSession
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
    from distributed_grid.control.view_types import ScalingDecisionRow

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
    """Registers workers, reserves on them, and says how fit they are; safe to use from several threads."""

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
        """Begin to track utilization and to have workers reassessed. Safe to call twice."""
        if self.resource_tracker_thread is not None:
            return
        self._stopping.clear()
        scaling = self._session.call("get_config")["config"]["scaling"]
        interval = float(scaling["worker_reassessment_interval_seconds"])
        self.resource_tracker_thread = self._run(self.resource_tracker, "resource_tracker", TRACKER_SECONDS)
        self.worker_reassessment_thread = self._run(self.worker_reassessment, "worker_reassessment", interval)

    def stop(self) -> None:
        """End the loops and disconnect; what is reserved stays reserved. Safe to call twice."""
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
        """Read the utilization of all workers at once and every so many seconds, until stopped."""
        while True:
            self._try(self.get_utilization)
            if self._stopping.wait(seconds):
                return

    def worker_reassessment(self, seconds: float) -> None:
        """Have every worker say anew what it has every so many seconds, until stopped."""
        while not self._stopping.wait(seconds):
            self._try(self.reassess_workers)

    def _try(self, step: Callable[[], object]) -> None:
        try:
            step()
        except GridError as failure:  # the next round may well succeed
            log.warning("%s", failure)

    # ------------------------------------------------------------------ workers

    def register_worker(self, worker_id: str, resources: Resources) -> bool:
        """Take a worker in, or what it has anew where it is registered already."""
        resources = _checked(resources, reported_resources)
        complete = {name: {**_NOTHING[name], **resources.get(name, {})} for name in GROUPS}
        try:
            return self.update_worker_resources(worker_id, complete)
        except NotFound:
            incarnation = uuid.uuid4().hex
            self._session.call(
                "register_pull_worker", worker_id=worker_id, incarnation=incarnation, resources=dict(resources)
            )
            return True

    def update_worker_resources(self, worker_id: str, resources: Resources) -> bool:
        """Resources of a worker that are free now; a sign of life. Reservations on it stay, and are renewed.

        Totals that are left out stay as registered, and a group that is left out stays as last reported.
        """
        checked = _checked(resources, check_report)
        self._session.call("report_pull_worker", worker_id=worker_id, resources=dict(checked))
        return True

    def reassess_workers(self) -> int:
        """Have every worker say anew what it has; how many have no agent and are asked with their next heartbeat."""
        count: int = self._session.call("reassess_workers")["workers"]
        return count

    def get_utilization(self) -> dict[str, float]:
        """The part of all workers together that is in use or reserved: `cpu`, `memory`, `gpu` and `overall`."""
        self._utilization = utilization_of(self.worker_resources)
        return dict(self._utilization)

    @property
    def utilization(self) -> dict[str, float]:
        """The last that the tracker has read; empty before."""
        return dict(self._utilization)

    # ------------------------------------------------------------------ reservations

    def reserve_resources(self, worker_id: str, task_id: str, resource_requirements: Resources) -> str:
        """Hold some of a worker for a task; the id of the reservation. Refused says why there is no room.

        It lasts an hour, and is renewed while the worker is heard.
        """
        required_amounts(resource_requirements)
        answer = self._session.call(
            "reserve_on_worker",
            request_id=uuid.uuid4().hex,
            worker_id=worker_id,
            task_id=task_id,
            requirements=dict(resource_requirements),
        )
        reservation_id: str = answer["reservation"]["reservation_id"]
        return reservation_id

    def release_resources(self, reservation_id: str) -> bool:
        """Give a reservation back; a second time is harmless, False where nothing has that id.

        The reservation of a task that runs is the task's own: releasing it stops the task.
        """
        try:
            self._session.call("release_lease", allocation_id=reservation_id, exact=True)
        except NotFound:
            return False
        return True

    # ------------------------------------------------------------------ fitness and scaling

    def calculate_task_worker_fitness(self, worker_id: str, task_resources: Resources) -> float:
        """How fit a worker is for a task: 0 where it is unknown or has no room, else from a half up to 1.

        That is `1 - m / 2`, m being the mean of `asked / free` over the resources that the task asks for.
        """
        fitness: float = self._check(worker_id, task_resources)["fitness"]
        return fitness

    def check_resource_availability(self, worker_id: str, requirements: Resources) -> dict[str, Any]:
        """Whether a worker has room now (`available`), and why not (`reasons`)."""
        found = self._check(worker_id, requirements)
        return {"available": found["available"], "reasons": found["reasons"]}

    def _check(self, worker_id: str, requirements: Resources) -> dict[str, Any]:
        required_amounts(requirements)
        return self._session.call("check_worker_fit", worker_id=worker_id, requirements=dict(requirements))

    def evaluate_scaling(self) -> ScalingDecision:
        """Whether workers are to be started or given back now; nothing is done."""
        return ScalingDecision.from_row(self._session.call("plan_scaling")["plan"]["decision"])

    # ------------------------------------------------------------------ views

    @property
    def worker_resources(self) -> Mapping[str, Resources]:
        """What every worker has and has free, by its id; read-only."""
        return MappingProxyType(self._session.call("list_worker_resources")["workers"])

    @property
    def resource_reservations(self) -> Mapping[str, Resources]:
        """What is held for tasks, by the id of the reservation; read-only."""
        return MappingProxyType({one["reservation_id"]: one for one in self._reservations()})

    @property
    def worker_tasks(self) -> Mapping[str, frozenset[str]]:
        """The tasks that something is held for on each worker; read-only."""
        found: dict[str, set[str]] = {}
        for one in self._reservations():
            found.setdefault(one["worker_id"], set()).add(one["task_id"])
        return MappingProxyType({worker: frozenset(tasks) for worker, tasks in found.items()})

    @property
    def task_reservation(self) -> Mapping[str, str]:
        """The reservation of each task; read-only."""
        return MappingProxyType({one["task_id"]: one["reservation_id"] for one in self._reservations()})

    def _reservations(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._session.call("list_worker_resources")["reservations"]
        return found


def utilization_of(workers: Mapping[str, Resources]) -> dict[str, float]:
    """The part of all workers together that is not free, by kind; a kind that nobody has is left out."""
    keys = {
        "cpu": ("cores", "available_cores"),
        "memory": ("total_mb", "available_mb"),
        "gpu": ("devices", "available_devices"),
    }
    found: dict[str, float] = {}
    for kind, (total, free) in keys.items():
        has = sum(one[kind][total] for one in workers.values())
        if has:
            found[kind] = 1 - sum(one[kind][free] for one in workers.values()) / has
    if found:
        found["overall"] = sum(found.values()) / len(found)
    return found


def _checked(resources: Resources, check: Callable[[Resources], object]) -> Resources:
    if not isinstance(resources, Mapping):
        raise BadInput(f"the resources of a worker must be a mapping, not {type(resources).__name__}")
    check(resources)
    return resources


class ScalingDecision(Struct, frozen=True):
    """Whether to start or give back workers: `action` is `scale_up`, `scale_down` or `none`.

    With `scale_up`, `count` workers of `worker_type` with these `resource_requirements` are to be created by the
    `provider`; with `scale_down`, those of `worker_ids` are to be terminated. `utilization` is the mean of the window
    for the bottleneck, above 1 where more waits than there is.
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
        """The decision that the control plane has made."""
        needs = row["resource_requirements"]
        return cls(
            row["action"],
            row["reason"],
            row["count"],
            list(row["worker_ids"]),
            row["utilization"],
            row["worker_type"],
            None if needs is None else {**needs},
            row["provider"],
        )
