"""Standard streams of a command. Output that cannot be written is an error of one line, never a bug, and a descriptor
that was closed before the start is not reused for a socket or a file."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any, TextIO

from distributed_grid.errors import GridError

HANGUP_ERRNOS = (errno.EIO, errno.ENXIO)  # errors of a write to a terminal that has closed
HANGUP_EXIT_CODE = 128 + 1


class HungUp(BaseException):
    """The terminal of this command has closed. Not an Exception, because a signal may raise it anywhere."""


class OutputFailed(GridError):
    """The standard output takes no more bytes: a full disk, for instance."""


class OutputFile(io.FileIO):
    """Descriptor of a standard stream. A failed write raises HungUp where the stream was a terminal, BrokenPipeError
    where the reader has gone, and OutputFailed for the rest; a write to a pipe or terminal that is set to non-blocking
    waits."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._was_terminal = self.isatty()  # one that has closed is none any more

    def write(self, data: Any, /) -> int:
        try:
            while (count := super().write(data)) is None:
                import select  # rare: another process has made the pipe or terminal non-blocking

                select.select((), (self,), ())
        except BrokenPipeError:
            raise
        except OSError as failure:
            if self._was_terminal and failure.errno in HANGUP_ERRNOS:
                raise HungUp from failure
            raise OutputFailed(f"cannot write the output: {failure.strerror}") from failure
        return count


def guard_standard_streams() -> None:
    """Open the standard streams that are closed, and replace both outputs by ones that raise as `OutputFile` does.

    The replacements of closed descriptors fail as those would, and are not inherited by other programs.
    """
    for descriptor, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)  # the lowest free descriptor, which is this one
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115, open until the end
    if sys.stdout is sys.__stdout__:  # else a test has replaced it
        sys.stdout = _guarded(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _guarded(2, sys.stderr)


def _guarded(descriptor: int, stream: TextIO | None) -> TextIO:
    buffer = io.BufferedWriter(OutputFile(descriptor))
    if stream is None:
        return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace")
    line_buffering = getattr(stream, "line_buffering", False)
    return io.TextIOWrapper(buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=line_buffering)


def print_message(text: str, end: str = "\n") -> None:
    """Print to stderr. A message that cannot be written is dropped."""
    with contextlib.suppress(HungUp, OutputFailed, OSError):
        print(text, end=end, file=sys.stderr, flush=True)


def flush_standard_streams() -> None:
    """Flush the buffers; unwritable rests are dropped, so that nothing is written again at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (HungUp, OutputFailed, OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
