"""Transports: the grid as `grid.run` and its twins see it, one interface of coroutines for two kinds of programs.

`BlockingTransport` blocks inside its coroutines, so `complete` runs one to its end without an event loop: in any
thread, and inside a running loop. `AsyncioTransport` (`async_client.py`) waits in the running loop. The code above both
is written once.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from distributed_grid.client.client import Client
from distributed_grid.client.conversation import ClientConfig, JsonObject, Part, ReconnectBackoff
from distributed_grid.client.operations import AsyncOperations, keeps_config
from distributed_grid.errors import GridError, Unreachable
from distributed_grid.state_dir import StateDir

if TYPE_CHECKING:
    from distributed_grid.client.daemon_start import StartedDaemon
    from distributed_grid.client.operations import ReadLogsFields

T = TypeVar("T")
DEFAULT_CONFIG = os.path.join("config", "my-cluster-enhanced.yaml")


class Transport(AsyncOperations):
    """Requests to the control plane as coroutines; one is started where none runs."""

    def __init__(self, state_dir: StateDir) -> None:
        self.state_dir = state_dir

    async def greet(self) -> JsonObject:
        """Description of the control plane and its nodes, from its answer to the hello."""
        raise NotImplementedError

    def follow_logs(self, position: Callable[[], ReadLogsFields]) -> AsyncIterator[tuple[bytes, Part]]:
        """The output of a job, continued from its position with the next control plane after a loss."""
        raise NotImplementedError

    async def withdraw(self, *, job: str = "", lease: str = "") -> None:
        """Cancel a job, or release a lease, whose caller was interrupted; harmless where the control plane does not
        know it."""
        raise NotImplementedError

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """The result of work that reads files; an event loop does not wait for it."""
        raise NotImplementedError


def complete(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine over a `BlockingTransport`."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a coroutine over a blocking transport waits for an event loop")


def iterate(parts: AsyncIterator[T]) -> Iterator[T]:
    """The items of an asynchronous iterator over a `BlockingTransport`."""
    while True:
        try:
            item = complete(_next(parts))
        except StopAsyncIteration:
            return
        yield item


async def _next(parts: AsyncIterator[T]) -> T:
    return await parts.__anext__()


class BlockingTransport(Transport):
    """A connection for each request, so that threads and interrupted calls never meet on one."""

    def __init__(
        self,
        state_dir: StateDir,
        config: ClientConfig,
        find_config: Callable[[], str | None] = lambda: None,
        on_note: Callable[[str], None] = lambda note: None,
    ) -> None:
        super().__init__(state_dir)
        self._config = config
        self._find_config = find_config
        self._on_note = on_note

    def client(self, *, any_config: bool = False, may_start: bool = True) -> Client:
        def note_start(started: StartedDaemon) -> None:
            for note in started.notes:
                self._on_note(note)

        return Client(
            self.state_dir,
            self._config,
            any_config=any_config,
            may_start=may_start,
            find_config=self._find_config,
            on_started=note_start,
            on_note=self._on_note,
        )

    async def greet(self) -> JsonObject:
        with self.client() as client:
            return client.greet()

    async def call(self, op: str, **arguments: Any) -> JsonObject:
        with self.client(any_config=keeps_config(op)) as client:
            return client.call(op, **arguments)

    def follow_logs(self, position: Callable[[], ReadLogsFields]) -> AsyncIterator[tuple[bytes, Part]]:
        return _Parts(self._read_logs(position))

    def _read_logs(self, position: Callable[[], ReadLogsFields]) -> Iterator[tuple[bytes, Part]]:
        backoff = ReconnectBackoff()
        while True:
            try:
                with self.client(any_config=True) as client:
                    for kind, part in client.read_logs(**position()):
                        backoff.reset()
                        yield kind, part
                return
            except Unreachable as loss:
                time.sleep(backoff.delay_after(loss))

    async def withdraw(self, *, job: str = "", lease: str = "") -> None:
        with contextlib.suppress(GridError), self.client(any_config=True, may_start=False) as client:
            if job:
                client.cancel_job(job_id=job)
            else:
                client.release_lease(allocation_id=lease, exact=True)

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        return work()


class _Parts:
    """A blocking iterator as an asynchronous one."""

    def __init__(self, parts: Iterator[tuple[bytes, Part]]) -> None:
        self._parts = parts

    def __aiter__(self) -> _Parts:
        return self

    async def __anext__(self) -> tuple[bytes, Part]:
        for part in self._parts:
            return part
        raise StopAsyncIteration


def usual_transport() -> BlockingTransport:
    """The grid that a command typed here would use, by `GRID_STATE_DIR`, `GRID_CONFIG` and the usual places."""
    state_dir = StateDir()
    return BlockingTransport(state_dir, named_config(), lambda: find_config(state_dir, log_note), log_note)


def named_config() -> ClientConfig:
    """The config that `GRID_CONFIG` names, if any."""
    return ClientConfig(os.environ.get("GRID_CONFIG") or None, explicit=True)


def find_config(state_dir: StateDir, on_note: Callable[[str], None]) -> str | None:
    """The config at one of the usual places, unless others could have written it."""
    from distributed_grid.posix.private_files import distrust_of  # most programs find a control plane

    for path in (DEFAULT_CONFIG, state_dir.cluster_file):
        if os.path.exists(path):  # False, not an error, where we may not look
            reason = distrust_of(path)
            if reason is None:
                return path
            advice = f"to use it all the same, name it: grid --config {path} …"
            on_note(f"not using {path}, because {reason}; {advice}")
    return None


def log_note(note: str) -> None:
    """Log a line that the control plane has for the user."""
    import logging  # most calls have nothing to say

    logging.getLogger("distributed_grid").warning("%s", note)
