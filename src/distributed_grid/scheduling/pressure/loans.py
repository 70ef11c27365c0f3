"""Loans for nodes under pressure: the surplus of lenders, the amount to borrow, the parts that work takes of a loan.

A node's excess is its use above the middle of its watermarks; a part of it is borrowed at a time, within the policy's
number of leases and cool-down, and never a resource that users wait for. The surplus of a lender is free by measurement
and by its leases, above the excess threshold, and never so large that the lender would rise above its own high
watermark. Nodes above a watermark, and nodes that borrow the resource themselves, have none.

Work of a node under pressure gets its lease out of the automatic leases that are held for that node. Such a lease
shrinks by the amount carved out of it; the rest of the ask has to be free on the lender. A lease that a command uses as
a whole gives nothing away. The claims on the lender never grow by more than is free.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import (
    AUTOMATIC_PREFIX,
    GRID_USER,
    belongs_to,
    claimed_amount,
    is_automatic,
    owner_of,
    resource_of,
)
from distributed_grid.domain.resources import (
    WHOLE_GPU,
    Amounts,
    Capacity,
    Claim,
    GpuShare,
    ResourceType,
    cores,
    gigabytes,
    gpus,
)
from distributed_grid.scheduling.placement.machine_limits import crowded_nodes
from distributed_grid.scheduling.placement.placement import Placement, strategy_of, unmet_constraint
from distributed_grid.scheduling.pressure.scan import PressureScan, idle_automatic_leases, machine_of, percent
from distributed_grid.scheduling.queue.reasons import stopped_reason

UNITS = {ResourceType.MEMORY: 1024**2, ResourceType.CPU: 100, ResourceType.GPU: 100}
"""Smallest unit of a loan: a MiB, a tenth of a core or of a GPU."""
MIN_WORTH_MILLI = 20
"""A loan is at least this part of the node's capacity."""
AUTOMATIC_COUNTER = "automatic"
"""Counter that makes the ids of automatic requests unique."""
MAX_LENDERS = 32
"""Lenders that a request names at most."""
MAX_REASONS = 5


# ------------------------------------------------------------------ amounts of one resource


def total_of(capacity: Capacity, resource: ResourceType) -> int:
    """The whole amount of a resource: bytes, millicores or milli-GPUs."""
    if resource is ResourceType.MEMORY:
        return capacity.memory_bytes
    return capacity.cpu_milli if resource is ResourceType.CPU else WHOLE_GPU * len(capacity.gpus)


def amounts_of(resource: ResourceType, size: int) -> Amounts:
    """An ask for one resource alone."""
    if resource is ResourceType.MEMORY:
        return Amounts(memory_bytes=size)
    return Amounts(cpu_milli=size) if resource is ResourceType.CPU else Amounts(gpu_milli=size)


def asked_amount(ask: Amounts, resource: ResourceType) -> int:
    if resource is ResourceType.MEMORY:
        return ask.memory_bytes
    return ask.cpu_milli if resource is ResourceType.CPU else ask.gpu_milli


def describe(resource: ResourceType, size: int) -> str:
    if resource is ResourceType.MEMORY:
        return gigabytes(size)
    return cores(size) if resource is ResourceType.CPU else gpus(size)


def whole_units(resource: ResourceType, size: int) -> int:
    """The largest amount up to this that can be asked for: in units, and GPUs from one on only whole."""
    unit = WHOLE_GPU if resource is ResourceType.GPU and size >= WHOLE_GPU else UNITS[resource]
    return size // unit * unit


def used_amount(lease: Lease) -> int:
    """The amount of an automatic lease that work of its node has got so far."""
    resource = resource_of(lease.request.ask)
    return asked_amount(lease.request.ask, resource) - claimed_amount(lease, resource)


def used_part(ledger: Ledger, lease: Lease) -> str:
    """The used amount of an automatic lease as text."""
    resource, binding = resource_of(lease.request.ask), ledger.binding_of(lease)
    used, asked = used_amount(lease), asked_amount(lease.request.ask, resource)
    by_engine = f", and tasks of {lease.engine} used the rest" if binding is not None and binding.was_used else ""
    return f"{describe(resource, used) if used else 'nothing'} of {describe(resource, asked)} was used{by_engine}"


# ------------------------------------------------------------------ lenders


def surplus(scan: PressureScan, node: str, resource: ResourceType) -> int:
    """The amount of a resource that a node can lend to nodes under pressure now."""
    ledger, rules = scan.ledger, scan.rules
    offer = ledger.offers.get(node)
    level = scan.reading(node).level(resource)
    if level is None and resource is ResourceType.GPU:
        level = 0  # a device that nobody measures counts as idle, as it does for lending
    if offer is None or level is None or scan.held[node, resource]:
        return 0
    total, claims = total_of(ledger.nodes[node].capacity, resource), ledger.claims_on(node)
    observation = ledger.observations.get(node)
    usage = observation.usage if observation is not None else None
    outside = 0  # use by others than the grid; lent amounts come on top of it, used already or not
    if resource is ResourceType.MEMORY:
        lent = claims.memory_bytes
        outside = usage.memory_outside_bytes if usage is not None else 0
    elif resource is ResourceType.CPU:
        lent = claims.cpu_milli
        outside = usage.cpu_outside_milli * total // 1000 if usage is not None else 0
    else:
        lent = sum(claims.gpu_milli.values())
        outside = sum(gpu.busy_milli for gpu in usage.gpus) if usage is not None else 0
    free = min(total - lent - outside, total * (1000 - level) // 1000)
    kept = -(-total * max(rules.excess_milli, 1000 - rules.watermarks(resource).high) // 1000)
    return max(min(free - kept, total_of(offer.lends, resource) - lent), 0)


def surpluses(scan: PressureScan, node: str, resource: ResourceType, least: int) -> Iterator[tuple[int, str]]:
    """The surplus of each lender that has at least this much, least loaded first.

    A complete pass is remembered in the scan, so that the same amount is not looked for in vain again.
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


def why_no_surplus(scan: PressureScan, node: str, resource: ResourceType) -> str:
    """The reason for which a node has no surplus worth asking for."""
    reading = scan.reading(node)
    if reading.score is None:
        return f"{node}: {stopped_reason(scan.ledger, scan.ledger.nodes[node]) or 'not heard from'}"
    for kind in (resource, ResourceType.MEMORY, ResourceType.CPU, ResourceType.GPU):
        level, high = reading.level(kind), scan.rules.watermarks(kind).high
        if level is not None and level > high:
            return f"{node}: {kind} at {percent(level)} itself, above the mark of {percent(high)}"
        if scan.will_be_above(node, kind):
            return f"{node}: {kind} will be above its own mark of {percent(high)} soon"
    if scan.held[node, resource]:
        return f"{node}: borrows {resource} itself"
    return f"{node}: {describe(resource, surplus(scan, node, resource))} to spare"


# ------------------------------------------------------------------ borrowing


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
    if resource in scan.schedule.contested or not scan.borrows_for_machine(node):
        return False
    if next(scan.other_machines(node), None) is None:
        return False
    return sum(1 for lease in scan.leases if lease.request.target == node) < scan.rules.policy.leases_max


def plan_borrow(scan: PressureScan, node: str, resource: ResourceType) -> Borrow | Deny | None:
    """The request to make; None where the node has enough, or where a refusal was recorded already."""
    policy, reading, total = scan.rules.policy, scan.reading(node), total_of(scan.ledger.nodes[node].capacity, resource)
    worth = max(total * MIN_WORTH_MILLI // 1000, UNITS[resource])
    level, forecast = reading.level(resource) or 0, reading.ahead(resource)
    if forecast is not None and scan.will_be_above(node, resource):
        level = max(level, forecast.level)
    excess = total * (level - scan.rules.watermarks(resource).middle) // 1000
    held = scan.held[node, resource]
    if held and excess - held < worth:
        return None
    part = min(excess * policy.portion_milli // 1000, excess - held)
    size, lenders = _lenders(scan, node, resource, whole_units(resource, max(part, worth)), worth)
    reason = pressure_reason(scan, node, resource)
    if lenders:
        number = scan.ledger.counters.get(AUTOMATIC_COUNTER, 0) + 1
        request = Request(
            id=request_id(node, resource, number),
            user=GRID_USER,
            ask=amounts_of(resource, size),
            priority=policy.priority,
            require=lenders,
            wait_ms=0,
            duration_ms=policy.term * scan.rules.interval_ms,
            target=node,
            anti_affinity=(node,),
        )
        of_excess = f"{describe(resource, size)} of {describe(resource, excess)} in excess"
        return Borrow(request, resource, f"{reason}: {of_excess}")
    if scan.state(node).watch(resource).refused:
        return None
    others = list(scan.other_machines(node))
    lines = [why_no_surplus(scan, name, resource) for name in others[:MAX_REASONS]]
    lines += [f"and {len(others) - MAX_REASONS} more"] if len(others) > MAX_REASONS else []
    return Deny(node, resource, f"{reason}, and nobody can help: {'; '.join(lines)}")


def _lenders(
    scan: PressureScan, node: str, resource: ResourceType, wanted: int, worth: int
) -> tuple[int, tuple[str, ...]]:
    """The amount that can be had at once, and its lenders: the wanted amount, or else the largest that one has."""
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


def request_id(node: str, resource: ResourceType, number: int) -> str:
    """The id of an automatic request; names with dots or longer than an id may be are cut to fit."""
    tail = f"-{resource}-{number}"
    return AUTOMATIC_PREFIX + re.sub(r"[^A-Za-z0-9_-]", "-", node)[: 64 - len(AUTOMATIC_PREFIX) - len(tail)] + tail


def pressure_reason(scan: PressureScan, node: str, resource: ResourceType) -> str:
    """The pressure on a node, with its numbers."""
    reading, high = scan.reading(node), scan.rules.watermarks(resource).high
    level, forecast = reading.level(resource) or 0, reading.ahead(resource)
    if level > high or forecast is None:
        return f"{resource} at {percent(level)}, above the mark of {percent(high)}"
    seconds = scan.rules.policy.ahead * scan.rules.interval_ms // 1000
    expected = f"{percent(forecast.level)} (± {percent(forecast.reach)}) in {seconds} s"
    return f"{resource} at {percent(level)}, expected at {expected}, above the mark of {percent(high)}"


# ------------------------------------------------------------------ parts of loans


def carve_placement(
    ledger: Ledger, request: Request, *, waits: bool = False, avoid: Collection[str] = ()
) -> Placement | None:
    """The part of its node's automatic leases that a request gets, or None; never on a node to avoid.

    A request that would have to wait gets it whatever it prefers; others only where their own wishes allow that.
    """
    if GRID_USER not in ledger.held or request.gang > 1 or request.use_lease or is_automatic(request):
        return None
    if not waits and request.strategy is not None:
        return None
    owners = belongs_to(request) if waits else owner_of(request)
    avoid = {*avoid, *crowded_nodes(ledger, request)}
    by_node: dict[str, list[Lease]] = {}
    for lease in idle_automatic_leases(ledger):
        wanted = waits or not request.prefer or lease.node in request.prefer
        if lease.request.target in owners and wanted and asked_amount(request.ask, resource_of(lease.request.ask)):
            by_node.setdefault(lease.node, []).append(lease)
    plans = (_carve_on(ledger, request, node, leases) for node, leases in by_node.items() if node not in avoid)
    return min(
        (plan for plan in plans if plan is not None),
        key=lambda plan: (plan.node not in request.prefer, plan.node),
        default=None,
    )


def _carve_on(ledger: Ledger, request: Request, node: str, leases: list[Lease]) -> Placement | None:
    columns = ledger.columns
    if not columns.open[columns.row_of(node)] or unmet_constraint(ledger, request, node) is not None:
        return None
    claims, lends = ledger.claims_on(node).copy(), ledger.lends(node)
    for lease in leases:
        if lease.claim is not None:
            claims.remove(lease.claim)
    held = {share.index for lease in leases if lease.claim is not None for share in lease.claim.gpus}
    held_devices = replace(lends, gpus=tuple(device for device in lends.gpus if device.index in held))
    claim = claims.claim_for(request.ask, held_devices) or claims.claim_for(request.ask, lends)
    if claim is None:
        return None
    carved, left = [], claim
    for lease in leases:
        assert lease.claim is not None
        rest = _without(lease.claim, left)
        if rest != lease.claim:
            left = _without(left, lease.claim)
            if len(rest.gpus) > 1:  # several GPUs are only held whole
                rest = replace(rest, gpus=tuple(share for share in rest.gpus if share.milli == WHOLE_GPU))
            carved.append((lease.id, rest))
    if not carved:
        return None
    preferred = node in request.prefer
    return Placement(
        node=node, claim=claim, strategy=strategy_of(ledger, request), preferred=preferred, carved=tuple(carved)
    )


def _without(claim: Claim, taken: Claim) -> Claim:
    """The rest of a claim."""
    by_device = {share.index: share for share in taken.gpus}
    rests = []
    for share in claim.gpus:
        part = by_device.get(share.index)
        if part is None:
            rests.append(share)
        elif share.milli > part.milli:
            memory_bytes = max(share.memory_bytes - part.memory_bytes, 0)
            rests.append(GpuShare(share.index, share.milli - part.milli, memory_bytes))
    cpu_milli, memory_bytes = claim.cpu_milli - taken.cpu_milli, claim.memory_bytes - taken.memory_bytes
    return Claim(max(cpu_milli, 0), max(memory_bytes, 0), tuple(rests))


def is_used_up(lease: Lease, left: Claim) -> bool:
    """Whether the rest of an automatic lease is too little to hold."""
    resource = resource_of(lease.request.ask)
    return claimed_amount(replace(lease, claim=left), resource) < UNITS[resource]
