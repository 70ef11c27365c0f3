"""Decider of rebalancing: records the pressure of all nodes, then makes one move after the other.

A request of the grid that is refused is a record in the audit trail, never an error.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import LeaseAsked, LeaseExtended, LeaseReleased, PressureRead
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import (
    ASKED,
    GIVEN_BACK,
    GRID_USER,
    REFUSED,
    Advice,
    RebalanceState,
    claimed_amount,
    resource_of,
)
from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.rows import Counter
from distributed_grid.errors import GridError
from distributed_grid.reactor import jobs, leases
from distributed_grid.reactor.decision import Decision, LeaseAnswer, Record
from distributed_grid.scheduling.rebalancing.loans import AUTOMATIC_COUNTER, Borrow, Deny, used_part
from distributed_grid.scheduling.rebalancing.plan import (
    Advise,
    RebalanceMove,
    Renew,
    ReturnLease,
    next_move,
    schedule_round,
    track_nodes,
)
from distributed_grid.scheduling.rebalancing.pressure import PressureScan, scan_pressure


def on_pressure_read(ledger: Ledger, event: PressureRead, now: int) -> Decision:
    """Note what was read, or make the next move; then look again."""
    scan = scan_pressure(ledger, event.readings, event.rules, now, event.schedule)
    if event.schedule is None:
        tracked = track_nodes(scan)
        return Decision([*tracked], follow=[replace(event, schedule=schedule_round(scan, tracked))])
    for place, name in enumerate(event.schedule.nodes):
        move = next_move(scan, name)
        if move is not None:
            decision = _decide_move(scan, move)
            decision.answer = None
            left = replace(event.schedule, nodes=event.schedule.nodes[place:])
            decision.follow.append(replace(event, schedule=left))
            return decision
    return Decision()


def _decide_move(scan: PressureScan, move: RebalanceMove) -> Decision:
    if isinstance(move, ReturnLease):
        return _return_lease(scan, move)
    if isinstance(move, Renew):
        return leases.on_extended(scan.ledger, LeaseExtended(move.lease.id, GRID_USER, move.extra_ms), scan.now)
    if isinstance(move, Borrow):
        return _borrow(scan, move)
    if isinstance(move, Deny):
        row = _state_after(scan, move.node, move.resource, refused=True)
        return Decision([row], [_record(REFUSED, move.node, move.resource, move.reason, subject=move.node)])
    return _advise(scan, move)


def _return_lease(scan: PressureScan, move: ReturnLease) -> Decision:
    lease = move.lease
    decision = jobs.on_released(scan.ledger, LeaseReleased(lease.id, GRID_USER, move.reason), scan.now)
    target, resource = lease.request.target, resource_of(lease.request.ask)
    if target in scan.ledger.nodes:
        row = _state_after(scan, target, resource, at_ms=scan.now)
        if move.unused_ms:
            unused = claimed_amount(lease, resource)
            watch = replace(row.watch(resource), unused_amount=unused, unused_ms=move.unused_ms)
            row = replace(row, **{str(resource): watch})
        decision.changes.append(row)
    record = _record(GIVEN_BACK, target, resource, f"{move.reason}; {used_part(scan.ledger, lease)}", subject=lease.id)
    record.data["source_node"] = lease.node
    decision.records.append(record)
    return decision


def _borrow(scan: PressureScan, move: Borrow) -> Decision:
    ledger, request, now = scan.ledger, move.request, scan.now
    try:
        decision = leases.on_asked(ledger, LeaseAsked(request), now)
    except GridError as refusal:
        lines = scan.state(request.target).watch(move.resource).refused
        row = _state_after(scan, request.target, move.resource, at_ms=now, refused=True)
        why = f"{move.reason}: {refusal}"
        record = _record(REFUSED, request.target, move.resource, why, subject=request.id)
        return Decision([row], [] if lines else [record])
    answer = decision.answer
    assert isinstance(answer, LeaseAnswer)
    number = ledger.counters.get(AUTOMATIC_COUNTER, 0) + 1
    decision.changes += [
        _state_after(scan, request.target, move.resource, at_ms=now, used_at_ms=now),
        Counter(AUTOMATIC_COUNTER, number),
    ]
    record = _record(ASKED, request.target, move.resource, move.reason, subject=request.id)
    record.data["source_node"] = answer.lease.node
    decision.records.append(record)
    return decision


def _advise(scan: PressureScan, move: Advise) -> Decision:
    advice, state = move.advice, scan.state(move.node)
    row = replace(state, advice=advice, advised_at_ms=scan.now)
    return Decision([row], [_advice_record(scan.ledger, move.node, advice)])


def _advice_record(ledger: Ledger, node: str, advice: Advice) -> Record:
    data: dict[str, str | int | list[str]] = {"from": node, "to": advice.to, "cause": advice.cause}
    job = ledger.jobs.get(advice.job)
    if job is not None:
        data["job_id"] = job.id
    return Record("recommended", GRID_USER, advice.job or node, node, advice.reason, data)


def _state_after(
    scan: PressureScan,
    node: str,
    resource: ResourceType,
    *,
    at_ms: int | None = None,
    refused: bool = False,
    **news: int | bool,
) -> RebalanceState:
    """What is remembered of a node for which something was done, or could not be."""
    state = scan.state(node)
    old = state.watch(resource)
    watch = replace(old, refused=refused, acted_at_ms=old.acted_at_ms if at_ms is None else at_ms, **news)
    return replace(state, **{str(resource): watch})


def _record(action: str, node: str, resource: ResourceType, reason: str, *, subject: str) -> Record:
    data: dict[str, str | int | list[str]] = {
        "action": action,
        "resource_type": str(resource),
        "target_node": node,
    }
    return Record("rebalanced", GRID_USER, subject, node, reason, data)
