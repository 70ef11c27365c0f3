"""Calls to a provider: blocking methods in threads of their own, so many at once, each with a deadline.

A call without an answer by its deadline is lost: it may still have its effect. The threads are daemons, so a call that
never returns keeps no process alive. Neither answers nor errors have a credential of the provider in them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from distributed_grid.errors import GridError, Unreachable
from distributed_grid.ports import CloudProviderBase
from distributed_grid.server.workers.credential_mask import CredentialMask

MAX_CALLS_AT_ONCE = 8
T = TypeVar("T")


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
