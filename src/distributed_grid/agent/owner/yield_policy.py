"""Yield policy: when and how borrowed work yields to the owner of its machine, decided from usage samples. Pure.

- Yielding is immediate, coming back is slow. The owner's need is met at the sample that shows it; room that the owner
  leaves is taken only after it has been left for a while (`dwell`), and for twice as long each time that turned out
  too early.
- On a full machine the owner's use understates its need. So borrowed work first drops to almost nothing, and the
  next sample, on a machine that is no longer full, shows the truth.
- Beside an owner some room always stays idle: else a growing need of the owner would not show.
- Steps go from gentle to final: throttle, pause, evict. One that the rules leave out is skipped. CPU comes back by any
  step, memory and GPUs by eviction only.

Eviction:

- Memory is taken back when less is available than the rules keep free and the owner is the reason: attempts within
  their leases beside an owner who did not grow stay.
- The attempts that together lose the least work are evicted: cores times the time since the start or the last
  checkpoint mark. An eviction counts as much as a core for a minute, so that few are evicted where it is about equal.
- An attempt is warned first, and spared when the need passes before the time is up. Only a machine that is about to
  swap or to kill takes no such time.
- A GPU is taken back when its owner is seen on it several times in a row; a GPU that cannot be measured says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.resources import gigabytes
from distributed_grid.number_text import counted
from distributed_grid.scheduling.preemption.weighted_cover import CoverItem, lightest_cover
from distributed_grid.wire import OwnerRules

MB = 1024**2
WORTH_BYTES = 32 * MB  # an attempt that holds less is not worth ending for its memory
EVICTION_COST = 1000 * 60_000  # of an eviction, besides the lost work: a core for a minute
URGENT_PART = 50  # thousandths of the memory; with less available the machine swaps or kills
URGENT_GRACE_MS = 2_000
RELIEF_PART = 1100  # thousandths of the memory kept free; only above that a warning is withdrawn
GPU_SAMPLES = 3


class Borrowed(Struct, frozen=True):
    """A running attempt: its lease, its use, and the work that would be lost with it, in thousandths of cores times
    milliseconds.

    One that may not run again is not evicted for the CPU while the rules allow to slow it down or to pause it.
    """

    attempt_id: str
    node: str = ""
    cpu_milli: int = 0
    memory_leased_bytes: int = 0
    memory_bytes: int = 0
    gpu_indexes: tuple[int, ...] = ()
    at_stake: int = 0
    may_run_again: bool = True


class OwnerOnGpu(Struct, frozen=True):
    """Foreign use of a device, and the memory left beside it."""

    index: int
    busy_milli: int
    free_bytes: int


class UsageSample(Struct, frozen=True):
    """Measurements of one moment: thousandths of cores over the last moments, bytes now; the attempts with the most
    work to lose first.

    `machine_milli` is the total, `outside_milli` the owner's use, `own_milli` the borrowed work's. `gpus` is None
    when they were not measured.
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
        """Highest possible use by borrowed work; an attempt without leased CPU may use all."""
        wanted = sum(attempt.cpu_milli or self.machine_milli for attempt in self.attempts)
        return min(self.machine_milli, wanted)


class EvictionReason(Struct, frozen=True):
    """Reason of an eviction; `urgent` leaves no time for a warning."""

    why: str
    urgent: bool = False


class PlannedEviction(Struct, frozen=True):
    """Eviction of a warned attempt; while it is not `stopping` it can be cancelled."""

    attempt_id: str
    reason: EvictionReason
    at_ms: int
    stopping: bool = False


class Warn(Struct, frozen=True):
    """Notice to an attempt: the reason of its stop, and its time in milliseconds."""

    attempt_id: str
    why: str
    in_ms: int


class CancelEviction(Struct, frozen=True):
    """Withdraw a warning."""

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
    """Planned evictions, owner hints by GPU, and actions; `starved` attempts end for the CPU."""
    here = {attempt.attempt_id for attempt in sample.attempts}
    evictions = tuple(eviction for eviction in evictions if eviction.attempt_id in here)
    hints = gpu_hints
    if sample.gpus is not None:
        before = dict(gpu_hints)
        hints = tuple(
            (gpu.index, before.get(gpu.index, 0) + 1)
            for gpu in sample.gpus
            if gpu.busy_milli > rules.gpu_busy_max_milli or gpu.free_bytes < rules.gpu_memory_min_bytes
        )
    if not rules.evict:
        return evictions, hints, ()
    taken = {index for index, samples in hints if samples >= GPU_SAMPLES}
    reasons = {}
    for attempt in sample.attempts:
        mine = sorted(taken.intersection(attempt.gpu_indexes))
        if mine:
            reasons[attempt.attempt_id] = EvictionReason(
                f"its owner needs {attempt.node}'s GPU {', '.join(map(str, mine))}"
            )
    wanted = {**starved, **reasons, **_for_memory(evictions, sample, rules)}
    actions: list[Reclaim] = []
    after: list[PlannedEviction] = []
    for eviction in evictions:
        if eviction.stopping:
            after.append(eviction)
        elif eviction.attempt_id not in wanted:
            actions.append(CancelEviction(eviction.attempt_id))
        else:
            after.append(replace(eviction, reason=wanted[eviction.attempt_id]))
    known = {eviction.attempt_id for eviction in after}
    for attempt_id, reason in wanted.items():
        if attempt_id not in known:
            after.append(PlannedEviction(attempt_id, reason, now_ms + rules.notice_ms))
            if rules.notice_ms and not reason.urgent:
                actions.append(Warn(attempt_id, reason.why, rules.notice_ms))
    for index, eviction in enumerate(after):
        if not eviction.stopping and (now_ms >= eviction.at_ms or eviction.reason.urgent):
            grace_ms = min(rules.grace_ms, URGENT_GRACE_MS) if eviction.reason.urgent else rules.grace_ms
            actions.append(Evict(eviction.attempt_id, eviction.reason.why, grace_ms))
            after[index] = replace(eviction, stopping=True)
    return tuple(after), hints, tuple(actions)


# ------------------------------------------------------------------ memory


def _for_memory(
    evictions: Iterable[PlannedEviction], sample: UsageSample, rules: OwnerRules
) -> dict[str, EvictionReason]:
    already = {eviction.attempt_id for eviction in evictions}
    keep = rules.memory_min_bytes * (RELIEF_PART if already else 1000) // 1000
    keep = min(max(keep, 1), sample.memory_bytes)
    short = keep - sample.memory_available_bytes
    if short <= 0 or not sample.memory_bytes:
        return {}
    # The owner is the reason that memory is short if it is above its mark, or has grown into what was lent.
    lent = sum(attempt.memory_leased_bytes for attempt in sample.attempts)
    beyond = sum(max(0, attempt.memory_bytes - attempt.memory_leased_bytes) for attempt in sample.attempts)
    is_above = 1000 * sample.memory_outside_bytes > rules.memory_used_max_milli * sample.memory_bytes
    has_grown = is_above or beyond >= WORTH_BYTES or sample.memory_outside_bytes + lent > sample.memory_bytes
    if not has_grown:
        return {}
    urgent = 1000 * sample.memory_available_bytes < URGENT_PART * sample.memory_bytes
    free, must = gigabytes(sample.memory_available_bytes), gigabytes(rules.memory_min_bytes)
    return {
        attempt.attempt_id: EvictionReason(
            f"its owner needs {attempt.node}'s memory: {free} free, {must} must be", urgent
        )
        for attempt in cheapest(sample.attempts, short, already)
    }


def cheapest(attempts: Iterable[Borrowed], short_bytes: int, already: Iterable[str] = ()) -> tuple[Borrowed, ...]:
    """The attempts that hold `short_bytes` together with the least to lose, the last if that is equal; those `already`
    planned count first. All that are worth it, if all together do not hold enough."""
    worth = [attempt for attempt in attempts if attempt.memory_bytes >= WORTH_BYTES]
    planned = set(already)
    chosen = [attempt for attempt in worth if attempt.attempt_id in planned]
    left = [attempt for attempt in reversed(worth) if attempt.attempt_id not in planned]
    short_bytes -= sum(attempt.memory_bytes for attempt in chosen)
    apart = len(left) ** 2 + 1  # above any sum of places in the order, which decides where the cost is the same
    items = [
        CoverItem(apart * (EVICTION_COST + attempt.at_stake) + index, 0, (attempt.memory_bytes,))
        for index, attempt in enumerate(left)
    ]
    cover = lightest_cover(items, (short_bytes,), _ANYTHING)
    return (*chosen, *(left if cover is None else [left[index] for index in cover]))


# ------------------------------------------------------------------ GPUs


# All times in milliseconds, all amounts in thousandths of a core; a part is thousandths of the machine.
FLOOR_MILLI = 50  # least allowance of throttled work: 5 % of a core
WEAK_SAMPLES = 2
COMEBACK_MILLI = 200  # paused work is resumed when it can have this much
DWELL_MS, MAX_DWELL_MS = 2_000, 60_000
SETTLE_MS = 400  # the first sample of a calm may still average over the last of the storm
TOO_EARLY_MS = 30_000  # a return followed by yielding within this time was too early
PROBE_EVERY_MS = 5_000  # how often the first sample after a squeeze may give back at once
PAUSE_AFTER_MS = 3_000  # at the floor, before everything is paused
EVICT_AFTER_MS = 60_000  # at the floor or paused, before everything is evicted
LAPSE_MS = 3_000  # end of a conflict after this time without a sign of it
CONFLICT_MS = 3_000  # on a full machine, before one is evicted where the rules allow nothing gentler


class UsageMark(NamedTuple):
    """A part (thousandths) of the machine, within bounds in thousandths of a core."""

    part: int
    min_milli: int
    max_milli: int

    def of(self, sample: UsageSample) -> int:
        return min(self.max_milli, max(self.min_milli, sample.machine_milli * self.part // 1000))


STRONG = UsageMark(50, 300, 1000)  # use by which an owner is present
WEAK = UsageMark(10, 150, 600)  # use by which an owner is present if the next sample shows it, too
HEADROOM = UsageMark(120, 150, 2000)  # stays idle beside an owner
FULL = UsageMark(60, 70, 1000)  # a machine with less than this idle is full
STEP = UsageMark(50, 100, 800)  # smaller differences change nothing


class YieldStep(StrEnum):
    """How far borrowed work yields."""

    FREE = "free"
    THROTTLED = "throttled"
    PAUSED = "paused"


class OwnerState(Struct, frozen=True):
    """State from sample to sample. `allowance_milli` is the total for throttled work."""

    step: YieldStep = YieldStep.FREE
    allowance_milli: int = 0
    hints: int = 0
    calm_since_ms: int | None = None
    calm_peak_milli: int = 0
    dwell_ms: int = DWELL_MS
    raised_at_ms: int | None = None
    squeezed_at_ms: int | None = None
    probes: bool = False
    starved_since_ms: int | None = None
    conflict_seen_ms: int = 0
    evictions: tuple[PlannedEviction, ...] = ()
    gpu_hints: tuple[tuple[int, int], ...] = ()

    @property
    def yields(self) -> bool:
        """True while the machine yields, so that nothing new belongs there."""
        return self.step is not YieldStep.FREE or bool(self.evictions)


class Throttle(Struct, frozen=True):
    """Throttle to these cores and that part of the time; None and 1000 is not at all."""

    cores: int | None = None
    running_milli: int = 1000


class Pause(Struct, frozen=True):
    """Pause all borrowed work."""

    why: str


class Continue(Struct, frozen=True):
    """Resume paused work."""


Action = Throttle | Pause | Continue | Reclaim


def decide(
    state: OwnerState, sample: UsageSample, rules: OwnerRules, now_ms: int
) -> tuple[OwnerState, tuple[Action, ...]]:
    """The next state, and the actions that lead to it; none if nothing changes."""
    after = OwnerState() if not sample.attempts else _cpu(state, sample, rules, now_ms)
    actions: list[Action] = []
    if throttle_of(after) != throttle_of(state):
        actions.append(throttle_of(after))
    if after.step is YieldStep.PAUSED and state.step is not YieldStep.PAUSED:
        actions.append(Pause(f"its owner uses {_used(sample)}"))
    elif state.step is YieldStep.PAUSED and after.step is not YieldStep.PAUSED:
        actions.append(Continue())
    evictions, hints, reclaims = reclaim(
        state.evictions, state.gpu_hints, sample, rules, now_ms, _starved(after, sample, rules, now_ms)
    )
    return replace(after, evictions=evictions, gpu_hints=hints), (*actions, *reclaims)


def throttle_of(state: OwnerState) -> Throttle:
    """Whole cores while there are any; below one, a part of the time on one."""
    if state.step is YieldStep.FREE:
        return Throttle()
    if state.step is YieldStep.PAUSED:
        return Throttle(1, FLOOR_MILLI)
    if state.allowance_milli >= 1000:
        return Throttle(state.allowance_milli // 1000)
    return Throttle(1, state.allowance_milli)


# ------------------------------------------------------------------ CPU


def _cpu(state: OwnerState, sample: UsageSample, rules: OwnerRules, now: int) -> OwnerState:
    state = replace(state, hints=state.hints + 1 if sample.outside_milli >= WEAK.of(sample) else 0)
    if state.step is YieldStep.FREE:
        # An attempt without leased CPU counts with its use; a full machine never has room for that beside an owner.
        is_there = sample.outside_milli >= STRONG.of(sample) or state.hints >= WEAK_SAMPLES
        if is_there and _room(sample) < max(sample.own_milli, sum(attempt.cpu_milli for attempt in sample.attempts)):
            return _squeezed(replace(state, conflict_seen_ms=now), rules, now)
        lapsed = now - state.conflict_seen_ms > LAPSE_MS
        return replace(state, starved_since_ms=None) if lapsed else state
    if state.step is YieldStep.PAUSED:
        most = COMEBACK_MILLI if rules.throttle else sample.leased_milli
        return _come_back(state, sample, rules, now) if _room(sample) >= most else replace(state, calm_since_ms=None)
    room, step, full = _room(sample), STEP.of(sample), sample.idle_milli < FULL.of(sample)
    if full and state.allowance_milli > FLOOR_MILLI:
        return _squeezed(state, rules, now)
    if state.probes and not full:
        return _given(replace(state, probes=False), sample, room)
    if room < state.allowance_milli - step:
        state = _lowered(replace(state, allowance_milli=max(FLOOR_MILLI, room)), now)
    elif room >= min(state.allowance_milli + step, sample.leased_milli):
        return _come_back(state, sample, rules, now)
    state = replace(state, calm_since_ms=None)
    if state.allowance_milli > FLOOR_MILLI:
        return replace(state, starved_since_ms=None)
    state = replace(state, starved_since_ms=now if state.starved_since_ms is None else state.starved_since_ms)
    assert state.starved_since_ms is not None
    if rules.pause and now - state.starved_since_ms >= PAUSE_AFTER_MS:
        return replace(state, step=YieldStep.PAUSED, probes=False)
    return state


def _squeezed(state: OwnerState, rules: OwnerRules, now: int) -> OwnerState:
    """State after a squeeze to almost nothing; the next sample shows the owner's real need."""
    state = _lowered(state, now)
    recently = state.squeezed_at_ms is not None and now - state.squeezed_at_ms < PROBE_EVERY_MS
    starved = now if state.starved_since_ms is None else state.starved_since_ms
    state = replace(state, calm_since_ms=None, squeezed_at_ms=now, starved_since_ms=starved)
    if rules.throttle:
        return replace(state, step=YieldStep.THROTTLED, allowance_milli=FLOOR_MILLI, probes=not recently)
    return replace(state, step=YieldStep.PAUSED) if rules.pause else state


def _lowered(state: OwnerState, now: int) -> OwnerState:
    """State after yielding; soon after coming back, the return was too early."""
    if state.raised_at_ms is None:
        return state
    if now - state.raised_at_ms < TOO_EARLY_MS:
        return replace(state, dwell_ms=min(2 * state.dwell_ms, MAX_DWELL_MS), raised_at_ms=None)
    return replace(state, dwell_ms=DWELL_MS, raised_at_ms=None)


def _come_back(state: OwnerState, sample: UsageSample, rules: OwnerRules, now: int) -> OwnerState:
    """State after a calm: more allowance once the owner has left it for long enough, as much as was left all the
    time."""
    if state.calm_since_ms is None:
        return replace(state, calm_since_ms=now, calm_peak_milli=sample.outside_milli)
    settling = now - state.calm_since_ms <= SETTLE_MS
    peak = sample.outside_milli if settling else max(state.calm_peak_milli, sample.outside_milli)
    if now - state.calm_since_ms < state.dwell_ms:
        return replace(state, calm_peak_milli=peak)
    room = _room(replace(sample, outside_milli=peak))
    if state.step is YieldStep.PAUSED and not rules.throttle:
        room = sample.leased_milli
    return replace(_given(state, sample, room), raised_at_ms=now, calm_since_ms=None)


def _given(state: OwnerState, sample: UsageSample, room: int) -> OwnerState:
    """State with this room for borrowed work; with room for all of it, free."""
    if room >= sample.leased_milli:
        return replace(state, step=YieldStep.FREE, allowance_milli=0, starved_since_ms=None, hints=0)
    allowance = max(FLOOR_MILLI, room)
    starved = state.starved_since_ms if allowance == FLOOR_MILLI else None
    return replace(state, step=YieldStep.THROTTLED, allowance_milli=allowance, starved_since_ms=starved)


def _room(sample: UsageSample) -> int:
    """Room of borrowed work beside this owner; the whole machine if the owner uses next to nothing."""
    if sample.outside_milli < WEAK.of(sample) // 2:
        return sample.machine_milli
    return sample.machine_milli - sample.outside_milli - HEADROOM.of(sample)


# ------------------------------------------------------------------ evictions for the CPU


def _starved(state: OwnerState, sample: UsageSample, rules: OwnerRules, now: int) -> dict[str, EvictionReason]:
    """Attempts to evict for the owner's CPU use."""
    since = state.starved_since_ms
    if since is None or not rules.evict:
        return {}
    if rules.throttle or rules.pause:
        gone = (
            tuple(attempt for attempt in sample.attempts if attempt.may_run_again)
            if now - since >= EVICT_AFTER_MS
            else ()
        )
    else:
        gone = sample.attempts[-1:] if now - since >= CONFLICT_MS else ()
    return {
        attempt.attempt_id: EvictionReason(f"its owner needs {attempt.node}'s CPU: {_used(sample)}") for attempt in gone
    }


def _used(sample: UsageSample) -> str:
    return f"{sample.outside_milli / 1000:.1f} of {counted(sample.machine_milli / 1000, 'core')}"
