"""Pull workers: registration, heartbeats, resources, and reservations on them. Used by the socket.

A pull worker is a node of the ledger without an agent. Its heartbeats are its liveness: they are taken in at once, like
those of agents, regardless of the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.workers import (
    NodeResources,
    PullWorkerDetail,
    PullWorkerRemoved,
    PullWorkerRow,
    ReassessmentStarted,
    ReservationDetail,
    ReservationRow,
    UnwantedTask,
    WorkerFit,
    WorkerResourceList,
)
from distributed_grid.api.worker_resources import (
    ReportedResources,
    reported_resources,
    required_amounts,
)
from distributed_grid.control.grid import Grid
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
from distributed_grid.domain.leases import Lease, NodeKind, Request
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
from distributed_grid.server.pages import select_page

RESERVATION_MS = 3_600_000
HEARTBEATS_PER_HOLD = 6
MAX_LABEL_CHARS = 128
PHYSICAL_CORES = "physical_cores"
log = logging.getLogger(__name__)


class PullWorkerService:
    """Answers the requests about pull workers; `detect` measures this machine again."""

    def __init__(
        self, grid: Grid, viewer: Callable[[], Viewer], *, hold_seconds: float, detect: Callable[[], Capacity]
    ) -> None:
        self._grid = grid
        self._viewer = viewer
        self._hold_ms = round(1000 * hold_seconds)
        self._detect = detect

    @endpoint(ADMIN)
    async def register(self, op: requests.RegisterPullWorker, caller: Caller) -> PullWorkerDetail:
        """Register a worker, or its resources again; another incarnation replaces the one before."""
        reported = reported_resources(op.resources)
        labels, lists = {}, []
        for name, value in op.capabilities.items():
            if isinstance(value, str | int | float | bool):
                labels[name] = str(value)[:MAX_LABEL_CHARS]
            elif isinstance(value, list | tuple):
                lists.append(value[:64])
        if op.hostname:
            labels["hostname"] = op.hostname
        if reported.physical_cores:
            labels[PHYSICAL_CORES] = str(reported.physical_cores)
        words = (word[:MAX_LABEL_CHARS] for values in lists for word in values if isinstance(word, str))
        node = Node(
            name=op.worker_id,
            capacity=reported.has,
            host=PULL_HOST,
            hold_ms=round(1000 * op.hold_seconds) or self._hold_ms,
            joined=True,
            labels=tuple(sorted(labels.items())),
            tags=tuple(dict.fromkeys((*op.tags, *words))),
            incarnation=op.incarnation,
        )
        await self._grid.handle(PullWorkerRegistered(node, await self._usage(op.worker_id, reported)))
        return await self._grid.read(lambda ledger, now: _registered(ledger, op.worker_id))

    @endpoint(ADMIN, keeps_config=True)
    async def heard(self, op: requests.ReportPullWorker, caller: Caller) -> PullWorkerDetail:
        """Take in a heartbeat; the answer has the tasks to stop, and whether the worker is to report its resources."""
        node = registered_worker(self._grid.ledger, op.worker_id, op.incarnation)
        if op.resources:
            reported = reported_resources(op.resources, node.capacity)
            usage = await self._usage(op.worker_id, reported)
            if reported.has != node.capacity:
                await self._grid.handle(PullWorkerRegistered(replace(node, capacity=reported.has), usage))
            self._grid.observe(HeartbeatReceived(name=op.worker_id, usage=usage))
        else:
            self.hear_again(op.worker_id)
        await self._grid.handle(NodeHeard(op.worker_id))
        return await self._grid.read(lambda ledger, now: _registered(ledger, op.worker_id))

    def hear_again(self, name: str) -> None:
        """Note that a worker lives, with the resources it reported last."""
        seen = self._grid.ledger.observations.get(name)
        if seen is not None and seen.usage is not None:
            self._grid.observe(HeartbeatReceived(name=name, usage=seen.usage, repeats=True))

    @endpoint(ADMIN, keeps_config=True)
    async def remove(self, op: requests.RemovePullWorker, caller: Caller) -> PullWorkerRemoved:
        """Remove a worker; the tasks it had taken are lost, the others go to other workers."""
        registered_worker(self._grid.ledger, op.worker_id, op.incarnation)
        await self._grid.handle(NodeStopped(op.worker_id))
        await self._grid.handle(NodeForgotten(op.worker_id))
        return PullWorkerRemoved(op.worker_id)

    async def reassess_forever(self, seconds: float) -> None:
        """Reassess all workers at this interval, until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await self._reassess()
            except GridError as failure:  # the next round may well succeed
                log.warning("the workers could not be reassessed: %s", failure)

    @endpoint(ADMIN)
    async def reassess(self, op: requests.ReassessWorkers, caller: Caller) -> ReassessmentStarted:
        """Have every worker report its resources again."""
        await self._reassess()
        return ReassessmentStarted(await self._grid.read(lambda ledger, now: len(ledger.pull_nodes)))

    async def _reassess(self) -> None:
        """Measure the node of this machine again, and have all others report with their heartbeats."""
        await self._grid.handle(ReassessmentRequested())
        capacity = await asyncio.to_thread(self._detect)

        def measured(ledger: Ledger, now: int) -> list[Node]:
            here = [node for node in ledger.nodes.values() if node.host == "local" and not node.simulated]
            return here if len(here) == 1 else []  # the capacity of several on one machine is declared

        for node in await self._grid.read(measured):
            if (node.capacity.cpu_milli, node.capacity.memory_bytes) != (capacity.cpu_milli, capacity.memory_bytes):
                has = replace(node.capacity, cpu_milli=capacity.cpu_milli, memory_bytes=capacity.memory_bytes)
                await self._grid.handle(NodeDeclared(replace(node, capacity=has)))

    @endpoint(USER)
    async def reserve(self, op: requests.ReserveOnWorker, caller: Caller) -> ReservationDetail:
        """Hold resources of a worker for a task, or refuse with the reason."""
        request = _reservation(op.worker_id, required_amounts(op.requirements), op.task_id)
        request = replace(request, id=op.request_id, user=caller.user, team=caller.team)

        def earlier(ledger: Ledger, now: int) -> list[str]:
            held = (ledger.leases[name] for names in ledger.reservations_on.values() for name in names)
            return [lease.id for lease in held if lease.request.task == op.task_id and lease.id != op.request_id]

        for reservation in await self._grid.read(earlier):
            raise Conflict(f"the task {op.task_id} has the reservation {reservation} already; release it first")
        answer = await self._grid.handle(LeaseAsked(request))
        assert isinstance(answer, LeaseAnswer)
        return ReservationDetail(ReservationRow.of(self._viewer(), answer.lease, op.task_id))

    @endpoint(READ)
    async def check(self, op: requests.CheckWorkerFit, caller: Caller) -> WorkerFit:
        """Fitness of a worker for a task, or the reason why it has no room now."""
        request = _reservation(op.worker_id, required_amounts(op.requirements), "check")

        def read(ledger: Ledger, now: int) -> WorkerFit:
            node = ledger.nodes.get(op.worker_id)
            if node is None:
                return _misfit(f"no worker is called {op.worker_id}")
            claims, lends = ledger.claims_on(node.name), ledger.lends(node.name)
            if ledger.columns.open[ledger.columns.rows[node.name]]:
                fitness = fitness_of(request.ask, lends, claims)
                if fitness:
                    return WorkerFit(available=True, reasons=[], fitness=fitness)
            return _misfit(why_not_there(ledger, request, node, now))

        return await self._grid.read(read)

    @endpoint(READ)
    async def resources(self, op: requests.ListWorkerResources, caller: Caller) -> WorkerResourceList:
        """A page of the workers by name: their resources, free and in all, and the reservations for tasks on them."""
        viewer = self._viewer()
        names = await self._grid.read(lambda ledger, now: tuple(ledger.nodes))
        page = await select_page(
            self._grid.slices,
            names,
            lambda name: (0, name),
            name="worker resources",
            cursor=op.cursor,
            limit=op.limit,
        )

        def read(ledger: Ledger, name: str, now: int) -> Sequence[tuple[str, NodeResources, list[tuple[Lease, str]]]]:
            if (node := ledger.nodes.get(name)) is None:
                return ()
            claims, lends = ledger.claims_on(name), ledger.lends(name)
            if not ledger.columns.open[ledger.columns.rows[name]]:
                lends = Capacity()
            free = Capacity(
                max(lends.cpu_milli - claims.cpu_milli, 0),
                max(lends.memory_bytes - claims.memory_bytes, 0),
                tuple(device for device in lends.gpus if claims.free_milli(device) > 0),
            )
            physical = dict(node.labels).get(PHYSICAL_CORES, "")
            cores = int(physical) if physical.isdecimal() else 0
            gpu_bytes = sum(claims.free_memory(device) for device in free.gpus)
            reserved = [
                (lease, lease.request.task or ledger.jobs[lease.job].id)
                for lease in ledger.leases_of(name)
                if lease.request.task or (lease.job and lease.request.runs_on is not NodeKind.AGENT)
            ]
            return [(name, NodeResources.of(node.capacity, free, gpu_bytes, cores), reserved)]

        rows = await self._grid.read_each(lambda ledger: page.rows, read)
        reservations = sorted((held for *_, reserved in rows for held in reserved), key=lambda row: row[0].asked_at_ms)
        return WorkerResourceList(
            workers={name: resources for name, resources, _ in rows},
            reservations=[ReservationRow.of(viewer, lease, task) for lease, task in reservations],
            more=page.end is not None,
            next=page.next(),
        )

    async def _usage(self, name: str, reported: ReportedResources) -> Usage:
        def read(ledger: Ledger, now: int) -> Usage:
            seen = ledger.observations.get(name)
            usage = reported_usage(reported.has, reported.free, ledger.claims_on(name))
            return usage_where_named(usage, reported.named, seen.usage if seen is not None else None)

        return await self._grid.read(read)


def _registered(ledger: Ledger, name: str) -> PullWorkerDetail:
    """The answer to a registration or a heartbeat."""
    node, seen = ledger.nodes[name], ledger.observations.get(name)
    jobs = [job for job in ledger.jobs_of(name) if job.attempt is not None]
    return PullWorkerDetail(
        PullWorkerRow(
            worker_id=name,
            incarnation=node.incarnation,
            state=str(node.state),
            hold_seconds=node.hold_ms / 1000,
            heartbeat_seconds=node.hold_ms / 1000 / HEARTBEATS_PER_HOLD,
            report_resources=seen is None or seen.usage is None or seen.report_wanted,
            tasks=[job.id for job in jobs if job.state is not JobState.ASSIGNED],
            stop=[
                UnwantedTask(task_id=job.id, fence=job.attempt.fence, reason=job.stop.detail)
                for job in jobs
                if job.state is JobState.STOPPING and job.stop is not None and job.attempt is not None
            ],
        )
    )


def _reservation(worker: str, ask: Amounts, task: str) -> Request:
    return Request(
        id="reservation",
        user="",
        ask=ask,
        require=(worker,),
        wait_ms=0,
        duration_ms=RESERVATION_MS,
        runs_on=NodeKind.ANY,
        task=task,
    )


def _misfit(reason: str) -> WorkerFit:
    return WorkerFit(available=False, reasons=[reason], fitness=0.0)
