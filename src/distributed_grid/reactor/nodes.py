"""Deciders of nodes: declaration, heartbeat, liveness, draining, removal, and their offers."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import (
    AgentRejected,
    AgentRequested,
    AlertChanged,
    ClaimsChecked,
    ControlPlaneStarted,
    EpochReported,
    HeartbeatReceived,
    LeaseLost,
    LeaseReclaimed,
    NodeDeclared,
    NodeDrained,
    NodeForgotten,
    NodeHeard,
    NodeResumed,
    NodeStopped,
    PolicySet,
    QueueScanned,
    TimePassed,
    WorkerJoined,
)
from distributed_grid.domain.fences import first_fence, is_plausible
from distributed_grid.domain.indexes.node_claims import NodeClaims, shared_though_exclusive
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, NodeObservation
from distributed_grid.domain.resources import NOTHING
from distributed_grid.domain.rows import Counter, Row
from distributed_grid.domain.states import JobState, NodeState, Step, advance_node
from distributed_grid.errors import NotFound, Refused
from distributed_grid.reactor.decision import MAX_LEASES_PER_STEP, Decision, Record, RecordType, capacity_details
from distributed_grid.reactor.workers.pull_liveness import (
    check_pull_worker,
    is_deserted,
    pull_suspect_after_ms,
    renewed_reservations,
)
from distributed_grid.scheduling.offers.offer import engine_leases_to_reclaim, next_offer, paused_offer
from distributed_grid.scheduling.offers.owner_activity import update_idleness, update_volatility
from distributed_grid.scheduling.offers.pause import rest_left_ms, update_recent

SUSPECT_AFTER_MS = 6_000
RECLAIM_DELAY_MS = 4_000
"""How long an owner needs back what an engine holds for others, before that is reclaimed."""
REJECTED_EVERY_MS = 60_000
"""How long the audit trail says nothing more about an agent that is turned away."""
HOLD_GRACE_MS = 2_000
"""Added to a node's hold before its resources count as free: time to kill what ran there."""


def on_control_plane_started(ledger: Ledger, event: ControlPlaneStarted, now: int) -> Decision:
    """Begin a new epoch: fences start above all earlier ones, also on a node with a later epoch of its own, and no node
    is alive until heard."""
    fence = max(ledger.counters.get("fence", 0), first_fence(event.epoch))
    changes: list[Row] = [Counter("epoch", event.epoch), Counter("fence", fence)]
    for node in ledger.nodes.values():
        doubted = _suspected(node) if node.state is NodeState.ALIVE else node
        if node.epoch:
            doubted = replace(doubted, epoch=node.epoch + 1 if node.epoch >= event.epoch else 0)
        if doubted is not node:
            changes.append(doubted)
        if node.hold_ms:  # the last owner may have renewed its holds until just now
            changes.append(NodeObservation(node.name, 0, held_until_ms=hold_deadline(node, now)))
    return Decision(changes)


def on_policy_set(ledger: Ledger, event: PolicySet, now: int) -> Decision:
    """Set the scheduling policy."""
    if event.policy == ledger.policy:
        return Decision()
    return Decision([event.policy], follow=[QueueScanned()] if ledger.waiting else [])


def hold_deadline(node: Node, now: int) -> int:
    """Until when work on a node that was heard just now may run on; 0 is without end."""
    return now + node.hold_ms + HOLD_GRACE_MS if node.hold_ms else 0


def _suspected(node: Node) -> Node:
    return replace(node, state=advance_node(node.state, Step.DOUBT))


def on_declared(ledger: Ledger, event: NodeDeclared, now: int) -> Decision:
    """Declare a node; a smaller declaration never cuts off what it has lent already."""
    old = ledger.nodes.get(event.node.name)
    if old is None:
        return Decision([event.node], [_declared(event.node)])
    wanted = old.wanted or event.node.wanted
    kept = {"state": old.state, "cooling": old.cooling, "epoch": old.epoch, "reclaim": old.reclaim}
    new = replace(event.node, wanted=wanted, **kept)
    if not event.node.engine:
        new = replace(new, engine=old.engine, engine_node=old.engine_node, engine_lost_ms=old.engine_lost_ms)
    if old.state is NodeState.DRAINING and not old.cooling:
        new = _suspected(_undrained(new))
    decision = Decision()
    if new.is_pull != old.is_pull:  # another kind of node: what the old one ran, it cannot report any more
        why = f"{old.name} is another node now"
        decision.follow += [LeaseLost(lease.id, why) for lease in ledger.leases_of(old.name)]
    excess = None if new.lendable == old.lendable else _excess(ledger, new)
    if excess is not None:
        new = replace(new, capacity=old.capacity, caps=old.caps)
        why = f"still {excess}: keeps its old limits until the next start"
        decision.records.append(Record("node-kept", "", old.name, old.name, why))
    if new != old:
        if new.lendable not in (old.lendable, NOTHING):
            decision.records.append(_declared(new))
        decision.changes += [new, *_refreshed_offer(ledger, new)]
        decision.follow += [QueueScanned()] if ledger.waiting else []
    return decision


def _declared(node: Node) -> Record:
    return Record("node-declared", "", node.name, node.name, data=capacity_details(node.lendable))


def _excess(ledger: Ledger, node: Node) -> str | None:
    """What is lent on a node beyond what it says it may lend, those who wait for their victims included; claims are
    compared when it is heard."""
    held = (lease for lease in ledger.leases_of(node.name) if not lease.recovered)
    claims = [lease.claim for lease in held if lease.claim is not None]
    return NodeClaims(claims).excess_over(node.lendable) or shared_though_exclusive(claims, node.lendable)


def _refreshed_offer(ledger: Ledger, node: Node) -> list[Row]:
    """The offer of a node declared anew, out of its last measurement; the old one may be beyond its limits.

    Other thresholds hold at once: what was measured under the old ones says nothing.
    """
    seen, offer = ledger.observations.get(node.name), ledger.offers.get(node.name)
    if offer is None or seen is None or seen.usage is None:
        return []
    before = seen if node.thresholds == ledger.nodes[node.name].thresholds else None
    seen = replace(seen, idleness=update_idleness(node, seen.usage, before, seen.at_ms))
    offer = next_offer(
        node,
        seen,
        offer,
        refresh=True,
        engine_capacity=ledger.engine_capacities.get(node.name),
        used=ledger.claims_on(node.name),
        degraded=why_degraded(ledger, node.name),
    )
    return [seen] if offer is None else [seen, offer]


def why_degraded(ledger: Ledger, name: str) -> str:
    """Why a node is degraded; empty where it is not."""
    row = ledger.degraded.get(name)
    return row.why if row is not None else ""


def on_epoch_reported(ledger: Ledger, event: EpochReported, now: int) -> Decision:
    """Give the fences of one node a later epoch: it has seen one that this ledger does not know of."""
    node, own = ledger.nodes.get(event.node), ledger.counters.get("epoch", 0)
    if node is None or event.epoch <= max(own, node.epoch):
        return Decision()
    if not is_plausible(event.epoch, own):
        raise Refused(f"{event.node} reports epoch {event.epoch}, and this control plane is at {own}")
    why = f"its agent has seen epoch {event.epoch}, this control plane is at {own}: fences there begin above both"
    return Decision([replace(node, epoch=event.epoch + 1)], [Record("node-epoch", "", node.name, node.name, why)])


def on_agent_rejected(ledger: Ledger, event: AgentRejected, now: int) -> Decision:
    """Remember why an agent was turned away; the audit trail gets it once in a while, however often it comes."""
    if event.node not in ledger.nodes:
        return Decision()
    seen = ledger.observations.get(event.node) or NodeObservation(event.node, 0)
    if seen.rejected_at_ms and now - seen.rejected_at_ms < REJECTED_EVERY_MS:
        return Decision()
    rejected = replace(seen, rejected=event.why, rejected_at_ms=now)
    return Decision([rejected], [Record("agent-rejected", "", event.node, event.node, event.why)])


def on_forgotten(ledger: Ledger, event: NodeForgotten, now: int) -> Decision:
    """Remove a node that the config does not name: at once when it lends nothing, else when that is over."""
    node = ledger.nodes.get(event.name)
    if node is None:
        return Decision()
    if node.state in (NodeState.ALIVE, NodeState.SUSPECT):
        node = replace(node, state=advance_node(node.state, Step.DRAIN))
    node = replace(node, forgotten=True)
    if not ledger.leases_on.get(event.name):
        node = _left(node)
    return Decision([node], [Record("node-forgotten", "", node.name, node.name)])


def _left(node: Node) -> Node:
    return replace(node, state=advance_node(node.state, Step.LEAVE))


def on_heartbeat(ledger: Ledger, event: HeartbeatReceived, now: int) -> Decision:
    """Record a heartbeat, and with it the node's hold: that changes volatile rows only, so it never waits for a store.
    What it calls for follows."""
    node = ledger.nodes.get(event.name)
    if node is None:
        return Decision()
    last = ledger.observations.get(event.name)
    overused_since = (last.overused_since_ms if last is not None else 0) or now
    seen = replace(
        last or NodeObservation(event.name, now),
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
    )
    offer = ledger.offers.get(event.name)
    decision = Decision([seen], follow=[NodeHeard(event.name)])
    if offer is not None and event.yields and not (last is not None and last.yields):
        decision.changes.append(replace(offer, withdrawn=True))  # nothing more is granted on what the agent withdrew
    elif offer is not None and (paused := paused_offer(node, seen, offer)) is not None:
        decision.changes.append(paused)  # at once: what follows may have to wait for the store
    return decision


def on_heard(ledger: Ledger, event: NodeHeard, now: int) -> Decision:
    """Do what the last heartbeat of a node calls for: a node is alive from the first one on, and its offer follows."""
    node, seen = ledger.nodes.get(event.name), ledger.observations.get(event.name)
    if node is None or seen is None or seen.usage is None:
        return Decision()
    decision = Decision()
    if seen.overused_since_ms and now - seen.overused_since_ms >= RECLAIM_DELAY_MS:
        why = f"the owner of {node.name} is using it"
        leaving = engine_leases_to_reclaim(ledger, node, seen.usage)
        decision.follow += [LeaseReclaimed(lease.id, why) for lease in leaving[:MAX_LEASES_PER_STEP]]
    if node.state is NodeState.LOST:
        node = replace(node, state=advance_node(node.state, Step.JOIN))
    if node.state in (NodeState.JOINING, NodeState.SUSPECT):
        node = replace(node, state=advance_node(node.state, Step.HEAR))
        if node.cooling:
            node = replace(node, state=advance_node(node.state, Step.DRAIN))
        decision.changes.append(node)
        decision.records.append(Record("node-alive", "", node.name, node.name))
        if node.name in ledger.workers:
            decision.follow.append(WorkerJoined(node.name))
        if any(lease.recovered for lease in ledger.leases_of(node.name)):
            decision.follow.append(ClaimsChecked(node.name))
    decision.changes += renewed_reservations(ledger, node.name, now)
    stock, claims = ledger.engine_capacities.get(node.name), ledger.claims_on(node.name)
    before = ledger.offers.get(node.name)
    degraded = why_degraded(ledger, node.name)
    offer = next_offer(node, seen, before, engine_capacity=stock, used=claims, degraded=degraded)
    if offer is not None and (before is not None or not rest_left_ms(seen, now)):  # a withdrawn one stays so
        decision.changes.append(offer)
    if decision.changes and ledger.waiting:
        decision.follow.append(QueueScanned())
    return decision


def check_liveness(ledger: Ledger, now: int) -> Decision:
    """Suspect nodes that were not heard for a while, declare those lost whose holds have run out (so many leases in one
    step), go on with draining, withdraw old offers, remove empty forgotten nodes."""
    decision = Decision()
    for node in ledger.nodes.values():
        seen = ledger.observations.get(node.name)
        suspect_after_ms = SUSPECT_AFTER_MS
        if node.is_pull:
            suspect_after_ms = pull_suspect_after_ms(node)
            check_pull_worker(ledger, node, seen, decision, now)
        if node.state is NodeState.ALIVE and (seen is None or now - seen.at_ms > suspect_after_ms):
            decision.changes.append(_suspected(node))
            decision.records.append(Record("node-suspect", "", node.name, node.name, "not heard from"))
        elif (node.forgotten or is_deserted(node, seen, now)) and not ledger.leases_on.get(node.name):
            decision.changes.append(_left(node))
        elif node.state in _UNHEARD and node.hold_ms and (seen is None or now >= seen.held_until_ms):
            _declare_lost(ledger, node, decision)
        elif node.state is NodeState.DRAINING and node.reclaim and not decision.follow:
            decision.follow += [NodeDrained(node.name, node.reclaim)] if _to_reclaim(ledger, node) else []
    for offer in ledger.offers.values():
        if offer.expires_at_ms <= now:
            decision.changes.append(replace(offer, withdrawn=True))
    return decision


_UNHEARD = frozenset({NodeState.SUSPECT, NodeState.DRAINING, NodeState.LOST})


def _declare_lost(ledger: Ledger, node: Node, decision: Decision) -> None:
    """A node whose holds have run out is lost, and so is what it lent: nothing of it can still run there."""
    room = MAX_LEASES_PER_STEP - len(decision.follow)
    if room <= 0:
        decision.later = [TimePassed()]
        return
    if node.state is NodeState.SUSPECT:
        node = replace(node, state=advance_node(node.state, Step.LOSE))
        decision.changes.append(node)
        decision.records.append(Record("node-lost", "", node.name, node.name, "its holds have run out"))
    why = f"{node.name} was not heard from for longer than its hold of {node.hold_ms / 1000:g} s"
    lost = [LeaseLost(lease.id, why) for lease in ledger.leases_of(node.name)]
    decision.follow += lost[:room]
    if lost[room:]:
        decision.later = [TimePassed()]


def on_alert(ledger: Ledger, event: AlertChanged, now: int) -> Decision:
    """Record an alert."""
    kind: RecordType = "alert-raised" if event.raised else "alert-cleared"
    return Decision(records=[Record(kind, "", event.node, event.node, event.detail, {"resource": event.resource})])


def on_agent_requested(ledger: Ledger, event: AgentRequested, now: int) -> Decision:
    """Record whether the agent of a node is to run; that of a node of this machine runs with the control plane."""
    node = known_node(ledger, event.name)
    if node.state is NodeState.DRAINING and event.wanted and not node.forgotten and not node.cooling:
        node = _suspected(_undrained(node))
    wanted = replace(node, wanted=event.wanted and node.host != "local")
    return Decision([wanted] if wanted != ledger.nodes[event.name] else [])


def known_node(ledger: Ledger, name: str) -> Node:
    node = ledger.nodes.get(name)
    if node is None:
        raise NotFound(f"no node is called {name}; the nodes are: {', '.join(sorted(ledger.nodes)) or 'none'}")
    return node


def on_drained(ledger: Ledger, event: NodeDrained, now: int) -> Decision:
    """Drain a node: lend nothing more and reclaim what is lent, so much in one step; draining twice is harmless. Where
    it does not reclaim, its leases come to their ends."""
    node = known_node(ledger, event.name)
    decision = Decision()
    drained = replace(node, cooling=node.cooling or event.cooling)
    if node.state in (NodeState.ALIVE, NodeState.SUSPECT):
        drained = replace(drained, state=advance_node(node.state, Step.DRAIN))
    if drained.state is NodeState.DRAINING and not node.reclaim and event.reclaims:
        drained = replace(drained, reclaim=event.detail)
    if drained != node:
        decision.changes.append(drained)
        decision.records.append(Record("node-draining", "", node.name, node.name, event.detail))
    leaving = _to_reclaim(ledger, node) if event.reclaims else []
    decision.follow += [LeaseReclaimed(lease.id, event.detail) for lease in leaving[:MAX_LEASES_PER_STEP]]
    if leaving[MAX_LEASES_PER_STEP:]:
        decision.later = [event]
    return decision


def _to_reclaim(ledger: Ledger, node: Node) -> list[Lease]:
    """What a node has lent and nobody is giving back yet."""
    return [lease for lease in ledger.leases_of(node.name) if lease.holds and not is_being_returned(ledger, lease)]


def is_being_returned(ledger: Ledger, lease: Lease) -> bool:
    """Whether what was lent is being given back already: its job is stopped, or its copy moves."""
    if lease.request.block:
        block = ledger.blocks.get(lease.request.block)
        if block is None or block.freeing or block.moving is not None:
            return True
        return all(place.copy != lease.id or place.on_disk for place in block.places)
    job = ledger.jobs.get(lease.job)
    return job is not None and job.state is JobState.STOPPING


def _undrained(node: Node) -> Node:
    return replace(node, state=advance_node(node.state, Step.RESUME), reclaim="")


def on_resumed(ledger: Ledger, event: NodeResumed, now: int) -> Decision:
    """Let a node that cooled down lend again, from its next heartbeat on; one that did not is left as it is."""
    node = known_node(ledger, event.name)
    if not node.cooling:
        return Decision()
    node = replace(node, cooling=False)
    if node.state is NodeState.DRAINING and not node.forgotten:
        node = _suspected(_undrained(node))
    return Decision([node], [Record("node-resumed", "", node.name, node.name)])


def on_stopped(ledger: Ledger, event: NodeStopped, now: int) -> Decision:
    """The agent is gone on purpose: nothing runs there. Once its leases are over, so many in one step, the node is one
    that has not been heard from."""
    node = known_node(ledger, event.name)
    state = node.state
    if state in (NodeState.ALIVE, NodeState.SUSPECT):
        state = advance_node(state, Step.DRAIN)
    seen = ledger.observations.get(node.name)
    missing = seen.missing if seen is not None else ()  # of another agent: nobody stopped that
    kept = {one.lease_id for one in missing}
    why = f"{node.name} has left" if node.is_pull else f"the agent of {node.name} was stopped"
    lost = [LeaseLost(lease.id, why) for lease in ledger.leases_of(node.name) if lease.id not in kept]
    if lost[MAX_LEASES_PER_STEP:]:
        draining = replace(node, state=state, wanted=False)
        changes: list[Row] = [draining] if draining != node else []
        return Decision(changes, follow=[*lost[:MAX_LEASES_PER_STEP]], later=[event])
    decision = Decision(records=[Record("node-stopped", "", node.name, node.name)], follow=[*lost])
    if state in (NodeState.DRAINING, NodeState.LOST):
        state = advance_node(advance_node(state, Step.LEAVE), Step.JOIN)
    stopped = replace(node, state=state, wanted=False, reclaim="")
    offer = ledger.offers.get(node.name)
    decision.changes = [stopped, NodeObservation(node.name, 0, missing=missing)]
    decision.changes += [] if offer is None else [replace(offer, withdrawn=True)]
    return decision
