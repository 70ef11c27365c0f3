"""Holding a hand: the driver's side of the actor on one Ray node, as a way to that node.

Rule 1: every call has a deadline, and the first that fails ends the way: whoever wants one opens the next.
Rule 2: a hand of another build is replaced; one that another grid uses is left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from distributed_grid.adapters.node.agent_link import Listener, NodeTransport, PassOn
from distributed_grid.adapters.node.errors import NodeOperationFailed
from distributed_grid.adapters.node.script_session import ASK_SECONDS, SCRIPT, Say, ScriptSession, answer_in, request_of
from distributed_grid.adapters.ray import node_actor
from distributed_grid.adapters.ray.node_actor import CHUNK, POLL_SECONDS, NodeActor

NAMED = "grid-node-"
CALL_SECONDS = 30.0
TRIES = 5
BUILD = hashlib.sha256(Path(node_actor.__file__).read_bytes()).hexdigest()[:12]


class AttachedNode(Struct, frozen=True):
    """A node of a Ray cluster that has become one of the grid's: who it is there and here, where its channel ends.

    Its agent ends when it has been without a link for `linger` seconds: nobody may ever come back to end it.
    """

    name: str
    ray_node: str
    grid: str
    local_socket: str
    namespace: str = "grid"
    linger: float = 0.0


class NodeActorRef:
    """The one hand of a node: taken when somebody needs it, shared, taken again when it was lost."""

    def __init__(self, target: AttachedNode) -> None:
        self._target = target
        self._held: RayTransport | None = None
        self._taking = asyncio.Lock()

    @asynccontextmanager
    async def way(self) -> AsyncIterator[RayTransport]:
        """The hand, held; raises Failed where there is none to be had."""
        async with self._taking:
            if self._held is None or self._held.is_closed:
                self._held = await _taken(self._target)
        yield self._held

    def lose(self) -> None:
        """Take the hand anew next time, which ends whatever is going on with it."""
        if self._held is not None:
            self._held.is_over()

    async def remove(self) -> None:
        """Let Ray end the hand of this node; one that is not there is not missed."""
        self.lose()
        await asyncio.to_thread(remove_hand, self._target)


class RayTransport(NodeTransport):
    """A hand that is ours for as long as its calls go through."""

    def __init__(self, actor: Any, holder: str, target: AttachedNode) -> None:
        self._actor = actor
        self._holder = holder
        self._target = target
        self._closed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def is_over(self) -> None:
        """Nobody counts on it any more."""
        self._closed.set()

    async def call(self, method: str, *given: Any, seconds: float = CALL_SECONDS) -> Any:
        """What the hand answers; Failed, and the way is closed, where it does not."""
        try:
            return await called(self._actor, method, self._holder, *given, seconds=seconds)
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
        """Send on a stream, in pieces; whether the other side still takes it."""
        for start in range(0, len(data), CHUNK):
            if not await self.call("write", number, data[start : start + CHUNK]):
                return False
        return True

    @asynccontextmanager
    async def talk(self) -> AsyncIterator[RayScriptSession]:
        number = await self.call("open", await asyncio.to_thread(SCRIPT.read_bytes))
        try:
            yield RayScriptSession(self, number, self._target)
        finally:
            self.soon("close", number)

    async def listen(self, path: str, pass_on: PassOn) -> Listener:
        await self.call("listen", path)
        return _Accepting(self, pass_on)

    def soon(self, method: str, *given: Any) -> None:
        """Call it, and do not wait: what does not arrive does no harm."""

        async def quietly() -> None:
            with contextlib.suppress(NodeOperationFailed):
                await self.call(method, *given)

        if not self.is_closed:
            self.keep(asyncio.create_task(quietly()))

    def keep(self, task: asyncio.Task[None]) -> None:
        """Hold on to a task until it is done: nobody else does."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class RayScriptSession(ScriptSession):
    """A conversation with the script, which the hand runs."""

    def __init__(self, held: RayTransport, number: int, target: AttachedNode) -> None:
        self._held = held
        self._number = number
        self._target = target
        self._read = b""

    async def ask(
        self, do: str, *, say: Say = lambda step: None, blobs: Sequence[bytes] = (), **request: Any
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                for part in (request_of(do, self._target.grid, self._target.name, request), *blobs):
                    if not await self._held.write(self._number, part):
                        break  # it has ended, and what it said last tells why
                while True:
                    answer = answer_in(await self._line(), say)
                    if answer is not None:
                        return answer
        except TimeoutError:
            raise NodeOperationFailed(f"it did not finish within {ASK_SECONDS:g} s ({do})") from None

    async def _line(self) -> bytes:
        while b"\n" not in self._read:
            data = await self._held.read(self._number)
            if not data:
                said = str(await self._held.call("close", self._number)).strip().splitlines()
                raise NodeOperationFailed("its script ended" + (f": {said[-1][:300]}" if said else ""))
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line + b"\n"


class _Accepting(Listener):
    """Takes the connections that come to a hand's socket."""

    def __init__(self, held: RayTransport, pass_on: PassOn) -> None:
        self._held = held
        self._pass_on = pass_on
        self._task = asyncio.create_task(self._accept())

    def close(self) -> None:
        self._task.cancel()

    async def _accept(self) -> None:
        with contextlib.suppress(NodeOperationFailed):
            while True:
                number = await self._held.call("accept", seconds=POLL_SECONDS + CALL_SECONDS)
                if number:
                    stream = ActorStream(self._held, number)
                    self._held.keep(asyncio.create_task(self._serve(stream)))

    async def _serve(self, stream: ActorStream) -> None:
        await self._pass_on(stream, stream)


class ActorStream:
    """One stream of a hand, with the verbs of asyncio's readers and writers."""

    def __init__(self, held: RayTransport, number: int) -> None:
        self._held = held
        self._number = number
        self._unsent = b""

    async def read(self, most: int) -> bytes:
        return await self._held.read(self._number)

    def write(self, data: bytes) -> None:
        self._unsent += data

    async def drain(self) -> None:
        data, self._unsent = self._unsent, b""
        if not await self._held.write(self._number, data):
            raise ConnectionResetError("the agent has closed the connection")

    def close(self) -> None:
        self._held.soon("close", self._number)


async def called(actor: Any, method: str, *given: Any, seconds: float = CALL_SECONDS) -> Any:
    """What an actor answers to a call; Failed where it does not within this time."""
    try:
        async with asyncio.timeout(seconds):
            reference = await asyncio.to_thread(getattr(actor, method).remote, *given)
            answer = asyncio.wrap_future(reference.future())
            answer.add_done_callback(_looked_at)
            return await asyncio.shield(answer)
    except TimeoutError:
        raise NodeOperationFailed(f"Ray did not answer within {seconds:g} s ({method})", final=False) from None
    except Exception as failure:  # Ray raises what it likes: each is one reason to take the hand anew
        raise NodeOperationFailed(f"its hand in Ray was lost: {_first_line(failure)}", final=False) from failure


def _looked_at(answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled():
        answer.exception()


def _first_line(failure: BaseException) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return (lines[0] if lines else type(failure).__name__)[:300]


async def _taken(target: AttachedNode) -> RayTransport:
    """Have the hand of a node, made where there is none, and hold it."""
    holder = secrets.token_hex(8)
    for _ in range(TRIES):
        actor = await _found_or_made(target)
        known = await called(actor, "greet", target.grid, holder)
        if known["grid"] != target.grid:
            raise NodeOperationFailed("another grid is attached to this Ray cluster; detach that one first", final=True)
        if known["build"] == BUILD:
            return RayTransport(actor, holder, target)
        await asyncio.to_thread(remove_hand, target)
    raise NodeOperationFailed("its hand in Ray is of another version and cannot be replaced", final=False)


async def _found_or_made(target: AttachedNode) -> Any:
    try:
        async with asyncio.timeout(CALL_SECONDS):
            return await asyncio.to_thread(make_hand, target)
    except TimeoutError:
        raise NodeOperationFailed(f"Ray did not answer within {CALL_SECONDS:g} s", final=False) from None
    except Exception as failure:  # Ray raises what it likes: the next try comes soon
        raise NodeOperationFailed(f"its hand in Ray cannot be made: {_first_line(failure)}", final=False) from failure


def make_hand(target: AttachedNode) -> Any:
    """The actor of a node; the one that is there, else a new one that Ray starts again whenever it dies."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(node_actor)  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {
        "name": NAMED + target.ray_node,
        "namespace": target.namespace,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": 1000,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(target.ray_node, soft=False),
    }
    return ray.remote(NodeActor).options(**options).remote(BUILD)


def remove_hand(target: AttachedNode) -> None:
    """End the actor of a node for good; one that is not there is not missed."""
    import ray

    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        ray.kill(ray.get_actor(NAMED + target.ray_node, namespace=target.namespace), no_restart=True)
