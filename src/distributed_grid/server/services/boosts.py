"""Boosts: resources of one node lent to another for a while, and commands that use them. Used by socket and REST.

A boost is a lease for a target node that somebody requested, or the rebalancer (`is_boost`); the ledger is its only
record. A boost of the rebalancer may be used by everybody. The source is never the target; a named source is preferred,
or with `only` the only lender. A refusal begins with the documented words; the reasons of each node follow.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from distributed_grid.api import requests
from distributed_grid.api.answers.boosts import BoostDetail, BoostRow, BoostStatus
from distributed_grid.api.answers.common import Viewer, headline
from distributed_grid.api.answers.jobs import JobDetail, JobRow
from distributed_grid.api.answers.leases import AllocationDetail, AllocationRow, DecisionRow, held_amounts
from distributed_grid.api.id_prefixes import is_prefix, not_found
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import JobSubmitted, LeaseReleased, RequestRefused
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import is_automatic, is_boost
from distributed_grid.domain.resources import Amounts
from distributed_grid.domain.states import LeaseEnd, LeaseState
from distributed_grid.errors import Ambiguous, BadInput, NotFound, Refused, TimedOut
from distributed_grid.reactor import JobAnswer
from distributed_grid.scheduling.queue.reasons import why_not_there
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.endpoints import READ, USER, delete, endpoint, get, post
from distributed_grid.server.pages import select_page
from distributed_grid.server.services.boost_file_sync import BoostFileSync
from distributed_grid.server.services.jobs import command_of, fetch_order
from distributed_grid.server.services.leases import LeaseService
from distributed_grid.server.services.records import find_lease, held_leases

BIND_SECONDS = 60.0
"""How long a boost may take from its grant to its use: others have to make room, or an engine has to reserve it."""
NO_ROOM = "No nodes have sufficient available resources"
ADVICE = "ask for less or for something else, or wait in the queue (--wait); see `grid cluster status`"
ALONE = "it is the only node: add another one (docs/guide/cluster.md), or run there without a boost: grid run-shared"


class BoostService:
    """Answers the requests about boosts.

    `ray_environment` gives the variables with which a Ray program on a node finds its cluster. `is_stopping` tells a
    client that hung up from a daemon that stops: only the former loses what it waited for.
    """

    def __init__(
        self,
        grid: Grid,
        viewer: Callable[[], Viewer],
        leases: LeaseService,
        boost_file: BoostFileSync,
        *,
        sharing_enabled: bool,
        ray_environment: Callable[[str], Awaitable[dict[str, str]]],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._grid = grid
        self._viewer = viewer
        self._leases = leases
        self._boost_file = boost_file
        self._sharing_enabled = sharing_enabled
        self._ray_environment = ray_environment
        self._is_stopping = is_stopping

    @endpoint(READ, get("/boosts", "boosts"))
    async def list(self, op: requests.ListBoosts, caller: Caller) -> BoostStatus:
        """A page of the boosts of a node, or of all of them, and their sums by type."""
        viewer = self._viewer().for_reader(caller.reader)

        def held(ledger: Ledger, now: int) -> Sequence[Lease]:
            if op.node and op.node not in ledger.nodes:
                raise NotFound(_unknown_target(op.node, ledger))
            return [lease for lease, _ in held_leases(ledger)]

        def is_wanted(lease: Lease) -> bool:
            return is_boost(lease) and op.node in ("", lease.request.target)

        def row(ledger: Ledger, lease_id: str, now: int) -> Sequence[BoostRow]:
            lease = ledger.leases.get(lease_id)
            return [BoostRow.of(viewer, ledger, lease)] if lease is not None and lease.holds else ()

        slices = self._grid.slices
        boosts = await slices.select(await self._grid.read(held), is_wanted)
        page = await select_page(
            slices,
            boosts,
            lambda boost: (boost.asked_at_ms, boost.id),
            name="boosts",
            cursor=op.cursor,
            limit=op.limit,
        )
        rows = await self._grid.read_each(lambda ledger: [boost.id for boost in page.rows], row)
        active = await slices.select(boosts, lambda boost: boost.state is LeaseState.ACTIVE)
        totals: defaultdict[str, float] = defaultdict(float)
        for kind, amount in await slices.convert(active, lambda boost: headline(held_amounts(boost))):
            totals[kind] += amount
        return BoostStatus(
            active_boosts=len(active),
            totals={kind: round(amount, 3) for kind, amount in sorted(totals.items())},
            boosts=rows,
            persistence_file=str(self._boost_file.path),
            warnings=self._boost_file.warnings(),
            total=len(boosts),
            more=page.end is not None,
            next=page.next(),
        )

    @endpoint(USER, post("/boosts", "boosts"), on_socket=False)
    async def request(self, op: requests.RequestBoost, caller: Caller) -> BoostDetail:
        """The boost as it was decided: granted, or still waiting for its turn."""
        answer = await self._request_lease(op, caller)
        return BoostDetail(
            boost=None if op.dry_run else await self._current(answer.allocation.allocation_id),
            note=await self._note(op, answer.decision.node_id if isinstance(answer.decision, DecisionRow) else None),
            allocation=answer.allocation,
            reasons=answer.reasons,
            decision=answer.decision,
        )

    @endpoint(USER)
    async def request_and_wait(self, op: requests.RequestBoost, caller: Caller) -> BoostDetail:
        """The boost once it can be used; it is released if its client hangs up meanwhile."""
        try:
            answer = await self.request(op, caller)
            if answer.boost is None or answer.boost.is_active:
                return answer
            lease = await self._until_active(answer.boost.boost_id, op, caller)
            return replace(
                answer,
                boost=await self._row(lease),
                allocation=AllocationRow.of(self._viewer(), lease),
                note=await self._note(op, lease.node),
            )
        except asyncio.CancelledError:
            if not self._is_stopping() and not op.dry_run:  # the client hung up: nobody would know of this boost
                with contextlib.suppress(NotFound):
                    await asyncio.shield(self._withdraw(op.request_id, caller, "its client went away"))
            raise

    async def _note(self, op: requests.RequestBoost, lender: str | None) -> str | None:
        """One line where another node than the preferred one lends; None where there is nothing to say."""
        if not op.source or lender in (None, op.source):
            return None

        def reason(ledger: Ledger, now: int) -> str:
            lease, node = ledger.leases.get(op.request_id), ledger.nodes.get(op.source)
            if lease is None or node is None:  # in a dry run there is no lease
                return ""
            return f": {why_not_there(ledger, lease.request, node, now)}"

        return f"{lender} lends it instead of {op.source}{await self._grid.read(reason)}"

    async def _withdraw(self, lease_id: str, caller: Caller, why: str) -> None:
        await self._grid.handle(LeaseReleased(lease_id, caller.user, why))

    @endpoint(USER, delete("/boosts/{name}", "boosts", name="boost_id"), keeps_config=True)
    async def release(self, op: requests.ReleaseBoost, caller: Caller) -> BoostDetail:
        """Releasing an ended boost is harmless; the answer says when it ended."""
        boost = await self.find(op.boost_id)
        answer = await self._leases.release(requests.ReleaseLease(boost.id, exact=True), caller)
        return BoostDetail(boost=await self._row(await self.find(boost.id)), already_ended_at=answer.already_ended_at)

    @endpoint(USER, post("/boosts/{name}/extend", "boosts", name="boost_id"))
    async def extend(self, op: requests.ExtendBoost, caller: Caller) -> BoostDetail:
        boost = await self.find(op.boost_id)
        await self._leases.extend(requests.ExtendLease(op.request_id, boost.id, op.seconds), caller)
        return BoostDetail(boost=await self._row(await self.find(boost.id)))

    @endpoint(READ, get("/boosts/{name}", "boosts", name="boost_id"))
    async def get(self, op: requests.GetBoost, caller: Caller) -> BoostDetail:
        """One boost, alive or ended."""
        boost, viewer = await self.find(op.boost_id), self._viewer().for_reader(caller.reader)
        return BoostDetail(boost=await self._grid.read(lambda ledger, now: BoostRow.of(viewer, ledger, boost)))

    @endpoint(USER)
    async def run(self, op: requests.RunInBoost, caller: Caller) -> JobDetail:
        """Submit a command that runs with the resources of a boost: a job under its lease, on its source."""
        lease = await self.find(op.boost_id)
        user = caller.user if is_automatic(lease.request) else lease.request.user
        caller.must_own(user, f"the boost {lease.id}")
        return await self._run_within(lease, op, user, caller, {"GRID_BOOST": lease.id})

    @endpoint(USER)
    async def run_in_lease(self, op: requests.RunInLease, caller: Caller) -> JobDetail:
        """Submit a command that runs with the resources of a lease, on its node."""
        lease = await find_lease(self._grid, op.allocation_id)
        caller.must_own(lease.request.user, f"the lease {lease.id}")
        return await self._run_within(lease, op, lease.request.user, caller, {})

    async def _run_within(
        self, lease: Lease, op: requests.CommandInLease, user: str, caller: Caller, variables: dict[str, str]
    ) -> JobDetail:
        def placement_group(ledger: Ledger, now: int) -> str:
            binding = ledger.binding_of(lease)
            return binding.group if binding is not None else ""

        group = await self._grid.read(placement_group)
        if group:
            variables |= {"GRID_BOOST_GROUP": group, **await self._ray_environment(lease.node)}
            if "PATH" in op.given:  # then that one counts, and not the folder of Ray's interpreter
                variables["GRID_RAY_PYTHON"] = ""
        command = command_of(op, op.env | variables)
        request = Request(
            id=op.request_id,
            user=user,
            ask=Amounts(),
            priority=lease.request.priority,
            team=caller.team,
            use_lease=lease.id,
        )
        answer = await self._grid.handle(
            JobSubmitted(
                id=op.job_id or f"job-{op.request_id[:12]}", command=command, request=request, fetch=fetch_order(op)
            )
        )
        assert isinstance(answer, JobAnswer)
        return JobDetail(job=JobRow.of(self._viewer(), answer.job))

    async def _request_lease(self, op: requests.RequestBoost, caller: Caller) -> AllocationDetail:
        lease_request = requests.RequestLease(
            request_id=op.request_id,
            resource_type=op.resource_type,
            amount=op.amount,
            priority=op.priority,
            prefer=(op.source,) if op.source and not op.only else (),
            require=(op.source,) if op.source and op.only else (),
            wait_seconds=op.wait_seconds,
            duration_seconds=op.duration_seconds,
            target=op.target,
            anti_affinity=(op.target,),
            dry_run=op.dry_run,
        )
        try:
            if self._sharing_enabled:
                await self._grid.read(lambda ledger, now: _check_nodes(op, ledger))
        except Refused as refusal:
            if not op.dry_run:
                await self._grid.handle(RequestRefused(op.request_id, caller.user, str(refusal)))
            raise
        try:
            return await self._leases.request(lease_request, caller)
        except Refused as refusal:
            if not refusal.reasons or str(refusal) == refusal.reasons[0]:  # a quota: no node could change that
                raise
            is_alone = await self._grid.read(lambda ledger, now: len(ledger.nodes) - len(ledger.pull_nodes) == 1)
            advice = ALONE if is_alone else ADVICE
            raise Refused(f"{NO_ROOM}: {'; '.join(refusal.reasons)}; {advice}", refusal.reasons) from refusal

    async def _until_active(self, lease_id: str, op: requests.RequestBoost, caller: Caller) -> Lease:
        changed = self._grid.watch(lease_id)
        try:
            async with asyncio.timeout(op.wait_seconds + BIND_SECONDS):
                was_alive = False
                while True:
                    changed.clear()
                    lease = await find_lease(self._grid, lease_id, exact=True)
                    if lease.is_over:  # requested again after its end, or it ended before it could be used
                        if not lease.granted_at_ms:
                            raise TimedOut(f"{NO_ROOM}: {lease.detail}")
                        if was_alive or lease.end is LeaseEnd.FAILED:
                            reason = f"{lease.node}: {lease.detail or lease.end}"
                            raise Refused(f"{NO_ROOM}: {reason}; nothing of it is held", (reason,))
                        return lease
                    if lease.state is LeaseState.ACTIVE or lease.recovered:
                        return lease
                    was_alive = True
                    await changed.wait()
        except TimeoutError:
            why = f"it could not be reserved within {BIND_SECONDS:g} s"
            await self._withdraw(lease_id, caller, why)
            raise TimedOut(f"{NO_ROOM}: {why}; nothing of it is held") from None
        finally:
            self._grid.unwatch(lease_id, changed)

    async def find(self, name: str) -> Lease:
        """The boost of this id or unique prefix: living ones before ended ones, other leases never."""

        beginning = name if is_prefix(name) else None

        def is_named(lease: Lease) -> bool:
            is_meant = lease.id == name or (beginning is not None and lease.id.startswith(beginning))
            return is_meant and is_boost(lease)

        found = {lease.id: lease for lease in await self._grid.scan(lambda ledger: ledger.leases.values(), is_named)}
        if name in found or len(found) == 1:
            return found.get(name) or next(iter(found.values()))
        if found:
            raise Ambiguous(f"{name!r} fits several: {', '.join(sorted(found)[:5])}", sorted(found))
        with contextlib.suppress(NotFound):
            lease = await find_lease(self._grid, name)
            if is_boost(lease):
                return lease
        raise not_found("boost", name)

    async def _current(self, lease_id: str) -> BoostRow:
        """A boost as it is now, looked for among the ended ones only where it is not alive."""

        def living(ledger: Ledger, now: int) -> BoostRow | None:
            lease = ledger.leases.get(lease_id)
            return None if lease is None else BoostRow.of(self._viewer(), ledger, lease)

        row = await self._grid.read(living)
        return row if row is not None else await self._row(await find_lease(self._grid, lease_id))

    async def _row(self, lease: Lease) -> BoostRow:
        return await self._grid.read(lambda ledger, now: BoostRow.of(self._viewer(), ledger, lease))


def _check_nodes(op: requests.RequestBoost, ledger: Ledger) -> None:
    """Refuse a boost for or from an unknown node, or one that would lend to itself."""
    if op.only and not op.source:
        raise BadInput("only the source may lend it: name one")
    if op.target not in ledger.nodes:
        raise NotFound(_unknown_target(op.target, ledger))
    if op.source and op.source not in ledger.nodes:
        raise NotFound(f"the source {op.source} is no node of this cluster: {_names(ledger)}")
    if op.source == op.target:
        raise Refused(f"{op.target} cannot be its own source: a boost comes from another node")


def _unknown_target(name: str, ledger: Ledger) -> str:
    return f"Target node not found in cluster: no node is called {name}; {_names(ledger)}"


def _names(ledger: Ledger) -> str:
    return f"the nodes are: {', '.join(sorted(ledger.nodes)) or 'none'}"
