"""TCP listener for REST and for agents that joined: address, TLS, and loading the HTTP server on demand.

- Until the first connection it costs a socket; what serves it is imported then, in a thread.
- Without TLS it listens on loopback only, unless that was forced.
- Where it listens is in `rest.json` (0600) while it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import logging
import socket
import struct
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.api.requests import KeepRunning
from distributed_grid.config.sections import ServerConfig
from distributed_grid.errors import BadInput, GridError, Refused
from distributed_grid.posix.peer_limits import LimitedListener
from distributed_grid.posix.private_files import write_private
from distributed_grid.server.access.admission import Admission, AdvertisedAddress
from distributed_grid.server.access.agent_sockets import AgentConnections, AgentMessageSink
from distributed_grid.server.access.tokens import TokenStore
from distributed_grid.server.services.auto_offload import AutoOffloadService
from distributed_grid.server.services.boosts import BoostService
from distributed_grid.server.services.jobs import JobService
from distributed_grid.server.services.leases import LeaseService
from distributed_grid.server.services.nodes import NodeService
from distributed_grid.server.services.offloading import OffloadingService
from distributed_grid.server.services.reports import ReportService
from distributed_grid.server.workers.agent_packages import AgentPackages
from distributed_grid.supervision import start_restarted

if TYPE_CHECKING:
    from fastapi import FastAPI

    from distributed_grid.server.access.agent_websocket import AgentWebSocket
    from distributed_grid.server.access.certificates import Certificate
    from distributed_grid.server.rest.app import UvicornServer


DEFAULT_PORT = 7433
LISTEN_BACKLOG = 1024
WILDCARDS = ("0.0.0.0", "::")
_SIOCGIFADDR = 0x8915
log = logging.getLogger(__name__)


class Address(Struct, frozen=True):
    """Where to listen. `port` None is 7433, or any free port where that is taken and the address is local;
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
        """A listening socket; a port that was named is used, or the failure raised."""
        default = DEFAULT_PORT if self.port is None else self.port
        ports = [default, 0] if self.port is None and self.is_local else [default]
        for port in ports:
            try:
                return self._bind(port)
            except UnicodeError:
                raise BadInput(f"{self.host!r} is no name of a host") from None
            except OSError as failure:
                if port is not ports[-1]:
                    continue
                at = host_port(self.host, port)
                raise GridError(f"cannot listen on {at}: {failure.strerror or failure}") from failure
        raise AssertionError("there is always a port to try")

    def _bind(self, port: int) -> socket.socket:
        found = socket.getaddrinfo(self.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(LISTEN_BACKLOG)
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


def host_port(host: str, port: int) -> str:
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


class RestServices(NamedTuple):
    """The services that answer REST requests."""

    nodes: NodeService
    leases: LeaseService
    boosts: BoostService
    jobs: JobService
    reports: ReportService
    packages: AgentPackages
    offloading: OffloadingService
    auto_offload: AutoOffloadService


class RestListener:
    """Listens for REST and for agents that joined. `stop` is safe to call twice."""

    def __init__(
        self,
        services: RestServices,
        folder: Path,
        settings: ServerConfig,
        *,
        configured: Iterable[str],
        agents: AgentMessageSink,
        on_request: Callable[[], None],
    ) -> None:
        self._services = services
        self._folder = folder
        self._settings = settings
        self._agents = agents
        self._on_request = on_request
        self._address = Address()
        self._listener: LimitedListener | None = None
        self._bound_to: tuple[str, int] = ("", 0)
        self._known_hosts: frozenset[str] = frozenset()
        self._certificate: Certificate | None = None
        self._server: UvicornServer | None = None
        self._loading: asyncio.Task[None] | None = None
        self._agent_connections = AgentConnections()
        self.admission = Admission(
            TokenStore(folder), configured=configured, advertised=self._advertised, disconnect=self._disconnect
        )

    async def start(self, owner: str) -> None:
        """Listen at the address of the last `listen`, else at that of the config."""
        self.admission.tokens.ensure_owner(owner)
        await self._open(self._saved_address() or self._configured_address())

    async def listen(self, op: KeepRunning) -> None:
        """Listen at another address from now on; if that fails, nothing changes and the reason is raised."""
        if not op.listen:
            return
        await self._open(parse_address(op.listen, tls=op.tls, force_plain=op.force_plain))
        self._write("listen.json", msgspec.json.encode(self._address))

    def forget(self) -> None:
        """The next control plane listens where the config says."""
        with contextlib.suppress(FileNotFoundError):
            (self._folder / "listen.json").unlink()

    async def stop(self) -> None:
        """Close the port and every connection through it."""
        with contextlib.suppress(FileNotFoundError):
            (self._folder / "rest.json").unlink()
        await self._close()

    @property
    def url(self) -> str | None:
        """Where this machine's own programs find it."""
        if self._listener is None:
            return None
        host, port = self._bound_to
        scheme = "https" if self._certificate else "http"
        return f"{scheme}://{host_port('127.0.0.1' if host in WILDCARDS else host, port)}"

    @property
    def is_busy(self) -> bool:
        is_loading = self._loading is not None and not self._loading.done()
        return is_loading or (self._server is not None and self._server.is_busy)

    async def _open(self, address: Address) -> None:
        if self._listener is not None and address == self._address:
            return
        certificate = await self._certificate_for(address)
        before = replace(self._address, port=self._bound_to[1]) if self._listener is not None else None
        await self._close()  # first: the new address may be another one of the same port
        try:
            listener = LimitedListener.of(address.bind(), self._settings.max_connections_per_peer)
        except GridError:
            if before is not None:
                await self._open(before)
            raise
        self._address, self._listener, self._certificate = address, listener, certificate
        self._bound_to = (address.host, listener.getsockname()[1])
        self._known_hosts = frozenset(name.lower() for name in ("localhost", "127.0.0.1", "::1", *self._names(address)))
        if address.force_plain and not address.is_local:
            log.warning("listening on %s WITHOUT TLS, as forced", host_port(*self._bound_to))
        self._write("rest.json", msgspec.json.encode(self._description()))
        asyncio.get_running_loop().add_reader(listener.fileno(), self._on_first_connection, listener)

    async def _close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener.fileno())
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
            self._loading = None
        if self._server is not None:
            await self._server.stop()
            self._server = None
        if listener is not None:
            listener.close()

    def _on_first_connection(self, listener: LimitedListener) -> None:
        """Load the HTTP server, and let it accept."""
        asyncio.get_running_loop().remove_reader(listener.fileno())
        self._loading = start_restarted(partial(self._serve, listener), "the start of REST")

    async def _serve(self, listener: LimitedListener) -> None:
        make_app, server_class = await asyncio.to_thread(_load_server)
        if self._listener is not listener:
            return
        files = (self._certificate.certificate, self._certificate.key) if self._certificate else None
        server = server_class(
            listener,
            make_app(
                self._services,
                self.admission,
                is_known_host=self._is_known_host,
                on_request=self._on_request,
            ),
            agent_endpoint=self._accept_agent,
            certificate=files,
        )
        server.start()
        self._server = server

    def _accept_agent(self) -> AgentWebSocket:
        from distributed_grid.server.access.agent_websocket import AgentWebSocket

        listener = self._listener

        def admitted(websocket: AgentWebSocket) -> None:
            self._agent_connections.add(websocket)
            if listener is not None:  # from now on it counts for its node: many nodes may share an address
                listener.limits.remove(websocket.descriptor)

        return AgentWebSocket(
            self._agents, self.admission.admit, on_admitted=admitted, on_close=self._agent_connections.discard
        )

    def _disconnect(self, node: str) -> None:
        self._agent_connections.close(node, "revoked")

    def _configured_address(self) -> Address:
        settings = self._settings
        host = "127.0.0.1" if settings.host == "local" else settings.host.strip("[]")
        return Address(host, settings.port, settings.tls, settings.force_plain)

    def _saved_address(self) -> Address | None:
        try:
            return msgspec.json.decode((self._folder / "listen.json").read_bytes(), type=Address)
        except (OSError, msgspec.DecodeError):
            return None

    async def _certificate_for(self, address: Address) -> Certificate | None:
        if not address.uses_tls:
            return None

        def make() -> Certificate:
            from distributed_grid.server.access.certificates import ensure_certificate, load_certificate

            mine, key = self._settings.certificate, self._settings.key
            if mine and key:
                return load_certificate(Path(mine).expanduser(), Path(key).expanduser())
            return ensure_certificate(self._folder, self._names(address))

        return await asyncio.to_thread(make)

    def _names(self, address: Address) -> list[str]:
        """Every name that this port is reached by."""
        hosts = own_addresses() if address.is_wildcard else [address.host]
        return list(dict.fromkeys([*self._settings.names, *hosts, socket.gethostname()]))

    def _is_known_host(self, name: str) -> bool:
        if name in self._known_hosts:
            return True
        if self._address.is_wildcard:
            with contextlib.suppress(ValueError):  # a page cannot make an address its own, only a name
                return bool(ipaddress.ip_address(name))
        return False

    def _advertised(self) -> AdvertisedAddress:
        """The addresses that other machines may try, best first."""
        hosts = [*self._settings.names, *(own_addresses() if self._address.is_wildcard else [self._address.host])]
        addresses = tuple(host_port(host, self._bound_to[1]) for host in dict.fromkeys(hosts))
        return AdvertisedAddress(addresses, self._certificate.fingerprint if self._certificate else "")

    def _description(self) -> dict[str, Any]:
        fingerprint = self._certificate.fingerprint if self._certificate else None
        return {"url": self.url, "host": self._bound_to[0], "port": self._bound_to[1], "fingerprint": fingerprint}

    def _write(self, name: str, content: bytes) -> None:
        write_private(self._folder / name, content, durable=False)


def _load_server() -> tuple[Callable[..., FastAPI], type[UvicornServer]]:
    """The application and its server, with everything they import: a second and 40 MB."""
    from distributed_grid.server.rest.app import UvicornServer, make_app

    return make_app, UvicornServer
