"""What balancing does next: one move at a time, so that each sees what the last one did.

Rule 1: what is held for a node is given back when the node is below its low mark, when the lender is above its own high
mark, when a user waits for it, or when the rules do not allow it any more.
Rule 2: a lease has a term and is renewed while its node is known. So what nobody looks after ends by itself.
Rule 3: a node gets more (`borrowing`) before it is recommended to move work away from it (`advising`).
"""

from __future__ import annotations

from msgspec import Struct

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.rebalancing import SPREAD, WATCHED, Advice, resource_of
from distributed_grid.scheduling.placement.filters import forbidden_by
from distributed_grid.scheduling.rebalancing.advice import advice_for
from distributed_grid.scheduling.rebalancing.borrow_plan import Borrow, Deny, loan, may_borrow
from distributed_grid.scheduling.rebalancing.pressure import PressureScan, percent
from distributed_grid.scheduling.rebalancing.surplus import asked
from distributed_grid.scheduling.rebalancing.tracking import WAITING

LINE_PART = 100
"""So many of those who wait are looked at for whether they could have what the grid holds."""


class GiveBack(Struct, frozen=True):
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


Move = GiveBack | Renew | Borrow | Deny | Advise


def next_move(look: PressureScan, node: str) -> Move | None:
    """The next thing to do for a node of the agenda, or None where all is as it should be."""
    if node == WAITING:
        return _wanted_by_users(look) if look.leases and look.ledger.waiting else None
    mine = [lease for lease in look.leases if lease.request.target == node]
    return _give_back(look, mine) or _renewal(look, mine) or _loan(look, node) or _recommendation(look, node)


def _wanted_by_users(look: PressureScan) -> GiveBack | None:
    """A lease without which, or without some more of its kind, somebody who waits could be served."""
    ledger = look.ledger
    nodes = dict.fromkeys(lease.node for lease in look.leases)
    for _, _, lease_id in ledger.waiting[:LINE_PART]:
        request = ledger.leases[lease_id].request
        for node in nodes:
            held = _in_the_way(look, request, node)
            if held:
                return GiveBack(held[0], f"{request.user} waits for it: request {request.id}")
    return None


def _in_the_way(look: PressureScan, request: Request, node: str) -> list[Lease]:
    """The leases of the grid on a node that alone keep a request from fitting there."""
    ledger, ask = look.ledger, request.ask
    mine = {
        lease.id: lease for lease in look.leases if lease.node == node and asked(ask, resource_of(lease.request.ask))
    }
    lends = ledger.lends(node)
    if not mine or ledger.book(node).claim_for(ask, lends) is not None:
        return []
    if forbidden_by(ledger, request, node) is not None:
        return []
    staying = NodeClaims(
        lease.claim for lease in ledger.leases_of(node) if lease.id not in mine and lease.claim is not None
    )
    return list(mine.values()) if staying.claim_for(ask, lends) is not None else []


def _give_back(look: PressureScan, mine: list[Lease]) -> GiveBack | None:
    """One that is too many, or not needed, or not allowed any more."""
    most = look.rules.policy.leases_max
    if len(mine) > most:
        return GiveBack(mine[-1], f"{most} leases for one node are enough")
    for lease in mine:
        reason = _no_longer(look, lease)
        if reason:
            return GiveBack(lease, reason)
    return None


def _no_longer(look: PressureScan, lease: Lease) -> str:
    """Why a lease is not needed or not allowed any more; empty where it is."""
    target, resource = lease.request.target, resource_of(lease.request.ask)
    if not look.rules.shares:
        return f"the mode is {look.rules.mode}"
    marks = look.rules.marks(resource)
    level = look.reading(lease.node).level(resource)
    if level is not None and look.lasted(look.balance(lease.node).watch(resource).above_since_ms):
        return f"{lease.node} needs it itself: {resource} at {percent(level)}, mark {percent(marks.high)}"
    watch, level = look.balance(target).watch(resource), look.reading(target).level(resource)
    if level is None or not look.lasted(watch.below_since_ms):
        return ""
    if not (look.rested(watch.acted_at_ms) or watch.acted_at_ms == look.now):
        return ""
    return f"{resource} of {target} at {percent(level)}, below the mark of {percent(marks.low)}"


def _renewal(look: PressureScan, mine: list[Lease]) -> Renew | None:
    policy, interval_ms = look.rules.policy, look.rules.interval_ms
    for lease in mine:
        target, resource = lease.request.target, resource_of(lease.request.ask)
        left_ms = lease.ends_at_ms - look.now
        if left_ms > policy.renew_at * interval_ms or look.reading(target).level(resource) is None:
            continue
        if not look.is_below(target, resource):
            return Renew(lease, policy.term * interval_ms - left_ms)
    return None


def _loan(look: PressureScan, node: str) -> Borrow | Deny | None:
    if not look.rules.shares or node not in look.ledger.nodes:
        return None
    for resource in WATCHED:
        if may_borrow(look, node, resource):
            move = loan(look, node, resource)
            if move is not None:
                return move
    return None


def _recommendation(look: PressureScan, node: str) -> Advise | None:
    """One recommendation at a time, for the first thing that a node has too little of."""
    balance = look.balance(node)
    if balance.advice is not None or not look.rested(balance.advised_at_ms) or node not in look.ledger.nodes:
        return None
    for cause in (*WATCHED, SPREAD):
        if look.lasted(balance.watch(cause).above_since_ms):
            advice = advice_for(look, node, cause)
            if advice is not None:
                return Advise(node, advice)
    return None
