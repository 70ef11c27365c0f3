"""Whether a node is idle enough to lend: by what it did for a while, never by one moment.

Rule 1: measurements count smoothed, whatever their distance in time. Only the first counts as it is, and so does
the first after a silence that has outlasted the node's offer.
Rule 2: what is lent stays so until its level was above the mark and the margin for half the dwell. What is kept
stays so until its level was at the mark or below for the whole dwell, or for half of it where it was never lent.
Rule 3: a GPU can be neither slowed down nor lent in part: when it is clearly in use it is kept at once.
Rule 4: this decides about lending at all. How much is lent follows the last measurement (`lending`).
With a dwell and a margin of 0 it is a plain threshold.
"""

from __future__ import annotations

from msgspec import Struct

from distributed_grid.domain.node_statistics import Idleness, IdleTendency
from distributed_grid.domain.nodes import Node, NodeObservation, OfferThresholds, Usage
from distributed_grid.domain.resources import GpuDevice

STOP_PART = 2
"""Lending stops after this part of the dwell: the owner's return is believed sooner than the owner's absence."""
SMOOTH_PART = 6
"""The time constant of smoothing, as a part of the dwell."""


class _Pace(Struct, frozen=True):
    """The moment of a measurement, how long after the last one, and how long things take."""

    now: int
    passed_ms: int
    dwell_ms: int


class _Marks(Struct, frozen=True):
    """Up to `start` a level says "lend", above `stop` it says "keep"; in between it says nothing."""

    start: int
    stop: int


def idleness(node: Node, usage: Usage, seen: NodeObservation | None, now: int) -> Idleness | None:
    """What a node lends and keeps after one more measurement; None where no thresholds ask."""
    limits = node.thresholds
    if limits is None:
        return None
    passed_ms = max(now - seen.at_ms, 0) if seen is not None else 0
    old = seen.idleness if seen is not None and passed_ms <= node.offer_ms else None
    pace = _Pace(now, passed_ms, limits.dwell_ms)
    devices = node.lendable.gpus
    return Idleness(
        _weigh(old.cpu if old else None, usage.cpu_outside_milli, _cpu_marks(node, limits), pace),
        _weigh(old.memory if old else None, usage.memory_outside_bytes, _memory_marks(node, limits), pace),
        tuple((gpu.index, _gpu(old.gpu(gpu.index) if old else None, gpu, usage, limits, pace)) for gpu in devices),
    )


def _weigh(old: IdleTendency | None, measured: int, marks: _Marks, pace: _Pace) -> IdleTendency:
    """The same resource after one more measurement."""
    if old is None:
        return IdleTendency(measured <= marks.start, measured)
    level = _smoothed(old.level, measured, pace)
    against = level > marks.stop if old.lent else level <= marks.start
    if not against:
        return IdleTendency(old.lent, level, None, old.turned)
    since = pace.now if old.against_since_ms is None else old.against_since_ms
    soon = old.lent or not old.turned
    if pace.now - since < (pace.dwell_ms // STOP_PART if soon else pace.dwell_ms):
        return IdleTendency(old.lent, level, since, old.turned)
    return IdleTendency(not old.lent, level, None, True)


def _smoothed(level: int, measured: int, pace: _Pace) -> int:
    """A step towards the measurement, the larger the more time has passed; rounded up, so that it arrives."""
    slowness_ms = pace.dwell_ms // SMOOTH_PART
    if not slowness_ms:
        return measured
    step = -(-abs(measured - level) * pace.passed_ms // (pace.passed_ms + slowness_ms))
    return level + step if measured > level else level - step


def _cpu_marks(node: Node, limits: OfferThresholds) -> _Marks:
    has = node.capacity.cpu_milli
    enough_left = 1000 - -(-1000 * limits.cpu_min_milli // has) if has else -1
    most = limits.cpu_busy_max_milli
    return _Marks(min(most, enough_left), min(most + limits.margin_milli, enough_left))


def _memory_marks(node: Node, limits: OfferThresholds) -> _Marks:
    has, most = node.capacity.memory_bytes, limits.memory_used_max_milli
    enough_left = has - limits.memory_min_bytes
    start, stop = (((milli + 1) * has - 1) // 1000 for milli in (most, most + limits.margin_milli))
    return _Marks(min(start, enough_left), min(stop, enough_left))


def _gpu(
    old: IdleTendency | None, device: GpuDevice, usage: Usage, limits: OfferThresholds, pace: _Pace
) -> IdleTendency:
    """A device; one that nobody measured counts as idle, one without enough free memory as busy."""
    seen = next((gpu for gpu in usage.gpus if gpu.index == device.index), None)
    busy = seen.busy_milli if seen is not None else 0
    marks = _Marks(limits.gpu_busy_max_milli, limits.gpu_busy_max_milli + limits.margin_milli)
    if seen is not None and device.memory_bytes - seen.memory_bytes < limits.gpu_memory_min_bytes:
        marks = _Marks(-1, -1)
    new = _weigh(old, busy, marks, pace)
    if new.lent and busy > marks.stop:
        return IdleTendency(False, new.level, None, True)
    return new
