"""What can be asked on the socket, as types: a message that does not fit is refused before anything happens."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from distributed_grid.errors import BadInput

Text = Annotated[str, Meta(max_length=4096)]
Id = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
Name = Annotated[str, Meta(max_length=128)]
Seconds = Annotated[float, Meta(ge=0, le=3.2e9)]
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class _Op(Struct, frozen=True, tag_field="op", tag=str.lower, forbid_unknown_fields=True):
    """A message of the socket protocol."""


class Hello(_Op, frozen=True):
    """Who connects, and which config it insists on."""

    protocol: int
    version: Name
    config: Name | None = None
    config_path: Text | None = None


class Status(_Op, frozen=True):
    """Everything at a glance."""


class Info(_Op, frozen=True):
    """About the control plane itself."""


class Config(_Op, frozen=True):
    """The config in use, in its normal form."""


class Ask(_Op, frozen=True):
    """Resources to hold, without a command."""

    request_id: Id
    resource_type: Name
    amount: float
    priority: Name = "medium"
    prefer: tuple[Name, ...] = ()
    require: tuple[Name, ...] = ()
    wait_seconds: Seconds = 300.0
    duration_seconds: Seconds = 0.0
    target: Name = ""
    dry_run: bool = False


class Release(_Op, frozen=True):
    """Give a lease back."""

    allocation_id: Name


class Extend(_Op, frozen=True):
    """More time for a lease."""

    allocation_id: Name
    seconds: Seconds


class Submit(_Op, frozen=True):
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
    env: dict[str, str] = {}
    cwd: Text = ""
    timeout_seconds: Seconds = 0.0
    grace_seconds: Seconds = 5.0
    retries: Annotated[int, Meta(ge=0, le=1000)] = 0
    dry_run: bool = False

    def problem(self) -> str | None:
        """What the types cannot say."""
        if self.job_id and not _JOB_ID.fullmatch(self.job_id):
            return f"the job id {self.job_id!r} may only have letters, digits, '.', '_' and '-'"
        if any("\0" in word for word in (*self.argv, self.cwd, *self.env, *self.env.values())):
            return "a command, directory or variable must not contain a NUL byte"
        if any("=" in name or not name for name in self.env):
            return "the name of a variable must not be empty or contain '='"
        return None


class Jobs(_Op, frozen=True):
    """The jobs that are going on, and those that ended of late."""

    all: bool = False
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 20


class Job(_Op, frozen=True):
    """One job."""

    job_id: Name


class Cancel(_Op, frozen=True):
    """Stop a job for good."""

    job_id: Name


class Wait(_Op, frozen=True):
    """Answer when a job is over, or when this much time is."""

    job_id: Name
    timeout_seconds: Seconds | None = None


class Logs(_Op, frozen=True):
    """The output of a job, and with `follow` all that still comes until it is over."""

    job_id: Name
    follow: bool = False
    tail_bytes: Annotated[int, Meta(ge=0)] | None = None
    stdout_seen: Annotated[int, Meta(ge=0)] = 0
    stderr_seen: Annotated[int, Meta(ge=0)] = 0


class Events(_Op, frozen=True):
    """The audit trail, and with `follow` what still comes."""

    after: Annotated[int, Meta(ge=0)] | None = None
    follow: bool = False
    subject: Name | None = None
    types: tuple[Name, ...] = ()
    limit: Annotated[int, Meta(ge=1, le=1_000_000)] = 100


class Stay(_Op, frozen=True):
    """Let a control plane that was started on demand stay until it is stopped."""


class Stop(_Op, frozen=True):
    """End the control plane; jobs go on and are found again by the next one."""


Op = (
    Hello | Status | Info | Config | Ask | Release | Extend | Submit
    | Jobs | Job | Cancel | Wait | Logs | Events | Stay | Stop
)  # fmt: skip
_decoder: msgspec.json.Decoder[Op] = msgspec.json.Decoder(Op)


def parse(body: bytes) -> Op:
    """The message in these bytes; BadInput says what does not fit."""
    try:
        op = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadInput(f"the request makes no sense: {error}") from None
    if isinstance(op, Submit) and (problem := op.problem()) is not None:
        raise BadInput(problem)
    return op
