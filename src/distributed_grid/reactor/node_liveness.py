"""Liveness of nodes: heartbeats and the offers that follow, silence, loss; pull workers that have stopped asking.

A heartbeat itself changes volatile rows only; its consequences are a step of their own (`assess_node`). Reservations
for tasks are renewed while their node is heard.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import (
    ClocksConfirmed,
    HeartbeatReceived,
    LeaseLost,
    LeaseReclaimed,
    NodeDrained,
    NodeHeard,
    TimePassed,
    WorkerJoined,
)
from distributed_grid.domain.followups import AssessNode, CheckClaims, ScanQueue
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, NodeObservation
from distributed_grid.domain.resources import NOTHING
from distributed_grid.domain.states import JobState, LeaseState, NodeState, Step, advance
from distributed_grid.reactor.decision import MAX_LEASES_PER_STEP, Decision, Record
from distributed_grid.reactor.nodes import departed_node, hold_deadline, leases_to_reclaim, suspected_node, why_degraded
from distributed_grid.scheduling.offers.offer import (
    engine_leases_to_reclaim,
    full_disk_offer,
    next_offer,
    paused_offer,
    unmeasured_offer,
)
from distributed_grid.scheduling.offers.owner_activity import update_idleness, update_volatility
from distributed_grid.scheduling.offers.pause import is_disk_full, rest_left_ms, update_recent

SUSPECT_AFTER_MS = 6_000
RECLAIM_DELAY_MS = 4_000
"""Time of an owner's need before leases that an engine holds for others are reclaimed."""
MIN_PULL_SUSPECT_MS = 1_000
ASKING_MS = 15_000
"""Time after its request for a task during which a pull worker counts as asking."""
UNTAKEN_MS = 30_000
"""Time that a task waits for the pull worker that it was assigned to."""
DESERTED_MS = 3_600_000
"""Time that a lost pull worker stays listed."""
_UNHEARD = frozenset({NodeState.SUSPECT, NodeState.DRAINING, NodeState.LOST})


def on_heartbeat(ledger: Ledger, event: HeartbeatReceived, now: int) -> Decision:
    """Record a heartbeat and renew the node's hold: only volatile rows change, so it never waits for a store."""
    node = ledger.nodes.get(event.name)
    if node is None:
        return Decision()
    last = ledger.observations.get(event.name)
    if last is not None and last.lost and not node.is_pull:  # too late: the hold that it would renew is over
        return Decision()
    overused_since = (last.overused_since_ms if last is not None else 0) or now
    seen = replace(
        last or NodeObservation(node=event.name, at_ms=now),
        at_ms=now,
        usage=event.usage,
        beat=event.beat,
        held_until_ms=hold_deadline(node, now),
        generation=event.generation,
        yields=event.yields,
        idleness=update_idleness(node, event.usage, last, now) if node.capacity != NOTHING else None,
        recent=update_recent(node, event.usage, last, now) if node.capacity != NOTHING else None,
        volatility=update_volatility(node, event.usage, last, now),
        report_wanted=event.repeats and last is not None and last.report_wanted,
        overused_since_ms=overused_since if engine_leases_to_reclaim(ledger, node, event.usage) else 0,
        disk_full=is_disk_full(event.usage, was_full=last is not None and last.disk_full),
        clock_jump_ms=event.clock_jump_ms,
        clock_waits_ms=event.clock_waits_ms,
        clock_confirmed=last is not None and last.clock_confirmed and last.clock_jump_ms == event.clock_jump_ms,
        lost=False,
    )
    offer = ledger.offers.get(event.name)
    decision = Decision([seen], follow=[AssessNode(event.name)])
    if offer is not None and event.yields and not (last is not None and last.yields):
        decision.changes.append(replace(offer, withdrawn=True))  # nothing more is granted on what the agent withdrew
    elif offer is not None and seen.disk_full and not (last is not None and last.disk_full):
        decision.changes.append(full_disk_offer(offer, event.usage))
    elif offer is not None and (unknown := unmeasured_offer(node, event.usage, offer)) is not None:
        decision.changes.append(unknown)
    elif offer is not None and (paused := paused_offer(node, seen, offer)) is not None:
        decision.changes.append(paused)  # at once: the follow-up may have to wait for the store
    return decision


def assess_node(ledger: Ledger, heard: AssessNode | NodeHeard, now: int) -> Decision:
    """Settle a node after its heartbeat: it is alive from the first one on, and gets its offer."""
    node, seen = ledger.nodes.get(heard.name), ledger.observations.get(heard.name)
    if node is None or seen is None or seen.usage is None or (seen.lost and not node.is_pull):
        return Decision()
    decision = Decision()
    if seen.clock_jump_ms != seen.clock_recorded_ms:
        decision.changes.append(replace(seen, clock_recorded_ms=seen.clock_jump_ms))
        if seen.clock_jump_ms:
            reason = "the wall clock jumped: nothing is deleted by age until it is steady or confirmed"
            seconds = {"jumped_seconds": seen.clock_jump_ms / 1000, "waits_seconds": seen.clock_waits_ms / 1000}
            decision.records.append(Record("clock-jumped", "", seen.node, seen.node, reason, data=seconds))
        else:
            reason = "the wall clock is steady again"
            decision.records.append(Record("clock-steady", "", seen.node, seen.node, reason))
    if seen.overused_since_ms and now - seen.overused_since_ms >= RECLAIM_DELAY_MS:
        why = f"the owner of {node.name} is using it"
        leaving = engine_leases_to_reclaim(ledger, node, seen.usage)
        decision.follow += [LeaseReclaimed(lease.id, why) for lease in leaving[:MAX_LEASES_PER_STEP]]
    if node.state is NodeState.LOST:
        node = replace(node, state=advance(node.state, Step.JOIN))
    if node.state in (NodeState.JOINING, NodeState.SUSPECT):
        node = replace(node, state=advance(node.state, Step.HEAR))
        if node.cooling:
            node = replace(node, state=advance(node.state, Step.DRAIN))
        decision.changes.append(node)
        decision.records.append(Record("node-alive", "", node.name, node.name))
        if node.name in ledger.workers:
            decision.follow.append(WorkerJoined(node.name))
        if any(lease.recovered for lease in ledger.leases_of(node.name)):
            decision.follow.append(CheckClaims(node.name))
    for lease in [ledger.leases[lease_id] for lease_id in ledger.reservations_on.get(node.name, ())]:
        if lease.state is LeaseState.ACTIVE and 2 * (lease.ends_at_ms - now) < lease.request.duration_ms:
            decision.changes.append(replace(lease, ends_at_ms=now + lease.request.duration_ms))
    stock, claims = ledger.engine_capacities.get(node.name), ledger.claims_on(node.name)
    before = ledger.offers.get(node.name)
    degraded = why_degraded(ledger, node.name)
    offer = next_offer(node, seen, before, engine_capacity=stock, used=claims, degraded=degraded)
    if offer is not None and (before is not None or not rest_left_ms(seen, now)):  # a withdrawn one stays so
        decision.changes.append(offer)
    if decision.changes and ledger.waiting:
        decision.follow.append(ScanQueue())
    return decision


def on_clocks_confirmed(ledger: Ledger, event: ClocksConfirmed, now: int) -> Decision:
    """Let the agents of all nodes with a pending jump delete by age again, from their next heartbeats on."""
    pending = [seen for seen in ledger.observations.values() if seen.clock_jump_ms and not seen.clock_confirmed]
    return Decision(
        [replace(seen, clock_confirmed=True) for seen in pending],
        [Record("clock-confirmed", event.by, seen.node, seen.node, "the wall clock is right") for seen in pending],
    )


def check_liveness(ledger: Ledger, now: int) -> Decision:
    """Suspect silent nodes, declare those lost whose holds have run out (a bounded number of leases in one step),
    continue drains, withdraw expired offers, remove forgotten nodes without leases."""
    decision = Decision()
    for node in ledger.nodes.values():
        seen = ledger.observations.get(node.name)
        suspect_after_ms = SUSPECT_AFTER_MS
        if node.is_pull:  # it is heard as often as its hold needs
            suspect_after_ms = max(node.hold_ms // 3, MIN_PULL_SUSPECT_MS)
            _check_pull_worker(ledger, node, seen, decision, now)
        if node.state is NodeState.ALIVE and (seen is None or now - seen.at_ms > suspect_after_ms):
            decision.changes.append(suspected_node(node))
            decision.records.append(Record("node-suspect", "", node.name, node.name, "not heard from"))
            continue
        is_deserted = (  # a pull worker that was lost long ago
            node.is_pull
            and node.state is NodeState.LOST
            and seen is not None
            and now - max(seen.at_ms, seen.held_until_ms) > DESERTED_MS
        )
        if (node.forgotten or is_deserted) and not ledger.leases_on.get(node.name):
            decision.changes.append(departed_node(node))
        elif node.state in _UNHEARD and node.hold_ms and (seen is None or now >= seen.held_until_ms):
            _declare_lost(ledger, node, decision)
        elif node.state is NodeState.DRAINING and node.reclaim and not decision.follow:
            decision.follow += [NodeDrained(node.name, node.reclaim)] if leases_to_reclaim(ledger, node) else []
    for offer in ledger.offers.values():
        if offer.expires_at_ms <= now:
            decision.changes.append(replace(offer, withdrawn=True))
    return decision


def _declare_lost(ledger: Ledger, node: Node, decision: Decision) -> None:
    """Declare a node lost with its leases, because its holds have run out: no attempt can still run there. The row that
    says so is the one that a heartbeat renews, so whichever comes first is seen by the other."""
    room = MAX_LEASES_PER_STEP - len(decision.follow)
    if room <= 0:
        decision.later = [TimePassed()]
        return
    seen = ledger.observations.get(node.name) or NodeObservation(node=node.name, at_ms=0)
    is_decided = node.state is NodeState.SUSPECT or bool(ledger.leases_on.get(node.name))
    if is_decided and not seen.lost and not node.is_pull:
        decision.changes.append(replace(seen, lost=True))
    if node.state is NodeState.SUSPECT:
        node = replace(node, state=advance(node.state, Step.LOSE))
        decision.changes.append(node)
        decision.records.append(Record("node-lost", "", node.name, node.name, "its holds have run out"))
    reason = f"{node.name} was not heard from for longer than its hold of {node.hold_ms / 1000:g} s"
    lost = [LeaseLost(lease.id, reason) for lease in ledger.leases_of(node.name)]
    decision.follow += lost[:room]
    if lost[room:]:
        decision.later = [TimePassed()]


def _check_pull_worker(ledger: Ledger, node: Node, seen: NodeObservation | None, decision: Decision, now: int) -> None:
    """Note that a pull worker has stopped asking, and give the tasks that it does not take to others."""
    if seen is not None and seen.asking_since_ms and now - seen.asking_since_ms > ASKING_MS:
        decision.changes.append(replace(seen, asking_since_ms=0))
    for job in ledger.jobs_of(node.name):
        attempt = job.attempt
        if attempt is None or job.state is not JobState.ASSIGNED or now - attempt.assigned_at_ms <= UNTAKEN_MS:
            continue
        if len(decision.follow) < MAX_LEASES_PER_STEP and not ledger.leases[attempt.lease_id].awaits:
            reason = f"{node.name} did not take it within {UNTAKEN_MS // 1000} s"
            decision.follow.append(LeaseReclaimed(attempt.lease_id, reason))
