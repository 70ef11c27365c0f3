"""TCP listener for REST and for agents that joined: address, TLS, and loading the HTTP server on demand.

- Until the first connection it costs a socket; the HTTP server is imported then, in a thread.
- Every connection uses TLS, on loopback too: another user can bind the port while no control plane runs.
- The certificate is made in a thread when it is needed first: for the first connection, a join token, a question about
  the address, or a daemon that stays.
- `rest.json` (0600) has the address while it listens. `port.json` has a port without a configured number, which the
  next control plane tries first.
- Agents of this login on this machine use a Unix socket beside it with a constant path (`agents.sock`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import logging
import random
import socket
import struct
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.agent.join_client import AGENT_SOCKET
from distributed_grid.api.requests import KeepRunning
from distributed_grid.config.sections import ServerConfig
from distributed_grid.errors import BadInput, GridError
from distributed_grid.posix.private_files import write_private
from distributed_grid.posix.sockets import LimitedListener
from distributed_grid.server.access.admission import Admission, AdvertisedAddress
from distributed_grid.server.access.agent_sockets import AgentConnections, AgentMessageSink, JoinedAgentSocket
from distributed_grid.server.access.tokens import TokenStore
from distributed_grid.server.endpoints import EndpointTable
from distributed_grid.server.services.jobs import JobService
from distributed_grid.server.workers.agent_packages import AgentPackages
from distributed_grid.supervision import start_logged, start_restarted
from distributed_grid.wire import ControlPlaneAddress

if TYPE_CHECKING:
    import ssl

    from starlette.applications import Starlette

    from distributed_grid.server.access.agent_websocket import AgentWebSocket
    from distributed_grid.server.access.tls import Certificate
    from distributed_grid.server.rest.app import UvicornServer


DEFAULT_PORT = 7433
OTHER_PORTS = range(17_433, 18_433)  # below the kernel's ephemeral ports, so that the next control plane finds it free
MAX_TRIES = 16
LISTEN_BACKLOG = 1024
MAX_REMEMBERED = 16  # hosts with a remembered port
WILDCARDS = ("0.0.0.0", "::")
_SIOCGIFADDR = 0x8915
log = logging.getLogger(__name__)


class Address(Struct, frozen=True):
    """Address to listen at. `port` None is 7433, or any free port where that is taken and the address is local."""

    host: str = "127.0.0.1"
    port: int | None = None

    @property
    def is_local(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_wildcard(self) -> bool:
        return self.host in WILDCARDS

    @property
    def has_named_port(self) -> bool:
        """True for a chosen port: no other one replaces it."""
        return bool(self.port)

    def bind(self, remembered_port: int = 0) -> socket.socket:
        """A listening socket; GridError where a named port is taken."""
        default = DEFAULT_PORT if self.port is None else self.port
        ports = (
            [default, *random.sample(OTHER_PORTS, MAX_TRIES), 0] if self.port is None and self.is_local else [default]
        )
        if remembered_port and not self.has_named_port:
            ports = list(dict.fromkeys([remembered_port, *ports]))
        for port in ports:
            try:
                return self._bind(port)
            except UnicodeError:
                raise BadInput(f"{self.host!r} is no name of a host") from None
            except OSError as failure:
                if port is not ports[-1]:
                    continue
                place = host_port(self.host, port)
                raise GridError(f"cannot listen on {place}: {failure.strerror or failure}") from failure
        raise AssertionError("there is always a port to try")

    def _bind(self, port: int) -> socket.socket:
        addresses = socket.getaddrinfo(self.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
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


def parse_address(text: str) -> Address:
    """The address in `HOST:PORT`, `[V6]:PORT`, `HOST` or `:PORT` (all of this machine's)."""
    host, colon, port = text.rpartition(":")
    if not colon or (text.count(":") > 1 and not host.startswith("[")):
        host, port = text, ""
    if port and not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise BadInput(f"{text!r} is no address: expected HOST:PORT, such as 127.0.0.1:7433")
    host = host.strip("[]") or ("0.0.0.0" if colon else "")
    if not host or any(letter.isspace() or letter in "/@" for letter in host):
        raise BadInput(f"{text!r} is no address: expected HOST:PORT, such as 127.0.0.1:7433")
    return Address(host, int(port) if port else None)


def host_port(host: str, port: int) -> str:
    """`HOST:PORT`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_addresses() -> list[str]:
    """IPv4 addresses of this machine for others, in the order of its interfaces."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            address = socket.inet_ntoa(answer[20:24])
            if not address.startswith("127."):
                addresses.append(address)
    return addresses


class RestServices(NamedTuple):
    """The endpoints of all services, complete at the first request, and two services whose bytes REST streams."""

    endpoints: Callable[[], EndpointTable]
    jobs: JobService
    packages: AgentPackages


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
        self._certifying = asyncio.Lock()
        self._server: UvicornServer | None = None
        self._loading: asyncio.Task[None] | None = None
        self._agent_connections = AgentConnections()
        self._agent_socket = JoinedAgentSocket(folder / AGENT_SOCKET, self._accept_agent)
        self._moved = ""
        self.admission = Admission(
            TokenStore(folder),
            configured=configured,
            advertise=self.advertise,
            disconnect=lambda node: self._agent_connections.close(node, "revoked"),
        )

    async def start(self, owner: str) -> None:
        """Listen at the address of the last `listen`, else at that of the config."""
        self.admission.tokens.ensure_owner(owner)
        try:
            address = msgspec.json.decode((self._folder / "listen.json").read_bytes(), type=Address)
        except (OSError, msgspec.DecodeError):
            address = self._configured_address()
        await self._open(address)
        await self._agent_socket.open()

    async def listen(self, op: KeepRunning) -> None:
        """Listen at another address from now on; a failure changes nothing."""
        if op.listen:
            await self._open(parse_address(op.listen))
            self._write("listen.json", msgspec.json.encode(self._address))

    def forget(self) -> None:
        """The next control plane listens where the config says."""
        with contextlib.suppress(FileNotFoundError):
            (self._folder / "listen.json").unlink()

    async def stop(self) -> None:
        """Close the port and every connection through it."""
        with contextlib.suppress(FileNotFoundError):
            (self._folder / "rest.json").unlink()
        self._agent_connections.close_all("the control plane is leaving")
        await self._agent_socket.close()
        await self._close()

    @property
    def url(self) -> str | None:
        """Address for programs of this machine."""
        if self._listener is None:
            return None
        host, port = self._bound_to
        return f"https://{host_port('127.0.0.1' if host in WILDCARDS else host, port)}"

    @property
    def notices(self) -> list[str]:
        """A line about another program that took the port of the last control plane."""
        return [self._moved] if self._moved else []

    @property
    def is_busy(self) -> bool:
        is_loading = self._loading is not None and not self._loading.done()
        return is_loading or (self._server is not None and self._server.is_busy)

    async def certify(self) -> Certificate:
        """The certificate of this port, made where there is none."""
        async with self._certifying:
            if self._certificate is None:
                self._certificate = await self._certificate_for(self._address)
                if self._listener is not None:
                    self._write_description()
            return self._certificate

    async def advertise(self) -> AdvertisedAddress:
        """Addresses for other machines, best first, with the fingerprint of the certificate."""
        certificate = await self.certify()
        return AdvertisedAddress(self._addresses(), certificate.fingerprint, str(self._agent_socket.path))

    async def _open(self, address: Address) -> None:
        before = self._address
        has_port = address.port in (0, before.port) or not (address.has_named_port or before.has_named_port)
        if self._listener is not None and address.host == before.host and has_port:
            self._address = address
            return
        if self._settings.certificate and self._settings.key:
            self._certificate = await self._certificate_for(address)  # a file that cannot be used is an error here
        remembered = self._remembered_ports().get(address.host, 0)
        if self._listener is not None and address.port in (None, self._bound_to[1]):
            listener = await self._bind_again(address, remembered)
        else:
            listener = self._bind(address, remembered)
            self._tell_agents(address, listener.getsockname()[1])
            await self._close()
        self._address, self._listener = address, listener
        self._bound_to = (address.host, listener.getsockname()[1])
        self._known_hosts = frozenset(name.lower() for name in ("localhost", "127.0.0.1", "::1", *self._names(address)))
        self._remember_port(remembered)
        self._write_description()
        asyncio.get_running_loop().add_reader(listener.fileno(), self._on_first_connection, listener)

    def _bind(self, address: Address, remembered_port: int) -> LimitedListener:
        return LimitedListener.of(address.bind(remembered_port), self._settings.max_connections_per_peer)

    async def _bind_again(self, address: Address, remembered_port: int) -> LimitedListener:
        """A listener at another address of the port in use, which is closed first, and opened again on a failure."""
        before = replace(self._address, port=self._bound_to[1])
        self._tell_agents(address, address.port or remembered_port or DEFAULT_PORT)
        await self._close()
        try:
            return self._bind(address, remembered_port)
        except GridError:
            await self._open(before)
            raise

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

    def _remembered_ports(self) -> dict[str, int]:
        """Ports of earlier control planes, by host."""
        try:
            ports = msgspec.json.decode((self._folder / "port.json").read_bytes(), type=dict[str, int])
        except (OSError, msgspec.DecodeError):
            return {}
        return {host: port for host, port in ports.items() if 0 < port < 65536}

    def _remember_port(self, remembered: int) -> None:
        """Store the port for the next control plane, and keep a notice where it differs from the stored one."""
        self._moved = ""
        if self._address.has_named_port:
            return
        port = self._bound_to[1]
        if remembered and port != remembered:
            self._moved = (
                f"port {remembered} of the last control plane is taken by another program: REST and agents that joined "
                f"now use port {port}"
            )
            log.warning("%s", self._moved)
        if port != remembered:
            ports = {**self._remembered_ports(), self._address.host: port}
            self._write("port.json", msgspec.json.encode(dict(list(ports.items())[-MAX_REMEMBERED:])))

    def _tell_agents(self, address: Address, port: int) -> None:
        """Send the future address to the connected agents."""
        if self._certificate is not None:
            message = self._address_message(self._certificate, self._addresses(address, port))
            self._agent_connections.send_all(message)

    def _on_first_connection(self, listener: LimitedListener) -> None:
        """Load the HTTP server, and let it accept."""
        asyncio.get_running_loop().remove_reader(listener.fileno())
        self._loading = start_restarted(partial(self._serve, listener), "the start of REST")

    async def _serve(self, listener: LimitedListener) -> None:
        certificate = await self.certify()

        def load() -> tuple[Callable[..., Starlette], type[UvicornServer], Callable[[Path, Path], ssl.SSLContext]]:
            """The application and its server, with everything they import."""
            from distributed_grid.server.access.tls import server_context
            from distributed_grid.server.rest.app import UvicornServer, make_app

            return make_app, UvicornServer, server_context

        make_app, server_class, make_context = await asyncio.to_thread(load)
        if self._listener is not listener:
            return
        server = server_class(
            listener,
            make_app(
                self._services,
                self.admission,
                is_known_host=self._is_known_host,
                on_request=self._on_request,
            ),
            agent_endpoint=partial(self._accept_agent, listener),
            tls=make_context(certificate.certificate, certificate.key),
        )
        server.start()
        self._server = server

    def _accept_agent(self, listener: LimitedListener | None = None) -> AgentWebSocket:
        from distributed_grid.server.access.agent_websocket import AgentWebSocket

        def admitted(websocket: AgentWebSocket) -> None:
            self._agent_connections.add(websocket)
            if listener is not None:  # from now on it counts for its node: many nodes may share an address
                listener.limits.remove(websocket.descriptor)

        return AgentWebSocket(
            self._agents,
            self.admission.admit,
            on_admitted=admitted,
            on_greeted=self._send_address,
            on_close=self._agent_connections.discard,
        )

    def _send_address(self, websocket: AgentWebSocket) -> None:
        """Send an agent the address of this control plane, at once if there is a certificate."""

        async def send_certified() -> None:
            websocket.send(self._address_message(await self.certify(), self._addresses()))

        if self._certificate is not None:
            websocket.send(self._address_message(self._certificate, self._addresses()))
        else:
            start_logged(send_certified(), "the certificate for an agent")

    def _address_message(self, certificate: Certificate, addresses: tuple[str, ...]) -> ControlPlaneAddress:
        return ControlPlaneAddress(
            addresses[:64], certificate.fingerprint, certificate.pem, str(self._agent_socket.path)
        )

    def _configured_address(self) -> Address:
        settings = self._settings
        host = "127.0.0.1" if settings.host == "local" else settings.host.strip("[]")
        return Address(host, settings.port)

    async def _certificate_for(self, address: Address) -> Certificate:
        def make() -> Certificate:
            from distributed_grid.server.access.tls import ensure_certificate, load_certificate

            mine, key = self._settings.certificate, self._settings.key
            if mine and key:
                return load_certificate(Path(mine).expanduser(), Path(key).expanduser())
            try:
                return ensure_certificate(self._folder, [*self._names(address), *own_addresses()])
            except OSError as failure:
                raise GridError(f"cannot write a certificate to {self._folder}: {failure.strerror}") from failure

        return await asyncio.to_thread(make)

    def _names(self, address: Address) -> list[str]:
        """All names of this port, for its certificate."""
        hosts = own_addresses() if address.is_wildcard else [address.host]
        return list(dict.fromkeys([*self._settings.names, *hosts, socket.gethostname()]))

    def _is_known_host(self, name: str) -> bool:
        if name in self._known_hosts:
            return True
        if self._address.is_wildcard:
            with contextlib.suppress(ValueError):  # a page cannot make an address its own, only a name
                return bool(ipaddress.ip_address(name))
        return False

    def _addresses(self, address: Address | None = None, port: int = 0) -> tuple[str, ...]:
        """The addresses of this port, or of another one."""
        address = address or self._address
        hosts = [*self._settings.names, *(own_addresses() if address.is_wildcard else [address.host])]
        return tuple(host_port(host, port or self._bound_to[1]) for host in dict.fromkeys(hosts))

    def _write_description(self) -> None:
        description = {
            "url": self.url,
            "host": self._bound_to[0],
            "port": self._bound_to[1],
            "fingerprint": self._certificate.fingerprint if self._certificate else None,
            "certificate": str(self._certificate.certificate) if self._certificate else None,
            "agent_socket": str(self._agent_socket.path),
        }
        self._write("rest.json", msgspec.json.encode(description))

    def _write(self, name: str, content: bytes) -> None:
        write_private(self._folder / name, content, durable=False)
