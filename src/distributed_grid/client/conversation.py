"""Client side of the control plane's protocol, without input or output: hello, requests, answers, when to retry.

The blocking and the asyncio client both drive it: they write the bytes it returns and pass it the bytes they read. A
request that was not answered is sent again with the same request id, so nothing happens twice.
"""

from __future__ import annotations

import json
import os
from collections import deque
from typing import Any

from distributed_grid import __version__
from distributed_grid.api.framing import JSON, MAX_REQUEST_BYTES, PROTOCOL, BrokenFrame, Unpacker, frame
from distributed_grid.errors import BadInput, Unreachable, error_from

READ_BYTES = 1 << 18
MAX_ATTEMPTS = 20
MAX_LOSSES = 6
RETRY_SECONDS = 0.05
LOST = (ConnectionError, EOFError, BrokenFrame)
"""What says that a connection is gone; the request may be sent again over another one."""

Message = dict[str, Any]
Part = bytes | Message
"""The content of a frame: raw bytes, or a JSON message."""


class HandedOver(ConnectionError):
    """The control plane we met leaves, so that one with our config or version can take over."""


class ClientConfig:
    """Which config a client asks for: named by the user, found by default, or none at all."""

    def __init__(self, path: str | None = None, *, explicit: bool = False) -> None:
        self.path = os.path.abspath(os.path.expanduser(path)) if path else None
        self.explicit = explicit and path is not None

    @property
    def digest(self) -> str | None:
        """What identifies the content of the file."""
        return file_digest(self.path) if self.path else None


def file_digest(path: str) -> str:
    """The digest of a config file."""
    try:
        with open(path, "rb") as file:
            return digest_of(file.read())
    except OSError as failure:
        raise BadInput(f"cannot read the config {path}: {failure.strerror}") from failure


def digest_of(content: bytes) -> str:
    """The digest of a config file's bytes; nobody can make two files with the same."""
    import hashlib  # here, because most commands name no config

    return hashlib.sha256(content).hexdigest()


class Conversation:
    """The frames of one connection, in both directions; `welcome` is the answer to our hello."""

    def __init__(self) -> None:
        self._unpacker = Unpacker()
        self._frames: deque[tuple[bytes, bytes]] = deque()
        self.welcome: Message = {}

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
        return kind, check_answer(json.loads(body)) if kind == JSON else body

    def accept_welcome(self, welcome: Part) -> None:
        """Keep the answer to our hello; raises HandedOver where the control plane makes way for another."""
        self.welcome = answer_of(welcome)
        if self.welcome.get("handing_over"):
            raise HandedOver


def hello(config: ClientConfig, *, query_only: bool = False) -> Message:
    """The first message of a connection: who we are, which config we require, and whether we only ask."""
    return {
        "op": "hello",
        "protocol": PROTOCOL,
        "version": __version__,
        "config": config.digest if config.explicit else None,
        "config_path": config.path if config.explicit else None,
        "query_only": query_only,
    }


def encode(message: Message) -> bytes:
    """A message as a frame; BadInput where it is longer than the control plane takes."""
    body = json.dumps(message).encode()
    if len(body) > MAX_REQUEST_BYTES:
        raise BadInput(f"the request has {len(body):,} bytes, {MAX_REQUEST_BYTES:,} are allowed")
    return frame(JSON, body)


def check_answer(message: Message) -> Message:
    """The message, or the error it carries, raised."""
    error = message.get("error")
    if error is None:
        return message
    raise error_from(error)


def answer_of(part: Part) -> Message:
    """The JSON message that an answer must be."""
    return part if isinstance(part, dict) else check_answer(json.loads(part))


def is_last(part: Part) -> bool:
    """Whether a part ends a stream: the JSON message with `"done": true`."""
    return isinstance(part, dict) and bool(part.get("done"))


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
