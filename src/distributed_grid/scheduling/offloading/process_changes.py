"""Changes of a process between its two looks: at the request of its move, and while it stands still.

Compared is everything that the move relies on: command line, program, working directory, environment, standard streams
and needed files of the root, and the obstacles of the whole tree. CPU time, memory, and the number of its threads and
children are not: they change in a process that works, and each child is looked at for obstacles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from distributed_grid.domain.processes import ProcessInfo, ProcessLook
from distributed_grid.masking.command_line import shown_command
from distributed_grid.scheduling.offloading.obstacles import one_line, process_obstacles

DIGEST_CHARS = 32
MAX_COMMAND_CHARS = 120
MAX_NAMED_CHANGES = 3


def first_look(process: ProcessInfo) -> ProcessLook:
    """The facts of a process to compare with later ones."""
    return ProcessLook(
        command=_digest(process.argv),
        program=_digest((process.exe,)),
        directory=_digest((process.cwd,)),
        environment=process.environment_digest,
        streams=tuple(_digest((stream.kind, stream.path, str(stream.appends))) for stream in process.streams),
        needs=tuple(_digest((path, str(size))) for path, size in process.needs),
        obstacles=tuple(_digest((obstacle.kind, obstacle.text)) for obstacle in process_obstacles(process)),
    )


def process_changes(first: ProcessLook, process: ProcessInfo) -> tuple[str, ...]:
    """The differences of a process from its first look, each as one line; nothing where a move may go on."""
    return tuple(one_line(text) for text in _changes(first, process))


def changes_text(changes: tuple[str, ...]) -> str:
    """The reason for which a move ends; empty where nothing has changed."""
    if not changes:
        return ""
    more = f"; and {len(changes) - MAX_NAMED_CHANGES} more" if len(changes) > MAX_NAMED_CHANGES else ""
    return f"it has changed since the request: {'; '.join(changes[:MAX_NAMED_CHANGES])}{more}"


def _changes(first: ProcessLook, process: ProcessInfo) -> Iterable[str]:
    now = first_look(process)
    if now.command != first.command:
        yield f"its command line is `{shown_command(process.argv, MAX_COMMAND_CHARS)}`"
    if now.program != first.program:
        yield f"its program is {process.exe or 'unknown'}"
    if now.directory != first.directory:
        yield f"its working directory is {process.cwd or 'unknown'}"
    if now.environment != first.environment:
        yield "its environment is another one"
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if now.streams[number : number + 1] != first.streams[number : number + 1]:
            stream = process.streams[number] if number < len(process.streams) else None
            yield f"{name} is {stream.path or stream.kind if stream is not None else 'unknown'}"
    for digest, (path, _) in zip(now.needs, process.needs, strict=True):
        if digest not in first.needs:
            yield f"it needs {path}, which was not compared with the target"
    for digest, obstacle in zip(now.obstacles, process_obstacles(process), strict=True):
        if digest not in first.obstacles:
            yield obstacle.text


def _digest(texts: Iterable[str]) -> str:
    text = "".join(f"{text}\0" for text in texts)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:DIGEST_CHARS]
