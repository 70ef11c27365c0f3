"""Balancing the grid, round after round: read how hard the nodes work, and let that be decided upon."""

from __future__ import annotations

import asyncio
import logging

from distributed_grid.domain.balance import Rules
from distributed_grid.domain.events import PressureRead
from distributed_grid.monitoring.monitor import Monitor
from distributed_grid.orchestration.runtime import Grid

log = logging.getLogger(__name__)


async def keep_balance(grid: Grid, monitor: Monitor, rules: Rules | None) -> None:
    """A round at every interval, for ever; without rules nothing is ever done."""
    if rules is None:
        return
    while True:
        await asyncio.sleep(rules.interval_ms / 1000)
        try:
            await balance(grid, monitor, rules)
        except Exception:  # the outermost loop: the next round may well succeed
            log.exception("the grid could not be balanced")


async def balance(grid: Grid, monitor: Monitor, rules: Rules) -> None:
    """One round."""
    readings = await monitor.readings(rules.policy.ahead * rules.interval_ms)
    await grid.handle(PressureRead(readings, rules))
