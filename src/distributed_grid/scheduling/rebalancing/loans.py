"""Loans for nodes under pressure: how much to borrow, and what other nodes can spare.

A node's excess is what it uses above the middle of its watermarks; a part of it is borrowed at a time, within the
policy's number of leases and cool-down, and never what users wait for. A lender spares only what is free by measurement
and by its leases, above the excess threshold, and never so much that it would rise above its own high watermark. Nodes
above a watermark, and nodes that borrow the resource themselves, spare nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import AUTOMATIC_PREFIX, GRID_USER, claimed_amount, resource_of
from distributed_grid.domain.resources import WHOLE_GPU, Amounts, Capacity, ResourceType, cores, gigabytes, gpus
from distributed_grid.scheduling.queue.reasons import stopped_reason
from distributed_grid.scheduling.rebalancing.pressure import PressureScan, machine_of, percent

UNITS = {ResourceType.MEMORY: 1024**2, ResourceType.CPU: 100, ResourceType.GPU: 100}
"""Smallest unit of a loan: a MiB, a tenth of a core or of a GPU."""


def total_of(capacity: Capacity, resource: ResourceType) -> int:
    """All there is of a resource: bytes, millicores or milli-GPUs."""
    if resource is ResourceType.MEMORY:
        return capacity.memory_bytes
    return capacity.cpu_milli if resource is ResourceType.CPU else WHOLE_GPU * len(capacity.gpus)


def surplus(scan: PressureScan, node: str, resource: ResourceType) -> int:
    """How much of a resource a node can spare now."""
    ledger, rules = scan.ledger, scan.rules
    offer = ledger.offers.get(node)
    level = scan.reading(node).level(resource)
    if level is None and resource is ResourceType.GPU:
        level = 0  # a device that nobody measures counts as idle, as it does for lending
    if offer is None or level is None or scan.held[node, resource]:
        return 0
    total = total_of(ledger.nodes[node].capacity, resource)
    lent = _lent(ledger, node, resource)
    free = min(total - lent - _outside(ledger, node, resource, total), total * (1000 - level) // 1000)
    kept = -(-total * max(rules.excess_milli, 1000 - rules.watermarks(resource).high) // 1000)
    return max(min(free - kept, total_of(offer.lends, resource) - lent), 0)


def surpluses(scan: PressureScan, node: str, resource: ResourceType, least: int) -> Iterator[tuple[int, str]]:
    """What each lender can spare, where that is enough, least loaded first.

    A complete pass is remembered in the scan, so that nobody else tries as much in vain.
    """
    if scan.max_surplus.get(resource, least) < least:
        return
    most = 0
    for name in scan.lenders(node):
        size = surplus(scan, name, resource)
        most = max(most, size)
        if size >= least:
            yield size, name
    if machine_of(scan.ledger.nodes[node]) == node:
        scan.max_surplus[resource] = most


def _lent(ledger: Ledger, node: str, resource: ResourceType) -> int:
    claims = ledger.claims_on(node)
    if resource is ResourceType.MEMORY:
        return claims.memory_bytes
    return claims.cpu_milli if resource is ResourceType.CPU else sum(claims.gpu_milli.values())


def _outside(ledger: Ledger, node: str, resource: ResourceType, total: int) -> int:
    """What others than the grid use; what was lent comes on top of it, used already or not."""
    seen = ledger.observations.get(node)
    usage = seen.usage if seen is not None else None
    if usage is None:
        return 0
    if resource is ResourceType.MEMORY:
        return usage.memory_outside_bytes
    if resource is ResourceType.CPU:
        return usage.cpu_outside_milli * total // 1000
    return sum(gpu.busy_milli for gpu in usage.gpus)


def whole_units(resource: ResourceType, size: int) -> int:
    """The largest amount up to this that can be asked for: in units, and GPUs from one on only whole."""
    unit = WHOLE_GPU if resource is ResourceType.GPU and size >= WHOLE_GPU else UNITS[resource]
    return size // unit * unit


def amounts_of(resource: ResourceType, size: int) -> Amounts:
    """An ask for one resource alone."""
    if resource is ResourceType.MEMORY:
        return Amounts(memory_bytes=size)
    return Amounts(cpu_milli=size) if resource is ResourceType.CPU else Amounts(gpu_milli=size)


def asked_amount(ask: Amounts, resource: ResourceType) -> int:
    """How much of a resource is asked for."""
    if resource is ResourceType.MEMORY:
        return ask.memory_bytes
    return ask.cpu_milli if resource is ResourceType.CPU else ask.gpu_milli


def describe(resource: ResourceType, size: int) -> str:
    if resource is ResourceType.MEMORY:
        return gigabytes(size)
    return cores(size) if resource is ResourceType.CPU else gpus(size)


def used_amount(lease: Lease) -> int:
    """How much of an automatic lease its node's work has got so far."""
    resource = resource_of(lease.request.ask)
    return asked_amount(lease.request.ask, resource) - claimed_amount(lease, resource)


def used_part(ledger: Ledger, lease: Lease) -> str:
    """How much of an automatic lease was used, in words."""
    resource, binding = resource_of(lease.request.ask), ledger.binding_of(lease)
    used, asked = used_amount(lease), asked_amount(lease.request.ask, resource)
    by_engine = f", and tasks of {lease.engine} used the rest" if binding is not None and binding.was_used else ""
    return f"{describe(resource, used) if used else 'nothing'} of {describe(resource, asked)} was used{by_engine}"


def why_no_surplus(scan: PressureScan, node: str, resource: ResourceType) -> str:
    """Why a node cannot spare anything worth asking for, in words."""
    reading = scan.reading(node)
    if reading.score is None:
        return f"{node}: {stopped_reason(scan.ledger, scan.ledger.nodes[node]) or 'not heard from'}"
    for one in (resource, ResourceType.MEMORY, ResourceType.CPU, ResourceType.GPU):
        level, high = reading.level(one), scan.rules.watermarks(one).high
        if level is not None and level > high:
            return f"{node}: {one} at {percent(level)} itself, above the mark of {percent(high)}"
        if scan.will_be_above(node, one):
            return f"{node}: {one} will be above its own mark of {percent(high)} soon"
    if scan.held[node, resource]:
        return f"{node}: borrows {resource} itself"
    return f"{node}: {describe(resource, surplus(scan, node, resource))} to spare"


MIN_WORTH_MILLI = 20
"""A loan is at least this part of what the node has."""
AUTOMATIC_COUNTER = "automatic"
"""Counter that makes the ids of automatic requests unique."""
MAX_LENDERS = 32
"""Lenders that a request names at most."""
MAX_REASONS = 5


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


def may_borrow(scan: PressureScan, node: str, resource: ResourceType) -> bool:
    """Whether a node may borrow more of a resource now."""
    watch = scan.state(node).watch(resource)
    if watch.unused_amount or not scan.has_lasted(watch.above_since_ms) or not scan.has_cooled_down(watch.acted_at_ms):
        return False
    if (
        resource in scan.schedule.contested
        or not scan.borrows_for_machine(node)
        or next(scan.other_machines(node), None) is None
    ):
        return False
    held = sum(1 for lease in scan.leases if lease.request.target == node)
    return held < scan.rules.policy.leases_max


def plan_borrow(scan: PressureScan, node: str, resource: ResourceType) -> Borrow | Deny | None:
    """The request to make; None where the node has enough, or where a refusal was recorded already."""
    total = total_of(scan.ledger.nodes[node].capacity, resource)
    worth = max(total * MIN_WORTH_MILLI // 1000, UNITS[resource])
    excess = total * (_expected_level(scan, node, resource) - scan.rules.watermarks(resource).middle) // 1000
    held = scan.held[node, resource]
    if held and excess - held < worth:
        return None
    part = min(excess * scan.rules.policy.portion_milli // 1000, excess - held)
    size, lenders = _lenders(scan, node, resource, whole_units(resource, max(part, worth)), worth)
    why = pressure_reason(scan, node, resource)
    if lenders:
        request = _request(scan, node, resource, amounts_of(resource, size), lenders)
        return Borrow(request, resource, f"{why}: {describe(resource, size)} of {describe(resource, excess)} in excess")
    if scan.state(node).watch(resource).refused:
        return None
    others = list(scan.other_machines(node))
    lines = [why_no_surplus(scan, name, resource) for name in others[:MAX_REASONS]]
    lines += [f"and {len(others) - MAX_REASONS} more"] if len(others) > MAX_REASONS else []
    return Deny(node, resource, f"{why}, and nobody can help: {'; '.join(lines)}")


def _expected_level(scan: PressureScan, node: str, resource: ResourceType) -> int:
    reading = scan.reading(node)
    level, forecast = reading.level(resource) or 0, reading.ahead(resource)
    return max(level, forecast.level) if forecast is not None and scan.will_be_above(node, resource) else level


def _lenders(
    scan: PressureScan, node: str, resource: ResourceType, wanted: int, worth: int
) -> tuple[int, tuple[str, ...]]:
    """How much can be had at once, and from which nodes: all that is wanted, or else the most that one can spare."""
    ledger = scan.ledger

    def fits(name: str, size: int) -> bool:
        return ledger.claims_on(name).claim_for(amounts_of(resource, size), ledger.lends(name)) is not None

    less: list[tuple[int, str]] = []
    able: list[str] = []
    for size, name in surpluses(scan, node, resource, min(worth, wanted)):
        if size < wanted:
            less.append((-size, name))
        elif fits(name, wanted):
            able.append(name)
            if len(able) == MAX_LENDERS:
                break
    if able:
        return wanted, tuple(able)
    for negative, name in sorted(less):
        size = whole_units(resource, -negative)
        if size and fits(name, size):
            return size, (name,)
    return 0, ()


def _request(scan: PressureScan, node: str, resource: ResourceType, ask: Amounts, lenders: tuple[str, ...]) -> Request:
    policy = scan.rules.policy
    return Request(
        request_id(node, resource, scan.ledger.counters.get(AUTOMATIC_COUNTER, 0) + 1),
        GRID_USER,
        ask,
        policy.priority,
        require=lenders,
        wait_ms=0,
        duration_ms=policy.term * scan.rules.interval_ms,
        target=node,
        anti_affinity=(node,),
    )


def request_id(node: str, resource: ResourceType, number: int) -> str:
    """An id that says what it is for; names with dots or longer than an id may be are cut to fit."""
    tail = f"-{resource}-{number}"
    return AUTOMATIC_PREFIX + re.sub(r"[^A-Za-z0-9_-]", "-", node)[: 64 - len(AUTOMATIC_PREFIX) - len(tail)] + tail


def pressure_reason(scan: PressureScan, node: str, resource: ResourceType) -> str:
    """The pressure that calls for something, with its numbers."""
    reading, high = scan.reading(node), scan.rules.watermarks(resource).high
    level, forecast = reading.level(resource) or 0, reading.ahead(resource)
    if level > high or forecast is None:
        return f"{resource} at {percent(level)}, above the mark of {percent(high)}"
    seconds = scan.rules.policy.ahead * scan.rules.interval_ms // 1000
    expected = f"{percent(forecast.level)} (± {percent(forecast.reach)}) in {seconds} s"
    return f"{resource} at {percent(level)}, expected at {expected}, above the mark of {percent(high)}"
