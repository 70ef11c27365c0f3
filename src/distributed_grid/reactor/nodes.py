"""Deciders of nodes: declaration, epochs, draining, removal; alerts and the scheduling policy."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import (
    AgentRejected,
    AgentRequested,
    AlertChanged,
    ControlPlaneStarted,
    EpochReported,
    LeaseLost,
    LeaseReclaimed,
    NodeDeclared,
    NodeDrained,
    NodeForgotten,
    NodeResumed,
    NodeStopped,
    PolicySet,
)
from distributed_grid.domain.followups import ScanQueue
from distributed_grid.domain.indexes.node_claims import NodeClaims, shared_though_exclusive
from distributed_grid.domain.leases import Lease, first_fence, is_plausible_epoch
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, NodeObservation
from distributed_grid.domain.resources import NOTHING
from distributed_grid.domain.rows import Counter, Row
from distributed_grid.domain.states import JobState, NodeState, Step, advance
from distributed_grid.errors import NotFound, Refused
from distributed_grid.reactor.decision import MAX_LEASES_PER_STEP, Decision, Record, RecordType, capacity_details
from distributed_grid.scheduling.offers.offer import next_offer
from distributed_grid.scheduling.offers.owner_activity import update_idleness

REJECTED_EVERY_MS = 60_000
"""Pause of the audit trail between two records about the same rejected agent."""
HOLD_GRACE_MS = 2_000
"""Added to a node's hold before its resources count as free: time to kill its attempts."""


def on_control_plane_started(ledger: Ledger, event: ControlPlaneStarted, now: int) -> Decision:
    """Begin a new epoch: fences start above all earlier ones, also on a node with a later epoch of its own, and every
    node is suspect until heard."""
    fence = max(ledger.counters.get("fence", 0), first_fence(event.epoch))
    changes: list[Row] = [Counter("epoch", event.epoch), Counter("fence", fence)]
    for node in ledger.nodes.values():
        doubted = suspected_node(node) if node.state is NodeState.ALIVE else node
        if node.epoch:
            doubted = replace(doubted, epoch=node.epoch + 1 if node.epoch >= event.epoch else 0)
        if doubted is not node:
            changes.append(doubted)
        if node.hold_ms:  # the last owner may have renewed its holds until just now
            changes.append(NodeObservation(node=node.name, at_ms=0, held_until_ms=hold_deadline(node, now)))
    return Decision(changes)


def on_policy_set(ledger: Ledger, event: PolicySet, now: int) -> Decision:
    if event.policy == ledger.policy:
        return Decision()
    return Decision([event.policy], follow=[ScanQueue()] if ledger.waiting else [])


def hold_deadline(node: Node, now: int) -> int:
    """End of the hold of a node that was heard just now; 0: without end."""
    return now + node.hold_ms + HOLD_GRACE_MS if node.hold_ms else 0


def suspected_node(node: Node) -> Node:
    return replace(node, state=advance(node.state, Step.DOUBT))


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
        new = suspected_node(_undrained(new))
    decision = Decision()
    if new.is_pull != old.is_pull:  # another kind of node, which cannot report the attempts of the old one
        reason = f"{old.name} is another node now"
        decision.follow += [LeaseLost(lease.id, reason) for lease in ledger.leases_of(old.name)]
    excess = None
    if new.lendable != old.lendable:  # recovered leases are checked when the node is heard
        held = (lease for lease in ledger.leases_of(new.name) if not lease.recovered)
        claims = [lease.claim for lease in held if lease.claim is not None]
        excess = NodeClaims(claims).excess_over(new.lendable) or shared_though_exclusive(claims, new.lendable)
    if excess is not None:
        new = replace(new, capacity=old.capacity, caps=old.caps)
        reason = f"still {excess}: keeps its old limits until the next start"
        decision.records.append(Record("node-kept", "", old.name, old.name, reason))
    if new != old:
        if new.lendable not in (old.lendable, NOTHING):
            decision.records.append(_declared(new))
        decision.changes += [new, *_refreshed_offer(ledger, new)]
        decision.follow += [ScanQueue()] if ledger.waiting else []
    return decision


def _declared(node: Node) -> Record:
    return Record("node-declared", "", node.name, node.name, data=capacity_details(node.lendable))


def _refreshed_offer(ledger: Ledger, node: Node) -> list[Row]:
    """A new offer of a node that was declared anew, from its last measurement; the old one may exceed its limits.

    Other thresholds apply at once, without the idleness under the old ones.
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
    """The reason why a node is degraded; empty where it is not."""
    row = ledger.degraded.get(name)
    return row.why if row is not None else ""


def on_epoch_reported(ledger: Ledger, event: EpochReported, now: int) -> Decision:
    """Give the fences of one node a later epoch, because it has seen one that this ledger has not."""
    node, own = ledger.nodes.get(event.node), ledger.counters.get("epoch", 0)
    if node is None or event.epoch <= max(own, node.epoch):
        return Decision()
    if not is_plausible_epoch(event.epoch, own):
        raise Refused(f"{event.node} reports epoch {event.epoch}, and this control plane is at {own}")
    reason = f"its agent has seen epoch {event.epoch}, this control plane is at {own}: fences there begin above both"
    return Decision([replace(node, epoch=event.epoch + 1)], [Record("node-epoch", "", node.name, node.name, reason)])


def on_agent_rejected(ledger: Ledger, event: AgentRejected, now: int) -> Decision:
    """Note why an agent was turned away; the audit trail gets it at most once in `REJECTED_EVERY_MS`."""
    if event.node not in ledger.nodes:
        return Decision()
    seen = ledger.observations.get(event.node) or NodeObservation(node=event.node, at_ms=0)
    if seen.rejected_at_ms and now - seen.rejected_at_ms < REJECTED_EVERY_MS:
        return Decision()
    rejected = replace(seen, rejected=event.why, rejected_at_ms=now)
    return Decision([rejected], [Record("agent-rejected", "", event.node, event.node, event.why)])


def on_forgotten(ledger: Ledger, event: NodeForgotten, now: int) -> Decision:
    """Remove a node that the config does not name: at once when it lends nothing, else when its leases have ended."""
    node = ledger.nodes.get(event.name)
    if node is None:
        return Decision()
    if node.state in (NodeState.ALIVE, NodeState.SUSPECT):
        node = replace(node, state=advance(node.state, Step.DRAIN))
    node = replace(node, forgotten=True)
    if not ledger.leases_on.get(event.name):
        node = departed_node(node)
    return Decision([node], [Record("node-forgotten", "", node.name, node.name)])


def departed_node(node: Node) -> Node:
    return replace(node, state=advance(node.state, Step.LEAVE))


def on_alert(ledger: Ledger, event: AlertChanged, now: int) -> Decision:
    kind: RecordType = "alert-raised" if event.raised else "alert-cleared"
    return Decision(records=[Record(kind, "", event.node, event.node, event.detail, data={"resource": event.resource})])


def on_agent_requested(ledger: Ledger, event: AgentRequested, now: int) -> Decision:
    """Note whether the agent of a node has to run; that of a node of this machine runs with the control plane."""
    node = known_node(ledger, event.name)
    if node.state is NodeState.DRAINING and event.wanted and not node.forgotten and not node.cooling:
        node = suspected_node(_undrained(node))
    wanted = replace(node, wanted=event.wanted and node.host != "local")
    return Decision([wanted] if wanted != ledger.nodes[event.name] else [])


def known_node(ledger: Ledger, name: str) -> Node:
    node = ledger.nodes.get(name)
    if node is None:
        raise NotFound(f"no node is called {name}; the nodes are: {', '.join(sorted(ledger.nodes)) or 'none'}")
    return node


def on_drained(ledger: Ledger, event: NodeDrained, now: int) -> Decision:
    """Drain a node: lend nothing more and reclaim its leases, a bounded number in one step; draining twice is harmless.
    Without a reclaim its leases come to their ends."""
    node = known_node(ledger, event.name)
    decision = Decision()
    drained = replace(node, cooling=node.cooling or event.cooling)
    if node.state in (NodeState.ALIVE, NodeState.SUSPECT):
        drained = replace(drained, state=advance(node.state, Step.DRAIN))
    if drained.state is NodeState.DRAINING and not node.reclaim and event.reclaims:
        drained = replace(drained, reclaim=event.detail)
    if drained != node:
        decision.changes.append(drained)
        decision.records.append(Record("node-draining", "", node.name, node.name, event.detail))
    leaving = leases_to_reclaim(ledger, node) if event.reclaims else []
    decision.follow += [LeaseReclaimed(lease.id, event.detail) for lease in leaving[:MAX_LEASES_PER_STEP]]
    if leaving[MAX_LEASES_PER_STEP:]:
        decision.later = [event]
    return decision


def leases_to_reclaim(ledger: Ledger, node: Node) -> list[Lease]:
    """The leases of a node that are not being returned yet."""
    return [lease for lease in ledger.leases_of(node.name) if lease.holds and not is_being_returned(ledger, lease)]


def is_being_returned(ledger: Ledger, lease: Lease) -> bool:
    """Whether a lease is being returned already: its job is stopped, or its copy moves."""
    if lease.request.block:
        block = ledger.blocks.get(lease.request.block)
        if block is None or block.freeing or block.moving is not None:
            return True
        return all(place.copy != lease.id or place.on_disk for place in block.places)
    job = ledger.jobs.get(lease.job)
    return job is not None and job.state is JobState.STOPPING


def _undrained(node: Node) -> Node:
    return replace(node, state=advance(node.state, Step.RESUME), reclaim="")


def on_resumed(ledger: Ledger, event: NodeResumed, now: int) -> Decision:
    """Let a cooling node lend again, from its next heartbeat on; any other node is left as it is."""
    node = known_node(ledger, event.name)
    if not node.cooling:
        return Decision()
    node = replace(node, cooling=False)
    if node.state is NodeState.DRAINING and not node.forgotten:
        node = suspected_node(_undrained(node))
    return Decision([node], [Record("node-resumed", "", node.name, node.name)])


def on_stopped(ledger: Ledger, event: NodeStopped, now: int) -> Decision:
    """End the leases of a node whose agent was stopped, a bounded number in one step; after that it is a node that was
    never heard."""
    node = known_node(ledger, event.name)
    state = node.state
    if state in (NodeState.ALIVE, NodeState.SUSPECT):
        state = advance(state, Step.DRAIN)
    seen = ledger.observations.get(node.name)
    missing = seen.missing if seen is not None else ()  # of another agent, which was not stopped
    kept = {attempt.lease_id for attempt in missing}
    reason = f"{node.name} has left" if node.is_pull else f"the agent of {node.name} was stopped"
    lost = [LeaseLost(lease.id, reason) for lease in ledger.leases_of(node.name) if lease.id not in kept]
    if lost[MAX_LEASES_PER_STEP:]:
        draining = replace(node, state=state, wanted=False)
        changes: list[Row] = [draining] if draining != node else []
        return Decision(changes, follow=[*lost[:MAX_LEASES_PER_STEP]], later=[event])
    decision = Decision(records=[Record("node-stopped", "", node.name, node.name)], follow=[*lost])
    if state in (NodeState.DRAINING, NodeState.LOST):
        state = advance(advance(state, Step.LEAVE), Step.JOIN)
    stopped = replace(node, state=state, wanted=False, reclaim="")
    offer = ledger.offers.get(node.name)
    decision.changes = [stopped, NodeObservation(node=node.name, at_ms=0, missing=missing)]
    decision.changes += [] if offer is None else [replace(offer, withdrawn=True)]
    return decision
