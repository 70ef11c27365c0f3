"""Deciders of automatic offloading: whether it is on, what it moves, and which nodes are degraded.

A look records what was read of all nodes and then relieves those above a threshold, one after the other, so that each
sees what was done for the last one. Memory comes first, and blocks before jobs. A move that is refused or fails is
counted, never an error; after three in a row no more jobs are moved until somebody enables it again.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain import events
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import DegradedNode, Move, OffloadRules, OffloadWatch
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.resources import ResourceType
from distributed_grid.errors import GridError
from distributed_grid.reactor.block_copies import copies_to_move
from distributed_grid.reactor.decision import Decision, Record
from distributed_grid.reactor.offloading import moves
from distributed_grid.reactor.offloading.move_transitions import auto_record, count_failure
from distributed_grid.scheduling.offers.offer import degraded_offer
from distributed_grid.scheduling.offloading.offload_scan import (
    OffloadScan,
    describe_pressure,
    excess_bytes,
    nodes_to_relieve,
    scan_offload,
    track_offload,
    will_be_short_of_memory,
)
from distributed_grid.scheduling.offloading.relief import Relief, ReliefOutcome, find_relief, why_degraded, why_restored

MAX_MOVES_PER_LOOK = 16
NODES_PER_STEP = 16
"""Nodes that are relieved in one step, so that it does not take long; the next follow when others had their turn."""


def is_enabled(ledger: Ledger, rules: OffloadRules) -> bool:
    """Whether work moves by itself: as a person said, else as the config says."""
    said = ledger.auto_offload.enabled
    return rules.enabled if said is None else said


def on_set(ledger: Ledger, event: events.AutoOffloadSet, now: int) -> Decision:
    """Switch it on or off, or let the config decide again; that also forgets failures. What was done to degraded nodes
    is undone when it is switched off."""
    old = ledger.auto_offload
    new = replace(old, enabled=event.enabled, set_by=event.by, set_at_ms=now, failures=0, stopped_why="")
    if event.enabled is None:
        new = replace(new, set_by="", set_at_ms=0)
    if (old.enabled, old.failures, old.stopped_why) == (new.enabled, 0, ""):
        return Decision()
    action = "reset" if event.enabled is None else "enabled" if event.enabled else "disabled"
    decision = Decision([new], [Record("auto-offload", event.by, "auto", "", action, {"action": action})])
    if event.enabled is False:
        _restore_all(ledger, f"automatic offloading was disabled by {event.by}", decision)
    return decision


def on_evaluated(ledger: Ledger, event: events.OffloadEvaluated, now: int) -> Decision:
    """Record what was read, or relieve the next node; then look again."""
    if event.rules is None or not is_enabled(ledger, event.offload):
        decision = Decision()
        _restore_all(ledger, "automatic offloading is not enabled", decision)
        return decision
    scan = scan_offload(ledger, event.readings, event.rules, event.offload, now)
    if event.nodes is None:
        return _begin(scan, event)
    if not event.nodes:
        return Decision()
    node, *others = event.nodes
    decision, used = _relieve(scan, event, node) if node in ledger.nodes else (Decision(), 0)
    decision.answer = None
    rest = replace(event, nodes=tuple(others), ids=event.ids[used:])
    if len(others) % NODES_PER_STEP:
        decision.follow.append(rest)
    elif others:
        decision.later.append(rest)
    return decision


def _begin(scan: OffloadScan, event: events.OffloadEvaluated) -> Decision:
    """What is tracked after this look, the nodes that are short no longer, and blocks of those that soon will be."""
    watches = track_offload(scan)
    decision = Decision([*watches])
    low_since = {watch.node: watch.low_since_ms for watch in watches}
    for row in scan.ledger.degraded.values():
        why = why_restored(scan, row, low_since.get(row.node))
        if why:
            _restore(row, why, decision)
    for watch in watches:
        if will_be_short_of_memory(scan, watch.node):
            ahead = scan.pressure.reading(watch.node).memory_ahead
            expected = f"{ahead.level / 10:g} %" if ahead is not None else ""
            why = f"memory of {watch.node} is expected at {expected}, above {event.offload.memory_high / 10:g} %"
            decision.follow += _blocks_leave(scan, watch.node, why, spills=False)
    decision.follow.append(replace(event, nodes=nodes_to_relieve(scan, watches)))
    return decision


def _relieve(scan: OffloadScan, event: events.OffloadEvaluated, node: str) -> tuple[Decision, int]:
    """Blocks first, then jobs; where neither can go, the node is degraded. How many ids were used."""
    relief = find_relief(scan, node)
    if relief.cause == ResourceType.MEMORY and scan.has_lasted(scan.watch(node).memory_since_ms):
        why = f"{node}: {describe_pressure(scan, node, relief.cause)}"
        leaving = _blocks_leave(scan, node, why, spills=node in scan.ledger.degraded)
        if leaving:
            words = f"{why}: {len(leaving)} blocks of the memory pool leave first"
            return Decision([_noted(scan, node, replace(relief, reason=words))], follow=[*leaving]), 0
    stopped = scan.ledger.auto_offload.stopped_why
    if relief.outcome is ReliefOutcome.MOVE and stopped:
        return Decision([_noted(scan, node, replace(relief, reason=f"{relief.reason}; but {stopped}"))]), 0
    if relief.outcome is ReliefOutcome.MOVE and event.ids:
        return _move(scan, node, relief, event.ids[0]), 1
    decision = Decision([_noted(scan, node, relief)])
    why = why_degraded(scan, node, relief)
    if why:
        _degrade(scan, node, why, decision)
    return decision, 0


def _blocks_leave(scan: OffloadScan, node: str, why: str, *, spills: bool) -> list[events.CopyUnwanted]:
    avoid = tuple(name for name in scan.ledger.nodes if name not in scan.targets)
    return copies_to_move(scan.ledger, node, excess_bytes(scan, node), scan.now, why=why, spills=spills, avoid=avoid)


def _noted(scan: OffloadScan, node: str, relief: Relief) -> OffloadWatch:
    return replace(scan.watch(node), reason=relief.reason, considered=relief.considered)


# ------------------------------------------------------------------ moves


def _move(scan: OffloadScan, node: str, relief: Relief, move_id: str) -> Decision:
    ledger, now = scan.ledger, scan.now
    job = ledger.jobs[relief.job]
    move = Move(
        move_id,
        job.request.user,
        node,
        relief.target,
        relief.way,
        job.sized_request,
        now,
        state_at_ms=now,
        reason=relief.reason,
        automatic=True,
        job=job.uid,
        job_id=job.id,
    )
    watch = _noted(scan, node, replace(relief, reason=f"{relief.reason}; moves to {relief.target} as {move_id}"))
    watch = replace(watch, moved_at_ms=now, tried=(*watch.tried, (job.uid, now)))
    try:
        decision = moves.on_requested(ledger, events.MoveRequested(move), now)
    except GridError as refusal:
        state, records = count_failure(ledger.auto_offload, f"a move of job {job.id} was refused: {refusal}")
        records.insert(0, auto_record("refused", job.uid, node, f"{relief.reason}: {refusal}"))
        return Decision([replace(watch, reason=f"{relief.reason}; refused: {refusal}"), state], records)
    target = replace(scan.watch(relief.target), moved_at_ms=now)
    decision.changes += [watch, target]
    return decision


# ------------------------------------------------------------------ degraded nodes


def _degrade(scan: OffloadScan, node: str, why: str, decision: Decision) -> None:
    """No new work from now on; what else it means follows from the row."""
    decision.changes.append(DegradedNode(node, scan.now, why))
    offer = scan.ledger.offers.get(node)
    if offer is not None:
        decision.changes.append(degraded_offer(offer, why))
    decision.records.append(Record("node-degraded", GRID_USER, node, node, why))
    decision.follow += _blocks_leave(scan, node, f"{node} is degraded: {why}", spills=True)


def _restore(row: DegradedNode, why: str, decision: Decision) -> None:
    """As others again; its next heartbeat brings a new offer."""
    decision.changes.append(replace(row, restored=True))
    decision.records.append(Record("node-restored", GRID_USER, row.node, row.node, why))


def _restore_all(ledger: Ledger, why: str, decision: Decision) -> None:
    for row in ledger.degraded.values():
        _restore(row, why, decision)
