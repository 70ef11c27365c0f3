"""Questions to agents, about the processes and files of their machines; what they answer is bounded and distrusted.

Each question has a number, a queue of answers and a deadline. What nobody asked for is dropped, more than was asked for
is an error, and a connection that ends breaks its streams.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from distributed_grid.domain.processes import MAX_ARGV, MAX_PATHS, ProcessInfo
from distributed_grid.errors import GridError, NotFound, ProtocolError, Unreachable
from distributed_grid.wire import (
    MAX_SKIPPED,
    AgentSide,
    CheckFiles,
    FilesChecked,
    ListProcesses,
    ProcessListing,
    pages,
)

MAX_LISTED = 10_000
"""Processes of one node; an agent with more says so by its problem."""
SCAN_SECONDS = 15.0
MAX_TEXT_CHARS = 8192
"""Of any text of a process: its arguments, its paths, the values of its environment."""
MAX_NUMBER = 2**62
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
            async with asyncio.timeout(seconds):
                answer = await answers.get()
        except TimeoutError:
            raise Unreachable(f"{node} does not answer") from None
        if isinstance(answer, GridError):
            raise answer
        return answer


class AgentQuestions:
    """The questions about processes and files that wait for answers."""

    def __init__(self, agents: Mapping[str, AgentSide]) -> None:
        self._streams: AnswerStreams[ProcessListing | FilesChecked] = AnswerStreams(agents)
        self.received = self._streams.received
        self.gone = self._streams.gone

    async def processes(self, node: str, pid: int = 0, variables: Sequence[str] = ()) -> list[ProcessInfo]:
        """The processes of a node that could be work of their own, or one of them with variables of its environment.

        Unreachable where the node does not answer, NotFound with the reason where it cannot say.
        """
        agent, stream, answers = self._streams.open(node)
        agent.send(ListProcesses(stream, node, pid, tuple(variables)))
        found: list[ProcessInfo] = []
        try:
            while True:
                answer = await self._streams.next_part(answers, node, SCAN_SECONDS)
                if not isinstance(answer, ProcessListing):
                    raise ProtocolError(f"{node} sent something else than what was asked for")
                if answer.problem:
                    raise NotFound(f"{node}: {answer.problem}")
                found += answer.processes
                if len(found) > MAX_LISTED:
                    raise ProtocolError(f"{node} lists more than {MAX_LISTED} processes")
                if not answer.more:
                    break
        finally:
            self._streams.close(agent, stream)
        for one in found:
            check_process(one, node, variables)
        if pid:
            return [one for one in found if one.pid == pid][:1]
        return found

    async def missing_files(self, node: str, files: Sequence[tuple[str, int]]) -> set[str]:
        """Which of these files (path and size) a node does not have."""
        missing: set[str] = set()
        for page in pages(len(files), MAX_SKIPPED):
            asked = tuple(files[page])
            if not asked:
                break
            agent, stream, answers = self._streams.open(node)
            agent.send(CheckFiles(stream, asked))
            try:
                answer = await self._streams.next_part(answers, node, SCAN_SECONDS)
            finally:
                self._streams.close(agent, stream)
            if not isinstance(answer, FilesChecked):
                raise ProtocolError(f"{node} sent something else than what was asked for")
            if answer.problem:
                raise NotFound(f"{node}: {answer.problem}")
            missing.update(set(answer.missing) & {path for path, _ in asked})
        return missing


def check_process(found: ProcessInfo, node: str, variables: Sequence[str]) -> None:
    """Raise ProtocolError for a process that no agent tells of: too long, out of range, or not what was asked for."""
    lists = (found.listening, found.locks, found.outside_writes, found.shared_memory, found.needs)
    paths = (*found.listening, *found.locks, *found.outside_writes, *found.shared_memory)
    texts = (
        *(found.user, found.name, found.cwd, found.exe, found.parent, found.job, found.foreign_namespace),
        *(found.unreadable, found.boot),
        *found.argv,
        *paths,
        *(path for path, _ in found.needs),
        *(stream.path for stream in found.streams),
    )
    numbers = (
        *(found.pid, found.pid_start, found.ppid, found.uid, found.age_ms, found.cpu_milli, found.cpu_ms),
        *(found.pss_bytes, found.gpu_memory_bytes, found.read_bytes, found.written_bytes, found.processes),
        *(found.threads, found.connections, found.other_sessions),
        *(size for _, size in found.needs),
    )
    is_sound = (
        len(found.argv) <= MAX_ARGV
        and len(found.streams) <= 3
        and all(len(one) <= MAX_PATHS for one in lists)
        and all(len(text) <= MAX_TEXT_CHARS for text in texts)
        and all(0 <= number < MAX_NUMBER for number in numbers)
        and found.pid < 2**31
        and {name for name, _ in found.environment} <= set(variables)
    )
    if not is_sound:
        raise ProtocolError(f"{node} tells of a process {found.pid % 2**31} that cannot be")
