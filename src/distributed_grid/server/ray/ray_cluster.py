"""The grid's own Ray: started over SSH, the head first and then all workers at once; supervised; stopped.

It is in the ledger before anything is started, and gone from it before anything is stopped. Nothing is started where
versions differ, and nothing that somebody else runs is touched. A head that died is started anew; it has forgotten
everything, so every worker is, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from distributed_grid.adapters.child_process import Say
from distributed_grid.adapters.ray.engine import RayEngine
from distributed_grid.adapters.ssh.process import SshProcess, SshTarget
from distributed_grid.config import ClusterConfig
from distributed_grid.control.grid import Grid
from distributed_grid.errors import GridError, Refused
from distributed_grid.server.ray.credentials import RayCredentials
from distributed_grid.server.ray.endpoints import DesiredRayCluster, RayConnector, RayEndpoints
from distributed_grid.server.ray.engine_reconciler import EngineReconciler
from distributed_grid.server.ray.ray_nodes import CONTROL_PLANE, RayNodes, check_versions, own_versions
from distributed_grid.server.ray.ray_ports import RayPorts
from distributed_grid.state_dir import StateDir
from distributed_grid.supervision import start_logged, start_restarted

POLL_SECONDS, MAX_PAUSE = 10.0, 60.0
MAX_PORT_CHOICES = 5
log = logging.getLogger(__name__)
SayFor = Callable[[str], Say]
"""How the steps on a node of this name are said."""


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
        self._connector = RayConnector(
            config,
            state_dir,
            engine=engine,
            reconciler=reconciler,
            desired=self.desired,
            endpoints=self.endpoints,
            grid_id=grid_id,
        )
        self._lock = asyncio.Lock()
        self._supervising: asyncio.Task[None] | None = None
        self._connecting: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ starting

    async def check_before_start(self, names: Iterable[str]) -> None:
        """Raise where Ray could not be started on these nodes, before anything is: versions first of all."""
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
        found = {CONTROL_PLANE: own_versions()}
        answers = await asyncio.gather(*(self.nodes.inspect(name) for name in everyone), return_exceptions=True)
        problems = [f"{name}: {answer}" for name, answer in zip(everyone, answers, strict=True) if _failed(answer)]
        if problems:
            raise Refused(f"nothing was started: {'; '.join(problems)}", problems)
        for name, answer in zip(everyone, answers, strict=True):
            assert isinstance(answer, dict)
            found[name] = (answer["python"], answer["ray"])
        check_versions(found)

    async def start(self, names: Iterable[str], say: SayFor) -> dict[str, str]:
        """Have Ray running on these nodes; a problem of each that failed. One worker that fails stops no other."""
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
                kept = tuple(one for one in chosen if one not in problems or one in getattr(before, "nodes", ()))
                await self.desired.set(addresses[head], self.nodes.session(head), kept)
            self._supervise()
            self.endpoints.open()
        if late := await self._connector.wait_until_connected():
            log.warning("Ray: %s", late)
            say(head)(late)
        return problems

    async def _bring_up(
        self, addresses: dict[str, str], names: list[str], say: SayFor, *, replace: bool
    ) -> dict[str, str]:
        """The head, and all other nodes as soon as they can join it; problems of the workers, by name."""
        head = self._config.head.name
        await self._stop_orphans(head)
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
            await self.desired.set(addresses[head], session, (await self.desired.nodes()) or (head, *workers))
            self.endpoints.open()
            self._engine.retry()
            if not loading:
                loading = self._starts(workers, addresses, say, session, replace=replace)
            done = await asyncio.gather(*loading, return_exceptions=True)
            if behind := [name for name in workers if self.nodes.is_behind(name, session)]:  # of a head that is gone
                again = self._starts(behind, addresses, say, session, replace=True)
                late = dict(zip(behind, await asyncio.gather(*again, return_exceptions=True), strict=True))
                done = [late.get(name, one) for name, one in zip(workers, done, strict=True)]
        finally:
            await _cancel([starting, ready])
        return {name: str(one) for name, one in zip(workers, done, strict=True) if _failed(one)}

    async def _choose_ports(self) -> bool:
        """Choose the ports of a simulated head anew unless it runs; whether they are others than before."""
        head = self._config.head.name
        if not self.nodes.is_simulated(head):
            return False
        state = await self.nodes.inspect(head, versions=False)
        return state["state"] == "stopped" and self._ports.choose()

    async def _stop_orphans(self, head: str) -> None:
        """Stop what shares the machine of a head that is gone: Ray starts no head beside raylets of the last one."""
        if self.nodes.is_simulated(head) and (await self.nodes.inspect(head, versions=False))["state"] != "running":
            others = [node.name for node in self._config.nodes if self._config.is_simulated(node)]
            stops = [self.nodes.stop(name, _silent(name), purge=False) for name in others if name != head]
            await asyncio.gather(*stops)

    def _starts(
        self, names: list[str], addresses: dict[str, str], say: SayFor, session: str, *, replace: bool
    ) -> list[asyncio.Task[None]]:
        starts = [self.nodes.start_worker(name, addresses, say(name), session, replace=replace) for name in names]
        return [asyncio.create_task(start) for start in starts]

    # ------------------------------------------------------------------ stopping

    async def stop(self, names: Iterable[str], say: SayFor, *, purge: bool) -> dict[str, str]:
        """Have no Ray of ours on these nodes; without its head it is over everywhere. Problems, by node."""
        await self._unsupervise()  # whatever it is busy with is not wanted any more
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
            for some in ([name for name in chosen if name != head], [name for name in chosen if name == head]):
                stops = [self.nodes.stop(name, say(name), purge=purge) for name in some]
                done |= zip(some, await asyncio.gather(*stops, return_exceptions=True), strict=True)
        return {name: str(one) for name, one in done.items() if _failed(one)}

    # ------------------------------------------------------------------ supervising

    async def start_supervision(self) -> None:
        """Keep running what an earlier control plane was asked to, and be connected with it."""
        await self._forget_unnamed()
        if await self.desired.row() is not None:
            self._ports.reserve()
            self._supervise()
            self.endpoints.open()
        self._connecting = start_restarted(self._connector.run, "the connection to Ray")

    async def _forget_unnamed(self) -> None:
        """Ray goes on without the nodes that left the config, whose Ray is stopped with their agents. Where its head
        is among them it is over."""
        row = await self.desired.row()
        left = tuple(name for name in row.nodes if self.nodes.is_known(name)) if row is not None else ()
        if row is None or left == row.nodes:
            return
        if self._config.head.name in left:
            await self.desired.reduce(row, left)
            return
        await self.desired.clear("its head left the config")
        start_logged(self._stop_all(left), "the stop of Ray, whose head left the config")

    async def _stop_all(self, names: tuple[str, ...]) -> None:
        stops = [self.nodes.stop(name, _silent(name), purge=False) for name in names]
        for name, done in zip(names, await asyncio.gather(*stops, return_exceptions=True), strict=True):
            if _failed(done):
                log.warning("Ray on %s goes on: %s", name, done)

    async def stop_supervision(self) -> None:
        """Let it run by itself. Safe to call twice."""
        await self._unsupervise()
        self._ports.release()
        if self._connecting is not None:
            await _cancel([self._connecting])
            self._connecting = None

    def _supervise(self) -> None:
        """Keep it running from now on; calling it twice changes nothing."""
        if self._supervising is None or self._supervising.done():
            self._supervising = start_restarted(self._run, "the supervision of Ray")

    async def _unsupervise(self) -> None:
        if self._supervising is not None and self._supervising is not asyncio.current_task():
            await _cancel([self._supervising])
            self._supervising = None

    async def _run(self) -> None:
        pause = POLL_SECONDS
        while True:
            await self._engine.wait_for_loss(pause)  # its head may have died
            try:
                async with self._lock:
                    await self._restart_dead()
                pause = POLL_SECONDS
            except GridError as failure:
                log.warning("Ray: %s", failure)
                pause = min(2 * pause, MAX_PAUSE)

    async def _restart_dead(self) -> None:
        """Start again what has died: the head with everything, or single workers."""
        row = await self.desired.row()
        if row is None:
            return
        answers = await asyncio.gather(
            *(self.nodes.inspect(name, versions=False) for name in row.nodes), return_exceptions=True
        )
        for name, answer in zip(row.nodes, answers, strict=True):
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
                starts = [
                    self.nodes.start_worker(one, addresses, _silent(one), session, replace=True) for one in behind
                ]
                for name, done in zip(behind, await asyncio.gather(*starts, return_exceptions=True), strict=True):
                    if _failed(done):
                        log.warning("Ray on %s: %s", name, done)


def _silent(name: str) -> Say:
    return lambda step: None


def _failed(answer: object) -> bool:
    """Whether what came of an operation is one of our errors; any other exception is a bug, and is raised."""
    if isinstance(answer, BaseException) and not isinstance(answer, GridError):
        raise answer
    return isinstance(answer, GridError)


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
