"""What to ask for when a node is under pressure, and from whom.

Rule 1: the excess of a node is what it uses above the middle of its marks. A part of it is asked for at a time.
Rule 2: never more leases than the policy's number, never twice within a cool-down, never what users wait for.
Rule 3: what nobody can help with is told once, until the node has been below its low mark.
"""

from __future__ import annotations

import re

from msgspec import Struct

from distributed_grid.domain.leases import Request
from distributed_grid.domain.rebalancing import AUTOMATIC, GRID_USER
from distributed_grid.domain.resources import Amounts, ResourceType
from distributed_grid.scheduling.rebalancing.pressure import PressureScan, percent
from distributed_grid.scheduling.rebalancing.surplus import (
    UNITS,
    ask_for,
    in_words,
    spares,
    total_of,
    whole_units,
    why_nothing,
)

WORTH_MILLI = 20
"""Less than this part of what a node has is not worth a lease."""
COUNTER = "automatic"
"""Numbers the requests of the grid, so that none is ever mistaken for another."""
LENDERS = 32
"""So many nodes to choose from are enough."""
REASONS = 5


class Borrow(Struct, frozen=True):
    """A request for a node under pressure, which some of the required nodes can serve."""

    request: Request
    resource: ResourceType
    reason: str


class Deny(Struct, frozen=True):
    """A node is under pressure and nobody can help."""

    node: str
    resource: ResourceType
    reason: str


def may_borrow(look: PressureScan, node: str, resource: ResourceType) -> bool:
    """Whether it is time to ask for more of a resource for a node."""
    watch = look.balance(node).watch(resource)
    if not look.lasted(watch.above_since_ms) or not look.rested(watch.acted_at_ms):
        return False
    if resource in look.agenda.waited_for or not look.speaks(node) or next(look.others(node), None) is None:
        return False
    held = sum(1 for lease in look.leases if lease.request.target == node)
    return held < look.rules.policy.leases_max


def loan(look: PressureScan, node: str, resource: ResourceType) -> Borrow | Deny | None:
    """What to ask for; None where the node has enough, or where it was told already that nobody can help."""
    total = total_of(look.ledger.nodes[node].capacity, resource)
    worth = max(total * WORTH_MILLI // 1000, UNITS[resource])
    excess = total * (_expected_level(look, node, resource) - look.rules.marks(resource).middle) // 1000
    held = look.held[node, resource]
    if held and excess - held < worth:
        return None
    part = min(excess * look.rules.policy.portion_milli // 1000, excess - held)
    size, lenders = _lenders(look, node, resource, whole_units(resource, max(part, worth)), worth)
    why = why_pressed(look, node, resource)
    if lenders:
        request = _request(look, node, resource, ask_for(resource, size), lenders)
        return Borrow(request, resource, f"{why}: {in_words(resource, size)} of {in_words(resource, excess)} in excess")
    if look.balance(node).watch(resource).refused:
        return None
    others = list(look.others(node))
    told = [why_nothing(look, name, resource) for name in others[:REASONS]]
    told += [f"and {len(others) - REASONS} more"] if len(others) > REASONS else []
    return Deny(node, resource, f"{why}, and nobody can help: {'; '.join(told)}")


def _expected_level(look: PressureScan, node: str, resource: ResourceType) -> int:
    reading = look.reading(node)
    level, forecast = reading.level(resource) or 0, reading.ahead(resource)
    return max(level, forecast.level) if forecast is not None and look.will_be_above(node, resource) else level


def _lenders(
    look: PressureScan, node: str, resource: ResourceType, wanted: int, worth: int
) -> tuple[int, tuple[str, ...]]:
    """How much can be had at once, and from which nodes: all that is wanted, or else the most that one can spare."""
    ledger = look.ledger

    def fits(name: str, size: int) -> bool:
        return ledger.book(name).claim_for(ask_for(resource, size), ledger.lends(name)) is not None

    less: list[tuple[int, str]] = []
    able: list[str] = []
    for size, name in spares(look, node, resource, min(worth, wanted)):
        if size < wanted:
            less.append((-size, name))
        elif fits(name, wanted):
            able.append(name)
            if len(able) == LENDERS:
                break
    if able:
        return wanted, tuple(able)
    for negative, name in sorted(less):
        size = whole_units(resource, -negative)
        if size and fits(name, size):
            return size, (name,)
    return 0, ()


def _request(look: PressureScan, node: str, resource: ResourceType, ask: Amounts, lenders: tuple[str, ...]) -> Request:
    policy = look.rules.policy
    return Request(
        request_id(node, resource, look.ledger.counters.get(COUNTER, 0) + 1),
        GRID_USER,
        ask,
        policy.priority,
        require=lenders,
        wait_ms=0,
        duration_ms=policy.term * look.rules.interval_ms,
        target=node,
        anti_affinity=(node,),
    )


def request_id(node: str, resource: ResourceType, number: int) -> str:
    """An id that says what it is for; names with dots or longer than an id may be are cut to fit."""
    tail = f"-{resource}-{number}"
    return AUTOMATIC + re.sub(r"[^A-Za-z0-9_-]", "-", node)[: 64 - len(AUTOMATIC) - len(tail)] + tail


def why_pressed(look: PressureScan, node: str, resource: ResourceType) -> str:
    """The pressure that calls for something, with its numbers."""
    reading, high = look.reading(node), look.rules.marks(resource).high
    level, forecast = reading.level(resource) or 0, reading.ahead(resource)
    if level > high or forecast is None:
        return f"{resource} at {percent(level)}, above the mark of {percent(high)}"
    seconds = look.rules.policy.ahead * look.rules.interval_ms // 1000
    expected = f"{percent(forecast.level)} (± {percent(forecast.reach)}) in {seconds} s"
    return f"{resource} at {percent(level)}, expected at {expected}, above the mark of {percent(high)}"
