"""The control plane's life: take the seat, load, serve, and leave without dropping anybody's request.

Rule 1: there is always exactly one owner of the ledger; who holds the lock is it.
Rule 2: leaving unlinks the socket first and releases the lock last; a client that was not served hears nothing
and asks the next control plane with the same request id.
Rule 3: jobs are not the daemon's children: they outlive it and are found again.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from typing import Any

from distributed_grid import __version__
from distributed_grid.adapters.child_process import Command
from distributed_grid.adapters.clock import GridClock, load_anchor, save_anchor
from distributed_grid.adapters.node.messages import AgentLinkChanged
from distributed_grid.adapters.probes.machine import MachineProbe
from distributed_grid.adapters.probes.nvml import GpuProbe
from distributed_grid.adapters.ray.engine import RayEngine
from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.adapters.workdir.content_store import ContentStore
from distributed_grid.agent.agent import Agent
from distributed_grid.agent.hardware import HardwareDetector
from distributed_grid.api.requests import ClientHello, KeepRunning
from distributed_grid.control.agents import AgentGateway
from distributed_grid.control.attempt_files import AttemptFiles
from distributed_grid.control.batch import EffectRouter
from distributed_grid.control.boost_file import ResourceBoostPersistence
from distributed_grid.control.content_sender import ContentSender
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import Viewer
from distributed_grid.domain.events import AlertChanged
from distributed_grid.errors import BadInput, GridError
from distributed_grid.monitoring.alerts import Alert
from distributed_grid.monitoring.monitor import Monitor
from distributed_grid.server.access.agent_websocket import AgentSockets
from distributed_grid.server.background import rebalance_forever, trim_content_forever
from distributed_grid.server.cluster import ClusterService
from distributed_grid.server.cluster_config import (
    ConfigRegistry,
    SelectedConfig,
    choose_config,
    declare_nodes,
    save_selection,
    should_keep_running,
)
from distributed_grid.server.exit_policy import IdleTimer, is_unused, should_hand_over
from distributed_grid.server.instance_lock import BACKLOG, InstanceLock, StartupReport
from distributed_grid.server.local_agent import local_nodes, make_local_agent
from distributed_grid.server.ray.attached_node_sync import AttachedNodeSync
from distributed_grid.server.ray.attachment import RayAttachment
from distributed_grid.server.ray.connector import RayConnector
from distributed_grid.server.ray.reconciler import EngineReconciler
from distributed_grid.server.rest.listener import RestListener
from distributed_grid.server.rpc.connection import Connection
from distributed_grid.server.rpc.dispatch import Dispatcher, login_name
from distributed_grid.server.services.boost_file_sync import BoostFileSync
from distributed_grid.state_dir import StateDir
from distributed_grid.wiring import balance_rules

log = logging.getLogger(__name__)


def serve(places: StateDir, seat: InstanceLock, options: argparse.Namespace, starter: StartupReport) -> int:
    """Serve from the seat that was taken, until told to stop or idle; the exit code of the process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(Daemon(places, seat, options).run(starter))
    except GridError as failure:
        log.error("%s", failure)
        starter.tell("failed", str(failure), bad_input=isinstance(failure, BadInput))
        return 1
    return 0


class Daemon:
    """The house that the API serves in."""

    def __init__(self, places: StateDir, seat: InstanceLock, options: argparse.Namespace) -> None:
        self._places = places
        self._seat = seat
        stays = bool(options.stay) or should_keep_running(places)
        self._patience = IdleTimer(stays=stays, idle_seconds=float(options.idle_seconds))
        self._leaving = False
        self._open_ones: set[Connection] = set()
        self._clock = GridClock(load_anchor(places))
        store = SqliteStore(places.database)
        self._chosen: SelectedConfig = choose_config(options.config, bool(options.explicit), store, places)
        self.content = ContentStore(places.host_dir / "content")
        self._links = AgentGateway(ContentSender(self.content))
        self._sockets = AgentSockets(places.host_dir / "links", self._links)
        self.ray = RayEngine(on_connected=self._ray_connected, on_link=self._ray_link_changed)
        self.engines = EngineReconciler(self.ray, hold_seconds=self._chosen.config.hold_seconds)
        effects = EffectRouter(self._links.perform, self.engines.perform, self._links.memory.perform)
        self.grid = Grid(store, self._clock, effects)
        self.monitor = Monitor(
            self._chosen.config.alerts,
            read=self.grid.read,
            store=store,
            offset_ms=self._clock.wall_offset_ms,
            on_alert=self._note,
        )
        self.files = AttemptFiles(places.jobs, self._links.files, self._is_here)
        self.cluster = ClusterService(self.grid, self._chosen.config, places)
        engine, grid_id = self.ray, self.cluster.grid_id
        following = AttachedNodeSync(
            self.grid, self._chosen.config, engine=engine, sockets=self._sockets, grid_id=grid_id
        )
        self.attaching = RayAttachment(
            self.grid,
            self._chosen.config,
            places,
            engine=engine,
            desk=self.engines,
            following=following,
            grid_id=grid_id,
        )
        self._port = RestListener(
            self,
            places.host_dir,
            self._chosen.config.server,
            configured=[node.name for node in self._chosen.config.nodes],
            reception=self._links,
        )
        self.admission = self._port.admission
        self._way = RayConnector(
            self.grid,
            self._chosen.config,
            places,
            engine=engine,
            desk=self.engines,
            cluster=self.cluster.ray,
            grid_id=grid_id,
        )
        self.boosts_kept = BoostFileSync(
            self.grid,
            ResourceBoostPersistence(state_dir=places.root),
            offset_ms=self._clock.wall_offset_ms,
        )
        self._api = Dispatcher(self)

    async def run(self, starter: StartupReport) -> None:
        """Serve until the end; then leave in good order."""
        save_anchor(self._places, self._clock.anchor())
        save_selection(self._chosen, self._places, stay=self._patience.stays)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.end)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        probe, gpus = MachineProbe(), GpuProbe()
        agent: Agent | None = None
        try:
            await self.grid.start()
            registry = ConfigRegistry(self._chosen.config)
            self._links.start(self.grid, registry, answer_program=self._api.answer_program)
            self.engines.start(self.grid)
            await self.monitor.start()
            await declare_nodes(self.grid, self._chosen.config, HardwareDetector(probe, gpus).capacity())
            await self.boosts_kept.recover()
            local = tuple(await self.grid.read(local_nodes))
            agent = make_local_agent(
                local, self._chosen.config, places=self._places, links=self._links, probe=probe, gpus=gpus
            )
            self._links.memory.attach_local(agent)
            await agent.start()
            self._links.memory.catch_up("")
            await self._sockets.open(node.name for node in self._chosen.config.nodes if not node.is_local)
            await self.cluster.start()
            self.attaching.start()
            await self._links.settled()
            await self._port.start(login_name())
            listener = self._seat.listen()
            server = await asyncio.get_running_loop().create_unix_server(self._accept, sock=listener, backlog=BACKLOG)
            gc.freeze()  # what is loaded stays: the collector need not look at it again and again
            log.info("serving, version %s, pid %d, config %s", __version__, os.getpid(), self._chosen.path)
            starter.tell("ready")
            rules = balance_rules(self._chosen.config)
            chores = [
                asyncio.create_task(trim_content_forever(self.grid, self.content)),
                asyncio.create_task(rebalance_forever(self.grid, self.monitor, rules)),
                asyncio.create_task(self.boosts_kept.keep()),
                asyncio.create_task(self._way.keep()),
            ]
            await self._patience.until_the_end(self._is_idle)
            for chore in chores:
                chore.cancel()
            self._seat.hide()
            server.close()
        finally:
            await self._leave(agent)

    async def _leave(self, agent: Agent | None) -> None:
        self._leaving = True
        for connection in list(self._open_ones):
            connection.close()
        await self._port.stop()
        await self.monitor.stop()
        await self.cluster.stop()
        await self._sockets.close()
        if agent is not None:
            await agent.stop()
        await self._links.stop()
        await self.engines.stop()
        await self.ray.stop()
        await self.boosts_kept.stop()
        await self.grid.stop()
        self.grid.store.close()
        save_anchor(self._places, self._clock.anchor())
        log.info("stopped")

    def _ray_connected(self) -> list[Command]:
        self.engines.compare_soon()
        return self.attaching.following.desired_state()

    async def ray_environment(self, node: str) -> dict[str, str]:
        is_attached = self.attaching.row is not None
        environ = self.attaching.environ() if is_attached else await self.cluster.ray.reach.environ(node)
        return {**environ, "RAY_NAMESPACE": "grid"}

    def _ray_link_changed(self, link: AgentLinkChanged) -> None:
        self.attaching.following.link_changed(link)

    def _note(self, alert: Alert) -> None:
        """Have an alert in the audit trail, soon."""
        event = AlertChanged(alert.node, alert.resource, alert.raised, alert.detail)
        asyncio.ensure_future(self.grid.handle(event)).add_done_callback(_log_failure)

    def _accept(self) -> Connection:
        return Connection(self._serve, self._open_ones)

    async def _serve(self, client: Connection, body: bytes) -> None:
        self.served()
        await self._api.serve(client, body)

    def _is_here(self, name: str) -> bool:
        """Whether a node is this machine; one that is not known any more was, if its files are here."""
        node = self.grid.ledger.nodes.get(name)
        return node is None or node.host == "local"

    async def _is_idle(self) -> bool:
        if self._port.is_busy or any(connection.unserved for connection in self._open_ones):
            return False
        return await self.grid.read(is_unused)

    # What the API asks of its house:

    @property
    def viewer(self) -> Viewer:
        sharing = self._chosen.config.resource_sharing
        return Viewer(self._clock.wall_offset_ms(), sharing.max_offers_per_node)

    @property
    def sharing_enabled(self) -> bool:
        return self._chosen.config.resource_sharing.enabled

    @property
    def custom_resources(self) -> frozenset[str]:
        config = self._chosen.config
        return frozenset(config.custom_resources) | {name for node in config.nodes for name in node.custom}

    def info(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "socket": str(self._places.socket),
            "uptime_seconds": round(self._patience.uptime_seconds, 3),
            "config": self._chosen.path,
            "version": __version__,
            "state_dir": str(self._places.root),
            "stays": self._patience.stays,
            "python": sys.version.split()[0],
            "host": socket.gethostname(),
            "rest": self._port.url,
            "warnings": list(self._chosen.config.warnings),
        }

    def config_view(self) -> dict[str, Any]:
        return {"path": self._chosen.path, "config": self._chosen.config.as_dict()}

    async def greet(self, hello: ClientHello) -> bool:
        """Hand over to a newer version, or to another config when nothing is held."""
        if not await should_hand_over(hello, self._chosen, self.grid):
            return False
        self.end()
        return True

    async def listen(self, op: KeepRunning) -> None:
        await self._port.listen(op)

    def served(self) -> None:
        self._patience.served()

    def stay(self, wanted: bool) -> None:
        if not wanted:
            self._port.forget()
        self._patience.stays = wanted
        save_selection(self._chosen, self._places, stay=wanted)

    @property
    def is_leaving(self) -> bool:
        return self._leaving

    def end(self) -> None:
        self._patience.end()


def _log_failure(done: asyncio.Future[Any]) -> None:
    if not done.cancelled() and done.exception() is not None:
        log.error("an alert is not in the audit trail: %s", done.exception())
