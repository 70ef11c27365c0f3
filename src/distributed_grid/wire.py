"""Messages between the control plane and an agent, as values; how they travel is the link's business.

Rule 1: every order carries the fence of its lease; an agent refuses one older than it has seen.
Rule 2: a report stays with the agent until its number is acknowledged; after a reconnection it is sent again.
Rule 3: time is never shared. A heartbeat has a number; an answer names the number and a duration, and the agent
counts that duration from when it sent that heartbeat. What runs is stopped by then, unless a later answer came.
Rule 4: everything has a largest size, and a stream sends no more than it was given credit for.
"""

from __future__ import annotations

from typing import Annotated, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from distributed_grid.domain.jobs import Command, Outcome
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.resources import LARGEST_AMOUNT, Capacity, Claim
from distributed_grid.errors import ProtocolError

PROTOCOL = 1
LARGEST_MESSAGE = 4 * 1024 * 1024
LARGEST_CHUNK = 256 * 1024
STREAM_CREDIT = 512 * 1024
MOST_ATTEMPTS = 20_000
MOST_COPIES = 50_000
LARGEST_QUESTION = 64 * 1024
LARGEST_LISTING = 3 * 1024 * 1024
HEARTBEAT_MS = 2_000
T = TypeVar("T")

Id = Annotated[str, Meta(max_length=200)]
Name = Annotated[str, Meta(max_length=128)]
Text = Annotated[str, Meta(max_length=8192)]
Count = Annotated[int, Meta(ge=0, lt=2**62)]
Bytes = Annotated[bytes, Meta(max_length=LARGEST_CHUNK)]


class _FromAgent(Struct, frozen=True, tag=True):
    """What an agent says."""


class _ToAgent(Struct, frozen=True, tag=True):
    """What an agent is told."""


class Hello(_FromAgent, frozen=True):
    """An agent is there; these attempts it has a record of (by lease id), this is what its machine has, this the
    highest epoch it has seen of a control plane, and this names the time since the machine was started."""

    protocol: int
    version: Name
    node: Name
    attempts: Annotated[tuple[Id, ...], Meta(max_length=MOST_ATTEMPTS)] = ()
    capacity: Capacity | None = None
    epoch: Count = 0
    boot: Name = ""


class CheckpointAge(Struct, frozen=True):
    """An attempt has marked a checkpoint, so many milliseconds before this was sent."""

    lease_id: Id
    fence: Count
    age_ms: Count


class Heartbeat(_FromAgent, frozen=True):
    """The agent lives, and this is what it measured; `yields` says that it gives way to the owner now. `marks` are
    checkpoints that the control plane may not know of yet."""

    node: Name
    usage: Usage
    beat: Count = 0
    generation: Count = 0
    yields: bool = False
    marks: Annotated[tuple[CheckpointAge, ...], Meta(max_length=MOST_ATTEMPTS)] = ()


class Started(_FromAgent, frozen=True):
    """The command of an attempt runs."""

    seq: Count
    lease_id: Id
    fence: Count
    pid: Count
    cores: Annotated[tuple[int, ...], Meta(max_length=4096)]


class Paused(_FromAgent, frozen=True):
    """An attempt stands still for the owner's sake, or goes on again."""

    seq: Count
    lease_id: Id
    fence: Count
    paused: bool
    detail: Text = ""


class Ended(_FromAgent, frozen=True):
    """An attempt is over, its whole process tree gone. One that was short has its start told along with its end.
    `mark_age_ms` is how long before its end it last marked a checkpoint; None is never."""

    seq: Count
    lease_id: Id
    fence: Count
    outcome: Outcome
    pid: Count = 0
    cores: Annotated[tuple[int, ...], Meta(max_length=4096)] = ()
    mark_age_ms: Count | None = None


class ContentChunk(_FromAgent, frozen=True):
    """The next bytes of a stream, and where in the file they are; no bytes is its end for now, and `problem` why
    there is nothing to come."""

    stream: Count
    data: Bytes
    problem: Text = ""
    at: Count = 0


class Listing(_FromAgent, frozen=True):
    """The files that were asked for, as `adapters.files.manifest` lists them, and what could not be had."""

    stream: Count
    files: Annotated[bytes, Meta(max_length=LARGEST_LISTING)] = b""
    skipped: Annotated[tuple[Text, ...], Meta(max_length=1000)] = ()
    problem: Text = ""


class FetchContent(_FromAgent, frozen=True):
    """Send the content of this digest, as far as the credit goes."""

    stream: Count
    digest: Name
    credit: Count


class Credit(_FromAgent, frozen=True):
    """Credit for a stream that the agent fetches: so many bytes more; 0 is "enough"."""

    stream: Count
    credit: Count


class Endpoint(Struct, frozen=True):
    """Where a memory server listens: the address, what proves it (the fingerprint of its certificate; none: a plain
    connection), the Unix socket for programs of its own machine, and which life of its memory this is."""

    host: Name
    port: Count
    fingerprint: Name = ""
    path: Text = ""
    incarnation: Name = ""


class Ticket(Struct, frozen=True):
    """What lets somebody use one copy of a block for a while: what it says, and the secret that proves it."""

    claims: Annotated[bytes, Meta(max_length=4096)]
    secret: Annotated[bytes, Meta(max_length=64)]

    def __repr__(self) -> str:
        return "Ticket(...)"


class MemoryServed(_FromAgent, frozen=True):
    """The memory of a node can be used: where, with which key tickets are made, and which copies are there, in memory
    and on disk."""

    node: Name
    endpoint: Endpoint
    key: Annotated[bytes, Meta(max_length=64)]
    copies: Annotated[tuple[Id, ...], Meta(max_length=MOST_COPIES)] = ()
    on_disk: Annotated[tuple[Id, ...], Meta(max_length=MOST_COPIES)] = ()

    def __repr__(self) -> str:
        return f"MemoryServed({self.node}, {self.endpoint})"


class MemoryFailed(_FromAgent, frozen=True):
    """The memory of a node cannot be used, and why."""

    node: Name
    problem: Text


class CopyMade(_FromAgent, frozen=True):
    """A copy of a block was made elsewhere under this generation, or could not be."""

    source: Id
    generation: Count
    problem: Text = ""


class CopiesFreed(_FromAgent, frozen=True):
    """Nothing is left here of these copies."""

    copies: Annotated[tuple[Id, ...], Meta(max_length=MOST_COPIES)]


class MemoryWanted(_FromAgent, frozen=True):
    """The owner of a node needs so much of the memory back that blocks hold there."""

    node: Name
    memory_bytes: Count


class MemoryAsked(_FromAgent, frozen=True):
    """A program of the node asks something about the memory pool; the body is a message of the control plane's own
    socket."""

    number: Count
    body: Annotated[bytes, Meta(max_length=LARGEST_QUESTION)]


class Welcome(_ToAgent, frozen=True):
    """The control plane takes the agent in; what it has to know to serve."""

    protocol: int
    version: Name
    epoch: Count
    hold_ms: Count
    heartbeat_ms: Count
    owner: OwnerRules | None = None


class OwnerRules(Struct, frozen=True):
    """How to give way to the owner: from which outside use on, and by which steps."""

    cpu_busy_max_milli: int
    memory_used_max_milli: int
    memory_min_bytes: int
    gpu_busy_max_milli: int
    gpu_memory_min_bytes: int
    throttle: bool = True
    pause: bool = True
    evict: bool = True
    notice_ms: int = 5_000
    grace_ms: int = 10_000


class Refuse(_ToAgent, frozen=True):
    """The control plane does not take the agent in; one sentence says what to do."""

    message: Text


class Heard(_ToAgent, frozen=True):
    """A heartbeat arrived: everything may go on for so long from when it was sent (0: without end).

    What is lent of the node through Ray is told with it: what Ray's workers use of that is not the owner's.
    """

    beat: Count
    hold_ms: Count
    ray_cpu_milli: Count = 0
    ray_memory_bytes: Count = 0
    ray_gpu_milli: Count = 0


class Start(_ToAgent, frozen=True):
    """Run a command under a lease; `beat` and `hold_ms` say until when this order is any good."""

    node: Name
    lease_id: Id
    fence: Count
    job_id: Name
    command: Command
    claim: Claim
    hold_ms: Count
    beat: Count = 0
    generation: Count = 0


class StopAttemptOrder(_ToAgent, frozen=True):
    """Stop what runs under a lease; `ending` is what the end is to be called."""

    lease_id: Id
    fence: Count
    ending: Name
    detail: Text
    grace_ms: Count


class Acknowledge(_ToAgent, frozen=True):
    """The report of this number is in the ledger: the agent may forget it."""

    seq: Count


class Read(_ToAgent, frozen=True):
    """Send a file of an attempt from an offset on (or from so far before its end), as far as the credit goes."""

    stream: Count
    lease_id: Id
    name: Annotated[bytes, Meta(max_length=8192)]
    offset: Count
    credit: Count
    from_end: bool = False


class More(_ToAgent, frozen=True):
    """Credit for a stream: so many bytes more."""

    stream: Count
    credit: Count


class Enough(_ToAgent, frozen=True):
    """Nobody reads this stream any more."""

    stream: Count


class List(_ToAgent, frozen=True):
    """Say which files of an attempt's working directory fit these patterns."""

    stream: Count
    lease_id: Id
    patterns: Annotated[tuple[Text, ...], Meta(max_length=1000)]


class FilePart(_ToAgent, frozen=True):
    """The next bytes of what an agent fetches; no bytes is the end, and `problem` why there is nothing to come."""

    stream: Count
    data: Bytes
    problem: Text = ""


class OpenMemory(_ToAgent, frozen=True):
    """Let the memory of a node be used; where that is so already, say so again. Without a certificate connections are
    plain: the network is trusted."""

    node: Name
    certificate: Annotated[bytes, Meta(max_length=16384)] = b""
    private_key: Annotated[bytes, Meta(max_length=16384)] = b""
    host: Name = ""

    def __repr__(self) -> str:
        return f"OpenMemory({self.node})"


class MakeCopy(_ToAgent, frozen=True):
    """Make a copy of a copy at another memory server, whole; until it is known what became of it, nobody may write
    to the source."""

    source: Id
    generation: Count
    target: Endpoint
    ticket: Ticket


class FreeCopies(_ToAgent, frozen=True):
    """Let go of these copies; those that are not there are told as freed, too."""

    copies: Annotated[tuple[Id, ...], Meta(max_length=MOST_COPIES)]


class MemoryAnswered(_ToAgent, frozen=True):
    """The answer to what a program of the node asked."""

    number: Count
    body: Annotated[bytes, Meta(max_length=LARGEST_CHUNK)]

    def __repr__(self) -> str:
        return f"MemoryAnswered({self.number})"


MemoryReport = MemoryServed | MemoryFailed | CopyMade | CopiesFreed | MemoryWanted
MemoryOrder = OpenMemory | MakeCopy | FreeCopies
FromAgent = (
    Hello
    | Heartbeat
    | Started
    | Paused
    | Ended
    | ContentChunk
    | Listing
    | FetchContent
    | Credit
    | MemoryReport
    | MemoryAsked
)
_Order = Start | StopAttemptOrder | Read | More | Enough | List | MemoryOrder
ToAgent = Welcome | Refuse | Heard | Acknowledge | FilePart | _Order | MemoryAnswered


class AgentSide(Protocol):
    """Where the control plane's orders go."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes this agent serves; what it says of others does not count."""

    def send(self, message: ToAgent) -> None:
        """Pass an order on, in order; a repeated one changes nothing."""


class ControlSide(Protocol):
    """Where an agent's messages go."""

    def received(self, message: FromAgent, via: AgentSide) -> None:
        """Take a message in; a repeated one changes nothing. Answers go back the way it came."""


class _Greeting(Struct):
    """What any version of a greeting has."""

    protocol: int
    version: str = "of unknown version"


_encoder = msgspec.msgpack.Encoder()
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
_greeting = msgspec.msgpack.Decoder(_Greeting)


def encode(message: FromAgent | ToAgent) -> bytes:
    """The message as it travels."""
    return _encoder.encode(message)


def decode_from_agent(data: bytes) -> FromAgent:
    """What an agent said; ProtocolError for anything that is not a message of this protocol."""
    message = _decoded(data, _from_agent)
    if isinstance(message, Hello) and message.capacity is not None:
        _make_sure_of(message.capacity)
    if isinstance(message, Heartbeat):
        _make_sure_of_usage(message.usage)
    return message


def decode_to_agent(data: bytes) -> ToAgent:
    """What the control plane said; ProtocolError for anything that is not a message of this protocol."""
    return _decoded(data, _to_agent)


def greeting_of(data: bytes, *, mine: str, theirs: str) -> None:
    """Raise ProtocolError with what to upgrade, where a first message is of another protocol version."""
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
    if len(data) > LARGEST_MESSAGE:
        raise ProtocolError(f"a message of {len(data)} bytes is too large")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a message of this protocol: {error}") from None


def _make_sure_of(capacity: Capacity) -> None:
    """An agent may be wrong about its machine, but not absurd."""
    amounts = [capacity.cpu_milli, capacity.memory_bytes, *(count for _, count in capacity.custom)]
    amounts += [device.memory_bytes for device in capacity.gpus] + [device.index for device in capacity.gpus]
    if len(capacity.gpus) > 1024 or len(capacity.custom) > 1024 or capacity.cpu_milli > 10**9:
        raise ProtocolError("no machine has that much")
    if any(not 0 <= amount <= LARGEST_AMOUNT for amount in amounts):
        raise ProtocolError("no machine has that much")
    if len({device.index for device in capacity.gpus}) < len(capacity.gpus):
        raise ProtocolError("a GPU is named twice")


def _make_sure_of_usage(usage: Usage) -> None:
    milli = [usage.cpu_busy_milli, usage.cpu_outside_milli]
    sizes = [usage.memory_bytes, usage.memory_outside_bytes]
    for gpu in usage.gpus:
        milli += [gpu.busy_milli, gpu.all_busy_milli]
        sizes += [gpu.memory_bytes, gpu.all_memory_bytes]
    if any(not 0 <= one <= 1000 for one in milli) or any(not 0 <= one <= LARGEST_AMOUNT for one in sizes):
        raise ProtocolError("invalid measurement")
    if len(usage.gpus) > 1024:
        raise ProtocolError("no machine has that much")
