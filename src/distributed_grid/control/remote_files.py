"""Reading files of attempts on other machines: output as it comes, results when a job is over.

Rule 1: no more is on its way than the reader has room for: the agent sends what it got credit for.
Rule 2: a connection that ends breaks its streams with Unreachable; the reader goes on from its offset later.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping

from distributed_grid.errors import GridError, NotFound, ProtocolError, Unreachable
from distributed_grid.wire import (
    STREAM_CREDIT_BYTES,
    AgentSide,
    CloseStream,
    FileChunk,
    FileListing,
    ListFiles,
    ReadCredit,
    ReadFile,
)

ANSWER_SECONDS = 30.0
Answer = FileChunk | FileListing | GridError


class RemoteFiles:
    """The streams on which the control plane reads."""

    def __init__(self, agents: Mapping[str, AgentSide]) -> None:
        self._agents = agents
        self._numbers = itertools.count(1)
        self._streams: dict[tuple[AgentSide, int], asyncio.Queue[Answer]] = {}

    def received(self, message: FileChunk | FileListing, via: AgentSide) -> None:
        """Pass an answer on to whoever asked; what nobody asked for is dropped."""
        answers = self._streams.get((via, message.stream))
        if answers is not None:
            answers.put_nowait(message)

    def gone(self, via: AgentSide) -> None:
        """Break every stream of this connection. Safe twice."""
        for (agent, _), answers in self._streams.items():
            if agent is via:
                answers.put_nowait(Unreachable(f"the connection to {', '.join(via.nodes)} was lost"))

    async def read(
        self, node: str, lease_id: str, name: bytes, offset: int, most: int, *, from_end: bool = False
    ) -> tuple[int, bytes]:
        """Where, and what there is of a file from an offset on, at most so much; empty where there is nothing (yet)."""
        agent, stream, answers = self._open(node)
        parts: list[bytes] = []
        start, size, credit = -1, 0, min(most, STREAM_CREDIT_BYTES)
        agent.send(ReadFile(stream, lease_id, name, offset, credit, from_end))
        try:
            while True:
                answer = await self._answer(answers, node)
                if not isinstance(answer, FileChunk):
                    raise ProtocolError(f"{node} sent something else than what was asked for")
                if answer.problem:
                    raise NotFound(f"{node}: {answer.problem}")
                start = answer.at if start < 0 else start
                size += len(answer.data)
                credit -= len(answer.data)
                if credit < 0:
                    raise ProtocolError(f"{node} sent more than it was asked for")
                parts.append(answer.data)
                if not answer.data or size >= most:
                    return start, b"".join(parts)
                if credit < STREAM_CREDIT_BYTES // 2 and size + credit < most:
                    more = min(most - size - credit, STREAM_CREDIT_BYTES - credit)
                    credit += more
                    agent.send(ReadCredit(stream, more))
        finally:
            self._close(agent, stream)

    async def find(self, node: str, lease_id: str, patterns: tuple[str, ...]) -> FileListing:
        """The files of an attempt's working directory that fit the patterns."""
        agent, stream, answers = self._open(node)
        agent.send(ListFiles(stream, lease_id, patterns))
        try:
            answer = await self._answer(answers, node)
            if not isinstance(answer, FileListing):
                raise ProtocolError(f"{node} sent something else than what was asked for")
            if answer.problem:
                raise NotFound(f"{node}: {answer.problem}")
            return answer
        finally:
            self._close(agent, stream)

    def _open(self, node: str) -> tuple[AgentSide, int, asyncio.Queue[Answer]]:
        agent = self._agents.get(node)
        if agent is None:
            raise Unreachable(f"{node} is not connected")
        stream = next(self._numbers)
        answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._streams[agent, stream] = answers
        return agent, stream, answers

    def _close(self, agent: AgentSide, stream: int) -> None:
        del self._streams[agent, stream]
        agent.send(CloseStream(stream))

    async def _answer(self, answers: asyncio.Queue[Answer], node: str) -> FileChunk | FileListing:
        try:
            answer = await asyncio.wait_for(answers.get(), ANSWER_SECONDS)
        except TimeoutError:
            raise Unreachable(f"{node} does not answer") from None
        if isinstance(answer, GridError):
            raise answer
        return answer
