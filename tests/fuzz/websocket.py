"""WebSocket frames as bytes, for both ends: also frames that a library would refuse to send."""

from __future__ import annotations

import base64
import hashlib
import socket
import struct

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
UPGRADE = (
    b"GET /v1/agent HTTP/1.1\r\nHost: grid\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def frame(payload: bytes, opcode: int = BINARY, *, masked: bool, fin: bool = True) -> bytes:
    """One frame; clients mask theirs, here with zeros."""
    mask, bit = (bytes(4), 0x80) if masked else (b"", 0)
    size = len(payload)
    if size < 126:
        length = bytes([bit | size])
    elif size < 65_536:
        length = bytes([bit | 126]) + struct.pack(">H", size)
    else:
        length = bytes([bit | 127]) + struct.pack(">Q", size)
    return bytes([(0x80 if fin else 0) | opcode]) + length + mask + payload


class FrameReader:
    """Splits what the other end sends into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames that are complete now, as opcode and payload."""
        self._data += data
        found = []
        while (one := self._next()) is not None:
            found.append(one)
        return found

    def _next(self) -> tuple[int, bytes] | None:
        data = self._data
        if len(data) < 2:
            return None
        at, size = 2, data[1] & 0x7F
        if size >= 126:
            at = 4 if size == 126 else 10
            if len(data) < at:
                return None
            size = int.from_bytes(data[2:at], "big")
        mask = b""
        if data[1] & 0x80:
            mask = bytes(data[at : at + 4])
            at += 4
        if len(data) < at + size:
            return None
        opcode, payload = data[0] & 0x0F, bytes(data[at : at + size])
        del data[: at + size]
        return opcode, _unmasked(payload, mask)


def _unmasked(payload: bytes, mask: bytes) -> bytes:
    if not mask or not payload:
        return payload
    key = (mask * (len(payload) // 4 + 1))[: len(payload)]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(key, "big")).to_bytes(len(payload), "big")


def read_head(sock: socket.socket) -> bytes:
    """An HTTP head, to its empty line; its beginning if the other end closes."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        one = sock.recv(1)
        if not one:
            return data
        data += one
    return data


def accept_upgrade(sock: socket.socket) -> None:
    """Answer the request of a client; ConnectionError where it is none."""
    for line in read_head(sock).split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"sec-websocket-key":
            digest = base64.b64encode(hashlib.sha1(value.strip() + GUID, usedforsecurity=False).digest())
            sock.sendall(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Accept: " + digest + b"\r\n\r\n"
            )
            return
    raise ConnectionError("no upgrade was asked for")
