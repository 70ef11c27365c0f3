"""Simulated processes that the grid did not start, and their guards: the guard core that ships, in virtual time.

A guard is a process of its own, with a standby: it outlives the agent, and when it is killed the standby goes on from
the journal. The journal is on the disk of the machine. A power failure takes the last records along that nobody has
waited for; a directory that is lost takes the journal from the agent, not from the guard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Protocol

from msgspec import Struct

from distributed_grid.agent.offloading.guard_core import (
    FINAL_PHASES,
    ContinueTree,
    GuardAction,
    GuardCore,
    GuardRecord,
    StopTree,
    TreeView,
    WriteRecord,
)
from distributed_grid.domain.processes import ProcessIdentity, ProcessLook
from distributed_grid.domain.states import MoveState, Step
from distributed_grid.replay.event_queue import EventQueue, ScheduledEvent

FULL = "No space left on device"
NOTICE_MS = 50
REWRITE_MS = 500
ORDER_MS = (5, 5, 400)
KILL_MS = (20, 20, 6_000)
"""Most trees are gone at once; some have processes that wait for a disk."""


class OriginalMachine(Protocol):
    """What originals and guards need of their machine."""

    queue: EventQueue
    random: Random
    slowness: int
    disk_is_full: bool

    @property
    def boot(self) -> str: ...

    @property
    def boot_ms(self) -> int: ...

    def moment(self, boot_ms: int) -> int: ...


class SimulatedOriginal:
    """A process that a user started by hand; it works until it has run for long enough, unless it stands still."""

    def __init__(self, machine: OriginalMachine, pid: int, run_ms: int) -> None:
        self._queue = machine.queue
        self.identity = ProcessIdentity(pid, machine.boot_ms // 10, machine.boot)
        self.run_ms = run_ms
        self.is_alive, self.stopped_at, self.ended = True, 0, ""
        self.version = 1
        """Of all that a move relies on: its command, its files, its locks."""
        self.longest_still_ms = 0
        self.on_end: Callable[[], None] = _nobody
        self._worked_ms, self._resumed_at = 0, machine.queue.now
        self._finish = machine.queue.after(run_ms, lambda: self.end("by itself"))

    @property
    def look(self) -> ProcessLook:
        """Its facts as a move compares them."""
        return ProcessLook(command=str(self.version))

    @property
    def is_still(self) -> bool:
        return self.stopped_at > 0

    @property
    def still_ms(self) -> int:
        """For how long it has stood still by now."""
        return self._queue.now - self.stopped_at if self.is_still else 0

    @property
    def worked_ms(self) -> int:
        """Progress of its work, by its own file."""
        return self._worked_ms + (self._queue.now - self._resumed_at if self.is_alive and not self.is_still else 0)

    def stop(self) -> None:
        if self.is_alive and not self.is_still:
            self._worked_ms = self.worked_ms
            self.stopped_at = self._queue.now
            self._finish.cancel()

    def go_on(self) -> None:
        if self.is_alive and self.is_still:
            self.longest_still_ms = max(self.longest_still_ms, self.still_ms)
            self.stopped_at, self._resumed_at = 0, self._queue.now
            self._finish = self._queue.after(self.run_ms - self._worked_ms, lambda: self.end("by itself"))

    def change(self) -> None:
        """It runs another program, takes a lock, or opens a socket."""
        if self.is_alive and not self.is_still:
            self.version += 1

    def end(self, how: str) -> None:
        """It is gone, with its whole tree."""
        if self.is_alive:
            self._worked_ms = self.worked_ms
            self.is_alive, self.stopped_at, self.ended = False, 0, how
            self._finish.cancel()
            self.on_end()


class SimulatedJournal(Struct):
    """The journal of a move: its records and how many of them are on the disk for good."""

    move_id: str
    identity: ProcessIdentity
    records: list[GuardRecord] = []
    durable: int = 0

    def lose_power(self, random: Random) -> None:
        """Records that nobody has waited for may be gone."""
        kept = random.randint(min(self.durable, len(self.records)), len(self.records))
        del self.records[kept:]
        self.durable = len(self.records)

    @property
    def phase(self) -> MoveState:
        return GuardCore(tuple(self.records)).phase


class SimulatedGuard:
    """A guard and its standby, for one original; `hear` is told of every record."""

    core_type = GuardCore

    def __init__(self, machine: OriginalMachine, journal: SimulatedJournal, original: SimulatedOriginal | None) -> None:
        self._machine = machine
        self.journal = journal
        self._original = original
        self._core = self.core_type(tuple(journal.records))
        self._life = 0
        self._wake: ScheduledEvent | None = None
        self._orders: list[tuple[str, int, str]] = []
        self.hear: Callable[[GuardRecord], None] = _nobody_hears
        if original is not None:
            original.on_end = self._observe_soon

    @property
    def phase(self) -> MoveState:
        return self._core.phase

    def resume(self) -> None:
        """Take over from a guard that has ended."""
        same_boot = self.journal.identity.boot == self._machine.boot
        self._perform(self._core.resume(self._machine.boot_ms, self._view(), same_boot=same_boot))

    def order(self, step: str, freeze_ms: int = 0, changes: str = "") -> None:
        """Carry out an order of the agent when those before it are carried out; a disk may take its time for each."""
        self._orders.append((step, freeze_ms, changes))
        if len(self._orders) == 1:
            self._later(self._takes(ORDER_MS), self._carry_out_next)

    def _takes(self, choices: tuple[int, ...]) -> int:
        return self._machine.random.randint(1, self._machine.random.choice(choices)) * self._machine.slowness

    def _carry_out_next(self) -> None:
        self._carry_out(*self._orders[0])
        del self._orders[0]
        if self._orders:
            self._later(self._takes(ORDER_MS), self._carry_out_next)

    def _carry_out(self, step: str, freeze_ms: int, changes: str) -> None:
        core, now = self._core, self._machine.boot_ms
        if step == Step.FREEZE:
            member = ((self.journal.identity.pid, self.journal.identity.pid_start),)
            self._perform(core.freeze(now, freeze_ms, member, ()))
        elif step == "check":
            self._perform(core.check(now, changes))
        elif step == Step.COMMIT:
            self._perform(core.commit(now, self._view()))
        elif step in (Step.THAW, Step.CLOSE):
            self._perform(core.thaw(now, f"ordered to {step}"))

    def die(self, *, for_good: bool = False) -> None:
        """It is killed; the standby takes over in a moment, unless its machine is gone, too."""
        self._life += 1
        self._orders.clear()
        if not for_good:
            self._core = self.core_type(tuple(self.journal.records))
            self._later(self._machine.random.randint(5, 100) * self._machine.slowness, self.resume)

    def _later(self, delay_ms: int, work: Callable[[], None]) -> ScheduledEvent:
        life = self._life
        return self._machine.queue.after(delay_ms, lambda: work() if life == self._life else None)

    def _view(self) -> TreeView:
        original = self._original
        return TreeView(original is not None and original.is_alive, original is not None and original.is_still)

    def _observe_soon(self) -> None:
        self._later(NOTICE_MS, self._observe)

    def _observe(self) -> None:
        self._perform(self._core.observe(self._machine.boot_ms, self._view()))

    def _perform(self, actions: list[GuardAction]) -> None:
        machine, original = self._machine, self._original
        for action in actions:
            now = machine.boot_ms
            if isinstance(action, WriteRecord):
                if machine.disk_is_full:
                    self._keep_unwritten(action)
                    self._perform(self._core.not_recorded(action.record, now, FULL))
                    break
                self._write(action)
            elif isinstance(action, StopTree):
                self._later(machine.random.randint(1, 20) * machine.slowness, self._stop)
            elif isinstance(action, ContinueTree):
                if original is not None:
                    original.go_on()
            else:
                self._later(self._takes(KILL_MS), self._kill)
        self._watch_lease()

    def _keep_unwritten(self, action: WriteRecord) -> None:
        """Final states are written as soon as there is room; running or ended states are held back until then."""
        if action.record.step in FINAL_PHASES:
            self._later(REWRITE_MS, partial(self._write_again, action))
        if action.record.step in (MoveState.THAWED, MoveState.GONE):
            self.hear(action.record)

    def _write_again(self, action: WriteRecord) -> None:
        if self._machine.disk_is_full:
            self._later(REWRITE_MS, partial(self._write_again, action))
        else:
            self._write(action)

    def _write(self, action: WriteRecord) -> None:
        self.journal.records.append(action.record)
        if action.durable:
            self.journal.durable = len(self.journal.records)
        self._core.apply(action.record)
        self.hear(action.record)

    def _stop(self) -> None:
        if self._original is None or self._core.phase is not MoveState.FREEZING:
            return
        self._original.stop()
        self._perform(self._core.stopped(self._machine.boot_ms, self._core.members, self._core.spared))

    def _kill(self) -> None:
        if self._core.phase is MoveState.DECIDED:
            if self._original is not None:
                self._original.end("killed")
            self._perform(self._core.killed(self._machine.boot_ms))

    def _watch_lease(self) -> None:
        if self._wake is not None:
            self._wake.cancel()
        at_ms = self._core.wakes_at_ms
        if at_ms:
            delay_ms = max(self._machine.moment(at_ms) - self._machine.queue.now, 1)
            self._wake = self._later(delay_ms, self._observe_or_wait)

    def _observe_or_wait(self) -> None:
        self._observe()
        if self._core.phase not in FINAL_PHASES:
            self._watch_lease()


def _nobody() -> None:
    """Nobody guards it."""


def _nobody_hears(record: GuardRecord) -> None:
    """No agent is there; the next one reads the journal."""
