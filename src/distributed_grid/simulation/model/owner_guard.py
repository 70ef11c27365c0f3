"""How a simulated agent gives way to the owner of its machine: as `agent/owner/yield_policy.py` does, in fewer steps.

Rule 1: giving way is decided here and at once, and what was offered is withdrawn with it: `generation` grows.
Rule 2: for the CPU borrowed work stands still, and goes when the owner stays; for memory it goes one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed_grid.domain.jobs import Ending
from distributed_grid.simulation.model.event_queue import ScheduledEvent
from distributed_grid.simulation.model.machine import Owner, SimulatedProcess

if TYPE_CHECKING:
    from distributed_grid.simulation.model.agent import SimulatedAgent

PAUSE_AFTER_MS, EVICT_AFTER_MS, NOTICE_MS = 3_000, 60_000, 5_000
EVICT_GRACE_MS = 3_000
LOOK_MS = 1_000


class SimulatedOwnerGuard:
    """Looks for the owner while something is borrowed."""

    def __init__(self, agent: SimulatedAgent) -> None:
        self.generation = 0
        self.yields = False
        self._agent = agent
        self._machine = agent.machine
        self._since = 0
        self._paused: dict[str, SimulatedProcess] = {}
        self._next_look: ScheduledEvent | None = None

    def look_soon(self) -> None:
        """Look within a second, unless that is planned already."""
        self._look_after(self._machine.random.randint(50, LOOK_MS))

    def _look_after(self, delay_ms: int) -> None:
        if self._next_look is None or self._next_look.deed is None:
            self._next_look = self._machine.agenda.after(delay_ms, self._look)

    def let_go(self) -> None:
        """Everything that stands still goes on."""
        for run in self._paused.values():
            self._machine.resume(run)
        self._paused.clear()

    def _look(self) -> None:
        if not self._agent.alive:
            return
        borrowed = [run for run in self._machine.running if run.runs]
        if self._machine.owner is Owner.AWAY or not borrowed:
            if self.yields:
                self._come_back()
            return
        now = self._machine.agenda.now
        if not self.yields:
            self.yields, self._since = True, now
            self.generation = self._machine.boot_ms
            self._agent.measure()
        self._give_way(borrowed, now - self._since)
        self._look_after(LOOK_MS)

    def _give_way(self, borrowed: list[SimulatedProcess], for_ms: int) -> None:
        if self._machine.owner is Owner.MEMORY:
            if for_ms >= NOTICE_MS:
                self._evict(borrowed[-1])
        elif for_ms >= EVICT_AFTER_MS:
            for run in borrowed:
                self._evict(run)
        elif for_ms >= PAUSE_AFTER_MS:
            for run in borrowed:
                if run.lease_id not in self._paused and run.stop is None:
                    self._machine.pause(run)
                    self._paused[run.lease_id] = run
                    self._agent.tell_paused(run, paused=True)

    def _evict(self, run: SimulatedProcess) -> None:
        self._machine.resume(run)
        self._paused.pop(run.lease_id, None)
        if run.stop is None:
            self._machine.halt(run, str(Ending.RECLAIMED), f"its owner needs {self._agent.name}", EVICT_GRACE_MS)

    def _come_back(self) -> None:
        self.yields = False
        for run in self._paused.values():
            if run.runs:
                self._machine.resume(run)
                self._agent.tell_paused(run, paused=False)
        self._paused.clear()
        self._agent.measure()
