"""How restless the owner of a node is, out of one measurement after the other.

Rule 1: what lasts less than half a minute is smoothed away: the owner's guard on the node does not evict for that.
Rule 2: a rise is a climb by a twentieth of the node or more, so trembling around a tenth is none.
Rule 3: drift is slow, and looked at every few minutes. A jump is a rise; as drift it counts as much as was to be
expected at most.
Rule 4: after a silence that has outlasted the node's offer everything begins anew.
"""

from __future__ import annotations

from math import sqrt

from distributed_grid.domain.node_statistics import UsageTrace, UsageVolatility
from distributed_grid.domain.nodes import Node, NodeObservation, Usage

SMOOTH_MS = 30_000
STRIDE_MS = 300_000
"""How far apart the levels are that drift is measured between."""
WINDOW = 0.1
"""What one of them counts; so the last hour is most of it."""
HALF_LIFE_MS = 12 * 3_600_000
"""A rise counts half after so long. Of 6, 12 and 24 hours the held-out machines of `bench/confidence.py` liked the
longer ones best, by little; owners are different tomorrow."""
TENTHS = 10
CLIMB = 50.0
JUMP = 2.0
"""In standard deviations: a larger step is a jump."""
TREMBLE = 5.0
"""What is never a jump, in thousandths of the node."""
HOUR_MS = 3_600_000


def unrest(node: Node, usage: Usage, seen: NodeObservation | None, now: int) -> UsageVolatility | None:
    """What is known of a node's owner after one more measurement; None where nobody takes anything back."""
    limits = node.thresholds
    if limits is None:
        return None
    old = seen.unrest if seen is not None and now - seen.at_ms <= node.offer_ms else None
    passed_ms = max(now - seen.at_ms, 0) if seen is not None else 0
    memory = 1000 * usage.memory_outside_bytes / max(node.capacity.memory_bytes, 1)
    gpu = _gpu_use(node, usage)
    return UsageVolatility(
        _followed(old.cpu if old else None, float(usage.cpu_outside_milli), passed_ms, now),
        _followed(old.memory if old else None, memory, passed_ms, now),
        None if gpu is None else _followed(old.gpu if old else None, gpu, passed_ms, now),
    )


def _gpu_use(node: Node, usage: Usage) -> float | None:
    """How much its owner uses the busiest device that is lent; all of one without the memory that must be free."""
    limits, devices = node.thresholds, node.lendable.gpus
    if not devices or limits is None:
        return None
    has = {device.index: device.memory_bytes for device in devices}
    seen = [gpu for gpu in usage.gpus if gpu.index in has]
    if any(has[gpu.index] - gpu.memory_bytes < limits.gpu_memory_min_bytes for gpu in seen):
        return 1000.0
    return float(max((gpu.busy_milli for gpu in seen), default=0))


def _followed(old: UsageTrace | None, use: float, passed_ms: int, now: int) -> UsageTrace:
    """The trail with one more measurement, that of the time passed since the last."""
    if old is None:
        return UsageTrace(use, use, use, use, now, now, now)
    level = old.level + (use - old.level) * min(passed_ms / SMOOTH_MS, 1.0)
    anchor, anchored_at_ms, drift = old.anchor, old.anchored_at_ms, old.drift
    if now - anchored_at_ms >= STRIDE_MS:
        drift = _wandered(old, level, now)
        anchor, anchored_at_ms = level, now
    trough, crest, rises, counted_at_ms = old.trough, old.crest, old.rises, old.counted_at_ms
    if level <= crest - CLIMB:
        trough = crest = level
    elif level < trough:
        trough = level
    elif level > crest:
        if int(level) // 100 > int(crest) // 100:
            rises, counted_at_ms = _risen(old, level, now), now
        crest = level
    return UsageTrace(level, trough, crest, anchor, anchored_at_ms, old.since_ms, counted_at_ms, drift, rises)


def _wandered(old: UsageTrace, level: float, now: int) -> float:
    """The drift after one more stride."""
    hours = (now - old.anchored_at_ms) / HOUR_MS
    step = min(abs(level - old.anchor), JUMP * sqrt(old.drift * hours) + TREMBLE)
    return old.drift + WINDOW * (step * step / hours - old.drift)


def _risen(old: UsageTrace, level: float, now: int) -> tuple[float, ...]:
    """The counts with a climb to this level among them."""
    fade = faded(now - old.counted_at_ms)
    counts = [count * fade for count in old.rises] or [0.0] * TENTHS
    for tenth in range(TENTHS):
        mark = 100 * (tenth + 1)
        if old.crest < mark <= level and mark - old.trough >= CLIMB:
            counts[tenth] += 1.0
    return tuple(counts)


def faded(age_ms: int) -> float:
    """How much still counts of what is so old."""
    return float(2.0 ** (-age_ms / HALF_LIFE_MS))


def risen_above(trail: UsageTrace, mark: float, now: int) -> float:
    """How often the owner's use has climbed above a mark, the longer ago the less; between tenths in proportion."""
    if not trail.rises:
        return 0.0
    place = min(max(mark / 100 - 1, 0.0), TENTHS - 1.0)
    below = int(place)
    above = min(below + 1, TENTHS - 1)
    part = place - below
    return (trail.rises[below] * (1 - part) + trail.rises[above] * part) * faded(now - trail.counted_at_ms)
