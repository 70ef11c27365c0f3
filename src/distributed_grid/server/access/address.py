"""The address of the REST port, and the rule that nobody's traffic crosses a network in the clear by accident."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from msgspec import Struct

from distributed_grid.errors import BadInput, GridError, Refused

PORT = 7433
BACKLOG = 1024
WILDCARDS = ("0.0.0.0", "::")
_SIOCGIFADDR = 0x8915


class Address(Struct, frozen=True):
    """Where to listen. `port` None is 7433, or another where that is taken and only this machine can tell;
    `tls` None is "as the address calls for"."""

    host: str = "127.0.0.1"
    port: int | None = None
    tls: bool | None = None
    force_plain: bool = False

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_wildcard(self) -> bool:
        return self.host in WILDCARDS

    @property
    def uses_tls(self) -> bool:
        """Whether traffic is encrypted; refuses to leave this machine in the clear unless forced."""
        if self.force_plain:
            return False
        if self.tls is not None and not self.tls and not self.is_local:
            raise Refused(f"{self.host} is reached from other machines: without TLS only with --force-plain")
        return not self.is_local if self.tls is None else self.tls

    def bind(self) -> socket.socket:
        """A socket that listens; a port that was named is used or the failure is told."""
        ports = [PORT, 0] if self.port is None and self.is_local else [PORT if self.port is None else self.port]
        for port in ports:
            try:
                return self._bind(port)
            except OSError as failure:
                if port is not ports[-1]:
                    continue
                at = text_of(self.host, port)
                raise GridError(f"cannot listen on {at}: {failure.strerror or failure}") from failure
        raise AssertionError("there is always a port to try")

    def _bind(self, port: int) -> socket.socket:
        found = socket.getaddrinfo(self.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        return listener


def parse_address(text: str, *, tls: bool | None = None, force_plain: bool = False) -> Address:
    """The address in `HOST:PORT`, `[V6]:PORT`, `HOST` or `:PORT` (all of this machine's)."""
    host, colon, port = text.rpartition(":")
    if not colon or (text.count(":") > 1 and not host.startswith("[")):
        host, port = text, ""
    if port and not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise BadInput(f"{text!r} is no address: expected HOST:PORT, such as 127.0.0.1:7433")
    host = host.strip("[]") or ("0.0.0.0" if colon else "")
    if not host or any(letter.isspace() or letter in "/@" for letter in host):
        raise BadInput(f"{text!r} is no address: expected HOST:PORT, such as 127.0.0.1:7433")
    address = Address(host, int(port) if port else None, tls, force_plain)
    assert address.uses_tls in (True, False)  # raises where plain traffic would leave this machine
    return address


def text_of(host: str, port: int) -> str:
    """Host and port as they stand in an address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_addresses() -> list[str]:
    """The IPv4 addresses of this machine that others might reach it by, interface by interface."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, asked)
            except OSError:  # an interface without an address
                continue
            address = socket.inet_ntoa(answer[20:24])
            if not address.startswith("127."):
                found.append(address)
    return found
