"""Commands to run, under a lease of their own or in a boost."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta, field

from distributed_grid.api.requests.message import Id, Message, Name, PlacementOptions, Seconds, Text

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Submit(PlacementOptions, frozen=True):
    """A command to run under a lease."""

    request_id: Id
    argv: Annotated[tuple[str, ...], Meta(min_length=1, max_length=20_000)]
    resource_type: Name = "cpu"
    amount: float = 1.0
    job_id: Name = ""
    priority: Name = "medium"
    prefer: tuple[Name, ...] = ()
    require: tuple[Name, ...] = ()
    wait_seconds: Seconds = 300.0
    env: dict[str, str] = field(default_factory=dict)
    cwd: Text = ""
    workdir: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?$")] = ""
    given: tuple[Name, ...] = ()
    timeout_seconds: Seconds = 0.0
    grace_seconds: Seconds = 5.0
    retries: Annotated[int, Meta(ge=0, le=1000)] = 0

    def problem(self) -> str | None:
        """What the types cannot say."""
        return _problem_of(self)


class RunBoost(Message, frozen=True, kw_only=True):
    """A command that uses a boost, on the node that lends it."""

    request_id: Id
    boost_id: Name
    argv: Annotated[tuple[str, ...], Meta(min_length=1, max_length=20_000)]
    job_id: Name = ""
    env: dict[str, str] = field(default_factory=dict)
    cwd: Text = ""
    workdir: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?$")] = ""
    given: tuple[Name, ...] = ()

    def problem(self) -> str | None:
        """What the types cannot say."""
        return _problem_of(self)


def _problem_of(op: Submit | RunBoost) -> str | None:
    if op.job_id and not _JOB_ID.fullmatch(op.job_id):
        return f"the job id {op.job_id!r} may only have letters, digits, '.', '_' and '-'"
    if any("\0" in word for word in (*op.argv, op.cwd, *op.env, *op.env.values())):
        return "a command, directory or variable must not contain a NUL byte"
    if any("=" in name or not name for name in op.env):
        return "the name of a variable must not be empty or contain '='"
    return None
