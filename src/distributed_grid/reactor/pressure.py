"""Deciders of nodes under pressure: loans of rebalancing, jobs that automatic offloading moves, and degraded nodes.

Both record the readings of all nodes first and then visit the pressed ones, one after the other, so that each sees the
effect of the last. A refused request of the grid, and a move that is refused or fails, is a record in the audit trail,
never an error. Memory comes first, and blocks before jobs. After three failed moves in a row no more jobs are moved
until somebody enables automatic offloading again.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain import events
from distributed_grid.domain.followups import RebalanceNodes, RelieveNodes
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import DegradedNode, Move, OffloadRules, OffloadWatch
from distributed_grid.domain.rebalancing import (
    ASKED,
    GIVEN_BACK,
    GRID_USER,
    REFUSED,
    RebalanceState,
    claimed_amount,
    resource_of,
)
from distributed_grid.domain.resources import ResourceType
from distributed_grid.domain.rows import Counter
from distributed_grid.errors import GridError
from distributed_grid.reactor import jobs, leases
from distributed_grid.reactor.block_copies import copies_to_move
from distributed_grid.reactor.decision import Decision, LeaseAnswer, Record
from distributed_grid.reactor.offloading import moves
from distributed_grid.reactor.offloading.move_transitions import auto_record, count_failure
from distributed_grid.scheduling.offers.offer import degraded_offer
from distributed_grid.scheduling.pressure.loans import AUTOMATIC_COUNTER, Borrow, Deny, used_part
from distributed_grid.scheduling.pressure.plan import (
    Renew,
    ReturnLease,
    next_action,
    nodes_to_relieve,
    schedule_round,
    track_nodes,
    track_offload,
)
from distributed_grid.scheduling.pressure.relief import (
    Relief,
    ReliefOutcome,
    describe_pressure,
    find_relief,
    why_degraded,
    why_restored,
)
from distributed_grid.scheduling.pressure.scan import PressureScan, percent, scan_pressure, scan_with_lenders

MAX_MOVES_PER_LOOK = 16
NODES_PER_STEP = 16
"""Nodes that are relieved in one step, so that it does not take long; the next follow after other events."""


# ------------------------------------------------------------------ rebalancing


def on_pressure_read(ledger: Ledger, event: events.PressureRead, now: int) -> Decision:
    """Record the readings and schedule the round."""
    scan = scan_pressure(ledger, event.readings, event.rules, now)
    tracked = track_nodes(scan)
    return Decision([*tracked], follow=[RebalanceNodes(event, schedule_round(scan, tracked))])


def rebalance_nodes(ledger: Ledger, order: RebalanceNodes, now: int) -> Decision:
    """Take the next action of a round; the rest of the round follows."""
    reading, schedule = order.reading, order.schedule
    scan = scan_pressure(ledger, reading.readings, reading.rules, now, schedule)
    for place, name in enumerate(schedule.nodes):
        match next_action(scan, name):
            case None:
                continue
            case ReturnLease() as action:
                decision = _return_lease(scan, action)
            case Renew(lease, extra_ms):
                decision = leases.on_extended(ledger, events.LeaseExtended(lease.id, GRID_USER, extra_ms), now)
            case Borrow() as action:
                decision = _borrow(scan, action)
            case Deny(node, resource, reason):
                row = _state_after(scan, node, resource, refused=True)
                decision = Decision([row], [_record(REFUSED, node, resource, reason, subject=node)])
            case advise:
                advice, job = advise.advice, ledger.jobs.get(advise.advice.job)
                data: dict[str, str | int | list[str]] = {"from": name, "to": advice.to, "cause": advice.cause}
                if job is not None:
                    data["job_id"] = job.id
                row = replace(scan.state(name), advice=advice, advised_at_ms=now)
                record = Record("recommended", GRID_USER, advice.job or name, name, advice.reason, data=data)
                decision = Decision([row], [record])
        decision.answer = None
        decision.follow.append(RebalanceNodes(reading, replace(schedule, nodes=schedule.nodes[place:])))
        return decision
    return Decision()


def _return_lease(scan: PressureScan, action: ReturnLease) -> Decision:
    lease = action.lease
    decision = jobs.on_released(scan.ledger, events.LeaseReleased(lease.id, GRID_USER, action.reason), scan.now)
    target, resource = lease.request.target, resource_of(lease.request.ask)
    if target in scan.ledger.nodes:
        row = _state_after(scan, target, resource, at_ms=scan.now)
        if action.unused_ms:
            unused = claimed_amount(lease, resource)
            watch = replace(row.watch(resource), unused_amount=unused, unused_ms=action.unused_ms)
            row = replace(row, **{str(resource): watch})
        decision.changes.append(row)
    reason = f"{action.reason}; {used_part(scan.ledger, lease)}"
    decision.records.append(_record(GIVEN_BACK, target, resource, reason, subject=lease.id, lender=lease.node))
    return decision


def _borrow(scan: PressureScan, action: Borrow) -> Decision:
    ledger, request, resource, now = scan.ledger, action.request, action.resource, scan.now
    try:
        decision = leases.on_asked(ledger, events.LeaseAsked(request), now)
    except GridError as refusal:
        is_recorded = scan.state(request.target).watch(resource).refused
        row = _state_after(scan, request.target, resource, at_ms=now, refused=True)
        record = _record(REFUSED, request.target, resource, f"{action.reason}: {refusal}", subject=request.id)
        return Decision([row], [] if is_recorded else [record])
    answer = decision.answer
    assert isinstance(answer, LeaseAnswer)
    number = ledger.counters.get(AUTOMATIC_COUNTER, 0) + 1
    state = _state_after(scan, request.target, resource, at_ms=now, used_at_ms=now)
    decision.changes += [state, Counter(AUTOMATIC_COUNTER, number)]
    lender = answer.lease.node
    decision.records.append(_record(ASKED, request.target, resource, action.reason, subject=request.id, lender=lender))
    return decision


def _state_after(
    scan: PressureScan,
    node: str,
    resource: ResourceType,
    *,
    at_ms: int | None = None,
    refused: bool = False,
    **changes: int | bool,
) -> RebalanceState:
    """The state of a node after an action for it, or a refusal."""
    state = scan.state(node)
    old = state.watch(resource)
    watch = replace(old, refused=refused, acted_at_ms=old.acted_at_ms if at_ms is None else at_ms, **changes)
    return replace(state, **{str(resource): watch})


def _record(
    action: str, node: str, resource: ResourceType, reason: str, *, subject: str, lender: str | None = None
) -> Record:
    data: dict[str, str | int | list[str]] = {"action": action, "resource_type": str(resource), "target_node": node}
    if lender is not None:
        data["source_node"] = lender
    return Record("rebalanced", GRID_USER, subject, node, reason, data=data)


# ------------------------------------------------------------------ automatic offloading


def is_enabled(ledger: Ledger, rules: OffloadRules) -> bool:
    """Whether work moves by itself: as a person said, else as the config says."""
    enabled = ledger.auto_offload.enabled
    return rules.enabled if enabled is None else enabled


def on_auto_offload_set(ledger: Ledger, event: events.AutoOffloadSet, now: int) -> Decision:
    """Switch it on or off, or let the config decide again; that also forgets failures. Degraded nodes are restored when
    it is switched off."""
    old = ledger.auto_offload
    new = replace(old, enabled=event.enabled, set_by=event.by, set_at_ms=now, failures=0, stopped_why="")
    if event.enabled is None:
        new = replace(new, set_by="", set_at_ms=0)
    if (old.enabled, old.failures, old.stopped_why) == (new.enabled, 0, ""):
        return Decision()
    action = "reset" if event.enabled is None else "enabled" if event.enabled else "disabled"
    decision = Decision([new], [Record("auto-offload", event.by, "auto", "", action, data={"action": action})])
    if event.enabled is False:
        _restore(list(ledger.degraded.values()), f"automatic offloading was disabled by {event.by}", decision)
    return decision


def on_offload_pressure_read(ledger: Ledger, event: events.OffloadPressureRead, now: int) -> Decision:
    """Record the watches, restore nodes, and move blocks off nodes that soon will be short of memory."""
    scan = _offload_scan(ledger, event, now)
    if scan is None:
        return _offloading_disabled(ledger)
    watches = track_offload(scan)
    decision = Decision([*watches])
    low_since_ms = {watch.node: watch.low_since_ms for watch in watches}
    for row in scan.ledger.degraded.values():
        reason = why_restored(scan, row, low_since_ms.get(row.node))
        if reason:
            _restore([row], reason, decision)
    for watch in watches:
        if scan.will_be_short_of_memory(watch.node):
            ahead = scan.reading(watch.node).memory_ahead
            expected, high = percent(ahead.level) if ahead is not None else "", percent(event.offload.memory_high)
            reason = f"memory of {watch.node} is expected at {expected}, above {high}"
            decision.follow += _blocks_leave(scan, watch.node, reason, spills=False)
    decision.follow.append(RelieveNodes(event, nodes_to_relieve(scan, watches), event.ids))
    return decision


def relieve_nodes(ledger: Ledger, order: RelieveNodes, now: int) -> Decision:
    """Relieve the first of the nodes; the others follow, a bounded number in this step."""
    scan = _offload_scan(ledger, order.reading, now)
    if scan is None:
        return _offloading_disabled(ledger)
    if not order.nodes:
        return Decision()
    node, *others = order.nodes
    decision, used_ids = _relieve(scan, order.ids, node) if node in ledger.nodes else (Decision(), 0)
    decision.answer = None
    rest = RelieveNodes(order.reading, tuple(others), order.ids[used_ids:])
    if len(others) % NODES_PER_STEP:
        decision.follow.append(rest)
    elif others:
        decision.later.append(rest)
    return decision


def _offload_scan(ledger: Ledger, event: events.OffloadPressureRead, now: int) -> PressureScan | None:
    """The scan of a reading; None where automatic offloading is not enabled any more."""
    if event.rules is None or not is_enabled(ledger, event.offload):
        return None
    return scan_with_lenders(ledger, event.readings, event.rules, now, event.offload)


def _offloading_disabled(ledger: Ledger) -> Decision:
    decision = Decision()
    _restore(list(ledger.degraded.values()), "automatic offloading is not enabled", decision)
    return decision


def _relieve(scan: PressureScan, move_ids: tuple[str, ...], node: str) -> tuple[Decision, int]:
    """The decision for one node, and the number of ids used: blocks first, then jobs; where neither can go, the node is
    degraded."""
    relief, ledger, now = find_relief(scan, node), scan.ledger, scan.now
    if relief.cause == ResourceType.MEMORY and scan.has_dwelt(scan.watch(node).memory_since_ms):
        reason = f"{node}: {describe_pressure(scan, node, relief.cause)}"
        leaving = _blocks_leave(scan, node, reason, spills=node in ledger.degraded)
        if leaving:
            text = f"{reason}: {len(leaving)} blocks of the memory pool leave first"
            return Decision([_watch_after(scan, node, relief, text)], follow=[*leaving]), 0
    stopped = ledger.auto_offload.stopped_why
    if relief.outcome is ReliefOutcome.MOVE and stopped:
        return Decision([_watch_after(scan, node, relief, f"{relief.reason}; but {stopped}")]), 0
    if relief.outcome is ReliefOutcome.MOVE and move_ids:
        return _move_job(scan, node, relief, move_ids[0]), 1
    decision = Decision([_watch_after(scan, node, relief, relief.reason)])
    reason = why_degraded(scan, node, relief)
    if reason:  # no new work from now on; pauses and spilled blocks follow from the row
        decision.changes.append(DegradedNode(node, now, reason))
        offer = ledger.offers.get(node)
        if offer is not None:
            decision.changes.append(degraded_offer(offer, reason))
        decision.records.append(Record("node-degraded", GRID_USER, node, node, reason))
        decision.follow += _blocks_leave(scan, node, f"{node} is degraded: {reason}", spills=True)
    return decision, 0


def _blocks_leave(scan: PressureScan, node: str, why: str, *, spills: bool) -> list[events.CopyUnwanted]:
    avoid = tuple(name for name in scan.ledger.nodes if name not in scan.schedule.with_headroom)
    excess = scan.excess_bytes(node)
    return copies_to_move(scan.ledger, node, excess, scan.now, why=why, spills=spills, avoid=avoid)


def _watch_after(scan: PressureScan, node: str, relief: Relief, reason: str) -> OffloadWatch:
    return replace(scan.watch(node), reason=reason, considered=relief.considered)


def _move_job(scan: PressureScan, node: str, relief: Relief, move_id: str) -> Decision:
    ledger, now = scan.ledger, scan.now
    job = ledger.jobs[relief.job]
    move = Move(
        id=move_id,
        user=job.request.user,
        source=node,
        target=relief.target,
        way=relief.way,
        request=job.sized_request,
        requested_at_ms=now,
        state_at_ms=now,
        reason=relief.reason,
        automatic=True,
        job=job.uid,
        job_id=job.id,
    )
    watch = _watch_after(scan, node, relief, f"{relief.reason}; moves to {relief.target} as {move_id}")
    watch = replace(watch, moved_at_ms=now, tried=(*watch.tried, (job.uid, now)))
    try:
        decision = moves.on_requested(ledger, events.MoveRequested(move), now)
    except GridError as refusal:
        state, records = count_failure(ledger.auto_offload, f"a move of job {job.id} was refused: {refusal}")
        records.insert(0, auto_record("refused", job.uid, node, f"{relief.reason}: {refusal}"))
        return Decision([replace(watch, reason=f"{relief.reason}; refused: {refusal}"), state], records)
    decision.changes += [watch, replace(scan.watch(relief.target), moved_at_ms=now)]
    return decision


def _restore(rows: list[DegradedNode], why: str, decision: Decision) -> None:
    """End the degradation of nodes; the next heartbeat of each brings a new offer."""
    for row in rows:
        decision.changes.append(replace(row, restored=True))
        decision.records.append(Record("node-restored", GRID_USER, row.node, row.node, why))
