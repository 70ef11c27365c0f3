"""`grid cluster install|start|stop|status|env`: nodes by SSH, nodes that joined, and nodes that came with Ray.

A command serves all nodes at once; one that fails never stops the others. A note beside the ledger (0600) has the way
to each node from before the start of its agent, or of Ray on this machine, until the stop is proven: so the processes
on a node that left the config can still be stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from distributed_grid.adapters.child_process import Say
from distributed_grid.adapters.node.node_messages import NodeFacts
from distributed_grid.adapters.ray.engine import RayEngine
from distributed_grid.adapters.ssh.process import Hop, SshProcess, SshTarget, parse_jump
from distributed_grid.api import requests
from distributed_grid.api.answers.cluster import (
    ClusterEnvironment,
    ClusterMachines,
    ClusterNodeRow,
    NodeResult,
    NodeResults,
    RayStatus,
)
from distributed_grid.api.answers.nodes import NodeRow
from distributed_grid.config import ClusterConfig, NodeConfig
from distributed_grid.control.agents import AgentGateway
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import AgentRequested, LeaseLost, LeaseReclaimed, NodeDrained, NodeStopped
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import NodeState
from distributed_grid.errors import GridError, NotFound, Refused
from distributed_grid.posix.private_files import write_private
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.endpoints import ADMIN, endpoint
from distributed_grid.server.purge_guard import PurgeGuard, PurgeRefused, StoppedNodeFiles
from distributed_grid.server.ray.attachment import RayAttachment, ReportStep, step_reporter
from distributed_grid.server.ray.engine_reconciler import EngineReconciler
from distributed_grid.server.ray.ray_cluster import RayCluster
from distributed_grid.server.services.nodes import stopping_message, wait_until_alive, wait_until_drained
from distributed_grid.state_dir import StateDir, machine_id
from distributed_grid.supervision import start_restarted

ALIVE_SECONDS = 30.0
RETRY_SECONDS = 60.0
SSH_PORT = 22
RESOURCE_FIELDS = (
    *("cpu_cores", "cpu_free", "cpu_lent", "memory_gb", "memory_free_gb", "memory_lent_gb"),
    *("gpus", "gpus_free", "gpus_lent", "keeps", "stopped"),
)
"""Fields of `grid status` that `grid cluster status` shows, too."""
log = logging.getLogger(__name__)


class StartedAgents:
    """The note of started agents; stops agents and Ray on nodes that left the config."""

    def __init__(self, file: Path, grid: Grid, ssh: SshProcess) -> None:
        self._file = file
        self._grid = grid
        self._ssh = ssh

    def add(self, target: SshTarget) -> None:
        self._write({**self._read(), target.name: target})

    def remove(self, name: str) -> None:
        """Forget a stopped agent. A second time is harmless."""
        known = self._read()
        if known.pop(name, None) is not None:
            self._write(known)

    async def stop_unnamed(self, is_named: Callable[[SshTarget], bool]) -> None:
        """Stop agent and Ray on every node that is not named, and try again until they are stopped."""
        tried: set[str] = set()
        while left := [target for target in self._read().values() if not is_named(target)]:
            for target in left:
                try:
                    await self._stop(target)
                except GridError as failure:
                    if target.name not in tried:
                        log.warning("what runs on %s, which left the config, goes on: %s", target.name, failure)
                    tried.add(target.name)
            if not all(map(is_named, self._read().values())):
                await asyncio.sleep(RETRY_SECONDS)

    async def _stop(self, target: SshTarget) -> None:
        """Stop one agent and its Ray; leases there are reclaimed first, so that jobs go back into the queue."""
        reason = f"{target.name} left the config"
        await self._grid.handle_all(LeaseReclaimed(lease_id, reason) for lease_id in await self._held(target.name))
        ended = (await self._ssh.ask("ray-stop", target, {"purge": False}))["stopped"]
        summary = await self._ssh.run("stop", target, lambda step: None) if target.hop.host != "local" else ""
        log.info("%s: %s processes of Ray were stopped. %s", reason, ended, summary)
        self.remove(target.name)
        await self._grid.handle_all(LeaseLost(lease_id, reason) for lease_id in await self._held(target.name))

    async def _held(self, name: str) -> list[str]:
        return await self._grid.read(lambda ledger, now: [lease.id for lease in ledger.leases_of(name)])

    def _read(self) -> dict[str, SshTarget]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, SshTarget])
        except (OSError, msgspec.DecodeError):
            return {}

    def _write(self, known: dict[str, SshTarget]) -> None:
        with contextlib.suppress(OSError):
            write_private(self._file, msgspec.json.encode(known))


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
        """Keep links to every node whose agent is to run, and stop the agents of nodes that left the config."""
        wanted = await self._grid.read(lambda ledger, now: [n.name for n in ledger.nodes.values() if n.wanted])
        for name in wanted:
            if name in self._nodes and not self._nodes[name].is_local:
                self._ssh.keep_link(self.target(name))
        await self.ray.start_supervision()

        def is_named(target: SshTarget) -> bool:  # and still on this machine, or on another
            node = self._nodes.get(target.name)
            return node is not None and node.is_local == (target.hop.host == "local")

        stopping = partial(self._started.stop_unnamed, is_named)
        self._stopping = start_restarted(stopping, "the stop of what runs on nodes that left the config")

    async def stop(self) -> None:
        """Drop every link; agents stay. Safe to call twice."""
        if self._stopping is not None:
            self._stopping.cancel()
            await asyncio.gather(self._stopping, return_exceptions=True)
            self._stopping = None
        await self.ray.stop_supervision()
        await self._ssh.stop()

    def _named(self, op: requests.ManageCluster) -> tuple[str, ...]:
        """The nodes of a request; its environment is used for SSH from now on."""
        unknown = [name for name in op.nodes if name not in self._nodes]
        if unknown:
            raise NotFound(f"no node is called {unknown[0]}; the nodes are: {', '.join(self._nodes)}")
        self._ssh.configure(op.auth_sock, op.environ)
        return op.nodes or tuple(self._nodes)

    async def status(self, op: requests.ManageCluster) -> ClusterMachines:
        names, ray = self._named(op), await self.ray.endpoints.view()
        rows = await self._grid.read(lambda ledger, now: [self._row(name, ray, ledger, now) for name in names])
        return ClusterMachines(rows, ray)

    async def serve(self, op: requests.ManageCluster, report: ReportStep) -> ClusterEnvironment | NodeResults:
        """Install, start or stop agents, reporting each step; or the variables for Ray."""
        names = self._named(op)
        if op.verb == "env":
            environ = await self.ray.endpoints.environ(op.nodes[0] if op.nodes else None)
            return ClusterEnvironment(environ, await self.ray.endpoints.view())
        if op.verb == "stop":
            examined: defaultdict[str, set[str]] = defaultdict(set)
            results: dict[str, NodeResult] = {}
            if op.purge:
                check = partial(self._check_purge, examined)
                remote = [name for name in names if not self._nodes[name].is_local]
                checks = await asyncio.gather(*(self._run(name, check, op, report) for name in remote))
                results = {check.node_id: check for check in checks if not check.ok}
            rest = tuple(name for name in names if name not in results)
            await self._stop_ray(rest, op, report)
            stop = partial(self._stop, examined)
            stopped = await asyncio.gather(*(self._run(name, stop, op, report) for name in rest))
            results |= {result.node_id: result for result in stopped}
            return NodeResults([results[name] for name in names])
        if op.verb == "start" and op.ray:
            say = partial(step_reporter, report)
            for name in names:
                say(name)("inspecting its Ray")
            await self.ray.check_before_start(names)
            started = await asyncio.gather(*(self._run(name, self._start, op, report) for name in names))
            running = [result.node_id for result in started if result.ok]
            for name in running:
                self._started.add(self.target(name))
            problems = await self.ray.start(running, say) if running else {}

            def with_ray(result: NodeResult) -> NodeResult:
                if not result.ok:
                    return result
                problem = problems.get(result.node_id)
                return replace(result, ok=problem is None, detail=problem or f"{result.detail}, with Ray")

            return NodeResults([with_ray(result) for result in started])
        operation = self._install if op.verb == "install" else self._start
        return NodeResults(await asyncio.gather(*(self._run(name, operation, op, report) for name in names)))

    async def _check_purge(
        self, examined: Mapping[str, set[str]], name: str, op: requests.ManageCluster, say: Say
    ) -> str:
        """Refuse to purge a node with results that were never fetched; nothing is changed."""
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
        report: ReportStep,
    ) -> NodeResult:
        say = step_reporter(report, name)
        if self._nodes[name].is_local:
            operation = self._run_local
        try:
            if self._locks[name].locked():
                say("waiting for another command to finish with it")
            async with self._locks[name]:
                return NodeResult(node_id=name, ok=True, detail=await operation(name, op, say))
        except PurgeRefused as refusal:
            return refusal.result_on(name)
        except GridError as failure:
            return NodeResult(node_id=name, ok=False, detail=str(failure))

    async def _run_local(self, name: str, op: requests.ManageCluster, say: Say) -> str:
        """Serve a node inside the control plane: a stopped one has given everything back and lends nothing more."""
        if op.verb == "stop":
            await self._drain(name, say, wait=not op.force)
            if op.purge:  # Ray's files may be there though it was stopped before
                await self._ssh.ask("ray-stop", self.target(name), {"purge": True}, say)
            return f"lends nothing until: grid cluster start {name}"
        if op.verb == "start":
            await self._grid.handle(AgentRequested(name, True))
            await wait_until_alive(self._grid, name, {}, seconds=ALIVE_SECONDS)
        return "runs inside the control plane"

    async def _stop_ray(self, names: tuple[str, ...], op: requests.ManageCluster, report: ReportStep) -> None:
        """Take back leases, then end Ray, so that Ray still frees the groups of these leases."""
        row = await self.ray.desired.row()
        if row is None or not set(names) & set(row.nodes):
            return
        say = partial(step_reporter, report)

        async def is_drained(name: str) -> bool:
            if self._nodes[name].is_local:
                return True  # it stays in the grid, with its leases
            try:
                await self._ssh.run("inspect", self.target(name), say(name))
                await self._drain(name, say(name), wait=not op.force)
            except GridError:
                return False  # reported when the node itself is stopped, which fails in the same way
            return True

        with_ray = [name for name in names if name in row.nodes]
        drained = await asyncio.gather(*map(is_drained, with_ray))
        ready = [name for name, is_ready in zip(with_ray, drained, strict=True) if is_ready or op.force]
        for name, problem in (await self.ray.stop(ready, say, purge=op.purge) if ready else {}).items():
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
            if not op.force:
                raise
            await self._grid.handle(NodeDrained(name, "the node is being stopped"))
            self._ssh.drop_link(name)
            await self._grid.handle(AgentRequested(name, False))
            raise Refused(f"dropped, but its agent may still run there: {failure}") from failure
        await self._drain(name, say, wait=not op.force)
        kept: PurgeRefused | None = None
        if op.purge:
            try:
                await self._guard_purge(examined, name, op, say)  # again: jobs may have ended meanwhile
            except PurgeRefused as refusal:
                kept = refusal
        self._ssh.drop_link(name)
        is_purge = op.purge and kept is None
        if is_purge:  # its files may be there without a wanted agent
            await self._ssh.ask("ray-stop", target, {"purge": True}, say)
        try:
            summary = await self._ssh.run("purge" if is_purge else "stop", target, say)
        except GridError:
            if await self._grid.read(lambda ledger, now: ledger.nodes[name].wanted):
                self._ssh.keep_link(target)  # its agent could not be ended: it is kept as before
            raise
        self._started.remove(name)
        await self._grid.handle(NodeStopped(name))
        if kept is not None:
            raise PurgeRefused(f"{summary}, but nothing was removed: {kept}", kept.results)
        return summary

    async def _drain(self, name: str, say: Say, *, wait: bool) -> None:
        """Take back the node's leases; its jobs get their notice and go back into the queue."""
        await self._grid.handle(NodeDrained(name, "the node is being stopped"))
        if wait:
            await wait_until_drained(self._grid, name, say, meanwhile=stopping_message(f"grid cluster stop {name}"))

    def _row(self, name: str, ray: RayStatus | None, ledger: Ledger, now: int) -> ClusterNodeRow:
        config, node = self._nodes[name], ledger.nodes.get(name)
        seen, link = ledger.observations.get(name), self._ssh.links.get(name)
        facts = self._ssh.facts.get(name, NodeFacts())
        state = str(node.state) if node is not None else None
        if config.is_local and node is not None and node.state is NodeState.DRAINING and not node.cooling:
            state = "stopped"  # on another machine the documented state stays, and the field `stopped` shows it
        user, port = f"{config.user}@" if config.user else "", f":{config.port}" if config.port != SSH_PORT else ""
        return ClusterNodeRow(
            node_id=name,
            address="local" if config.is_local else f"{user}{config.host}{port}",
            state=state,
            cooling=node is not None and node.cooling,
            wanted=config.is_local or (node is not None and node.wanted),
            link="local" if config.is_local else link.state if link is not None else None,
            detail=(link.detail or None) if link is not None else None,
            version=facts.running or facts.version or None,
            python=facts.python or None,
            seconds_since_heard=(now - seen.at_ms) / 1000 if seen is not None and seen.at_ms else None,
            jobs=sum(1 for lease in ledger.leases_of(name) if lease.job),
            ray=ray.on_node(name) if ray is not None else None,
        )

    def target(self, name: str) -> SshTarget:
        """A node for SSH, with the hosts in between; one of them that is a node itself is reached as that node is."""
        node = self._nodes[name]
        hops: list[Hop] = []
        for word in (node.proxy_jump or "").split(","):
            jump = self._nodes.get(word.strip())
            if jump is not None and jump is not node and not jump.is_local:
                hops.append(_hop(jump))
            elif word.strip():
                hops.append(parse_jump(word.strip(), _hop(node)))
        return SshTarget(
            name=name,
            grid=self.grid_id(),
            local_socket=str(self._state_dir.host_dir / "links" / f"{name}.sock"),
            hop=_hop(node),
            via=tuple(hops),
            python=node.python or "",
        )

    def grid_id(self) -> str:
        """Id of this grid's directories on nodes; the same again after a fresh start."""
        if not self._id:
            note = self._state_dir.host_dir / "grid.id"
            if not note.exists():
                origin = f"{machine_id()}\n{socket.gethostname()}\n{os.geteuid()}\n{self._state_dir.root}"
                note.write_text(hashlib.sha256(origin.encode()).hexdigest()[:12])
            self._id = note.read_text().strip()
        return self._id


def _hop(node: NodeConfig) -> Hop:
    port = 0 if node.port == SSH_PORT else node.port
    return Hop(
        node.host, port, node.user or "", node.ssh_key_path or "", node.known_hosts or "", accept_new=node.accept_new
    )


class ClusterCommandService:
    """Answers the requests about the machines of the cluster."""

    def __init__(self, grid: Grid, cluster: ClusterService, attachment: RayAttachment, agents: AgentGateway) -> None:
        self._grid = grid
        self._cluster = cluster
        self._attachment = attachment
        self._agents = agents

    @endpoint(ADMIN)
    async def manage(
        self, op: requests.ManageCluster, caller: Caller, report: ReportStep
    ) -> ClusterMachines | ClusterEnvironment | NodeResults:
        """Install, start, stop or show the agents of nodes."""
        if op.verb != "status":
            return await self._cluster.serve(op, report)
        machines = await self._attachment.status(op, self._cluster.status)

        def rows(ledger: Ledger, now: int) -> list[ClusterNodeRow]:
            completed = []
            for row in machines.nodes:
                version, python = self._agents.sessions.versions.get(row.node_id, ("", ""))
                row = replace(row, version=version or row.version, python=python or row.python)
                if row.address == "joined":
                    row = replace(row, link="up" if self._agents.is_connected(row.node_id) else "down")
                if (node := ledger.nodes.get(row.node_id)) is not None:
                    status = NodeRow.of(ledger, node, now)
                    row = replace(row, **{name: getattr(status, name) for name in RESOURCE_FIELDS})
                completed.append(row)
            return completed

        return ClusterMachines(await self._grid.read(rows), machines.ray)
