"""Reasons why a request does not fit, node by node with numbers. Written only when somebody reads them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Lease, NodeKind, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import WHOLE_GPU, Amounts, Capacity, cores, gigabytes, gpus, is_model
from distributed_grid.domain.states import NodeState
from distributed_grid.number_text import plain_number
from distributed_grid.scheduling.offers.pause import rest_reason
from distributed_grid.scheduling.placement import machine_limits
from distributed_grid.scheduling.placement.machine_limits import why_outlived
from distributed_grid.scheduling.placement.placement import Constraints
from distributed_grid.scheduling.queue.fairness import Quotas

MAX_NODES_LISTED = 100  # nodes whose reasons are listed: nobody reads more, and writing them costs more than deciding
MAX_WORKERS_LISTED = 10
DEDICATED_HINT = "if such a machine is yours alone, set dedicated: true on its node"
"""Said once, after the nodes that keep something for their owners."""


class Reason(Struct, frozen=True):
    """Why one node does not serve a request; that of a quota, a gang or a worker on its way has no node."""

    text: str
    node: str | None = None
    from_owner: bool = False  # its owner's use of the machine

    def __str__(self) -> str:
        return self.text if self.node is None else f"{self.node}: {self.text}"


def texts(reasons: Iterable[Reason]) -> tuple[str, ...]:
    """The reasons as lines of a refusal."""
    return tuple(map(str, reasons))


@lru_cache(maxsize=1024)
def describe_amounts(ask: Amounts) -> str:
    parts = []
    if ask.cpu_milli:
        parts.append(cores(ask.cpu_milli))
    if ask.memory_bytes:
        parts.append(gigabytes(ask.memory_bytes))
    if ask.gpu_milli:
        models = f" of {' or '.join(ask.gpu_models)}" if ask.gpu_models else ""
        parts.append(gpus(ask.gpu_milli) + models)
    if ask.gpu_memory_bytes:
        parts.append(f"{gigabytes(ask.gpu_memory_bytes)} of GPU memory")
    parts += [f"{count} {name}" for name, count in ask.custom]
    return ", ".join(parts)


def never_fits(ledger: Ledger, request: Request) -> tuple[Reason, ...] | None:
    """Each node's limit where no node could ever serve the request; None where one could. A pull worker that could may
    be registered at any time."""
    if request.runs_on is not NodeKind.AGENT:
        return None
    ask = request.ask
    refusals: list[Reason] = []
    possible = 0
    lasting = _lasting_constraints(ledger, request)
    for node in _candidates(ledger, request):
        must = lasting.unmet(node.name)
        unheard = node.caps.can_share and node.capacity == Capacity()
        must = must or machine_limits.never_has(ledger, request, node)
        if must is not None:
            refusals.append(Reason(must, node.name))
        elif unheard or NodeClaims().claim_for(ask, node.lendable) is not None:
            possible += 1
            if possible == request.gang:
                return None
        else:
            refusals.append(Reason(_limit(ledger, ask, node), node.name))
    if request.gang > 1:
        text = f"a gang of {request.gang} needs as many nodes, {possible} could serve a member"
        refusals.insert(0, Reason(text))
    known = ledger.nodes
    refusals += [Reason(f"{name}: no such node") for name in request.require if name not in known]
    return _truncated(refusals, len(refusals))


def most_memory_bytes(ledger: Ledger, request: Request) -> int:
    """The most memory that a node which could ever serve the rest of a request could lend with it."""
    rest = replace(request.ask, memory_bytes=0)
    nodes = (node for node in _candidates(ledger, request) if NodeClaims().claim_for(rest, node.lendable) is not None)
    lasting = _lasting_constraints(ledger, request)
    allowed = (node for node in nodes if lasting.unmet(node.name) is None)
    return max((machine_limits.most_bytes(ledger, node) for node in allowed), default=0)


def _lasting_constraints(ledger: Ledger, request: Request) -> Constraints:
    """The constraints that time does not change; where the jobs of an affinity run may still change."""
    lasting = replace(
        request,
        affinity=tuple(name for name in request.affinity if name in ledger.nodes),
        anti_affinity=tuple(name for name in request.anti_affinity if name in ledger.nodes),
    )
    return Constraints(ledger, lasting, lasting=True)


def timeout_reason(lease: Lease, why: str, now: int) -> str:
    """Why a waiting request is withdrawn; `why` it could not be served."""
    if lease.request.latest_start_ms and now < lease.asked_at_ms + lease.request.wait_ms:
        waited = plain_number((now - lease.asked_at_ms) / 1000)
        return f"its deadline cannot be met any more, after a wait of {waited} s: {why}"
    return f"waited {plain_number(lease.request.wait_ms / 1000)} s: {why}"


def why_not_now(ledger: Ledger, request: Request, now: int) -> tuple[Reason, ...]:
    """The reason of each node for not serving the request at this moment, or the quota that it exceeds."""
    exceeded = Quotas(ledger).exceeded(request)
    if exceeded is not None:
        return (Reason(exceeded),)
    nodes = _candidates(ledger, request)
    constraints = Constraints(ledger, request)
    listed = [_why_not_there(ledger, request, constraints, node, now) for node in nodes[:MAX_NODES_LISTED]]
    waits_for_owner = any(
        reason.from_owner and node.thresholds is not None and node.host != "local" and not node.joined
        for node, reason in zip(nodes, listed, strict=False)
    )
    coming: list[Reason] = []
    if not (request.require or request.labels or request.runs_on is NodeKind.PULL):
        ask = request.ask
        coming = [
            Reason(f"{worker.id}: a worker of {worker.provider} that could serve it; it is {worker.state}")
            for worker in ledger.workers.values()
            if worker.is_on_its_way
            and worker.resources.cpu_milli >= ask.cpu_milli
            and worker.resources.memory_bytes >= ask.memory_bytes
            and WHOLE_GPU * worker.resources.gpu_count >= ask.gpu_milli
        ]
    hint = (Reason(DEDICATED_HINT),) if waits_for_owner else ()
    return (*coming[:MAX_WORKERS_LISTED], *_truncated(listed, len(nodes)), *hint)


def why_no_room(ledger: Ledger, request: Request, now: int) -> tuple[str, ...]:
    """Lines of a refusal: why no node could ever serve a request, or else why none can now."""
    return texts(never_fits(ledger, request) or why_not_now(ledger, request, now))


def reason_key(ledger: Ledger, request: Request) -> object:
    """The fields that decide over `why_not_now`: two requests of one key have the same reasons."""
    where = (request.require, request.labels, request.affinity, request.anti_affinity, request.runs_on)
    machine = (request.limits_memory, request.block, machine_limits.stated_ms(request) if ledger.workers else 0)
    return (
        request.ask,
        request.gang,
        request.user,
        request.team,
        request.target,
        where,
        request.task,
        request.closed,
        machine,
    )


def why_not_there(ledger: Ledger, request: Request, node: Node, now: int) -> str:
    """Reason why one node cannot serve the request now."""
    return _why_not_there(ledger, request, Constraints(ledger, request), node, now).text


def _why_not_there(ledger: Ledger, request: Request, constraints: Constraints, node: Node, now: int) -> Reason:
    outlived = why_outlived(ledger, request, node.name, now) if node.state is NodeState.ALIVE else None
    if outlived is not None:
        return Reason(outlived, node.name)
    offer = ledger.offers.get(node.name)
    kept = offer is not None and offer.for_owner
    if (unmet := constraints.unmet(node.name)) is not None:
        return Reason(unmet, node.name, kept and request.starts_without_cores)
    too_small = offer is not None and NodeClaims().claim_for(request.ask, offer.lends) is None
    return Reason(_shortage(ledger, request, node, now), node.name, kept and too_small)


def _truncated(lines: list[Reason], nodes: int) -> tuple[Reason, ...]:
    """The reasons of this number of nodes, cut to a readable number."""
    return (
        tuple(lines)
        if nodes <= MAX_NODES_LISTED
        else (*lines[:MAX_NODES_LISTED], Reason(f"and {nodes - MAX_NODES_LISTED:,} more nodes"))
    )


def _candidates(ledger: Ledger, request: Request) -> list[Node]:
    if request.require:
        return [ledger.nodes[name] for name in request.require if name in ledger.nodes]
    return list(ledger.nodes.values())


def _limit(ledger: Ledger, ask: Amounts, node: Node) -> str:
    if not node.caps.can_share:
        return "does not share"
    if node.capacity == Capacity():
        return stopped_reason(ledger, node) or "not heard from yet"
    most = node.lendable
    return _short_of(ask, most, NodeClaims(), "at most") or "does not fit"


def _shortage(ledger: Ledger, request: Request, node: Node, now: int) -> str:
    ask = request.ask
    if NodeClaims().claim_for(ask, node.lendable) is None:
        return _limit(ledger, ask, node)
    if node.state is not NodeState.ALIVE:
        return _absence(ledger, node, now)
    offer = ledger.offers.get(node.name)
    if offer is None:
        return _missing_offer(ledger, node, now)
    if offer.withheld and NodeClaims().claim_for(ask, offer.lends) is None:
        return "; ".join(offer.withheld)
    claims = ledger.claims_on(node.name)
    if claims.claim_for(ask, offer.lends) is not None and request.gang > 1:
        return f"has room, but a gang of {request.gang} needs as many nodes at once"
    lacking = machine_limits.crowded_nodes(ledger, request) and machine_limits.shortage(ledger, node, ask.memory_bytes)
    if claims.claim_for(ask, offer.lends) is not None and lacking:
        return lacking
    if claims.claim_for(ask, offer.lends) is not None:
        return "kept for a request that comes before it"
    return _short_of(ask, offer.lends, claims, "free") or "does not fit"


def why_not_lent(ledger: Ledger, node: Node, now: int) -> tuple[str, ...]:
    """Why a node lends nothing now, or not all that it could."""
    if not node.caps.can_share:
        return ("does not share",)
    if node.state is not NodeState.ALIVE:
        return (_absence(ledger, node, now),)
    offer = ledger.offers.get(node.name)
    if offer is None:
        return (_missing_offer(ledger, node, now),)
    if offer.withheld:
        return offer.withheld
    claims = ledger.claims_on(node.name)
    full = offer.lends.cpu_milli <= claims.cpu_milli and offer.lends.memory_bytes <= claims.memory_bytes
    full = full and not any(claims.free_milli(device) for device in offer.lends.gpus)
    return ("everything it lends is lent",) if full else ()


def _missing_offer(ledger: Ledger, node: Node, now: int) -> str:
    return rest_reason(ledger.observations.get(node.name), now) or "no fresh measurement"


def is_stopped(ledger: Ledger, node: Node) -> bool:
    """True if a node does nothing until `grid cluster start`."""
    return node.is_stopped(lends=bool(ledger.leases_on.get(node.name)))


def stopped_reason(ledger: Ledger, node: Node) -> str:
    """The command that starts a stopped node; empty for any other."""
    return f"stopped; type: grid cluster start {node.name}" if is_stopped(ledger, node) else ""


def _absence(ledger: Ledger, node: Node, now: int) -> str:
    worker = ledger.workers.get(node.name)
    if worker is not None and worker.notice is not None:
        ends_in = -(-max(worker.leaving_at_ms - now, 0) // 1000)
        when = f"its machine ends in {ends_in} s" if worker.leaving_at_ms else "its machine may be taken away"
        return f"{when}: {worker.notice.why}"
    if stopped := stopped_reason(ledger, node):
        return stopped
    if node.state is NodeState.DRAINING:
        return "cooling down" if node.cooling else "draining"
    seen = ledger.observations.get(node.name)
    if seen is not None and seen.is_rejected:
        return f"its agent is turned away: {seen.rejected}"
    if seen is None or not seen.at_ms:
        return "not heard from yet"
    return f"not heard from for {(now - seen.at_ms) // 1000} s"


def _short_of(ask: Amounts, lends: Capacity, claims: NodeClaims, word: str) -> str:
    """Every resource that falls short, as "3.2 GB free, 4.0 GB asked"."""
    short = []
    if ask.cpu_milli > (left := lends.cpu_milli - claims.cpu_milli):
        short.append(f"{cores(max(left, 0))} {word}, {cores(ask.cpu_milli)} asked")
    if ask.memory_bytes > (left := lends.memory_bytes - claims.memory_bytes):
        short.append(f"{gigabytes(max(left, 0))} {word}, {gigabytes(ask.memory_bytes)} asked")
    if ask.gpu_milli >= WHOLE_GPU:
        if ask.gpu_milli // WHOLE_GPU > (left := claims.whole_free(lends)):
            short.append(f"{gpus(left * WHOLE_GPU)} {word}, {gpus(ask.gpu_milli)} asked")
    elif ask.gpu_milli > (left := claims.part_free(lends)):
        short.append(f"{gpus(max(left, 0))} {word}, {gpus(ask.gpu_milli)} asked")
    if ask.gpu_models and not short and not any(is_model(device.name, ask.gpu_models) for device in lends.gpus):
        names = ", ".join(sorted({device.name or "unnamed" for device in lends.gpus}))
        short.append(f"its GPUs are {names}, {' or '.join(ask.gpu_models)} asked")
    if ask.gpu_memory_bytes and not short:
        most = max((claims.free_memory(device) for device in lends.gpus), default=0)
        if most < ask.gpu_memory_bytes:
            short.append(f"{gigabytes(most)} GPU memory {word}, {gigabytes(ask.gpu_memory_bytes)} asked")
    has = dict(lends.custom)
    for name, count in ask.custom:
        if count > (left := has.get(name, 0) - claims.custom.get(name, 0)):
            short.append(f"{left} {name} {word}, {count} asked")
    return "; ".join(short)
