"""Open sockets of this network namespace: which listen, which are connected, and the peers of Unix sockets.

Read from the kernel's tables, by inode; whose they are is found by the descriptors of processes.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field
from ipaddress import ip_address

MAX_TABLE_BYTES = 16 << 20
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLMSG_ERROR, _NLMSG_DONE = 4, 20, 2, 3
_REQUEST_DUMP = 0x301
_SHOW_PEER, _UNIX_DIAG_PEER, _ANY = 0x4, 2, 0xFFFFFFFF
_HEADER, _MESSAGE = struct.Struct("=IHHII"), struct.Struct("=BBBBIII")
_TCP_LISTEN, _NO_CONNECTION = b"0A", frozenset({b"07", b"06"})  # closed, and waiting for late packets
_UNIX_LISTENS, _UNIX_CONNECTED = 0x10000, b"03"


@dataclass(slots=True)
class OpenSockets:
    """The sockets of this machine by inode.

    `listening` has their addresses in words. Of `unix_peers` the value is the inode at the other end, or None where the
    kernel does not say it.
    """

    listening: dict[int, str] = field(default_factory=dict)
    connected: set[int] = field(default_factory=set)
    unix_peers: dict[int, int | None] = field(default_factory=dict)


def read_open_sockets(proc: str = "/proc") -> OpenSockets:
    """All sockets now. A table that this kernel does not have is empty."""
    found = OpenSockets()
    for name in ("tcp", "tcp6"):
        for state, local, remote, inode in _inet_rows(f"{proc}/net/{name}"):
            if state == _TCP_LISTEN:
                found.listening[inode] = f"tcp {_address(local)}"
            elif state not in _NO_CONNECTION and not remote.endswith(b":0000"):
                found.connected.add(inode)
    for name in ("udp", "udp6"):
        for _, local, remote, inode in _inet_rows(f"{proc}/net/{name}"):
            if not remote.endswith(b":0000"):
                found.connected.add(inode)
            elif not local.endswith(b":0000"):
                found.listening[inode] = f"udp {_address(local)}"
    peers = _unix_peers()
    for line in _lines(f"{proc}/net/unix"):
        columns = line.split(maxsplit=7)
        inode = int(columns[6])
        path = columns[7].decode(errors="replace") if len(columns) > 7 else ""
        if int(columns[3], 16) & _UNIX_LISTENS:
            found.listening[inode] = f"unix {path}".rstrip()
        elif columns[5] == _UNIX_CONNECTED:
            found.unix_peers[inode] = peers.get(inode)
    return found


def _inet_rows(path: str) -> list[tuple[bytes, bytes, bytes, int]]:
    """State, local and remote address, and inode; sockets without one belong to nobody any more."""
    rows = (line.split(maxsplit=10) for line in _lines(path))
    return [(row[3], row[1], row[2], int(row[9])) for row in rows if row[9] != b"0"]


def _lines(path: str) -> list[bytes]:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_TABLE_BYTES).splitlines()[1:]
    except OSError:
        return []


def _address(text: bytes) -> str:
    """An address of the kernel's tables in words: words of 32 bits in the machine's own order, and the port."""
    host, _, port = text.decode().partition(":")
    words = (int(host[at : at + 8], 16) for at in range(0, len(host), 8))
    address = ip_address(b"".join(struct.pack("=I", word) for word in words))
    shown = "*" if address.is_unspecified else f"[{address}]" if address.version == 6 else str(address)
    return f"{shown}:{int(port, 16)}"


def _unix_peers() -> dict[int, int]:
    """The other ends of connected Unix sockets; none where the kernel has no such dump."""
    peers: dict[int, int] = {}
    ask = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, _ANY, 0, _SHOW_PEER, _ANY, _ANY)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as link:
            link.settimeout(1.0)
            link.send(_HEADER.pack(_HEADER.size + len(ask), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + ask)
            while _take_peers(link.recv(1 << 18), peers):
                pass
    except OSError:
        return {}
    return peers


def _take_peers(data: bytes, peers: dict[int, int]) -> bool:
    """Take in one datagram of a dump; whether more will come."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < _HEADER.size:
            return False
        if kind == _SOCK_DIAG_BY_FAMILY:
            inode = _MESSAGE.unpack_from(data, at + _HEADER.size)[4]
            part = at + _HEADER.size + _MESSAGE.size
            while part + 4 <= at + length:
                size, name = struct.unpack_from("=HH", data, part)
                if name == _UNIX_DIAG_PEER and size >= 8:
                    peers[inode] = struct.unpack_from("=I", data, part + 4)[0]
                part += max((size + 3) & ~3, 4)
        at += (length + 3) & ~3
    return True
