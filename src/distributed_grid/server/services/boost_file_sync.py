"""Synchronization of the boost file with the ledger, and recovery of boosts from it into a new ledger.

The file is written after the ledger, in a thread, and read only once by each ledger. A file that is corrupt or cannot
be written is a warning, never a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Literal

from distributed_grid.api.answers.common import headline, utc
from distributed_grid.control.boost_file import ResourceBoostPersistence, StoredBoost, StoredClaim
from distributed_grid.control.grid import BOOSTS, Grid
from distributed_grid.domain.events import LeaseRecovered, LeasesRecovered
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import is_automatic, is_boost
from distributed_grid.domain.resources import Amounts, Priority
from distributed_grid.domain.states import LeaseState
from distributed_grid.errors import GridError
from distributed_grid.reactor.lease_lifetime import CLAIMS_READ
from distributed_grid.state_dir import machine_id

SETTLE_SECONDS, MAX_SETTLE_SECONDS, SETTLE_FACTOR = 0.2, 2.0, 10
"""How long changes are gathered before they are written: `SETTLE_FACTOR` times the last write, within these bounds."""
CHECK_SECONDS = 30.0
"""How often the file is checked without a change: somebody may have removed it."""
log = logging.getLogger(__name__)


class BoostFileSync:
    """Writes the boost file, and reports its problems. `offset_ms` is how far the wall clock is ahead of grid time."""

    def __init__(self, grid: Grid, persistence: ResourceBoostPersistence, *, offset_ms: Callable[[], int]) -> None:
        self._grid = grid
        self._persistence = persistence
        self._offset_ms = offset_ms
        self._machine = machine_id()
        self._unwritten = ""
        self._aside: list[Path] = []
        self._written: list[StoredBoost] | None = None
        self._write_lock = asyncio.Lock()

    @property
    def path(self) -> Path:
        return self._persistence.path

    def warnings(self) -> list[str]:
        """Problems to show to users: the file cannot be written, or was corrupt."""
        found = [self._unwritten] if self._unwritten else []
        found += [
            f"Persistence file corrupted: it was set aside as {aside} and written anew from the ledger, nothing is "
            "lost; remove it when you have looked at it"
            for aside in self._aside
            if aside.exists()
        ]
        return found

    async def recover(self) -> None:
        """Claim the boosts of the file for a new ledger; then write the file from the ledger."""
        is_new = await self._grid.read(lambda ledger, now: CLAIMS_READ not in ledger.counters)
        if is_new:
            try:
                contents = await asyncio.to_thread(self._persistence.read)
            except OSError as failure:
                self._unwritten = self._problem(failure)
                log.warning("%s", self._unwritten)
                return
            mine = [boost for boost in contents.boosts if await self._is_recoverable(boost)]
            await self._grid.handle(LeasesRecovered(tuple(claim_of(boost, self._offset_ms()) for boost in mine)))
            if mine:
                log.warning("recovered from %s, to be confirmed: %s", self.path, ", ".join(b.boost_id for b in mine))
        await self.write()

    async def _is_recoverable(self, boost: StoredBoost) -> bool:
        """Whether a boost is of this machine, was not being released, and has not ended."""
        if boost.machine_id != self._machine or boost.state == "releasing":
            return False
        return not await self._grid.query(lambda store: store.ended("lease", key=boost.boost_id, limit=1))

    async def run(self) -> None:
        """Write the file whenever a boost has changed, until cancelled."""
        changed = self._grid.watch(BOOSTS)
        try:
            while True:
                began = time.monotonic()
                try:
                    await self.write()
                except GridError as failure:  # the store is full: what is not durable is not readable
                    log.warning("the file of boosts may be behind: %s", failure)
                pause = min(max(SETTLE_SECONDS, SETTLE_FACTOR * (time.monotonic() - began)), MAX_SETTLE_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_SECONDS):  # `wait_for` may swallow a cancellation
                        await changed.wait()
                        await asyncio.sleep(pause)
                changed.clear()
        finally:
            self._grid.unwatch(BOOSTS, changed)

    async def stop(self) -> None:
        """Write the last changes; safe to call twice."""
        try:
            await self.write()
        except (GridError, RuntimeError) as failure:  # the grid has stopped already
            log.warning("the file of boosts may be behind: %s", failure)

    async def write(self) -> None:
        """Write the file from the ledger; a problem becomes a warning."""
        async with self._write_lock:
            offset_ms = self._offset_ms()
            boosts = await self._grid.read(lambda ledger, now: stored_boosts(ledger, offset_ms, self._machine))
            if boosts == self._written and await asyncio.to_thread(self.path.is_file):
                return
            if not boosts and self._written is None and not await asyncio.to_thread(self.path.exists):
                return  # nobody has ever asked for one
            try:
                aside = await asyncio.to_thread(self._persistence.save, boosts, self._machine)
            except OSError as failure:
                if not self._unwritten:
                    log.warning("%s", self._problem(failure))
                self._unwritten, self._written = self._problem(failure), None
                return
            self._unwritten, self._written = "", boosts
            if aside is not None:
                log.warning("%s is corrupt and was set aside as %s", self.path, aside)
                self._aside.append(aside)

    def _problem(self, failure: OSError) -> str:
        return (
            f"Boosts not persisting across CLI commands: {self.path} cannot be written "
            f"({failure.strerror or failure}); they are safe in the ledger, but could not be recovered without it: "
            "check the permissions of the file and its directory"
        )


def stored_boosts(ledger: Ledger, offset_ms: int, machine: str) -> list[StoredBoost]:
    """Every boost that holds something, as the file has it; those of the rebalancer are not kept."""
    boosts = []
    for lease in ledger.leases.values():
        if not lease.holds or not is_boost(lease) or is_automatic(lease.request) or lease.claim is None:
            continue
        kind, amount = headline(lease.request.ask)
        boost = StoredBoost(
            boost_id=lease.id,
            source_node=lease.node,
            target_node=lease.request.target,
            resource_type=kind,
            amount=amount,
            allocated_at=utc(lease.granted_at_ms + offset_ms),
            expires_at=utc(lease.ends_at_ms + offset_ms) if lease.ends_at_ms else None,
            is_active=lease.state is LeaseState.ACTIVE,
            state=_STATES[lease.state],
            user=lease.request.user,
            team=lease.request.team,
            priority=lease.request.priority.name.lower(),
            fence=lease.fence,
            claim=StoredClaim.of(lease.claim),
            machine_id=machine,
        )
        boosts.append(boost)
    return boosts


_STATES: dict[LeaseState, Literal["reserving", "active", "releasing"]] = {
    LeaseState.RESERVING: "reserving",
    LeaseState.ACTIVE: "active",
    LeaseState.RELEASING: "releasing",
}


def claim_of(boost: StoredBoost, offset_ms: int) -> LeaseRecovered:
    """A boost of the file as an event for the ledger."""
    claim = boost.claim.value()
    granted_at_ms = _ms(boost.allocated_at) - offset_ms
    ends_at_ms = _ms(boost.expires_at) - offset_ms if boost.expires_at is not None else 0
    gpu_milli = sum(share.milli for share in claim.gpus)
    gpu_memory = max((share.memory_bytes for share in claim.gpus), default=0)
    request = Request(
        id=boost.boost_id,
        user=boost.user,
        ask=Amounts(claim.cpu_milli, claim.memory_bytes, gpu_milli, gpu_memory, claim.custom),
        priority=Priority.parse(boost.priority),
        require=(boost.source_node,),
        wait_ms=0,
        duration_ms=max(ends_at_ms - granted_at_ms, 0) if ends_at_ms else 0,
        target=boost.target_node,
        team=boost.team,
        anti_affinity=(boost.target_node,),
    )
    return LeaseRecovered(
        request=request,
        node=boost.source_node,
        claim=claim,
        fence=boost.fence,
        granted_at_ms=granted_at_ms,
        ends_at_ms=ends_at_ms,
    )


def _ms(moment: str) -> int:
    return round(1000 * datetime.fromisoformat(moment).timestamp())
