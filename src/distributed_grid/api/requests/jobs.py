"""What becomes of a job: its state, its end, its output, its files."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from distributed_grid.api.requests.message import Message, Name, Seconds, Text


class Jobs(Message, frozen=True):
    """The jobs that are going on, and those that ended of late."""

    all: bool = False
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 20
    user: Name | None = None
    state: Name | None = None


class Job(Message, frozen=True):
    """One job."""

    job_id: Name


class Cancel(Message, frozen=True):
    """Stop a job for good."""

    job_id: Name


class Wait(Message, frozen=True):
    """Answer when a job is over, or when this much time is."""

    job_id: Name
    timeout_seconds: Seconds | None = None


class Logs(Message, frozen=True):
    """The output of a job, and with `follow` all that still comes until it is over."""

    job_id: Name
    follow: bool = False
    tail_bytes: Annotated[int, Meta(ge=0)] | None = None
    stdout_seen: Annotated[int, Meta(ge=0)] = 0
    stderr_seen: Annotated[int, Meta(ge=0)] = 0


class Fetch(Message, frozen=True):
    """The files that a job has left in its directory and that fit one of the patterns."""

    job_id: Name
    patterns: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=1000)]
