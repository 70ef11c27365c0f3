"""Why a request does not fit, node by node, with numbers. Written only when somebody has to be told."""

from __future__ import annotations

from distributed_grid.domain.books import Book
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.lives import NodeState
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import WHOLE_GPU, Amounts, Capacity
from distributed_grid.domain.units import cores, gigabytes, gpus


def amounts(ask: Amounts) -> str:
    """An ask in words."""
    parts = []
    if ask.cpu_milli:
        parts.append(cores(ask.cpu_milli))
    if ask.memory_bytes:
        parts.append(gigabytes(ask.memory_bytes))
    if ask.gpu_milli:
        parts.append(gpus(ask.gpu_milli))
    if ask.gpu_memory_bytes:
        parts.append(f"{gigabytes(ask.gpu_memory_bytes)} of GPU memory")
    parts += [f"{count} {name}" for name, count in ask.custom]
    return ", ".join(parts)


def never_fits(ledger: Ledger, request: Request) -> tuple[str, ...] | None:
    """Each node's limit where no node could ever serve the request; None where one could."""
    ask = request.ask
    candidates = _candidates(ledger, request)
    refusals = []
    for node in candidates:
        unheard = node.caps.can_share and node.capacity == Capacity()
        if unheard or Book().claim_for(ask, node.lendable) is not None:
            return None
        refusals.append(f"{node.name}: {_limit(ask, node)}")
    known = ledger.nodes
    refusals += [f"{name}: no such node" for name in request.require if name not in known]
    return tuple(refusals)


def why_not_now(ledger: Ledger, request: Request, now: int) -> tuple[str, ...]:
    """What keeps each node from serving the request at this moment."""
    return tuple(f"{node.name}: {_shortage(ledger, request.ask, node, now)}" for node in _candidates(ledger, request))


def _candidates(ledger: Ledger, request: Request) -> list[Node]:
    if request.require:
        return [ledger.nodes[name] for name in request.require if name in ledger.nodes]
    return list(ledger.nodes.values())


def _limit(ask: Amounts, node: Node) -> str:
    if not node.caps.can_share:
        return "does not share"
    if node.capacity == Capacity():
        return "not heard from yet"
    most = node.lendable
    return _short_of(ask, most, Book(), "at most") or "does not fit"


def _shortage(ledger: Ledger, ask: Amounts, node: Node, now: int) -> str:
    if Book().claim_for(ask, node.lendable) is None:
        return _limit(ask, node)
    if node.state is not NodeState.ALIVE:
        return _absence(ledger, node, now)
    offer = ledger.offers.get(node.name)
    if offer is None:
        return "no fresh measurement"
    if offer.keeps and Book().claim_for(ask, offer.lends) is None:
        return "; ".join(offer.keeps)
    book = ledger.book(node.name)
    if book.claim_for(ask, offer.lends) is not None:
        return "kept for a request that has waited longer"
    return _short_of(ask, offer.lends, book, "free") or "does not fit"


def _absence(ledger: Ledger, node: Node, now: int) -> str:
    if node.state is NodeState.DRAINING:
        return "draining"
    seen = ledger.sightings.get(node.name)
    if seen is None or not seen.at_ms:
        return "not heard from yet"
    return f"not heard from for {(now - seen.at_ms) // 1000} s"


def _short_of(ask: Amounts, lends: Capacity, book: Book, word: str) -> str:
    """Every resource that falls short, as "3.2 GB free, 4.0 GB asked"."""
    short = []
    if ask.cpu_milli > (left := lends.cpu_milli - book.cpu_milli):
        short.append(f"{cores(max(left, 0))} {word}, {cores(ask.cpu_milli)} asked")
    if ask.memory_bytes > (left := lends.memory_bytes - book.memory_bytes):
        short.append(f"{gigabytes(max(left, 0))} {word}, {gigabytes(ask.memory_bytes)} asked")
    if ask.gpu_milli >= WHOLE_GPU:
        if ask.gpu_milli // WHOLE_GPU > (left := book.whole_free(lends)):
            short.append(f"{gpus(left * WHOLE_GPU)} {word}, {gpus(ask.gpu_milli)} asked")
    elif ask.gpu_milli > (left := book.part_free(lends)):
        short.append(f"{gpus(max(left, 0))} {word}, {gpus(ask.gpu_milli)} asked")
    if ask.gpu_memory_bytes and not short:
        most = max((book.free_memory(device) for device in lends.gpus), default=0)
        if most < ask.gpu_memory_bytes:
            short.append(f"{gigabytes(most)} GPU memory {word}, {gigabytes(ask.gpu_memory_bytes)} asked")
    has = dict(lends.custom)
    for name, count in ask.custom:
        if count > (left := has.get(name, 0) - book.custom.get(name, 0)):
            short.append(f"{left} {name} {word}, {count} asked")
    return "; ".join(short)
