"""What an attempt is asked to be, and what is told of it: the values at this package's door."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

EndKind = Literal[
    "exited",
    "signalled",
    "cancelled",
    "preempted",
    "reclaimed",
    "over_limit",
    "timed_out",
    "hold_expired",
    "expired",
    "lost",
    "never_started",
]


class AttemptSpec(msgspec.Struct, frozen=True):
    """Everything needed to run one attempt."""

    attempt_id: str
    job_id: str
    node: str
    fence: int
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    cwd: str | None = None
    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_indexes: tuple[int, ...] = ()
    timeout_ms: int = 0
    grace_ms: int = 10_000
    hold_ms: int = 0


class AttemptStarted(msgspec.Struct, frozen=True, tag=True):
    """The command runs."""

    attempt_id: str
    fence: int
    pid: int
    cores: tuple[int, ...]
    at_boot_ms: int


class AttemptEnded(msgspec.Struct, frozen=True, tag=True):
    """Nothing of it runs any more, and how that came."""

    attempt_id: str
    fence: int
    kind: EndKind
    exit_code: int | None = None
    signal: int | None = None
    detail: str = ""
    cpu_ms: int = 0
    max_memory_bytes: int = 0
    wall_ms: int = 0


class AttemptUsage(msgspec.Struct, frozen=True):
    """What an attempt's whole tree has used so far (CPU) and holds now (memory)."""

    cpu_ms: int
    memory_bytes: int


def record_of(kind: EndKind, detail: str) -> dict[str, Any]:
    """The record of an end that no shim has written."""
    return {"kind": kind, "detail": detail}


def ended_from(attempt_id: str, fence: int, record: dict[str, Any]) -> AttemptEnded:
    """The report of a recorded end."""
    assert record["kind"] in get_args(EndKind)
    return AttemptEnded(attempt_id=attempt_id, fence=fence, **record)
