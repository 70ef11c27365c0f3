"""Rebalancing plan: what is tracked from round to round, which nodes a round visits, and the next move for one.

Moves are made one at a time, so that each sees what the last one did. A loan is returned when its node is below the low
watermark, when the lender is above its high one, when a user waits for it, or when the rules forbid it. Loans have a
term and are renewed while their node is known, so that a forgotten one ends by itself. Borrowing comes before advice.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.rebalancing import (
    SPREAD,
    WATCHED_RESOURCES,
    Advice,
    PressureWatch,
    RebalanceSchedule,
    RebalanceState,
    resource_of,
)
from distributed_grid.domain.resources import ResourceType
from distributed_grid.scheduling.placement.placement import unmet_constraint
from distributed_grid.scheduling.rebalancing.advice import advice_for, still_applies
from distributed_grid.scheduling.rebalancing.loans import Borrow, Deny, asked_amount, may_borrow, plan_borrow
from distributed_grid.scheduling.rebalancing.pressure import PressureScan, machine_of, percent

QUEUE_ENTRY = ""
"""The first entry of a schedule: the queue."""


def track_nodes(scan: PressureScan) -> list[RebalanceState]:
    """The states of the nodes after one more reading, where they have changed."""
    changed = []
    least = _two_least(scan)
    for name in scan.ledger.nodes:
        old = scan.state(name)
        new = replace(
            old,
            memory=_track_resource(scan, name, ResourceType.MEMORY, old.memory),
            cpu=_track_resource(scan, name, ResourceType.CPU, old.cpu),
            gpu=_track_resource(scan, name, ResourceType.GPU, old.gpu),
            spread=_track_spread(scan, name, least, old.spread),
            advice=old.advice if old.advice is not None and still_applies(scan, name, old.advice) else None,
        )
        if new != old:
            changed.append(new)
    return changed


def _track_resource(scan: PressureScan, node: str, resource: ResourceType, old: PressureWatch) -> PressureWatch:
    above = below = None
    if scan.is_above(node, resource):
        above = scan.now if old.above_since_ms is None else old.above_since_ms
    elif scan.held[node, resource] and scan.is_below(node, resource):
        below = scan.now if old.below_since_ms is None else old.below_since_ms
    return PressureWatch(above, below, old.acted_at_ms, old.refused and not scan.is_below(node, resource))


def _two_least(scan: PressureScan) -> list[tuple[int, str]]:
    """The least loaded node that is known, and the least loaded one of another machine."""
    nodes = scan.ledger.nodes
    found: list[tuple[int, str]] = []
    scores = ((scan.reading(name).score, name) for name in nodes)
    for score, name in sorted((score, name) for score, name in scores if score is not None):
        if not found:
            found.append((score, name))
        elif machine_of(nodes[name]) != machine_of(nodes[found[0][1]]):
            return [*found, (score, name)]
    return []


def _track_spread(scan: PressureScan, node: str, least: list[tuple[int, str]], old: PressureWatch) -> PressureWatch:
    """Since when a node works so much harder than the least loaded one elsewhere that they should be evened out."""
    score, nodes = scan.reading(node).score, scan.ledger.nodes
    if not scan.rules.evens_out or score is None or not least:
        return PressureWatch()
    lowest, _ = least[0] if machine_of(nodes[least[0][1]]) != machine_of(nodes[node]) else least[1]
    if score - lowest <= scan.rules.policy.spread_milli:
        return PressureWatch()
    return PressureWatch(scan.now if old.above_since_ms is None else old.above_since_ms)


def schedule_round(scan: PressureScan, tracked: Iterable[RebalanceState]) -> RebalanceSchedule:
    """Who has to be looked at in this round, by what has just been tracked, and who could help."""
    states = {**scan.ledger.rebalance_states, **{state.node: state for state in tracked}}
    above = {name for name, state in states.items() if _is_tracked_above(state)}
    holding = dict.fromkeys(lease.request.target for lease in scan.leases)
    pressed = sorted((-(scan.reading(name).score or 0), name) for name in above)
    with_headroom = sorted(
        (scan.reading(name).score or 0, name) for name in scan.ledger.nodes if scan.has_headroom(name)
    )
    return RebalanceSchedule(
        (QUEUE_ENTRY, *(name for name in holding if name not in above), *(name for _, name in pressed)),
        tuple(name for _, name in with_headroom) if pressed else (),
        _contested_resources(scan) if pressed else frozenset(),
    )


def _is_tracked_above(state: RebalanceState) -> bool:
    return any(state.watch(cause).above_since_ms is not None for cause in (*WATCHED_RESOURCES, SPREAD))


def _contested_resources(scan: PressureScan) -> frozenset[str]:
    """The resources that users wait for: the grid does not get in their way."""
    kinds: set[str] = set()
    for request, _ in scan.ledger.queue_groups:
        kinds.update(kind for kind in WATCHED_RESOURCES if asked_amount(request.ask, kind))
        if len(kinds) == len(WATCHED_RESOURCES):
            break
    return frozenset(kinds)


QUEUE_SCAN_LIMIT = 100
"""Waiting requests that are compared with the automatic leases."""


class ReturnLease(Struct, frozen=True):
    """A lease that is not needed or not allowed any more."""

    lease: Lease
    reason: str


class Renew(Struct, frozen=True):
    """A lease that is still needed when its term ends."""

    lease: Lease
    extra_ms: int


class Advise(Struct, frozen=True):
    """Work of a node that should move."""

    node: str
    advice: Advice


RebalanceMove = ReturnLease | Renew | Borrow | Deny | Advise


def next_move(scan: PressureScan, node: str) -> RebalanceMove | None:
    """The next move for a node of the schedule, or None."""
    if node == QUEUE_ENTRY:
        return _blocking_users(scan) if scan.leases and scan.ledger.waiting else None
    mine = [lease for lease in scan.leases if lease.request.target == node]
    return _return(scan, mine) or _renew(scan, mine) or _borrow(scan, node) or _advise(scan, node)


def _blocking_users(scan: PressureScan) -> ReturnLease | None:
    """An automatic lease that, alone or with others, keeps a waiting request from being granted."""
    ledger = scan.ledger
    nodes = dict.fromkeys(lease.node for lease in scan.leases)
    for _, _, lease_id in ledger.waiting[:QUEUE_SCAN_LIMIT]:
        request = ledger.leases[lease_id].request
        for node in nodes:
            held = _blocking_leases(scan, request, node)
            if held:
                return ReturnLease(held[0], f"{request.user} waits for it: request {request.id}")
    return None


def _blocking_leases(scan: PressureScan, request: Request, node: str) -> list[Lease]:
    """The leases of the grid on a node that alone keep a request from fitting there."""
    ledger, ask = scan.ledger, request.ask
    mine = {
        lease.id: lease
        for lease in scan.leases
        if lease.node == node and asked_amount(ask, resource_of(lease.request.ask))
    }
    lends = ledger.lends(node)
    if not mine or ledger.claims_on(node).claim_for(ask, lends) is not None:
        return []
    if unmet_constraint(ledger, request, node) is not None:
        return []
    staying = NodeClaims(
        lease.claim for lease in ledger.leases_of(node) if lease.id not in mine and lease.claim is not None
    )
    return list(mine.values()) if staying.claim_for(ask, lends) is not None else []


def _return(scan: PressureScan, mine: list[Lease]) -> ReturnLease | None:
    """A lease that is too many, not needed or not allowed any more."""
    most = scan.rules.policy.leases_max
    if len(mine) > most:
        return ReturnLease(mine[-1], f"{most} leases for one node are enough")
    for lease in mine:
        reason = _return_reason(scan, lease)
        if reason:
            return ReturnLease(lease, reason)
    return None


def _return_reason(scan: PressureScan, lease: Lease) -> str:
    """Why a lease is not needed or not allowed any more; empty where it is."""
    target, resource = lease.request.target, resource_of(lease.request.ask)
    if not scan.rules.shares:
        return f"the mode is {scan.rules.mode}"
    marks = scan.rules.watermarks(resource)
    level = scan.reading(lease.node).level(resource)
    if level is not None and scan.has_lasted(scan.state(lease.node).watch(resource).above_since_ms):
        return f"{lease.node} needs it itself: {resource} at {percent(level)}, mark {percent(marks.high)}"
    watch, level = scan.state(target).watch(resource), scan.reading(target).level(resource)
    if level is None or not scan.has_lasted(watch.below_since_ms):
        return ""
    if not (scan.has_cooled_down(watch.acted_at_ms) or watch.acted_at_ms == scan.now):
        return ""
    return f"{resource} of {target} at {percent(level)}, below the mark of {percent(marks.low)}"


def _renew(scan: PressureScan, mine: list[Lease]) -> Renew | None:
    policy, interval_ms = scan.rules.policy, scan.rules.interval_ms
    for lease in mine:
        target, resource = lease.request.target, resource_of(lease.request.ask)
        left_ms = lease.ends_at_ms - scan.now
        if left_ms > policy.renew_at * interval_ms or scan.reading(target).level(resource) is None:
            continue
        if not scan.is_below(target, resource):
            return Renew(lease, policy.term * interval_ms - left_ms)
    return None


def _borrow(scan: PressureScan, node: str) -> Borrow | Deny | None:
    if not scan.rules.shares or node not in scan.ledger.nodes:
        return None
    for resource in WATCHED_RESOURCES:
        if may_borrow(scan, node, resource):
            move = plan_borrow(scan, node, resource)
            if move is not None:
                return move
    return None


def _advise(scan: PressureScan, node: str) -> Advise | None:
    """One piece of advice at a time, for the first resource that a node is short of."""
    state = scan.state(node)
    if state.advice is not None or not scan.has_cooled_down(state.advised_at_ms) or node not in scan.ledger.nodes:
        return None
    for cause in (*WATCHED_RESOURCES, SPREAD):
        if scan.has_lasted(state.watch(cause).above_since_ms):
            advice = advice_for(scan, node, cause)
            if advice is not None:
                return Advise(node, advice)
    return None
