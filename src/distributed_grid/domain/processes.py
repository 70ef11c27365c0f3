"""Processes that the grid did not start, as the agent of a node sees them: facts, never decisions.

What makes of these facts a candidate or a refusal is `scheduling/offloading/`.
"""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct

MAX_ARGV = 512
MAX_WORD_CHARS = 8192
"""Of one word of a command, or of any other text that is told of a process."""
MAX_VARIABLES, MAX_VALUE_CHARS = 256, 131_072
MAX_PATHS = 16
"""Paths of one kind that are told of a process; the first ones found."""
Pid = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=0, lt=2**62)]
Text = Annotated[str, Meta(max_length=MAX_WORD_CHARS)]
Texts = Annotated[tuple[Text, ...], Meta(max_length=MAX_PATHS)]
Name = Annotated[str, Meta(max_length=256)]


class ProcessType(enum.StrEnum):
    """What kind of work a process does, by its command, its descriptors and its use of the machine."""

    TRAINING = "training"
    INFERENCE = "inference"
    DATA_PROCESSING = "data_processing"
    COMPUTE = "compute"
    IO = "io"
    BATCH = "batch"
    INTERACTIVE = "interactive"
    DAEMON = "daemon"


class StreamKind(enum.StrEnum):
    """Kind of one of the descriptors 0 to 2."""

    NULL = "null"
    FILE = "file"
    TERMINAL = "terminal"
    PIPE = "pipe"
    SOCKET = "socket"
    CLOSED = "closed"
    OTHER = "other"


class StandardStream(Struct, frozen=True, omit_defaults=True):
    """One of the descriptors 0 to 2: its kind, the path of a file, and whether it is opened for appending."""

    kind: StreamKind = StreamKind.CLOSED
    path: Text = ""
    appends: bool = False


class ProcessIdentity(Struct, frozen=True):
    """One process for ever: its pid, when it began (clock ticks since boot), and the boot id of its machine."""

    pid: Pid
    pid_start: Count
    boot: Name


Digest = Annotated[str, Meta(max_length=64)]


class ProcessLook(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Facts of a process that a move relies on, as digests: they are compared again while it stands still."""

    command: Digest = ""
    program: Digest = ""
    directory: Digest = ""
    environment: Digest = ""
    streams: Annotated[tuple[Digest, ...], Meta(max_length=3)] = ()
    needs: Annotated[tuple[Digest, ...], Meta(max_length=MAX_PATHS)] = ()
    obstacles: Annotated[tuple[Digest, ...], Meta(max_length=64)] = ()


class ProcessInfo(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Root of a process tree; amounts and obstacles are those of the whole tree."""

    pid: Pid
    pid_start: Count
    boot: Name
    ppid: Pid
    uid: Annotated[int, Meta(ge=0, lt=2**32)]
    user: Name
    name: Name
    argv: Annotated[tuple[Text, ...], Meta(max_length=MAX_ARGV)]
    cwd: Text = ""
    exe: Text = ""
    age_ms: Count = 0  # since its start
    cpu_milli: Count = 0  # between two observations, or since its start
    cpu_ms: Count = 0
    pss_bytes: Count = 0
    gpu_memory_bytes: Count = 0
    read_bytes: Count = 0
    written_bytes: Count = 0
    processes: Count = 1
    threads: Count = 1
    streams: Annotated[tuple[StandardStream, ...], Meta(max_length=3)] = ()
    parent: Text = ""  # waits for it: a shell, make, a script, a supervisor, systemd or cron; empty if it is an orphan
    job: Name = ""
    has_secret: bool = False  # a value in `argv` looks like one, and is masked: it never leaves its node
    is_grid: bool = False
    is_ray: bool = False
    listening: Texts = ()
    connections: Count = 0
    locks: Texts = ()
    outside_writes: Texts = ()
    shared_memory: Texts = ()
    traced: bool = False
    setuid: bool = False
    foreign_namespace: Text = ""
    other_sessions: Count = 0
    unreadable: Text = ""
    needs: Annotated[tuple[tuple[Text, Count], ...], Meta(max_length=MAX_PATHS)] = ()
    """Regular files outside `cwd` that it has open or mapped, or that its command names, without system libraries: path
    and bytes; 0 bytes is any size, and a path that ends with a slash is a directory."""
    environment: Annotated[
        tuple[tuple[Name, Annotated[str, Meta(max_length=MAX_VALUE_CHARS)]], ...], Meta(max_length=MAX_VARIABLES)
    ] = ()
    """The variables that were asked for."""
    cwd_problem: Text = ""  # why its working directory is not shipped, as the end of a sentence about it
    needed_secrets: Texts = ()
    """Files of `cwd` that look like secrets, so they are not shipped, and that it has open or mapped, or names."""
    environment_digest: Digest = ""  # of all variables; set if one process was asked for

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.pid_start, self.boot)

    def __repr__(self) -> str:
        return f"ProcessInfo({self.pid}, {self.name!r})"  # its arguments and variables are nobody's to log
