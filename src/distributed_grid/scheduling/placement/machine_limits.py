"""Limits of machines that the offers of their nodes do not show: how long one lives, and the memory that several share.

A request that states how long it takes is not placed where the machine ends before that.

What is declared for simulated nodes may be more than their machine has, and a lease that only reserves may have it.
What is really used may not: the memory limits of jobs and the blocks of all simulated nodes together fit into what the
machine has for the grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import gigabytes
from distributed_grid.number_text import plain_number
from distributed_grid.scheduling.offers.offer import machine_memory

NodeEnds = Sequence[tuple[int, str]]  # when the machines of nodes end, the first one first


def node_ends(ledger: Ledger) -> NodeEnds:
    """End times of the machines that their providers end, the earliest first."""
    return sorted((worker.ends_at_ms, worker.node) for worker in ledger.workers.values() if worker.ends_at_ms)


def stated_ms(request: Request) -> int:
    """Length of a request by its term or its statement; 0 if unknown."""
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
    return f"its machine ends in {left} s, and this takes {plain_number(stated_ms(request) / 1000)} s"


def longest_lifetime_ms(ledger: Ledger) -> int:
    """Longest lifetime of the machines that scaling may start; 0 if unlimited or unknown."""
    lifetimes = [worker.lifetime_ms for worker in ledger.scaling.types]
    return max(lifetimes) if lifetimes and all(lifetimes) else 0


def outlives_all(ledger: Ledger, request: Request) -> bool:
    return 0 < longest_lifetime_ms(ledger) < stated_ms(request)


def crowded_nodes(ledger: Ledger, request: Request) -> frozenset[str]:
    """The simulated nodes, where their machine has no memory left for this request; else none."""
    if not _uses_memory(request) or not ledger.columns.simulated.any():
        return frozenset()
    nodes = simulated_nodes(ledger)
    return frozenset(node.name for node in nodes) if _is_short(ledger, nodes, request.ask.memory_bytes) else frozenset()


def never_has(ledger: Ledger, request: Request, node: Node) -> str | None:
    """Why a simulated node could not serve a request if nothing else were used of its machine; else None."""
    room = _room(ledger, [node]) if node.simulated and _uses_memory(request) else None
    if room is None or request.ask.memory_bytes <= room:
        return None
    return f"simulated on a machine with {gigabytes(room)} for jobs and blocks, {_asked(request.ask.memory_bytes)}"


def most_bytes(ledger: Ledger, node: Node) -> int:
    """Most memory that a job could ever have on a node."""
    room = _room(ledger, [node]) if node.simulated else None
    lends = node.lendable.memory_bytes
    return lends if room is None else min(lends, room)


def free_bytes(ledger: Ledger, node: Node) -> int:
    """The memory that a node can still lend to a job now, by its offer."""
    offer = ledger.offers.get(node.name)
    if offer is None or offer.withdrawn:
        return 0
    lends = min(offer.lends.memory_bytes, node.lendable.memory_bytes)
    free = lends - ledger.claims_on(node.name).memory_bytes
    if node.simulated:
        nodes = simulated_nodes(ledger)
        room = _room(ledger, nodes)
        free = free if room is None else min(free, room - _used_bytes(ledger, nodes))
    return max(free, 0)


def shortage(ledger: Ledger, node: Node, memory_bytes: int) -> str | None:
    """Reason why the machine of a simulated node lacks this memory for a job or block; None if it does not."""
    nodes = simulated_nodes(ledger) if node.simulated and memory_bytes else []
    if not nodes or not _is_short(ledger, nodes, memory_bytes):
        return None
    room, used = _room(ledger, nodes) or 0, _used_bytes(ledger, nodes)
    free = gigabytes(max(room - used, 0))
    return (
        f"simulated on a machine with {gigabytes(room)} for jobs and blocks of all its nodes, {free} of it free, "
        f"{_asked(memory_bytes)}"
    )


class MachineShortage(NamedTuple):
    """Memory missing on a machine after the leaving leases are gone; not positive if there is enough."""

    missing_bytes: int
    leaving: tuple[str, ...]


def shortage_after_leaving(ledger: Ledger, request: Request) -> MachineShortage | None:
    """Memory missing for this request on the machine of the simulated nodes; None if nothing is missing now."""
    if not crowded_nodes(ledger, request):
        return None
    nodes = simulated_nodes(ledger)
    leaving = [lease_id for node in nodes for lease_id in ledger.running.leaving.get(node.name, ())]
    leaving = [lease_id for lease_id in leaving if used_bytes(ledger, ledger.leases[lease_id])]
    given = sum(used_bytes(ledger, ledger.leases[lease_id]) for lease_id in leaving)
    used = _used_bytes(ledger, nodes) + request.ask.memory_bytes - given
    return MachineShortage(used - (_room(ledger, nodes) or 0), tuple(leaving))


def used_bytes(ledger: Ledger, lease: Lease) -> int:
    """Memory of a lease that a job or a block uses; a job may run within another lease."""
    is_used = lease.job or lease.request.block or ledger.dependents.get(lease.id)
    return lease.claim.memory_bytes if lease.claim is not None and is_used else 0


def simulated_nodes(ledger: Ledger) -> list[Node]:
    names, rows = ledger.columns.names, ledger.columns.simulated.nonzero()[0].tolist()
    return [ledger.nodes[names[row]] for row in rows]


def _asked(memory_bytes: int) -> str:
    return f"{gigabytes(memory_bytes)} asked"


def _uses_memory(request: Request) -> bool:
    """True if the request uses its memory: the limit of a job, or a block."""
    return bool(request.ask.memory_bytes) and (request.limits_memory or bool(request.block))


def _is_short(ledger: Ledger, nodes: list[Node], memory_bytes: int) -> bool:
    room = _room(ledger, nodes)
    return room is not None and _used_bytes(ledger, nodes) + memory_bytes > room


def _room(ledger: Ledger, nodes: list[Node]) -> int | None:
    """Memory of the machine for all of its nodes, as last measured."""
    seen = [ledger.observations[node.name] for node in nodes if node.name in ledger.observations]
    last = max((one for one in seen if one.usage is not None), key=lambda one: one.at_ms, default=None)
    return machine_memory(last.usage) if last is not None and last.usage is not None else None


def _used_bytes(ledger: Ledger, nodes: list[Node]) -> int:
    """Sum of the limits of the jobs and the blocks on these nodes."""
    leases = (lease for node in nodes for lease in ledger.leases_of(node.name))
    return sum(used_bytes(ledger, lease) for lease in leases)
