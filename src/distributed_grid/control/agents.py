"""Gateway to the agents: takes their messages in, in order, and sends them orders."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from distributed_grid.control.agent_files import ContentSender, RemoteFiles
from distributed_grid.control.agent_sessions import AgentSessions, NodeRegistry, SessionMessage
from distributed_grid.control.grid import Grid
from distributed_grid.control.memory_gateway import MemoryGateway
from distributed_grid.errors import GridError
from distributed_grid.reactor.effects import Effect
from distributed_grid.wire import (
    AgentHello,
    AgentSide,
    FetchContent,
    FetchCredit,
    FileChunk,
    FileListing,
    FromAgent,
    MemoryQuery,
    MemoryReply,
    MemoryReport,
)

log = logging.getLogger(__name__)
AnswerProgram = Callable[[str, bytes], Awaitable[bytes]]
"""Answers the question of a program that runs on a node."""


class AgentGateway:
    """The agents that are connected, and everything that goes back and forth."""

    def __init__(self, content: ContentSender | None = None) -> None:
        self._agents: dict[str, AgentSide] = {}
        self._sessions: AgentSessions | None = None
        self._inbox: asyncio.Queue[tuple[FromAgent, AgentSide]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._content = content or ContentSender(None)
        self.files = RemoteFiles(self._agents)
        self.memory = MemoryGateway(self._agents)
        self._questions: set[asyncio.Task[None]] = set()
        self._rejections: dict[tuple[str, ...], asyncio.Task[None]] = {}
        self._answer_program: AnswerProgram | None = None

    def start(
        self, grid: Grid, registry: NodeRegistry | None = None, *, answer_program: AnswerProgram | None = None
    ) -> None:
        """Begin to take in what agents say; without `answer_program` the questions of programs are refused."""
        registry = registry or NodeRegistry()
        self._answer_program = answer_program
        self._sessions = AgentSessions(grid, registry, self._agents, self.memory)
        self.memory.start(grid, registry.memory_certificate)
        self._task = asyncio.create_task(self._process_inbox())

    async def stop(self) -> None:
        """Stop taking reports in; the agents keep what was not acknowledged. Safe to call twice."""
        if self._task is not None:
            tasks = [self._task, *self._questions, *self._rejections.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._task = None

    def received(self, message: FromAgent, via: AgentSide) -> None:
        if isinstance(message, FileChunk | FileListing):
            self.files.received(message, via)
        elif isinstance(message, MemoryQuery):
            self._forward(message, via)
        elif isinstance(message, FetchContent | FetchCredit):
            self._content.received(message, via)
        else:
            self._inbox.put_nowait((message, via))

    def _forward(self, question: MemoryQuery, via: AgentSide) -> None:
        """Have a program's question answered; that may take a while, and others do not wait for it."""
        if any(self._agents.get(name) is via for name in via.nodes):
            task = asyncio.create_task(self._answer(question, via))
            self._questions.add(task)
            task.add_done_callback(self._questions.discard)

    async def _answer(self, question: MemoryQuery, via: AgentSide) -> None:
        answer = self._answer_program or _refuse_program
        via.send(MemoryReply(question.number, await answer(via.nodes[0], question.body)))

    def rejected(self, why: str, via: AgentSide) -> None:
        """An agent broke the protocol, and is being disconnected: record why."""
        if self._sessions is not None and via.nodes not in self._rejections:
            task = self._rejections[via.nodes] = asyncio.create_task(self._sessions.record_rejection(why, via))
            task.add_done_callback(lambda done: self._rejections.pop(via.nodes, None))

    def gone(self, via: AgentSide) -> None:
        """An agent's connection has ended; its node is doubted when it stays silent."""
        if self._sessions is not None:
            self._sessions.gone(via)
        self.files.gone(via)
        self._content.gone(via)

    async def settled(self) -> None:
        """Return when everything received so far has been taken in."""
        await self._inbox.join()

    def perform(self, effects: list[Effect]) -> None:
        """Send the orders that make the effects happen; before the start there is nobody to order."""
        if self._sessions is not None:
            self._sessions.perform(effects)

    async def _process_inbox(self) -> None:
        """Every report in its order; one that could not be made durable is tried again, not dropped."""
        while True:
            messages = [await self._inbox.get()]
            while not self._inbox.empty():
                messages.append(self._inbox.get_nowait())
            greeting = {via for message, via in messages if isinstance(message, AgentHello)}
            at_once = [self._process(message, via) for message, via in messages if via not in greeting]
            await asyncio.gather(*at_once, *(self._process_in_order(messages, via) for via in greeting))
            for _ in messages:
                self._inbox.task_done()

    async def _process_in_order(self, messages: list[tuple[FromAgent, AgentSide]], via: AgentSide) -> None:
        """What an agent says with its greeting counts only after it."""
        for message, sender in messages:
            if sender is via:
                await self._process(message, via)

    async def _process(self, message: FromAgent, via: AgentSide) -> None:
        assert self._sessions is not None
        try:
            if isinstance(message, SessionMessage):
                await self._sessions.received(message, via)
            elif isinstance(message, MemoryReport):
                await self.memory.received(message, via)
        except GridError as failure:
            log.error("a message of %s was refused: %s", ", ".join(via.nodes), failure)
        except Exception:  # the outermost loop: one report that cannot be taken in must not stop the others
            log.exception("a message of %s could not be taken in; the agent keeps it", ", ".join(via.nodes))


async def _refuse_program(node: str, body: bytes) -> bytes:
    return b'{"error": {"type": "Refused", "message": "this control plane answers no programs", "exit_code": 1}}'
