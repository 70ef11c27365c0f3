"""Owner activity of a node, updated with every measurement: idleness (lend or not) and volatility (how use moves).

Idleness is a threshold with hysteresis over smoothed usage. A lent resource is kept again after half the dwell above
threshold plus margin; a kept one is lent after the whole dwell at or below the threshold, or half of it if it was never
lent. A GPU that is clearly in use is kept at once: it can be neither slowed down nor lent in part. With a dwell and a
margin of 0 it is a plain threshold.

Volatility smooths away what lasts less than half a minute, as the agent does not evict for that. A rise is a climb by a
twentieth of the node or more. Drift is measured every few minutes; a jump counts as a rise, and as drift only up to
what was to be expected.

Both begin anew after a silence longer than the node's offer.
"""

from __future__ import annotations

from math import sqrt

from msgspec import Struct

from distributed_grid.domain.nodes import Node, NodeObservation, OfferThresholds, Usage
from distributed_grid.domain.resources import GpuDevice
from distributed_grid.domain.statistics import Idleness, IdleTendency, UsageTrace, UsageVolatility

STOP_DIVISOR = 2
"""Lending stops after this part of the dwell: the owner's return is believed sooner than the owner's absence."""
SMOOTHING_DIVISOR = 6
"""The time constant of smoothing, as a part of the dwell."""


class _Elapsed(Struct, frozen=True):
    """The moment of a measurement, how long after the last one, and how long things take."""

    now: int
    passed_ms: int
    dwell_ms: int


class _IdleMarks(Struct, frozen=True):
    """Up to `start` a level says "lend", above `stop` it says "keep"; in between it says nothing."""

    start: int
    stop: int


def update_idleness(node: Node, usage: Usage, seen: NodeObservation | None, now: int) -> Idleness | None:
    """The idleness of a node after one more measurement; None without thresholds, and before the first measurement of
    the CPU. A GPU that was never measured has none."""
    limits = node.thresholds
    if limits is None:
        return None
    passed_ms = max(now - seen.at_ms, 0) if seen is not None else 0
    old = seen.idleness if seen is not None and passed_ms <= node.offer_ms else None
    if not usage.cpu_measured:
        return old
    elapsed = _Elapsed(now, passed_ms, limits.dwell_ms)
    if usage.gpus_measured:
        gpus = tuple(
            (gpu.index, _gpu_tendency(old.gpu(gpu.index) if old else None, gpu, usage, limits, elapsed))
            for gpu in node.lendable.gpus
        )
    else:
        gpus = old.gpus if old else ()
    return Idleness(
        _update_tendency(old.cpu if old else None, usage.cpu_outside_milli, _cpu_marks(node, limits), elapsed),
        _update_tendency(old.memory if old else None, usage.memory_outside_bytes, _memory_marks(node, limits), elapsed),
        gpus,
    )


def _update_tendency(old: IdleTendency | None, measured: int, marks: _IdleMarks, elapsed: _Elapsed) -> IdleTendency:
    """The same resource after one more measurement."""
    if old is None:
        return IdleTendency(measured <= marks.start, measured)
    level = _smoothed(old.level, measured, elapsed)
    against = level > marks.stop if old.lent else level <= marks.start
    if not against:
        return IdleTendency(old.lent, level, None, old.turned)
    since = elapsed.now if old.against_since_ms is None else old.against_since_ms
    soon = old.lent or not old.turned
    if elapsed.now - since < (elapsed.dwell_ms // STOP_DIVISOR if soon else elapsed.dwell_ms):
        return IdleTendency(old.lent, level, since, old.turned)
    return IdleTendency(not old.lent, level, None, True)


def _smoothed(level: int, measured: int, elapsed: _Elapsed) -> int:
    """A step towards the measurement, the larger the more time has passed; rounded up, so that it arrives."""
    slowness_ms = elapsed.dwell_ms // SMOOTHING_DIVISOR
    if not slowness_ms:
        return measured
    step = -(-abs(measured - level) * elapsed.passed_ms // (elapsed.passed_ms + slowness_ms))
    return level + step if measured > level else level - step


def _cpu_marks(node: Node, limits: OfferThresholds) -> _IdleMarks:
    has = node.capacity.cpu_milli
    enough_left = 1000 - -(-1000 * limits.cpu_min_milli // has) if has else -1
    most = limits.cpu_busy_max_milli
    return _IdleMarks(min(most, enough_left), min(most + limits.margin_milli, enough_left))


def _memory_marks(node: Node, limits: OfferThresholds) -> _IdleMarks:
    has, most = node.capacity.memory_bytes, limits.memory_used_max_milli
    enough_left = has - limits.memory_min_bytes
    start, stop = (((milli + 1) * has - 1) // 1000 for milli in (most, most + limits.margin_milli))
    return _IdleMarks(min(start, enough_left), min(stop, enough_left))


def _gpu_tendency(
    old: IdleTendency | None, device: GpuDevice, usage: Usage, limits: OfferThresholds, elapsed: _Elapsed
) -> IdleTendency:
    """A device; one that nobody measured counts as idle, one without enough free memory as busy."""
    seen = next((gpu for gpu in usage.gpus if gpu.index == device.index), None)
    busy = seen.busy_milli if seen is not None else 0
    marks = _IdleMarks(limits.gpu_busy_max_milli, limits.gpu_busy_max_milli + limits.margin_milli)
    if seen is not None and device.memory_bytes - seen.memory_bytes < limits.gpu_memory_min_bytes:
        marks = _IdleMarks(-1, -1)
    new = _update_tendency(old, busy, marks, elapsed)
    if new.lent and busy > marks.stop:
        return IdleTendency(False, new.level, None, True)
    return new


SMOOTHING_MS = 30_000
DRIFT_STEP_MS = 300_000
"""How far apart the levels are that drift is measured between."""
DRIFT_WEIGHT = 0.1
"""Weight of one step, so that the last hour counts most."""
HALF_LIFE_MS = 12 * 3_600_000
"""A rise counts half after so long. Of 6, 12 and 24 hours the held-out machines of `bench/confidence.py` liked the
longer ones best, by little; owners are different tomorrow."""
TENTHS = 10
MIN_RISE = 50.0
JUMP_DEVIATIONS = 2.0
"""In standard deviations: a larger step is a jump."""
NOISE_MILLI = 5.0
"""A smaller step is never a jump, in thousandths of the node."""
HOUR_MS = 3_600_000


def update_volatility(node: Node, usage: Usage, seen: NodeObservation | None, now: int) -> UsageVolatility | None:
    """The volatility of a node after one more measurement; None without thresholds."""
    limits = node.thresholds
    if limits is None:
        return None
    old = seen.volatility if seen is not None and now - seen.at_ms <= node.offer_ms else None
    if not usage.cpu_measured:
        return old
    passed_ms = max(now - seen.at_ms, 0) if seen is not None else 0
    memory = 1000 * usage.memory_outside_bytes / max(node.capacity.memory_bytes, 1)
    gpu = _gpu_use(node, usage)
    return UsageVolatility(
        _extend_trace(old.cpu if old else None, float(usage.cpu_outside_milli), passed_ms, now),
        _extend_trace(old.memory if old else None, memory, passed_ms, now),
        None if gpu is None else _extend_trace(old.gpu if old else None, gpu, passed_ms, now),
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


def _extend_trace(old: UsageTrace | None, use: float, passed_ms: int, now: int) -> UsageTrace:
    """The trace with one more measurement, that of the time passed since the last."""
    if old is None:
        return UsageTrace(use, use, use, use, now, now, now)
    level = old.level + (use - old.level) * min(passed_ms / SMOOTHING_MS, 1.0)
    anchor, anchored_at_ms, drift = old.anchor, old.anchored_at_ms, old.drift
    if now - anchored_at_ms >= DRIFT_STEP_MS:
        drift = _updated_drift(old, level, now)
        anchor, anchored_at_ms = level, now
    trough, crest, rises, counted_at_ms = old.trough, old.crest, old.rises, old.counted_at_ms
    if level <= crest - MIN_RISE:
        trough = crest = level
    elif level < trough:
        trough = level
    elif level > crest:
        if int(level) // 100 > int(crest) // 100:
            rises, counted_at_ms = _count_rise(old, level, now), now
        crest = level
    return UsageTrace(level, trough, crest, anchor, anchored_at_ms, old.since_ms, counted_at_ms, drift, rises)


def _updated_drift(old: UsageTrace, level: float, now: int) -> float:
    """The drift after one more stride."""
    hours = (now - old.anchored_at_ms) / HOUR_MS
    step = min(abs(level - old.anchor), JUMP_DEVIATIONS * sqrt(old.drift * hours) + NOISE_MILLI)
    return old.drift + DRIFT_WEIGHT * (step * step / hours - old.drift)


def _count_rise(old: UsageTrace, level: float, now: int) -> tuple[float, ...]:
    """The counts with a climb to this level among them."""
    fade = decay(now - old.counted_at_ms)
    counts = [count * fade for count in old.rises] or [0.0] * TENTHS
    for tenth in range(TENTHS):
        mark = 100 * (tenth + 1)
        if old.crest < mark <= level and mark - old.trough >= MIN_RISE:
            counts[tenth] += 1.0
    return tuple(counts)


def decay(age_ms: int) -> float:
    """How much still counts of what is so old."""
    return float(2.0 ** (-age_ms / HALF_LIFE_MS))


def rises_above(trace: UsageTrace, mark: float, now: int) -> float:
    """How often the owner's use has climbed above a mark, the longer ago the less; between tenths in proportion."""
    if not trace.rises:
        return 0.0
    place = min(max(mark / 100 - 1, 0.0), TENTHS - 1.0)
    below = int(place)
    above = min(below + 1, TENTHS - 1)
    part = place - below
    return (trace.rises[below] * (1 - part) + trace.rises[above] * part) * decay(now - trace.counted_at_ms)
