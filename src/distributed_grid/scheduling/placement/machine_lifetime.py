"""Lifetime of machines: a request that states how long it takes is not placed where the machine ends before that."""

from __future__ import annotations

from collections.abc import Sequence

from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger

NodeEnds = Sequence[tuple[int, str]]
"""When the machines of nodes end, the first one first."""


def node_ends(ledger: Ledger) -> NodeEnds:
    """The nodes whose machines their providers end by themselves, and when."""
    return sorted((worker.ends_at_ms, worker.node) for worker in ledger.workers.values() if worker.ends_at_ms)


def stated_ms(request: Request) -> int:
    """How long a request takes, by its term or by what was said of it; 0 where nobody knows."""
    return request.duration_ms or request.expects_ms


def outlived_nodes(request: Request, ends: NodeEnds, now: int) -> frozenset[str]:
    """The nodes whose machines would end before a request that is placed there now."""
    length = stated_ms(request)
    if not length or not ends:
        return frozenset()
    return frozenset(node for ends_at, node in ends if ends_at < now + length)


def why_outlived(ledger: Ledger, request: Request, node: str, now: int) -> str | None:
    """Why a request is not placed on a node whose machine ends too soon; None where that is no reason."""
    worker = ledger.workers.get(node)
    if worker is None or not outlived_nodes(request, [(worker.ends_at_ms, node)] if worker.ends_at_ms else (), now):
        return None
    left = max(worker.ends_at_ms - now, 0) // 1000
    return f"its machine ends in {left} s, and this takes {stated_ms(request) / 1000:g} s"


def longest_lifetime_ms(ledger: Ledger) -> int:
    """How long the machines that scaling may start live at most; 0 where one lives for ever, or none is known."""
    lifetimes = [worker.lifetime_ms for worker in ledger.scaling.types]
    return max(lifetimes) if lifetimes and all(lifetimes) else 0


def outlives_all(ledger: Ledger, request: Request) -> bool:
    """Whether a request takes longer than any machine lives that scaling may start."""
    return 0 < longest_lifetime_ms(ledger) < stated_ms(request)
