"""Eviction policy: which borrowed work has to end, because its owner needs what only that gives back. Pure.

- Memory is taken back when less is available than the rules keep free and the owner is the reason: who stays within a
  lease beside an owner who did not grow is left alone.
- Those are evicted with whom the least work is lost together: cores times the time since the start or the last
  checkpoint mark. An eviction counts as much as a core for a minute, so that few are evicted where it is about the
  same.
- Whoever has to end is warned first, and spared when the need passes before the time is up. Only a machine that is
  about to swap or to kill takes no such time.
- A GPU is taken back when its owner is seen on it several times in a row; what cannot be measured says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.resources import gigabytes
from distributed_grid.scheduling.preemption.weighted_cover import CoverItem, lightest_cover
from distributed_grid.wire import OwnerRules

MB = 1024**2
WORTH_BYTES = 32 * MB  # who holds less is not worth ending for its memory
TO_GO = 1000 * 60_000  # what it costs to go, besides the work that is lost: a core for a minute
URGENT_PART = 50  # thousandths of the memory; with less available the machine swaps or kills
URGENT_GRACE_MS = 2_000
RELIEF_PART = 1100  # thousandths of what is kept free; who was warned is spared only above that
GPU_SAMPLES = 3


class Borrowed(Struct, frozen=True):
    """An attempt that runs here: what it has leased, what it holds, and what is at stake: the work that would be lost
    with it, in thousandths of cores times milliseconds. One that may not run again is not evicted for the CPU while the
    rules allow to slow it down or to pause it."""

    attempt_id: str
    node: str = ""
    cpu_milli: int = 0
    memory_leased_bytes: int = 0
    memory_bytes: int = 0
    gpu_indexes: tuple[int, ...] = ()
    at_stake: int = 0
    may_run_again: bool = True


class OwnerOnGpu(Struct, frozen=True):
    """What others than the grid use of a device, and how much memory they leave."""

    index: int
    busy_milli: int
    free_bytes: int


class UsageSample(Struct, frozen=True):
    """What was measured at one moment: thousandths of cores over the last moments, bytes now; the attempts
    with the most work to lose first.

    `machine_milli` is all there is, `outside_milli` the owner's, `own_milli` the borrowed work's. `gpus` is None when
    they were not measured.
    """

    machine_milli: int
    outside_milli: int
    own_milli: int = 0
    attempts: tuple[Borrowed, ...] = ()
    memory_bytes: int = 0
    memory_available_bytes: int = 0
    memory_outside_bytes: int = 0
    gpus: tuple[OwnerOnGpu, ...] | None = None

    @property
    def idle_milli(self) -> int:
        return max(0, self.machine_milli - self.outside_milli - self.own_milli)

    @property
    def leased_milli(self) -> int:
        """The most that borrowed work can want; who has leased no CPU may want it all."""
        wanted = sum(one.cpu_milli or self.machine_milli for one in self.attempts)
        return min(self.machine_milli, wanted)


class EvictionReason(Struct, frozen=True):
    """Why one has to go; `urgent` leaves no time for a warning."""

    why: str
    urgent: bool = False


class PlannedEviction(Struct, frozen=True):
    """Somebody who was warned; `stopping` cannot be spared any more."""

    attempt_id: str
    reason: EvictionReason
    at_ms: int
    stopping: bool = False


class Warn(Struct, frozen=True):
    """Say to an attempt that it will be stopped, why, and in how many milliseconds."""

    attempt_id: str
    why: str
    in_ms: int


class CancelEviction(Struct, frozen=True):
    """Take a warning back."""

    attempt_id: str


class Evict(Struct, frozen=True):
    """Stop an attempt; the control plane queues its job again."""

    attempt_id: str
    why: str
    grace_ms: int


_ANYTHING = 1 << 100
Reclaim = Warn | CancelEviction | Evict
Hints = tuple[tuple[int, int], ...]
"""By GPU: how many samples in a row showed its owner."""


def reclaim(
    evictions: tuple[PlannedEviction, ...],
    gpu_hints: Hints,
    sample: UsageSample,
    rules: OwnerRules,
    now_ms: int,
    starved: Mapping[str, EvictionReason],
) -> tuple[tuple[PlannedEviction, ...], Hints, tuple[Reclaim, ...]]:
    """The evictions that are planned now, what GPUs have shown, and what has to be done; `starved` end for the CPU."""
    here = {one.attempt_id for one in sample.attempts}
    evictions = tuple(one for one in evictions if one.attempt_id in here)
    if sample.gpus is None:
        pass
    else:
        before = dict(gpu_hints)
        hints = tuple(
            (gpu.index, before.get(gpu.index, 0) + 1)
            for gpu in sample.gpus
            if gpu.busy_milli > rules.gpu_busy_max_milli or gpu.free_bytes < rules.gpu_memory_min_bytes
        )
    if not rules.evict:
        return evictions, hints, ()
    wanted = {**starved, **_for_gpus(hints, sample), **_for_memory(evictions, sample, rules)}
    actions: list[Reclaim] = []
    after: list[PlannedEviction] = []
    for one in evictions:
        if one.stopping:
            after.append(one)
        elif one.attempt_id not in wanted:
            actions.append(CancelEviction(one.attempt_id))
        else:
            after.append(replace(one, reason=wanted[one.attempt_id]))
    known = {one.attempt_id for one in after}
    for attempt_id, reason in wanted.items():
        if attempt_id not in known:
            after.append(PlannedEviction(attempt_id, reason, now_ms + rules.notice_ms))
            if rules.notice_ms and not reason.urgent:
                actions.append(Warn(attempt_id, reason.why, rules.notice_ms))
    for at, one in enumerate(after):
        if not one.stopping and (now_ms >= one.at_ms or one.reason.urgent):
            grace_ms = min(rules.grace_ms, URGENT_GRACE_MS) if one.reason.urgent else rules.grace_ms
            actions.append(Evict(one.attempt_id, one.reason.why, grace_ms))
            after[at] = replace(one, stopping=True)
    return tuple(after), hints, tuple(actions)


# ------------------------------------------------------------------ memory


def _for_memory(
    evictions: Iterable[PlannedEviction], sample: UsageSample, rules: OwnerRules
) -> dict[str, EvictionReason]:
    already = {one.attempt_id for one in evictions}
    keep = rules.memory_min_bytes * (RELIEF_PART if already else 1000) // 1000
    keep = min(max(keep, 1), sample.memory_bytes)
    short = keep - sample.memory_available_bytes
    if short <= 0 or not sample.memory_bytes or not _owner_grew(sample, rules):
        return {}
    urgent = 1000 * sample.memory_available_bytes < URGENT_PART * sample.memory_bytes
    free, must = gigabytes(sample.memory_available_bytes), gigabytes(rules.memory_min_bytes)
    return {
        one.attempt_id: EvictionReason(f"its owner needs {one.node}'s memory: {free} free, {must} must be", urgent)
        for one in cheapest(sample.attempts, short, already)
    }


def _owner_grew(sample: UsageSample, rules: OwnerRules) -> bool:
    """Whether the owner is the reason that memory is short: above its mark, or grown into what was lent."""
    lent = sum(one.memory_leased_bytes for one in sample.attempts)
    beyond = sum(max(0, one.memory_bytes - one.memory_leased_bytes) for one in sample.attempts)
    above = 1000 * sample.memory_outside_bytes > rules.memory_used_max_milli * sample.memory_bytes
    return above or beyond >= WORTH_BYTES or sample.memory_outside_bytes + lent > sample.memory_bytes


def cheapest(attempts: Iterable[Borrowed], short_bytes: int, already: Iterable[str] = ()) -> tuple[Borrowed, ...]:
    """Those who hold `short_bytes` together with the least to lose, the last where it is the same; those `already`
    planned count first. All who are worth it, where all do not hold enough."""
    worth = [one for one in attempts if one.memory_bytes >= WORTH_BYTES]
    planned = set(already)
    chosen = [one for one in worth if one.attempt_id in planned]
    left = [one for one in reversed(worth) if one.attempt_id not in planned]
    short_bytes -= sum(one.memory_bytes for one in chosen)
    apart = len(left) ** 2 + 1  # above any sum of places in the order, which decides where the cost is the same
    items = [CoverItem(apart * (TO_GO + one.at_stake) + at, 0, (one.memory_bytes,)) for at, one in enumerate(left)]
    found = lightest_cover(items, (short_bytes,), _ANYTHING)
    return (*chosen, *(left if found is None else [left[at] for at in found]))


# ------------------------------------------------------------------ GPUs


def _for_gpus(hints: Hints, sample: UsageSample) -> dict[str, EvictionReason]:
    taken = {index for index, samples in hints if samples >= GPU_SAMPLES}
    found = {}
    for one in sample.attempts:
        mine = sorted(taken.intersection(one.gpu_indexes))
        if mine:
            found[one.attempt_id] = EvictionReason(f"its owner needs {one.node}'s GPU {', '.join(map(str, mine))}")
    return found
