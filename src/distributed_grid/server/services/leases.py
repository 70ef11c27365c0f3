"""Leases: request, wait for the grant, extend, release. Used by the socket and by REST.

Only the owner of a lease, or an admin, ends or extends it; everybody sees everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from distributed_grid.api import requests
from distributed_grid.control.grid import Grid
from distributed_grid.control.views import View, Viewer
from distributed_grid.domain.events import LeaseAsked, LeaseExtended, LeaseReleased
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.states import LeaseEnd, LeaseState
from distributed_grid.errors import NotFound, Refused, TimedOut
from distributed_grid.reactor import LeaseAnswer
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.services.conversion import RequestConverter
from distributed_grid.server.services.records import decision_on, find_lease


class LeaseService:
    """Answers the requests about leases.

    `is_stopping` tells a client that hung up from a daemon that stops: only the former loses what it waited for.
    """

    def __init__(
        self,
        grid: Grid,
        viewer: Callable[[], Viewer],
        converter: RequestConverter,
        *,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._grid = grid
        self._viewer = viewer
        self._converter = converter
        self._is_stopping = is_stopping

    async def request(self, op: requests.RequestLease, caller: Caller) -> View:
        """The lease as it was decided: granted, or still queued."""
        answer = await self._decide(op, caller)
        return await self._view(answer.lease, answer)

    async def request_and_wait(self, op: requests.RequestLease, caller: Caller) -> View:
        """The lease once it is granted; released when its client hangs up meanwhile."""
        answer = await self._decide(op, caller)
        lease = answer.lease
        if not op.dry_run and _is_pending(lease):
            lease = await self._until_granted(lease.id, caller)
        return await self._view(lease, answer)

    async def _decide(self, op: requests.RequestLease, caller: Caller) -> LeaseAnswer:
        event = LeaseAsked(await self._converter.convert(op, caller), op.again)
        answer = await (self._grid.dry_run(event) if op.dry_run else self._grid.handle(event))
        assert isinstance(answer, LeaseAnswer)
        return answer

    async def _view(self, lease: Lease, answer: LeaseAnswer) -> View:
        why, viewer = list(answer.reasons), self._viewer()
        decision = await decision_on(self._grid, viewer, lease, answer.choice, why, lease.id)
        return {"allocation": viewer.lease(lease), "reasons": why, "decision": decision}

    async def _until_granted(self, lease_id: str, caller: Caller) -> Lease:
        changed = self._grid.watch(lease_id)
        try:
            while True:
                changed.clear()
                lease = await find_lease(self._grid, lease_id)
                if lease.end is LeaseEnd.FAILED:
                    raise Refused(lease.detail)
                if lease.is_over:
                    raise TimedOut(lease.detail)
                if not _is_pending(lease):
                    return lease
                await changed.wait()
        except asyncio.CancelledError:
            if not self._is_stopping():  # the client hung up: nobody would ever release this lease
                await asyncio.shield(self._grid.handle(LeaseReleased(lease_id, caller.user, "its client went away")))
            raise
        finally:
            self._grid.unwatch(lease_id, changed)

    async def get(self, name: str) -> View:
        """One lease, alive or ended."""
        return {"allocation": self._viewer().lease(await find_lease(self._grid, name))}

    async def release(self, op: requests.ReleaseLease, caller: Caller) -> View:
        """Releasing a lease that has ended is harmless."""
        lease = await find_lease(self._grid, op.allocation_id, exact=op.exact)
        caller.must_own(lease.request.user, f"the lease {lease.id}")
        if not lease.is_over:
            try:
                answer = await self._grid.handle(LeaseReleased(lease.id, caller.user))
                assert isinstance(answer, LeaseAnswer)
                lease = answer.lease
            except NotFound:  # it ended by itself a moment ago
                lease = await find_lease(self._grid, lease.id)
        return {"allocation": self._viewer().lease(lease)}

    async def extend(self, op: requests.ExtendLease, caller: Caller) -> View:
        lease = await find_lease(self._grid, op.allocation_id)
        caller.must_own(lease.request.user, f"the lease {lease.id}")
        answer = await self._grid.handle(LeaseExtended(lease.id, caller.user, round(1000 * op.seconds)))
        assert isinstance(answer, LeaseAnswer)
        return {"allocation": self._viewer().lease(answer.lease)}


def _is_pending(lease: Lease) -> bool:
    """Whether a lease is queued, waits for preempted ones to end, or for an engine to reserve it."""
    return lease.state in (LeaseState.ASKED, LeaseState.RESERVING)
