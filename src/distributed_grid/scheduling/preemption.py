"""Whom an urgent request displaces: the fewest and cheapest victims on one node.

Rule 1: only lower priorities yield, and `low` before `medium` before `high`.
Rule 2: a lease younger than the minimum run time is left alone.
Rule 3: who already yields is not asked twice, but is waited for.
Rule 4: nobody goes who could stay, and one goes instead of several that are no less important.
Rule 5: never on a node that is not alive and heard.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from distributed_grid.domain.books import Book
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.lives import LeaseState, NodeState
from distributed_grid.domain.resources import Claim, Priority

MINIMUM_RUN_MS = 1_000


class Displacement(Struct, frozen=True):
    """A place that is made free: the claim there, who must go, and all who must be gone first."""

    node: str
    claim: Claim
    victims: tuple[str, ...]
    awaits: tuple[str, ...]


def displace(ledger: Ledger, request: Request, now: int) -> Displacement | None:
    """The cheapest way to make room for an urgent request, or None where there is none."""
    if request.priority < Priority.URGENT:
        return None
    found = []
    names = request.require or tuple(ledger.nodes)
    for name in names:
        node = ledger.nodes.get(name)
        if node is None or node.state is not NodeState.ALIVE:
            continue
        way = _on(ledger, name, request, now)
        if way is not None:
            preferred = name in request.prefer
            lost = sum(now - ledger.leases[victim].granted_at_ms for victim in way.victims)
            found.append((not preferred, len(way.victims), lost, name, way))
    return min(found, key=lambda entry: entry[:4])[4] if found else None


def _on(ledger: Ledger, node: str, request: Request, now: int) -> Displacement | None:
    lends = ledger.lends(node)
    leases = list(ledger.leases_of(node))
    staying = [lease for lease in leases if not lease.yields_to]
    book = Book(lease.claim for lease in staying if lease.claim is not None)
    candidates = sorted((lease for lease in staying if _may_yield(lease, request, now)), key=_cheapest_first)
    victims = _victims(book, candidates, lambda: book.claim_for(request.ask, lends) is not None)
    claim = book.claim_for(request.ask, lends)
    if claim is None:
        return None
    yielding = tuple(lease.id for lease in leases if lease.yields_to)
    gone = tuple(victim.id for victim in victims)
    return Displacement(node, claim, gone, gone + yielding) if gone or yielding else None


def _victims(book: Book, candidates: list[Lease], fits: Callable[[], bool]) -> list[Lease]:
    """Who must go, cheapest first, with nobody among them who could stay; their claims leave the book."""
    victims: list[Lease] = []
    for candidate in candidates:
        if fits():
            break
        _without(book, candidate)
        victims.append(candidate)
    if len(victims) < 2 or not fits():
        return victims
    for spared in reversed(victims[:]):
        _with(book, spared)
        if fits():
            victims.remove(spared)
        else:
            _without(book, spared)
    return _one_for_all(book, candidates, victims, fits) if len(victims) > 1 else victims


def _one_for_all(book: Book, candidates: list[Lease], victims: list[Lease], fits: Callable[[], bool]) -> list[Lease]:
    """The one lease whose going is enough, where there is one no more important than these, else these."""
    worst = max(victim.request.priority for victim in victims)
    for victim in victims:
        _with(book, victim)
    for candidate in candidates:
        if candidate.request.priority > worst:
            break
        _without(book, candidate)
        if fits():
            return [candidate]
        _with(book, candidate)
    for victim in victims:
        _without(book, victim)
    return victims


def _without(book: Book, lease: Lease) -> None:
    if lease.claim is not None:
        book.give_back(lease.claim)


def _with(book: Book, lease: Lease) -> None:
    if lease.claim is not None:
        book.take(lease.claim)


def _may_yield(lease: Lease, request: Request, now: int) -> bool:
    old_enough = now - lease.granted_at_ms >= MINIMUM_RUN_MS
    return lease.state is LeaseState.ACTIVE and lease.request.priority < request.priority and old_enough


def _cheapest_first(lease: Lease) -> tuple[int, int, str]:
    return (int(lease.request.priority), -lease.granted_at_ms, lease.id)
