"""Child processes of the control plane, one for SSH and one for Ray: both ends of the connection to them.

The child owns no state: it takes commands, reports, and ends when the connection closes. The owner of a `ChildProcess`
sends the desired state again to each new child. Messages are msgpack, each after its length.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from distributed_grid.errors import Refused, Unreachable
from distributed_grid.log_rate_limit import configure_logging
from distributed_grid.posix.environment import child_environment
from distributed_grid.posix.sockets import short_path
from distributed_grid.supervision import start_restarted

MAX_FRAME_BYTES = 64 * 1024 * 1024
FIRST_PAUSE, MAX_PAUSE = 0.5, 15.0
STABLE_SECONDS, EXIT_SECONDS = 60.0, 3.0
STDIO = "stdio"
log = logging.getLogger(__name__)
Say = Callable[[str], None]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
MAX_TEXT_CHARS = 8192
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
MAX_NAME_CHARS = 256
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
Number = Annotated[int, Meta(ge=0, lt=2**62)]
FilePath = Annotated[str, Meta(max_length=4096)]
Seconds = Annotated[float, Meta(ge=-1e10, le=1e10)]
Environ = Annotated[dict[Name, Annotated[str, Meta(max_length=131072)]], Meta(max_length=1000)]
_encoder = msgspec.msgpack.Encoder()
_LENGTH = struct.Struct(">I")


class ChildCommand(Struct, frozen=True, tag=True):
    """Base of commands to a child. Every field has a bound in its type; an excess is refused at the sender, since a
    child that cannot read a command ends, and so would each one after it."""


class Report(Struct, frozen=True, tag=True):
    """Base of a child's reports. A report may carry foreign text, so every field has a bound in its type; longer text
    is cut where the report is made."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) is str and len(value) > MAX_TEXT_CHARS:
                force_setattr(self, name, value[: MAX_TEXT_CHARS - 1] + "…")


class StepDone(Report, frozen=True):
    """A request has come to this step."""

    number: Number
    step: Text


class ChildAnswer(Report, frozen=True):
    """Base of the reports that finish the request of this number."""

    number: Number


T = TypeVar("T")
A = TypeVar("A", bound=ChildAnswer)


def encode_frame(message: Report) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def encode_command(command: ChildCommand, commands: msgspec.msgpack.Decoder[Any]) -> bytes:
    """A command as it travels. Raises Refused for one that the child could not read."""
    body = _encoder.encode(command)
    try:
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"{len(body):,} bytes, {MAX_FRAME_BYTES:,} are allowed")
        commands.decode(body)
    except (ValueError, RecursionError) as beyond:
        raise Refused(f"{type(command).__name__} is beyond its limits: {beyond}") from None
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """The next message; None when the connection has ended. Raises ValueError for anything but a message."""
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {size} bytes is larger than {MAX_FRAME_BYTES}")
        return decoder.decode(await reader.readexactly(size))
    except (msgspec.DecodeError, RecursionError) as broken:
        raise ValueError(f"not a message of this protocol: {broken}") from None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


# ---------------------------------------------------------------- the parent's side


class _Request(Struct):
    command: ChildCommand
    on_step: Say
    answer: asyncio.Future[ChildAnswer]
    resend: bool


class ChildProcess(Generic[T]):
    """One child after the other, the next at growing intervals; `T` is the union of its reports.

    `on_connect` is called when there is a new child, `on_exit` when it is gone (with the reason where it could not be
    started), `min_pause` says how long to wait at least before the next one. Nothing but `write` reaches a child
    before `mark_ready`.
    """

    def __init__(
        self,
        module: str,
        commands: msgspec.msgpack.Decoder[Any],
        reports: msgspec.msgpack.Decoder[T],
        *,
        label: str,
        on_connect: Callable[[], None],
        on_report: Callable[[T], None],
        on_exit: Callable[[str], None],
        min_pause: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._module, self._label = module, label
        self._commands, self._reports = commands, reports
        self._on_connect, self._on_report, self._on_exit = on_connect, on_report, on_exit
        self._min_pause = min_pause
        self._requests: dict[int, _Request] = {}
        self._numbers = itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._is_ready = False
        self._retry_now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_started(self) -> bool:
        return self._task is not None

    def start(self) -> None:
        """Keep a child running; starting twice changes nothing."""
        if self._task is None:
            self.restart()

    def restart(self, socket_path: str = "") -> None:
        """Begin with a new child: a process of this machine, or the one behind this Unix socket."""
        before = self._task
        if before is not None:
            before.cancel()
        self._task = start_restarted(partial(self._run, before, socket_path), f"the {self._label} process")

    def retry(self) -> None:
        """Start the next child without a pause: the reason of the last failure is gone."""
        self._retry_now.set()

    async def stop(self) -> None:
        """End the child. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def write(self, command: ChildCommand) -> None:
        """Send a command, if there is a child. One that it could not read is left out, and that is logged."""
        if self._writer is None:
            return
        try:
            self._writer.write(encode_command(command, self._commands))
        except Refused as refused:
            log.error("not sent to the %s process: %s", self._label, refused)

    def mark_ready(self, desired_state: Iterable[ChildCommand]) -> None:
        """The child is ready: send it the desired state, then waiting requests, then all later commands."""
        self._is_ready = True
        for command in (*desired_state, *(request.command for request in self._requests.values())):
            self.write(command)

    def send(self, command: ChildCommand) -> None:
        """Send a command to a child that is ready; without one it is dropped."""
        if self._is_ready:
            self.write(command)

    async def request(
        self,
        answer: type[A],
        command: Callable[[int], ChildCommand],
        *,
        seconds: float | None = None,
        on_step: Say = lambda step: None,
        resend: bool = False,
    ) -> A:
        """The answer to a numbered command, which waits for a child that is ready. Raises TimeoutError.

        When the child is lost, it raises Unreachable; with `resend` the next child gets the command again instead. A
        command that the child could not read is Refused.
        """
        number = next(self._numbers)
        asked = command(number)
        encode_command(asked, self._commands)
        request = _Request(asked, on_step, asyncio.get_running_loop().create_future(), resend)
        self._requests[number] = request
        try:
            self.send(request.command)
            async with asyncio.timeout(seconds):
                report = await request.answer
        finally:
            del self._requests[number]
        assert isinstance(report, answer)
        return report

    async def _run(self, before: asyncio.Task[None] | None, socket_path: str) -> None:
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        loop, pause = asyncio.get_running_loop(), FIRST_PAUSE
        while True:
            began = loop.time()
            self._retry_now.clear()
            try:
                async with _connected(socket_path) if socket_path else _started(self._module) as (reader, writer):
                    await self._exchange(reader, writer)
            except OSError as failure:
                log.error("the %s process could not be started: %s", self._label, failure)
                self._on_exit(f"its process could not be started: {failure}")
            if loop.time() - began > STABLE_SECONDS:
                pause = FIRST_PAUSE
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(pause, self._min_pause())):
                    await self._retry_now.wait()
            pause = min(2 * pause, MAX_PAUSE)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send and receive until either side ends the connection."""
        self._writer = writer
        try:
            self._on_connect()
            while (report := await read_frame(reader, self._reports)) is not None:
                if not isinstance(report, StepDone | ChildAnswer):
                    self._on_report(report)
                elif (asked := self._requests.get(report.number)) is None:
                    continue
                elif isinstance(report, StepDone):
                    asked.on_step(report.step)
                elif not asked.answer.done():
                    asked.answer.set_result(report)
        except (OSError, ValueError) as failure:
            log.error("the %s process broke off: %s", self._label, failure)
        finally:
            self._writer, self._is_ready = None, False
            for request in self._requests.values():
                if not request.resend and not request.answer.done():
                    request.answer.set_exception(
                        Unreachable(f"the {self._label} process ended while it worked; try again")
                    )
            self._on_exit("")


@asynccontextmanager
async def _connected(path: str) -> AsyncIterator[Streams]:
    """A connection to the child behind a socket; closing it ends the child."""
    with short_path(path) as short:
        reader, writer = await asyncio.open_unix_connection(short)
        try:
            yield reader, writer
        finally:
            writer.close()


@asynccontextmanager
async def _started(module: str) -> AsyncIterator[Streams]:
    """`python -m module DESCRIPTOR` and the connection to it; closing that ends it, one that stays is killed."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            str(theirs.fileno()),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            cwd="/",
            env=child_environment(),
            start_new_session=True,
        )
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ProcessLookupError):
            try:
                async with asyncio.timeout(EXIT_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


# ---------------------------------------------------------------- the child's side


def run_child(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
    """Serve the control plane on the descriptor that the only argument names, or on `stdio`, until that closes."""
    configure_logging(logging.StreamHandler())
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def serve_and_exit() -> None:
        if sys.argv[1] == STDIO:
            # nothing else uses standard input and output from now on: prints of libraries go to standard error
            loop = asyncio.get_running_loop()
            out = os.fdopen(os.dup(1), "wb", buffering=0)
            os.dup2(2, 1)
            reader = asyncio.StreamReader()
            await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(0), "rb", buffering=0)
            )
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, out)
            streams = reader, asyncio.StreamWriter(transport, protocol, reader, loop)
        else:
            end = socket.socket(fileno=int(sys.argv[1]))
            end.setblocking(False)
            end.set_inheritable(False)
            streams = await asyncio.open_unix_connection(sock=end)
        await serve(*streams)
        logging.shutdown()
        os._exit(0)  # at once: the next child repeats unfinished work

    asyncio.run(serve_and_exit())
