"""Nodes: the status of the cluster, one node, draining a node for its owner, and waiting for nodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import JobState, NodeState
from distributed_grid.errors import NotFound, Refused, TimedOut
from distributed_grid.number_text import plain_number
from distributed_grid.reactor.effects import is_still_needed
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.answers import AnswerRenderer, EncodedAnswer
from distributed_grid.server.endpoints import ADMIN, READ, endpoint, get
from distributed_grid.server.pages import Order, Page, RowPlace, select_page
from distributed_grid.server.services.records import held_leases

MAX_STATUS_ROWS, MAX_STATUS_NODES = 200, 1_000
"""Jobs, leases and recommendations in a status; its nodes, with their offers."""
POLL_SECONDS = 0.1
RESUME_SECONDS = 10.0
DRAIN_SECONDS = 60.0
CHECKPOINT_SECONDS = 30.0
"""How long a node that lends nothing more is kept for the checkpoints that are there."""
Report = Callable[[dict[str, Any]], None]
R = TypeVar("R", NodeRow, OfferRow, RecommendationRow)
NodeRows = Callable[[Ledger, str, int], Sequence[R]]
"""The rows about one node, from the ledger and the time."""


class NodeService:
    """Answers the requests about nodes."""

    def __init__(self, grid: Grid, viewer: Callable[[], Viewer], renderer: AnswerRenderer) -> None:
        self._grid = grid
        self._viewer = viewer
        self._renderer = renderer

    @endpoint(READ)
    async def status(self, op: requests.GetStatus, caller: Caller) -> EncodedAnswer[GridStatus]:
        """Nodes, offers, leases, jobs and recommendations as they are now, as far as the caller may see them. All lists
        are bounded, of the jobs those that run and the oldest of the queue come first; omitted rows are counted."""
        viewer = self._viewer().for_reader(caller.reader)
        return await self._renderer.shared((op, viewer.reader), lambda: self._render_status(viewer))

    @endpoint(READ, get("/nodes", "nodes"))
    async def list(self, op: requests.ListNodes, caller: Caller) -> EncodedAnswer[NodeList]:
        """A page of the nodes, by name."""

        def row(ledger: Ledger, name: str, now: int) -> Sequence[NodeRow]:
            return [NodeRow.of(ledger, ledger.nodes[name], now)] if name in ledger.nodes else ()

        return await self._shared_page(op, caller, "nodes", lambda ledger: ledger.nodes, lambda viewer: row)

    @endpoint(READ, get("/offers", "nodes"))
    async def offers(self, op: requests.ListOffers, caller: Caller) -> EncodedAnswer[OfferList]:
        """A page of the resources that can be borrowed right now, by node."""

        def rows(viewer: Viewer) -> NodeRows[OfferRow]:
            return lambda ledger, name, now: OfferRow.of_node(viewer, ledger, name) if name in ledger.nodes else ()

        return await self._shared_page(op, caller, "offers", lambda ledger: ledger.offers, rows, counted=False)

    @endpoint(READ, get("/recommendations", "nodes"))
    async def recommendations(
        self, op: requests.ListRecommendations, caller: Caller
    ) -> EncodedAnswer[RecommendationList]:
        """A page of the work that should move to another node, by node."""

        def advised(ledger: Ledger) -> Sequence[str]:
            return [name for name, state in ledger.rebalance_states.items() if state.advice is not None]

        def rows(viewer: Viewer) -> NodeRows[RecommendationRow]:
            return lambda ledger, name, now: RecommendationRow.of_node(viewer, ledger, name)

        return await self._shared_page(op, caller, "recommendations", advised, rows)

    async def _shared_page(
        self,
        op: requests.ListNodes | requests.ListOffers | requests.ListRecommendations,
        caller: Caller,
        list_name: str,
        names_of: Callable[[Ledger], Iterable[str]],
        rows_of: Callable[[Viewer], NodeRows[R]],
        *,
        counted: bool = True,
    ) -> EncodedAnswer[Any]:
        """The rows of some nodes, by name. Of a large cluster each step of the owner takes some nodes."""
        viewer = self._viewer().for_reader(caller.reader)

        async def render() -> EncodedAnswer[Any]:
            async with self._renderer.answer(max_rows=op.limit) as writer:
                all_names = await self._grid.read(lambda ledger, now: tuple(names_of(ledger)))
                names = await select_page(
                    self._grid.slices,
                    all_names,
                    lambda name: (0, name),
                    name=list_name,
                    cursor=op.cursor,
                    limit=op.limit,
                )
                rows = await self._grid.read_each(lambda ledger: names.rows, rows_of(viewer), limit=op.limit + 1)
                shown = rows
                if len(rows) > op.limit:  # the rows of a node are in one page
                    last = rows[op.limit].node_id
                    shown = [row for row in rows if row.node_id != last] or rows
                is_cut = len(rows) > op.limit and shown[-1].node_id != names.rows[-1]
                end = RowPlace(list_name, 0, shown[-1].node_id) if is_cut else names.end
                if counted:
                    writer.field("total", len(all_names))
                page = Page(shown, end, lambda count: RowPlace(list_name, 0, shown[count - 1].node_id))
                return await writer.page(list_name, page, _same_row)

        return await self._renderer.shared((op, viewer.reader), render)

    @endpoint(READ, get("/leases", "leases"))
    async def allocations(self, op: requests.ListLeases, caller: Caller) -> EncodedAnswer[AllocationList]:
        """A page of the leases that hold something, the oldest first."""
        viewer = self._viewer().for_reader(caller.reader)

        async def render() -> EncodedAnswer[AllocationList]:
            async with self._renderer.answer(max_rows=op.limit) as writer:
                held = await self._grid.read(lambda ledger, now: held_leases(ledger))
                page = await select_page(
                    self._grid.slices, held, _by_request, name="leases", cursor=op.cursor, limit=op.limit
                )
                writer.field("total", len(held))
                return await writer.page("allocations", page, lambda row: AllocationRow.of(viewer, *row))

        return await self._renderer.shared((op, viewer.reader), render)

    async def _render_status(self, viewer: Viewer) -> EncodedAnswer[GridStatus]:
        async with self._renderer.answer(max_rows=MAX_STATUS_NODES) as writer:
            names, count = await self._grid.read(
                lambda ledger, now: ([*islice(ledger.nodes, MAX_STATUS_NODES)], len(ledger.nodes))
            )
            nodes = await self._grid.read_each(
                lambda ledger: names,
                lambda ledger, name, now: [NodeRow.of(ledger, ledger.nodes[name], now)] if name in ledger.nodes else (),
            )
            offers = await self._grid.read_each(
                lambda ledger: names,
                lambda ledger, name, now: OfferRow.of_node(viewer, ledger, name) if name in ledger.nodes else (),
            )
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
            leases = await select_page(
                self._grid.slices, held, _by_request, name="leases", cursor="", limit=MAX_STATUS_ROWS
            )
            written = {
                "nodes": await writer.rows("nodes", nodes, _same_row),
                "offers": await writer.rows("offers", offers, _same_row),
                "recommendations": await writer.rows(
                    "recommendations", recommendations, _same_row, max_rows=MAX_STATUS_ROWS
                ),
                "allocations": await writer.rows(
                    "allocations", leases.rows, lambda row: AllocationRow.of(viewer, *row)
                ),
                "jobs": await writer.rows("jobs", shown, lambda job: JobRow.listed(viewer, job)),
            }
            kept = {
                "nodes": count,
                "offers": len(offers),
                "recommendations": len(recommendations),
                "allocations": len(held),
                "jobs": len(jobs),
            }
            writer.field("waiting", waiting)
            writer.field("jobs_total", len(jobs))
            writer.field("job_states", dict(states))
            writer.field("omitted", {name: kept[name] - rows for name, rows in written.items()})
            return writer.finish()

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

        def is_alive(ledger: Ledger, now: int) -> bool:
            return ledger.nodes[op.node].state is NodeState.ALIVE

        if op.off:
            await self._grid.handle(NodeResumed(op.node))
            try:
                async with asyncio.timeout(RESUME_SECONDS):
                    while not await self._grid.read(is_alive):
                        await asyncio.sleep(POLL_SECONDS)
                detail = "lends again"
            except TimeoutError:
                detail = "lends again as soon as its agent is heard"
            return DrainAnswer(op.node, cooling=False, given_back=0, detail=detail)
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


def _by_request(row: tuple[Lease, Job | None]) -> Order:
    return row[0].asked_at_ms, row[0].id


def _same_row(row: Struct) -> Struct:
    return row
