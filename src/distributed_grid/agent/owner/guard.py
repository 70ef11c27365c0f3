"""Owner guard of a machine: makes borrowed work yield to the owner, without the control plane.

Every sample of the machine goes to the yield policy, and its decisions are applied to the borrowed work. An action is
pending until it is done, an eviction until the attempt is gone: a failed one is repeated with the next sample, and
delays none of the others. Whenever the machine begins to yield, its offers are withdrawn: `generation` grows.

A job that will be stopped gets a file at $GRID_NOTICE with reason and time; so does one that the control plane
displaces, and that notice is never withdrawn. The control plane may pause an attempt, too, for the sake of its node:
that pause ends unless it is renewed, and the attempt is resumed when neither the owner nor the control plane pauses it.
Nothing here depends on an event loop or on real processes: the simulator runs the same guard on simulated machines.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Protocol

from msgspec import Struct

from distributed_grid.agent.owner.yield_policy import (
    Action,
    CancelEviction,
    Continue,
    Evict,
    OwnerState,
    Pause,
    Reclaim,
    Throttle,
    UsageSample,
    Warn,
    YieldStep,
    decide,
)
from distributed_grid.wire import OwnerRules

FAST_MS = 250
WATCHFUL_MS = 500
REST_MS = 2000
CHANGE_MILLI = 100
NEAR_MILLI = 150
NODE_PAUSE_MS = 30_000
"""Life of a pause for a node that is not renewed."""
ReportPause = Callable[[str, int, bool, str], None]
log = logging.getLogger(__name__)


class BorrowedWork(Protocol):
    """The borrowed work of a machine, to be measured, slowed down and stopped."""

    def running(self) -> Collection[str]:
        """Attempts that have not ended."""

    def sample(self) -> UsageSample | None:
        """Present use; None while nothing borrowed runs."""

    def throttle(self, cores: int | None, running_milli: int) -> None:
        """Limit it to these cores (None: its own), and each to that part of the time."""

    def pause(self, spared: frozenset[str]) -> Iterable[tuple[str, int]]:
        """Pause everything but `spared`; attempt and fence of those that ran until now."""

    def resume(self, attempt_id: str | None = None) -> None:
        """Resume one, or all, paused attempts, within the throttle."""

    def release(self) -> None:
        """Let everything run freely again. Safe twice."""

    def give_notice(self, attempt_id: str, reason: str, in_ms: int) -> int:
        """Warn an attempt of its stop; its time in milliseconds."""

    def withdraw_notice(self, attempt_id: str) -> None:
        """Withdraw the notice. Safe twice."""

    async def evict(self, attempt_id: str, reason: str, grace_ms: int) -> None:
        """Stop an attempt; the control plane queues its job again."""


class OwnerGuard:
    """Yields to the owner by `rules`, and does nothing while there are none."""

    def __init__(
        self,
        work: BorrowedWork,
        boot_ms: Callable[[], int],
        *,
        report_pause: ReportPause,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.rules: OwnerRules | None = None
        self.generation = 0
        self.state = OwnerState()
        self._work = work
        self._boot_ms = boot_ms
        self._report_pause = report_pause
        self._on_change = on_change
        self._sampling = SamplingRate()
        self._pause_reason = ""
        self._pending: dict[str, Action] = {}  # by attempt, or by another subject
        self._paused: dict[str, int] = {}  # attempts reported as paused, with their fences
        self._warned: set[str] = set()
        self._evicted: set[str] = set()
        self._displaced: set[str] = set()
        self._node_pauses: dict[str, tuple[int, str]] = {}  # for its node: until when, and why

    @property
    def yields(self) -> bool:
        return self.state.yields

    async def watch(self, sleep_ms: Callable[[int], Awaitable[None]]) -> None:
        """Sample, decide and act without end: often while something is borrowed, seldom while nothing is."""
        while True:
            wait_ms = WATCHFUL_MS
            try:
                wait_ms = await self.observe()
            except Exception as failure:  # the outermost loop: the owner needs the next sample
                log.warning("watching for the owner failed", exc_info=failure)
            await sleep_ms(wait_ms)

    async def observe(self) -> int:
        """Take one sample and act on it; milliseconds until the next one."""
        self._apply_node_pauses()
        sample, rules = self._work.sample() if self.rules is not None else None, self.rules
        if rules is None or sample is None:
            if self.state != OwnerState():
                self.release()
                self._on_change()
            return min(WATCHFUL_MS, self._sampling.after(ActivitySample(False, ())))
        yielded = self.yields
        self.state, actions = decide(self.state, sample, rules, self._boot_ms())
        if self.yields and not yielded:
            self.generation = self._boot_ms()
        for action in actions:  # a later one of the same subject replaces it
            subject = "throttle" if isinstance(action, Throttle) else "pause"
            self._pending[action.attempt_id if isinstance(action, Reclaim) else subject] = action
        await self._act_on_pending()
        if self.state.step is YieldStep.PAUSED:
            # Pause running attempts, new ones included; warned ones may use the small rest.
            warned = {eviction.attempt_id for eviction in self.state.evictions}
            for attempt_id, fence in self._work.pause(frozenset(warned | self._displaced)):
                if attempt_id not in self._paused:
                    self._paused[attempt_id] = fence
                    self._report_pause(attempt_id, fence, True, self._pause_reason)
        if self.yields != yielded:
            self._on_change()
        cpu = 1000 * sample.outside_milli // max(1, sample.machine_milli)
        memory = 1000 - 1000 * sample.memory_available_bytes // max(1, sample.memory_bytes)
        most = 1000 - 1000 * rules.memory_min_bytes // max(1, sample.memory_bytes)
        wait_ms = self._sampling.after(ActivitySample(True, ((cpu, rules.cpu_busy_max_milli), (memory, most))))
        return FAST_MS if self.yields else wait_ms

    def release(self) -> None:
        """Let everything run freely again, without warnings. Safe twice."""
        self._pending = {}
        self._work.release()
        running = self._work.running()
        for attempt_id, fence in self._paused.items():
            if attempt_id in running:
                self._report_pause(attempt_id, fence, False, "")
        self._paused = {}
        for attempt_id in tuple(self._warned):
            self._withdraw_warning(attempt_id)
        self.state = OwnerState()

    def pause_for_node(self, attempt_id: str, fence: int, reason: str) -> None:
        """Pause an attempt for its node, for `NODE_PAUSE_MS`; repeated as long as the pause is to last."""
        self._node_pauses[attempt_id] = (self._boot_ms() + NODE_PAUSE_MS, reason)
        self._apply_node_pauses()

    def resume(self, attempt_id: str) -> None:
        """Resume an attempt that is paused for its node, unless its owner has paused it. Safe twice."""
        if self._node_pauses.pop(attempt_id, None) is not None:
            self._end_pause(attempt_id)

    def _apply_node_pauses(self) -> None:
        """Pause running attempts for their node; resume those whose pause was not renewed."""
        if not self._node_pauses:
            return
        now, running = self._boot_ms(), set(self._work.running())
        for attempt_id, (until, _) in list(self._node_pauses.items()):
            if attempt_id not in running:
                del self._node_pauses[attempt_id]
            elif now >= until:
                self.resume(attempt_id)
        wanted = self._node_pauses.keys() - self._displaced - {eviction.attempt_id for eviction in self.state.evictions}
        for attempt_id, fence in self._work.pause(frozenset(running - wanted)) if wanted else ():
            if attempt_id not in self._paused:
                self._paused[attempt_id] = fence
                self._report_pause(attempt_id, fence, True, self._node_pauses[attempt_id][1])

    def _end_pause(self, attempt_id: str) -> None:
        """Resume an attempt without any pause left."""
        if self.state.step is YieldStep.PAUSED:
            return
        self._work.resume(attempt_id)
        fence = self._paused.pop(attempt_id, None)
        if fence is not None and attempt_id in self._work.running():
            self._report_pause(attempt_id, fence, False, "")
        if not self._paused and not self._node_pauses and self.state == OwnerState():
            self._work.release()

    def displace(self, attempt_id: str, reason: str, in_ms: int | None = None) -> int:
        """Give notice to an attempt that has to make room for another; its time in milliseconds.

        Without `in_ms` the time is that of the owner's rules; without rules it is stopped at once, with the reason.
        """
        running = self._work.running()
        self._displaced = {displaced for displaced in self._displaced if displaced in running} | {attempt_id}
        if in_ms is None:
            in_ms = self.rules.notice_ms if self.rules is not None else 0
        in_ms = self._work.give_notice(attempt_id, reason, in_ms)
        self._work.resume(attempt_id)  # while paused it could not read the notice
        return in_ms

    def withdraw_notice(self, attempt_id: str) -> None:
        """Withdraw the notice of a displaced attempt. Safe twice."""
        if attempt_id in self._displaced:
            self._displaced.discard(attempt_id)
            self._withdraw_warning(attempt_id)

    async def _act_on_pending(self) -> None:
        running = self._work.running()
        for subject, action in list(self._pending.items()):
            if isinstance(action, Reclaim) and subject not in running:
                del self._pending[subject]
                continue
            try:
                match action:
                    case Throttle(cores, running_milli):
                        self._work.throttle(cores, running_milli)
                    case Pause(reason):
                        log.info("borrowed work is paused: %s", reason)
                        self._pause_reason = reason
                    case Continue():
                        for attempt_id in [paused for paused in self._paused if paused not in self._node_pauses]:
                            self._end_pause(attempt_id)
                        if not self._node_pauses:
                            self._work.resume()
                    case Warn(attempt_id, reason, in_ms):
                        self._warned.add(attempt_id)
                        self._work.give_notice(attempt_id, reason, in_ms)
                        self._work.resume(attempt_id)  # while paused it could not read the notice
                    case CancelEviction(attempt_id):
                        self._withdraw_warning(attempt_id)
                    case Evict(attempt_id, reason, grace_ms):
                        if attempt_id not in self._evicted:
                            log.info("%s is evicted: %s", attempt_id, reason)
                        await self._work.evict(attempt_id, reason, grace_ms)
                        self._evicted = {evicted for evicted in self._evicted if evicted in self._work.running()} | {
                            attempt_id
                        }
                        self._warned.discard(attempt_id)
            except Exception as failure:  # the owner needs the others all the same; this one is tried again
                log.warning("%s failed, and is tried again", type(action).__name__, exc_info=failure)
            else:
                if not isinstance(action, Evict):
                    self._pending.pop(subject)

    def _withdraw_warning(self, attempt_id: str) -> None:
        self._warned.discard(attempt_id)
        if attempt_id not in self._displaced:
            self._work.withdraw_notice(attempt_id)


# ------------------------------------------------------------------ how often to sample


class ActivitySample(Struct, frozen=True):
    """Owner's use in one sample, in thousandths, and its highest value before work must yield.

    Each `(used, most)` pair is one resource (CPU, memory, each GPU); without thresholds nothing is ever near.
    """

    borrowed: bool
    outside: tuple[tuple[int, int | None], ...]


class SamplingRate:
    """Wait for the next sample: a quarter of a second with borrowed work and the owner's use changing or
    near the point where it must yield. Every calm sample doubles that: to half a second while work is borrowed, to two
    seconds at rest."""

    def __init__(self) -> None:
        self._wait_ms = FAST_MS
        self._anchor: tuple[int, ...] | None = None

    def after(self, sample: ActivitySample) -> int:
        """Milliseconds from this sample to the next."""
        used = tuple(amount for amount, _ in sample.outside)
        # Whether use went away from where it last stood still, so that a slow climb is a change, too.
        anchor = self._anchor
        is_close = (
            anchor is not None
            and len(used) == len(anchor)
            and all(abs(now - then) < CHANGE_MILLI for now, then in zip(used, anchor, strict=True))
        )
        changed = anchor is not None and not is_close
        if not is_close:
            self._anchor = used
        is_near = any(most is not None and used >= most - NEAR_MILLI for used, most in sample.outside)
        if sample.borrowed and (changed or is_near):
            self._wait_ms = FAST_MS
        else:
            self._wait_ms = min(2 * self._wait_ms, WATCHFUL_MS if sample.borrowed else REST_MS)
        return self._wait_ms
