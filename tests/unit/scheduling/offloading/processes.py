"""Processes as an agent tells them, in one line."""

from __future__ import annotations

from typing import Any

from distributed_grid.domain.processes import ProcessInfo, StandardStream, StreamKind

FILES = (
    StandardStream(StreamKind.NULL),
    StandardStream(StreamKind.FILE, "/srv/alice/work/out.log"),
    StandardStream(StreamKind.FILE, "/srv/alice/work/out.log"),
)


def a_process(*argv: str, pid: int = 4000, **facts: Any) -> ProcessInfo:
    """A process with nothing in its way; other facts by their own names."""
    known: dict[str, Any] = {"cwd": "/srv/alice/work", "exe": "/usr/bin/python3", "streams": FILES} | facts
    return ProcessInfo(
        pid=pid,
        pid_start=77,
        boot="boot-1",
        ppid=1,
        uid=1000,
        user="ada",
        name="python3",
        argv=argv or ("python3", "sim.py"),
        **known,
    )


def a_stream(kind: str, path: str = "") -> StandardStream:
    return StandardStream(StreamKind(kind), path)
