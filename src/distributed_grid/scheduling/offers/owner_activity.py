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
SMOOTHING_DIVISOR = 6  # the time constant of smoothing, as a part of the dwell


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
    cores, most_cpu = node.capacity.cpu_milli, limits.cpu_busy_max_milli
    most_idle_cpu = 1000 - -(-1000 * limits.cpu_min_milli // cores) if cores else -1
    cpu_marks = _IdleMarks(min(most_cpu, most_idle_cpu), min(most_cpu + limits.margin_milli, most_idle_cpu))
    memory, most_memory = node.capacity.memory_bytes, limits.memory_used_max_milli
    most_idle_memory = memory - limits.memory_min_bytes
    start, stop = (((milli + 1) * memory - 1) // 1000 for milli in (most_memory, most_memory + limits.margin_milli))
    memory_marks = _IdleMarks(min(start, most_idle_memory), min(stop, most_idle_memory))
    return Idleness(
        _update_tendency(old.cpu if old else None, usage.cpu_outside_milli, cpu_marks, elapsed),
        _update_tendency(old.memory if old else None, usage.memory_outside_bytes, memory_marks, elapsed),
        gpus,
    )


def _update_tendency(old: IdleTendency | None, measured: int, marks: _IdleMarks, elapsed: _Elapsed) -> IdleTendency:
    if old is None:
        return IdleTendency(measured <= marks.start, measured)
    level, slowness_ms = measured, elapsed.dwell_ms // SMOOTHING_DIVISOR
    if slowness_ms:  # a step towards the measurement, proportional to the time passed; rounded up, so that it arrives
        step = -(-abs(measured - old.level) * elapsed.passed_ms // (elapsed.passed_ms + slowness_ms))
        level = old.level + step if measured > old.level else old.level - step
    against = level > marks.stop if old.lent else level <= marks.start
    if not against:
        return IdleTendency(old.lent, level, None, old.turned)
    since = elapsed.now if old.against_since_ms is None else old.against_since_ms
    soon = old.lent or not old.turned
    if elapsed.now - since < (elapsed.dwell_ms // STOP_DIVISOR if soon else elapsed.dwell_ms):
        return IdleTendency(old.lent, level, since, old.turned)
    return IdleTendency(not old.lent, level, None, True)


def _gpu_tendency(
    old: IdleTendency | None, device: GpuDevice, usage: Usage, limits: OfferThresholds, elapsed: _Elapsed
) -> IdleTendency:
    """Tendency of a device; unmeasured counts as idle, too little free memory as busy."""
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
DRIFT_STEP_MS = 300_000  # how far apart the levels are that drift is measured between
DRIFT_WEIGHT = 0.1  # weight of one step, so that the last hour counts most
HALF_LIFE_MS = 12 * 3_600_000
"""A rise counts half after so long. Of 6, 12 and 24 hours the held-out machines of `bench/confidence.py` liked the
longer ones best, by little; owners are different tomorrow."""
TENTHS = 10
MIN_RISE = 50.0
JUMP_DEVIATIONS = 2.0  # in standard deviations: a larger step is a jump
NOISE_MILLI = 5.0  # a smaller step is never a jump, in thousandths of the node
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
    gpu, limits, lent = None, node.thresholds, {device.index: device.memory_bytes for device in node.lendable.gpus}
    if lent and limits is not None:
        devices = [device for device in usage.gpus if device.index in lent]
        gpu = float(max((device.busy_milli for device in devices), default=0))
        if any(lent[device.index] - device.memory_bytes < limits.gpu_memory_min_bytes for device in devices):
            gpu = 1000.0  # without the memory that must be free, all of the device is in use
    return UsageVolatility(
        _extend_trace(old.cpu if old else None, float(usage.cpu_outside_milli), passed_ms, now),
        _extend_trace(old.memory if old else None, memory, passed_ms, now),
        None if gpu is None else _extend_trace(old.gpu if old else None, gpu, passed_ms, now),
    )


def _extend_trace(old: UsageTrace | None, use: float, passed_ms: int, now: int) -> UsageTrace:
    """The trace with one more measurement, that of the time passed since the last."""
    if old is None:
        return UsageTrace(
            level=use, trough=use, crest=use, anchor=use, anchored_at_ms=now, since_ms=now, counted_at_ms=now
        )
    level = old.level + (use - old.level) * min(passed_ms / SMOOTHING_MS, 1.0)
    anchor, anchored_at_ms, drift = old.anchor, old.anchored_at_ms, old.drift
    if now - anchored_at_ms >= DRIFT_STEP_MS:
        hours = (now - anchored_at_ms) / HOUR_MS
        step = min(abs(level - anchor), JUMP_DEVIATIONS * sqrt(drift * hours) + NOISE_MILLI)
        drift += DRIFT_WEIGHT * (step * step / hours - drift)
        anchor, anchored_at_ms = level, now
    trough, crest, rises, counted_at_ms = old.trough, old.crest, old.rises, old.counted_at_ms
    if level <= crest - MIN_RISE:
        trough = crest = level
    elif level < trough:
        trough = level
    elif level > crest:
        if int(level) // 100 > int(crest) // 100:
            fade = decay(now - counted_at_ms)
            counts = [count * fade for count in rises] or [0.0] * TENTHS
            for tenth in range(TENTHS):
                mark = 100 * (tenth + 1)
                if crest < mark <= level and mark - trough >= MIN_RISE:
                    counts[tenth] += 1.0
            rises, counted_at_ms = tuple(counts), now
        crest = level
    return UsageTrace(
        level=level,
        trough=trough,
        crest=crest,
        anchor=anchor,
        anchored_at_ms=anchored_at_ms,
        since_ms=old.since_ms,
        counted_at_ms=counted_at_ms,
        drift=drift,
        rises=rises,
    )


def decay(age_ms: int) -> float:
    """Weight of an observation of this age."""
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
