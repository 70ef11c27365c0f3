"""Execution of the control plane's orders to start, stop and pause attempts.

- An order with a fence older than a known one changes nothing.
- A start that fails, that relies on a lost hold or offer, or that comes while the machine shuts down, is refused, and
  the refusal is final.
- A start has a time to execute the command, on this machine's clock since boot. Heartbeats that name an attempt whose
  files are being fetched, and that are answered, extend it.
- Long steps (fetches of files, notices) run beside the next orders.

Nothing here depends on an event loop or on real processes: the agent drives it with asyncio on its host, the simulator
in virtual time on a simulated machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Coroutine
from errno import EDQUOT, ENOSPC
from typing import Any, Generic, Protocol, TypeVar

from distributed_grid.agent.outbox import Outbox
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.errors import GridError
from distributed_grid.wire import (
    MAX_STARTING,
    AttemptEndedReport,
    PauseAttemptOrder,
    ResizeAttemptOrder,
    StartAttemptOrder,
    StopAttemptOrder,
)

AttemptOrder = StartAttemptOrder | StopAttemptOrder | PauseAttemptOrder | ResizeAttemptOrder
MIN_HOLD_MS = 200
MAX_REFUSED = 10_000
log = logging.getLogger(__name__)


class Attempts(Protocol):
    """The attempts of a machine."""

    @property
    def is_held(self) -> bool:
        """True while the last given hold has not run out."""

    def hold(self, until_boot_ms: int) -> None:
        """Let everything with a hold run until then; a hold never gets shorter."""

    def running(self) -> Collection[str]:
        """Attempts that have not ended."""

    def unstarted(self) -> Collection[str]:
        """Attempts without a known start."""

    def knows(self, attempt_id: str) -> bool:
        """True if it was ever launched here."""

    def is_under_way(self, attempt_id: str) -> bool:
        """True if its command runs without a request to end."""

    def needs_files(self, order: StartAttemptOrder) -> bool:
        """True if its working directory has to be fetched first."""

    async def fetch_files(self, order: StartAttemptOrder) -> None:
        """Lay out its working directory; repeated, it changes nothing."""

    async def launch(self, order: StartAttemptOrder, start_by_boot_ms: int) -> None:
        """Run it, once, and not later than that (0: at any time): a second call reports the known state again."""

    async def stop(self, order: StopAttemptOrder) -> None:
        """Stop the whole tree; an ended one is reported again. The first order's ending stays."""

    def resize(self, order: ResizeAttemptOrder) -> None:
        """Raise its memory to its lease; neither that nor its limit gets smaller. Safe twice."""

    def forget(self, attempt_id: str) -> None:
        """Its end is acknowledged: stop reporting it. Safe twice."""


class Yielding(Protocol):
    """How the machine gives way to its owner."""

    @property
    def generation(self) -> int:
        """Grows whenever an offer is withdrawn."""

    def displace(self, attempt_id: str, reason: str) -> int:
        """Notify an attempt that has to make room for another; its time in milliseconds."""

    def pause_for_node(self, attempt_id: str, fence: int, reason: str) -> None:
        """Pause an attempt for its node, for a while; the control plane repeats it as long as the pause is to last."""

    def resume(self, attempt_id: str) -> None:
        """Resume an attempt that is paused for its node, unless its owner has paused it, too."""


Task = TypeVar("Task")


class Tasks(Protocol[Task]):
    """Background work, and time."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> Task: ...

    def cancel(self, task: Task) -> None:
        """End it soon; safe after its end."""

    async def join(self, task: Task) -> None:
        """Return when it has ended, in any way."""

    async def sleep(self, ms: int) -> None: ...


class FailedStart(GridError):
    """An attempt cannot be started because of its node."""


class Preparation(Generic[Task]):
    """An attempt whose files are being fetched, and the deadline of its start; `listed_beat` is the first heartbeat
    that has named it."""

    def __init__(self, order: StartAttemptOrder) -> None:
        self.order = order
        self.task: Task | None = None
        self.start_by_boot_ms = start_deadline(order)
        self.listed_beat: int | None = None


class OrderExecutor(Generic[Task]):
    """Carries orders out; knows the attempts that are being prepared, were refused or have notice."""

    def __init__(
        self,
        attempts: Attempts,
        owner: Yielding,
        outbox: Outbox,
        tasks: Tasks[Task],
        boot_ms: Callable[[], int],
        *,
        shutdown_reason: Callable[[], str] = str,
    ) -> None:
        """`shutdown_reason` returns why no attempt may start here any more; empty while one may."""
        self._attempts = attempts
        self._owner = owner
        self._outbox = outbox
        self._tasks = tasks
        self._boot_ms = boot_ms
        self._shutdown_reason = shutdown_reason
        self._preparing: dict[str, Preparation[Task]] = {}
        self._fences: dict[str, int] = {}
        self._refused: dict[str, None] = {}
        self._displaced: dict[str, Task | None] = {}  # None: its notice has run out, it is being stopped

    def listed(self) -> tuple[str, ...]:
        """Attempts of a greeting: all that run or are being prepared, and every unacknowledged end."""
        known = (*self._attempts.running(), *self._preparing, *self._outbox.unacknowledged_ends())
        return tuple(dict.fromkeys(known))

    def under_way(self) -> list[Task]:
        """Background tasks."""
        noticed = [task for task in self._displaced.values() if task is not None]
        return [
            *(preparation.task for preparation in self._preparing.values() if preparation.task is not None),
            *noticed,
        ]

    def starting(self, node: str, beat: int) -> tuple[str, ...]:
        """The attempts that the heartbeat `beat` of a node names: those that may have started, or may yet start, though
        the control plane may not know of it."""
        known = dict.fromkeys(self._preparing)
        known |= dict.fromkeys((*self._attempts.unstarted(), *self._outbox.unacknowledged_attempts()))
        named = tuple(known)[:MAX_STARTING]
        for lease_id in named[: len(self._preparing)]:
            preparation = self._preparing[lease_id]
            if preparation.listed_beat is None and preparation.order.node == node:
                preparation.listed_beat = beat
        return named

    def heartbeat_answered(self, node: str, beat: int) -> None:
        """The control plane has a heartbeat of this node: attempts named in it may start as long after it as after the
        first order."""
        for preparation in self._preparing.values():
            if (
                preparation.order.node == node
                and preparation.listed_beat is not None
                and preparation.listed_beat <= beat
                and preparation.order.start_ms
            ):
                preparation.start_by_boot_ms = max(preparation.start_by_boot_ms, beat + preparation.order.start_ms)

    def ended(self, attempt_id: str) -> None:
        """An attempt has ended: cancel its pending stop."""
        self._cancel_notice(attempt_id)

    def acknowledged(self, seq: int) -> None:
        """The control plane has a report: forget ended attempts. Safe twice."""
        report = self._outbox.acknowledged(seq)
        if isinstance(report, AttemptEndedReport):
            self._fences.pop(report.lease_id, None)
            self._attempts.forget(report.lease_id)

    async def carry_out(self, order: AttemptOrder) -> None:
        """Carry an order out. A start that fails is answered, never swallowed."""
        try:
            if isinstance(order, StartAttemptOrder):
                await self.start(order)
            elif isinstance(order, PauseAttemptOrder):
                self.pause(order)
            elif isinstance(order, ResizeAttemptOrder):
                self.resize(order)
            else:
                await self.stop(order)
        except Exception as failure:  # the outermost place of an order: the next one may well succeed
            _log_failure(f"order {type(order).__name__} failed", failure)
            if isinstance(order, StartAttemptOrder):
                is_full = isinstance(failure, FailedStart) or _is_full(failure)
                self._refuse(order, Ending.NEVER_STARTED, f"{order.node}: {failure}", node_fault=is_full)

    def _refuse(self, order: StartAttemptOrder, ending: Ending, detail: str, *, node_fault: bool = False) -> None:
        """Answer an order that is not carried out; that is final."""
        self._refused[order.lease_id] = None
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._outbox.ended(order.lease_id, order.fence, Outcome(ending, detail=detail, node_fault=node_fault))

    # ------------------------------------------------------------------ starting

    async def start(self, order: StartAttemptOrder) -> None:
        lease_id = order.lease_id
        if lease_id in self._preparing or self.has_refused(lease_id):
            return  # a refusal is final: it and this order have crossed
        if self._is_stale(lease_id, order.fence):
            log.warning("a start of %s with an old fence was refused", lease_id)
            return
        if lease_id not in self._attempts.running():
            if order.hold_ms and not self.is_in_time(order):
                self._refuse(order, Ending.RECLAIMED, f"{order.node}: the order came too late")
                return
            if order.generation < self._owner.generation:
                self._refuse(order, Ending.RECLAIMED, f"{order.node} had withdrawn its offer: its owner needs it")
                return
            if not self._attempts.knows(lease_id):
                if reason := self._shutdown_reason():
                    self._refuse(order, Ending.RECLAIMED, f"{order.node}: {reason}")
                    return
                self._check_start_time(start_deadline(order))
        self._fences[lease_id] = order.fence
        if self._attempts.needs_files(order):
            preparation = self._preparing[lease_id] = Preparation(order)
            preparation.task = self._tasks.spawn(self._prepare(preparation))
        else:
            await self._attempts.launch(order, start_deadline(order))

    def _check_start_time(self, start_by_boot_ms: int) -> None:
        if 0 < start_by_boot_ms <= self._boot_ms():
            raise FailedStart("not started in time")

    def has_refused(self, lease_id: str) -> bool:
        """True if this was refused before: that is final, even if the control plane does not know it yet."""
        return lease_id in self._refused

    def _is_stale(self, lease_id: str, fence: int) -> bool:
        return fence < self._fences.get(lease_id, 0)

    def is_in_time(self, order: StartAttemptOrder) -> bool:
        """True if the order's hold, counted from the heartbeat it names, has not run out; then the hold is extended."""
        now = self._boot_ms()
        if order.beat > now or order.beat + order.hold_ms < now + MIN_HOLD_MS:
            return False
        self.renew_hold(order.beat + order.hold_ms)
        return True

    def renew_hold(self, until_boot_ms: int) -> None:
        """Extend the hold. Preparations of an expired hold are given up: the control plane does so, too, or will at
        their report."""
        if not self._attempts.is_held:
            given_up, self._preparing = self._preparing, {}
            for preparation in given_up.values():
                if preparation.task is not None:
                    self._tasks.cancel(preparation.task)
                self._refuse_late(preparation.order)
        self._attempts.hold(until_boot_ms)

    def _refuse_late(self, order: StartAttemptOrder) -> None:
        self._refuse(order, Ending.RECLAIMED, f"{order.node}: its hold ran out before its files were there")

    async def _prepare(self, preparation: Preparation[Task]) -> None:
        """Fetch the working directory, then run; other orders continue meanwhile."""
        order = preparation.order
        try:
            await self._attempts.fetch_files(order)
            if order.hold_ms and not self._attempts.is_held:
                self._refuse_late(order)
            elif reason := self._shutdown_reason():
                self._refuse(order, Ending.RECLAIMED, f"{order.node}: {reason}")
            else:
                self._check_start_time(preparation.start_by_boot_ms)
                await self._attempts.launch(order, preparation.start_by_boot_ms)
        except FailedStart as failure:
            self._refuse(order, Ending.NEVER_STARTED, f"{order.node}: {failure}", node_fault=True)
        except Exception as failure:  # the outermost place of this task: it is answered, never swallowed
            _log_failure(f"{order.lease_id} could not be prepared", failure)
            # Trouble of this machine, such as a full disk: then the job continues elsewhere, or later.
            may_pass = isinstance(failure, OSError) or (isinstance(failure, GridError) and failure.retryable)
            ending = Ending.RECLAIMED if order.checkpoint and may_pass else Ending.NEVER_STARTED
            detail = f"{order.node}: its working directory: {failure}"
            self._refuse(order, ending, detail, node_fault=_is_full(failure))
        finally:
            self._preparing.pop(order.lease_id, None)

    # ------------------------------------------------------------------ stopping

    async def stop(self, order: StopAttemptOrder) -> None:
        lease_id = order.lease_id
        if self._is_stale(lease_id, order.fence):
            log.warning("a stop of %s with an old fence was refused", lease_id)
            return
        preparing = self._preparing.pop(lease_id, None)
        if preparing is not None and preparing.task is not None:
            self._tasks.cancel(preparing.task)
            await self._tasks.join(preparing.task)
        if not self._attempts.knows(lease_id):
            outcome = Outcome(Ending.NEVER_STARTED, detail=f"{lease_id} is not known here")
            self._outbox.ended(lease_id, order.fence, outcome)
            return
        if order.ending == Ending.PREEMPTED and self._attempts.is_under_way(lease_id):
            if lease_id not in self._displaced:
                notice_ms = self._owner.displace(lease_id, order.detail)
                self._displaced[lease_id] = self._tasks.spawn(self._stop_after(notice_ms, order))
            return
        self._cancel_notice(lease_id)
        await self._attempts.stop(order)

    def pause(self, order: PauseAttemptOrder) -> None:
        """Pause or resume an attempt; one that does not run is left alone."""
        if self._is_stale(order.lease_id, order.fence) or not self._attempts.is_under_way(order.lease_id):
            return
        if order.paused:
            self._owner.pause_for_node(order.lease_id, order.fence, order.detail)
        else:
            self._owner.resume(order.lease_id)

    def resize(self, order: ResizeAttemptOrder) -> None:
        """Enter the growth of its lease; an attempt that does not run needs none."""
        if not self._is_stale(order.lease_id, order.fence) and self._attempts.is_under_way(order.lease_id):
            self._attempts.resize(order)

    def _cancel_notice(self, lease_id: str) -> None:
        notice = self._displaced.pop(lease_id, None)
        if notice is not None:
            self._tasks.cancel(notice)

    async def _stop_after(self, notice_ms: int, order: StopAttemptOrder) -> None:
        """Stop a displaced attempt after its notice; other orders continue meanwhile."""
        await self._tasks.sleep(notice_ms)
        self._displaced[order.lease_id] = None
        try:
            await self._attempts.stop(order)
        except Exception as failure:  # the outermost place of this task: the order comes again
            _log_failure(f"{order.lease_id} could not be stopped yet", failure)
            self._displaced.pop(order.lease_id, None)


def start_deadline(order: StartAttemptOrder) -> int:
    """Deadline, on this machine's clock since boot, to execute the command; 0: at any time."""
    return order.beat + order.start_by_ms if order.start_by_ms else 0


def _is_full(failure: BaseException | None) -> bool:
    """True if the disk of this machine is full, by the failure or its cause."""
    while failure is not None:
        if isinstance(failure, OSError) and failure.errno in (ENOSPC, EDQUOT):
            return True
        failure = failure.__cause__
    return False


def _log_failure(problem: str, failure: Exception) -> None:
    """Log an expected failure in one line, any other one with its traceback."""
    is_foreseen = isinstance(failure, GridError | OSError)
    log.warning("%s: %s", problem, failure, exc_info=None if is_foreseen else failure)
