"""Pull workers: registration, heartbeats, what they have, and reservations on them. Used by the socket.

A pull worker is a node of the ledger without an agent. Its heartbeats are its liveness: they are taken in at once, like
those of agents, whatever the store does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.worker_resources import (
    ReportedResources,
    reported_resources,
    required_amounts,
    requirements_view,
    resources_view,
)
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import View
from distributed_grid.domain.events import (
    HeartbeatReceived,
    LeaseAsked,
    NodeDeclared,
    NodeForgotten,
    NodeHeard,
    NodeStopped,
    PullWorkerRegistered,
    ReassessmentRequested,
)
from distributed_grid.domain.leases import Lease, Request, WorkerKind
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import PULL_HOST, Node, Usage
from distributed_grid.domain.resources import Amounts, Capacity
from distributed_grid.domain.states import JobState
from distributed_grid.errors import Conflict, GridError
from distributed_grid.reactor import LeaseAnswer
from distributed_grid.reactor.workers.pull_workers import registered_worker, reported_usage, usage_where_named
from distributed_grid.scheduling.placement.placement import fitness_of
from distributed_grid.scheduling.queue.reasons import why_not_there
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.endpoints import ADMIN, READ, USER, endpoint
from distributed_grid.server.services.records import held_leases

RESERVATION_MS = 3_600_000
HEARTBEATS_PER_HOLD = 6
MAX_LABEL_CHARS = 128
PHYSICAL_CORES = "physical_cores"
log = logging.getLogger(__name__)


class PullWorkerService:
    """Answers the requests about pull workers; `detect` says anew what this machine has."""

    def __init__(
        self, grid: Grid, viewer: Callable[[], Viewer], *, hold_seconds: float, detect: Callable[[], Capacity]
    ) -> None:
        self._grid = grid
        self._viewer = viewer
        self._hold_ms = round(1000 * hold_seconds)
        self._detect = detect

    @endpoint(ADMIN)
    async def register(self, op: requests.RegisterPullWorker, caller: Caller) -> View:
        """Take a worker in, or take in anew what it has; another incarnation replaces the one before."""
        reported = reported_resources(op.resources)
        node = Node(
            op.worker_id,
            capacity=reported.has,
            host=PULL_HOST,
            hold_ms=round(1000 * op.hold_seconds) or self._hold_ms,
            joined=True,
            labels=_labels(op, reported),
            tags=_tags(op),
            incarnation=op.incarnation,
        )
        await self._grid.handle(PullWorkerRegistered(node, await self._usage(op.worker_id, reported)))
        return {"worker": await self._grid.read(lambda ledger, now: self._worker(ledger, op.worker_id))}

    @endpoint(ADMIN)
    async def heard(self, op: requests.ReportPullWorker, caller: Caller) -> View:
        """Take a heartbeat in; the answer says what the worker is to stop, and whether it is to report anew."""
        node = registered_worker(self._grid.ledger, op.worker_id, op.incarnation)
        if op.resources:
            reported = reported_resources(op.resources, node.capacity)
            usage = await self._usage(op.worker_id, reported)
            if reported.has != node.capacity:
                await self._grid.handle(PullWorkerRegistered(replace(node, capacity=reported.has), usage))
            self._grid.observe(HeartbeatReceived(op.worker_id, usage))
        else:
            self.hear_again(op.worker_id)
        await self._grid.handle(NodeHeard(op.worker_id))
        return {"worker": await self._grid.read(lambda ledger, now: self._worker(ledger, op.worker_id))}

    def hear_again(self, name: str) -> None:
        """A worker lives that does not say anew what it has."""
        seen = self._grid.ledger.observations.get(name)
        if seen is not None and seen.usage is not None:
            self._grid.observe(HeartbeatReceived(name, seen.usage, repeats=True))

    @endpoint(ADMIN)
    async def remove(self, op: requests.RemovePullWorker, caller: Caller) -> View:
        """Let a worker go; what it had taken is lost, what it had not goes to others."""
        registered_worker(self._grid.ledger, op.worker_id, op.incarnation)
        await self._grid.handle(NodeStopped(op.worker_id))
        await self._grid.handle(NodeForgotten(op.worker_id))
        return {"worker_id": op.worker_id, "removed": True}

    async def reassess_forever(self, seconds: float) -> None:
        """Reassess all workers every so many seconds, until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await self._reassess()
            except GridError as failure:  # the next round may well succeed
                log.warning("the workers could not be reassessed: %s", failure)

    @endpoint(ADMIN)
    async def reassess(self, op: requests.ReassessWorkers, caller: Caller) -> View:
        """Have every worker say anew what it has; how many pull workers there are."""
        await self._reassess()
        return {"workers": await self._grid.read(lambda ledger, now: len(ledger.pull_nodes))}

    async def _reassess(self) -> None:
        """Detect anew what the node of this machine has, and have all others say so with their heartbeats."""
        await self._grid.handle(ReassessmentRequested())
        capacity = await asyncio.to_thread(self._detect)

        def measured(ledger: Ledger, now: int) -> list[Node]:
            here = [node for node in ledger.nodes.values() if node.host == "local" and not node.simulated]
            return here if len(here) == 1 else []  # of several on one machine, what each has is declared

        for node in await self._grid.read(measured):
            if (node.capacity.cpu_milli, node.capacity.memory_bytes) != (capacity.cpu_milli, capacity.memory_bytes):
                has = replace(node.capacity, cpu_milli=capacity.cpu_milli, memory_bytes=capacity.memory_bytes)
                await self._grid.handle(NodeDeclared(replace(node, capacity=has)))

    @endpoint(USER)
    async def reserve(self, op: requests.ReserveOnWorker, caller: Caller) -> View:
        """Hold some of a worker for a task, or refuse with the reason."""
        request = _reservation(op.worker_id, required_amounts(op.requirements), op.task_id)
        request = replace(request, id=op.request_id, user=caller.user, team=caller.team)

        def earlier(ledger: Ledger, now: int) -> list[str]:
            held = (ledger.leases[lease] for there in ledger.reservations_on.values() for lease in there)
            return [one.id for one in held if one.request.task == op.task_id and one.id != op.request_id]

        for reservation in await self._grid.read(earlier):
            raise Conflict(f"the task {op.task_id} has the reservation {reservation} already; release it first")
        answer = await self._grid.handle(LeaseAsked(request))
        assert isinstance(answer, LeaseAnswer)
        return {"reservation": self._reservation_view(answer.lease, op.task_id)}

    @endpoint(READ)
    async def check(self, op: requests.CheckWorkerFit, caller: Caller) -> View:
        """Whether a worker has room now, why not, and its fitness."""
        request = _reservation(op.worker_id, required_amounts(op.requirements), "check")

        def read(ledger: Ledger, now: int) -> View:
            node = ledger.nodes.get(op.worker_id)
            if node is None:
                return _fit(0.0, f"no worker is called {op.worker_id}")
            claims, lends = ledger.claims_on(node.name), ledger.lends(node.name)
            if ledger.columns.open[ledger.columns.rows[node.name]]:
                fitness = fitness_of(request.ask, lends, claims)
                if fitness:
                    return _fit(fitness)
            return _fit(0.0, why_not_there(ledger, request, node, now))

        return await self._grid.read(read)

    @endpoint(READ)
    async def resources(self, op: requests.ListWorkerResources, caller: Caller) -> View:
        """What every worker has and has free, and what is held for tasks."""

        def read(ledger: Ledger, now: int) -> View:
            return {
                "workers": {name: _resources(ledger, node) for name, node in ledger.nodes.items()},
                "reservations": [
                    self._reservation_view(lease, lease.request.task or ledger.jobs[lease.job].id)
                    for lease, _ in held_leases(ledger)
                    if lease.request.task or _is_task(lease)
                ],
            }

        return await self._grid.read(read)

    async def _usage(self, name: str, reported: ReportedResources) -> Usage:
        def read(ledger: Ledger, now: int) -> Usage:
            seen = ledger.observations.get(name)
            usage = reported_usage(reported.has, reported.free, ledger.claims_on(name))
            return usage_where_named(usage, reported.named, seen.usage if seen is not None else None)

        return await self._grid.read(read)

    def _worker(self, ledger: Ledger, name: str) -> View:
        """A worker, as its heartbeats are answered."""
        node, seen = ledger.nodes[name], ledger.observations.get(name)
        jobs = [job for job in ledger.jobs_of(name) if job.attempt is not None]
        return {
            "worker_id": name,
            "incarnation": node.incarnation,
            "state": str(node.state),
            "hold_seconds": node.hold_ms / 1000,
            "heartbeat_seconds": node.hold_ms / 1000 / HEARTBEATS_PER_HOLD,
            "report_resources": seen is None or seen.usage is None or seen.report_wanted,
            "tasks": [job.id for job in jobs if job.state is not JobState.ASSIGNED],
            "stop": [
                {"task_id": job.id, "fence": job.attempt.fence, "reason": job.stop.detail}
                for job in jobs
                if job.state is JobState.STOPPING and job.stop is not None and job.attempt is not None
            ],
        }

    def _reservation_view(self, lease: Lease, task_id: str) -> View:
        viewer = self._viewer()
        return {
            "reservation_id": lease.id,
            "worker_id": lease.node,
            "task_id": task_id,
            "requirements": requirements_view(lease.request.ask),
            "user": lease.request.user,
            "state": str(lease.state),
            "fence": lease.fence,
            "reserved_at": viewer.time(lease.granted_at_ms),
            "expires_at": viewer.time(lease.ends_at_ms),
        }


def _is_task(lease: Lease) -> bool:
    return bool(lease.job) and lease.request.runs_on is not WorkerKind.AGENT


def _reservation(worker: str, ask: Amounts, task: str) -> Request:
    return Request(
        "reservation",
        "",
        ask,
        require=(worker,),
        wait_ms=0,
        duration_ms=RESERVATION_MS,
        runs_on=WorkerKind.ANY,
        task=task,
    )


def _fit(fitness: float, reason: str = "") -> View:
    return {"available": not reason, "reasons": [reason] if reason else [], "fitness": fitness}


def _resources(ledger: Ledger, node: Node) -> dict[str, Any]:
    """What a node has, and what it has left to lend."""
    claims, lends = ledger.claims_on(node.name), ledger.lends(node.name)
    if not ledger.columns.open[ledger.columns.rows[node.name]]:
        lends = Capacity()
    free = Capacity(
        max(lends.cpu_milli - claims.cpu_milli, 0),
        max(lends.memory_bytes - claims.memory_bytes, 0),
        tuple(device for device in lends.gpus if claims.free_milli(device) > 0),
    )
    physical = dict(node.labels).get(PHYSICAL_CORES, "")
    gpu_bytes = sum(claims.free_memory(device) for device in free.gpus)
    return resources_view(node.capacity, free, gpu_bytes, int(physical) if physical.isdecimal() else 0)


def _labels(op: requests.RegisterPullWorker, reported: ReportedResources) -> tuple[tuple[str, str], ...]:
    """The host's name and the plain values among the capabilities."""
    found = {
        name: str(value)[:MAX_LABEL_CHARS]
        for name, value in op.capabilities.items()
        if isinstance(value, str | int | float | bool)
    }
    if op.hostname:
        found["hostname"] = op.hostname
    if reported.physical_cores:
        found[PHYSICAL_CORES] = str(reported.physical_cores)
    return tuple(sorted(found.items()))


def _tags(op: requests.RegisterPullWorker) -> tuple[str, ...]:
    """The tags, and the words of lists among the capabilities."""
    lists = (value for value in op.capabilities.values() if isinstance(value, list | tuple))
    words = (word[:MAX_LABEL_CHARS] for one in lists for word in one[:64] if isinstance(word, str))
    return tuple(dict.fromkeys((*op.tags, *words)))
