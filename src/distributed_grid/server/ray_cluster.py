"""The grid's own Ray: started over SSH, the head first and then all workers at once; kept running; stopped.

Rule 1: that it is wanted is in the ledger before anything is started, and is gone from it before it is stopped.
Rule 2: nothing is started where versions differ, and nothing that somebody else runs is touched.
Rule 3: a head that died is started anew. It has forgotten everything, so every worker is, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from distributed_grid.adapters.shells.messages import Passage, Target
from distributed_grid.config import ClusterConfig, NodeConfig
from distributed_grid.domain.engines import SSH, EngineRow
from distributed_grid.domain.events import EngineGivenUp, EngineWanted
from distributed_grid.domain.resources import NOTHING, Capacity
from distributed_grid.errors import GridError, Refused
from distributed_grid.orchestration.places import Places
from distributed_grid.orchestration.runtime import Grid
from distributed_grid.server.ray_plan import HERE, check_versions, head_ports, options_of, own_versions, risk_of
from distributed_grid.server.ray_secrets import RaySecrets
from distributed_grid.server.shells import Say, Shells

NAME = "ray"
NEAR = {"dashboard": "127.0.0.1", "client": "127.0.0.1", "head": "127.0.0.2"}
"""Where the ways to another machine begin on this one. Ray takes 127.0.0.1 for the machine's outer address."""
LOOK_SECONDS, LONGEST_PAUSE = 10.0, 60.0
ANSWERS = "Ray's head answers"
"""What the script on the head says as soon as workers can join; see `on_node_ray.py`."""
log = logging.getLogger(__name__)
Tell = Callable[[str], Say]
Life = dict[str, Any]


class RayCluster:
    """Starts, watches and stops Ray on the nodes of the config."""

    def __init__(
        self, grid: Grid, config: ClusterConfig, places: Places, shells: Shells, target: Callable[[str], Target]
    ) -> None:
        self._grid = grid
        self._config = config
        self._nodes = {node.name: node for node in config.nodes}
        self._shells = shells
        self._target = target
        self._secrets = RaySecrets(places.host_dir / "ray")
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.lives: dict[str, Life] = {}
        self.on_running: Callable[[], Awaitable[str]] = _nothing

    # ------------------------------------------------------------------ starting

    async def install(self, name: str, say: Say) -> str:
        """Have Ray on a node, in this control plane's version, where the config does not name one that is there."""
        own_versions()
        if python := self._python(name):
            return f"Ray is that of {python}"
        return str((await self._shells.ask("ray-install", self._target(name), {}, say))["words"])

    async def look_before(self, names: Iterable[str]) -> None:
        """Raise where Ray could not be started on these nodes, before anything is: versions first of all."""
        row = await self.row()
        everyone = dict.fromkeys([*names, *(row.nodes if row is not None else ())])
        head = self._config.head.name
        if head not in everyone:
            raise Refused(f"Ray needs its head: type: grid cluster start --ray {head} {' '.join(names)}")
        here = [name for name in everyone if self._nodes[name].is_local]
        if len(here) > 1:
            raise Refused(f"{' and '.join(here)} are one machine, and one machine is one node of Ray: name one of them")
        found = {HERE: own_versions()}
        answers = await asyncio.gather(*(self._look(name) for name in everyone), return_exceptions=True)
        problems = [f"{name}: {answer}" for name, answer in zip(everyone, answers, strict=True) if _failed(answer)]
        if problems:
            raise Refused(f"nothing was started: {'; '.join(problems)}", problems)
        for name, answer in zip(everyone, answers, strict=True):
            assert isinstance(answer, dict)
            found[name] = (answer["python"], answer["ray"])
        check_versions(found)

    async def start(self, names: Iterable[str], tell: Tell) -> dict[str, str]:
        """Have Ray running on these nodes; a problem of each that failed. One worker that fails stops no other."""
        async with self._lock:
            before = await self.row()
            wanted = tuple(dict.fromkeys([*(before.nodes if before is not None else ()), *names]))
            addresses = await self._addresses(wanted)
            head = self._config.head.name
            await self._want(addresses[head], before.session if before is not None else "", wanted)
            try:
                problems = await self._bring_up(addresses, [*names], tell, replace=False)
            except GridError as failure:
                if before is None:
                    await self._grid.handle(EngineGivenUp(NAME, f"it could not be started: {failure}"))
                return dict.fromkeys(names, f"Ray's head on {head} could not be started: {failure}")
            if problems:
                kept = tuple(one for one in wanted if one not in problems or one in getattr(before, "nodes", ()))
                await self._want(addresses[head], self._session(head), kept)
            self.watch()
            self._open_ways()
        if late := await self.on_running():
            log.warning("Ray: %s", late)
            tell(head)(late)
        return problems

    async def _bring_up(
        self, addresses: dict[str, str], names: list[str], tell: Tell, *, replace: bool
    ) -> dict[str, str]:
        """The head, and all other nodes as soon as they can join it; problems of the workers, by name."""
        head = self._config.head.name
        joinable = asyncio.Event()
        starting = asyncio.create_task(self._start_head(addresses, tell(head), joinable, replace=replace))
        ready = asyncio.create_task(joinable.wait())
        try:
            await asyncio.wait((starting, ready), return_when=asyncio.FIRST_COMPLETED)
            workers = [name for name in names if name != head]
            if ready.done():  # they load Ray while the head does the rest
                loading = self._starts(workers, addresses, tell, "anew" if replace else "", replace=replace)
            else:
                loading = []
            try:
                session = await starting
            except BaseException:
                await _cancelled(loading)
                raise
            await self._want(addresses[head], session, (await self._wanted_nodes()) or (head, *workers))
            self._open_ways()
            if not loading:
                loading = self._starts(workers, addresses, tell, session, replace=replace)
            done = await asyncio.gather(*loading, return_exceptions=True)
            if behind := [name for name in workers if self._is_behind(name, session)]:  # of a head that is gone
                again = self._starts(behind, addresses, tell, session, replace=True)
                late = dict(zip(behind, await asyncio.gather(*again, return_exceptions=True), strict=True))
                done = [late.get(name, one) for name, one in zip(workers, done, strict=True)]
        finally:
            await _cancelled([starting, ready])
        return {name: str(one) for name, one in zip(workers, done, strict=True) if _failed(one)}

    def _starts(
        self, names: list[str], addresses: dict[str, str], tell: Tell, session: str, *, replace: bool
    ) -> list[asyncio.Task[None]]:
        starts = [self._start_worker(name, addresses, tell(name), session, replace=replace) for name in names]
        return [asyncio.create_task(start) for start in starts]

    async def _start_head(self, addresses: dict[str, str], say: Say, joinable: asyncio.Event, *, replace: bool) -> str:
        def told(step: str) -> None:
            say(step)
            if step == ANSWERS:
                joinable.set()

        head = self._config.head.name
        say("starting Ray's head")
        order = await self._order(head, addresses, "")
        order |= {"ports": head_ports(self._config.ray), "replace": replace}
        self.lives[head] = answer = await self._shells.ask("ray-start", self._target(head), order, told)
        return str(answer["session"])

    async def _start_worker(
        self, name: str, addresses: dict[str, str], say: Say, session: str, *, replace: bool = False
    ) -> None:
        say("starting Ray")
        head = f"{_bracketed(addresses[self._config.head.name])}:{self._config.ray.port}"
        order = await self._order(name, addresses, head)
        order |= {"session": session, "replace": replace}
        self.lives[name] = await self._shells.ask("ray-start", self._target(name), order, say)

    async def _order(self, name: str, addresses: dict[str, str], head: str) -> dict[str, Any]:
        """What a node needs to know to start Ray; secrets travel inside the SSH connection."""
        ray = self._config.ray
        has = await self._capacity(name)
        order: dict[str, Any] = {
            "role": "worker" if head else "head",
            "options": options_of(name, addresses[name], head, ray, has),
            "memory_bytes": has.memory_bytes,
            "python": self._python(name),
            "auth": ray.auth,
        }
        if ray.auth == "token":
            order["token"] = self._secrets.token()
        if ray.tls:
            order["tls"] = self._secrets.certificates(name, (addresses[name],))
        return order

    async def _capacity(self, name: str) -> Capacity:
        def known(ledger: Any, now: int) -> Capacity:
            node = ledger.nodes.get(name)
            return node.capacity if node is not None else NOTHING

        return await self._grid.read(known)

    async def _addresses(self, names: Iterable[str]) -> dict[str, str]:
        """By which address the others reach each node."""
        found = await asyncio.gather(*(self._address(self._nodes[name], [*names]) for name in names))
        return dict(zip(names, found, strict=True))

    async def _address(self, node: NodeConfig, names: list[str]) -> str:
        others = [self._nodes[name] for name in names if name != node.name]
        host = node.ray_address or node.host
        if node.is_local and not node.ray_address:
            return _own_address_towards(next((one.ray_address or one.host for one in others), ""))
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host.strip("[]")))
        asked = next(iter(others), node)  # another machine's word: its own name may mean loopback to a machine itself
        try:
            found = str((await self._shells.ask("address", self._target(asked.name), {"host": host}))["address"])
        except GridError as failure:
            raise Refused(f"{node.name}: {failure}; set `ray_address` of this node") from failure
        if ipaddress.ip_address(found).is_loopback and others:
            raise Refused(f"{node.name}: {host} is a loopback address on {asked.name}; set `ray_address` of this node")
        return found

    # ------------------------------------------------------------------ stopping

    async def stop(self, names: Iterable[str], tell: Tell, *, purge: bool) -> dict[str, str]:
        """Have no Ray of ours on these nodes; without its head it is over everywhere. Problems, by node."""
        await self._unwatch()  # whatever it is busy with is not wanted any more
        async with self._lock:
            row = await self.row()
            chosen, head = list(names), self._config.head.name
            if row is not None:
                if head in chosen or not set(row.nodes) - set(chosen):
                    chosen = list(dict.fromkeys([*chosen, *row.nodes]))
                    await self._grid.handle(EngineGivenUp(NAME, "it was stopped"))
                    self._shells.forward(self._target(head), {})
                else:
                    left = tuple(name for name in row.nodes if name not in chosen)
                    await self._grid.handle(EngineWanted(NAME, SSH, row.address, row.namespace, row.session, left))
                    self.watch()
            done: dict[str, object] = {}
            for some in ([name for name in chosen if name != head], [name for name in chosen if name == head]):
                stops = [self._stop_one(name, tell(name), purge=purge) for name in some]
                done |= zip(some, await asyncio.gather(*stops, return_exceptions=True), strict=True)
        return {name: str(one) for name, one in done.items() if _failed(one)}

    async def _stop_one(self, name: str, say: Say, *, purge: bool) -> None:
        say("stopping Ray")
        await self._shells.ask("ray-stop", self._target(name), {"purge": purge}, say)
        self.lives.pop(name, None)

    # ------------------------------------------------------------------ keeping it running

    async def begin(self) -> None:
        """Look after what an earlier control plane was told to keep running."""
        row = await self.row()
        if row is not None:
            self.watch()
            self._open_ways()

    def watch(self) -> None:
        """Keep it running from now on; calling it twice changes nothing."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep())

    async def end(self) -> None:
        """Let it run by itself. Safe to call twice."""
        await self._unwatch()

    async def _unwatch(self) -> None:
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _keep(self) -> None:
        pause = LOOK_SECONDS
        while True:
            await asyncio.sleep(pause)
            try:
                async with self._lock:
                    await self._see_to_it()
                pause = LOOK_SECONDS
            except GridError as failure:
                log.warning("Ray: %s", failure)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _see_to_it(self) -> None:
        """Start again what has died: the head with everything, or single workers."""
        row = await self.row()
        if row is None:
            return
        answers = await asyncio.gather(
            *(self._look(name, versions=False) for name in row.nodes), return_exceptions=True
        )
        for name, answer in zip(row.nodes, answers, strict=True):
            self.lives[name] = answer if isinstance(answer, dict) else {"state": "unknown", "problem": str(answer)}
        head = self._config.head.name
        state = self.lives.get(head, {}).get("state")
        if state in ("stopped", "broken"):
            log.warning("Ray's head on %s is %s: starting it anew", head, state)
            addresses = await self._addresses(row.nodes)
            problems = await self._bring_up(addresses, [*row.nodes], _silent, replace=True)
            log.warning("Ray was started anew%s", f"; {problems}" if problems else "")
        elif state == "running":
            session = self._session(head)
            if session != row.session:
                await self._want(row.address.rpartition(":")[0].strip("[]"), session, row.nodes)
            behind = [name for name in row.nodes if name != head and self._is_behind(name, session)]
            if behind:
                log.warning("Ray on %s is not with its head: starting it anew", ", ".join(behind))
                addresses = await self._addresses(row.nodes)
                starts = [self._start_worker(one, addresses, _silent(one), session, replace=True) for one in behind]
                for name, done in zip(behind, await asyncio.gather(*starts, return_exceptions=True), strict=True):
                    if _failed(done):
                        log.warning("Ray on %s: %s", name, done)

    def _is_behind(self, name: str, session: str) -> bool:
        life = self.lives.get(name, {})
        return life.get("state") in ("stopped", "broken") or (
            life.get("state") == "running" and life.get("session") != session
        )

    def _open_ways(self) -> None:
        """Have the dashboard, Ray's client and its head within reach of this machine, where they are on another."""
        head, ray = self._config.head, self._config.ray
        if not head.is_local:
            dashboard = "127.0.0.1" if ray.dashboard_host in ("local", "0.0.0.0") else ray.dashboard_host
            ports = {"dashboard": Passage(NEAR["dashboard"], ray.dashboard_port, dashboard, ray.dashboard_port)}
            ports["client"] = Passage(NEAR["client"], ray.client_port, "127.0.0.1", ray.client_port)
            ports["head"] = Passage(NEAR["head"], ray.port, "127.0.0.1", ray.port)
            self._shells.forward(self._target(head.name), ports)

    # ------------------------------------------------------------------ what is known

    async def row(self) -> EngineRow | None:
        """What the ledger has about the Ray that this grid started."""

        def found(ledger: Any, now: int) -> EngineRow | None:
            row: EngineRow | None = ledger.engines.get(NAME)
            return row if row is not None and row.mode == SSH else None

        return await self._grid.read(found)

    async def view(self) -> dict[str, Any] | None:
        """Where it is, how to get there, and what is dangerous about it; None where there is none."""
        row = await self.row()
        if row is None:
            return None
        ways = self.ways(row)
        states = {name: self.lives.get(name, {}).get("state", "unknown") for name in row.nodes}
        return {
            "mode": row.mode,
            "address": row.address,
            "session": row.session or None,
            "authenticated": self._config.ray.auth == "token",
            "tls": self._config.ray.tls,
            "nodes": states,
            "risk": risk_of(self._config.ray),
            **ways,
        }

    def ways(self, row: EngineRow) -> dict[str, Any]:
        """How a program on this machine gets there; None while a way is not open."""
        ray, head = self._config.ray, self._config.head
        if head.is_local:
            dashboard = f"http://127.0.0.1:{ray.dashboard_port}"
            return {"dashboard": dashboard, "client": f"ray://127.0.0.1:{ray.client_port}", "head": row.address}
        ports = self._shells.forwarded.get(head.name, {})
        starts = {"dashboard": "http://", "client": "ray://", "head": ""}
        return {name: f"{start}{NEAR[name]}:{ports[name]}" if name in ports else None for name, start in starts.items()}

    async def environ(self, name: str | None = None) -> dict[str, str]:
        """The variables with which Ray's own commands and programs work, on this machine or on a node."""
        row = await self.row()
        if row is None:
            raise Refused("the grid has started no Ray; type: grid cluster start --ray")
        ray = self._config.ray
        if name is not None and not self._nodes[name].is_local:
            return await self._environ_there(name, row)
        ways = self.ways(row)
        environ = self._secrets.environ(auth=ray.auth, tls=ray.tls)
        if any(self._nodes[one].is_local for one in row.nodes):
            environ["RAY_ADDRESS"] = row.address
        elif ways["client"]:
            environ["RAY_ADDRESS"] = ways["client"]
        if ways["dashboard"]:
            environ["RAY_API_SERVER_ADDRESS"] = ways["dashboard"]
        return environ

    async def drive(self, socket: str) -> tuple[dict[str, str], str]:
        """Have a program that speaks to Ray: its environment, and the socket it is behind, where it is on the head."""
        row = await self.row()
        if row is None:
            raise Refused("the grid has started no Ray")
        if any(self._nodes[one].is_local for one in row.nodes):
            return await self.environ(), ""
        head = self._config.head.name
        environ = await self._environ_there(head, row)
        self._shells.drive(self._target(head), socket, {"python": self._python(head), "environ": environ})
        return environ, socket

    def stop_driving(self) -> None:
        """Have no such program any more."""
        self._shells.drive(self._target(self._config.head.name), "", {})

    async def _environ_there(self, name: str, row: EngineRow) -> dict[str, str]:
        if name not in row.nodes:
            raise Refused(f"Ray does not run on {name}; it runs on {', '.join(row.nodes)}")
        ray, life = self._config.ray, await self._look(name, versions=False)
        environ = {"RAY_ADDRESS": row.address, "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor"}
        if ray.auth == "token":
            environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(life["token_path"])}
        if ray.tls:
            folder = str(life["token_path"]).rpartition("/")[0]
            files = {"SERVER_CERT": "cert", "SERVER_KEY": "key", "CA_CERT": "ca"}
            environ |= {f"RAY_TLS_{what}": f"{folder}/tls-{file}.pem" for what, file in files.items()}
            environ["RAY_USE_TLS"] = "1"
        if name == self._config.head.name:
            environ["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{ray.dashboard_port}"
        return environ

    async def _look(self, name: str, *, versions: bool = True) -> Life:
        order: dict[str, Any] = {"python": self._python(name), "versions": versions}
        if versions and name == self._config.head.name:
            order["ports"] = head_ports(self._config.ray)
        return await self._shells.ask("ray-look", self._target(name), order)

    async def _want(self, head: str, session: str, nodes: tuple[str, ...]) -> None:
        address = f"{_bracketed(head)}:{self._config.ray.port}"
        await self._grid.handle(EngineWanted(NAME, SSH, address, session=session, nodes=nodes))

    async def _wanted_nodes(self) -> tuple[str, ...]:
        row = await self.row()
        return row.nodes if row is not None else ()

    def _session(self, name: str) -> str:
        return str(self.lives.get(name, {}).get("session", ""))

    def _python(self, name: str) -> str:
        """The interpreter with Ray: the node's, the cluster's, this machine's own; empty is what was installed."""
        own = sys.executable if self._nodes[name].is_local else ""
        return self._nodes[name].ray_python or self._config.ray.python or own


async def _nothing() -> str:
    return ""


def _silent(name: str) -> Say:
    return lambda step: None


def _failed(answer: object) -> bool:
    """Whether what came of a deed is a failure that has a name; what has none is a bug, and is raised."""
    if isinstance(answer, BaseException) and not isinstance(answer, GridError):
        raise answer
    return isinstance(answer, GridError)


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _own_address_towards(host: str) -> str:
    """The address this machine has in the eyes of another; loopback where there is no other."""
    if host in ("", "local"):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # nothing is sent: the kernel only chooses the way
            return str(probe.getsockname()[0])
        except OSError as failure:
            raise Refused(f"which address this machine has for {host} is not known: {failure}") from failure
