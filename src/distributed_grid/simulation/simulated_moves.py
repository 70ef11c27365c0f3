"""Simulated execution of orders about moves at their source, as an agent carries them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed_grid.agent.offloading.guard_core import FINAL_PHASES, GuardPhase, GuardRecord
from distributed_grid.agent.outbox import Outbox
from distributed_grid.simulation.guarded_process import FULL, SimulatedGuard, SimulatedJournal
from distributed_grid.wire import MoveOrder

if TYPE_CHECKING:
    from distributed_grid.simulation.machine import Machine

CLOSE_MS = 500
UNKNOWN = "nothing is known of this move here"


class SimulatedMoves:
    """The moves whose original is on one machine, as one agent after the other knows them."""

    def __init__(self, machine: Machine, outbox: Outbox, is_alive: Callable[[], bool]) -> None:
        self._machine = machine
        self._outbox = outbox
        self._is_alive = is_alive
        self._decided: set[str] = set()

    def start(self) -> None:
        """Find the moves of the last agent; those that nobody guards get a guard again."""
        for journal in list(self._machine.journals.values()):
            guard = self._machine.guards.get(journal.move_id)
            if guard is None or guard.journal is not journal:
                guard = self._guard(journal)
                guard.resume()
            guard.hear = self._hearing(journal.move_id)
            if journal.records:
                self._recorded(journal.move_id, journal.records[-1])

    def listed(self) -> tuple[str, ...]:
        return tuple(self._machine.journals)

    def carry_out(self, order: MoveOrder) -> None:
        """Carry an order out; whatever comes of it is reported."""
        move_id = order.move_id
        journal = self._machine.journals.get(move_id)
        guard = self._machine.guards.get(move_id)
        if order.step == "close":
            self._close(move_id)
        elif journal is None and order.step == "open":
            self._open(order)
        elif journal is None or guard is None:
            self._answer_unknown(order)
        elif order.step == "return":
            self._machine.queue.after(self._machine.random.randint(20, 500), lambda: self._return(move_id))
        elif guard.phase in FINAL_PHASES or order.step == "open":
            self._report_again(journal)
        else:
            guard.order(order.step, order.freeze_ms)

    def _open(self, order: MoveOrder) -> None:
        identity = order.process
        assert identity is not None
        original = self._machine.originals.get(identity.pid)
        if original is None or original.identity != identity or not original.is_alive:
            self._outbox.moved(order.move_id, "gone", detail=f"process {identity.pid} is not there")
        elif self._machine.disk_is_full:
            self._outbox.moved(order.move_id, "failed", detail=FULL)
        else:
            journal = self._machine.journals[order.move_id] = SimulatedJournal(order.move_id, identity)
            self._guard(journal).hear = self._hearing(order.move_id)
            self._outbox.moved(order.move_id, "opened")

    def _guard(self, journal: SimulatedJournal) -> SimulatedGuard:
        original = self._machine.originals.get(journal.identity.pid)
        same = original is not None and original.identity == journal.identity
        guard = self._machine.guard_type(self._machine, journal, original if same else None)
        self._machine.guards[journal.move_id] = guard
        return guard

    def _close(self, move_id: str) -> None:
        """Forget a move: what is frozen goes on, what is decided is ended first."""
        guard = self._machine.guards.get(move_id)
        if move_id not in self._machine.journals:
            return
        if guard is not None and guard.phase not in FINAL_PHASES:
            guard.order("close")
            self._machine.queue.after(CLOSE_MS, lambda: self._close(move_id) if self._is_alive() else None)
            return
        self._machine.journals.pop(move_id, None)
        self._outbox.forget_move(move_id)

    def _answer_unknown(self, order: MoveOrder) -> None:
        if order.step == "return":
            self._outbox.moved(order.move_id, "returned", detail=UNKNOWN)
            return
        identity = order.process
        original = self._machine.originals.get(identity.pid) if identity is not None else None
        is_there = original is not None and original.identity == identity and original.is_alive
        self._outbox.moved(order.move_id, "thawed" if is_there else "gone", detail=UNKNOWN)

    def _return(self, move_id: str) -> None:
        if self._is_alive():
            full = self._machine.disk_is_full
            self._outbox.moved(move_id, "failed" if full else "returned", files=0 if full else 1)

    # ------------------------------------------------------------------ what guards record

    def _hearing(self, move_id: str) -> Callable[[GuardRecord], None]:
        return lambda record: self._recorded(move_id, record) if self._is_alive() else None

    def _report_again(self, journal: SimulatedJournal) -> None:
        if journal.records:
            self._recorded(journal.move_id, journal.records[-1])
        else:
            self._outbox.moved(journal.move_id, "opened")

    def _recorded(self, move_id: str, record: GuardRecord) -> None:
        if record.step is GuardPhase.FREEZING:
            return
        if record.step is GuardPhase.FROZEN:
            self._outbox.moved(move_id, "frozen", left_ms=max(record.until_ms - self._machine.boot_ms, 0))
            return
        if record.step is GuardPhase.DECIDED:
            self._decided.add(move_id)
            self._outbox.moved(move_id, "decided")
        elif record.step is GuardPhase.DEAD:
            if move_id not in self._decided:
                self._outbox.moved(move_id, "decided")
            self._outbox.moved(move_id, "dead", detail=record.why)
        else:
            self._outbox.moved(move_id, "gone" if record.step is GuardPhase.GONE else "thawed", detail=record.why)
