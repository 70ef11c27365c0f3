"""A command on a terminal of its own, as a person has it: a pseudo-terminal that can be resized and closed."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
import time
from pathlib import Path


class Terminal:
    """A command in a new session whose terminal this is. Closing it is what a terminal window or sshd does."""

    def __init__(self, command: list[str], cwd: Path, env: dict[str, str], *, columns: int = 80) -> None:
        self.shown = b""
        self.exit_code: int | None = None
        self.pid, self._master = pty.fork()
        if self.pid == 0:  # pragma: no cover, another process
            try:
                os.chdir(cwd)
                _set_columns(0, columns)
                os.execvpe(command[0], command, env)
            finally:
                os._exit(127)

    def resize(self, columns: int) -> None:
        _set_columns(self._master, columns)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read_until(self, text: bytes, count: int = 1, seconds: float = 30.0) -> bytes:
        """Everything that was shown, once it contains this text so often; AssertionError where it does not come."""
        deadline = time.monotonic() + seconds
        while self.shown.count(text) < count:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} was not shown: {self.shown!r}"
            if select.select([self._master], [], [], left)[0]:
                assert self._read(), f"the command ended without {text!r}: {self.shown!r}"
        return self.shown

    def read_to_end(self) -> bytes:
        """Everything that was shown, once the command has ended."""
        while self._read():
            pass
        self.wait()
        return self.shown

    def _read(self) -> bool:
        try:
            chunk = os.read(self._master, 65536)
        except OSError:  # nobody holds the other end
            return False
        self.shown += chunk
        return bool(chunk)

    def close(self) -> None:
        """Close the window: whoever runs in it gets SIGHUP, and every later write fails."""
        if self._master >= 0:
            os.close(self._master)
            self._master = -1

    def wait(self, seconds: float = 30.0) -> int:
        """The exit code of the command; that of one that a signal has ended is negative."""
        descriptor = os.pidfd_open(self.pid) if self.exit_code is None else -1
        if self.exit_code is None:
            try:
                assert select.select([descriptor], [], [], seconds)[0], "the command has not ended"
                self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            finally:
                os.close(descriptor)
        return self.exit_code


def _set_columns(descriptor: int, columns: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
