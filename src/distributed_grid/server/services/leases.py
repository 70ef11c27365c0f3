"""Leases: request, wait for the grant, extend, release. Used by the socket and by REST.

Only the owner of a lease, or an admin, ends or extends it; others see it without its texts. Requests come in people's
units (`cpu`, 1.5) and are converted to the ledger's (1500 millicores).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection

from msgspec.structs import replace

from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.leases import AllocationDetail, AllocationRow
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import LeaseAsked, LeaseExtended, LeaseReleased, RequestRefused
from distributed_grid.domain.leases import FOREVER_MS, Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import first_node
from distributed_grid.domain.resources import MAX_AMOUNT, Amounts, Priority, ResourceType
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.domain.states import LeaseEnd, LeaseState
from distributed_grid.errors import BadInput, GridError, NotFound, Refused, TimedOut, Unreachable
from distributed_grid.number_text import plain_number
from distributed_grid.reactor import LeaseAnswer
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.endpoints import READ, USER, delete, endpoint, get, post
from distributed_grid.server.services.records import decision_on, find_lease

GB = 1024**3
ENGINE_SECONDS, CHANGE_SECONDS = 15.0, 1.0


def amounts_of(resource_type: str, amount: float, custom: Collection[str] = ()) -> Amounts:
    """An amount of a resource in the ledger's units; BadInput for an unknown resource or an impossible amount."""
    if not math.isfinite(amount) or amount <= 0:
        raise BadInput(f"the amount must be more than zero, not {plain_number(amount)}")
    kind = resource_type.lower()
    if kind == ResourceType.CPU:
        return Amounts(cpu_milli=_milli(amount, "cores"))
    if kind == ResourceType.GPU:
        return Amounts(gpu_milli=_milli(amount, "GPUs"))
    if kind == ResourceType.MEMORY:
        return Amounts(memory_bytes=_whole(amount * GB, "memory"))
    names = {name.lower(): name for name in custom}
    if kind not in names:
        known = ", ".join([*(kind.value for kind in ResourceType), *sorted(names.values())])
        raise BadInput(f"no resource is called {resource_type!r}: there is {known}")
    if amount != int(amount):
        raise BadInput(f"{names[kind]} can only be asked for in whole numbers, not {plain_number(amount)}")
    return Amounts(custom=((names[kind], _whole(amount, names[kind])),))


def combine_amounts(*parts: Amounts) -> Amounts:
    """Several asks as one; asking twice for the same is refused."""
    total = Amounts()
    for part in parts:
        names = [name for name in _SUMMED if getattr(part, name) and getattr(total, name)]
        if names or {name for name, _ in part.custom} & {name for name, _ in total.custom}:
            raise BadInput("a resource is asked for twice")
        total = Amounts(
            **{name: getattr(part, name) or getattr(total, name) for name in _SUMMED},
            custom=tuple(sorted(total.custom + part.custom)),
            gpu_models=total.gpu_models + part.gpu_models,
        )
    return total


_SUMMED = ("cpu_milli", "memory_bytes", "gpu_milli", "gpu_memory_bytes")


def _milli(amount: float, of: str) -> int:
    return _whole(amount * 1000, of)


def _whole(number: float, of: str) -> int:
    if number > MAX_AMOUNT:
        raise BadInput(f"no machine has that much {of}")
    if round(number) == 0:
        raise BadInput(f"that is too little {of} to lend")
    return round(number)


class RequestConverter:
    """Converts requests, and records those it refuses in the audit trail."""

    def __init__(self, grid: Grid, *, sharing_enabled: bool, custom_resources: frozenset[str]) -> None:
        self._grid = grid
        self.sharing_enabled = sharing_enabled
        self._custom_resources = custom_resources

    async def convert(self, op: requests.RequestLease | requests.SubmitJob, caller: Caller) -> Request:
        """The request in the ledger's units; a refusal is raised, and recorded unless it is a dry run."""
        try:
            if not self.sharing_enabled:
                raise Refused("Resource sharing not enabled: set resource_sharing.enabled to true in the config")
            request = request_of(op, caller.user, caller.team, self._custom_resources)
            return replace(request, origin=self._origin(op.origin, caller))
        except GridError as refusal:
            if not op.dry_run:
                await self._grid.handle(RequestRefused(op.request_id, caller.user, str(refusal)))
            raise

    def _origin(self, named: str, caller: Caller) -> str:
        """The node on which a request was typed: the one it names, where there is such a node; for others over the
        socket the one that stands for this machine, if one does. A name is believed, for nothing depends on it that
        `target` does not give to everybody."""
        nodes = self._grid.ledger.nodes
        if named in nodes:
            return named
        return first_node(node for node in nodes.values() if node.host == "local") if caller.is_here else ""


def request_of(
    op: requests.RequestLease | requests.SubmitJob, user: str, team: str, custom: Collection[str]
) -> Request:
    """The request in the ledger's units; BadInput with its first problem."""
    timeout_ms = round(1000 * op.timeout_seconds) if isinstance(op, requests.SubmitJob) else 0
    kind = "cpu" if op.resource_type is None else op.resource_type
    named = amounts_of(kind, 1.0 if op.amount is None else op.amount, custom)
    others = [amounts_of(kind, amount, custom) for kind, amount in sorted(op.resources.items())]
    gpu = Amounts(gpu_memory_bytes=round(op.gpu_memory_gb * GB), gpu_models=op.gpu_models)
    return Request(
        id=op.request_id,
        user=user,
        ask=combine_amounts(named, *others, gpu),
        priority=Priority.parse(op.priority),
        prefer=op.prefer,
        require=op.require,
        wait_ms=FOREVER_MS if op.wait_seconds is None else round(1000 * op.wait_seconds),
        duration_ms=round(1000 * op.duration_seconds) if isinstance(op, requests.RequestLease) else 0,
        target=op.target,
        team=team,
        strategy=Strategy.parse(op.strategy) if op.strategy else None,
        labels=tuple(parse_label(word) for word in op.labels),
        affinity=op.affinity,
        anti_affinity=op.anti_affinity,
        group=op.group,
        gang=op.gang if isinstance(op, requests.RequestLease) else 1,
        expects_ms=round(1000 * op.expects_seconds) or timeout_ms,
        deadline_ms=round(1000 * op.deadline),
    )


def parse_label(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    if not key:
        raise BadInput(f"a label needs a key: {word!r}")
    return key, value


class LeaseService:
    """Answers the requests about leases.

    `is_stopping` tells a client that hung up from a daemon that stops: only the former loses what it waited for.
    `engine_seconds` is how long an engine has to acknowledge a longer term.
    """

    def __init__(
        self,
        grid: Grid,
        viewer: Callable[[], Viewer],
        converter: RequestConverter,
        *,
        is_stopping: Callable[[], bool],
        engine_seconds: float = ENGINE_SECONDS,
    ) -> None:
        self._grid = grid
        self._viewer = viewer
        self._converter = converter
        self._is_stopping = is_stopping
        self._engine_seconds = engine_seconds

    @endpoint(USER, post("/leases", "leases"), on_socket=False)
    async def request(self, op: requests.RequestLease, caller: Caller) -> AllocationDetail:
        """The lease as it was decided: granted, or still queued."""
        answer = await self._decide(op, caller)
        return await self._detail(answer.lease, answer)

    @endpoint(USER)
    async def request_and_wait(self, op: requests.RequestLease, caller: Caller) -> AllocationDetail:
        """The lease once it is granted; released when its client hangs up meanwhile."""
        try:
            answer = await self._decide(op, caller)
            lease = answer.lease
            if not op.dry_run and _is_pending(lease):
                lease = await self._until_granted(lease.id)
            return await self._detail(lease, answer)
        except asyncio.CancelledError:
            if not self._is_stopping() and not op.dry_run:  # the client hung up: nobody would ever release this lease
                with contextlib.suppress(NotFound):
                    released = LeaseReleased(op.request_id, caller.user, "its client went away")
                    await asyncio.shield(self._grid.handle(released))
            raise

    async def _decide(self, op: requests.RequestLease, caller: Caller) -> LeaseAnswer:
        event = LeaseAsked(await self._converter.convert(op, caller), op.again)
        answer = await (self._grid.dry_run(event) if op.dry_run else self._grid.handle(event))
        assert isinstance(answer, LeaseAnswer)
        return answer

    async def _detail(self, lease: Lease, answer: LeaseAnswer) -> AllocationDetail:
        viewer = self._viewer()
        decision = await decision_on(self._grid, viewer, lease, answer.choice, answer.reasons, lease.id)
        return AllocationDetail(
            allocation=AllocationRow.of(viewer, lease), reasons=list(answer.reasons), decision=decision
        )

    async def _until_granted(self, lease_id: str) -> Lease:
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
        finally:
            self._grid.unwatch(lease_id, changed)

    @endpoint(READ, get("/leases/{name}", "leases", name="allocation_id"))
    async def get(self, op: requests.GetLease, caller: Caller) -> AllocationDetail:
        """One lease, alive or ended."""
        lease = await find_lease(self._grid, op.allocation_id)
        return AllocationDetail(allocation=AllocationRow.of(self._viewer().for_reader(caller.reader), lease))

    @endpoint(USER, delete("/leases/{name}", "leases", name="allocation_id", hidden=("exact",)), keeps_config=True)
    async def release(self, op: requests.ReleaseLease, caller: Caller) -> AllocationDetail:
        """Releasing a lease that has ended is harmless; the answer says when it ended."""
        lease = await find_lease(self._grid, op.allocation_id, exact=op.exact)
        caller.must_own(lease.request.user, f"the lease {lease.id}")
        already_ended_ms = lease.ended_at_ms if lease.is_over else 0
        if not lease.is_over:
            try:
                answer = await self._grid.handle(LeaseReleased(lease.id, caller.user))
                assert isinstance(answer, LeaseAnswer)
                lease = answer.lease
            except NotFound:  # it ended by itself a moment ago
                lease = await find_lease(self._grid, lease.id)
                already_ended_ms = lease.ended_at_ms
        viewer = self._viewer()
        return AllocationDetail(
            allocation=AllocationRow.of(viewer, lease), already_ended_at=viewer.time(already_ended_ms)
        )

    @endpoint(USER, post("/leases/{name}/extend", "leases", name="allocation_id"))
    async def extend(self, op: requests.ExtendLease, caller: Caller) -> AllocationDetail:
        lease = await find_lease(self._grid, op.allocation_id)
        caller.must_own(lease.request.user, f"the lease {lease.id}")
        extended = LeaseExtended(lease.id, caller.user, round(1000 * op.seconds), op.request_id)
        answer = await self._grid.handle(extended)
        assert isinstance(answer, LeaseAnswer)
        await self._until_engine_knows(answer.lease)
        return AllocationDetail(allocation=AllocationRow.of(self._viewer(), answer.lease))

    async def _until_engine_knows(self, lease: Lease) -> None:
        """Wait until the engine that reserves a lease has acknowledged its end, or the lease is over."""

        def unaware(ledger: Ledger, now: int) -> str:
            current = ledger.leases.get(lease.id)
            if current is None or not current.engine:
                return ""
            binding = ledger.binding_of(current)
            is_known = binding is not None and binding.bound_at_ms and binding.term_ms >= lease.ends_at_ms
            return "" if is_known else (binding.key if binding is not None else lease.id)

        try:
            async with asyncio.timeout(self._engine_seconds):
                while key := await self._grid.read(unaware):
                    changed = self._grid.watch(key)
                    try:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(CHANGE_SECONDS):  # it may have changed before we looked
                                await changed.wait()
                    finally:
                        self._grid.unwatch(key, changed)
        except TimeoutError:
            raise Unreachable(
                f"{lease.engine} has not acknowledged it within {self._engine_seconds:g} s: {lease.id} ends at "
                f"{self._viewer().time(lease.ends_at_ms)}, and {lease.engine} hears of it when it answers"
            ) from None


def _is_pending(lease: Lease) -> bool:
    """Whether a lease is queued, waits for preempted ones to end, or for an engine to reserve it."""
    return lease.state in (LeaseState.ASKED, LeaseState.RESERVING)
