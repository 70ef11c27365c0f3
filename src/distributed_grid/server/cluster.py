"""`grid cluster`: what happens to each node, all at once; one that fails never stops the others."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from distributed_grid.adapters.child_process import Say
from distributed_grid.adapters.node.node_messages import NodeFacts
from distributed_grid.adapters.ray.engine import RayEngine
from distributed_grid.adapters.ssh.process import Hop, SshProcess, SshTarget, parse_jump
from distributed_grid.api import requests
from distributed_grid.config import ClusterConfig, NodeConfig
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import AgentRequested, NodeDrained, NodeStopped
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.states import NodeState
from distributed_grid.errors import GridError, NotFound, Refused
from distributed_grid.server.purge_guard import PurgeGuard, PurgeRefused
from distributed_grid.server.ray.engine_reconciler import EngineReconciler
from distributed_grid.server.ray.ray_cluster import RayCluster
from distributed_grid.server.services.nodes import stopping_message, wait_until_alive, wait_until_drained
from distributed_grid.server.started_agents import StartedAgents
from distributed_grid.server.stopped_node_files import StoppedNodeFiles
from distributed_grid.state_dir import StateDir, machine_id
from distributed_grid.supervision import start_restarted

ALIVE_SECONDS = 30.0
SSH_PORT = 22
View = dict[str, Any]
Report = Callable[[View], None]


class ClusterService:
    """Installs, starts and stops agents on the nodes that are reached by SSH."""

    def __init__(
        self,
        grid: Grid,
        config: ClusterConfig,
        state_dir: StateDir,
        *,
        engine: RayEngine,
        reconciler: EngineReconciler,
        guard: PurgeGuard,
    ) -> None:
        self._grid = grid
        self._guard = guard
        self._nodes = {node.name: node for node in config.nodes}
        self._state_dir = state_dir
        self._ssh = SshProcess(state_dir.root / "wheels")
        self._started = StartedAgents(state_dir.host_dir / "agents.json", grid, self._ssh)
        self._stopping: asyncio.Task[None] | None = None
        self.ray = RayCluster(
            grid,
            config,
            state_dir,
            ssh=self._ssh,
            target=self.target,
            engine=engine,
            reconciler=reconciler,
            grid_id=self.grid_id,
        )
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._id = ""

    async def start(self) -> None:
        """Keep links again to every node whose agent is to run, and stop those of nodes that left the config."""
        wanted = await self._grid.read(lambda ledger, now: [n.name for n in ledger.nodes.values() if n.wanted])
        for name in wanted:
            if name in self._nodes and not self._nodes[name].is_local:
                self._ssh.keep_link(self.target(name))
        await self.ray.start_supervision()
        stopping = partial(self._started.stop_unnamed, self._is_named)
        self._stopping = start_restarted(stopping, "the stop of what runs on nodes that left the config")

    async def stop(self) -> None:
        """Drop every link; agents stay. Safe to call twice."""
        if self._stopping is not None:
            self._stopping.cancel()
            await asyncio.gather(self._stopping, return_exceptions=True)
            self._stopping = None
        await self.ray.stop_supervision()
        await self._ssh.stop()

    async def serve(self, op: requests.ManageCluster, report: Report) -> View:
        """Do what the message asks, reporting each step; the answer says what became of each node."""
        unknown = [name for name in op.nodes if name not in self._nodes]
        if unknown:
            raise NotFound(f"no node is called {unknown[0]}; the nodes are: {', '.join(self._nodes)}")
        self._ssh.configure(op.auth_sock, op.environ)
        names = op.nodes or tuple(self._nodes)
        if op.verb == "status":
            ray = await self.ray.endpoints.view()
            rows = await self._grid.read(lambda ledger, now: [self._row(name, ledger, now) for name in names])
            return {"nodes": [{**row, "ray": _ray_of(row["node_id"], ray)} for row in rows], "ray": ray}
        if op.verb == "env":
            where = op.nodes[0] if op.nodes else None
            return {"environ": await self.ray.endpoints.environ(where), "ray": await self.ray.endpoints.view()}
        if op.verb == "stop":
            return {"results": await self._stop_all(names, op, report)}
        if op.verb == "start" and op.ray:
            return {"results": await self._start_with_ray(names, op, report)}
        operation = self._install if op.verb == "install" else self._start
        return {"results": await asyncio.gather(*(self._run(name, operation, op, report) for name in names))}

    async def _stop_all(self, names: tuple[str, ...], op: requests.ManageCluster, report: Report) -> list[View]:
        """Stop nodes, with their Ray; those that may not be purged are left as they are."""
        examined: defaultdict[str, set[str]] = defaultdict(set)
        rows: dict[str, View] = {}
        if op.purge:
            check = partial(self._check_purge, examined)
            remote = [name for name in names if not self._nodes[name].is_local]
            checks = await asyncio.gather(*(self._run(name, check, op, report) for name in remote))
            rows = {row["node_id"]: row for row in checks if not row["ok"]}
        rest = tuple(name for name in names if name not in rows)
        await self._stop_ray(rest, op, report)
        stop = partial(self._stop, examined)
        stopped = await asyncio.gather(*(self._run(name, stop, op, report) for name in rest))
        rows |= {row["node_id"]: row for row in stopped}
        return [rows[name] for name in names]

    async def _check_purge(
        self, examined: Mapping[str, set[str]], name: str, op: requests.ManageCluster, say: Say
    ) -> str:
        """Refuse to purge a node with results that were never fetched; nothing is changed on any node."""
        try:
            await self._ssh.run("inspect", self.target(name), say)
        except GridError:
            return ""  # reported when the node is stopped, which fails in the same way
        await self._guard_purge(examined, name, op, say)
        return ""

    async def _guard_purge(
        self, examined: Mapping[str, set[str]], name: str, op: requests.ManageCluster, say: Say
    ) -> None:
        stopped = StoppedNodeFiles(lambda operation, data: self._ssh.ask(operation, self.target(name), data, say))
        await self._guard.check(name, examined[name], discard=op.discard_results, stopped=stopped, say=say)

    async def _run(
        self,
        name: str,
        operation: Callable[[str, requests.ManageCluster, Say], Awaitable[str]],
        op: requests.ManageCluster,
        report: Report,
    ) -> View:
        """What became of one node, whatever it was."""

        def say(step: str) -> None:
            report({"node_id": name, "step": step})

        if self._nodes[name].is_local:
            operation = self._run_local
        try:
            if self._locks[name].locked():
                say("waiting for another command to finish with it")
            async with self._locks[name]:
                return {"node_id": name, "ok": True, "detail": await operation(name, op, say)}
        except PurgeRefused as refusal:
            return {"node_id": name, "ok": False, "detail": str(refusal), "results": refusal.view}
        except GridError as failure:
            return {"node_id": name, "ok": False, "detail": str(failure)}

    async def _run_local(self, name: str, op: requests.ManageCluster, say: Say) -> str:
        """A node inside the control plane: it is stopped when it has given everything back and lends nothing more."""
        if op.verb == "stop":
            await self._drain(name, say, wait=not op.force)
            if op.purge:  # Ray's files may be there though it was stopped before
                await self._ssh.ask("ray-stop", self.target(name), {"purge": True}, say)
            return f"lends nothing until: grid cluster start {name}"
        if op.verb == "start":
            await self._grid.handle(AgentRequested(name, True))
            await wait_until_alive(self._grid, name, {}, seconds=ALIVE_SECONDS)
        return "runs inside the control plane"

    async def _start_with_ray(self, names: tuple[str, ...], op: requests.ManageCluster, report: Report) -> list[View]:
        """Agents first, then Ray; where it is known before that Ray could not start, nothing is started."""

        def say(name: str) -> Say:
            return lambda step: report({"node_id": name, "step": step})

        for name in names:
            say(name)("inspecting its Ray")
        await self.ray.check_before_start(names)
        rows = await asyncio.gather(*(self._run(name, self._start, op, report) for name in names))
        running = [row["node_id"] for row in rows if row["ok"]]
        for name in running:
            self._started.add(self.target(name))
        problems = await self.ray.start(running, say) if running else {}
        return [_with_ray(row, problems.get(row["node_id"])) if row["ok"] else row for row in rows]

    async def _stop_ray(self, names: tuple[str, ...], op: requests.ManageCluster, report: Report) -> None:
        """Take back what is lent, then end Ray: what it holds is freed while it is still there to do so."""
        row = await self.ray.desired.row()
        if row is None or not set(names) & set(row.nodes):
            return

        def say(name: str) -> Say:
            return lambda step: report({"node_id": name, "step": step})

        async def is_drained(name: str) -> bool:
            if self._nodes[name].is_local:
                return True  # it stays in the grid, with what it lends
            try:
                await self._ssh.run("inspect", self.target(name), say(name))
                await self._drain(name, say(name), wait=not op.force)
            except GridError:
                return False  # reported when the node itself is stopped, which fails in the same way
            return True

        there = [name for name in names if name in row.nodes]
        ready = await asyncio.gather(*map(is_drained, there))
        gone = [name for name, is_ready in zip(there, ready, strict=True) if is_ready or op.force]
        for name, problem in (await self.ray.stop(gone, say, purge=op.purge) if gone else {}).items():
            say(name)(f"its Ray could not be stopped: {problem}")

    async def _install(self, name: str, op: requests.ManageCluster, say: Say) -> str:
        summary = await self._ssh.run("install", self.target(name), say)
        return f"{summary}; {await self.ray.nodes.install(name, say)}" if op.ray else summary

    async def _start(self, name: str, op: requests.ManageCluster, say: Say) -> str:
        summary = await self._ssh.run("install", self.target(name), say)
        say("starting the agent")
        now = self._grid.now_ms()
        self._started.add(self.target(name))
        await self._grid.handle(AgentRequested(name, True))
        self._ssh.keep_link(self.target(name))
        await wait_until_alive(self._grid, name, self._ssh.links, seconds=ALIVE_SECONDS, since_ms=now)
        return f"running, {summary}"

    async def _stop(self, examined: Mapping[str, set[str]], name: str, op: requests.ManageCluster, say: Say) -> str:
        target = self.target(name)
        say("inspecting the node")
        try:
            await self._ssh.run("inspect", target, say)
        except GridError as failure:
            if op.force:
                await self._drop(name)
                raise Refused(f"dropped, but its agent may still run there: {failure}") from failure
            raise
        await self._drain(name, say, wait=not op.force)
        kept: PurgeRefused | None = None
        if op.purge:
            try:
                await self._guard_purge(examined, name, op, say)  # again: jobs may have ended meanwhile
            except PurgeRefused as refusal:
                kept = refusal
        self._ssh.drop_link(name)
        is_purge = op.purge and kept is None
        if is_purge:  # its files may be there though nobody wants it any more
            await self._ssh.ask("ray-stop", target, {"purge": True}, say)
        try:
            summary = await self._ssh.run("purge" if is_purge else "stop", target, say)
        except GridError:
            if await self._grid.read(lambda ledger, now: ledger.nodes[name].wanted):
                self._ssh.keep_link(target)  # what could not be ended is kept as before
            raise
        self._started.remove(name)
        await self._grid.handle(NodeStopped(name))
        if kept is not None:
            raise PurgeRefused(f"{summary}, but nothing was removed: {kept}", kept.results)
        return summary

    async def _drop(self, name: str) -> None:
        await self._grid.handle(NodeDrained(name, "the node is being stopped"))
        self._ssh.drop_link(name)
        await self._grid.handle(AgentRequested(name, False))

    async def _drain(self, name: str, say: Say, *, wait: bool) -> None:
        """Take back what is lent there; its jobs get their notice and go back into the queue."""
        await self._grid.handle(NodeDrained(name, "the node is being stopped"))
        if wait:
            await wait_until_drained(self._grid, name, say, meanwhile=stopping_message(f"grid cluster stop {name}"))

    def _row(self, name: str, ledger: Ledger, now: int) -> View:
        config, node = self._nodes[name], ledger.nodes.get(name)
        seen, link = ledger.observations.get(name), self._ssh.links.get(name)
        facts = self._ssh.facts.get(name, NodeFacts())
        return {
            "node_id": name,
            "address": "local" if config.is_local else address_of(config),
            "state": _state(config, node),
            "cooling": node is not None and node.cooling,
            "wanted": config.is_local or (node is not None and node.wanted),
            "link": "local" if config.is_local else link.state if link is not None else None,
            "detail": (link.detail or None) if link is not None else None,
            "version": facts.running or facts.version or None,
            "python": facts.python or None,
            "seconds_since_heard": (now - seen.at_ms) / 1000 if seen is not None and seen.at_ms else None,
            "jobs": sum(1 for lease in ledger.leases_of(name) if lease.job),
        }

    def target(self, name: str) -> SshTarget:
        """A node as SSH needs to know it."""
        node = self._nodes[name]
        links = self._state_dir.host_dir / "links"
        return SshTarget(
            name=name,
            grid=self.grid_id(),
            local_socket=str(links / f"{name}.sock"),
            hop=_hop(node),
            via=self._hops_before(node),
            python=node.python or "",
        )

    def _is_named(self, target: SshTarget) -> bool:
        """Whether the config has this node, and as it was: on this machine, or on another."""
        node = self._nodes.get(target.name)
        return node is not None and node.is_local == (target.hop.host == "local")

    def _hops_before(self, node: NodeConfig) -> tuple[Hop, ...]:
        """The hosts in between, in their order; one that is a node itself is reached as that node is."""
        hops: list[Hop] = []
        for word in (node.proxy_jump or "").split(","):
            jump = self._nodes.get(word.strip())
            if jump is not None and jump is not node and not jump.is_local:
                hops.append(_hop(jump))
            elif word.strip():
                hops.append(parse_jump(word.strip(), _hop(node)))
        return tuple(hops)

    def grid_id(self) -> str:
        """What tells this grid's directories on a node from another's; the same again after a fresh start."""
        if not self._id:
            note = self._state_dir.host_dir / "grid.id"
            if not note.exists():
                note.write_text(_made_id(self._state_dir.root))
            self._id = note.read_text().strip()
        return self._id


def _state(config: NodeConfig, node: Node | None) -> str | None:
    """The state of a node; one of this machine that lends nothing more is stopped. Of others the documented name stays,
    and `stopped` says it."""
    if node is None:
        return None
    is_stopped = config.is_local and node.state is NodeState.DRAINING and not node.cooling
    return "stopped" if is_stopped else str(node.state)


def _with_ray(row: View, problem: str | None) -> View:
    if problem is not None:
        return {**row, "ok": False, "detail": problem}
    return {**row, "detail": f"{row['detail']}, with Ray"}


def _ray_of(name: str, ray: View | None) -> View | None:
    """What a node's row says about Ray."""
    if ray is None or name not in ray["nodes"]:
        return None
    return {**{key: ray[key] for key in ("address", "session", "authenticated", "risk")}, "state": ray["nodes"][name]}


def _made_id(state_dir: Path) -> str:
    who = f"{machine_id()}\n{socket.gethostname()}\n{os.geteuid()}\n{state_dir}"
    return hashlib.sha256(who.encode()).hexdigest()[:12]


def address_of(node: NodeConfig) -> str:
    """Where a node is, as one would type it."""
    return (f"{node.user}@" if node.user else "") + node.host + (f":{node.port}" if node.port != SSH_PORT else "")


def _hop(node: NodeConfig) -> Hop:
    port = 0 if node.port == SSH_PORT else node.port
    return Hop(
        node.host, port, node.user or "", node.ssh_key_path or "", node.known_hosts or "", accept_new=node.accept_new
    )
