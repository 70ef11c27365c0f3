"""The control plane's end of every agent: their reports become events, effects become their orders."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from msgspec import Struct

from distributed_grid import __version__
from distributed_grid.control.agent_memory import MemoryGateway
from distributed_grid.control.content_sender import ContentSender
from distributed_grid.control.grid import Grid
from distributed_grid.control.remote_files import RemoteFiles
from distributed_grid.domain.effects import Effect, StartAttempt
from distributed_grid.domain.events import (
    AttemptEnded,
    AttemptMarked,
    AttemptPaused,
    AttemptsListed,
    AttemptStarted,
    ControlPlaneStarted,
    Event,
    HeartbeatReceived,
    NodeDeclared,
)
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.jobs import Ending
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import Capacity
from distributed_grid.errors import GridError
from distributed_grid.reactor import pending
from distributed_grid.wire import (
    HEARTBEAT_MS,
    PROTOCOL,
    Acknowledge,
    AgentSide,
    CheckpointAge,
    ContentChunk,
    Credit,
    Ended,
    FetchContent,
    FromAgent,
    Heard,
    Heartbeat,
    Hello,
    Listing,
    MemoryAnswered,
    MemoryAsked,
    MemoryReport,
    OwnerRules,
    Paused,
    Refuse,
    Start,
    Started,
    StopAttemptOrder,
    ToAgent,
    Welcome,
)

UNWANTED_GRACE_MS = 5_000
log = logging.getLogger(__name__)
Report = Started | Paused | Ended


class NodeRegistry:
    """What the daemon knows of nodes that the ledger does not: how their owners are to be treated, what the
    config says about a machine that has told what it has."""

    def described(self, node: Node, capacity: Capacity) -> Node:
        """The node with the capacity that counts."""
        return node

    def owner_rules(self, name: str) -> OwnerRules | None:
        """How the agent of a node gives way to its owner; None: it does not."""
        return None

    def newcomer(self, name: str) -> Node | None:
        """A node that was let in and that the ledger does not know yet; None: it is not one of ours."""
        return None

    def memory_certificate(self, node: str) -> tuple[bytes, bytes]:
        """What proves the memory of a node to those who use it, and its key; nothing where the network is trusted."""
        return b"", b""


class AgentGateway:
    """Who is connected, and what goes back and forth. An effect for a node that is not connected waits:
    it is derived anew from the ledger when the agent says hello."""

    def __init__(self, supply: ContentSender | None = None) -> None:
        self._grid: Grid | None = None
        self._registry = NodeRegistry()
        self._agents: dict[str, AgentSide] = {}
        self._greeted: dict[tuple[AgentSide, str], Hello] = {}
        self._inbox: asyncio.Queue[tuple[FromAgent, AgentSide]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._supply = supply or ContentSender(None)
        self.files = RemoteFiles(self._agents)
        self.lending = MemoryGateway(self._agents)
        self._questions: set[asyncio.Task[None]] = set()
        self.answer_program: Callable[[str, bytes], Awaitable[bytes]] = _nobody_answers

    def start(self, grid: Grid, registry: NodeRegistry | None = None) -> None:
        self._grid = grid
        self._registry = registry or self._registry
        self.lending.start(grid, self._registry.memory_certificate)
        self._task = asyncio.create_task(self._take_in())

    async def stop(self) -> None:
        """Stop taking reports in; the agents keep what was not acknowledged. Safe to call twice."""
        if self._task is not None:
            tasks = [self._task, *self._questions]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._task = None

    def received(self, message: FromAgent, via: AgentSide) -> None:
        if isinstance(message, ContentChunk | Listing):
            self.files.received(message, via)
        elif isinstance(message, MemoryAsked):
            self._pass_on(message, via)
        elif isinstance(message, FetchContent | Credit):
            self._supply.received(message, via)
        else:
            self._inbox.put_nowait((message, via))

    def _pass_on(self, question: MemoryAsked, via: AgentSide) -> None:
        """Have a program's question answered; that may take a while, and others do not wait for it."""
        if any(self._agents.get(name) is via for name in via.nodes):
            task = asyncio.create_task(self._answer_program(question, via))
            self._questions.add(task)
            task.add_done_callback(self._questions.discard)

    async def _answer_program(self, question: MemoryAsked, via: AgentSide) -> None:
        via.send(MemoryAnswered(question.number, await self.answer_program(via.nodes[0], question.body)))

    def gone(self, via: AgentSide) -> None:
        """An agent's connection has ended; its node is doubted when it stays silent."""
        for name in via.nodes:
            if self._agents.get(name) is via:
                del self._agents[name]
            self._greeted.pop((via, name), None)
        self.files.gone(via)
        self._supply.gone(via)

    async def settled(self) -> None:
        """Return when everything received so far has been taken in."""
        await self._inbox.join()

    def perform(self, effects: list[Effect]) -> None:
        """Send the orders that make the effects happen."""
        for effect in effects:
            agent = self._agents.get(effect.node)
            if agent is not None:
                assert self._grid is not None
                agent.send(order_of(self._grid.ledger, effect))

    async def _take_in(self) -> None:
        """Every report in its order; one that could not be made durable is tried again, not dropped."""
        while True:
            messages = [await self._inbox.get()]
            while not self._inbox.empty():
                messages.append(self._inbox.get_nowait())
            greeting = {via for message, via in messages if isinstance(message, Hello)}
            at_once = [self._answer(message, via) for message, via in messages if via not in greeting]
            await asyncio.gather(*at_once, *(self._in_order(messages, via) for via in greeting))
            for _ in messages:
                self._inbox.task_done()

    async def _in_order(self, messages: list[tuple[FromAgent, AgentSide]], via: AgentSide) -> None:
        """What an agent says with its greeting makes sense only after it."""
        for message, sender in messages:
            if sender is via:
                await self._answer(message, via)

    async def _answer(self, message: FromAgent, via: AgentSide) -> None:
        try:
            if isinstance(message, Heartbeat):
                await self._hear(message, via)
            elif isinstance(message, Hello):
                await self._welcome(message, via)
            elif isinstance(message, Report):
                await self._report(message, via)
            elif isinstance(message, MemoryReport):
                await self.lending.received(message, via)
        except GridError as failure:
            log.error("a message of %s was refused: %s", ", ".join(via.nodes), failure)
        except Exception:  # the outermost loop: one report that cannot be taken in must not stop the others
            log.exception("a message of %s could not be taken in; the agent keeps it", ", ".join(via.nodes))

    async def _hear(self, message: Heartbeat, via: AgentSide) -> None:
        """Take a heartbeat in; answering it is what renews the node's holds."""
        assert self._grid is not None
        hello = self._greeted.get((via, message.node))
        if hello is None and self._agents.get(message.node) is not via:
            return
        try:
            await self._grid.handle(
                HeartbeatReceived(message.node, message.usage, message.beat, message.generation, message.yields)
            )
            await asyncio.gather(*(self._grid.handle(event_of(mark, via.nodes)) for mark in message.marks))
        except GridError as failure:
            if not failure.retryable:
                raise
            return  # not durable, not renewed: the next one comes soon, and marks are told again
        via.send(heard(self._grid.ledger, message))
        if hello is not None:
            del self._greeted[via, message.node]
            self._agents[message.node] = via
            await self._catch_up(hello, via)
            self.lending.catch_up(message.node)

    async def _report(self, message: Report, via: AgentSide) -> None:
        assert self._grid is not None
        await self._grid.handle_with_retry(event_of(message, via.nodes))
        via.send(Acknowledge(message.seq))

    async def _welcome(self, hello: Hello, via: AgentSide) -> None:
        """Take an agent in: what it has, what it runs. Orders follow with its first heartbeat: they count from it."""
        assert self._grid is not None
        known = await self._grid.read(lambda ledger, now: (ledger.nodes.get(hello.node), ledger.counters["epoch"]))
        node, epoch = known
        node = node or self._registry.newcomer(hello.node)
        if node is None:
            via.send(Refuse(f"no node is called {hello.node} in this grid"))
            return
        if hello.epoch > epoch:  # restored from a backup: start above what this agent has seen of us
            epoch = hello.epoch + 1
            await self._grid.handle_with_retry(ControlPlaneStarted(epoch))
        if hello.capacity is not None:
            await self._grid.handle_with_retry(NodeDeclared(self._registry.described(node, hello.capacity)))
        await self.lending.unknown(hello.node)
        self._greeted[via, hello.node] = hello
        via.send(
            Welcome(PROTOCOL, __version__, epoch, node.hold_ms, HEARTBEAT_MS, self._registry.owner_rules(hello.node))
        )
        await self._grid.handle_with_retry(AttemptsListed(hello.node, hello.attempts, hello.boot))

    async def _catch_up(self, hello: Hello, via: AgentSide) -> None:
        """Order again what the ledger calls for on a node that has just (re)appeared, and stop what it does not."""
        assert self._grid is not None
        found = await self._grid.read(lambda ledger, now: compared(ledger, hello))
        for lease_id in found.unwanted:
            log.info("%s still has %s, which is over: stopping it", hello.node, lease_id)
            why = "nobody waits for it any more"
            via.send(StopAttemptOrder(lease_id, found.fence, str(Ending.CANCELLED), why, UNWANTED_GRACE_MS))
        self.perform(found.missing)


async def _nobody_answers(node: str, body: bytes) -> bytes:
    return b'{"error": {"type": "Refused", "message": "this control plane answers no programs", "exit_code": 1}}'


class ReportedAttempts(Struct):
    """What an agent lacks, and what it has too much."""

    missing: list[Effect]
    unwanted: list[str]
    fence: int


def compared(ledger: Ledger, hello: Hello) -> ReportedAttempts:
    """What an agent that has greeted lacks, and what it has that nobody wants any more."""
    missing = [effect for effect in pending(ledger) if effect.node == hello.node]
    unwanted = [lease_id for lease_id in hello.attempts if lease_id not in ledger.leases]
    above = max(ledger.counters.get("epoch", 0), hello.epoch) + 1  # whoever started it, this is newer
    return ReportedAttempts(missing, unwanted, above << 32)


def heard(ledger: Ledger, message: Heartbeat) -> Heard:
    """The answer to a heartbeat: how long the node's work may go on, and what of the node is lent through Ray."""
    hold_ms = hold_of(ledger, message.node)
    if not ledger.bindings:
        return Heard(message.beat, hold_ms)
    book = NodeClaims(
        lease.claim
        for lease in ledger.leases_of(message.node)
        if lease.engine and not lease.job and lease.claim is not None
    )
    return Heard(message.beat, hold_ms, book.cpu_milli, book.memory_bytes, sum(book.gpu_milli.values()))


def hold_of(ledger: Ledger, name: str) -> int:
    """How long the work of a node goes on without a word from here; 0 is without end."""
    node = ledger.nodes.get(name)
    return node.hold_ms if node is not None else 0


def order_of(ledger: Ledger, effect: Effect) -> ToAgent:
    """The order that makes an effect happen."""
    attempt = effect.job.attempt
    assert attempt is not None
    if isinstance(effect, StartAttempt):
        used = ledger.leases.get(effect.lease.request.within, effect.lease)
        claim = used.claim
        assert claim is not None
        seen = ledger.sightings.get(effect.node)
        return Start(
            effect.node,
            attempt.lease_id,
            attempt.fence,
            effect.job.id,
            effect.job.command,
            claim,
            hold_ms=hold_of(ledger, effect.node),
            beat=seen.beat if seen is not None else 0,
            generation=effect.lease.generation,
        )
    stop = effect.job.stop
    assert stop is not None
    ending = stop.ending if stop.ending in (Ending.PREEMPTED, Ending.RECLAIMED) else Ending.CANCELLED
    return StopAttemptOrder(attempt.lease_id, attempt.fence, str(ending), stop.detail, effect.job.command.grace_ms)


def event_of(message: Report | CheckpointAge, nodes: tuple[str, ...]) -> Event:
    """What the report of an agent that serves these nodes means."""
    uid, _, number = message.lease_id.rpartition(".")
    attempt = int(number) if number.isdecimal() else 0
    if isinstance(message, Started):
        return AttemptStarted(uid, attempt, message.fence, message.pid, message.cores, nodes)
    if isinstance(message, Paused):
        return AttemptPaused(uid, attempt, message.fence, message.paused, message.detail, nodes)
    if isinstance(message, CheckpointAge):
        return AttemptMarked(uid, attempt, message.fence, message.age_ms, nodes)
    pid, cores = message.pid, message.cores
    return AttemptEnded(uid, attempt, message.fence, message.outcome, nodes, pid, cores, message.mark_age_ms)
