"""Framing of the control plane's Unix socket: frames of JSON and of raw output.

A frame is a 4-byte length, one letter, and the body: `J` is a JSON message, `O` and `E` are bytes of a job's stdout and
stderr. Only the standard library is imported here: every command imports this file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

PROTOCOL = 2
MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_REQUEST_BYTES = 16 * 1024 * 1024
JSON, STDOUT, STDERR = b"J", b"O", b"E"
_HEAD = struct.Struct(">I1s")


class BrokenFrame(Exception):
    """The other side sent an invalid frame."""


def frame(kind: bytes, body: bytes) -> bytes:
    return frame_head(kind, len(body)) + body


def frame_head(kind: bytes, size: int) -> bytes:
    return _HEAD.pack(size, kind)


class Unpacker:
    """Splits a stream of bytes into frames, however the bytes arrive."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._bytes = bytearray()
        self._max_bytes = max_bytes

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The frames that are complete with this chunk."""
        self._bytes += chunk
        start = 0
        try:
            while len(self._bytes) - start >= _HEAD.size:
                length, kind = _HEAD.unpack_from(self._bytes, start)
                if length > self._max_bytes or kind not in (JSON, STDOUT, STDERR):
                    raise BrokenFrame(f"invalid frame: {length} bytes of kind {kind!r}")
                end = start + _HEAD.size + length
                if len(self._bytes) < end:
                    break
                yield kind, bytes(self._bytes[start + _HEAD.size : end])
                start = end
        finally:
            del self._bytes[:start]


def non_finite_number(value: object, path: str = "") -> str:
    """`amount must be a finite number, not nan` for the first number in a message that JSON cannot carry, else ""."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{path or 'the number'} must be a finite number, not {value:g}"
    parts: list[tuple[str, object]] = []
    if isinstance(value, dict):
        parts = [(f"{path}.{key}" if path else str(key), part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{path}[{place}]", part) for place, part in enumerate(value)]
    return next(filter(None, (non_finite_number(part, name) for name, part in parts)), "")
