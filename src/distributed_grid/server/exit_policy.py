"""When the daemon exits: idle timer, explicit stop, and handover to a newer version or another config."""

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
from distributed_grid.server.active_config import SelectedConfig

log = logging.getLogger(__name__)


class IdleTimer:
    """Ends the daemon after `idle_seconds` without requests and without anything held; never with `keep_running`."""

    def __init__(self, *, keep_running: bool, idle_seconds: float) -> None:
        self.keep_running = keep_running
        self._idle_seconds = idle_seconds
        self._started = self._last_request = time.monotonic()
        self._stopping = asyncio.Event()

    @property
    def uptime_seconds(self) -> float:
        return time.monotonic() - self._started

    def reset(self) -> None:
        """A request came in just now."""
        self._last_request = time.monotonic()

    def stop(self) -> None:
        """Let `wait` return; safe to call twice."""
        self._stopping.set()

    async def wait(self, is_idle: Callable[[], Awaitable[bool]]) -> None:
        """Return on `stop`, or when `is_idle` held and no request came for long enough."""
        idle_since = time.monotonic()
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), min(max(self._idle_seconds / 10, 0.05), 5.0))
            if self.keep_running or not await is_idle():
                idle_since = time.monotonic()
            elif time.monotonic() - max(idle_since, self._last_request) >= self._idle_seconds:
                log.info("idle for %g s", self._idle_seconds)
                return


def is_unused(ledger: Ledger, now: int) -> bool:
    """Whether nothing is held, nobody waits, and no agent elsewhere counts on this control plane."""
    has_agents = ledger.engines or any(node.wanted for node in ledger.nodes.values())
    has_blocks = any(not block.lost for block in ledger.blocks.values())
    return not ledger.jobs and not has_blocks and not user_leases(ledger) and not has_agents


def user_leases(ledger: Ledger) -> list[Lease]:
    """Leases that somebody holds or waits for; automatic ones do not keep the daemon running."""
    return [lease for lease in ledger.leases.values() if not is_automatic(lease.request)]


async def should_hand_over(hello: ClientHello, selected: SelectedConfig, grid: Grid) -> bool:
    """Whether to exit for the client's newer version or other config; Refused while that config is in use."""
    if _numbers(hello.version) > _numbers(__version__):
        log.info("handing over to version %s", hello.version)
        return True
    if hello.config is None or hello.config == selected.digest:
        return False

    def in_use(ledger: Ledger, now: int) -> tuple[int, list[str]]:
        wanted = [node.name for node in ledger.nodes.values() if node.wanted and not node.joined]
        return len(user_leases(ledger)), wanted

    busy, served = await grid.read(in_use)
    using = f"the running control plane uses {selected.path or 'no config'}"
    if busy:
        raise Refused(
            f"{using} and holds {busy} lease{'' if busy == 1 else 's'}; "
            "wait until they are over, or type: grid daemon stop"
        )
    if served:
        raise Refused(f"{using} and agents run on {', '.join(served)}; first type: grid cluster stop")
    if hello.config_path is not None:
        ClusterConfig.from_yaml(hello.config_path)  # an unusable config must not end this daemon
    log.info("handing over to config %s", hello.config_path)
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".") if part.isdigit())
