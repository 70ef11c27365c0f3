"""The grid's own Ray: started over SSH, the head first and then all workers at once; supervised; stopped.

It is in the ledger before anything is started, and gone from it before anything is stopped. Nothing is started if
versions differ, and nothing that somebody else runs is touched. A head that died is restarted with every worker: it has
forgotten everything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from distributed_grid.adapters.child_process import Say
from distributed_grid.adapters.ray.driver_messages import Connect
from distributed_grid.adapters.ray.engine import RayEngine
from distributed_grid.adapters.ssh.process import PortForward, SshProcess, SshTarget
from distributed_grid.api.answers.cluster import RayStatus
from distributed_grid.config import ClusterConfig
from distributed_grid.control.grid import Grid
from distributed_grid.domain.engines import SSH, EngineRow
from distributed_grid.domain.events import EngineRegistered, EngineRemoved
from distributed_grid.errors import GridError, Refused, Unreachable
from distributed_grid.server.ray.engine_reconciler import NAME, EngineReconciler
from distributed_grid.server.ray.ray_nodes import (
    CONTROL_PLANE,
    RayCredentials,
    RayNodes,
    RayPorts,
    bracketed,
    check_versions,
    own_versions,
    security_risk,
)
from distributed_grid.state_dir import StateDir
from distributed_grid.supervision import start_logged, start_restarted

CONNECTION_POLL_SECONDS, CONNECT_SECONDS = 0.5, 45.0
SUPERVISION_SECONDS, MAX_PAUSE = 10.0, 60.0
MAX_PORT_CHOICES = 5
LOCAL_HOSTS = {"dashboard": "127.0.0.1", "client": "127.0.0.1", "head": "127.0.0.2"}
"""Where forwarded ports listen on this machine. Ray takes 127.0.0.1 for the machine's outer address."""
RAY_PYTHON = "GRID_RAY_PYTHON"
"""Variable with the interpreter that has Ray on a node; its folder comes first on the PATH of a job in a Ray boost."""
log = logging.getLogger(__name__)


class DesiredRayCluster:
    """Row of the grid's own Ray in the ledger: the address of its head, and the nodes on which it is to run."""

    def __init__(self, grid: Grid, ports: RayPorts) -> None:
        self._grid = grid
        self._ports = ports

    async def row(self) -> EngineRow | None:
        """None while the grid is to run no Ray."""
        row = await self._grid.read(lambda ledger, now: ledger.engines.get(NAME))
        return row if row is not None and row.mode == SSH else None

    async def set(self, head: str, session: str, nodes: tuple[str, ...]) -> None:
        address = f"{bracketed(head)}:{self._ports.settings.port}"
        await self._grid.handle(EngineRegistered(name=NAME, mode=SSH, address=address, session=session, nodes=nodes))

    async def reduce(self, row: EngineRow, nodes: tuple[str, ...]) -> None:
        """Keep the row for some of its nodes only."""
        await self._grid.handle(
            EngineRegistered(
                name=NAME, mode=SSH, address=row.address, namespace=row.namespace, session=row.session, nodes=nodes
            )
        )

    async def clear(self, reason: str) -> None:
        await self._grid.handle(EngineRemoved(NAME, reason))


class RayUrls(NamedTuple):
    """Ways from this machine to Ray; None while a port is not forwarded."""

    dashboard: str | None
    client: str | None
    head: str | None


class RayEndpoints:
    """Forwards the ports of Ray's head to this machine, and knows the variables with which programs find Ray."""

    def __init__(
        self,
        config: ClusterConfig,
        desired: DesiredRayCluster,
        *,
        nodes: RayNodes,
        ssh: SshProcess,
        target: Callable[[str], SshTarget],
        credentials: RayCredentials,
        ports: RayPorts,
    ) -> None:
        self._config = config
        self._desired = desired
        self._nodes = nodes
        self._ssh = ssh
        self._target = target
        self._credentials = credentials
        self._ports = ports

    def open(self) -> None:
        """Forward the dashboard, Ray's client port and its head, unless the head is on this machine."""
        head, ray = self._config.head, self._ports.settings
        if not head.is_local:
            dashboard = "127.0.0.1" if ray.dashboard_host in ("local", "0.0.0.0") else ray.dashboard_host
            ports = {"dashboard": (ray.dashboard_port, dashboard), "client": (ray.client_port, "127.0.0.1")}
            ports["head"] = (ray.port, "127.0.0.1")
            forwards = {name: PortForward(LOCAL_HOSTS[name], port, to, port) for name, (port, to) in ports.items()}
            self._ssh.forward_ports(self._target(head.name), forwards)

    def close(self) -> None:
        """Stop forwarding. A second time is harmless."""
        self._ssh.forward_ports(self._target(self._config.head.name), {})

    async def view(self) -> RayStatus | None:
        """Ray's address, the ways to it, and its risk; None without Ray."""
        row = await self._desired.row()
        if row is None:
            return None
        urls = self._urls(row)
        return RayStatus(
            mode=row.mode,
            address=row.address,
            session=row.session or None,
            authenticated=self._config.ray.auth == "token",
            tls=self._config.ray.tls,
            nodes={name: self._nodes.states.get(name, {}).get("state", "unknown") for name in row.nodes},
            risk=security_risk(self._config.ray),
            dashboard=urls.dashboard,
            client=urls.client,
            head=urls.head,
        )

    def _urls(self, row: EngineRow) -> RayUrls:
        ray, head = self._ports.settings, self._config.head
        if head.is_local:
            return RayUrls(f"http://127.0.0.1:{ray.dashboard_port}", f"ray://127.0.0.1:{ray.client_port}", row.address)
        ports = self._ssh.forwarded.get(head.name, {})
        schemes = {"dashboard": "http://", "client": "ray://", "head": ""}
        return RayUrls(
            *(
                f"{scheme}{LOCAL_HOSTS[name]}:{ports[name]}" if name in ports else None
                for name, scheme in schemes.items()
            )
        )

    async def environ(self, name: str | None = None) -> dict[str, str]:
        """Variables for Ray's own commands and for programs, on this machine or on a node."""
        row = await self._desired.row()
        if row is None:
            raise Refused("the grid has started no Ray; type: grid cluster start --ray")
        if name is not None and not self._nodes.is_local(name):
            return await self._environ_on(name, row)
        urls, head = self._urls(row), self._config.head.name
        environ = self._credentials.environ(auth=self._config.ray.auth, tls=self._config.ray.tls)
        if name is not None:
            environ[RAY_PYTHON] = self._nodes.python(name)
        if any(map(self._nodes.is_local, row.nodes)):
            environ["RAY_ADDRESS"] = row.address
        elif urls.client:
            environ["RAY_ADDRESS"] = urls.client
        else:  # without an address, a program would start a Ray of its own here
            raise Unreachable(
                f"no port of Ray's head is forwarded to this machine now; see: grid cluster status {head}"
            )
        if urls.dashboard:
            environ["RAY_API_SERVER_ADDRESS"] = urls.dashboard
        return environ

    async def start_driver(self, row: EngineRow, socket: str) -> tuple[dict[str, str], str]:
        """Start a Ray driver: its environment, and its socket if it runs on the head."""
        if any(map(self._nodes.is_local, row.nodes)):
            return await self.environ(), ""
        head = self._config.head.name
        environ = await self._environ_on(head, row)
        data = {"python": self._nodes.python(head), "environ": environ}
        self._ssh.run_ray_driver(self._target(head), socket, data)
        return environ, socket

    def stop_driver(self) -> None:
        self._ssh.run_ray_driver(self._target(self._config.head.name), "", {})

    async def _environ_on(self, name: str, row: EngineRow) -> dict[str, str]:
        if name not in row.nodes:
            raise Refused(f"Ray does not run on {name}; it runs on {', '.join(row.nodes)}")
        ray, state = self._ports.settings, await self._nodes.inspect(name, versions=False)
        environ = {"RAY_ADDRESS": row.address, "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor"}
        environ[RAY_PYTHON] = str(state.get("interpreter", ""))
        if ray.auth == "token":
            environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(state["token_path"])}
        if ray.tls:
            folder = str(state["token_path"]).rpartition("/")[0]
            files = {"SERVER_CERT": "cert", "SERVER_KEY": "key", "CA_CERT": "ca"}
            environ |= {f"RAY_TLS_{name}": f"{folder}/tls-{file}.pem" for name, file in files.items()}
            environ["RAY_USE_TLS"] = "1"
        if name == self._config.head.name:
            environ["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{ray.dashboard_port}"
        return environ


SayFor = Callable[[str], Say]
"""Reporter of the steps on a node of this name."""


class RayCluster:
    """Starts, supervises and stops Ray on the nodes of the config."""

    def __init__(
        self,
        grid: Grid,
        config: ClusterConfig,
        state_dir: StateDir,
        *,
        ssh: SshProcess,
        target: Callable[[str], SshTarget],
        engine: RayEngine,
        reconciler: EngineReconciler,
        grid_id: Callable[[], str],
    ) -> None:
        credentials = RayCredentials(state_dir.host_dir / "ray")
        self._config = config
        self._engine = engine
        self._ports = RayPorts(config, state_dir.host_dir / "ray" / "ports.json")
        self.desired = DesiredRayCluster(grid, self._ports)
        self.nodes = RayNodes(grid, config, ssh=ssh, target=target, credentials=credentials, ports=self._ports)
        self.endpoints = RayEndpoints(
            config,
            self.desired,
            nodes=self.nodes,
            ssh=ssh,
            target=target,
            credentials=credentials,
            ports=self._ports,
        )
        self._reconciler = reconciler
        self._grid_id = grid_id
        self._wheels = str(state_dir.root / "wheels")
        self._driver_socket = str(state_dir.host_dir / "links" / "ray-driver")
        self._connected_to: tuple[str, tuple[str, ...]] | None = None
        self._lock = asyncio.Lock()
        self._supervising: asyncio.Task[None] | None = None
        self._connecting: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ starting

    async def check_before_start(self, names: Iterable[str]) -> None:
        """Refused if Ray cannot be started on these nodes; nothing is started."""
        row = await self.desired.row()
        everyone = dict.fromkeys([*names, *(row.nodes if row is not None else ())])
        head = self._config.head.name
        if head not in everyone:
            raise Refused(f"Ray needs its head: type: grid cluster start --ray {head} {' '.join(names)}")
        here = [name for name in everyone if self.nodes.is_local(name)]
        measured = [name for name in here if not self.nodes.is_simulated(name)]
        if len(here) > 1 and measured:
            raise Refused(f"{' and '.join(here)} are one machine: let all of them be simulated, or name one of them")
        if row is None:
            await self._choose_ports()
        versions = {CONTROL_PLANE: own_versions()}
        answers = await asyncio.gather(*(self.nodes.inspect(name) for name in everyone), return_exceptions=True)
        problems = [f"{name}: {answer}" for name, answer in zip(everyone, answers, strict=True) if _failed(answer)]
        if problems:
            raise Refused(f"nothing was started: {'; '.join(problems)}", problems)
        for name, answer in zip(everyone, answers, strict=True):
            assert isinstance(answer, dict)
            versions[name] = (answer["python"], answer["ray"])
        check_versions(versions)

    async def start(self, names: Iterable[str], say: SayFor) -> dict[str, str]:
        """Start Ray on these nodes; the problem of each that failed. One failing worker stops no other."""
        async with self._lock:
            before = await self.desired.row()
            chosen = tuple(dict.fromkeys([*(before.nodes if before is not None else ()), *names]))
            addresses = await self.nodes.addresses(chosen)
            head, tries = self._config.head.name, MAX_PORT_CHOICES
            while True:
                await self.desired.set(addresses[head], before.session if before is not None else "", chosen)
                try:
                    problems = await self._bring_up(addresses, [*names], say, replace=False)
                    break
                except GridError as failure:
                    if (tries := tries - 1) and await self._choose_ports():
                        continue  # somebody took a port in the meantime
                    if before is None:
                        await self.desired.clear(f"it could not be started: {failure}")
                    return dict.fromkeys(names, f"Ray's head on {head} could not be started: {failure}")
            if problems:
                kept = tuple(name for name in chosen if name not in problems or name in getattr(before, "nodes", ()))
                await self.desired.set(addresses[head], self.nodes.session(head), kept)
            self._supervise()
            self.endpoints.open()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                while self._engine.connected is None:
                    await asyncio.sleep(CONNECTION_POLL_SECONDS / 5)
                await self._reconciler.compare(full=True)
        except (TimeoutError, GridError) as failure:
            reason = str(failure) or self._engine.problem or "no connection"
            late = f"the control plane is not connected with Ray yet: {reason}"
            log.warning("Ray: %s", late)
            say(head)(late)
        return problems

    async def _bring_up(
        self, addresses: dict[str, str], names: list[str], say: SayFor, *, replace: bool
    ) -> dict[str, str]:
        """Start the head, and all other nodes as soon as they can join it; problems of the workers, by name."""
        head = self._config.head.name
        if self.nodes.is_simulated(head) and (await self.nodes.inspect(head, versions=False))["state"] != "running":
            # Ray starts no head beside raylets of the last one on the same machine
            others = [node.name for node in self._config.nodes if self._config.is_simulated(node) and node.name != head]
            await asyncio.gather(*(self.nodes.stop(name, _silent(name), purge=False) for name in others))
        joinable = asyncio.Event()
        starting = asyncio.create_task(self.nodes.start_head(addresses, say(head), joinable, replace=replace))
        ready = asyncio.create_task(joinable.wait())
        try:
            await asyncio.wait((starting, ready), return_when=asyncio.FIRST_COMPLETED)
            workers = [name for name in names if name != head]
            if ready.done():  # they load Ray while the head does the rest
                loading = self._starts(workers, addresses, say, "anew" if replace else "", replace=replace)
            else:
                loading = []
            try:
                session = await starting
            except BaseException:
                await _cancel(loading)
                raise
            row = await self.desired.row()
            await self.desired.set(addresses[head], session, row.nodes if row is not None else (head, *workers))
            self.endpoints.open()
            self._engine.retry()
            if not loading:
                loading = self._starts(workers, addresses, say, session, replace=replace)
            done = await asyncio.gather(*loading, return_exceptions=True)
            if behind := [name for name in workers if self.nodes.is_behind(name, session)]:  # of a head that is gone
                again = self._starts(behind, addresses, say, session, replace=True)
                late = dict(zip(behind, await asyncio.gather(*again, return_exceptions=True), strict=True))
                done = [late.get(name, result) for name, result in zip(workers, done, strict=True)]
        finally:
            await _cancel([starting, ready])
        return {name: str(result) for name, result in zip(workers, done, strict=True) if _failed(result)}

    async def _choose_ports(self) -> bool:
        """Choose the ports of a simulated head anew unless it runs; True if they changed."""
        head = self._config.head.name
        if not self.nodes.is_simulated(head):
            return False
        state = await self.nodes.inspect(head, versions=False)
        return state["state"] == "stopped" and self._ports.choose()

    def _starts(
        self, names: list[str], addresses: dict[str, str], say: SayFor, session: str, *, replace: bool
    ) -> list[asyncio.Task[None]]:
        starts = [self.nodes.start_worker(name, addresses, say(name), session, replace=replace) for name in names]
        return [asyncio.create_task(start) for start in starts]

    # ------------------------------------------------------------------ stopping

    async def stop(self, names: Iterable[str], say: SayFor, *, purge: bool) -> dict[str, str]:
        """Stop Ray on these nodes, and everywhere if its head is among them. Problems, by node."""
        await self._unsupervise()  # it may be starting Ray just now
        async with self._lock:
            row = await self.desired.row()
            chosen, head = list(names), self._config.head.name
            if row is not None:
                if head in chosen or not set(row.nodes) - set(chosen):
                    chosen = list(dict.fromkeys([*chosen, *row.nodes]))
                    await self.desired.clear("it was stopped")
                    self._ports.release()
                    self.endpoints.close()
                else:
                    left = tuple(name for name in row.nodes if name not in chosen)
                    await self.desired.reduce(row, left)
                    self._supervise()
            done: dict[str, object] = {}
            for group in ([name for name in chosen if name != head], [name for name in chosen if name == head]):
                stops = [self.nodes.stop(name, say(name), purge=purge) for name in group]
                done |= zip(group, await asyncio.gather(*stops, return_exceptions=True), strict=True)
        return {name: str(result) for name, result in done.items() if _failed(result)}

    # ------------------------------------------------------------------ supervising

    async def start_supervision(self) -> None:
        """Supervise the Ray that an earlier control plane started, and connect with it."""
        row = await self.desired.row()
        named = tuple(name for name in row.nodes if self.nodes.is_known(name)) if row is not None else ()
        if row is not None and named != row.nodes:  # the Ray of nodes that left the config is stopped with their agents
            if self._config.head.name in named:
                await self.desired.reduce(row, named)
            else:
                await self.desired.clear("its head left the config")
                start_logged(self._stop_all(named), "the stop of Ray, whose head left the config")
        if await self.desired.row() is not None:
            self._ports.reserve()
            self._supervise()
            self.endpoints.open()
        self._connecting = start_restarted(self._connect_forever, "the connection to Ray")

    async def _connect_forever(self) -> None:
        """Connect with the cluster of the ledger, until cancelled."""
        while True:
            try:
                row = await self.desired.row()
                if row is None and self._connected_to is not None:
                    self._connected_to = None
                    self.endpoints.stop_driver()
                    await self._engine.stop()
                elif row is not None and row.session and self._connected_to != (row.address, row.nodes):
                    environ, socket = await self.endpoints.start_driver(row, self._driver_socket)
                    environ.pop("RAY_ADDRESS", None)
                    settings = Connect(
                        row.address,
                        self._grid_id(),
                        row.namespace,
                        hold_seconds=self._config.hold_seconds,
                        environ=environ,
                        wheels=self._wheels,
                        await_raylet=True,
                    )
                    self._engine.connect(settings, socket)
                    self._connected_to = (row.address, row.nodes)
            except GridError as failure:
                log.warning("no connection with Ray: %s", failure)
            await asyncio.sleep(CONNECTION_POLL_SECONDS)

    async def _stop_all(self, names: tuple[str, ...]) -> None:
        stops = [self.nodes.stop(name, _silent(name), purge=False) for name in names]
        for name, done in zip(names, await asyncio.gather(*stops, return_exceptions=True), strict=True):
            if _failed(done):
                log.warning("Ray on %s goes on: %s", name, done)

    async def stop_supervision(self) -> None:
        """Leave Ray running. Safe to call twice."""
        await self._unsupervise()
        self._ports.release()
        if self._connecting is not None:
            await _cancel([self._connecting])
            self._connecting = None

    def _supervise(self) -> None:
        """Begin supervision. A second call changes nothing."""
        if self._supervising is None or self._supervising.done():
            self._supervising = start_restarted(self._run, "the supervision of Ray")

    async def _unsupervise(self) -> None:
        if self._supervising is not None and self._supervising is not asyncio.current_task():
            await _cancel([self._supervising])
            self._supervising = None

    async def _run(self) -> None:
        pause = SUPERVISION_SECONDS
        while True:
            await self._engine.wait_for_loss(pause)  # its head may have died
            try:
                async with self._lock:
                    await self._restart_dead()
                pause = SUPERVISION_SECONDS
            except GridError as failure:
                log.warning("Ray: %s", failure)
                pause = min(2 * pause, MAX_PAUSE)

    async def _restart_dead(self) -> None:
        """Restart dead parts: the head with everything, or single workers."""
        row = await self.desired.row()
        if row is None:
            return
        inspections = [self.nodes.inspect(name, versions=False) for name in row.nodes]
        for name, answer in zip(row.nodes, await asyncio.gather(*inspections, return_exceptions=True), strict=True):
            self.nodes.states[name] = (
                answer if isinstance(answer, dict) else {"state": "unknown", "problem": str(answer)}
            )
        head = self._config.head.name
        state = self.nodes.states.get(head, {}).get("state")
        if state in ("stopped", "broken"):
            log.warning("Ray's head on %s is %s: starting it anew", head, state)
            addresses = await self.nodes.addresses(row.nodes)
            problems = await self._bring_up(addresses, [*row.nodes], _silent, replace=True)
            log.warning("Ray was started anew%s", f"; {problems}" if problems else "")
        elif state == "running":
            session = self.nodes.session(head)
            if session != row.session:
                await self.desired.set(row.address.rpartition(":")[0].strip("[]"), session, row.nodes)
            behind = [name for name in row.nodes if name != head and self.nodes.is_behind(name, session)]
            if behind:
                log.warning("Ray on %s is not with its head: starting it anew", ", ".join(behind))
                addresses = await self.nodes.addresses(row.nodes)
                starts = self._starts(behind, addresses, _silent, session, replace=True)
                for name, done in zip(behind, await asyncio.gather(*starts, return_exceptions=True), strict=True):
                    if _failed(done):
                        log.warning("Ray on %s: %s", name, done)


def _silent(name: str) -> Say:
    return lambda step: None


def _failed(answer: object) -> bool:
    """True for an error of ours; any other exception is a bug, and is raised."""
    if isinstance(answer, BaseException) and not isinstance(answer, GridError):
        raise answer
    return isinstance(answer, GridError)


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
