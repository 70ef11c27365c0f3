"""Another user takes the control plane's port while no control plane runs: nobody sends it a secret or obeys it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from distributed_grid import wire
from distributed_grid.domain.jobs import Command
from distributed_grid.domain.resources import Claim
from distributed_grid.posix.boot_clock import boot_ms
from distributed_grid.server.access.tls import ensure_certificate
from tests.e2e.crashes.conftest import needs_root
from tests.support.joined_agents import NO_CPU, JoinedAgent, start_lending
from tests.support.ports import free_port
from tests.support.project import PROJECT
from tests.support.shell import Shell, wait_until

pytestmark = pytest.mark.e2e
NOBODY = 65534
EPOCH = 1_000
"""Higher than any that the control plane has had."""


class Impostor:
    """A control plane of another user at somebody else's port; it records all that it is sent, and gives orders."""

    def __init__(self, port: int, folder: Path, certificate: Path | None) -> None:
        self.port = port
        self.obeyed = folder / "obeyed"
        self._heard = folder / "heard"
        self._heard.touch()
        self._fd = os.open(self._heard, os.O_WRONLY | os.O_APPEND)
        self._context: ssl.SSLContext | None = None
        if certificate is not None:
            own = ensure_certificate(certificate, ["127.0.0.1"])
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(own.certificate, own.key)
        self._process: BaseProcess | None = None

    @property
    def heard(self) -> bytes:
        return self._heard.read_bytes()

    @property
    def connections(self) -> int:
        return self.heard.count(b"--- connection\n")

    def start(self) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=self._run)
        self._process.start()
        wait_until(lambda: b"--- listening" in self.heard)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join()

    def _run(self) -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        listener = _RecordingListener(self._record, self._context)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wait_until(lambda: is_bound(listener, self.port))  # the last threads of a killed process may still have it
        listener.listen(100)
        self._record(b"--- listening\n")
        with serve(self._order, sock=listener, process_request=self._admit) as server:
            server.serve_forever()

    def _record(self, data: bytes) -> None:
        os.write(self._fd, data)

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        self._record(f"{request.path} {dict(request.headers.raw_items())}\n".encode())
        return None

    def _order(self, connection: ServerConnection) -> None:
        """Welcome an agent as its control plane would, and let it run a command."""
        hello = wire.decode_from_agent(bytes(connection.recv(decode=False)))
        assert isinstance(hello, wire.AgentHello)
        connection.send(
            wire.encode(
                wire.Welcome(protocol=wire.PROTOCOL, version="9.9.9", epoch=EPOCH, hold_ms=60_000, heartbeat_ms=500)
            )
        )
        command = Command(("touch", str(self.obeyed)))
        order = wire.StartAttemptOrder(
            node=hello.node,
            lease_id="evil.1",
            fence=999_999,
            job_id="evil",
            command=command,
            claim=Claim(),
            hold_ms=60_000,
            beat=boot_ms(),
        )
        connection.send(wire.encode(order))
        for message in connection:
            self._record(bytes(message) if isinstance(message, bytes) else message.encode())


class _RecordingListener(socket.socket):
    """Records the first bytes of each connection as they travel."""

    def __init__(self, record: Callable[[bytes], None], context: ssl.SSLContext | None) -> None:
        super().__init__(socket.AF_INET)
        self._record = record
        self._context = context

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        connection.settimeout(5)
        self._record(b"--- connection\n")
        with contextlib.suppress(OSError):
            self._record(connection.recv(65536, socket.MSG_PEEK) + b"\n")
        connection.settimeout(None)
        if self._context is None:
            return connection, address
        return self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address


def is_bound(listener: socket.socket, port: int) -> bool:
    """Bind, unless the port is still taken."""
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


@pytest.fixture
def agents(grid: Shell, tmp_path: Path) -> Iterator[list[JoinedAgent]]:
    """One agent that can reach the Unix socket of the control plane, and one that has only the network."""
    needs_root("become another user")
    start_lending(grid, "--listen", f"127.0.0.1:{free_port()}")
    made = [
        JoinedAgent(grid, "near", tmp_path / "near" / "agent"),
        JoinedAgent(grid, "apart", tmp_path / "apart" / "agent", hidden=grid.state_dir),
    ]
    for agent in made:
        agent.directory.parent.mkdir()
        agent.join()
    for agent in made:
        agent.until_linked()
    yield made
    for agent in made:
        agent.stop()


@pytest.mark.parametrize("kind", ["plain", "with a certificate of its own"])
def test_an_impostor_at_the_port_gets_no_key_and_no_obedience(
    grid: Shell, agents: list[JoinedAgent], tmp_path: Path, kind: str
) -> None:
    gate = tmp_path / "gate"
    command = ["sh", "-c", f"until [ -e {gate} ]; do sleep 0.1; done; echo done"]
    jobs = [
        grid.detach(*NO_CPU, "--strategy", "node_specific", "-n", agent.name, "--workdir", "none", *command)
        for agent in agents
    ]
    wait_until(lambda: all(grid.job(job)["state"] == "running" for job in jobs), 60)
    url = str(grid.json("daemon", "status")["rest"])
    token = (grid.host_dir / "token").read_text().strip()
    folder = tmp_path / "impostor"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    certificate = None if kind == "plain" else folder
    impostor = Impostor(int(url.rpartition(":")[2]), folder, certificate)
    grid.kill_daemon()
    impostor.start()
    try:
        wait_until(lambda: impostor.connections >= 6, 60)
        assert not any(agent.joined["key"].encode() in impostor.heard for agent in agents)
        assert not impostor.obeyed.exists()
        for curl in documented_curls():
            named = {"url": url, "token": token, "ca": str(grid.host_dir / "certificate.pem")}
            done = subprocess.run(["sh", "-c", curl], env={**grid.env, **named}, capture_output=True, timeout=30)
            assert done.returncode in (35, 60), (curl, done)  # no TLS there, or a certificate that nobody trusts
        heard = impostor.heard
    finally:
        impostor.stop()
    assert token.encode() not in heard
    assert b"Authorization" not in heard
    assert not impostor.obeyed.exists()
    grid("status", check=0)
    for agent in agents:
        agent.until_linked(2)
    gate.touch()
    for job in jobs:
        grid("jobs", "wait", job, "--timeout", "60", check=0)
        assert grid("jobs", "logs", job, check=0).stdout == "done\n"
        assert len(grid.job(job)["attempts"]) == 1


def documented_curls() -> list[str]:
    """The commands of the reference that send a token."""
    text = (PROJECT / "docs/reference/rest.md").read_text()
    found = re.findall(r"^curl .*Bearer \$token.*\$url.*$", text, re.MULTILINE)
    assert len(found) >= 4
    return found


def test_an_agent_that_joined_without_a_certificate_gets_it_over_the_socket_and_never_over_the_network(
    grid: Shell, agents: list[JoinedAgent], tmp_path: Path
) -> None:
    grid.kill_daemon()
    wait_until(lambda: all("no link to the control plane" in agent.log for agent in agents))
    old = [agent.joined for agent in agents]
    for agent in agents:
        agent.stop()
        kept = {name: agent.joined[name] for name in ("address", "node", "key")}
        (agent.directory / "joined.json").write_text(json.dumps({**kept, "fingerprint": ""}))
        (agent.directory / "agent.log").unlink()
    near, apart = agents
    grid("status", check=0)
    for agent in agents:
        agent.start()
    near.until_linked()
    wait_until(lambda: near.joined["fingerprint"])
    assert near.joined["certificate"] == old[0]["certificate"]
    wait_until(lambda: "joined without a certificate" in apart.log)
    assert apart.joined["fingerprint"] == ""
