"""Nodes: the status of the cluster, one node, draining a node for its owner, and waiting for nodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from distributed_grid.adapters.child_process import Say
from distributed_grid.adapters.node.node_messages import AgentLinkChanged
from distributed_grid.api import requests
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import View, Viewer, held_leases
from distributed_grid.domain.events import NodeDrained, NodeResumed
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import JobState, NodeState
from distributed_grid.errors import NotFound, Refused, TimedOut
from distributed_grid.number_text import plain_number
from distributed_grid.reactor.effects import is_still_needed
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.answers import AnswerRenderer, EncodedAnswer
from distributed_grid.server.endpoints import ADMIN, READ, endpoint, get

MAX_STATUS_ROWS = 1_000
"""Jobs, and leases, in a status."""
POLL_SECONDS = 0.1
RESUME_SECONDS = 10.0
DRAIN_SECONDS = 60.0
CHECKPOINT_SECONDS = 30.0
"""How long a node that lends nothing more is kept for the checkpoints that are there."""
Report = Callable[[View], None]
T = TypeVar("T")


class NodeService:
    """Answers the requests about nodes."""

    def __init__(self, grid: Grid, viewer: Callable[[], Viewer], renderer: AnswerRenderer) -> None:
        self._grid = grid
        self._viewer = viewer
        self._renderer = renderer

    @endpoint(READ)
    async def status(self, op: requests.GetStatus, caller: Caller) -> EncodedAnswer:
        """Nodes, offers, leases, jobs and recommendations as they are now, as far as the caller may see them. Of jobs
        and leases it shows so many, those that run and the oldest of the queue first, and says how many it omits."""
        return await self._shared(caller, "status", self._render_status)

    @endpoint(READ, get("/nodes", "nodes"))
    async def list(self, op: requests.ListNodes, caller: Caller) -> EncodedAnswer:
        """Every node."""
        return await self._shared(caller, "nodes", self._render_nodes)

    @endpoint(READ, get("/offers", "nodes"))
    async def offers(self, op: requests.ListOffers, caller: Caller) -> EncodedAnswer:
        """What can be had right now."""
        return await self._shared(caller, "offers", self._render_offers)

    @endpoint(READ, get("/recommendations", "nodes"))
    async def recommendations(self, op: requests.ListRecommendations, caller: Caller) -> EncodedAnswer:
        """The work that should move to another node."""
        return await self._shared(caller, "recommendations", self._render_recommendations)

    @endpoint(READ, get("/leases", "leases"))
    async def allocations(self, op: requests.ListLeases, caller: Caller) -> EncodedAnswer:
        """The leases that hold something."""
        return await self._shared(caller, "allocations", self._render_allocations)

    async def _shared(
        self, caller: Caller, kind: str, render: Callable[[Viewer], Awaitable[EncodedAnswer]]
    ) -> EncodedAnswer:
        viewer = self._viewer().for_reader(caller.reader)
        return await self._renderer.shared((kind, viewer.reader), lambda: render(viewer))

    async def _render_status(self, viewer: Viewer) -> EncodedAnswer:
        async with self._renderer.answer(max_rows=2 * MAX_STATUS_ROWS) as writer:
            nodes = await self._read_nodes(lambda ledger, name, now: [viewer.node(ledger, ledger.nodes[name], now)])
            offers = await self._read_nodes(lambda ledger, name, now: viewer.offers_of(ledger, name))
            held, jobs, waiting, recommendations = await self._grid.read(
                lambda ledger, now: (
                    held_leases(ledger),
                    tuple(ledger.jobs.values()),
                    len(ledger.waiting),
                    viewer.recommendations(ledger),
                )
            )
            states: Counter[str] = Counter()

            def is_active(job: Job) -> bool:
                states[job.state] += 1
                return job.state is not JobState.QUEUED

            active = await self._grid.slices.select(jobs, is_active)
            queued = (job for job in jobs if job.state is JobState.QUEUED)
            shown = jobs
            if len(jobs) > MAX_STATUS_ROWS:
                shown = (*active[:MAX_STATUS_ROWS], *islice(queued, max(MAX_STATUS_ROWS - len(active), 0)))
            omitted = {
                "nodes": await writer.rows("nodes", nodes, _as_it_is),
                "offers": await writer.rows("offers", offers, _as_it_is),
                "recommendations": await writer.rows("recommendations", recommendations, _as_it_is),
                "allocations": await writer.rows(
                    "allocations", held, lambda row: viewer.lease(*row), max_rows=MAX_STATUS_ROWS
                ),
                "jobs": await writer.rows("jobs", shown, viewer.listed_job) + len(jobs) - len(shown),
            }
            writer.field("waiting", waiting)
            writer.field("job_states", dict(states))
            writer.field("omitted", omitted)
            return writer.finish()

    async def _render_nodes(self, viewer: Viewer) -> EncodedAnswer:
        rows = await self._read_nodes(lambda ledger, name, now: [viewer.node(ledger, ledger.nodes[name], now)])
        return await self._render_rows("nodes", rows, _as_it_is)

    async def _render_offers(self, viewer: Viewer) -> EncodedAnswer:
        rows = await self._read_nodes(lambda ledger, name, now: viewer.offers_of(ledger, name))
        return await self._render_rows("offers", rows, _as_it_is)

    async def _render_recommendations(self, viewer: Viewer) -> EncodedAnswer:
        rows = await self._grid.read(lambda ledger, now: viewer.recommendations(ledger))
        return await self._render_rows("recommendations", rows, _as_it_is)

    async def _render_allocations(self, viewer: Viewer) -> EncodedAnswer:
        rows = await self._grid.read(lambda ledger, now: held_leases(ledger))
        return await self._render_rows("allocations", rows, lambda row: viewer.lease(*row))

    async def _render_rows(self, name: str, rows: Sequence[T], view: Callable[[T], View]) -> EncodedAnswer:
        async with self._renderer.answer(max_rows=len(rows)) as writer:
            omitted = await writer.rows(name, rows, view)
            writer.field("omitted", omitted)
            return writer.finish()

    async def _read_nodes(self, view: Callable[[Ledger, str, int], Sequence[View]]) -> Sequence[View]:
        """Rows about every node. Of a large cluster each step of the owner takes some nodes."""

        def view_known(ledger: Ledger, name: str, now: int) -> Sequence[View]:
            return view(ledger, name, now) if name in ledger.nodes else ()

        return await self._grid.read_each(lambda ledger: ledger.nodes, view_known)

    @endpoint(READ, get("/nodes/{name}", "nodes", name="node"))
    async def get(self, op: requests.GetNode, caller: Caller) -> View:
        def view_node(ledger: Ledger, now: int) -> View:
            if op.node not in ledger.nodes:
                raise NotFound(f"no node is called {op.node!r}")
            return self._viewer().node(ledger, ledger.nodes[op.node], now)

        return {"node": await self._grid.read(view_node)}

    @endpoint(ADMIN)
    async def drain(self, op: requests.DrainNode, caller: Caller, report: Report) -> View:
        """Return everything the node lends to its owner, reporting progress; or with `off` let it lend again."""
        if op.off:
            return await self._resume(op.node)
        before = await self._grid.read(lambda ledger, now: len(ledger.leases_on.get(op.node, ())))
        why = f"{op.node} cools down: {caller.user} wants it back"
        await self._grid.handle(NodeDrained(op.node, why, cooling=True))
        await wait_until_drained(
            self._grid,
            op.node,
            lambda step: report({"node_id": op.node, "step": step}),
            seconds=op.wait_seconds,
            meanwhile="it lends nothing new, and goes on taking back",
        )
        return {"node_id": op.node, "cooling": True, "given_back": before, "detail": "its owner has everything back"}

    async def _resume(self, name: str) -> View:
        await self._grid.handle(NodeResumed(name))

        def is_alive(ledger: Ledger, now: int) -> bool:
            return ledger.nodes[name].state is NodeState.ALIVE

        try:
            async with asyncio.timeout(RESUME_SECONDS):
                while not await self._grid.read(is_alive):
                    await asyncio.sleep(POLL_SECONDS)
            detail = "lends again"
        except TimeoutError:
            detail = "lends again as soon as its agent is heard"
        return {"node_id": name, "cooling": False, "given_back": 0, "detail": detail}


async def wait_until_alive(
    grid: Grid,
    name: str,
    links: Mapping[str, AgentLinkChanged],
    *,
    seconds: float,
    since_ms: int = 0,
    say: Say = lambda step: None,
) -> None:
    """Return when the agent was heard, after `since_ms`; meanwhile say what its link does.

    Raises Refused at once where the link says that the agent will not come, TimedOut when it takes too long.
    """

    def is_alive(ledger: Ledger, now: int) -> bool:
        node, seen = ledger.nodes.get(name), ledger.observations.get(name)
        here = node is not None and (node.state is NodeState.ALIVE or node.cooling)
        return here and (not since_ms or (seen is not None and seen.at_ms >= since_ms))

    said = ""
    try:
        async with asyncio.timeout(seconds):
            while not await grid.read(is_alive):
                link = links.get(name)
                if link is not None and link.final:
                    raise Refused(link.detail)
                if link is not None and link.detail != said:
                    said = link.detail
                    say(said or link.state)
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        why = f": {said}" if said else ""
        raise TimedOut(f"its agent was not heard from within {plain_number(seconds)} s{why}; still trying") from None


async def wait_until_drained(
    grid: Grid, name: str, say: Say, *, seconds: float = DRAIN_SECONDS, meanwhile: str
) -> None:
    """Return when nothing is lent on the node any more, saying how much still is; TimedOut adds `meanwhile`. What its
    jobs left in their checkpoint directories is brought away first, if it answers."""
    left = said = 0
    try:
        async with asyncio.timeout(seconds):
            while left := await grid.read(lambda ledger, now: len(ledger.leases_on.get(name, ()))):
                if left != said:
                    say(f"waiting for {_leases(left)} to be given back")
                said = left
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise TimedOut(
            f"{_leases(left)} of {name} not given back within {plain_number(seconds)} s; {meanwhile}"
        ) from None
    try:
        async with asyncio.timeout(CHECKPOINT_SECONDS):
            while await grid.read(lambda ledger, now: is_still_needed(ledger, name)):
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        say("a checkpoint that is there could not be brought away yet")


def stopping_message(command: str) -> str:
    """What a node does whose leases were not given back in time, and the command that ends its agent anyway."""
    return f"its agent runs on and lends nothing; to end it all the same: {command} --force"


def _leases(count: int) -> str:
    return f"{count} lease{'' if count == 1 else 's'}"


def _as_it_is(row: View) -> View:
    return row
