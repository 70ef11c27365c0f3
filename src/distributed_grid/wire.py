"""Wire protocol between the control plane and an agent: messages, limits, encoding.

Every order carries the fence of its lease; an agent refuses one older than it has seen. A report stays in the agent's
outbox until its number is acknowledged, and is sent again after a reconnection. Clocks are never compared: a heartbeat
has a number, the reply names that number and a duration, and the agent counts the duration from when it sent that
heartbeat. A stream sends no more bytes than it was given credit for.

Every field has a bound in its type, and the largest message of each type fits into `MAX_MESSAGE_BYTES`. Longer
lists are sent in pages, each of which says whether there is `more`; they count only when the last one is there.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from distributed_grid.domain.jobs import MAX_RUN_MS, Command, Ending, Outcome
from distributed_grid.domain.leases import MAX_EPOCH, MAX_FENCE
from distributed_grid.domain.nodes import MAX_GPUS, Milli, Usage
from distributed_grid.domain.processes import ProcessIdentity, ProcessInfo, ProcessLook
from distributed_grid.domain.resources import MAX_AMOUNT, Capacity, Claim, GpuDevice
from distributed_grid.domain.states import MoveState, Step
from distributed_grid.domain.workers import MAX_NOTICE_MS
from distributed_grid.errors import ProtocolError

PROTOCOL = 6
MAX_CONNECTIONS_PER_PEER = 128
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
MAX_CHUNK_BYTES = 256 * 1024
STREAM_CREDIT_BYTES = 512 * 1024
MAX_IDS = 4_000
MAX_STARTING = 1_000
"""Attempts that a heartbeat names as not started yet."""
"""In one message; lists of ids that can be longer are sent in pages."""
MAX_ATTEMPTS = 200_000
MAX_COPIES = 200_000
MAX_QUERY_BYTES = 64 * 1024
MAX_REPLY_BYTES = 32 * 1024 * 1024
MAX_LISTING_BYTES = 1024 * 1024
MAX_SKIPPED, MAX_SKIPPED_CHARS = 100, 1000
MAX_PATTERNS, MAX_PATTERN_CHARS = 500, 1024
MAX_MARKS = 2_000
MAX_OUTGROWN = 1_000
MAX_STARTING = 1_000
MAX_PROCESSES = 100
"""In one message; a listing of more is sent in pages."""
MAX_MOVES = 500
HEARTBEAT_MS = 2_000
MAX_JUMP_MS = 10**15
T = TypeVar("T")

Id = Annotated[str, Meta(max_length=200)]
Name = Annotated[str, Meta(max_length=128)]
MAX_TEXT_CHARS, MAX_WHY_CHARS = 8192, 500
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
Count = Annotated[int, Meta(ge=0, lt=2**62)]
Amount = Annotated[int, Meta(ge=0, le=MAX_AMOUNT)]
Milliseconds = Annotated[int, Meta(ge=0, le=MAX_RUN_MS)]
Pid = Annotated[int, Meta(ge=0, lt=2**31)]
Index = Annotated[int, Meta(ge=0, lt=2**16)]
Cores = Annotated[tuple[Index, ...], Meta(max_length=4096)]
Credit = Annotated[int, Meta(ge=0, le=STREAM_CREDIT_BYTES)]
Ids = Annotated[tuple[Id, ...], Meta(max_length=MAX_IDS)]
Epoch = Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
Fence = Annotated[int, Meta(ge=0, le=MAX_FENCE)]
Bytes = Annotated[bytes, Meta(max_length=MAX_CHUNK_BYTES)]


class _FromAgent(Struct, frozen=True, tag=True):
    """Message from an agent."""


class _ToAgent(Struct, frozen=True, tag=True):
    """Message to an agent."""


class ReportedGpu(Struct, frozen=True):
    """A GPU of an agent's machine."""

    index: Index
    memory_bytes: Amount = 0
    name: Name = ""
    exclusive: bool = False


class ReportedCapacity(Struct, frozen=True):
    """Resources of an agent's machine."""

    cpu_milli: Annotated[int, Meta(ge=0, le=10**9)] = 0
    memory_bytes: Amount = 0
    gpus: Annotated[tuple[ReportedGpu, ...], Meta(max_length=MAX_GPUS)] = ()
    custom: Annotated[tuple[tuple[Name, Amount], ...], Meta(max_length=256)] = ()

    @classmethod
    def of(cls, capacity: Capacity) -> ReportedCapacity:
        gpus = (ReportedGpu(gpu.index, gpu.memory_bytes, gpu.name[:128], gpu.exclusive) for gpu in capacity.gpus)
        return cls(capacity.cpu_milli, capacity.memory_bytes, tuple(gpus), capacity.custom)

    def value(self) -> Capacity:
        gpus = (GpuDevice(gpu.index, gpu.memory_bytes, gpu.name, gpu.exclusive) for gpu in self.gpus)
        return Capacity(self.cpu_milli, self.memory_bytes, tuple(gpus), self.custom)


class AgentHello(_FromAgent, frozen=True, kw_only=True):
    """First message of an agent: the attempts it has a record of (by lease id), the capacity of its machine, the
    highest control-plane epoch it has seen, the boot id of the machine, and a name for the machine and the directory
    that the attempts are recorded in. Attempts beyond the first page follow in `AttemptsPage`, before anything else.
    `python` is the version of the interpreter that the agent runs with. `moves` are those it has a journal of."""

    protocol: Annotated[int, Meta(ge=0, lt=2**31)]
    version: Name
    node: Name
    attempts: Ids = ()
    capacity: ReportedCapacity | None = None
    epoch: Epoch = 0
    boot: Name = ""
    machine: Name = ""
    more: bool = False
    python: Name = ""
    moves: Annotated[tuple[Annotated[str, Meta(max_length=80)], ...], Meta(max_length=MAX_MOVES)] = ()


class AttemptsPage(_FromAgent, frozen=True):
    """More attempts of a greeting."""

    node: Name
    attempts: Ids
    more: bool = False


class CheckpointAge(Struct, frozen=True):
    """Checkpoint mark of an attempt, `age_ms` before the message was sent."""

    lease_id: Id
    fence: Fence
    age_ms: Milliseconds


class HeldMemory(Struct, frozen=True):
    """Memory that an attempt holds beyond a lease that may grow."""

    lease_id: Id
    fence: Fence
    memory_bytes: Amount


class AnnouncedEnd(Struct, frozen=True):
    """The machine of an agent will be taken away in `ends_in_ms`, counted from when this was sent; None: it may be, and
    nobody knows when. `withdrawn`: it was said to be, and stays after all."""

    why: Annotated[str, Meta(max_length=MAX_WHY_CHARS)]
    ends_in_ms: Annotated[int, Meta(ge=0, le=MAX_NOTICE_MS)] | None = None
    withdrawn: bool = False


class PendingClockJump(Struct, frozen=True):
    """The wall clock of an agent's machine moved `by_ms` other than its boot clock; nothing is deleted by age there for
    `waits_ms` more, unless somebody confirms it."""

    by_ms: Annotated[int, Meta(ge=-MAX_JUMP_MS, le=MAX_JUMP_MS)]
    waits_ms: Milliseconds


class Heartbeat(_FromAgent, frozen=True, kw_only=True):
    """Periodic measurement; `yields` says that the agent gives way to the owner now. `marks` are checkpoints that the
    control plane may not know of yet. `capacity` is what the machine has, detected anew, where that was asked for.
    `end` is repeated with every heartbeat from when the agent has heard of it: so a control plane that was away hears
    of it, too. `starting` are the attempts that the agent has been ordered to start and whose start or end the control
    plane may not know of yet: files are being fetched, or a shim has them, or a report is not acknowledged. A list of
    `MAX_STARTING` may be incomplete. `outgrown` are attempts that hold more than their leases, which may grow: they are
    named with every heartbeat until their leases are as large."""

    node: Name
    usage: Usage
    beat: Count = 0
    generation: Count = 0
    yields: bool = False
    marks: Annotated[tuple[CheckpointAge, ...], Meta(max_length=MAX_MARKS)] = ()
    capacity: ReportedCapacity | None = None
    end: AnnouncedEnd | None = None
    clock_jump: PendingClockJump | None = None
    starting: Annotated[tuple[Id, ...], Meta(max_length=MAX_STARTING)] = ()
    outgrown: Annotated[tuple[HeldMemory, ...], Meta(max_length=MAX_OUTGROWN)] = ()


class AttemptStartedReport(_FromAgent, frozen=True, kw_only=True):
    """The command of an attempt runs; `pid_start` is when its process began, in clock ticks since boot."""

    seq: Count
    lease_id: Id
    fence: Fence
    pid: Pid
    cores: Cores
    pid_start: Count = 0


class AttemptPausedReport(_FromAgent, frozen=True):
    """An attempt stands still for the owner's sake, or goes on again."""

    seq: Count
    lease_id: Id
    fence: Fence
    paused: bool
    detail: Text = ""


class AttemptEndedReport(_FromAgent, frozen=True, kw_only=True):
    """An attempt is over, its whole process tree gone. The start of a short one is reported together with its end.
    `mark_age_ms` is how long before its end it last marked a checkpoint; None is never."""

    seq: Count
    lease_id: Id
    fence: Fence
    outcome: Outcome
    pid: Pid = 0
    cores: Cores = ()
    mark_age_ms: Milliseconds | None = None
    pid_start: Count = 0
    has_checkpoint: bool = False


class MoveReport(_FromAgent, frozen=True, kw_only=True):
    """State of a move at its source: one that the guard has recorded, or `opened`, `returned` or `failed`."""

    seq: Count
    move_id: Id
    state: MoveState
    detail: Text = ""
    left_ms: Milliseconds = 0  # of a freeze
    frozen_ms: Milliseconds = 0  # length of a freeze that has ended
    files: Count = 0  # number of files that are back
    kept: Annotated[tuple[Annotated[str, Meta(max_length=MAX_SKIPPED_CHARS)], ...], Meta(max_length=MAX_SKIPPED)] = ()
    """Files that were changed at the source meanwhile, and stay."""
    notes: Annotated[tuple[Annotated[str, Meta(max_length=MAX_SKIPPED_CHARS)], ...], Meta(max_length=MAX_SKIPPED)] = ()
    """For the user."""


class ProcessListing(_FromAgent, frozen=True):
    """Answer to `ListProcesses`, in pages."""

    stream: Count
    processes: Annotated[tuple[ProcessInfo, ...], Meta(max_length=MAX_PROCESSES)] = ()
    problem: Text = ""
    more: bool = False


class FilesChecked(_FromAgent, frozen=True):
    """Answer to `CheckFiles`: those that are not there, or are not as large."""

    stream: Count
    missing: Annotated[tuple[Annotated[str, Meta(max_length=4096)], ...], Meta(max_length=MAX_SKIPPED)] = ()
    problem: Text = ""


class FileChunk(_FromAgent, frozen=True):
    """Next bytes of a file that the control plane reads, and their offset; no bytes is the end for now, and `problem`
    says why nothing more will come."""

    stream: Count
    data: Bytes
    problem: Text = ""
    at: Count = 0


class FileListing(_FromAgent, frozen=True, kw_only=True):
    """Answer to `ListFiles`, in pages: a manifest (`trees/manifest.py`), and what was skipped."""

    stream: Count
    files: Annotated[bytes, Meta(max_length=MAX_LISTING_BYTES)] = b""
    skipped: Annotated[
        tuple[Annotated[str, Meta(max_length=MAX_SKIPPED_CHARS)], ...], Meta(max_length=MAX_SKIPPED)
    ] = ()
    problem: Text = ""
    more: bool = False
    unchanged: Count = 0


class FetchContent(_FromAgent, frozen=True):
    """Send the content of this digest, as far as the credit goes."""

    stream: Count
    digest: Name
    credit: Credit


class FetchCredit(_FromAgent, frozen=True):
    """More credit for content that the agent fetches, in bytes; 0 closes the stream."""

    stream: Count
    credit: Credit


class Endpoint(Struct, frozen=True):
    """Where a memory server listens: the address, the fingerprint of its certificate (none: a plain connection), the
    Unix socket for programs of its own machine, and the incarnation of its memory."""

    host: Name
    port: Index
    fingerprint: Name = ""
    path: Annotated[str, Meta(max_length=4096)] = ""
    incarnation: Name = ""


class Ticket(Struct, frozen=True):
    """Short-lived capability for one copy of a block: its claims, and the secret that proves them."""

    claims: Annotated[bytes, Meta(max_length=4096)]
    secret: Annotated[bytes, Meta(max_length=64)]

    def __repr__(self) -> str:
        return "Ticket(...)"


class MemoryServedReport(_FromAgent, frozen=True, kw_only=True):
    """The memory server of a node is up: its endpoint, the key that signs tickets, and the copies it has in memory and
    on disk. Copies beyond the first page follow in `CopiesPage`."""

    node: Name
    endpoint: Endpoint
    key: Annotated[bytes, Meta(max_length=64)]
    copies: Annotated[tuple[Id, ...], Meta(max_length=MAX_IDS // 2)] = ()
    on_disk: Annotated[tuple[Id, ...], Meta(max_length=MAX_IDS // 2)] = ()
    more: bool = False

    def __repr__(self) -> str:
        return f"MemoryServedReport({self.node}, {self.endpoint})"


class CopiesPage(_FromAgent, frozen=True):
    """More copies of a `MemoryServedReport`."""

    node: Name
    copies: Annotated[tuple[Id, ...], Meta(max_length=MAX_IDS // 2)] = ()
    on_disk: Annotated[tuple[Id, ...], Meta(max_length=MAX_IDS // 2)] = ()
    more: bool = False


class MemoryFailedReport(_FromAgent, frozen=True):
    """The memory server of a node could not be started, and why."""

    node: Name
    problem: Text


class CopyMadeReport(_FromAgent, frozen=True):
    """Result of a `MakeCopyOrder` under this generation."""

    source: Id
    generation: Count
    problem: Text = ""


class CopiesFreedReport(_FromAgent, frozen=True):
    """These copies are freed; nothing of them is left."""

    copies: Annotated[tuple[Id, ...], Meta(min_length=1, max_length=MAX_IDS)]


class MemoryReclaimReport(_FromAgent, frozen=True):
    """The owner of a node needs so much of the memory back that blocks hold there."""

    node: Name
    memory_bytes: Amount


class MemoryQuery(_FromAgent, frozen=True):
    """Request of a program on the node about the memory pool; the body is a message of the daemon's own socket."""

    number: Count
    body: Annotated[bytes, Meta(max_length=MAX_QUERY_BYTES)]


class Welcome(_ToAgent, frozen=True, kw_only=True):
    """The control plane accepts the agent, and sends its settings."""

    protocol: Annotated[int, Meta(ge=0, lt=2**31)]
    version: Name
    epoch: Epoch
    hold_ms: Count
    heartbeat_ms: Count
    owner: OwnerRules | None = None
    max_output_bytes: Count = 0  # of stdout and of stderr of an attempt; 0: no limit
    max_files_bytes: Count = 0  # in the directories of an attempt; 0: no limit


class ControlPlaneAddress(_ToAgent, frozen=True):
    """Where an agent that joined finds the control plane from now on: addresses, its certificate, and the Unix socket
    for agents of its login on its machine. Sent after each welcome, and before the address changes."""

    addresses: Annotated[tuple[Name, ...], Meta(max_length=64)]
    fingerprint: Name
    certificate: Annotated[str, Meta(max_length=16384)]
    socket: Annotated[str, Meta(max_length=4096)] = ""


class OwnerRules(Struct, frozen=True, kw_only=True):
    """Yielding to the owner: the thresholds of outside use, and the steps that are allowed."""

    cpu_busy_max_milli: Milli
    memory_used_max_milli: Milli
    memory_min_bytes: Count
    gpu_busy_max_milli: Milli
    gpu_memory_min_bytes: Count
    throttle: bool = True
    pause: bool = True
    evict: bool = True
    notice_ms: Count = 5_000
    grace_ms: Count = 10_000


class RejectAgent(_ToAgent, frozen=True):
    """The control plane rejects the agent; one sentence says what to do."""

    message: Text


class HeartbeatReply(_ToAgent, frozen=True, kw_only=True):
    """A heartbeat arrived: attempts may run for `hold_ms` more, counted from when it was sent (0: without end). It is
    sent at once, whether or not anything can be stored.

    `ray_…` is what is lent of the node through Ray: what Ray's workers use of it is not the owner's use. With
    `report_capacity` the next heartbeat is to say what the machine has. `end` is what the control plane knows of the
    end of the machine. `clock_confirmed`: somebody says that its wall clock is right.
    """

    beat: Count
    hold_ms: Count
    ray_cpu_milli: Count = 0
    ray_memory_bytes: Count = 0
    ray_gpu_milli: Count = 0
    node: Name = ""
    report_capacity: bool = False
    end: AnnouncedEnd | None = None
    clock_confirmed: bool = False


class AcknowledgeMarks(_ToAgent, frozen=True):
    """The checkpoint marks of this heartbeat are in the ledger."""

    beat: Count


class StartAttemptOrder(_ToAgent, frozen=True, kw_only=True):
    """Run a command under a lease; `beat` and `hold_ms` say until when this order is valid. `checkpoint` is the
    manifest of what the job's last attempt has left in its checkpoint directory. The command must not be executed later
    than `start_by_ms` after the heartbeat `beat` was sent (0: at any time); while files are being fetched, not later
    than `start_ms` after the last heartbeat that named the attempt as starting and was answered. The memory of the
    claim is its limit, unless the lease may grow: then `most_memory_bytes` is."""

    node: Name
    lease_id: Id
    fence: Fence
    job_id: Name
    command: Command
    claim: Claim
    hold_ms: Count
    beat: Count = 0
    generation: Count = 0
    checkpoint: Name = ""
    start_by_ms: Milliseconds = 0
    start_ms: Milliseconds = 0
    most_memory_bytes: Amount = 0
    may_run_again: bool = False
    """Its user allows another run: its node may evict it to have the CPU back."""


class StopAttemptOrder(_ToAgent, frozen=True):
    """Stop what runs under a lease; `ending` is recorded as the reason."""

    lease_id: Id
    fence: Fence
    ending: Ending
    detail: Text
    grace_ms: Count


class PauseAttemptOrder(_ToAgent, frozen=True):
    """Let what runs under a lease stand still until it may go on, for the sake of its node; done again it changes
    nothing. What its owner's use of the machine says holds besides."""

    lease_id: Id
    fence: Fence
    paused: bool
    detail: Text = ""


class ResizeAttemptOrder(_ToAgent, frozen=True):
    """The size of a lease that may grow, and the most that its attempt may hold. Neither gets smaller: an order that
    comes late or again changes nothing."""

    lease_id: Id
    fence: Fence
    memory_bytes: Amount
    most_memory_bytes: Amount


class MoveOrder(_ToAgent, frozen=True, kw_only=True):
    """Next step of a move at its source; each is safe to repeat."""

    node: Name
    move_id: Id
    step: Step  # open, freeze, commit, thaw, return or close
    process: ProcessIdentity | None = None
    freeze_ms: Milliseconds = 0  # the longest freeze
    manifest: Name = ""  # files to return
    shipped: Name = ""  # manifest of the directory when the original was frozen
    look: ProcessLook | None = None  # at the original, at the time of the request


class ListProcesses(_ToAgent, frozen=True):
    """List the processes of this agent's user that could be work of their own, or one of them, with these variables of
    its environment."""

    stream: Count
    node: Name
    pid: Pid = 0
    variables: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()


class CheckFiles(_ToAgent, frozen=True):
    """Say which of these files are not on this machine, or have another size."""

    stream: Count
    files: Annotated[tuple[tuple[Annotated[str, Meta(max_length=4096)], Amount], ...], Meta(max_length=MAX_SKIPPED)]


class AcknowledgeReport(_ToAgent, frozen=True):
    """The report of this number is in the ledger: the agent may forget it."""

    seq: Count


class ReadFile(_ToAgent, frozen=True, kw_only=True):
    """Send a file of an attempt from an offset on (or from so far before its end), as far as the credit goes."""

    stream: Count
    lease_id: Id
    name: Annotated[bytes, Meta(max_length=8192)]
    offset: Count
    credit: Credit
    from_end: bool = False


class ReadCredit(_ToAgent, frozen=True):
    """More credit for a file that the control plane reads, in bytes."""

    stream: Count
    credit: Credit


class CloseStream(_ToAgent, frozen=True):
    """Close a file stream: nobody reads it any more."""

    stream: Count


class ListFiles(_ToAgent, frozen=True, kw_only=True):
    """List the files of an attempt's working directory that match these patterns. With `tree` all of the directory is
    listed, also directories and links, and files with their digests; the id of an open move names the directory that
    its original runs in. With `checkpoint` it is all of the attempt's checkpoint directory, without digests."""

    stream: Count
    lease_id: Id
    patterns: Annotated[tuple[Annotated[str, Meta(max_length=MAX_PATTERN_CHARS)], ...], Meta(max_length=MAX_PATTERNS)]
    tree: bool = False
    checkpoint: bool = False
    shipped: Name = ""
    """Manifest of the tree that the attempt began with: files that are as they were in it are only counted."""


class FetchedChunk(_ToAgent, frozen=True):
    """Next bytes of the content that an agent fetches; no bytes is the end, and `problem` says why."""

    stream: Count
    data: Bytes
    problem: Text = ""


class ServeMemoryOrder(_ToAgent, frozen=True):
    """Start the memory server of a node; if it runs already, report it again. Without a certificate connections are
    plain: the network is trusted. One address may have so many of them."""

    node: Name
    certificate: Annotated[bytes, Meta(max_length=16384)] = b""
    private_key: Annotated[bytes, Meta(max_length=16384)] = b""
    host: Name = ""
    max_connections_per_peer: Annotated[int, Meta(ge=1, le=100_000)] = MAX_CONNECTIONS_PER_PEER

    def __repr__(self) -> str:
        return f"ServeMemoryOrder({self.node})"


class MakeCopyOrder(_ToAgent, frozen=True):
    """Make a copy of a copy at another memory server, whole; until it is known what became of it, nobody may write
    to the source."""

    source: Id
    generation: Count
    target: Endpoint
    ticket: Ticket
    node: Name = ""


class FreeCopiesOrder(_ToAgent, frozen=True):
    """Free these copies; those that are not there are reported as freed, too."""

    copies: Ids
    node: Name = ""


class MemoryReply(_ToAgent, frozen=True):
    """Answer to a `MemoryQuery`, or a part of it where there is more."""

    number: Count
    body: Bytes
    more: bool = False

    def __repr__(self) -> str:
        return f"MemoryReply({self.number})"


MemoryReport = (
    MemoryServedReport | CopiesPage | MemoryFailedReport | CopyMadeReport | CopiesFreedReport | MemoryReclaimReport
)
MemoryOrder = ServeMemoryOrder | MakeCopyOrder | FreeCopiesOrder
FromAgent = (
    AgentHello
    | AttemptsPage
    | Heartbeat
    | AttemptStartedReport
    | AttemptPausedReport
    | AttemptEndedReport
    | MoveReport
    | ProcessListing
    | FilesChecked
    | FileChunk
    | FileListing
    | FetchContent
    | FetchCredit
    | MemoryReport
    | MemoryQuery
)
_AttemptOrder = StartAttemptOrder | StopAttemptOrder | PauseAttemptOrder | ResizeAttemptOrder
_Order = _AttemptOrder | ReadFile | ReadCredit | CloseStream | ListFiles | MemoryOrder
_MoveOrder = MoveOrder | ListProcesses | CheckFiles
ToAgent = (
    Welcome
    | RejectAgent
    | ControlPlaneAddress
    | HeartbeatReply
    | AcknowledgeMarks
    | AcknowledgeReport
    | FetchedChunk
    | _Order
    | _MoveOrder
    | MemoryReply
)


class AgentSide(Protocol):
    """An agent, as the control plane sees it."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes this agent serves; its reports about other nodes are ignored."""

    def send(self, message: ToAgent) -> None:
        """Send a message, in order; a repeated one changes nothing."""

    def close(self, why: str) -> None:
        """End this connection: on the next one the agent says again all that matters. Safe twice."""


class ControlSide(Protocol):
    """The control plane, as an agent sees it."""

    def received(self, message: FromAgent, via: AgentSide) -> None:
        """Handle a message; a repeated one changes nothing. Replies go to `via`."""


class _Greeting(Struct):
    """The fields that the first message has in every protocol version."""

    protocol: int
    version: str = "of unknown version"


_encoder = msgspec.msgpack.Encoder()
_greeting = msgspec.msgpack.Decoder(_Greeting)


@functools.cache
def _decoder(union: Any) -> msgspec.msgpack.Decoder[Any]:
    """Each side needs one of these, and making it takes as long as the start of an interpreter."""
    return msgspec.msgpack.Decoder(union)


def pages(count: int, size: int) -> list[slice]:
    """The pages of a sequence with so many items; one that is empty where there are none."""
    return [slice(at, at + size) for at in range(0, count or 1, size)]


def greeting(hello: AgentHello) -> list[AgentHello | AttemptsPage]:
    """The messages of a greeting, however many attempts it names."""
    first, *others = [hello.attempts[page] for page in pages(len(hello.attempts), MAX_IDS)]
    found: list[AgentHello | AttemptsPage] = [replace(hello, attempts=first, more=bool(others))]
    found += [AttemptsPage(hello.node, page, number < len(others)) for number, page in enumerate(others, 1)]
    return found


def served_pages(report: MemoryServedReport) -> list[MemoryServedReport | CopiesPage]:
    """The messages of a report, however many copies it names."""
    longest = max(len(report.copies), len(report.on_disk))
    first, *others = [(report.copies[page], report.on_disk[page]) for page in pages(longest, MAX_IDS // 2)]
    found: list[MemoryServedReport | CopiesPage] = [
        replace(report, copies=first[0], on_disk=first[1], more=bool(others))
    ]
    found += [CopiesPage(report.node, *page, number < len(others)) for number, page in enumerate(others, 1)]
    return found


def clipped(text: str) -> str:
    """A text that a message can carry."""
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + "…"


def encode(message: FromAgent | ToAgent) -> bytes:
    """Encode a message as msgpack."""
    return _encoder.encode(message)


def decode_from_agent(data: bytes) -> FromAgent:
    """Decode and check a message of an agent; raises ProtocolError for anything else."""
    message: FromAgent = _decoded(data, _decoder(FromAgent))
    if isinstance(message, AgentHello | Heartbeat) and message.capacity is not None:
        gpus, custom = message.capacity.gpus, message.capacity.custom
        if len({gpu.index for gpu in gpus}) < len(gpus) or len(dict(custom)) < len(custom):
            raise ProtocolError("a GPU or another resource is named twice")
    return message


def decode_to_agent(data: bytes) -> ToAgent:
    """Decode a message of the control plane; raises ProtocolError for anything else."""
    message: ToAgent = _decoded(data, _decoder(ToAgent))
    if isinstance(message, StartAttemptOrder):
        command, claim = message.command, message.claim
        amounts = [claim.cpu_milli, claim.memory_bytes, *(count for _, count in claim.custom)]
        amounts += [number for share in claim.gpus for number in (share.index, share.milli, share.memory_bytes)]
        is_too_long = any(not 0 <= span <= MAX_RUN_MS for span in (command.timeout_ms, command.grace_ms))
        if is_too_long or any(not 0 <= amount <= MAX_AMOUNT for amount in amounts):
            raise ProtocolError("an order with a number out of range")
    return message


def check_greeting(data: bytes, *, mine: str, theirs: str) -> None:
    """Raise ProtocolError, saying what to upgrade, if a first message is of another protocol version."""
    try:
        found = _greeting.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise ProtocolError("the other side does not speak the agents' protocol") from None
    if found.protocol != PROTOCOL:
        older = theirs if found.protocol < PROTOCOL else mine
        raise ProtocolError(
            f"{theirs} speaks protocol {found.protocol} (version {found.version[:40]}), {mine} protocol {PROTOCOL}: "
            f"upgrade {older}; `grid cluster install` brings nodes to the control plane's version"
        )


def _decoded(data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is too large")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a message of this protocol: {error}") from None
