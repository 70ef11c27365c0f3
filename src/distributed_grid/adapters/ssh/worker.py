"""The SSH child of the control plane (`python -m distributed_grid.adapters.ssh.worker`): links, operations, tunnels."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import asyncssh

from distributed_grid.adapters.child_process import Report, Say, encode_frame, read_frame, run_child
from distributed_grid.adapters.node import installation
from distributed_grid.adapters.node.node_messages import DropAgentLink, NodeOperationFailed, RunFinished, pack_answer
from distributed_grid.adapters.node.node_worker import NodeWorker, relay
from distributed_grid.adapters.node.script_session import RAY_OPERATIONS, local_session, ray_script
from distributed_grid.adapters.ssh import process as messages
from distributed_grid.adapters.ssh.ssh_connection import SharedSshConnection, SshConnection, SshScriptSession
from distributed_grid.posix.sockets import short_path
from distributed_grid.supervision import start_restarted

MAX_OPERATIONS = 32
FIRST_PAUSE, MAX_PAUSE = 0.5, 15.0
MAX_PORT_TRIES = 20
log = logging.getLogger(__name__)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry out the commands that come until the connection closes."""
    logging.getLogger("asyncssh").setLevel(logging.WARNING)
    worker = SshWorker(lambda report: writer.write(encode_frame(report)))
    while (command := await read_frame(reader, messages.COMMANDS)) is not None:
        worker.handle(command)


class SshWorker:
    """Carries out commands; holds connections, and nothing that the next control plane does not ask for again."""

    def __init__(self, report: Callable[[Report], None]) -> None:
        self._report = report
        self._auth_sock = ""
        self._sources = installation.InstallSources()
        self._nodes: NodeWorker[messages.SshTarget, SharedSshConnection] = NodeWorker(
            lambda target: SharedSshConnection(target, lambda: self._auth_sock), report, max_operations=MAX_OPERATIONS
        )
        self._forwards: dict[str, tuple[messages.ForwardPorts, asyncio.Task[None]]] = {}
        self._driver: tuple[messages.RunRayDriver, asyncio.Task[None]] | None = None

    def handle(self, command: messages.SshCommand) -> None:
        """Begin the work of a command."""
        match command:
            case messages.Settings():
                self._sources.environ = command.environ or self._sources.environ
                self._sources.cache = Path(command.wheels)
                if command.auth_sock and command.auth_sock != self._auth_sock:
                    self._auth_sock = command.auth_sock
                    self._nodes.retry_links()
            case messages.KeepAgentLink():
                self._nodes.keep_link(command.target)
            case DropAgentLink():
                self._nodes.drop_link(command.node)
            case messages.ForwardPorts():
                kept = self._forwards.get(command.target.name)
                if kept is not None and kept[0] == command:
                    return
                if kept is not None:
                    self._forwards.pop(command.target.name)[1].cancel()
                if command.ports:
                    connection = self._nodes.connection_to(command.target)
                    forward = partial(forward_ports, command, connection, self._report)
                    task = start_restarted(forward, f"the forwarding of ports of {command.target.name}")
                    self._forwards[command.target.name] = (command, task)
            case messages.RunRayDriver():
                if self._driver is not None:
                    if self._driver[0] == command:
                        return
                    self._driver[1].cancel()
                    self._driver = None
                if command.data:
                    connection = self._nodes.connection_to(command.target)
                    serve_driver = partial(serve_ray_driver, command, connection)
                    self._driver = (command, start_restarted(serve_driver, "the socket for Ray drivers"))
            case messages.RunOnNode():
                name = f"{command.operation} on {command.target.name}"
                self._nodes.run(command.number, name, lambda say: self._run(command, say))

    async def _run(self, command: messages.RunOnNode, say: Say) -> RunFinished:
        target = command.target
        async with self._nodes.slots:
            if command.operation in RAY_OPERATIONS and target.hop.host == "local":
                async with local_session(target.grid, target.name, target.python, ray_script()) as local:
                    return RunFinished(
                        command.number, data=pack_answer(await local.ask(command.operation, say=say, **command.data))
                    )
            connection = self._nodes.connection_to(target)
            if not connection.is_open:
                say("connecting")
            if command.operation in RAY_OPERATIONS:
                async with connection.session(ray_script()) as session:
                    if command.operation == "ray-install":
                        return RunFinished(
                            command.number, summary=await installation.install_ray(session, self._sources, say)
                        )
                    return RunFinished(
                        command.number, data=pack_answer(await session.ask(command.operation, say=say, **command.data))
                    )
            async with connection.session() as session:
                finished = await self._run_agent(command, session, say)
            if command.operation in ("stop", "purge"):
                await connection.close()
            return finished

    async def _run_agent(self, command: messages.RunOnNode, session: SshScriptSession, say: Say) -> RunFinished:
        match command.operation:
            case "install":
                facts, summary = await installation.install(session, self._sources, say)
            case "inspect":
                facts, summary = await installation.inspect(session), ""
            case "stop":
                facts, summary = await installation.stop(session, say)
            case "purge":
                facts, summary = await installation.purge(session, say)
            case "list-results" | "read-output":
                answer = await session.ask(command.operation, say=say, **command.data)
                return RunFinished(command.number, data=pack_answer(answer))
            case _:
                raise NodeOperationFailed(f"there is no operation {command.operation!r}")
        return RunFinished(command.number, summary=summary, facts=facts)


async def forward_ports(
    command: messages.ForwardPorts, shared: SharedSshConnection, report: Callable[[messages.PortsForwarded], None]
) -> None:
    """Keep the ports open until cancelled, over every loss of the connection; only this machine can use our side."""
    pause, node = FIRST_PAUSE, command.target.name
    while True:
        try:
            async with shared.connected() as connection:
                listeners = {name: await _listen(connection, port) for name, port in command.ports.items()}
                report(
                    messages.PortsForwarded(node, {name: listener.get_port() for name, listener in listeners.items()})
                )
                pause = FIRST_PAUSE
                try:
                    await connection.wait_closed()
                finally:
                    for listener in listeners.values():
                        listener.close()
                    report(messages.PortsForwarded(node))
        except (NodeOperationFailed, OSError, asyncssh.Error) as failure:
            log.warning("the ports of %s are not forwarded yet: %s", node, failure)
        await asyncio.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE)


async def _listen(connection: SshConnection, forward: messages.PortForward) -> asyncssh.SSHListener:
    """Listen on the port that was asked for, else on the next free one."""
    for port in (*range(forward.port, forward.port + MAX_PORT_TRIES), 0):
        try:
            return await connection.ssh.forward_local_port(forward.host, port, forward.to_host, forward.to_port)
        except OSError:
            if not port:
                raise
    raise AssertionError("the last port is any")


async def serve_ray_driver(command: messages.RunRayDriver, shared: SharedSshConnection) -> None:
    """Serve a socket of this machine until cancelled; each connection to it gets a Ray driver on the node.

    Ray's own client would do the same through a server of its own, but takes seconds to start and one more port.
    """

    async def run_driver(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with shared.session(ray_script()) as session:
                await session.ask("ray-driver", **command.data)
                await relay(reader, writer, *session.streams)
        except NodeOperationFailed as failure:
            log.warning("no Ray driver on %s: %s", command.target.name, failure)
        finally:
            writer.close()

    Path(command.socket).unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        with short_path(command.socket) as path:
            server = await asyncio.start_unix_server(run_driver, path, start_serving=False)
    finally:
        os.umask(before)
    try:
        await server.start_serving()
        await asyncio.get_running_loop().create_future()
    finally:
        server.close()
        with contextlib.suppress(OSError):
            Path(command.socket).unlink()


if __name__ == "__main__":
    run_child(serve)
