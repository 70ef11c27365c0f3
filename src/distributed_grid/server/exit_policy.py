"""How long a control plane stays: until it is told to stop, or until nothing is held and nobody comes any more.

Whether a control plane makes room for its client's: for a newer version, or for another config.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from distributed_grid import __version__
from distributed_grid.api.requests import ClientHello
from distributed_grid.config import ClusterConfig
from distributed_grid.control.grid import Grid
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import is_automatic
from distributed_grid.errors import Refused
from distributed_grid.server.cluster_config import SelectedConfig

log = logging.getLogger(__name__)


class IdleTimer:
    """Knows since when nobody was served, and how long to wait then; for ever where `stays` is set."""

    def __init__(self, *, stays: bool, idle_seconds: float) -> None:
        self.stays = stays
        self._idle_seconds = idle_seconds
        self._started = self._last_served = time.monotonic()
        self._ending = asyncio.Event()

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self._started

    def served(self) -> None:
        """Somebody was served just now."""
        self._last_served = time.monotonic()

    def end(self) -> None:
        """Wait no longer; safe to call twice."""
        self._ending.set()

    async def until_the_end(self, is_idle: Callable[[], Awaitable[bool]]) -> None:
        """Return when told to stop, or when nothing was held and nobody was served for long enough."""
        idle_since = time.monotonic()
        while not self._ending.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), min(max(self._idle_seconds / 10, 0.05), 5.0))
            if self.stays or not await is_idle():
                idle_since = time.monotonic()
            elif time.monotonic() - max(idle_since, self._last_served) >= self._idle_seconds:
                log.info("idle for %g s", self._idle_seconds)
                return


def is_unused(ledger: Ledger, now: int) -> bool:
    """Whether nothing is held, nobody waits, and no agent elsewhere counts on this control plane."""
    kept = ledger.engines or any(node.wanted for node in ledger.nodes.values())
    blocks = any(not block.lost for block in ledger.blocks.values())
    return not ledger.jobs and not blocks and not users_leases(ledger) and not kept


def users_leases(ledger: Ledger) -> list[Lease]:
    """What somebody holds or waits for; what the grid borrowed for its nodes keeps nobody from leaving."""
    return [lease for lease in ledger.leases.values() if not is_automatic(lease.request)]


async def should_hand_over(hello: ClientHello, chosen: SelectedConfig, grid: Grid) -> bool:
    """Whether to make room for whoever says this; Refused with what to type while something is held here."""
    if _numbers(hello.version) > _numbers(__version__):
        log.info("handing over to version %s", hello.version)
        return True
    if hello.config is None or hello.config == chosen.digest:
        return False

    def held(ledger: Ledger, now: int) -> tuple[int, list[str]]:
        wanted = [node.name for node in ledger.nodes.values() if node.wanted and not node.joined]
        return len(users_leases(ledger)), wanted

    busy, served = await grid.read(held)
    using = f"the running control plane uses {chosen.path or 'no config'}"
    if busy:
        raise Refused(
            f"{using} and holds {busy} lease{'' if busy == 1 else 's'}; "
            "wait until they are over, or type: grid daemon stop"
        )
    if served:
        raise Refused(f"{using} and agents run on {', '.join(served)}; first type: grid cluster stop")
    if hello.config_path is not None:
        ClusterConfig.from_yaml(hello.config_path)  # one that cannot be used takes nobody's place
    log.info("handing over to config %s", hello.config_path)
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".") if part.isdigit())
