"""The nodes of a Ray cluster that the grid has taken in: their links kept, deeds done on them, through their hands."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from distributed_grid.adapters.node import installation
from distributed_grid.adapters.node.agent_link import AgentLink
from distributed_grid.adapters.node.errors import NodeOperationFailed
from distributed_grid.adapters.node.messages import AgentLinkChanged, NodeFacts, RunFinished, StepDone
from distributed_grid.adapters.node.script_session import Say, ScriptSession
from distributed_grid.adapters.ray.node_transport import AttachedNode, NodeActorRef

MOST_AT_ONCE = 16
BUG_PAUSE = 5.0
log = logging.getLogger(__name__)


class AttachedAgents:
    """Holds the hands it is told to hold, and nothing that the next control plane does not tell again."""

    def __init__(
        self, report: Callable[[AgentLinkChanged | StepDone | RunFinished], None], supplies: installation.InstallSources
    ) -> None:
        self._report = report
        self._supplies = supplies
        self._grasps: dict[str, tuple[AttachedNode, NodeActorRef]] = {}
        self._links: dict[str, tuple[AttachedNode, AgentLink, asyncio.Task[None]]] = {}
        self._deeds: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(MOST_AT_ONCE)

    def adopt(self, target: AttachedNode) -> None:
        """Keep an agent on this node and its link, until told otherwise; telling twice changes nothing."""
        kept = self._links.get(target.name)
        if kept is not None and kept[0] == target:
            kept[1].nudge()
            return
        self.let_go(target.name)
        link = AgentLink(
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
            self._report(AgentLinkChanged(node, "down", "not wanted"))

    def do(self, number: int, deed: str, target: AttachedNode) -> None:
        """One deed on one node: `end` or `purge` its agent, or `forget` a node that is gone; the hand goes with it."""
        task = asyncio.create_task(self._do(number, deed, target))
        self._deeds.add(task)
        task.add_done_callback(self._deeds.discard)

    def _grasp(self, target: AttachedNode) -> NodeActorRef:
        known = self._grasps.get(target.name)
        if known is None or known[0] != target:
            known = self._grasps[target.name] = (target, NodeActorRef(target))
        return known[1]

    async def _prepare(self, target: AttachedNode, talk: ScriptSession) -> None:
        """Have our package there before the agent is started; a node that joins gets it by itself."""
        async with self._places:
            await installation.install(
                talk, self._supplies, lambda step: self._report(AgentLinkChanged(target.name, "connecting", step))
            )

    async def _guarded(self, link: AgentLink, node: str) -> None:
        while True:
            try:
                await link.keep()
            except Exception as bug:  # the outermost loop of a link: it is told, and begun again
                log.exception("the link to %s failed", node)
                self._report(AgentLinkChanged(node, "down", f"a bug: {type(bug).__name__}: {bug}"))
                await asyncio.sleep(BUG_PAUSE)

    async def _do(self, number: int, deed: str, target: AttachedNode) -> None:
        """A deed, told step by step; whatever happens, it is told as finished."""
        try:
            words, facts = await self._perform(deed, target, lambda step: self._report(StepDone(number, step)))
        except NodeOperationFailed as failure:
            self._report(RunFinished(number, problem=str(failure)))
        except Exception as bug:  # the outermost place of a deed
            log.exception("%s on %s failed", deed, target.name)
            self._report(RunFinished(number, problem=f"a bug: {type(bug).__name__}: {bug}"))
        else:
            self._report(RunFinished(number, words=words, facts=facts))

    async def _perform(self, deed: str, target: AttachedNode, say: Say) -> tuple[str, NodeFacts | None]:
        kept = self._links.get(target.name)
        if kept is not None and kept[0] == target:
            self.let_go(target.name)
        known = self._grasps.get(target.name)
        grasp = known[1] if known is not None and known[0] == target else NodeActorRef(target)
        grasp.lose()  # a launch that is under way must not come after the end
        facts, words = None, "forgotten"
        if deed != "forget":
            ends: dict[str, Callable[[ScriptSession, Say], Awaitable[tuple[NodeFacts, str]]]] = {
                "end": installation.end,
                "purge": installation.purge,
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
