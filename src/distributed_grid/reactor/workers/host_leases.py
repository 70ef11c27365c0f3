"""Host leases: resources of the control plane's machine, leased for a worker in a container there.

A worker in a container has the cores and memory of the machine that its engine runs on. So that they are not lent
twice, the worker holds a lease on that machine's node, from before it is asked for until it is proven gone. Nobody else
releases or preempts it; when the owner wants the machine back, the lease is being released while the worker is ended.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import Event, LeaseReleased
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.states import LeaseState, Step, advance
from distributed_grid.domain.workers import Worker
from distributed_grid.errors import Refused
from distributed_grid.reactor.decision import Decision
from distributed_grid.reactor.lease_transitions import grant, lease_record
from distributed_grid.scheduling.queue import reasons
from distributed_grid.scheduling.queue.queue import place_newcomer
from distributed_grid.scheduling.scaling.worker_availability import host_amounts


def host_lease_id(worker_id: str) -> str:
    """The id of the lease that a worker holds on its host."""
    return f"{worker_id}-host"


def lease_host(ledger: Ledger, worker: Worker, now: int) -> Decision:
    """Grant a worker its host lease; Refused where the node cannot lend that now. Nothing where it has no host."""
    if not worker.host:
        return Decision()
    user, ask = worker.by or GRID_USER, host_amounts(worker)
    request = Request(
        id=host_lease_id(worker.id), user=user, ask=ask, require=(worker.host,), wait_ms=0, worker=worker.id
    )
    lease = Lease(id=request.id, request=request, asked_at_ms=now)
    placement = place_newcomer(ledger, lease, now)
    if placement is None:
        reason = reasons.why_no_room(ledger, request, now)
        raise Refused(f"{worker.host}, on which it would run, cannot lend what it needs: {'; '.join(reason)}", reason)
    decision, _, _ = grant(ledger, lease, placement, now, job=None)
    decision.choice = None
    return decision


def has_host(ledger: Ledger, worker: Worker) -> bool:
    """Whether a worker may run where it is to run: it needs no host lease, or holds it."""
    if not worker.host:
        return True
    lease = ledger.leases.get(host_lease_id(worker.id))
    return lease is not None and lease.state is LeaseState.ACTIVE


def lost_host(ledger: Ledger, worker: Worker) -> str:
    """Why a worker may not run where it does any longer; empty where it may."""
    if not worker.host:
        return ""
    lease = ledger.leases.get(host_lease_id(worker.id))
    if lease is None:
        return f"{worker.host}, on which it runs, does not lend it anything any more"
    return lease.detail or "its host is needed" if lease.state is LeaseState.RELEASING else ""


def give_host_back(lease: Lease, detail: str) -> Decision:
    """Begin to release a host lease, as its owner wants; its worker is ended then, and it with the worker."""
    if lease.state is LeaseState.RELEASING:
        return Decision()
    leaving = replace(lease, state=advance(lease.state, Step.RELEASE), detail=detail)
    return Decision([leaving], [lease_record("stopping", leaving, None, detail)])


def release_host(ledger: Ledger, worker: Worker) -> list[Event]:
    """What ends the host lease of a worker that is gone."""
    lease_id = host_lease_id(worker.id)
    if not worker.host or lease_id not in ledger.leases:
        return []
    return [LeaseReleased(lease_id, GRID_USER, f"worker {worker.id} is gone")]
