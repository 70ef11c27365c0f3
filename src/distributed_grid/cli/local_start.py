"""Start of a wrapped command on this machine, unless the control plane advises that it starts elsewhere.

Only what every interpreter has loaded is imported here, and C modules: not json, socket, signal or typing, each of
which takes about half as long as an interpreter. So the two messages that are sent are written out, and of the answer
one field is looked for: a quotation mark inside a text is escaped in JSON, so what is found is a key. Nothing here
starts a control plane, and whatever goes wrong means: start it here.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # it has no stub
import _socket
import os
import stat
import sys
import time

from distributed_grid import __version__
from distributed_grid.state_dir import StateDir

TYPE_CHECKING = False  # without importing typing
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

ADVICE_SECONDS = 0.2  # so long the control plane has to answer, all in all
MAX_COMMAND_BYTES = 128 * 1024  # a longer command starts here, unasked
MAX_ANSWER_BYTES = 4 * 1024 * 1024
MAX_PATH_BYTES = 100
PROTOCOL = 2  # that of `api/framing.py`, which this module is too light to import
NOT_EXECUTABLE, NOT_FOUND = 126, 127
NULL_DEVICE = os.makedev(1, 3)
SEPARATOR, NO_INPUT = "--", "--no-input"
ELSEWHERE = b'"elsewhere":true'


def start_if_local(words: Sequence[str]) -> None:
    """Become the command that was given to `offload wrap`, if it starts here. Returns where it may start elsewhere, and
    for options that only the whole command line understands."""
    command, reads_input = plain_command(words)
    if not command:
        return
    try:
        if reason_to_stay(os.environ, reads_input=reads_input) or not is_advised_elsewhere(command, StateDir()):
            exec_here(command)
    except KeyboardInterrupt:
        os._exit(130)


def plain_command(words: Sequence[str]) -> tuple[list[str], bool]:
    """The command, and whether it may read its standard input; no command where other options come first."""
    rest, reads_input = list(words), True
    if rest[:1] == [NO_INPUT]:
        reads_input = False
        del rest[0]
    if rest[:1] == [SEPARATOR]:
        return rest[1:], reads_input
    return ([] if rest and rest[0].startswith("-") and rest[0] != "-" else rest), reads_input


def reason_to_stay(environment: Mapping[str, str], *, reads_input: bool = True) -> str:
    """Why a command has to start here, whatever the control plane says; empty where it may start elsewhere.

    The standard input of a command does not travel, so only one that has nothing to read may leave.
    """
    if "GRID_JOB_ID" in environment:
        return "this is inside a job"
    if not reads_input:
        return ""
    try:
        status = os.fstat(0)
    except OSError:  # it is closed
        return ""
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == NULL_DEVICE:
        return ""
    kind = "a terminal" if os.isatty(0) else "a pipe" if stat.S_ISFIFO(status.st_mode) else "a file, socket or device"
    return f"its standard input is {kind}"


def is_advised_elsewhere(command: Sequence[str], state_dir: StateDir) -> bool:
    """Whether the control plane answers in time, and advises to start this command elsewhere."""
    try:
        request = request_frames(command)
        if len(request) > MAX_COMMAND_BYTES:
            return False
        return ELSEWHERE in _answers(state_dir.socket, request)
    except (OSError, ValueError):  # nobody there, too late, or words that are no UTF-8
        return False


def exec_here(command: Sequence[str], environment: Mapping[str, str] | None = None) -> NoReturn:
    """Become this command; where that is impossible, exit with the code that a shell has for it."""
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # ignored by the interpreter, which the command is none of
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), os.environ if environment is None else environment)
    except (OSError, ValueError) as failure:
        missing = isinstance(failure, (FileNotFoundError, NotADirectoryError))
        reason = "not found" if missing else getattr(failure, "strerror", None) or str(failure)
        print(f"grid: {command[0]!a}: {reason}", file=sys.stderr, flush=True)
        os._exit(NOT_FOUND if missing else NOT_EXECUTABLE)


def request_frames(command: Sequence[str]) -> bytes:
    """A hello that changes nothing, and the question."""
    hello = f'{{"op":"hello","protocol":{PROTOCOL},"version":{_text(__version__)},"query_only":true}}'
    origin = os.environ.get("GRID_NODE", "")
    words = ",".join(map(_text, command))
    question = f'{{"op":"advise_command","argv":[{words}],"origin":{_text(origin)}}}'
    return b"".join(len(body).to_bytes(4, "big") + b"J" + body for body in (hello.encode(), question.encode()))


def _text(text: str) -> str:
    return (
        '"'
        + "".join(letter if letter >= " " and letter not in '"\\' else f"\\u{ord(letter):04x}" for letter in text)
        + '"'
    )


def _answers(path: str, request: bytes) -> bytes:
    """Send both messages; the answer to the second. OSError where it does not come in time, or not from our user."""
    deadline = time.monotonic() + ADVICE_SECONDS
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.settimeout(ADVICE_SECONDS)
        _connect(connection, path)
        peer = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
        if int.from_bytes(peer[4:8], sys.byteorder) not in (os.geteuid(), 0):
            raise PermissionError("the socket belongs to another user")
        connection.sendall(request)
        _read_frame(connection, deadline)
        return _read_frame(connection, deadline)
    finally:
        connection.close()


def _connect(connection: _socket.socket, path: str) -> None:
    if len(os.fsencode(path)) < MAX_PATH_BYTES:
        connection.connect(path)
        return
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)


def _read_frame(connection: _socket.socket, deadline: float) -> bytes:
    size = int.from_bytes(_read(connection, 5, deadline)[:4], "big")
    if size > MAX_ANSWER_BYTES:
        raise OSError("too long an answer")
    return _read(connection, size, deadline)


def _read(connection: _socket.socket, size: int, deadline: float) -> bytes:
    parts = b""
    while len(parts) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        chunk = connection.recv(size - len(parts))
        if not chunk:
            raise ConnectionResetError
        parts += chunk
    return parts
