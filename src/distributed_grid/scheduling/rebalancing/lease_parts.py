"""Parts of automatic leases: work of a node under pressure gets its lease out of those that are held for that node.

An automatic lease shrinks by what is carved out of it; what the work asks for beyond that has to be free on the lender.
A lease that a command uses as a whole gives nothing away. The claims on the lender never grow by more than is free.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import (
    GRID_USER,
    belongs_to,
    claimed_amount,
    is_automatic,
    owner_of,
    resource_of,
)
from distributed_grid.domain.resources import WHOLE_GPU, Capacity, Claim, GpuShare
from distributed_grid.scheduling.placement.machine_limits import crowded_nodes
from distributed_grid.scheduling.placement.placement import Placement, strategy_of, unmet_constraint
from distributed_grid.scheduling.rebalancing.loans import UNITS, asked_amount
from distributed_grid.scheduling.rebalancing.pressure import idle_automatic_leases


def carve_placement(
    ledger: Ledger, request: Request, *, waits: bool = False, avoid: Collection[str] = ()
) -> Placement | None:
    """Where a request gets a part of its node's automatic leases, or None; never on a node to avoid.

    A request that would have to wait gets it whatever it prefers; others only where their own wishes allow that.
    """
    if GRID_USER not in ledger.held or request.gang > 1 or request.within or is_automatic(request):
        return None
    if not waits and request.strategy is not None:
        return None
    owners = belongs_to(request) if waits else owner_of(request)
    avoid = {*avoid, *crowded_nodes(ledger, request)}
    on: dict[str, list[Lease]] = {}
    for lease in idle_automatic_leases(ledger):
        wanted = waits or not request.prefer or lease.node in request.prefer
        if lease.request.target in owners and wanted and asked_amount(request.ask, resource_of(lease.request.ask)):
            on.setdefault(lease.node, []).append(lease)
    plans = (_carve_on(ledger, request, node, leases) for node, leases in on.items() if node not in avoid)
    found = [plan for plan in plans if plan is not None]
    return min(found, key=lambda plan: (plan.node not in request.prefer, plan.node), default=None)


def _carve_on(ledger: Ledger, request: Request, node: str, mine: list[Lease]) -> Placement | None:
    columns = ledger.columns
    if not columns.open[columns.row_of(node)] or unmet_constraint(ledger, request, node) is not None:
        return None
    claims, lends = ledger.claims_on(node).copy(), ledger.lends(node)
    for lease in mine:
        if lease.claim is not None:
            claims.remove(lease.claim)
    claim = claims.claim_for(request.ask, _on_devices(lends, mine)) or claims.claim_for(request.ask, lends)
    if claim is None:
        return None
    carved, left = [], claim
    for lease in mine:
        assert lease.claim is not None
        rest = _without(lease.claim, left)
        if rest != lease.claim:
            carved.append((lease.id, _whole_devices(rest)))
            left = _without(left, lease.claim)
    preferred = node in request.prefer
    return (
        Placement(node, claim, strategy_of(ledger, request), preferred=preferred, carved=tuple(carved))
        if carved
        else None
    )


def _on_devices(lends: Capacity, leases: list[Lease]) -> Capacity:
    """What a node lends, of its GPUs only those that the leases hold."""
    held = {share.index for lease in leases if lease.claim is not None for share in lease.claim.gpus}
    return replace(lends, gpus=tuple(device for device in lends.gpus if device.index in held))


def _without(claim: Claim, taken: Claim) -> Claim:
    """What is left of a claim."""
    by_device = {share.index: share for share in taken.gpus}
    rests = (_share_without(share, by_device.get(share.index)) for share in claim.gpus)
    cpu_milli, memory_bytes = claim.cpu_milli - taken.cpu_milli, claim.memory_bytes - taken.memory_bytes
    return Claim(max(cpu_milli, 0), max(memory_bytes, 0), tuple(rest for rest in rests if rest is not None))


def _whole_devices(claim: Claim) -> Claim:
    """The claim without parts of devices, where it has several: so many GPUs are only held whole."""
    if len(claim.gpus) < 2:
        return claim
    return replace(claim, gpus=tuple(share for share in claim.gpus if share.milli == WHOLE_GPU))


def _share_without(share: GpuShare, taken: GpuShare | None) -> GpuShare | None:
    if taken is None:
        return share
    milli = share.milli - taken.milli
    return GpuShare(share.index, milli, max(share.memory_bytes - taken.memory_bytes, 0)) if milli > 0 else None


def is_used_up(lease: Lease, left: Claim) -> bool:
    """Whether what is left of an automatic lease is too little to hold."""
    resource = resource_of(lease.request.ask)
    return claimed_amount(replace(lease, claim=left), resource) < UNITS[resource]
