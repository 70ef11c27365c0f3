"""Announced end of this machine: who has said when it ends, and how its attempts are told and stopped in time.

It is announced by the cloud's metadata service, by the signal of a batch system, or by the control plane, which knows
the lifetime of the machine; the earliest end counts. Attempts find the notice and its deadline at once, and are stopped
so that their grace is over, and their end reported, before the machine ends. No control plane is needed for that: an
attempt that is stopped here is queued again when the control plane hears of it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from msgspec import Struct

from distributed_grid.domain.workers import MAX_NOTICE_MS, stop_margin_ms
from distributed_grid.wire import AnnouncedEnd

METADATA, SIGNAL, CONTROL_PLANE = "metadata", "signal", "control plane"
CHECK_MS = 500
EARLIER_MS = 2_000
"""By how much an end must be earlier than the known one to be another."""
MAX_EXIT_MARGIN_MS = 5_000
log = logging.getLogger(__name__)


class KnownEnd(Struct, frozen=True):
    """An end of this machine that was announced: by the boot clock when it ends, and by when all must be over; both 0
    where nobody knows when. `withdrawn`: it is not taken away after all."""

    why: str
    ends_at_ms: int = 0
    stop_by_ms: int = 0
    exit_at_ms: int = 0
    withdrawn: bool = False


class RunningCommand(Protocol):
    """An attempt whose command runs; `stopping` once it was asked to stop."""

    @property
    def attempt_id(self) -> str: ...
    @property
    def grace_ms(self) -> int: ...
    @property
    def stopping(self) -> bool: ...


class EndedWork(Protocol):
    """The work of a machine that ends."""

    def running(self) -> Iterable[RunningCommand]:
        """The attempts whose commands run."""

    def give_notice(self, attempt_id: str, why: str, in_ms: int) -> None:
        """Have an attempt know that it will be stopped in so long; a second notice adds no time."""

    def withdraw_notice(self, attempt_id: str) -> None:
        """It may go on after all. Safe twice."""

    async def stop(self, attempt_id: str, why: str, grace_ms: int) -> None:
        """Stop an attempt; the control plane queues its job again."""


class MachineEnd:
    """What is known of the end of this machine; `on_change` hears of an end that is new, or is not any more."""

    def __init__(self, work: EndedWork, boot_ms: Callable[[], int], on_change: Callable[[], None]) -> None:
        self._work = work
        self._boot_ms = boot_ms
        self._on_change = on_change
        self._ends: dict[str, KnownEnd] = {}  # by who has said so
        self._noticed: dict[str, int] = {}  # by attempt, by when it was told to be over

    @property
    def end(self) -> KnownEnd | None:
        """The earliest announced end; None where none is."""
        known = [one for one in self._ends.values() if one.ends_at_ms]
        return min(known, key=lambda one: one.ends_at_ms) if known else None

    @property
    def shutdown_reason(self) -> str:
        """Why no attempt may start here any more: the machine was told to shut down. Empty while one may."""
        end = self._ends.get(SIGNAL)
        return f"this machine is taken away: {end.why}" if end is not None else ""

    def is_known_to(self, source: str) -> bool:
        """Whether one source has said when this machine ends."""
        known = self._ends.get(source)
        return known is not None and known.ends_at_ms > 0

    def announce(self, source: str, said: AnnouncedEnd | None) -> None:
        """Take in what one source says now; None: it says nothing. A notice that was given counts until it is
        withdrawn: a later end, or silence of the signal's source, changes nothing."""
        known = self._ends.get(source)
        if said is None or said.withdrawn:
            if known is None or known.withdrawn:
                return
            why = said.why if said is not None else f"the notice was withdrawn: {known.why}"
            self._ends[source] = KnownEnd(why, withdrawn=True)
        elif said.ends_in_ms is None:
            if known is not None and not known.withdrawn:
                return
            self._ends[source] = KnownEnd(said.why)
        else:
            now = self._boot_ms()
            ends_at = now + said.ends_in_ms
            is_later = known is not None and known.ends_at_ms and ends_at > known.ends_at_ms - EARLIER_MS
            if is_later and source != CONTROL_PLANE:
                return
            if known is not None and abs(ends_at - known.ends_at_ms) < EARLIER_MS:
                return
            exit_at = ends_at - min(MAX_EXIT_MARGIN_MS, said.ends_in_ms // 10)
            self._ends[source] = KnownEnd(said.why, ends_at, ends_at - stop_margin_ms(said.ends_in_ms), exit_at)
            log.warning("this machine ends in %.0f s: %s", said.ends_in_ms / 1000, said.why)
        self._on_change()

    def reported(self) -> AnnouncedEnd | None:
        """What the control plane is to hear: the earliest end that it has not said itself, counted from now."""
        own = [one for source, one in self._ends.items() if source != CONTROL_PLANE]
        if not own:
            return None
        found = min(own, key=lambda one: (one.withdrawn, not one.ends_at_ms, one.ends_at_ms))
        if found.withdrawn or not found.ends_at_ms:
            return AnnouncedEnd(found.why, withdrawn=found.withdrawn)
        return AnnouncedEnd(found.why, min(max(found.ends_at_ms - self._boot_ms(), 0), MAX_NOTICE_MS))

    async def watch(self, sleep_ms: Callable[[int], Awaitable[None]]) -> None:
        """Tell and stop attempts in time, for ever."""
        while True:
            try:
                await self.check()
            except Exception as failure:  # the outermost loop: the next attempt has to be told, too
                log.warning("telling attempts of the end of this machine failed", exc_info=failure)
            await sleep_ms(CHECK_MS)

    async def check(self) -> None:
        """Give notice to whoever has none, and stop those whose time has come."""
        end, now = self.end, self._boot_ms()
        if end is None:
            for attempt_id in self._noticed:
                self._work.withdraw_notice(attempt_id)
            self._noticed = {}
            return
        why = f"this machine is taken away: {end.why}"
        noticed, self._noticed = self._noticed, {}
        for one in self._work.running():
            if one.stopping:
                continue
            told, stop_in = noticed.get(one.attempt_id, 0), end.stop_by_ms - one.grace_ms - now
            if told and told < end.stop_by_ms:
                self._work.withdraw_notice(one.attempt_id)
            if told != end.stop_by_ms:
                self._work.give_notice(one.attempt_id, why, max(stop_in, 0))
            self._noticed[one.attempt_id] = end.stop_by_ms
            if stop_in <= 0:
                await self._work.stop(one.attempt_id, why, min(one.grace_ms, max(end.stop_by_ms - now, 0)))
