"""What a node can spare for others that are under pressure.

Rule 1: only what is free by measurement and by what was lent already, and only the part above the excess threshold.
Rule 2: never so much that the lender would come above its own high mark, were all of it used.
Rule 3: who is above one of its marks (not calm), or gets such help itself, spares nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import WHOLE_GPU, Amounts, Capacity, ResourceType, cores, gigabytes, gpus
from distributed_grid.scheduling.rebalancing.pressure import PressureScan, machine_of, percent

UNITS = {ResourceType.MEMORY: 1024**2, ResourceType.CPU: 100, ResourceType.GPU: 100}
"""The least that is worth writing down: a MiB, a tenth of a core or of a GPU."""


def total_of(capacity: Capacity, resource: ResourceType) -> int:
    """All there is of a resource: bytes, millicores or milli-GPUs."""
    if resource is ResourceType.MEMORY:
        return capacity.memory_bytes
    return capacity.cpu_milli if resource is ResourceType.CPU else WHOLE_GPU * len(capacity.gpus)


def spare(look: PressureScan, node: str, resource: ResourceType) -> int:
    """How much of a resource a calm node can spare right now."""
    ledger, rules = look.ledger, look.rules
    offer = ledger.offers.get(node)
    level = look.reading(node).level(resource)
    if level is None and resource is ResourceType.GPU:
        level = 0  # a device that nobody measures counts as idle, as it does for lending
    if offer is None or level is None or look.held[node, resource]:
        return 0
    total = total_of(ledger.nodes[node].capacity, resource)
    lent = _lent(ledger, node, resource)
    free = min(total - lent - _outside(ledger, node, resource, total), total * (1000 - level) // 1000)
    kept = -(-total * max(rules.excess_milli, 1000 - rules.marks(resource).high) // 1000)
    return max(min(free - kept, total_of(offer.lends, resource) - lent), 0)


def spares(look: PressureScan, node: str, resource: ResourceType, least: int) -> Iterator[tuple[int, str]]:
    """What each node that could help has to spare, where that is enough, least loaded first.

    Who has gone through all of them in vain has found out for all who would ask for as much in the same look.
    """
    if look.found.get(resource, least) < least:
        return
    most = 0
    for name in look.helpers(node):
        size = spare(look, name, resource)
        most = max(most, size)
        if size >= least:
            yield size, name
    if machine_of(look.ledger.nodes[node]) == node:
        look.found[resource] = most


def _lent(ledger: Ledger, node: str, resource: ResourceType) -> int:
    book = ledger.book(node)
    if resource is ResourceType.MEMORY:
        return book.memory_bytes
    return book.cpu_milli if resource is ResourceType.CPU else sum(book.gpu_milli.values())


def _outside(ledger: Ledger, node: str, resource: ResourceType, total: int) -> int:
    """What others than the grid use; what was lent comes on top of it, used already or not."""
    seen = ledger.sightings.get(node)
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


def ask_for(resource: ResourceType, size: int) -> Amounts:
    """An ask for one resource alone."""
    if resource is ResourceType.MEMORY:
        return Amounts(memory_bytes=size)
    return Amounts(cpu_milli=size) if resource is ResourceType.CPU else Amounts(gpu_milli=size)


def asked(ask: Amounts, resource: ResourceType) -> int:
    """How much of a resource is asked for."""
    if resource is ResourceType.MEMORY:
        return ask.memory_bytes
    return ask.cpu_milli if resource is ResourceType.CPU else ask.gpu_milli


def in_words(resource: ResourceType, size: int) -> str:
    if resource is ResourceType.MEMORY:
        return gigabytes(size)
    return cores(size) if resource is ResourceType.CPU else gpus(size)


def why_nothing(look: PressureScan, node: str, resource: ResourceType) -> str:
    """Why a node cannot spare anything worth asking for, in words."""
    reading = look.reading(node)
    if reading.score is None:
        return f"{node}: not heard from"
    for one in (resource, ResourceType.MEMORY, ResourceType.CPU, ResourceType.GPU):
        level, high = reading.level(one), look.rules.marks(one).high
        if level is not None and level > high:
            return f"{node}: {one} at {percent(level)} itself, above the mark of {percent(high)}"
        if look.will_be_above(node, one):
            return f"{node}: {one} will be above its own mark of {percent(high)} soon"
    if look.held[node, resource]:
        return f"{node}: borrows {resource} itself"
    return f"{node}: {in_words(resource, spare(look, node, resource))} to spare"
