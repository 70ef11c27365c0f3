"""The nodes of a Ray cluster that the grid has taken in: their links kept, deeds done on them, through their hands."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from distributed_grid.adapters.engines.holding import Adopted, Grasp
from distributed_grid.adapters.shells import installing
from distributed_grid.adapters.shells.failures import Failed
from distributed_grid.adapters.shells.keeping import Link
from distributed_grid.adapters.shells.messages import Facts, Finished, Linked, Stepped
from distributed_grid.adapters.shells.remote import Say, Talk

MOST_AT_ONCE = 16
BUG_PAUSE = 5.0
log = logging.getLogger(__name__)


class Adopter:
    """Holds the hands it is told to hold, and nothing that the next control plane does not tell again."""

    def __init__(self, report: Callable[[Linked | Stepped | Finished], None], supplies: installing.Supplies) -> None:
        self._report = report
        self._supplies = supplies
        self._grasps: dict[str, tuple[Adopted, Grasp]] = {}
        self._links: dict[str, tuple[Adopted, Link, asyncio.Task[None]]] = {}
        self._deeds: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(MOST_AT_ONCE)

    def adopt(self, target: Adopted) -> None:
        """Keep an agent on this node and its link, until told otherwise; telling twice changes nothing."""
        kept = self._links.get(target.name)
        if kept is not None and kept[0] == target:
            kept[1].nudge()
            return
        self.let_go(target.name)
        link = Link(
            target.name,
            self._grasp(target).way,
            self._report,
            socket=target.local_socket,
            prepare=lambda talk: self._prepare(target, talk),
            linger=target.linger,
        )
        self._links[target.name] = (target, link, asyncio.create_task(self._guarded(link, target.name)))

    def let_go(self, node: str) -> None:
        """Let go of a link; agent and hand stay. Letting go of what is not kept is harmless."""
        kept = self._links.pop(node, None)
        if kept is not None:
            kept[2].cancel()
            self._report(Linked(node, "down", "not wanted"))

    def do(self, number: int, deed: str, target: Adopted) -> None:
        """One deed on one node: `end` or `purge` its agent, or `forget` a node that is gone; the hand goes with it."""
        task = asyncio.create_task(self._do(number, deed, target))
        self._deeds.add(task)
        task.add_done_callback(self._deeds.discard)

    def _grasp(self, target: Adopted) -> Grasp:
        known = self._grasps.get(target.name)
        if known is None or known[0] != target:
            known = self._grasps[target.name] = (target, Grasp(target))
        return known[1]

    async def _prepare(self, target: Adopted, talk: Talk) -> None:
        """Have our package there before the agent is started; a node that joins gets it by itself."""
        async with self._places:
            await installing.install(
                talk, self._supplies, lambda step: self._report(Linked(target.name, "connecting", step))
            )

    async def _guarded(self, link: Link, node: str) -> None:
        while True:
            try:
                await link.keep()
            except Exception as bug:  # the outermost loop of a link: it is told, and begun again
                log.exception("the link to %s failed", node)
                self._report(Linked(node, "down", f"a bug: {type(bug).__name__}: {bug}"))
                await asyncio.sleep(BUG_PAUSE)

    async def _do(self, number: int, deed: str, target: Adopted) -> None:
        """A deed, told step by step; whatever happens, it is told as finished."""
        try:
            words, facts = await self._perform(deed, target, lambda step: self._report(Stepped(number, step)))
        except Failed as failure:
            self._report(Finished(number, problem=str(failure)))
        except Exception as bug:  # the outermost place of a deed
            log.exception("%s on %s failed", deed, target.name)
            self._report(Finished(number, problem=f"a bug: {type(bug).__name__}: {bug}"))
        else:
            self._report(Finished(number, words=words, facts=facts))

    async def _perform(self, deed: str, target: Adopted, say: Say) -> tuple[str, Facts | None]:
        kept = self._links.get(target.name)
        if kept is not None and kept[0] == target:
            self.let_go(target.name)
        known = self._grasps.get(target.name)
        grasp = known[1] if known is not None and known[0] == target else Grasp(target)
        grasp.lose()  # a launch that is under way must not come after the end
        facts, words = None, "forgotten"
        if deed != "forget":
            ends: dict[str, Callable[[Talk, Say], Awaitable[tuple[Facts, str]]]] = {
                "end": installing.end,
                "purge": installing.purge,
            }
            async with self._places, grasp.way() as way, way.talk() as talk:
                facts, words = await ends[deed](talk, say)
        await grasp.remove()
        if self._grasps.get(target.name, (None,))[0] == target:
            del self._grasps[target.name]
        return words, facts

    async def stop(self) -> None:
        """Let go of everything; agents and hands stay. Safe to call twice."""
        tasks = [*(kept[2] for kept in self._links.values()), *self._deeds]
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        self._links, self._grasps = {}, {}
