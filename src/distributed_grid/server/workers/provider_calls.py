"""Calls to a provider: blocking methods in threads of their own, each with a deadline; their outcomes as events.

- A call without an answer by its deadline is lost: it may still have its effect. The threads are daemons, so a call
  that never returns keeps no process alive. Neither answers nor errors have a credential of the provider in them.
- `Throttled` had no effect, `NoCapacity` and every other error that cannot pass by itself made nothing; of all else
  nobody knows whether it had its effect.
- A stray is a machine that a provider lists with this grid's id and that no worker stands for. It is ended only when it
  is older than a provider's list may lag: the ledger is read after the list, so a worker that was asked for meanwhile
  is known.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

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
from distributed_grid.domain.workers import Worker, WorkerRules
from distributed_grid.errors import GridError, NoCapacity, Throttled, Unreachable
from distributed_grid.ports import CloudProviderBase, WorkerInstance
from distributed_grid.scheduling.scaling.worker_availability import place_of
from distributed_grid.server.workers.credential_mask import CredentialMask

MAX_CALLS_AT_ONCE = 8
T = TypeVar("T")
MAX_STRAYS = 100


class ProviderCall(Generic[T]):
    """One call under way. `result` waits until its deadline, `settled` until it is really over."""

    def __init__(self, future: asyncio.Future[T], what: str, seconds: float, mask: CredentialMask) -> None:
        self._future = future
        self._mask = mask
        self._what = what
        self._seconds = seconds

    async def result(self) -> T:
        """What the provider answered; its own errors, or Unreachable where nobody knows what was done."""
        done, _ = await asyncio.wait([self._future], timeout=self._seconds)
        if not done:
            raise Unreachable(f"{self._what}: no answer within {self._seconds:g} s")
        try:
            return self._mask.answer(self._future.result())
        except GridError as failure:
            raise self._mask.error(failure) from None
        except Exception as failure:  # a bug of the adapter: whether it was done nobody knows
            said = self._mask.text(f"{type(failure).__name__}: {failure}")
            raise Unreachable(f"{self._what}: {said}") from None

    async def settled(self) -> None:
        """Wait until the call has returned, however long that takes."""
        await asyncio.wait([self._future])


class ProviderCalls:
    """Makes calls to one provider."""

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

    async def begin(self, what: str, function: Callable[[], T]) -> ProviderCall[T]:
        """Begin a call as soon as there are few enough."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        future.add_done_callback(self._ended)

        def run() -> None:
            result: T | None = None
            failure: BaseException | None = None
            try:
                result = function()
            except BaseException as raised:  # whatever it is, it belongs to whoever waits
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

        threading.Thread(target=run, name=f"provider-{what}", daemon=True).start()
        return ProviderCall(future, f"{self.provider.name} {what}", self._seconds, self._mask)

    async def call(self, what: str, function: Callable[[], T]) -> T:
        """Make a call that changes nothing and wait for its answer."""
        return await (await self.begin(what, function)).result()

    def _ended(self, future: asyncio.Future[T]) -> None:
        self._free.release()
        if not future.cancelled():
            future.exception()  # it is said to whoever waits; nobody may


def creation_event(worker: Worker, made: WorkerInstance, wall_ms: int) -> Event:
    """A creation was answered."""
    if made.state == "gone":
        return WorkerGone(worker.id, "it was gone when it was asked for again", wall_ms)
    warning = "" if made.waits else made.detail
    return WorkerBooted(worker.id, made.instance, warning, _ends_in_ms(made), waits=made.waits)


def _ends_in_ms(instance: WorkerInstance) -> int | None:
    """In how long the provider ends a machine by itself."""
    return None if instance.ends_in_seconds is None else round(1000 * instance.ends_in_seconds)


def creation_failure(worker: Worker, failure: Exception, wall_ms: int, instead: Worker | None = None) -> Event:
    """A creation failed, or its answer was lost."""
    why = str(failure) or type(failure).__name__
    if isinstance(failure, NoCapacity):
        return WorkerRefused(worker.id, why, wall_ms, scope=closed_scope(worker, failure), instead=instead)
    if isinstance(failure, Throttled):
        return WorkerCallFailed(worker.id, why, was_lost=False)
    if isinstance(failure, GridError) and not failure.retryable:
        return WorkerRefused(worker.id, why, wall_ms)
    return WorkerCallFailed(worker.id, why, was_lost=True)


def closed_scope(worker: Worker, failure: NoCapacity) -> str:
    """What of a provider's offers has no capacity: what it names, if the one that was asked for is in it, else that."""
    return place_of(worker).scope_like(failure.scope)


def termination_event(
    worker: Worker, found: WorkerInstance | None, wall_ms: int, *, is_gone: bool = False, problem: str = ""
) -> Event:
    """A termination was accepted, and this is what the provider knows of the machine now; `is_gone`: knowing nothing
    proves that there is nothing."""
    if is_gone or (found is not None and found.state == "gone"):
        return WorkerGone(worker.id, worker.why or "it was terminated", wall_ms)
    return WorkerTerminationAccepted(worker.id, problem)


def termination_failure(worker: Worker, failure: Exception) -> Event:
    """A termination failed, or its answer was lost: it may go on and cost money."""
    return WorkerCallFailed(worker.id, f"it cannot be terminated: {failure}", was_lost=True)


def list_event(provider: str, asked_at_ms: int, ours: Sequence[WorkerInstance], wall_ms: int) -> WorkersListed:
    """A list as the ledger hears of it, as of when it was asked for."""
    instances = tuple(
        ListedInstance(one.worker_id, one.instance, one.state, one.detail, _ends_in_ms(one), one.waits) for one in ours
    )
    return WorkersListed(provider, asked_at_ms, instances, wall_ms)


def stray_instances(ours: Sequence[WorkerInstance], known: Collection[str], rules: WorkerRules) -> list[WorkerInstance]:
    """The machines of this grid to end because no worker stands for them, so many at once; `known` are the workers
    that there are, read after the list has been handled."""
    found = [one for one in ours if one.worker_id not in known and one.state != "gone"]
    return [one for one in found if 1000 * one.age_seconds >= rules.consistency_ms][:MAX_STRAYS]
