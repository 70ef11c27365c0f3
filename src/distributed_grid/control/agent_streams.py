"""Answers of agents that come in parts: each question has a number, a queue of answers and a deadline.

What nobody asked for is dropped, more than was asked for is an error, and a connection that ends breaks its streams.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from distributed_grid.errors import GridError, ProtocolError, Unreachable
from distributed_grid.wire import AgentSide

ANSWER_SECONDS = 30.0
MAX_ANSWERS = 1000
"""On their way to one reader; more than anybody sends who goes by the credit."""


class NumberedAnswer(Protocol):
    """A part of an answer, with the number of the question."""

    @property
    def stream(self) -> int: ...


Part = TypeVar("Part", bound=NumberedAnswer)


class AnswerStreams(Generic[Part]):
    """The questions that wait for answers of agents."""

    def __init__(self, agents: Mapping[str, AgentSide]) -> None:
        self._agents = agents
        self._numbers = itertools.count(1)
        self._streams: dict[tuple[AgentSide, int], asyncio.Queue[Part | GridError]] = {}

    def received(self, message: Part, via: AgentSide) -> None:
        """Pass an answer on to whoever asked; what nobody asked for is dropped."""
        answers = self._streams.get((via, message.stream))
        if answers is None:
            return
        if answers.qsize() < MAX_ANSWERS:
            answers.put_nowait(message)
        elif answers.qsize() == MAX_ANSWERS:
            answers.put_nowait(ProtocolError(f"{', '.join(via.nodes)} sent more than it was asked for"))

    def gone(self, via: AgentSide) -> None:
        """Break every stream of this connection. Safe twice."""
        for (agent, _), answers in self._streams.items():
            if agent is via:
                answers.put_nowait(Unreachable(f"the connection to {', '.join(via.nodes)} was lost"))

    def open(self, node: str) -> tuple[AgentSide, int, asyncio.Queue[Part | GridError]]:
        """A new question to the agent of a node; Unreachable where there is none."""
        agent = self._agents.get(node)
        if agent is None:
            raise Unreachable(f"{node} is not connected")
        stream = next(self._numbers)
        answers: asyncio.Queue[Part | GridError] = asyncio.Queue()
        self._streams[agent, stream] = answers
        return agent, stream, answers

    def close(self, agent: AgentSide, stream: int) -> None:
        """Nobody waits for more."""
        del self._streams[agent, stream]

    async def next_part(
        self, answers: asyncio.Queue[Part | GridError], node: str, seconds: float = ANSWER_SECONDS
    ) -> Part:
        """The next part of an answer; Unreachable where none comes in time."""
        try:
            answer = await asyncio.wait_for(answers.get(), seconds)
        except TimeoutError:
            raise Unreachable(f"{node} does not answer") from None
        if isinstance(answer, GridError):
            raise answer
        return answer
