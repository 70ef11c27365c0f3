"""Background loops of the daemon: trimming shipped working directories, and rebalancing."""

from __future__ import annotations

import asyncio
import logging

from distributed_grid.adapters.workdir.content_store import GRACE_SECONDS, ContentMissing, ContentStore
from distributed_grid.adapters.workdir.manifest import decode
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import PressureRead
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import RebalanceRules
from distributed_grid.errors import GridError
from distributed_grid.monitoring.monitor import Monitor

MAX_CONTENT_BYTES = 10 * 1024**3
TRIM_SECONDS = 3600.0
log = logging.getLogger(__name__)


async def trim_content_forever(grid: Grid, content: ContentStore) -> None:
    """Trim at once and every hour, until cancelled."""
    while True:
        try:
            await trim_content(grid, content)
        except (GridError, OSError) as failure:
            log.warning("could not trim shipped working directories: %s", failure)
        await asyncio.sleep(TRIM_SECONDS)


async def trim_content(
    grid: Grid, content: ContentStore, *, max_bytes: int = MAX_CONTENT_BYTES, grace_seconds: float = GRACE_SECONDS
) -> int:
    """Remove the oldest content beyond `max_bytes`, but nothing that a living job needs; the bytes removed."""
    manifests = await grid.read(_manifests_in_use)
    return await asyncio.to_thread(_trim, content, manifests, max_bytes, grace_seconds)


def _manifests_in_use(ledger: Ledger, now: int) -> set[str]:
    return {job.command.workdir for job in ledger.jobs.values() if job.command.workdir}


def _trim(content: ContentStore, manifests: set[str], max_bytes: int, grace_seconds: float) -> int:
    keep = set(manifests)
    for digest in manifests:
        try:
            with content.open(digest) as file:
                keep |= decode(file.read()).contents().keys()
        except ContentMissing:
            continue
    return content.trim(max_bytes, keep=keep, grace_seconds=grace_seconds)


async def rebalance_forever(grid: Grid, monitor: Monitor, rules: RebalanceRules | None) -> None:
    """Rebalance at every interval, until cancelled; without rules do nothing."""
    if rules is None:
        return
    while True:
        await asyncio.sleep(rules.interval_ms / 1000)
        try:
            await rebalance_once(grid, monitor, rules)
        except Exception:  # the outermost loop: the next round may well succeed
            log.exception("the grid could not be balanced")


async def rebalance_once(grid: Grid, monitor: Monitor, rules: RebalanceRules) -> None:
    """One round."""
    readings = await monitor.readings(rules.policy.ahead * rules.interval_ms)
    await grid.handle(PressureRead(readings, rules))
