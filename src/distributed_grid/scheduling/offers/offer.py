"""Offer of a node: how much it lends now, and which engine leases its owner needs back.

Whether a resource is lent at all is decided slowly (`owner_activity`), how much of it follows the last measurement:
never more than is free, than the caps allow, or than is above the excess threshold, and nothing new of what is paused
(`pause`). All cores are free while next to nothing uses them: otherwise no idle machine could ever lend its last core.
A GPU is lent whole or not at all. Of memory a measured node lends no more than its machine has available,
less a reserve; with or without thresholds. A simulated node lends what is declared for it less its background.
An offer shrinks at once; it grows when the growth is large enough or the offer is old.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.engines import EngineCapacity
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, NodeObservation, Offer, OfferThresholds, Usage
from distributed_grid.domain.resources import NOTHING, WHOLE_GPU, Capacity, GpuDevice, cores, gigabytes
from distributed_grid.domain.states import LeaseState
from distributed_grid.domain.statistics import Idleness
from distributed_grid.scheduling.offers.owner_activity import update_idleness
from distributed_grid.scheduling.offers.pause import disk_reason, pauses, percent, without_paused

GROWTH_DIVISOR = 10  # an offer grows at once by this fraction of the node's capacity; by less when it is refreshed

BACKGROUND_BUSY_MILLI = 50  # so much of a CPU is in use on an idle machine, too: services, cron, the agent itself

COMMAND_CPU_MILLI = 100  # so much CPU has to be offered where a command starts that asks for no cores

ALL_MILLI = 1000
RESERVE_DIVISOR = 20
MAX_RESERVE_BYTES = 1 << 30
NOT_MEASURED = "its owner's use is not measured yet"
"""A machine keeps a twentieth of the memory that it has available, at most 1 GB of it."""


def next_offer(
    node: Node,
    seen: NodeObservation,
    old: Offer | None,
    *,
    refresh: bool = False,
    engine_capacity: EngineCapacity | None = None,
    used: NodeClaims | None = None,
    degraded: str = "",
) -> Offer | None:
    """The node's next offer, or None while the old one still holds; always a new one with `refresh`.

    It never exceeds `engine_capacity`, the room that an engine has for the grid; `used` is the part of that already
    lent. A node that is `degraded` (the reason) lends nothing new.
    """
    if seen.usage is None:
        return None
    lends, withheld = lendable_now(node, seen.usage, seen.idleness)
    paused = () if seen.yields else pauses(node, seen)
    if paused:
        lends, withheld = without_paused(lends, paused), (*withheld, *map(str, paused))
    for_owner = node.thresholds is not None and bool(withheld)
    if seen.yields:
        lends, withheld, for_owner = NOTHING, ("its owner is using it",), True
    elif degraded:
        lends, withheld, for_owner = NOTHING, (f"degraded: {degraded}",), False
    elif seen.disk_full:
        lends, withheld, for_owner = NOTHING, (disk_reason(seen.usage),), False
    elif engine_capacity is not None:
        room, held = engine_capacity.room, (used or NodeClaims()).gpu_milli
        most = -(-room.gpu_milli // WHOLE_GPU)
        devices = sorted(lends.gpus, key=lambda device: (device.index not in held, device.index))[:most]
        limited = Capacity(
            min(lends.cpu_milli, room.cpu_milli),
            min(lends.memory_bytes, room.memory_bytes),
            tuple(sorted(devices, key=lambda device: device.index)),
            lends.custom,
        )
        if limited != lends:
            lends, withheld = limited, (*withheld, "its engine has given the rest to others")
    now = seen.at_ms
    recent = old is not None and now - old.made_at_ms < node.refresh_ms
    names = tuple(pause.name for pause in paused)
    keeps = "cpu" in names or _keeps_cpu(node, seen)
    is_same = old is not None and recent and not refresh and (names, keeps) == (old.paused, old.keeps_cpu)
    if old is not None and is_same:
        grown = (
            (lends.cpu_milli - old.lends.cpu_milli, node.capacity.cpu_milli),
            (lends.memory_bytes - old.lends.memory_bytes, node.capacity.memory_bytes),
        )
        is_changed = any(more != 0 and not 0 < more * GROWTH_DIVISOR < has for more, has in grown)
        others = (old.lends.gpus, old.lends.custom, len(old.withheld))
        if not is_changed and others == (lends.gpus, lends.custom, len(withheld)):
            return None  # it promises nothing that is gone, and hides nothing worth telling
    generation = old.generation + 1 if old is not None else 1
    return Offer(
        node=node.name,
        generation=generation,
        lends=lends,
        made_at_ms=now,
        expires_at_ms=now + node.offer_ms,
        withheld=withheld,
        paused=names,
        for_owner=for_owner,
        keeps_cpu=keeps,
    )


def _keeps_cpu(node: Node, seen: NodeObservation) -> bool:
    """Whether the owner's rule leaves less CPU than a command needs that asks for none, whatever the caps are. A limit
    of all the CPU is no rule."""
    limits, idle, usage = node.thresholds, seen.idleness, seen.usage
    if limits is None or idle is None or usage is None or limits.cpu_busy_max_milli >= ALL_MILLI:
        return False
    return _lendable_cpu(node, usage, limits, idle, []) < min(COMMAND_CPU_MILLI, node.capacity.cpu_milli)


def paused_offer(node: Node, seen: NodeObservation, offer: Offer) -> Offer | None:
    """The offer without the resources paused by a measurement; None if none of them is newly paused."""
    paused = pauses(node, seen)
    new = [one for one in paused if one.name not in offer.paused]
    if not new:
        return None
    withheld = (*offer.withheld, *map(str, new))
    return replace(
        offer,
        generation=offer.generation + 1,
        lends=without_paused(offer.lends, paused),
        withheld=withheld,
        for_owner=True,
        paused=(*offer.paused, *(one.name for one in new)),
        keeps_cpu=offer.keeps_cpu or any(one.name == "cpu" for one in new),
    )


def degraded_offer(offer: Offer, why: str) -> Offer:
    return _empty_offer(offer, f"degraded: {why}", for_owner=False)


def full_disk_offer(offer: Offer, usage: Usage) -> Offer:
    return _empty_offer(offer, disk_reason(usage), for_owner=False)


def unmeasured_offer(node: Node, usage: Usage, offer: Offer) -> Offer | None:
    """The empty offer of a node whose owner's use is unknown; None where it is known or does not matter."""
    if usage.cpu_measured or node.thresholds is None or offer.withheld == (NOT_MEASURED,):
        return None
    return _empty_offer(offer, NOT_MEASURED, for_owner=True)


def _empty_offer(offer: Offer, reason: str, *, for_owner: bool) -> Offer:
    return replace(
        offer, generation=offer.generation + 1, lends=NOTHING, withheld=(reason,), for_owner=for_owner, paused=()
    )


def lendable_now(node: Node, usage: Usage, idle: Idleness | None = None) -> tuple[Capacity, tuple[str, ...]]:
    """The lendable capacity of a node, and the reasons for withholding the rest.

    Without thresholds it is everything within the caps. Without `idle` the measurement counts as the node's first.
    """
    most, limits = node.lendable, node.thresholds
    if limits is None and not node.caps.can_share:
        return most, ("does not share",)
    if limits is None:
        cpu, memory, gpus = most.cpu_milli, available_memory(node, usage), most.gpus
        if node.simulated:
            cpu = min(cpu, node.capacity.cpu_milli * max(1000 - usage.cpu_outside_milli, 0) // 1000)
        elif node.is_pull:  # only the worker itself can take its machine back: use by others is the owner's
            used = usage.cpu_outside_milli if usage.cpu_outside_milli > BACKGROUND_BUSY_MILLI else 0
            cpu = min(cpu, node.capacity.cpu_milli * max(1000 - used, 0) // 1000)
            busy = {gpu.index for gpu in usage.gpus if gpu.busy_milli}
            gpus = tuple(device for device in gpus if device.index not in busy)
        lends = replace(most, cpu_milli=cpu, memory_bytes=min(memory, most.memory_bytes), gpus=gpus)
        return lends, ("all of its memory is in use",) if most.memory_bytes and not memory else ()
    if not usage.cpu_measured:
        return NOTHING, (NOT_MEASURED,)
    idle = idle or update_idleness(node, usage, None, 0)
    assert idle is not None
    withheld: list[str] = []
    cpu = _lendable_cpu(node, usage, limits, idle, withheld)
    memory = _lendable_memory(node, usage, limits, idle, withheld)
    gpus = tuple(device for device in most.gpus if _lends_gpu(device, usage, limits, idle, withheld))
    return Capacity(min(cpu, most.cpu_milli), min(memory, most.memory_bytes), gpus, most.custom), tuple(withheld)


def available_memory(node: Node, usage: Usage) -> int:
    """Memory that a node can lend in all.

    Measured node: the machine's available memory less the reserve. Other nodes: capacity less the owner's use.
    """
    room = None if node.simulated else machine_memory(usage)
    return max(node.capacity.memory_bytes - usage.memory_outside_bytes, 0) if room is None else room


def machine_memory(usage: Usage) -> int | None:
    """The memory that a machine can lend in all, its reserve left out; None where it was not measured."""
    room = usage.memory_room_bytes
    if room is None:
        return None
    return max(room - min(room // RESERVE_DIVISOR, MAX_RESERVE_BYTES), 0)


def _lendable_cpu(node: Node, usage: Usage, limits: OfferThresholds, idle: Idleness, withheld: list[str]) -> int:
    busy, most = usage.cpu_outside_milli, limits.cpu_busy_max_milli
    used = busy if busy > BACKGROUND_BUSY_MILLI else 0
    free = node.capacity.cpu_milli * max(1000 - used, 0) // 1000
    enough = free >= limits.cpu_min_milli
    if idle.cpu.lent and enough:
        return _above_excess(free, node.capacity.cpu_milli, limits, "CPU", withheld)
    if busy > most:
        withheld.append(f"its owner uses {percent(busy)} of the CPU (limit {percent(most)})")
    elif not enough:
        withheld.append(f"{cores(free)} free, at least {cores(limits.cpu_min_milli)} needed to lend any")
    else:
        withheld.append(f"its owner uses {percent(busy)} of the CPU, but {_not_long_enough(limits)}")
    return 0


def _lendable_memory(node: Node, usage: Usage, limits: OfferThresholds, idle: Idleness, withheld: list[str]) -> int:
    used, most = 1000 * usage.memory_outside_bytes // max(node.capacity.memory_bytes, 1), limits.memory_used_max_milli
    free = min(max(node.capacity.memory_bytes - usage.memory_outside_bytes, 0), available_memory(node, usage))
    enough = free >= limits.memory_min_bytes
    if idle.memory.lent and enough:
        return _above_excess(free, node.capacity.memory_bytes, limits, "memory", withheld)
    if used > most:
        withheld.append(f"its owner uses {percent(used)} of the memory (limit {percent(most)})")
    elif not enough:
        withheld.append(f"{gigabytes(free)} free, at least {gigabytes(limits.memory_min_bytes)} needed to lend any")
    else:
        withheld.append(f"its owner uses {percent(used)} of the memory, but {_not_long_enough(limits)}")
    return 0


def _lends_gpu(device: GpuDevice, usage: Usage, limits: OfferThresholds, idle: Idleness, withheld: list[str]) -> bool:
    tendency = idle.gpu(device.index)
    if tendency is None:
        withheld.append(f"GPU {device.index} is not measured yet")
        return False
    if tendency.lent:
        return True
    seen = next((gpu for gpu in usage.gpus if gpu.index == device.index), None)
    busy = seen.busy_milli if seen is not None else 0
    free = device.memory_bytes - seen.memory_bytes if seen is not None else limits.gpu_memory_min_bytes
    if busy > limits.gpu_busy_max_milli:
        limit = percent(limits.gpu_busy_max_milli)
        withheld.append(f"its owner uses {percent(busy)} of GPU {device.index} (limit {limit})")
    elif free < limits.gpu_memory_min_bytes:
        withheld.append(f"GPU {device.index}: {gigabytes(free)} free, {gigabytes(limits.gpu_memory_min_bytes)} needed")
    else:
        withheld.append(f"its owner uses {percent(busy)} of GPU {device.index}, but {_not_long_enough(limits)}")
    return False


def _above_excess(free: int, has: int, limits: OfferThresholds, what: str, withheld: list[str]) -> int:
    lent = max(free + -has * limits.excess_milli // 1000, 0)
    if not lent and limits.excess_milli:
        withheld.append(f"{what} {percent(1000 * free // max(has, 1))} free, keeps {percent(limits.excess_milli)}")
    return lent


def _not_long_enough(limits: OfferThresholds) -> str:
    return f"not idle for {limits.dwell_ms / 60_000:g} min yet"


def engine_leases_to_reclaim(ledger: Ledger, node: Node, usage: Usage) -> tuple[Lease, ...]:
    """The leases of a node that its engine holds and that its owner wants back now."""
    limits = node.thresholds
    if limits is None or not ledger.bindings:
        return ()
    backed = [
        lease for lease in ledger.leases_of(node.name) if lease.engine and not lease.job and lease.claim is not None
    ]
    if not backed:
        return ()
    has, margin = node.capacity, limits.margin_milli
    memory_used = 1000 * usage.memory_outside_bytes // max(has.memory_bytes, 1)
    cpu_short = memory_short = 0
    if usage.cpu_outside_milli > limits.cpu_busy_max_milli + margin:
        free = has.cpu_milli * max(1000 - usage.cpu_outside_milli, 0) // 1000
        cpu_short = sum(lease.claim.cpu_milli for lease in backed if lease.claim is not None) - free
    if memory_used > limits.memory_used_max_milli + margin:
        free = max(has.memory_bytes - usage.memory_outside_bytes, 0)
        memory_short = sum(lease.claim.memory_bytes for lease in backed if lease.claim is not None) - free
    wanted = {gpu.index for gpu in usage.gpus if gpu.busy_milli > limits.gpu_busy_max_milli + margin}
    leaving: list[Lease] = []
    for lease in sorted(backed, key=lambda one: (one.request.priority, -one.granted_at_ms, one.id)):
        claim = lease.claim
        assert claim is not None
        helps = (
            (cpu_short > 0 and claim.cpu_milli)
            or (memory_short > 0 and claim.memory_bytes)
            or any(share.index in wanted for share in claim.gpus)
        )
        if helps and lease.state is not LeaseState.RELEASING:
            leaving.append(lease)
            cpu_short -= claim.cpu_milli
            memory_short -= claim.memory_bytes
    return tuple(leaving)
