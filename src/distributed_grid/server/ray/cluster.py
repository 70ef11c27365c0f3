"""The grid's own Ray: started over SSH, the head first and then all workers at once; kept running; stopped.

Rule 1: that it is wanted is in the ledger before anything is started, and is gone from it before it is stopped.
Rule 2: nothing is started where versions differ, and nothing that somebody else runs is touched.
Rule 3: a head that died is started anew. It has forgotten everything, so every worker is, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from distributed_grid.adapters.child_process import Say
from distributed_grid.adapters.ssh.messages import SshTarget
from distributed_grid.adapters.ssh.process import SshProcess
from distributed_grid.config import ClusterConfig
from distributed_grid.control.grid import Grid
from distributed_grid.errors import GridError, Refused
from distributed_grid.server.ray.addresses import RayAddresses
from distributed_grid.server.ray.credentials import RayCredentials
from distributed_grid.server.ray.desired_state import DesiredRayCluster
from distributed_grid.server.ray.endpoints import RayEndpoints
from distributed_grid.server.ray.nodes import RayNodes
from distributed_grid.server.ray.start_options import HERE, check_versions, own_versions
from distributed_grid.state_dir import StateDir

LOOK_SECONDS, LONGEST_PAUSE = 10.0, 60.0
log = logging.getLogger(__name__)
Tell = Callable[[str], Say]


class RayCluster:
    """Starts, watches and stops Ray on the nodes of the config."""

    def __init__(
        self,
        grid: Grid,
        config: ClusterConfig,
        places: StateDir,
        shells: SshProcess,
        target: Callable[[str], SshTarget],
    ) -> None:
        secrets = RayCredentials(places.host_dir / "ray")
        self._config = config
        self._addresses = RayAddresses(config, shells, target)
        self.wanted = DesiredRayCluster(grid, config.ray.port)
        self.nodes = RayNodes(grid, config, shells=shells, target=target, secrets=secrets)
        self.reach = RayEndpoints(config, self.wanted, nodes=self.nodes, shells=shells, target=target, secrets=secrets)
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.on_running: Callable[[], Awaitable[str]] = _nothing

    # ------------------------------------------------------------------ starting

    async def look_before(self, names: Iterable[str]) -> None:
        """Raise where Ray could not be started on these nodes, before anything is: versions first of all."""
        row = await self.wanted.row()
        everyone = dict.fromkeys([*names, *(row.nodes if row is not None else ())])
        head = self._config.head.name
        if head not in everyone:
            raise Refused(f"Ray needs its head: type: grid cluster start --ray {head} {' '.join(names)}")
        here = [name for name in everyone if self.nodes.is_local(name)]
        if len(here) > 1:
            raise Refused(f"{' and '.join(here)} are one machine, and one machine is one node of Ray: name one of them")
        found = {HERE: own_versions()}
        answers = await asyncio.gather(*(self.nodes.look(name) for name in everyone), return_exceptions=True)
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
            before = await self.wanted.row()
            wanted = tuple(dict.fromkeys([*(before.nodes if before is not None else ()), *names]))
            addresses = await self._addresses.of(wanted)
            head = self._config.head.name
            await self.wanted.want(addresses[head], before.session if before is not None else "", wanted)
            try:
                problems = await self._bring_up(addresses, [*names], tell, replace=False)
            except GridError as failure:
                if before is None:
                    await self.wanted.give_up(f"it could not be started: {failure}")
                return dict.fromkeys(names, f"Ray's head on {head} could not be started: {failure}")
            if problems:
                kept = tuple(one for one in wanted if one not in problems or one in getattr(before, "nodes", ()))
                await self.wanted.want(addresses[head], self.nodes.session(head), kept)
            self.watch()
            self.reach.open_ways()
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
        starting = asyncio.create_task(self.nodes.start_head(addresses, tell(head), joinable, replace=replace))
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
            await self.wanted.want(addresses[head], session, (await self.wanted.nodes()) or (head, *workers))
            self.reach.open_ways()
            if not loading:
                loading = self._starts(workers, addresses, tell, session, replace=replace)
            done = await asyncio.gather(*loading, return_exceptions=True)
            if behind := [name for name in workers if self.nodes.is_behind(name, session)]:  # of a head that is gone
                again = self._starts(behind, addresses, tell, session, replace=True)
                late = dict(zip(behind, await asyncio.gather(*again, return_exceptions=True), strict=True))
                done = [late.get(name, one) for name, one in zip(workers, done, strict=True)]
        finally:
            await _cancelled([starting, ready])
        return {name: str(one) for name, one in zip(workers, done, strict=True) if _failed(one)}

    def _starts(
        self, names: list[str], addresses: dict[str, str], tell: Tell, session: str, *, replace: bool
    ) -> list[asyncio.Task[None]]:
        starts = [self.nodes.start_worker(name, addresses, tell(name), session, replace=replace) for name in names]
        return [asyncio.create_task(start) for start in starts]

    # ------------------------------------------------------------------ stopping

    async def stop(self, names: Iterable[str], tell: Tell, *, purge: bool) -> dict[str, str]:
        """Have no Ray of ours on these nodes; without its head it is over everywhere. Problems, by node."""
        await self._unwatch()  # whatever it is busy with is not wanted any more
        async with self._lock:
            row = await self.wanted.row()
            chosen, head = list(names), self._config.head.name
            if row is not None:
                if head in chosen or not set(row.nodes) - set(chosen):
                    chosen = list(dict.fromkeys([*chosen, *row.nodes]))
                    await self.wanted.give_up("it was stopped")
                    self.reach.close_ways()
                else:
                    left = tuple(name for name in row.nodes if name not in chosen)
                    await self.wanted.want_less(row, left)
                    self.watch()
            done: dict[str, object] = {}
            for some in ([name for name in chosen if name != head], [name for name in chosen if name == head]):
                stops = [self.nodes.stop(name, tell(name), purge=purge) for name in some]
                done |= zip(some, await asyncio.gather(*stops, return_exceptions=True), strict=True)
        return {name: str(one) for name, one in done.items() if _failed(one)}

    # ------------------------------------------------------------------ keeping it running

    async def begin(self) -> None:
        """Look after what an earlier control plane was told to keep running."""
        row = await self.wanted.row()
        if row is not None:
            self.watch()
            self.reach.open_ways()

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
        row = await self.wanted.row()
        if row is None:
            return
        answers = await asyncio.gather(
            *(self.nodes.look(name, versions=False) for name in row.nodes), return_exceptions=True
        )
        for name, answer in zip(row.nodes, answers, strict=True):
            self.nodes.lives[name] = (
                answer if isinstance(answer, dict) else {"state": "unknown", "problem": str(answer)}
            )
        head = self._config.head.name
        state = self.nodes.lives.get(head, {}).get("state")
        if state in ("stopped", "broken"):
            log.warning("Ray's head on %s is %s: starting it anew", head, state)
            addresses = await self._addresses.of(row.nodes)
            problems = await self._bring_up(addresses, [*row.nodes], _silent, replace=True)
            log.warning("Ray was started anew%s", f"; {problems}" if problems else "")
        elif state == "running":
            session = self.nodes.session(head)
            if session != row.session:
                await self.wanted.want(row.address.rpartition(":")[0].strip("[]"), session, row.nodes)
            behind = [name for name in row.nodes if name != head and self.nodes.is_behind(name, session)]
            if behind:
                log.warning("Ray on %s is not with its head: starting it anew", ", ".join(behind))
                addresses = await self._addresses.of(row.nodes)
                starts = [
                    self.nodes.start_worker(one, addresses, _silent(one), session, replace=True) for one in behind
                ]
                for name, done in zip(behind, await asyncio.gather(*starts, return_exceptions=True), strict=True):
                    if _failed(done):
                        log.warning("Ray on %s: %s", name, done)


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
