"""Deciding about nodes: declared, heard, doubted, forgotten; and what each offers."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.books import Book, shared_though_exclusive
from distributed_grid.domain.changes import Counter, Row
from distributed_grid.domain.events import (
    ControlPlaneStarted,
    NodeDeclared,
    NodeForgotten,
    NodeHeard,
    QueueLooked,
)
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.lives import NodeState, Step, advance_node
from distributed_grid.domain.nodes import Node, Sighting, Usage
from distributed_grid.domain.offers import Offer
from distributed_grid.reactor.decision import Decision, Record
from distributed_grid.scheduling.lending import lending

SUSPECT_AFTER_MS = 6_000


def on_control_plane_started(ledger: Ledger, event: ControlPlaneStarted, now: int) -> Decision:
    """Begin a new epoch: fences start above all earlier ones, and nobody counts as alive until heard."""
    fence = max(ledger.counters.get("fence", 0), event.epoch << 32)
    changes: list[Row] = [Counter("epoch", event.epoch), Counter("fence", fence)]
    changes += [_doubted(node) for node in ledger.nodes.values() if node.state is NodeState.ALIVE]
    return Decision(changes)


def _doubted(node: Node) -> Node:
    return replace(node, state=advance_node(node.state, Step.DOUBT))


def on_declared(ledger: Ledger, event: NodeDeclared, now: int) -> Decision:
    """Take in what a node has; what it lent already is never cut off by a smaller declaration."""
    old = ledger.nodes.get(event.node.name)
    if old is None:
        return Decision([event.node], [Record("node-declared", "", event.node.name, event.node.name)])
    new = replace(event.node, state=old.state)
    if old.state is NodeState.DRAINING:
        new = replace(new, state=advance_node(old.state, Step.RESUME))
        new = _doubted(new)
    decision = Decision()
    excess = None if new.lendable == old.lendable else _excess(ledger, new)
    if excess is not None:
        new = replace(new, capacity=old.capacity, caps=old.caps)
        why = f"still {excess}: keeps its old limits until the next start"
        decision.records.append(Record("node-kept", "", old.name, old.name, why))
    if new != old:
        decision.changes += [new, *_offered_anew(ledger, new)]
        decision.follow = [QueueLooked()] if ledger.waiting else []
    return decision


def _excess(ledger: Ledger, node: Node) -> str | None:
    """What is lent on a node beyond what it says it may lend, those who wait for their victims included."""
    claims = [lease.claim for lease in ledger.leases_of(node.name) if lease.claim is not None]
    return Book(claims).excess_over(node.lendable) or shared_though_exclusive(claims, node.lendable)


def _offered_anew(ledger: Ledger, node: Node) -> list[Row]:
    """The offer of a node declared anew, out of its last measurement; the old one may be beyond its limits."""
    seen = ledger.sightings.get(node.name)
    if node.name not in ledger.offers or seen is None or seen.usage is None:
        return []
    offer = _offer(ledger, node, seen.usage, seen.at_ms)
    return [] if offer is None else [offer]


def on_forgotten(ledger: Ledger, event: NodeForgotten, now: int) -> Decision:
    """Let go of a node the config does not name: at once when it lends nothing, else when that is over."""
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


def on_heard(ledger: Ledger, event: NodeHeard, now: int) -> Decision:
    """Take in a heartbeat; a node is alive from the first one on."""
    node = ledger.nodes.get(event.name)
    if node is None:
        return Decision()
    decision = Decision([Sighting(event.name, now, event.usage)])
    if node.state is NodeState.LOST:
        node = replace(node, state=advance_node(node.state, Step.JOIN))
    if node.state in (NodeState.JOINING, NodeState.SUSPECT):
        node = replace(node, state=advance_node(node.state, Step.HEAR))
        decision.changes.append(node)
        decision.records.append(Record("node-alive", "", node.name, node.name))
    offer = _offer(ledger, node, event.usage, now)
    if offer is not None:
        decision.changes.append(offer)
    if len(decision.changes) > 1 and ledger.waiting:
        decision.follow = [QueueLooked()]
    return decision


def _offer(ledger: Ledger, node: Node, usage: Usage, now: int) -> Offer | None:
    """A fresh offer where the last one says something else or grows old."""
    lends, keeps = lending(node, usage)
    old = ledger.offers.get(node.name)
    if old is not None and (old.lends, old.keeps) == (lends, keeps) and now - old.made_at_ms < node.refresh_ms:
        return None
    generation = old.generation + 1 if old is not None else 1
    return Offer(node.name, generation, lends, now, now + node.offer_ms, keeps)


def doubts(ledger: Ledger, now: int) -> Decision:
    """Doubt the nodes nobody has heard for a while, drop offers that are too old, let empty drained nodes go."""
    decision = Decision()
    for node in ledger.nodes.values():
        seen = ledger.sightings.get(node.name)
        if node.state is NodeState.ALIVE and (seen is None or now - seen.at_ms > SUSPECT_AFTER_MS):
            decision.changes.append(_doubted(node))
            decision.records.append(Record("node-suspect", "", node.name, node.name, "not heard from"))
        elif node.forgotten and not ledger.leases_on.get(node.name):
            decision.changes.append(_left(node))
    for offer in ledger.offers.values():
        if offer.expires_at_ms <= now:
            decision.changes.append(replace(offer, withdrawn=True))
    return decision
