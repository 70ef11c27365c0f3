"""Questions to agents about the processes and files of their machines; their answers are bounded and distrusted.

Each question has a number, a queue of answers and a deadline. An answer without a question is dropped, a longer answer
than requested is an error, and a connection that ends breaks its streams.
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
MAX_ANSWERS = 1000  # on their way to one reader; more than the credit allows


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
        """Pass an answer to its question; drop one without a question."""
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
        """A new question to the agent of a node; Unreachable without a connection."""
        agent = self._agents.get(node)
        if agent is None:
            raise Unreachable(f"{node} is not connected")
        stream = next(self._numbers)
        answers: asyncio.Queue[Part | GridError] = asyncio.Queue()
        self._streams[agent, stream] = answers
        return agent, stream, answers

    def close(self, agent: AgentSide, stream: int) -> None:
        """Drop further answers."""
        del self._streams[agent, stream]

    async def next_part(
        self, answers: asyncio.Queue[Part | GridError], node: str, seconds: float = ANSWER_SECONDS
    ) -> Part:
        """The next part of an answer; Unreachable if none comes in time."""
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
        Unreachable if the node does not answer, NotFound with its reason if it cannot list them."""
        agent, stream, answers = self._streams.open(node)
        agent.send(ListProcesses(stream, node, pid, tuple(variables)))
        processes: list[ProcessInfo] = []
        try:
            while True:
                answer = await self._streams.next_part(answers, node, SCAN_SECONDS)
                if not isinstance(answer, ProcessListing):
                    raise ProtocolError(f"{node} sent something else than what was asked for")
                if answer.problem:
                    raise NotFound(f"{node}: {answer.problem}")
                processes += answer.processes
                if len(processes) > MAX_LISTED:
                    raise ProtocolError(f"{node} lists more than {MAX_LISTED} processes")
                if not answer.more:
                    break
        finally:
            self._streams.close(agent, stream)
        for process in processes:
            check_process(process, node, variables)
        return [process for process in processes if process.pid == pid][:1] if pid else processes

    async def missing_files(self, node: str, files: Sequence[tuple[str, int]]) -> set[str]:
        """The paths of these files (path and size) that a node does not have."""
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


def check_process(process: ProcessInfo, node: str, variables: Sequence[str]) -> None:
    """Raise ProtocolError for an invalid process: texts too long, numbers out of range, or variables not requested."""
    lists = (process.listening, process.locks, process.outside_writes, process.shared_memory, process.needs)
    paths = (*process.listening, *process.locks, *process.outside_writes, *process.shared_memory)
    texts = (
        *(process.user, process.name, process.cwd, process.exe, process.parent, process.job, process.foreign_namespace),
        *(process.unreadable, process.boot),
        *process.argv,
        *paths,
        *(path for path, _ in process.needs),
        *(stream.path for stream in process.streams),
    )
    numbers = (
        *(process.pid, process.pid_start, process.ppid, process.uid, process.age_ms, process.cpu_milli, process.cpu_ms),
        *(process.pss_bytes, process.gpu_memory_bytes, process.read_bytes, process.written_bytes, process.processes),
        *(process.threads, process.connections, process.other_sessions),
        *(size for _, size in process.needs),
    )
    is_sound = (
        len(process.argv) <= MAX_ARGV
        and len(process.streams) <= 3
        and all(len(each) <= MAX_PATHS for each in lists)
        and all(len(text) <= MAX_TEXT_CHARS for text in texts)
        and all(0 <= number < MAX_NUMBER for number in numbers)
        and process.pid < 2**31
        and {name for name, _ in process.environment} <= set(variables)
    )
    if not is_sound:
        raise ProtocolError(f"{node} lists an invalid process {process.pid % 2**31}")
