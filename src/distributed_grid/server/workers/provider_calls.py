"""Calls to providers in threads of their own, their outcomes as events, and the offers of every provider.

- A call without an answer by its deadline is lost: it may still have its effect. The threads are daemons, so a call
  that never returns keeps no process alive. Neither answers nor errors have a credential of the provider in them.
- `Throttled` had no effect; `NoCapacity` and every other permanent error created nothing; after any other error the
  effect is unknown.
- A stray is a machine that a provider lists with this grid's id and that has no worker. It is terminated only if it is
  older than a provider's list may lag: the ledger is read after the list, so a worker that was requested meanwhile is
  known.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import (
    Event,
    ListedInstance,
    WorkerBooted,
    WorkerCallFailed,
    WorkerGone,
    WorkerRefused,
    WorkersListed,
    WorkerTerminationAccepted,
)
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import Worker, WorkerResources, WorkerRules
from distributed_grid.errors import BadInput, GridError, NoCapacity, Refused, Throttled, Unreachable
from distributed_grid.number_text import counted, plain_number
from distributed_grid.ports import CloudProviderBase, WorkerInstance, WorkerOffer
from distributed_grid.scheduling.scaling.budget import budget_state
from distributed_grid.scheduling.scaling.worker_availability import OfferPlace, closed_text, closure_of, place_of
from distributed_grid.server.workers.provider_registry import CredentialMask, ProviderRegistry

MAX_CALLS_AT_ONCE = 8
T = TypeVar("T")
MAX_STRAYS = 100


class ProviderCall(Generic[T]):
    """A call under way. `result` waits until its deadline, `settled` until it has returned."""

    def __init__(self, future: asyncio.Future[T], name: str, seconds: float, mask: CredentialMask) -> None:
        self._future = future
        self._mask = mask
        self._name = name
        self._seconds = seconds

    async def result(self) -> T:
        """The provider's answer, or its error; Unreachable if its effect is unknown."""
        done, _ = await asyncio.wait([self._future], timeout=self._seconds)
        if not done:
            raise Unreachable(f"{self._name}: no answer within {self._seconds:g} s")
        try:
            return self._mask.answer(self._future.result())
        except GridError as failure:
            raise self._mask.error(failure) from None
        except Exception as failure:  # a bug of the adapter: the effect is unknown
            text = self._mask.text(f"{type(failure).__name__}: {failure}")
            raise Unreachable(f"{self._name}: {text}") from None

    async def settled(self) -> None:
        """Wait until the call has returned, without a deadline."""
        await asyncio.wait([self._future])


class ProviderCalls:
    def __init__(
        self,
        provider: CloudProviderBase,
        *,
        seconds: float,
        at_once: int = MAX_CALLS_AT_ONCE,
        mask: CredentialMask | None = None,
    ) -> None:
        self.provider = provider
        self._seconds = seconds
        self._mask = mask or CredentialMask()
        self._free = asyncio.Semaphore(at_once)

    async def begin(self, name: str, function: Callable[[], T]) -> ProviderCall[T]:
        """Begin a call when fewer than `at_once` are under way."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        future.add_done_callback(self._ended)

        def run() -> None:
            result: T | None = None
            failure: BaseException | None = None
            try:
                result = function()
            except BaseException as raised:  # it is raised in the waiting task
                failure = raised

            def settle() -> None:
                if future.done():
                    return
                if failure is not None:
                    future.set_exception(failure)
                else:
                    future.set_result(result)  # type: ignore[arg-type]

            if not loop.is_closed():
                loop.call_soon_threadsafe(settle)

        threading.Thread(target=run, name=f"provider-{name}", daemon=True).start()
        return ProviderCall(future, f"{self.provider.name} {name}", self._seconds, self._mask)

    async def call(self, name: str, function: Callable[[], T]) -> T:
        """Make a call and wait for its answer."""
        return await (await self.begin(name, function)).result()

    def _ended(self, future: asyncio.Future[T]) -> None:
        self._free.release()
        if not future.cancelled():
            future.exception()  # retrieved, if no task waits for it


def creation_event(worker: Worker, made: WorkerInstance, wall_ms: int) -> Event:
    if made.state == "gone":
        return WorkerGone(worker.id, "it was gone when it was asked for again", wall_ms)
    warning = "" if made.waits else made.detail
    return WorkerBooted(worker.id, made.instance, warning, _ends_in_ms(made), waits=made.waits)


def _ends_in_ms(instance: WorkerInstance) -> int | None:
    """Time until the provider ends a machine by itself."""
    return None if instance.ends_in_seconds is None else round(1000 * instance.ends_in_seconds)


def creation_failure(worker: Worker, failure: Exception, wall_ms: int, instead: Worker | None = None) -> Event:
    """A creation failed, or its answer was lost."""
    reason = str(failure) or type(failure).__name__
    if isinstance(failure, NoCapacity):
        return WorkerRefused(worker.id, reason, wall_ms, scope=closed_scope(worker, failure), instead=instead)
    if isinstance(failure, Throttled):
        return WorkerCallFailed(worker.id, reason, was_lost=False)
    if isinstance(failure, GridError) and not failure.retryable:
        return WorkerRefused(worker.id, reason, wall_ms)
    return WorkerCallFailed(worker.id, reason, was_lost=True)


def closed_scope(worker: Worker, failure: NoCapacity) -> str:
    """Part of a provider's offers without capacity: the scope it names if that contains the requested offer, else the
    offer."""
    return place_of(worker).scope_like(failure.scope)


def termination_event(
    worker: Worker, machine: WorkerInstance | None, wall_ms: int, *, is_gone: bool = False, problem: str = ""
) -> Event:
    """A termination was accepted; `machine` is the provider's view now, and with `is_gone` its absence is proof."""
    if is_gone or (machine is not None and machine.state == "gone"):
        return WorkerGone(worker.id, worker.why or "it was terminated", wall_ms)
    return WorkerTerminationAccepted(worker.id, problem)


def termination_failure(worker: Worker, failure: Exception) -> Event:
    """A termination failed, or its answer was lost: the machine may still cost money."""
    return WorkerCallFailed(worker.id, f"it cannot be terminated: {failure}", was_lost=True)


def list_event(provider: str, asked_at_ms: int, ours: Sequence[WorkerInstance], wall_ms: int) -> WorkersListed:
    instances = tuple(
        ListedInstance(
            worker_id=machine.worker_id,
            instance=machine.instance,
            state=machine.state,
            detail=machine.detail,
            ends_in_ms=_ends_in_ms(machine),
            waits=machine.waits,
        )
        for machine in ours
    )
    return WorkersListed(provider, asked_at_ms, instances, wall_ms)


def stray_instances(ours: Sequence[WorkerInstance], known: Collection[str], rules: WorkerRules) -> list[WorkerInstance]:
    """Machines of this grid to terminate because they have no worker; `known` are the workers of the ledger, read after
    the list has been handled."""
    strays = [machine for machine in ours if machine.worker_id not in known and machine.state != "gone"]
    return [machine for machine in strays if 1000 * machine.age_seconds >= rules.consistency_ms][:MAX_STRAYS]


OFFERS_SECONDS = 60.0  # an answer about offers is used again


def new_worker_id() -> str:
    """Id of a new worker: the name of its machine and its node, and the key of the call that creates it."""
    return f"worker-{secrets.token_hex(6)}"


class OfferCatalog:
    """Offers of every provider, and the calls to each."""

    def __init__(self, registry: ProviderRegistry, grid: Grid, *, call_seconds: float) -> None:
        self.registry = registry
        self._grid = grid
        self._call_seconds = call_seconds
        self._calls: dict[str, ProviderCalls] = {}
        self._offers: dict[str, tuple[float, Sequence[WorkerOffer]]] = {}

    async def calls(self, provider: str) -> ProviderCalls:
        """Calls to a provider; BadInput if there is none of this name."""
        calls = self._calls.get(provider)
        if calls is None:
            opened = await asyncio.to_thread(self.registry.open, provider)
            mask = self.registry.mask(provider)
            calls = self._calls.setdefault(provider, ProviderCalls(opened, seconds=self._call_seconds, mask=mask))
        return calls

    async def offers(self, provider: str) -> Sequence[WorkerOffer]:
        """Offers of a provider, the preferred first; not older than a minute."""
        now = asyncio.get_running_loop().time()
        asked_at, offers = self._offers.get(provider, (float("-inf"), ()))
        if now - asked_at >= OFFERS_SECONDS:
            calls = await self.calls(provider)
            offers = await calls.call("offers", calls.provider.offers)
            self._offers[provider] = (now, offers)
        return offers

    async def choose(self, provider: str, worker_type: str, needs: WorkerResources) -> WorkerOffer:
        """The first offer of a kind that fits and is not closed; Refused with the problem of each."""
        offers = await self.offers(provider)
        result = await self._grid.read(
            lambda ledger, now: first_fitting(ledger, provider, offers, worker_type, needs, now=now)
        )
        if isinstance(result, WorkerOffer):
            return result
        kinds = sorted({offer.worker_type for offer in offers})
        if worker_type not in kinds:
            raise BadInput(f"{provider} has no {worker_type} workers; it has: {', '.join(kinds) or 'none'}")
        raise Refused(f"{provider} has no {worker_type} worker for that: {'; '.join(result)}")

    async def alternative(self, worker: Worker, closed: str, wall_ms: int) -> Worker | None:
        """Another worker, with an id of its own, in place of one without capacity; None if there is none."""
        try:
            offers = await self.offers(worker.provider)
        except GridError:  # the next evaluation asks again
            return None
        return await self._grid.read(lambda ledger, now: other_worker(ledger, worker, offers, closed, now, wall_ms))


def other_worker(
    ledger: Ledger, worker: Worker, offers: Sequence[WorkerOffer], closed: str, now: int, wall_ms: int
) -> Worker | None:
    """A worker of the first other offer that fits, is not closed and within the budget; None if there is none."""
    state = budget_state(ledger, now, wall_ms, without=worker.id)
    for offer in offers:
        if closed in place_of_offer(worker.provider, offer).scopes():
            continue
        fitting = first_fitting(ledger, worker.provider, [offer], worker.worker_type, worker.resources, now=now)
        if isinstance(fitting, WorkerOffer):
            other = worker_of(fitting, worker.provider, worker.resources, by=worker.by, why=f"instead of {worker.id}")
            if state.refusal(other) is None:
                return other
    return None


def worker_of(
    offer: WorkerOffer, provider: str, needs: WorkerResources, *, by: str, why: str = "", worker_id: str = ""
) -> Worker:
    """A worker to start under an offer, with at least the needed resources."""
    has = offer.resources
    resources = WorkerResources(
        needs.cpu_milli or has.cpu_milli, needs.memory_bytes or has.memory_bytes, needs.gpu_count or has.gpu_count
    )
    return Worker(
        id=worker_id or new_worker_id(),
        provider=provider,
        worker_type=offer.worker_type,
        resources=resources,
        created_at_ms=0,
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
    """The offer of a worker; the same each time."""
    return WorkerOffer(
        worker.offer,
        worker.worker_type,
        worker.resources,
        price_micro=worker.price_micro,
        zone=worker.zone,
        market=worker.market,
        lifetime_seconds=worker.lifetime_ms / 1000,
        queue_seconds=worker.queue_ms / 1000,
    )


def place_of_offer(provider: str, offer: WorkerOffer) -> OfferPlace:
    return OfferPlace(provider, offer.id, offer.zone, offer.market, offer.worker_type)


def first_fitting(
    ledger: Ledger, provider: str, offers: Sequence[WorkerOffer], worker_type: str, needs: WorkerResources, *, now: int
) -> WorkerOffer | list[str]:
    """The first offer of a kind that fits and is not closed, or the problem of each."""
    problems = []
    for offer in offers:
        if offer.worker_type != worker_type:
            continue
        problem = (
            offer.unavailable
            or _too_small(offer.resources, needs)
            or closed_text(closure_of(ledger, place_of_offer(provider, offer)), now)
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
