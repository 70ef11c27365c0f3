"""Client side of the control plane's protocol, without input or output: hello, requests, answers, when to retry.

The blocking and the asyncio client both drive it: they write the bytes it returns and pass it the bytes they read. A
request that was not answered is sent again with the same request id, so nothing happens twice.
"""

from __future__ import annotations

import json
import os
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from distributed_grid import __version__
from distributed_grid.api.framing import (
    JSON,
    MAX_REQUEST_BYTES,
    PROTOCOL,
    BrokenFrame,
    Unpacker,
    frame,
    non_finite_number,
)
from distributed_grid.errors import BadInput, Unreachable, error_from
from distributed_grid.state_dir import NO_CONFIG

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import UnsetType

    from distributed_grid.config import ClusterConfig

READ_BYTES = 1 << 18
MAX_ATTEMPTS = 20
MAX_LOSSES = 6
RETRY_SECONDS = 0.05
UNREADABLE = "unreadable"
MAX_CONFIG_BYTES = 1 << 20
T = TypeVar("T")
LOST = (ConnectionError, EOFError, BrokenFrame)
"""What says that a connection is gone; the request may be sent again over another one."""


class JsonObject(dict[str, Any]):
    """An object of an answer, with its fields as attributes; a field that it lacks is None.

    A field whose name no attribute can have is written with an underscore behind it (`for_`, `copy_`).
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            if name.startswith("_"):  # protocols of the interpreter, which no answer has
                raise AttributeError(name) from None
            return self.get(name.rstrip("_"))


def present(value: T | UnsetType | None) -> T | None:
    """The value of a field that an answer may lack, or None: the clients' answers have None there anyway."""
    return value  # type: ignore[return-value]


def required(value: T | UnsetType | None) -> T:
    """The value of a field that this answer always has."""
    assert value is not None
    return value  # type: ignore[return-value]


def as_object(answer: object) -> JsonObject:
    """A part of an answer as the dictionary that it is, for programs that read its fields by key."""
    return answer  # type: ignore[return-value]


def as_objects(answers: Sequence[object]) -> list[JsonObject]:
    return answers  # type: ignore[return-value]


Message = dict[str, Any]
Part = bytes | JsonObject
"""The content of a frame: raw bytes, or a JSON message."""
decode_answer = json.JSONDecoder(object_hook=JsonObject).decode


class HandedOver(ConnectionError):
    """The control plane we met leaves, so that one with our config or version can take over."""


class ClientConfig:
    """Which config a client asks for: named by the user, found by default, or none at all.

    The name `NO_CONFIG` is this machine alone, whatever files there are; a file of that name is `./none`.
    """

    def __init__(self, path: str | None = None, *, explicit: bool = False) -> None:
        is_file = path and path != NO_CONFIG
        self.path = os.path.abspath(os.path.expanduser(path)) if path and is_file else path or None
        self.explicit = explicit and path is not None

    def greeting_fields(self) -> Message:
        """Path and digest of the named config, and the variables that it needs of this environment.

        A file that cannot be read has the digest `UNREADABLE`: the control plane knows what that means for a command.
        """
        if not self.explicit or self.path is None:
            return {"config": None, "config_path": None}
        if self.path == NO_CONFIG:
            return {"config": NO_CONFIG, "config_path": NO_CONFIG}
        try:
            with open(self.path, "rb") as file:
                content = file.read(MAX_CONFIG_BYTES)
        except OSError:
            return {"config": UNREADABLE, "config_path": self.path}
        fields: Message = {"config": digest_of(content), "config_path": self.path}
        variables = config_variables(content)
        return fields | {"config_variables": variables} if variables else fields


def named_config(name: str) -> ClusterConfig:
    """The config that a user has named: that of a file, or of this machine alone."""
    import socket

    from distributed_grid.config import ClusterConfig  # heavy, and most commands need none

    return ClusterConfig.embedded(socket.gethostname()) if name == NO_CONFIG else ClusterConfig.from_yaml(name)


def config_variables(content: bytes) -> dict[str, str]:
    """The variables of this environment that a config file names."""
    if b"${" not in content:
        return {}
    from distributed_grid.posix.environment import named_variables  # most configs name none

    return named_variables(content.decode(errors="replace"), os.environ)


def digest_of(content: bytes) -> str:
    """SHA-256 digest of a config file's bytes."""
    import hashlib  # here, because most commands name no config

    return hashlib.sha256(content).hexdigest()


class Conversation:
    """The frames of one connection, in both directions; `welcome` is the answer to our hello."""

    def __init__(self) -> None:
        self._unpacker = Unpacker()
        self._frames: deque[tuple[bytes, bytes]] = deque()
        self.welcome = JsonObject()

    def receive(self, chunk: bytes) -> None:
        """Take in bytes that were read; none at all is the end of the connection and raises EOFError."""
        if not chunk:
            raise EOFError
        self._frames.extend(self._unpacker.feed(chunk))

    def next_part(self) -> tuple[bytes, Part] | None:
        """Kind and content of the next frame, or None where more bytes are needed; an error it carries is raised."""
        if not self._frames:
            return None
        kind, body = self._frames.popleft()
        return kind, check_answer(decode_answer(body.decode())) if kind == JSON else body

    def accept_welcome(self, welcome: Part) -> None:
        """Keep the answer to our hello; raises HandedOver where the control plane makes way for another."""
        self.welcome = answer_of(welcome)
        if self.welcome.get("handing_over"):
            raise HandedOver


def hello(config: ClientConfig, *, query_only: bool = False, any_config: bool = False) -> Message:
    """The first message of a connection: our version, the config that we require, and whether we only ask.

    With `any_config` the named config is not required: the command gives something back, or stops something.
    """
    named = config.greeting_fields()
    if any_config:
        named["config"] = None
    return {"op": "hello", "protocol": PROTOCOL, "version": __version__, **named, "query_only": query_only}


def encode(message: Message) -> bytes:
    """A message as a frame; BadInput where it has a number that is none, or is longer than the control plane takes."""
    try:
        body = json.dumps(message, allow_nan=False).encode()
    except ValueError as error:
        raise BadInput(f"invalid request: {non_finite_number(message) or error}") from None
    if len(body) > MAX_REQUEST_BYTES:
        raise BadInput(f"the request has {len(body):,} bytes, {MAX_REQUEST_BYTES:,} are allowed")
    return frame(JSON, body)


def check_answer(message: JsonObject) -> JsonObject:
    """The message, or the error it carries, raised."""
    error = message.get("error")
    if error is None:
        return message
    raise error_from(error)


def answer_of(part: Part) -> JsonObject:
    """The JSON message that an answer must be."""
    return part if isinstance(part, JsonObject) else check_answer(decode_answer(part.decode()))


def is_last(part: Part) -> bool:
    """Whether a part ends a stream: the JSON message with `"done": true`."""
    return isinstance(part, JsonObject) and bool(part.get("done"))


def no_answer() -> Unreachable:
    """The error of a call that was never answered."""
    return Unreachable("the control plane does not answer; see `grid daemon status`")


def connection_lost() -> Unreachable:
    """The error of a stream that was cut off."""
    return Unreachable("the connection to the control plane was lost")


class ReconnectBackoff:
    """How often a lost connection is made again before it is an error; receiving anything resets it."""

    def __init__(self) -> None:
        self._losses = 0

    def reset(self) -> None:
        self._losses = 0

    def delay_after(self, loss: Unreachable) -> float:
        """Seconds to wait before the next try; raises the loss when there were too many in a row."""
        self._losses += 1
        if self._losses > MAX_LOSSES:
            raise loss
        return RETRY_SECONDS * float(2**self._losses)
