"""Gateway to the agents: takes in their messages, each agent's in order, and sends them orders.

Every agent has an inbox and a task of its own: a report of one that cannot be made durable delays no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from distributed_grid.control.agent_files import AgentQuestions, ContentSender, RemoteFiles
from distributed_grid.control.agent_sessions import (
    MAX_WAITING_REPORTS,
    AgentInbox,
    AgentSessions,
    Greeting,
    NodeRegistry,
    SessionMessage,
)
from distributed_grid.control.grid import Grid
from distributed_grid.control.memory_gateway import MemoryGateway
from distributed_grid.errors import GridError
from distributed_grid.supervision import start_logged
from distributed_grid.wire import (
    MAX_CHUNK_BYTES,
    MAX_REPLY_BYTES,
    AgentHello,
    AgentSide,
    FetchContent,
    FetchCredit,
    FileChunk,
    FileListing,
    FilesChecked,
    FromAgent,
    Heartbeat,
    MemoryQuery,
    MemoryReply,
    MemoryReport,
    MoveReport,
    ProcessListing,
    pages,
)

MAX_QUESTIONS = 64  # questions of the programs of one node that are answered at a time
log = logging.getLogger(__name__)
AnswerProgram = Callable[[str, bytes], Awaitable[bytes]]
"""Answers a question of a program on a node."""


class AgentGateway:
    """The connected agents, and all messages from and to them."""

    def __init__(
        self, grid: Grid, registry: NodeRegistry | None = None, *, content: ContentSender | None = None
    ) -> None:
        registry = registry or NodeRegistry()
        self._agents: dict[str, AgentSide] = {}
        self._is_running = False
        self._inboxes: dict[AgentSide, AgentInbox] = {}
        self._intakes: dict[AgentSide, asyncio.Task[None]] = {}
        self._greeting: set[AgentSide] = set()
        self._content = content or ContentSender(None)
        self.files = RemoteFiles(self._agents)
        self.questions = AgentQuestions(self._agents)
        self.memory = MemoryGateway(grid, self._agents, registry.memory_certificate, registry.max_connections_per_peer)
        self.sessions = AgentSessions(grid, registry, self._agents, self.memory)
        self._questions: dict[AgentSide, set[asyncio.Task[None]]] = {}
        self._rejections: dict[tuple[str, ...], asyncio.Task[None]] = {}
        self._answer_program: AnswerProgram | None = None

    def start(
        self,
        *,
        answer_program: AnswerProgram | None = None,
        on_move_report: Callable[[MoveReport], None] | None = None,
    ) -> None:
        """Begin to take in messages; without `answer_program` the questions of programs are refused. `on_move_report`
        is called with every report about a move, once it is durable."""
        self._is_running = True
        self._answer_program = answer_program
        self.sessions.on_move_report = on_move_report

    async def stop(self) -> None:
        """Stop taking reports in; the agents keep the unacknowledged ones. Safe to call twice."""
        self._is_running = False
        questions = (task for asked in self._questions.values() for task in asked)
        tasks = [*self._intakes.values(), *questions, *self._rejections.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def is_connected(self, node: str) -> bool:
        return node in self._agents

    def received(self, message: FromAgent, via: AgentSide) -> None:
        if isinstance(message, FileChunk | FileListing):
            self.files.received(message, via)
        elif isinstance(message, ProcessListing | FilesChecked):
            self.questions.received(message, via)
        elif isinstance(message, MemoryQuery):
            if not any(self._agents.get(name) is via for name in via.nodes):
                return
            asked = self._questions.setdefault(via, set())
            if len(asked) >= MAX_QUESTIONS:
                via.send(MemoryReply(message.number, _refusal(f"{MAX_QUESTIONS} questions of this node wait already")))
                return
            task = start_logged(self._answer(message, via), f"the answer to a program on {via.nodes}")
            asked.add(task)
            task.add_done_callback(lambda done: self._answered(done, via))
        elif isinstance(message, FetchContent | FetchCredit):
            self._content.received(message, via)
        elif self._is_running:
            if isinstance(message, AgentHello | Heartbeat):
                try:
                    self.sessions.answer(message, via)
                except Exception:  # a bug here must not break the connection
                    log.exception("a message of %s could not be answered", ", ".join(via.nodes))
            inbox = self._inboxes.setdefault(via, AgentInbox())
            was_full = inbox.has_overflowed
            if not inbox.put(message) and not was_full:
                log.warning(
                    "inbox of %s is full (%d messages): disconnecting, the agent will resend",
                    ", ".join(via.nodes),
                    MAX_WAITING_REPORTS,
                )
            if via not in self._intakes:
                self._intakes[via] = start_logged(self._process_inbox(inbox, via), f"the intake of {via.nodes}")

    async def _answer(self, question: MemoryQuery, via: AgentSide) -> None:
        body = _refusal("this control plane answers no programs")
        if self._answer_program is not None:
            body = await self._answer_program(via.nodes[0], question.body)
        if len(body) > MAX_REPLY_BYTES:
            body = _refusal("the answer is longer than a program on a node can be sent")
        for part in pages(len(body), MAX_CHUNK_BYTES):
            via.send(MemoryReply(question.number, body[part], part.stop < len(body)))

    def _answered(self, task: asyncio.Task[None], via: AgentSide) -> None:
        asked = self._questions.get(via, set())
        asked.discard(task)
        if not asked:
            self._questions.pop(via, None)

    def rejected(self, reason: str, via: AgentSide) -> None:
        """Record why an agent that broke the protocol is disconnected."""
        if self._is_running and via.nodes not in self._rejections:
            recording = self.sessions.record_rejection(reason, via)
            task = self._rejections[via.nodes] = start_logged(recording, f"the rejection of {via.nodes}")
            task.add_done_callback(lambda done: self._rejections.pop(via.nodes, None))

    def gone(self, via: AgentSide) -> None:
        """An agent's connection has ended; its node is doubted if it stays silent."""
        self.sessions.gone(via)
        if via in self._greeting:  # messages before the next greeting must not count after it
            self._intakes[via].cancel()
        self.files.gone(via)
        self.questions.gone(via)
        self.memory.gone(via)
        self._content.gone(via)

    async def settled(self) -> None:
        """Return when all received messages have been taken in."""
        while self._intakes:
            await asyncio.wait([*self._intakes.values()])

    async def _process_inbox(self, inbox: AgentInbox, via: AgentSide) -> None:
        """Process reports in order; one that could not be made durable is tried again, not dropped."""
        try:
            while messages := inbox.take_waiting():
                if isinstance(messages[0], Greeting):
                    self._greeting.add(via)
                await asyncio.gather(*(self._process(message, via) for message in messages))
                self._greeting.discard(via)
        finally:
            self._greeting.discard(via)
            self._intakes.pop(via, None)
            self._inboxes.pop(via, None)
        if inbox.has_overflowed:
            via.close("its messages could not be stored in time: it is to send them again")

    async def _process(self, message: FromAgent, via: AgentSide) -> None:
        try:
            if isinstance(message, SessionMessage):
                await self.sessions.received(message, via)
            elif isinstance(message, MemoryReport):
                await self.memory.received(message, via)
        except GridError as failure:
            log.error("a message of %s was refused: %s", ", ".join(via.nodes), failure)
        except Exception:  # the outermost loop: one bad report must not stop the others
            log.exception("a message of %s could not be taken in; the agent keeps it", ", ".join(via.nodes))


def _refusal(message: str) -> bytes:
    return b'{"error": {"type": "Refused", "message": "%b", "exit_code": 1}}' % message.encode()
