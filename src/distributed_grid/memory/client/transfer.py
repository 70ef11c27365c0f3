"""Moving pieces to and from places: over one connection, many pieces over several at once, or many ranges together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

from distributed_grid.memory.client.chunks import ChunkRange, cut
from distributed_grid.memory.client.connection import ServerConnection
from distributed_grid.memory.client.connection_pool import ConnectionPool
from distributed_grid.memory.client.locations import CopyLocation

STREAM_PIECES: Final = 64
Move = Callable[[CopyLocation, ServerConnection, deque[ChunkRange]], None]


def move_pieces(
    switchboard: ConnectionPool, place: CopyLocation, pieces: deque[ChunkRange], move: Move, streams: int
) -> None:
    """Move all of these to or from one place, over up to so many connections; after an error the list has what is still
    to do."""
    if not pieces:
        return
    if streams > 1 and len(pieces) >= STREAM_PIECES:
        _in_streams(switchboard, place, pieces, move, streams)
        return
    with switchboard.channel(place) as channel:
        handle = channel.open(place.ticket).handle
        if pieces[0].handle != handle or pieces[-1].handle != handle:
            for _ in range(len(pieces)):
                pieces.append(pieces.popleft()._replace(handle=handle))
        move(place, channel, pieces)


def _in_streams(
    switchboard: ConnectionPool, place: CopyLocation, pieces: deque[ChunkRange], move: Move, streams: int
) -> None:
    """The same over several connections at once, each with a part of its own."""
    share = max(STREAM_PIECES // 2, -(-len(pieces) // streams))
    parts = [deque(islice(pieces, start, start + share)) for start in range(0, len(pieces), share)]
    problems: list[BaseException] = []

    def run(part: deque[ChunkRange]) -> None:
        try:
            with switchboard.channel(place) as channel:
                handle = channel.open(place.ticket).handle
                for _ in range(len(part)):
                    part.append(part.popleft()._replace(handle=handle))
                move(place, channel, part)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(part,), daemon=True) for part in parts[1:]]
    for thread in threads:
        thread.start()
    run(parts[0])
    for thread in threads:
        thread.join()
    pieces.clear()
    for part in parts:
        pieces.extend(part)
    if problems:
        raise problems[0]


def move_together(
    switchboard: ConnectionPool, wanted: list[tuple[tuple[CopyLocation, ...], memoryview, int]], move: Move
) -> None:
    """Move ranges (places, buffer, offset) of several blocks, those of a server in one go."""
    rounds: dict[int, dict[str, list[tuple[CopyLocation, memoryview, int]]]] = {}
    for places, view, offset in wanted:
        for place in places:
            # The first places of all blocks come last, as with a single write.
            at = 1 if place is places[-1] else 0
            rounds.setdefault(at, {}).setdefault(place.line, []).append((place, view, offset))
    for at in sorted(rounds):
        for parts in rounds[at].values():
            with switchboard.channel(parts[0][0]) as channel:
                pieces: deque[ChunkRange] = deque()
                for place, view, offset in parts:
                    handle = channel.open(place.ticket).handle
                    pieces.extend(piece._replace(handle=handle) for piece in cut(view, offset))
                move(parts[0][0], channel, pieces)
