"""Obstacles: why a piece of work cannot be moved, each with its cause and, where there is one, the next step."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

from msgspec import Struct

from distributed_grid.domain.processes import ProcessInfo, StreamKind

MAX_TOLD = 3
"""Paths or addresses that one obstacle names."""


class ObstacleKind(enum.StrEnum):
    """What keeps work where it is."""

    TERMINAL = "terminal"
    FOREIGN_PIPE = "foreign_pipe"
    LISTENS = "listens"
    CONNECTED = "connected"
    FILE_LOCK = "file_lock"
    OUTSIDE_FILE = "outside_file"
    WITHHELD_FILE = "withheld_file"
    SHARED_MEMORY = "shared_memory"
    TRACED = "traced"
    SETUID = "setuid"
    NAMESPACE = "namespace"
    GPU_CONTEXT = "gpu_context"
    OTHER_SESSION = "other_session"
    PARENT_WAITS = "parent_waits"
    RAY = "ray"
    GRID = "grid"
    MASKED = "masked"
    UNREADABLE = "unreadable"
    WORKING_DIRECTORY = "working_directory"
    MISSING_FILES = "missing_files"
    NOT_DECLARED = "not_declared"
    NOT_RUNNING = "not_running"
    MOVING = "moving"
    GANG = "gang"
    BOUND = "bound"
    NO_TARGET = "no_target"


class Obstacle(Struct, frozen=True):
    """One cause that keeps work where it is, in one line with its path, port or pid."""

    kind: ObstacleKind
    text: str


def process_obstacles(process: ProcessInfo) -> tuple[Obstacle, ...]:
    """Why a process cannot be restarted elsewhere; nothing where it can."""
    found = [*_identity(process), *_streams(process), *_sockets(process), *_files(process), *_kernel(process)]
    return tuple(Obstacle(kind, one_line(text)) for kind, text in found)


def one_line(text: str) -> str:
    """A text that is safe to print: whoever starts a process chooses its name, its words and its paths."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


_Found = Iterator[tuple[ObstacleKind, str]]


def _identity(process: ProcessInfo) -> _Found:
    """Whose process it is, and what of it could not be read."""
    if process.job:
        yield ObstacleKind.GRID, f"it belongs to a job of the grid ({process.job}): move the job instead"
    elif process.is_grid:
        yield ObstacleKind.GRID, "it is one of the grid's own processes"
    if process.is_ray:
        yield ObstacleKind.RAY, "it is one of Ray's own processes"
    if process.has_secret:
        yield (
            ObstacleKind.MASKED,
            "its command line seems to hold a secret: give that in a file or a variable, and start it again",
        )
    if process.unreadable:
        yield ObstacleKind.UNREADABLE, process.unreadable
    if not process.argv:
        yield ObstacleKind.UNREADABLE, "its command line cannot be read"
    if not process.unreadable and (process.cwd in ("", "/") or process.cwd.endswith(" (deleted)")):
        where = process.cwd or "unknown"
        yield ObstacleKind.WORKING_DIRECTORY, f"its working directory is {where}: start it in a directory of its own"
    elif process.cwd_problem:
        problem = f"its working directory {process.cwd} {process.cwd_problem}"
        yield ObstacleKind.WORKING_DIRECTORY, f"{problem}: start it in a directory of its own"
    if process.parent:
        hint = "start it with `setsid -f`, or move that instead"
        if process.parent.startswith("systemd"):
            hint = "stop the unit, and run its command with `grid offload wrap`"
        yield ObstacleKind.PARENT_WAITS, f"{process.parent} waits for it: {hint}"


def _streams(process: ProcessInfo) -> _Found:
    for name, stream in zip(("stdin", "stdout", "stderr"), process.streams, strict=False):
        if stream.kind is StreamKind.TERMINAL:
            yield ObstacleKind.TERMINAL, f"{name} is the terminal {stream.path}: start it with nohup and files instead"
        elif stream.kind is StreamKind.PIPE:
            yield ObstacleKind.FOREIGN_PIPE, f"{name} is a pipe ({stream.path}) to a process outside of it"
        elif stream.kind is StreamKind.SOCKET:
            yield ObstacleKind.FOREIGN_PIPE, f"{name} is a socket ({stream.path})"
        elif stream.kind is StreamKind.OTHER:
            yield ObstacleKind.FOREIGN_PIPE, f"{name} is {stream.path}, which does not exist elsewhere"


def _sockets(process: ProcessInfo) -> _Found:
    if process.listening:
        yield ObstacleKind.LISTENS, f"it listens on {_some(process.listening)}"
    if process.connections > 0:
        many = "connection is" if process.connections == 1 else "connections are"
        yield ObstacleKind.CONNECTED, f"{process.connections} {many} open, which would break"


def _files(process: ProcessInfo) -> _Found:
    if process.locks:
        yield ObstacleKind.FILE_LOCK, f"it holds a lock: {_some(process.locks)}"
    if process.outside_writes:
        where = f"open for writing outside of {process.cwd or 'its working directory'}"
        yield ObstacleKind.OUTSIDE_FILE, f"{where}: {_some(process.outside_writes)}"
    if process.needed_secrets:
        named = f"it needs files that look like secrets and are not shipped: {_some(process.needed_secrets)}"
        yield ObstacleKind.WITHHELD_FILE, f"{named}; an explicit ! line in .gridignore allows them"
    if process.shared_memory:
        yield ObstacleKind.SHARED_MEMORY, f"it shares memory: {_some(process.shared_memory)}"


def _kernel(process: ProcessInfo) -> _Found:
    """What binds it to this kernel."""
    if process.traced:
        yield ObstacleKind.TRACED, "it is traced by a debugger: detach that first"
    if process.setuid:
        yield ObstacleKind.SETUID, "it runs with the rights of another user or group"
    if process.foreign_namespace:
        yield ObstacleKind.NAMESPACE, process.foreign_namespace
    if process.gpu_memory_bytes > 0:
        yield (
            ObstacleKind.GPU_CONTEXT,
            "it uses a GPU, and what is there is lost: run it as a job that marks $GRID_CHECKPOINT",
        )
    if process.other_sessions > 0:
        many = "is" if process.other_sessions == 1 else "are"
        yield ObstacleKind.OTHER_SESSION, f"{process.other_sessions} of its processes {many} in another session"


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:MAX_TOLD]) + (f" and {len(texts) - MAX_TOLD} more" if len(texts) > MAX_TOLD else "")
