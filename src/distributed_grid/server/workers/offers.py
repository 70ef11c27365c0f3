"""Catalog of what providers can start, and which offer a request takes: the first that fits and is not closed."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from distributed_grid.control.grid import Grid
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import Worker, WorkerResources
from distributed_grid.errors import BadInput, GridError, Refused
from distributed_grid.number_text import counted, plain_number
from distributed_grid.ports import WorkerOffer
from distributed_grid.scheduling.scaling.budget import budget_state
from distributed_grid.scheduling.scaling.worker_availability import OfferPlace, closed_text, closure_of
from distributed_grid.server.workers.provider_calls import ProviderCalls
from distributed_grid.server.workers.provider_registry import ProviderRegistry

OFFERS_SECONDS = 60.0
"""How long what a provider said it offers is used."""


def new_worker_id() -> str:
    """An id for a worker: the name of its machine and of its node, and the key of the call that makes it."""
    return f"worker-{secrets.token_hex(6)}"


class OfferCatalog:
    """The offers of every provider, asked for on demand, and the calls to each."""

    def __init__(self, registry: ProviderRegistry, grid: Grid, *, call_seconds: float) -> None:
        self.registry = registry
        self._grid = grid
        self._call_seconds = call_seconds
        self._calls: dict[str, ProviderCalls] = {}
        self._offers: dict[str, tuple[float, Sequence[WorkerOffer]]] = {}

    async def calls(self, provider: str) -> ProviderCalls:
        """How a provider is called; BadInput where there is none of this name."""
        found = self._calls.get(provider)
        if found is None:
            opened = await asyncio.to_thread(self.registry.open, provider)
            mask = self.registry.mask(provider)
            found = self._calls.setdefault(provider, ProviderCalls(opened, seconds=self._call_seconds, mask=mask))
        return found

    async def offers(self, provider: str) -> Sequence[WorkerOffer]:
        """What a provider can start, the preferred first; not older than a minute."""
        now = asyncio.get_running_loop().time()
        at, offers = self._offers.get(provider, (float("-inf"), ()))
        if now - at >= OFFERS_SECONDS:
            calls = await self.calls(provider)
            offers = await calls.call("offers", calls.provider.offers)
            self._offers[provider] = (now, offers)
        return offers

    async def choose(self, provider: str, worker_type: str, needs: WorkerResources) -> WorkerOffer:
        """The first offer of a kind that fits and is not closed; Refused says what is wrong with each."""
        offers = await self.offers(provider)
        found = await self._grid.read(
            lambda ledger, now: first_fitting(ledger, provider, offers, worker_type, needs, now=now)
        )
        if isinstance(found, WorkerOffer):
            return found
        kinds = sorted({offer.worker_type for offer in offers})
        if worker_type not in kinds:
            raise BadInput(f"{provider} has no {worker_type} workers; it has: {', '.join(kinds) or 'none'}")
        raise Refused(f"{provider} has no {worker_type} worker for that: {'; '.join(found)}")

    async def alternative(self, worker: Worker, closed: str, wall_ms: int) -> Worker | None:
        """Another worker in place of one that cannot be had, under an id of its own; None where there is none."""
        try:
            offers = await self.offers(worker.provider)
        except GridError:  # it cannot be asked now: whoever wants a worker asks again
            return None
        return await self._grid.read(lambda ledger, now: other_worker(ledger, worker, offers, closed, now, wall_ms))


def other_worker(
    ledger: Ledger, worker: Worker, offers: Sequence[WorkerOffer], closed: str, now: int, wall_ms: int
) -> Worker | None:
    """A worker of the first other offer that fits, is not closed and within the budget; None where there is none."""
    state = budget_state(ledger, now, wall_ms, without=worker.id)
    for offer in offers:
        if closed in _place(worker.provider, offer).scopes():
            continue
        found = first_fitting(ledger, worker.provider, [offer], worker.worker_type, worker.resources, now=now)
        if isinstance(found, WorkerOffer):
            other = worker_of(found, worker.provider, worker.resources, by=worker.by, why=f"instead of {worker.id}")
            if state.refusal(other) is None:
                return other
    return None


def worker_of(
    offer: WorkerOffer, provider: str, needs: WorkerResources, *, by: str, why: str = "", worker_id: str = ""
) -> Worker:
    """A worker that is to be started under an offer, with at least what is needed."""
    has = offer.resources
    resources = WorkerResources(
        needs.cpu_milli or has.cpu_milli, needs.memory_bytes or has.memory_bytes, needs.gpu_count or has.gpu_count
    )
    return Worker(
        worker_id or new_worker_id(),
        provider,
        offer.worker_type,
        resources,
        0,
        offer=offer.id,
        price_micro=offer.price_micro,
        state=WorkerState.WANTED,
        zone=offer.zone,
        market=offer.market,
        on_this_machine=offer.on_this_machine,
        lifetime_ms=round(1000 * offer.lifetime_seconds),
        queue_ms=round(1000 * offer.queue_seconds),
        by=by,
        why=why,
    )


def offer_of(worker: Worker) -> WorkerOffer:
    """The offer that a worker is asked for under, the same whenever it is asked for again."""
    return WorkerOffer(
        worker.offer,
        worker.worker_type,
        worker.resources,
        worker.price_micro,
        worker.zone,
        worker.market,
        lifetime_seconds=worker.lifetime_ms / 1000,
        queue_seconds=worker.queue_ms / 1000,
    )


def _place(provider: str, offer: WorkerOffer) -> OfferPlace:
    return OfferPlace(provider, offer.id, offer.zone, offer.market, offer.worker_type)


def first_fitting(
    ledger: Ledger, provider: str, offers: Sequence[WorkerOffer], worker_type: str, needs: WorkerResources, *, now: int
) -> WorkerOffer | list[str]:
    """The first offer of a kind that fits and is not closed, or what is wrong with each."""
    problems = []
    for offer in offers:
        if offer.worker_type != worker_type:
            continue
        problem = (
            offer.unavailable
            or _too_small(offer.resources, needs)
            or closed_text(closure_of(ledger, _place(provider, offer)), now)
        )
        if not problem:
            return offer
        problems.append(f"{offer.id}: {problem}")
    return problems


def _too_small(has: WorkerResources, needs: WorkerResources) -> str:
    if needs.cpu_milli > has.cpu_milli:
        return f"it has {counted(has.cpu_milli / 1000, 'core')}, not {plain_number(needs.cpu_milli / 1000)}"
    if needs.memory_bytes > has.memory_bytes:
        return f"it has {has.memory_bytes / 2**30:.1f} GB, not {needs.memory_bytes / 2**30:.1f}"
    if needs.gpu_count > has.gpu_count:
        return f"it has {counted(has.gpu_count, 'GPU')}, not {needs.gpu_count}"
    return ""
