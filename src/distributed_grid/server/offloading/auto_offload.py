"""Automatic offloading in the control plane: evaluates the pressure of all nodes at every interval, and alerts.

While it is not enabled, nothing is read and nothing moves; but what was done to degraded nodes is undone.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection
from typing import Protocol

from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import OffloadPressureRead
from distributed_grid.domain.moves import MOVE_PREFIX, OffloadRules
from distributed_grid.domain.rebalancing import PressureReading, RebalanceRules
from distributed_grid.monitoring.alerts import Alert
from distributed_grid.reactor.pressure import MAX_MOVES_PER_LOOK, is_enabled

FIRST_EVALUATION_SECONDS = 5.0
"""Delay of the first evaluation: by then the nodes have reported; durations count from it."""
AHEAD_MS = 300_000
"""Horizon of the memory forecast, for nodes with blocks that could leave in time."""
log = logging.getLogger(__name__)


class PressureReader(Protocol):
    """Reads the pressure of all nodes: the monitor."""

    async def readings(
        self, ahead_ms: int = 0, *, only: Collection[str] | None = None
    ) -> tuple[PressureReading, ...]: ...


class AutoOffloader:
    """Evaluates at every interval; `alert` is called when a node is degraded or restored, and when it stops itself."""

    def __init__(
        self,
        grid: Grid,
        monitor: PressureReader,
        rules: RebalanceRules | None,
        offload: OffloadRules,
        *,
        alert: Callable[[Alert], None],
    ) -> None:
        """Without `rules` nothing is shared, so nothing moves."""
        self.offload = offload
        self.rules = rules
        self._grid = grid
        self._monitor = monitor
        self._alert = alert
        self._wanted = asyncio.Event()
        self._degraded: dict[str, str] | None = None
        self._stopped: str | None = None

    def set_rules(self, rules: RebalanceRules | None, offload: OffloadRules) -> None:
        """Go by other rules from the next evaluation on, which is soon."""
        if (rules, offload) != (self.rules, self.offload):
            self.rules, self.offload = rules, offload
            self._wanted.set()

    def evaluate_soon(self) -> None:
        """Evaluate at once: somebody has switched it on or off."""
        self._wanted.set()

    async def run(self) -> None:
        pause = min(self.offload.interval_ms / 1000, FIRST_EVALUATION_SECONDS)
        while True:
            try:
                async with asyncio.timeout(pause):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            pause = self.offload.interval_ms / 1000
            try:
                await self.evaluate()
            except Exception:  # the outermost loop: the next one may well succeed
                log.exception("automatic offloading could not evaluate the nodes")

    async def evaluate(self) -> None:
        """Evaluate once and act; do nothing while it is off and no node is degraded."""
        is_on, is_degraded, lenders = await self._grid.read(
            lambda ledger, now: (
                self.rules is not None and is_enabled(ledger, self.offload),
                bool(ledger.degraded),
                frozenset(ledger.blocks_at),
            )
        )
        if is_on or is_degraded:
            readings = await self._monitor.readings(AHEAD_MS if lenders else 0, only=lenders) if is_on else ()
            ids = tuple(f"{MOVE_PREFIX}{secrets.token_hex(6)}" for _ in range(MAX_MOVES_PER_LOOK if is_on else 0))
            await self._grid.handle(OffloadPressureRead(readings, self.rules, self.offload, ids))
        # Alerts report changes since the last evaluation, none for the state at the start of the control plane.
        now, degraded, stopped = await self._grid.read(
            lambda ledger, now: (
                now,
                {row.node: row.why for row in ledger.degraded.values()},
                ledger.auto_offload.stopped_why,
            )
        )
        known, self._degraded = self._degraded, degraded
        before, self._stopped = self._stopped, stopped
        mark = self.offload.memory_high / 1000
        alerts: list[tuple[str, str, bool, float, str]] = []
        if known is not None:
            new, restored = degraded.keys() - known.keys(), known.keys() - degraded.keys()
            alerts += [(node, "degraded", True, mark, f"{node} is degraded: {degraded[node]}") for node in new]
            alerts += [(node, "degraded", False, mark, f"{node} is not degraded any more") for node in restored]
        if stopped and before is not None and not before:
            alerts.append(("auto_offload", "auto_offload", True, 1.0, stopped))
        elif before and not stopped:
            alerts.append(("auto_offload", "auto_offload", False, 1.0, "automatic offloading goes on"))
        for subject, resource, raised, mark, detail in alerts:
            self._alert(
                Alert(
                    node=subject,
                    resource=resource,
                    raised=raised,
                    value=float(raised),
                    mark=mark,
                    at_ms=now,
                    detail=detail,
                )
            )
