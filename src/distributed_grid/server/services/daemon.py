"""Requests about the daemon, its config, and when it exits: idle timer, stop, handover to a newer version or config.

A config that a client requires is compared by meaning with the one in use. Live keys are applied at once; the others
take a new control plane, which takes over if nothing is held. A client that only asks, or gives something back,
requires none: it gets a line about the difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from distributed_grid import __version__
from distributed_grid.adapters.clock import AgeClock
from distributed_grid.api import requests
from distributed_grid.api.answers.daemon import (
    ActiveConfig,
    ClockList,
    ClockRow,
    DaemonInfo,
    DaemonStopping,
    Greeting,
    ReloadedConfig,
)
from distributed_grid.api.framing import PROTOCOL
from distributed_grid.config import ClusterConfig
from distributed_grid.config.cluster_config import meaning_digest, with_live_keys
from distributed_grid.control.grid import Grid
from distributed_grid.domain.clock_jumps import jump_text
from distributed_grid.domain.events import ClocksConfirmed
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import PULL_HOST
from distributed_grid.domain.rebalancing import is_automatic
from distributed_grid.errors import BadInput, GridError, ProtocolError, Refused
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.active_config import (
    ConfigComparison,
    NamedConfigs,
    SelectedConfig,
    compare_config,
    problem_note,
    save_content,
    save_selection,
)
from distributed_grid.server.endpoints import ADMIN, READ, endpoint
from distributed_grid.state_dir import NO_CONFIG, StateDir

MAX_NAMED = 10
TERMINATE_ADVICE = "grid workers terminate ID…"
MAX_KEYS = 5
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
        self._last_request = time.monotonic()

    def stop(self) -> None:
        """Let `wait` return; safe to call twice."""
        self._stopping.set()

    async def wait(self, is_idle: Callable[[], Awaitable[bool]]) -> None:
        """Return on `stop`, or when `is_idle` held and no request came for long enough."""
        idle_since = time.monotonic()
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(max(self._idle_seconds / 10, 0.05), 5.0)):
                    await self._stopping.wait()
            if self.keep_running or not await is_idle():
                idle_since = time.monotonic()
            elif time.monotonic() - max(idle_since, self._last_request) >= self._idle_seconds:
                log.info("idle for %g s", self._idle_seconds)
                return


def is_unused(ledger: Ledger, now: int) -> bool:
    """True if nothing is held, nobody waits for resources or files, no worker costs money, and no agent elsewhere
    depends on this control plane."""
    has_agents = ledger.engines or any(node.wanted for node in ledger.nodes.values())
    has_blocks = any(not block.lost for block in ledger.blocks.values())
    is_busy = ledger.deliveries or ledger.jobs or has_blocks or user_leases(ledger) or has_agents or ledger.workers
    return not is_busy


def user_leases(ledger: Ledger) -> list[Lease]:
    """Leases that somebody holds or waits for; automatic ones do not keep the daemon running."""
    return [lease for lease in ledger.leases.values() if not is_automatic(lease.request)]


class Holdings(NamedTuple):
    """Holdings that keep a control plane under its config."""

    leases: int
    agents: list[str]
    """Nodes on other machines whose agents are to run."""
    workers: list[str]

    def advice(self) -> str:
        """The holdings, and the command that ends them; empty where there are none."""
        if self.workers:
            return f"this one has workers of a provider ({name_some(self.workers)}): first type: {TERMINATE_ADVICE}"
        if self.leases:
            held = "1 lease: wait until it ends" if self.leases == 1 else f"{self.leases} leases: wait until they end"
            return f"this one holds {held}, or type: grid daemon stop (jobs go on)"
        if self.agents:
            return f"agents run on {name_some(self.agents)}: first type: grid cluster stop"
        return ""


def holdings(ledger: Ledger, now: int) -> Holdings:
    wanted = [node.name for node in ledger.nodes.values() if node.wanted and not node.joined]
    return Holdings(len(user_leases(ledger)), wanted, list(ledger.workers))


def name_keys(keys: list[str]) -> str:
    return ", ".join(keys[:MAX_KEYS]) + (f" and {len(keys) - MAX_KEYS} more" if keys[MAX_KEYS:] else "")


def difference_note(compared: ConfigComparison, selected: SelectedConfig) -> str:
    """How a named config differs from the one in use, and how to use it; empty where it does not.

    For a command that neither needs nor changes the config in use.
    """
    in_use = selected.path or "no config"
    if compared.problem and compared.path != selected.path:
        return f"{compared.problem}; the control plane uses {in_use}"
    if compared.problem:
        return problem_note(compared.problem)
    keys = [key for key, _ in compared.keys if key not in compared.inert]
    if not keys:
        return ""
    if compared.path == selected.path:
        return f"{compared.path} has changed in {name_keys(keys)}; to apply that, type: grid config reload"
    return (
        f"the control plane uses {in_use}, not {compared.shown_path} ({name_keys(keys)}); to change that, type: "
        f"grid --config {compared.path} config reload"
    )


def name_some(workers: list[str]) -> str:
    return ", ".join(workers[:MAX_NAMED]) + (" and others" if workers[MAX_NAMED:] else "")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".") if part.isdigit())


class NetworkListener(Protocol):
    """The TCP port of the control plane."""

    @property
    def url(self) -> str | None: ...
    @property
    def notices(self) -> list[str]:
        """Lines about an address that is not the one of the last control plane."""

    async def certify(self) -> object:
        """Have the certificate that clients are to trust."""

    async def listen(self, op: requests.KeepRunning) -> None:
        """Listen at the requested address, now and after a crash; without an address nothing changes."""

    def forget(self) -> None:
        """Let the next control plane listen where the config says."""


class DaemonService:
    """Answers the requests about the daemon."""

    def __init__(
        self,
        state_dir: StateDir,
        selected: SelectedConfig,
        grid: Grid,
        idle_timer: IdleTimer,
        listener: NetworkListener,
        ages: AgeClock,
        *,
        apply_live: Callable[[ClusterConfig], Awaitable[list[str]]],
    ) -> None:
        """`apply_live` makes the running parts use a config that differs in live keys only; it returns the nodes that
        keep their old limits, because they have lent more."""
        self._apply_live = apply_live
        self._config_lock = asyncio.Lock()
        self._state_dir = state_dir
        self._selected = selected
        self._grid = grid
        self._idle_timer = idle_timer
        self._listener = listener
        self._ages = ages

    @endpoint(READ)
    async def hello(self, op: requests.ClientHello, caller: Caller) -> Greeting:
        """Greet a client: apply the live changes of the config that it requires, or hand over to a newer version or to
        that config; Refused while the one in use is needed. A client that requires none gets a note."""
        notes = self._listener.notices if op.query_only else []
        handing_over = not op.query_only and _numbers(op.version) > _numbers(__version__)
        if handing_over:
            log.info("handing over to version %s", op.version)
        elif op.config_path is not None:
            async with self._config_lock:
                compared = await self._compare(op)
                if op.query_only or op.config is None:
                    self._remember(compared)
                    notes += [note for note in (difference_note(compared, self._selected),) if note]
                else:
                    handing_over = await self._require(compared, notes)
        if not handing_over and op.protocol != PROTOCOL:
            raise ProtocolError(
                f"this control plane is grid {__version__} and speaks protocol {PROTOCOL}, not {op.protocol} like grid "
                f"{op.version}: upgrade the older one"
            )
        hosts = await self._grid.read(lambda ledger, now: {node.name: node.host for node in ledger.nodes.values()})
        greeting = Greeting(
            protocol=PROTOCOL,
            version=__version__,
            pid=os.getpid(),
            handing_over=handing_over,
            notes=notes,
            config=self._selected.path,
            config_digest=self._selected.digest,
            started_at=time.time() - self._idle_timer.uptime_seconds,
            nodes=list(hosts),
            far_nodes=[name for name, host in hosts.items() if host not in ("local", PULL_HOST)],
        )
        if handing_over:
            self._idle_timer.stop()  # last: the answer is sent before anything else runs
        return greeting

    async def _compare(self, op: requests.ClientHello | requests.ReloadConfig) -> ConfigComparison:
        assert op.config_path is not None
        return await asyncio.to_thread(compare_config, self._selected, op.config_path, op.config_variables)

    async def _require(self, compared: ConfigComparison, notes: list[str]) -> bool:
        """Use this config, or raise; True if that takes a new control plane."""
        if compared.config is None:
            raise BadInput(f"{compared.problem}; without --config (and $GRID_CONFIG) the config in use is kept")
        advice = (await self._grid.read(holdings)).advice() if compared.fixed else ""
        if compared.blocking and advice:
            raise Refused(
                f"{compared.shown_path} differs in {name_keys(compared.blocking)} from the config in use; that takes "
                f"a new control plane, and {advice}"
            )
        if compared.fixed and not advice:
            log.info("handing over to config %s", compared.path)
            differs = f"{name_keys(compared.fixed)} {'differs' if len(compared.fixed) == 1 else 'differ'}"
            notes.append(f"the control plane is started anew with {compared.shown_path}: {differs}")
            return True
        if compared.live:
            notes += await self._apply(compared)
        elif not compared.fixed:
            self._adopt(compared, self._selected.config)
        self._remember(compared)
        return False

    async def _apply(self, compared: ConfigComparison) -> list[str]:
        """Apply the live keys of a config; notes about the applied keys and the others."""
        assert compared.config is not None
        config = with_live_keys(self._selected.config, compared.config)
        kept = await self._apply_live(config)
        if kept:  # they are tried again with the next command that requires this config
            old = {node.name: node.resource_sharing for node in self._selected.config.nodes}
            nodes = (
                replace(node, resource_sharing=old[node.name]) if node.name in kept else node for node in config.nodes
            )
            config = replace(config, nodes=tuple(nodes))
        limits = tuple(f"nodes.{name}.resource_sharing." for name in kept)
        applied = [key for key in compared.live if not key.startswith(limits)]
        log.info("applied of %s: %s", compared.path, ", ".join(applied))
        self._adopt(compared, config)
        notes = [f"applied {name_keys(applied)} of {compared.shown_path}"] if applied else []
        return notes + [f"{name} keeps its old limits: it has lent more than the new ones allow" for name in kept]

    def _adopt(self, compared: ConfigComparison, config: ClusterConfig) -> None:
        """Use this config from now on; it goes by its file's path if all of the file is in use."""
        assert compared.config is not None
        if compared.fixed:
            acting = config.without_acts()[1]
            inert = tuple(key for key in compared.config.without_acts()[1] if key not in acting)
            adopted = self._selected._replace(config=config, inert=inert if self._selected.inert else ())
        else:
            path = None if compared.path == NO_CONFIG else compared.path
            adopted = SelectedConfig(config, path, compared.digest or None)
        if adopted == self._selected:
            return
        self._selected = adopted
        save_selection(adopted, self._state_dir, stay=self._idle_timer.keep_running)
        if not compared.fixed and adopted.path is not None:
            save_content(self._state_dir, adopted.path, compared.digest)

    def _remember(self, compared: ConfigComparison) -> None:
        """Remember that the user has named this file, if it is the one in use."""
        if compared.config is not None and compared.path == self._selected.path and not compared.blocking:
            NamedConfigs(self._state_dir).add(compared.path, compared.digest, meaning_digest(compared.config))

    @endpoint(ADMIN, keeps_config=True)
    async def reload(self, op: requests.ReloadConfig, caller: Caller) -> ReloadedConfig:
        """Apply the live keys of a config; the others wait for a new control plane, which takes over at once if nothing
        is held."""
        async with self._config_lock:
            compared = await self._compare(op)
            if compared.config is None:
                raise BadInput(compared.problem)
            advice = (await self._grid.read(holdings)).advice() if compared.fixed else ""
            handing_over = bool(compared.fixed and not advice)
            notes: list[str] = []
            if handing_over:
                log.info("handing over to config %s", compared.path)
                self._idle_timer.stop()
            elif compared.live:
                notes = await self._apply(compared)
            elif not compared.fixed:
                self._adopt(compared, self._selected.config)
            self._remember(compared)
            return ReloadedConfig(
                path=None if compared.path == NO_CONFIG else compared.path,
                applied=[] if handing_over else compared.live,
                pending=[] if handing_over else compared.fixed,
                advice=advice,
                notes=notes,
                handing_over=handing_over,
            )

    @endpoint(READ)
    async def clocks(self, op: requests.GetClocks, caller: Caller) -> ClockList:
        """The wall clocks of the control plane and of the nodes on other machines, with their pending jumps."""
        state = self._ages.look()
        by_ms = state.jump.by_ms if state.jump is not None else 0

        def other_clocks(ledger: Ledger, now: int) -> list[ClockRow]:
            nodes = (node.name for node in ledger.nodes.values() if node.host not in ("local", PULL_HOST))
            observations = (ledger.observations.get(name) for name in nodes)
            return [
                ClockRow.of(seen.node, 0 if seen.clock_confirmed else seen.clock_jump_ms, seen.clock_waits_ms)
                for seen in observations
                if seen is not None
            ]

        others = await self._grid.read(other_clocks)
        return ClockList([ClockRow.of(None, by_ms, state.waits_ms), *others])

    @endpoint(ADMIN)
    async def confirm_clocks(self, op: requests.ConfirmClocks, caller: Caller) -> ClockList:
        """End the waits: here at once, on nodes with their next heartbeats. A second time is harmless."""
        self._ages.confirm()
        await self._grid.handle(ClocksConfirmed(caller.user))
        return await self.clocks(requests.GetClocks(), caller)

    @endpoint(READ)
    async def info(self, op: requests.GetDaemonInfo, caller: Caller) -> DaemonInfo:
        try:
            await self._listener.certify()
            problems = self._listener.notices
        except GridError as failure:
            problems = [*self._listener.notices, str(failure)]
        state = self._ages.look()
        jumped = [jump_text("this machine", state.jump.by_ms, state.waits_ms)] if state.jump is not None else []
        return DaemonInfo(
            pid=os.getpid(),
            socket=self._state_dir.socket,
            uptime_seconds=round(self._idle_timer.uptime_seconds, 3),
            config=self._selected.path,
            name=self._selected.config.name,
            version=__version__,
            state_dir=str(self._state_dir.root),
            stays=self._idle_timer.keep_running,
            python=sys.version.split()[0],
            host=socket.gethostname(),
            rest=self._listener.url,
            warnings=[*self._selected.config.warnings, *self._selected.notes(), *problems, *jumped],
        )

    @endpoint(ADMIN, keeps_config=True)
    async def config(self, op: requests.GetConfig, caller: Caller) -> ActiveConfig:
        return ActiveConfig(self._selected.path, self._selected.config.as_dict())

    @endpoint(ADMIN)
    async def keep_running(self, op: requests.KeepRunning, caller: Caller) -> DaemonInfo:
        """Do not exit when idle, and listen at the requested address; a successor after a crash does the same."""
        await self._listener.listen(op)
        self._set_keep_running(True)
        return await self.info(requests.GetDaemonInfo(), caller)

    @endpoint(ADMIN, keeps_config=True)
    async def stop(self, op: requests.StopDaemon, caller: Caller) -> DaemonStopping:
        """Stop; refused while workers of providers are not proven gone, unless it is forced: they cost money."""
        workers: list[str] = await self._grid.read(lambda ledger, now: list(ledger.workers))
        if workers and not op.force:
            raise Refused(
                f"{len(workers)} worker{'' if len(workers) == 1 else 's'} of a provider would go on and cost money: "
                f"{name_some(workers)}; first type: {TERMINATE_ADVICE}, or stop all the same: grid daemon stop --force"
            )
        self._listener.forget()
        self._set_keep_running(False)
        self._idle_timer.stop()
        return DaemonStopping(workers=workers)

    def _set_keep_running(self, keep_running: bool) -> None:
        self._idle_timer.keep_running = keep_running
        save_selection(self._selected, self._state_dir, stay=keep_running)
