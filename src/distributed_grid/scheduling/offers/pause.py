"""Pauses of an offer: nothing new is placed while the last minute is above the mark, after reclaims or failed starts
in a row, and while the disk of the jobs is full.

Whether a resource is offered at all is decided slowly (`owner_activity`); a pause begins with the mean of the last
minute, or of the dwell where that is shorter. The mean is exact, by integrals over the measurements: each stands for
the time since the one before it.

A pause ends once the last minute is at or below the mark, if the use was above it in at most a tenth of the last hour;
else after a dwell at or below it. For that the use is smoothed over five minutes: bursts of seconds are not a load. So
a single busy moment pauses no longer than it lasts, an owner whose use swings around the mark is not lent to and taken
back from all the time, and one who has left after hours of work is believed after the dwell.

A node that takes back what was placed on it, time after time, rests: its owner is at home, or its agent is out of
order. Either way a job that is placed there at once is requeued at once, and so on for ever. After the second time in a
row the node offers nothing for `FIRST_REST_MS`, after each further one for twice as long, up to `MAX_REST_MS`. A node
that has kept what was placed on it for a while (`SETTLED_MS`, or as long as it rested) begins anew. Leases placed
before the last reclaim belong to it: an owner takes all back at once.

A node that does not start what was placed on it rests at once, since each such job has lost a minute there: for
`FIRST_START_REST_MS`, and twice as long after each further time in a row, up to `MAX_START_REST_MS`. An attempt that
starts there ends that.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, log

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.nodes import Node, NodeObservation, OfferThresholds, Usage
from distributed_grid.domain.resources import Capacity
from distributed_grid.domain.statistics import MarkHistory, RecentUsage

WINDOW_MS = 60_000
HISTORY_MS = 3_600_000  # the time constant with which older minutes above the mark count less
LEVEL_MS = 300_000  # the time constant of the level that is compared with the mark for this
MAX_ABOVE_SHARE = 0.1  # of the last hour: with more of it above the mark a pause lasts for a dwell
MIN_STEP_MS = 1_000
"""Integrals closer together than this are thinned, so that nobody who reports often makes the history long."""
FIRST_REST_MS = 10_000
MAX_REST_MS = 600_000
SETTLED_MS = 60_000
FIRST_START_REST_MS = 60_000
MAX_START_REST_MS = 3_600_000
DISK_RESERVE_BYTES = 64 << 20
DISK_RESERVE_DIVISOR = 20
"""A disk is full with less than the reserve free, or less than this part of a small one. It has room again with twice
as much."""
_MAX_DOUBLINGS = 16


class OfferPause(Struct, frozen=True, kw_only=True):
    """A resource that is paused: a GPU with its `index`; the mark, and the mean of the last minute.

    While that is above the mark, `returns_at_ms` is the earliest return: when the mean would be at the mark were
    nothing used from now on. Else it is the return if the mean stays there, and `above_milli` is the part of the last
    hour in which it was above.
    """

    resource: str
    mark_milli: int
    measured_milli: int
    returns_at_ms: int
    index: int = 0
    above_milli: int = 0

    @property
    def name(self) -> str:
        return f"{self.resource}{self.index}" if self.resource == "gpu" else self.resource

    def __str__(self) -> str:
        what = {"cpu": "CPU", "memory": "memory"}.get(self.resource, f"GPU {self.index}")
        used, mark = f"{what} {percent(self.measured_milli)} over the last minute", percent(self.mark_milli)
        if self.measured_milli > self.mark_milli:
            return f"{used}, limit {mark}"
        return f"{used}, above its limit of {mark} in {percent(self.above_milli)} of the last hour"


def percent(milli: int) -> str:
    return f"{milli / 10:g} %"


def update_recent(node: Node, usage: Usage, seen: NodeObservation | None, now: int) -> RecentUsage | None:
    """The use lately after one more measurement; None without thresholds. It begins anew after a silence longer than
    the node's offer, and with other GPUs."""
    limits = node.thresholds
    if limits is None:
        return None
    old = seen.recent if seen is not None and now - seen.at_ms <= node.offer_ms else None
    if not usage.cpu_measured:
        return old
    busy = {gpu.index: gpu.busy_milli for gpu in usage.gpus}
    memory = 1000 * usage.memory_outside_bytes // max(node.capacity.memory_bytes, 1)
    values = (usage.cpu_outside_milli, memory, *(busy.get(device.index, 0) for device in node.lendable.gpus))
    if old is None or len(old.last) != len(values):
        recent, passed_ms = RecentUsage(((now, *(0 for _ in values)),), values), 0
    else:
        passed_ms = max(now - old.integrals[-1][0], 0)
        recent = replace(old, integrals=_extended(old.integrals, values, now), last=values)
    minute = tuple(mean(recent, at, min(WINDOW_MS, limits.dwell_ms)) for at in range(len(values)))
    known = recent.marks or tuple(MarkHistory(float(value)) for value in values)
    marks = (
        _update_history(old, value, used > mark, mark, passed_ms, now, limits.dwell_ms)
        for old, value, used, mark in zip(known, values, minute, _marks(node, limits), strict=True)
    )
    return replace(recent, minute=minute, marks=tuple(marks))


def _extended(steps: tuple[tuple[int, ...], ...], values: tuple[int, ...], now: int) -> tuple[tuple[int, ...], ...]:
    """The integrals with those up to now, without the ones that are older than the last minute."""
    at_ms, *sums = steps[-1]
    passed_ms = now - at_ms
    if passed_ms <= 0:
        return steps
    newest = (now, *(total + value * passed_ms for total, value in zip(sums, values, strict=True)))
    if len(steps) > 1 and at_ms - steps[-2][0] < MIN_STEP_MS:
        steps = steps[:-1]
    first = 0
    while first + 1 < len(steps) and steps[first + 1][0] <= now - WINDOW_MS:
        first += 1
    return (*steps[first:], newest)


def _update_history(
    old: MarkHistory, value: int, is_minute_above: bool, mark: int, passed_ms: int, now: int, dwell_ms: int
) -> MarkHistory:
    """The history of one resource after one more measurement, and whether it is paused."""
    level = old.level + (value - old.level) * min(passed_ms / LEVEL_MS, 1.0)
    is_above = level > mark
    share = old.above_share + (is_above - old.above_share) * min(passed_ms / HISTORY_MS, 1.0)
    since_ms = None if is_above else now if old.below_since_ms is None else old.below_since_ms
    is_settling = share > MAX_ABOVE_SHARE and (since_ms is None or now - since_ms < dwell_ms)
    return MarkHistory(level, share, is_minute_above or (old.is_paused and is_settling), since_ms)


def _marks(node: Node, limits: OfferThresholds) -> tuple[int, ...]:
    gpus = (limits.gpu_busy_max_milli for _ in node.lendable.gpus)
    return (limits.cpu_busy_max_milli, limits.memory_used_max_milli, *gpus)


def pauses(node: Node, seen: NodeObservation) -> tuple[OfferPause, ...]:
    limits, recent, idle = node.thresholds, seen.recent, seen.idleness
    if limits is None or recent is None or idle is None:
        return ()
    offered = [("cpu", 0, idle.cpu.lent), ("memory", 0, idle.memory.lent)]
    for device in node.lendable.gpus:
        tendency = idle.gpu(device.index)
        offered.append(("gpu", device.index, tendency is not None and tendency.lent))
    marks, now, paused = _marks(node, limits), recent.integrals[-1][0], []
    for at, (resource, index, lent) in enumerate(offered[: len(recent.marks)]):
        history, used, mark = recent.marks[at], recent.minute[at], marks[at]
        if not lent or not history.is_paused:
            continue
        if used > mark:
            returns_at_ms = _earliest_return(recent, at, min(WINDOW_MS, limits.dwell_ms), mark)
            paused.append(
                OfferPause(
                    resource=resource, mark_milli=mark, measured_milli=used, returns_at_ms=returns_at_ms, index=index
                )
            )
            continue
        fades_at_ms = now + ceil(HISTORY_MS * log(history.above_share / MAX_ABOVE_SHARE))
        since_ms = now if history.below_since_ms is None else history.below_since_ms
        returns_at_ms = min(since_ms + limits.dwell_ms, fades_at_ms)
        paused.append(
            OfferPause(
                resource=resource,
                mark_milli=mark,
                measured_milli=used,
                returns_at_ms=returns_at_ms,
                index=index,
                above_milli=round(1000 * history.above_share),
            )
        )
    return tuple(paused)


def mean(recent: RecentUsage, at: int, window_ms: int) -> int:
    """The mean use of one resource over the window up to the last measurement, rounded up."""
    first, last = recent.integrals[0], recent.integrals[-1]
    begin = max(last[0] - window_ms, first[0])
    if last[0] == begin:
        return recent.last[at]
    until_begin = last[at + 1]  # its integral up to the beginning of the window, rounded down
    for (before, *was), (after, *then) in pairwise(recent.integrals):
        if begin <= after:
            until_begin = int(was[at] + (then[at] - was[at]) * (begin - before) // (after - before))
            break
    return -((until_begin - last[at + 1]) // (last[0] - begin))


def _earliest_return(recent: RecentUsage, at: int, window_ms: int, mark: int) -> int:
    """When the mean would be at the mark, were nothing used from now on."""
    began, now, total = recent.integrals[0][0], recent.integrals[-1][0], recent.integrals[-1][at + 1]
    if mark:
        within = began - -(total - recent.integrals[0][at + 1]) // mark
        if now <= within <= began + window_ms:
            return int(within)
    for (before, *was), (after, *then) in pairwise(recent.integrals):
        if total - then[at] <= mark * window_ms:
            used = then[at] - was[at]
            short = total - was[at] - mark * window_ms
            moment = before if short <= 0 else before - -short * (after - before) // used
            return max(int(moment) + window_ms, now)
    return now + window_ms


def without_paused(lends: Capacity, paused: tuple[OfferPause, ...]) -> Capacity:
    """The part of an offer that something new may be placed on."""
    names = {pause.name for pause in paused}
    return Capacity(
        0 if "cpu" in names else lends.cpu_milli,
        0 if "memory" in names else lends.memory_bytes,
        tuple(device for device in lends.gpus if f"gpu{device.index}" not in names),
        lends.custom,
    )


def count_reclaim(seen: NodeObservation, placed_at_ms: int, now: int) -> NodeObservation:
    """Count a reclaim of leases placed at `placed_at_ms`."""
    if seen.reclaims and placed_at_ms < seen.reclaimed_at_ms:
        return seen
    rest_ms = _rest_ms(seen.reclaims)
    kept_ms = now - seen.reclaimed_at_ms - rest_ms
    in_a_row = seen.reclaims if kept_ms < max(SETTLED_MS, rest_ms) else 0
    return replace(seen, reclaims=in_a_row + 1, reclaimed_at_ms=now)


def count_failed_start(seen: NodeObservation, placed_at_ms: int, now: int) -> NodeObservation:
    """Count a failed start; jobs placed together count once."""
    if seen.failed_starts and placed_at_ms < seen.start_failed_at_ms:
        return seen
    return replace(seen, failed_starts=seen.failed_starts + 1, start_failed_at_ms=now)


def count_start(seen: NodeObservation) -> NodeObservation:
    """Clear the count of failed starts after a successful start."""
    return replace(seen, failed_starts=0, start_failed_at_ms=0) if seen.failed_starts else seen


def rest_left_ms(seen: NodeObservation | None, now: int) -> int:
    """How long the node offers nothing yet; 0 where it may."""
    if seen is None:
        return 0
    reclaim_rest_ms = seen.reclaimed_at_ms + _rest_ms(seen.reclaims) - now if seen.reclaims else 0
    return max(reclaim_rest_ms, start_rest_left_ms(seen, now), 0)


def start_rest_left_ms(seen: NodeObservation, now: int) -> int:
    """Remaining rest after failed starts; 0 if there is none."""
    if not seen.failed_starts:
        return 0
    rest_ms = min(FIRST_START_REST_MS << min(seen.failed_starts - 1, _MAX_DOUBLINGS), MAX_START_REST_MS)
    return max(seen.start_failed_at_ms + rest_ms - now, 0)


def rest_reason(seen: NodeObservation | None, now: int) -> str:
    """Why and for how long a node rests; empty where it does not."""
    left_ms = rest_left_ms(seen, now)
    if seen is None or not left_ms:
        return ""
    if left_ms == start_rest_left_ms(seen, now):
        times = "" if seen.failed_starts == 1 else f", {seen.failed_starts} times in a row"
        return f"rests for {duration(left_ms)}: it did not start what it was given{times}"
    return f"took work back {seen.reclaims} times in a row; it lends again in {-(-left_ms // 1000)} s"


def duration(ms: int) -> str:
    return f"{-(-ms // 1000)} s" if ms <= 120_000 else f"{-(-ms // 60_000)} min"


def disk_reserve(disk_bytes: int) -> int:
    return min(DISK_RESERVE_BYTES, disk_bytes // DISK_RESERVE_DIVISOR)


def is_disk_full(usage: Usage, was_full: bool) -> bool:
    """True if the disk of a node's jobs is full; a disk that was full needs twice the reserve free."""
    reserve = disk_reserve(usage.disk_bytes)
    return usage.disk_bytes > 0 and usage.disk_free_bytes < (2 * reserve if was_full else reserve)


def disk_reason(usage: Usage) -> str:
    return f"its disk is full ({usage.disk_free_bytes / (1 << 20):.0f} MB left)"


def _rest_ms(reclaims: int) -> int:
    """Length of the rest after this number of reclaims in a row."""
    return min(FIRST_REST_MS << min(reclaims - 2, _MAX_DOUBLINGS), MAX_REST_MS) if reclaims > 1 else 0
