"""A node reached through Ray: the driver's side of the actor that is pinned to it.

Every call has a deadline, and the first that fails ends the transport: the next user opens another. An actor of another
build is replaced; one that another grid uses is left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from distributed_grid.adapters.node.node_messages import NodeOperationFailed
from distributed_grid.adapters.node.node_worker import Listener, NodeConnection, NodeTransport, ServeConnection
from distributed_grid.adapters.node.script_session import SCRIPT, ScriptSession
from distributed_grid.adapters.ray import node_actor
from distributed_grid.adapters.ray.driver_messages import AttachedNode
from distributed_grid.adapters.ray.node_actor import CHUNK_BYTES, POLL_SECONDS, NodeActor
from distributed_grid.supervision import start_logged, start_restarted

ACTOR_PREFIX = "grid-node-"
CALL_SECONDS = 30.0
MAX_TRIES = 5
BUILD = hashlib.sha256(Path(node_actor.__file__).read_bytes()).hexdigest()[:12]


class NodeActorConnection(NodeConnection):
    """Actor of one node: acquired at the first use, shared, acquired again after a loss."""

    def __init__(self, target: AttachedNode) -> None:
        self._target = target
        self._transport: RayTransport | None = None
        self._acquiring = asyncio.Lock()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RayTransport]:
        async with self._acquiring:
            if self._transport is None or self._transport.is_closed:
                self._transport = await _acquire(self._target)
        yield self._transport

    def close(self) -> None:
        """Acquire the actor anew next time, which ends everything on it."""
        if self._transport is not None:
            self._transport.close()

    async def remove_actor(self) -> None:
        """Let Ray end the actor of this node; a missing one is not an error."""
        self.close()
        await asyncio.to_thread(remove_actor, self._target)


class RayTransport(NodeTransport):
    """An actor that is ours for as long as its calls go through."""

    def __init__(self, actor: Any, holder: str, target: AttachedNode) -> None:
        self._actor = actor
        self._holder = holder
        self._target = target
        self._closed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def close(self) -> None:
        self._closed.set()

    async def call(self, method: str, *given: Any, seconds: float = CALL_SECONDS) -> Any:
        """The actor's answer; on a failure the transport is closed and NodeOperationFailed raised."""
        try:
            return await call_actor(self._actor, method, self._holder, *given, seconds=seconds)
        except NodeOperationFailed:
            self._closed.set()
            raise

    async def read(self, number: int) -> bytes:
        """The next bytes of a stream; empty at its end."""
        while True:
            data: bytes | None = await self.call("read", number, seconds=POLL_SECONDS + CALL_SECONDS)
            if data is not None:
                return data

    async def write(self, number: int, data: bytes) -> bool:
        """Send on a stream, in pieces; True if the other side still takes it."""
        for start in range(0, len(data), CHUNK_BYTES):
            if not await self.call("write", number, data[start : start + CHUNK_BYTES]):
                return False
        return True

    @asynccontextmanager
    async def session(self) -> AsyncIterator[RayScriptSession]:
        number = await self.call("open", await asyncio.to_thread(SCRIPT.read_bytes))
        try:
            yield RayScriptSession(self, number, self._target)
        finally:
            self.call_soon("close", number)

    async def listen(self, path: str, serve: ServeConnection) -> Listener:
        await self.call("listen", path)
        return _ActorListener(self, serve)

    def call_soon(self, method: str, *given: Any) -> None:
        """Call it without waiting: a lost call does no harm."""

        async def quietly() -> None:
            with contextlib.suppress(NodeOperationFailed):
                await self.call(method, *given)

        if not self.is_closed:
            start_logged(quietly(), f"a call to the actor of {self._target.name}")


class RayScriptSession(ScriptSession):
    """A session with the script, which the actor runs."""

    def __init__(self, transport: RayTransport, number: int, target: AttachedNode) -> None:
        super().__init__(target.grid, target.name)
        self._transport = transport
        self._number = number
        self._buffer = b""

    async def _write(self, data: bytes) -> bool:
        return await self._transport.write(self._number, data)

    async def _read_line(self) -> bytes:
        while b"\n" not in self._buffer:
            data = await self._transport.read(self._number)
            if not data:
                lines = str(await self._transport.call("close", self._number)).strip().splitlines()
                raise NodeOperationFailed("its script ended" + (f": {lines[-1][:300]}" if lines else ""))
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line + b"\n"


class _ActorListener(Listener):
    """Accepts the connections to the actor's socket."""

    def __init__(self, transport: RayTransport, serve: ServeConnection) -> None:
        self._transport = transport
        self._serve_connection = serve
        self._task = start_restarted(self._accept, "accepting the agent's connections")

    def close(self) -> None:
        self._task.cancel()

    async def _accept(self) -> None:
        with contextlib.suppress(NodeOperationFailed):
            while True:
                number = await self._transport.call("accept", seconds=POLL_SECONDS + CALL_SECONDS)
                if number:
                    start_logged(self._serve(ActorStream(self._transport, number)), "a connection of the agent")

    async def _serve(self, stream: ActorStream) -> None:
        await self._serve_connection(stream, stream)


class ActorStream:
    """One stream of an actor, with the methods of asyncio's readers and writers."""

    def __init__(self, transport: RayTransport, number: int) -> None:
        self._transport = transport
        self._number = number
        self._unsent = b""

    async def read(self, size: int) -> bytes:
        return await self._transport.read(self._number)

    def write(self, data: bytes) -> None:
        self._unsent += data

    async def drain(self) -> None:
        data, self._unsent = self._unsent, b""
        if not await self._transport.write(self._number, data):
            raise ConnectionResetError("the agent has closed the connection")

    def close(self) -> None:
        self._transport.call_soon("close", self._number)


async def call_actor(actor: Any, method: str, *given: Any, seconds: float = CALL_SECONDS) -> Any:
    """An actor's answer to a call; NodeOperationFailed if there is none within this time."""
    try:
        async with asyncio.timeout(seconds):
            reference = await asyncio.to_thread(getattr(actor, method).remote, *given)
            answer = asyncio.wrap_future(reference.future())
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, if nobody waits
            return await asyncio.shield(answer)
    except TimeoutError:
        raise NodeOperationFailed(f"Ray did not answer within {seconds:g} s ({method})", final=False) from None
    except Exception as failure:  # Ray raises many types: each is a reason to acquire the actor anew
        raise NodeOperationFailed(f"its actor in Ray was lost: {_first_line(failure)}", final=False) from failure


def _first_line(failure: BaseException) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return (lines[0] if lines else type(failure).__name__)[:300]


async def _acquire(target: AttachedNode) -> RayTransport:
    """The actor of a node, made where there is none, with this process as its only user."""
    holder = secrets.token_hex(8)
    for _ in range(MAX_TRIES):
        try:
            async with asyncio.timeout(CALL_SECONDS):
                actor = await asyncio.to_thread(make_actor, target)
        except TimeoutError:
            raise NodeOperationFailed(f"Ray did not answer within {CALL_SECONDS:g} s", final=False) from None
        except Exception as failure:  # Ray raises many types: the next try comes soon
            raise NodeOperationFailed(
                f"its actor in Ray cannot be made: {_first_line(failure)}", final=False
            ) from failure
        known = await call_actor(actor, "acquire", target.grid, holder)
        if known["grid"] != target.grid:
            raise NodeOperationFailed("another grid is attached to this Ray cluster; detach that one first", final=True)
        if known["build"] == BUILD:
            return RayTransport(actor, holder, target)
        await asyncio.to_thread(remove_actor, target)
    raise NodeOperationFailed("its actor in Ray is of another version and cannot be replaced", final=False)


def make_actor(target: AttachedNode) -> Any:
    """The actor of a node, made if there is none; Ray restarts it whenever it dies."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(node_actor)  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {
        "name": ACTOR_PREFIX + target.ray_node,
        "namespace": target.namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": 1000,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(target.ray_node, soft=False),
    }
    return ray.remote(NodeActor).options(**options).remote(BUILD)


def remove_actor(target: AttachedNode) -> None:
    """End the actor of a node for good; a missing one is not an error."""
    import ray

    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        ray.kill(ray.get_actor(ACTOR_PREFIX + target.ray_node, namespace=target.namespace), no_restart=True)
