"""Sending agents the content they ask for, as fast as they give credit for it."""

from __future__ import annotations

from typing import BinaryIO, Protocol

from distributed_grid.errors import GridError
from distributed_grid.wire import MAX_CHUNK_BYTES, AgentSide, FetchContent, FetchCredit, FetchedChunk

MOST_AT_ONCE = 64


class ContentSource(Protocol):
    """Where content is kept, by its digest."""

    def open(self, digest: str) -> BinaryIO:
        """The content, to be read; a GridError or OSError where there is none."""


class _Sending:
    def __init__(self, source: BinaryIO, credit: int) -> None:
        self.source = source
        self.credit = credit


class ContentSender:
    """The streams on which agents fetch."""

    def __init__(self, contents: ContentSource | None) -> None:
        self._contents = contents
        self._sending: dict[AgentSide, dict[int, _Sending]] = {}

    def received(self, message: FetchContent | FetchCredit, via: AgentSide) -> None:
        """Begin a stream, or go on with one."""
        streams = self._sending.setdefault(via, {})
        if isinstance(message, FetchContent):
            problem = self._begin(message, streams)
            if problem:
                via.send(FetchedChunk(message.stream, b"", problem))
                return
        elif message.stream in streams and message.credit:
            streams[message.stream].credit += message.credit
        else:
            self._end(streams, message.stream)
            return
        self._go_on(message.stream, streams, via)

    def gone(self, via: AgentSide) -> None:
        """An agent's connection has ended. Safe twice."""
        for sending in self._sending.pop(via, {}).values():
            sending.source.close()

    def _begin(self, message: FetchContent, streams: dict[int, _Sending]) -> str:
        if self._contents is None or len(streams) >= MOST_AT_ONCE or message.stream in streams:
            return "too many streams at once" if streams else "there is no content here"
        try:
            streams[message.stream] = _Sending(self._contents.open(message.digest), message.credit)
        except (GridError, OSError) as missing:
            return f"{message.digest[:16]} is not here: {missing}"
        return ""

    def _go_on(self, stream: int, streams: dict[int, _Sending], via: AgentSide) -> None:
        sending = streams[stream]
        while sending.credit > 0:
            data = sending.source.read(min(sending.credit, MAX_CHUNK_BYTES))
            via.send(FetchedChunk(stream, data))
            if not data:
                self._end(streams, stream)
                return
            sending.credit -= len(data)

    def _end(self, streams: dict[int, _Sending], stream: int) -> None:
        ended = streams.pop(stream, None)
        if ended is not None:
            ended.source.close()
