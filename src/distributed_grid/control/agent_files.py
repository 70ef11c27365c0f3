"""Questions to agents about processes and files of their machines, and transfers of files from and to them.

Each question has a number, a queue of answers and a deadline. Answers are bounded and distrusted: an answer without a
question is dropped, a longer answer than requested is an error. A sender sends only the bytes that it got credit for. A
connection that ends breaks its streams with Unreachable; the reader continues from its offset later.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.agent.files.attempt_files import (
    DIRECTORY_GONE,
    OUTPUT,
    list_checkpoint,
    open_file,
    read_at,
    work_dir,
)
from distributed_grid.agent.files.job_dir import CHECKPOINT_DIR, WORK, is_home, is_output_home
from distributed_grid.domain.jobs import Attempt
from distributed_grid.domain.processes import MAX_ARGV, MAX_PATHS, ProcessInfo
from distributed_grid.errors import GridError, NotFound, ProtocolError, Unreachable
from distributed_grid.trees import file_selection
from distributed_grid.trees.manifest import (
    MAX_ENTRIES,
    Manifest,
    ManifestEntry,
    SkippedFile,
    decode_listing,
    decode_tree_page,
    manifest_of,
)
from distributed_grid.trees.paths import display_path, to_bytes
from distributed_grid.trees.tree_listing import TreeDigests
from distributed_grid.wire import (
    MAX_CHUNK_BYTES,
    MAX_SKIPPED,
    STREAM_CREDIT_BYTES,
    AgentSide,
    CheckFiles,
    CloseStream,
    FetchContent,
    FetchCredit,
    FetchedChunk,
    FileChunk,
    FileListing,
    FilesChecked,
    ListFiles,
    ListProcesses,
    ProcessListing,
    ReadCredit,
    ReadFile,
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
MAX_STREAMS = 64
MAX_SKIPPED_FILES = 1000
CHECKPOINT_PREFIX = CHECKPOINT_DIR.encode() + b"/"


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
        and all(len(paths_of_kind) <= MAX_PATHS for paths_of_kind in lists)
        and all(len(text) <= MAX_TEXT_CHARS for text in texts)
        and all(0 <= number < MAX_NUMBER for number in numbers)
        and process.pid < 2**31
        and {name for name, _ in process.environment} <= set(variables)
    )
    if not is_sound:
        raise ProtocolError(f"{node} lists an invalid process {process.pid % 2**31}")


class ContentSource(Protocol):
    """Store of contents by digest."""

    def open(self, digest: str) -> BinaryIO:
        """The content for reading; a GridError or OSError if there is none."""


@dataclass
class _Sending:
    source: BinaryIO
    credit: int


class ContentSender:
    """The streams on which agents fetch."""

    def __init__(self, contents: ContentSource | None) -> None:
        self._contents = contents
        self._sending: dict[AgentSide, dict[int, _Sending]] = {}

    def received(self, message: FetchContent | FetchCredit, via: AgentSide) -> None:
        """Begin a stream, or continue one."""
        streams = self._sending.setdefault(via, {})
        if isinstance(message, FetchContent):
            if problem := self._begin(message, streams):
                via.send(FetchedChunk(message.stream, b"", problem))
                return
        elif message.stream in streams and message.credit:
            sending = streams[message.stream]
            sending.credit = min(sending.credit + message.credit, STREAM_CREDIT_BYTES)
        else:
            self._end(streams, message.stream)
            return
        sending = streams[message.stream]
        while sending.credit > 0:
            data = sending.source.read(min(sending.credit, MAX_CHUNK_BYTES))
            via.send(FetchedChunk(message.stream, data))
            if not data:
                self._end(streams, message.stream)
                return
            sending.credit -= len(data)

    def gone(self, via: AgentSide) -> None:
        """An agent's connection has ended. Safe twice."""
        for sending in self._sending.pop(via, {}).values():
            sending.source.close()

    def _begin(self, message: FetchContent, streams: dict[int, _Sending]) -> str:
        if self._contents is None or len(streams) >= MAX_STREAMS or message.stream in streams:
            return "too many streams at once" if streams else "there is no content here"
        try:
            streams[message.stream] = _Sending(self._contents.open(message.digest), message.credit)
        except (GridError, OSError) as missing:
            return f"{message.digest[:16]} is not here: {missing}"
        return ""

    def _end(self, streams: dict[int, _Sending], stream: int) -> None:
        ended = streams.pop(stream, None)
        if ended is not None:
            ended.source.close()


class AttemptOutputFile(Struct, frozen=True):
    """Files of an attempt's working directory, those that cannot be had, with the reason, and the number of those that
    are as they were shipped."""

    entries: tuple[ManifestEntry, ...]
    skipped: tuple[str, ...]
    unchanged: int = 0


class FilesGone(NotFound):
    """An attempt has left no directory on its node, or none any more."""


class RemoteFiles:
    """The streams on which the control plane reads."""

    def __init__(self, agents: Mapping[str, AgentSide]) -> None:
        self._streams: AnswerStreams[FileChunk | FileListing] = AnswerStreams(agents)
        self.received = self._streams.received
        self.gone = self._streams.gone

    async def read(
        self, node: str, lease_id: str, name: bytes, offset: int, most: int, *, from_end: bool = False
    ) -> tuple[int, bytes]:
        """A part of a file and its offset, at most `most` bytes; empty if there is nothing (yet)."""
        agent, stream, answers = self._streams.open(node)
        parts: list[bytes] = []
        start, size, credit = -1, 0, min(most, STREAM_CREDIT_BYTES)
        agent.send(
            ReadFile(stream=stream, lease_id=lease_id, name=name, offset=offset, credit=credit, from_end=from_end)
        )
        try:
            while True:
                answer = await self._streams.next_part(answers, node)
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

    async def find(self, node: str, lease_id: str, patterns: tuple[str, ...], shipped: str = "") -> AttemptOutputFile:
        """The files of an attempt's working directory that fit the patterns; with the manifest that was shipped only
        those that were made or changed since."""

        def decode(page: bytes, known: int) -> tuple[ManifestEntry, ...]:
            return decode_listing(page, limit_files=file_selection.FETCH_LIMIT_FILES - known)

        listing = await self._list(
            node, ListFiles(stream=0, lease_id=lease_id, patterns=patterns, shipped=shipped), decode
        )
        if len({entry.path for entry in listing.entries}) < len(listing.entries):
            raise ProtocolError(f"{node} lists a file twice")
        return listing

    async def find_tree(self, node: str, lease_id: str) -> AttemptOutputFile:
        """All entries of the directory of an attempt or of a move's original, files with their digests. Links may lead
        outside; otherwise it is a sound tree."""
        listing = await self._list(node, ListFiles(stream=0, lease_id=lease_id, patterns=(), tree=True), _decode_tree)
        return AttemptOutputFile(manifest_of(listing.entries).entries, listing.skipped)

    async def find_checkpoint(self, node: str, lease_id: str) -> AttemptOutputFile:
        """All entries of the checkpoint directory of an attempt, without digests and unchecked."""
        return await self._list(
            node, ListFiles(stream=0, lease_id=lease_id, patterns=(), checkpoint=True), _decode_tree
        )

    async def _list(
        self, node: str, order: ListFiles, decode: Callable[[bytes, int], tuple[ManifestEntry, ...]]
    ) -> AttemptOutputFile:
        """All pages of the answer to an order, which gets its stream here."""
        agent, stream, answers = self._streams.open(node)
        agent.send(replace(order, stream=stream))
        entries: list[ManifestEntry] = []
        skipped: list[str] = []
        unchanged = 0
        try:
            while True:
                answer = await self._streams.next_part(answers, node)
                if not isinstance(answer, FileListing):
                    raise ProtocolError(f"{node} sent something else than what was asked for")
                if answer.problem == DIRECTORY_GONE:
                    raise FilesGone(f"{node}: {answer.problem}")
                if answer.problem:
                    raise NotFound(f"{node}: {answer.problem}")
                if answer.files:
                    entries += decode(answer.files, len(entries))
                skipped += answer.skipped[: MAX_SKIPPED_FILES - len(skipped)]
                unchanged += answer.unchanged
                if not answer.more:
                    return AttemptOutputFile(tuple(entries), tuple(skipped), unchanged)
        finally:
            self._close(agent, stream)

    def _close(self, agent: AgentSide, stream: int) -> None:
        self._streams.close(agent, stream)
        agent.send(CloseStream(stream))


def _decode_tree(page: bytes, known: int) -> tuple[ManifestEntry, ...]:
    return decode_tree_page(page, limit_entries=MAX_ENTRIES - known)


class AttemptFiles:
    """Reads files by attempt and name (`stdout`, `stderr`, `work/…`, `checkpoints/…`), here or on their node."""

    def __init__(
        self,
        jobs: Path,
        remote: RemoteFiles,
        is_local: Callable[[str], bool],
        shipped_tree: Callable[[str], Manifest] | None = None,
    ) -> None:
        """`shipped_tree` reads a manifest that was shipped from this machine; a GridError if it is gone."""
        self._jobs = str(jobs)
        self._remote = remote
        self._is_local = is_local
        self._shipped_tree = shipped_tree

    def is_here(self, attempt: Attempt) -> bool:
        """True if its files are on this machine: it ran here, or they were brought home."""
        return self._is_local(attempt.node) or self.was_brought_home(attempt)

    def was_brought_home(self, attempt: Attempt) -> bool:
        """True if it ran on another machine, and its files were brought here."""
        return is_home(self._jobs, attempt.lease_id)

    async def read(
        self, attempt: Attempt, name: bytes, offset: int, most: int, *, from_end: bool = False
    ) -> tuple[int, bytes]:
        """A part of a file and its offset, or with `from_end` its distance from the end; empty if there is nothing.
        Unreachable while the node does not answer."""
        is_here = self._is_local(attempt.node)
        if not is_here and name in OUTPUT:  # it may be here without the other files
            is_here = is_output_home(self._jobs, attempt.lease_id)
        elif not is_here and not name.startswith(CHECKPOINT_PREFIX):  # checkpoints are never brought home
            is_here = self.was_brought_home(attempt)
        if not is_here:
            return await self._remote.read(attempt.node, attempt.lease_id, name, offset, most, from_end=from_end)
        try:
            fd = open_file(self._jobs, attempt.lease_id, name)
        except (FileNotFoundError, NotADirectoryError):
            return 0, b""
        except OSError as failure:
            raise NotFound(f"{display_path(name)} of {attempt.lease_id} cannot be read: {failure.strerror}") from None
        size = os.fstat(fd).st_size
        start = max(size - offset, 0) if from_end else offset
        if start >= size:
            os.close(fd)
            return start, b""
        return await asyncio.to_thread(_read_and_close, self._jobs, attempt.lease_id, name, fd, most, start)

    async def find_tree(self, attempt: Attempt) -> AttemptOutputFile:
        """All entries of the directory in which the attempt ran, files with their digests."""
        if not self.is_here(attempt):
            return await self._remote.find_tree(attempt.node, attempt.lease_id)
        listing = await asyncio.to_thread(TreeDigests().list_tree, self._work(attempt))
        return AttemptOutputFile(listing.entries, _reasons(listing.skipped))

    async def find_checkpoint(self, attempt: Attempt) -> AttemptOutputFile:
        """All entries of the checkpoint directory of an attempt, without digests."""
        if not self._is_local(attempt.node):
            return await self._remote.find_checkpoint(attempt.node, attempt.lease_id)
        try:
            listing = await asyncio.to_thread(list_checkpoint, self._jobs, attempt.lease_id)
        except OSError:
            raise NotFound(f"the directory of {attempt.lease_id} is not there any more") from None
        return AttemptOutputFile(listing.entries, _reasons(listing.skipped))

    async def find(self, attempt: Attempt, patterns: tuple[str, ...], shipped: str = "") -> AttemptOutputFile:
        """The files in the directory of the attempt that fit the patterns; with the manifest that was shipped only
        those that were made or changed since."""
        if not self.is_here(attempt):
            return await self._remote.find(attempt.node, attempt.lease_id, patterns, shipped)
        work = self._work(attempt)

        def select() -> AttemptOutputFile:
            selected = file_selection.select_files(work, patterns)
            try:
                before = self._shipped_tree(shipped) if shipped and self._shipped_tree is not None else Manifest()
            except (GridError, OSError):
                before = Manifest()
            changed = file_selection.changed_files(work, selected.entries, before)
            return AttemptOutputFile(changed.entries, _reasons(selected.skipped), changed.unchanged)

        return await asyncio.to_thread(select)

    def _work(self, attempt: Attempt) -> Path:
        try:
            return work_dir(self._jobs, attempt.lease_id)
        except OSError:
            raise NotFound(f"the directory of {attempt.lease_id} is not there any more") from None


def _reasons(skipped: Iterable[SkippedFile]) -> tuple[str, ...]:
    return tuple(f"{display_path(file.path)}: {file.reason}" for file in skipped)


def _read_and_close(root: str, lease_id: str, name: bytes, fd: int, most: int, start: int) -> tuple[int, bytes]:
    try:
        return read_at(root, lease_id, name, fd, most, start)
    finally:
        os.close(fd)


def in_work(entry: ManifestEntry) -> bytes:
    """Name of a listed file, for `read`."""
    return WORK.encode() + b"/" + to_bytes(entry.path)


def in_checkpoint(entry: ManifestEntry) -> bytes:
    """Name of a file of a checkpoint directory, for `read`."""
    return CHECKPOINT_PREFIX + to_bytes(entry.path)
