"""Nodes: the status of the cluster, one node, draining a node for its owner, and waiting for nodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from msgspec import Struct

from distributed_grid.adapters.child_process import Say
from distributed_grid.adapters.node.node_messages import AgentLinkChanged
from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.jobs import JobRow
from distributed_grid.api.answers.leases import AllocationList, AllocationRow
from distributed_grid.api.answers.nodes import (
    DrainAnswer,
    NodeDetail,
    NodeList,
    NodeRow,
    NodeStep,
    OfferList,
    OfferRow,
    RecommendationList,
    RecommendationRow,
)
from distributed_grid.api.answers.reports import GridStatus
from distributed_grid.control.grid import Grid
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
from distributed_grid.server.services.records import held_leases

MAX_STATUS_ROWS = 1_000
"""Jobs, and leases, in a status."""
POLL_SECONDS = 0.1
RESUME_SECONDS = 10.0
DRAIN_SECONDS = 60.0
CHECKPOINT_SECONDS = 30.0
"""How long a node that lends nothing more is kept for the checkpoints that are there."""
Report = Callable[[dict[str, Any]], None]
T = TypeVar("T")


class NodeService:
    """Answers the requests about nodes."""

    def __init__(self, grid: Grid, viewer: Callable[[], Viewer], renderer: AnswerRenderer) -> None:
        self._grid = grid
        self._viewer = viewer
        self._renderer = renderer

    @endpoint(READ)
    async def status(self, op: requests.GetStatus, caller: Caller) -> EncodedAnswer[GridStatus]:
        """Nodes, offers, leases, jobs and recommendations as they are now, as far as the caller may see them. Jobs and
        leases are bounded, those that run and the oldest of the queue first; omitted ones are counted."""
        return await self._shared(caller, "status", self._render_status)

    @endpoint(READ, get("/nodes", "nodes"))
    async def list(self, op: requests.ListNodes, caller: Caller) -> EncodedAnswer[NodeList]:
        """Every node."""
        return await self._shared(
            caller, "nodes", lambda viewer: self._render_rows("nodes", self._read_nodes(), _same_row)
        )

    @endpoint(READ, get("/offers", "nodes"))
    async def offers(self, op: requests.ListOffers, caller: Caller) -> EncodedAnswer[OfferList]:
        """Resources that can be borrowed right now."""
        return await self._shared(
            caller, "offers", lambda viewer: self._render_rows("offers", self._read_offers(viewer), _same_row)
        )

    @endpoint(READ, get("/recommendations", "nodes"))
    async def recommendations(
        self, op: requests.ListRecommendations, caller: Caller
    ) -> EncodedAnswer[RecommendationList]:
        """The work that should move to another node."""

        def render(viewer: Viewer) -> Awaitable[EncodedAnswer[RecommendationList]]:
            rows = self._grid.read(lambda ledger, now: RecommendationRow.of_ledger(viewer, ledger))
            return self._render_rows("recommendations", rows, _same_row)

        return await self._shared(caller, "recommendations", render)

    @endpoint(READ, get("/leases", "leases"))
    async def allocations(self, op: requests.ListLeases, caller: Caller) -> EncodedAnswer[AllocationList]:
        """The leases that hold something."""

        def render(viewer: Viewer) -> Awaitable[EncodedAnswer[AllocationList]]:
            rows = self._grid.read(lambda ledger, now: held_leases(ledger))
            return self._render_rows("allocations", rows, lambda row: AllocationRow.of(viewer, *row))

        return await self._shared(caller, "allocations", render)

    async def _shared(
        self, caller: Caller, kind: str, render: Callable[[Viewer], Awaitable[EncodedAnswer[Any]]]
    ) -> EncodedAnswer[Any]:
        viewer = self._viewer().for_reader(caller.reader)
        return await self._renderer.shared((kind, viewer.reader), lambda: render(viewer))

    async def _render_status(self, viewer: Viewer) -> EncodedAnswer[GridStatus]:
        async with self._renderer.answer(max_rows=2 * MAX_STATUS_ROWS) as writer:
            nodes = await self._read_nodes()
            offers = await self._read_offers(viewer)
            held, jobs, waiting, recommendations = await self._grid.read(
                lambda ledger, now: (
                    held_leases(ledger),
                    tuple(ledger.jobs.values()),
                    len(ledger.waiting),
                    RecommendationRow.of_ledger(viewer, ledger),
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
                "nodes": await writer.rows("nodes", nodes, _same_row),
                "offers": await writer.rows("offers", offers, _same_row),
                "recommendations": await writer.rows("recommendations", recommendations, _same_row),
                "allocations": await writer.rows(
                    "allocations", held, lambda row: AllocationRow.of(viewer, *row), max_rows=MAX_STATUS_ROWS
                ),
                "jobs": await writer.rows("jobs", shown, lambda job: JobRow.listed(viewer, job))
                + len(jobs)
                - len(shown),
            }
            writer.field("waiting", waiting)
            writer.field("job_states", dict(states))
            writer.field("omitted", omitted)
            return writer.finish()

    async def _render_rows(
        self, name: str, rows: Awaitable[Sequence[T]], answer_row: Callable[[T], Struct]
    ) -> EncodedAnswer[Any]:
        found = await rows
        async with self._renderer.answer(max_rows=len(found)) as writer:
            omitted = await writer.rows(name, found, answer_row)
            writer.field("omitted", omitted)
            return writer.finish()

    async def _read_nodes(self) -> Sequence[NodeRow]:
        """Rows of every node. Of a large cluster each step of the owner takes some nodes."""
        return await self._grid.read_each(
            lambda ledger: ledger.nodes,
            lambda ledger, name, now: [NodeRow.of(ledger, ledger.nodes[name], now)] if name in ledger.nodes else (),
        )

    async def _read_offers(self, viewer: Viewer) -> Sequence[OfferRow]:
        return await self._grid.read_each(
            lambda ledger: ledger.nodes,
            lambda ledger, name, now: OfferRow.of_node(viewer, ledger, name) if name in ledger.nodes else (),
        )

    @endpoint(READ, get("/nodes/{name}", "nodes", name="node"))
    async def get(self, op: requests.GetNode, caller: Caller) -> NodeDetail:
        def read_node(ledger: Ledger, now: int) -> NodeDetail:
            if op.node not in ledger.nodes:
                raise NotFound(f"no node is called {op.node!r}")
            return NodeDetail(NodeRow.of(ledger, ledger.nodes[op.node], now))

        return await self._grid.read(read_node)

    @endpoint(ADMIN, keeps_config=True)
    async def drain(self, op: requests.DrainNode, caller: Caller, report: Callable[[NodeStep], None]) -> DrainAnswer:
        """Return everything the node lends to its owner, reporting progress; or with `off` let it lend again."""
        if op.off:
            return await self._resume(op.node)
        before = await self._grid.read(lambda ledger, now: len(ledger.leases_on.get(op.node, ())))
        reason = f"{op.node} cools down: {caller.user} wants it back"
        await self._grid.handle(NodeDrained(op.node, reason, cooling=True))
        await wait_until_drained(
            self._grid,
            op.node,
            lambda step: report(NodeStep(op.node, step)),
            seconds=op.wait_seconds,
            meanwhile="it lends nothing new, and goes on taking back",
        )
        return DrainAnswer(op.node, cooling=True, given_back=before, detail="its owner has everything back")

    async def _resume(self, name: str) -> DrainAnswer:
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
        return DrainAnswer(name, cooling=False, given_back=0, detail=detail)


async def wait_until_alive(
    grid: Grid,
    name: str,
    links: Mapping[str, AgentLinkChanged],
    *,
    seconds: float,
    since_ms: int = 0,
    say: Say = lambda step: None,
) -> None:
    """Return when the agent was heard, after `since_ms`; meanwhile report changes of its link.

    Raises Refused at once if the link says that the agent will not come, TimedOut when it takes too long.
    """

    def is_alive(ledger: Ledger, now: int) -> bool:
        node, seen = ledger.nodes.get(name), ledger.observations.get(name)
        here = node is not None and (node.state is NodeState.ALIVE or node.cooling)
        return here and (not since_ms or (seen is not None and seen.at_ms >= since_ms))

    detail = ""
    try:
        async with asyncio.timeout(seconds):
            while not await grid.read(is_alive):
                link = links.get(name)
                if link is not None and link.final:
                    raise Refused(link.detail)
                if link is not None and link.detail != detail:
                    detail = link.detail
                    say(detail or link.state)
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        reason = f": {detail}" if detail else ""
        raise TimedOut(f"its agent was not heard from within {plain_number(seconds)} s{reason}; still trying") from None


async def wait_until_drained(
    grid: Grid, name: str, say: Say, *, seconds: float = DRAIN_SECONDS, meanwhile: str
) -> None:
    """Return when nothing is lent on the node any more, reporting the number of leases; TimedOut adds `meanwhile`.
    Checkpoints of its jobs are brought away first, if it answers."""
    left = reported = 0
    try:
        async with asyncio.timeout(seconds):
            while left := await grid.read(lambda ledger, now: len(ledger.leases_on.get(name, ()))):
                if left != reported:
                    say(f"waiting for {_leases(left)} to be given back")
                reported = left
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
    """State of a node whose leases were not given back in time, and the command that ends its agent anyway."""
    return f"its agent runs on and lends nothing; to end it all the same: {command} --force"


def _leases(count: int) -> str:
    return f"{count} lease{'' if count == 1 else 's'}"


def _same_row(row: Struct) -> Struct:
    return row
