"""Ports of this machine that lead to those of a node, through the SSH connection to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import asyncssh

from distributed_grid.adapters.node.errors import NodeOperationFailed
from distributed_grid.adapters.node.messages import Forward, Forwarded, PortForward
from distributed_grid.adapters.ssh.connection import SshConnection
from distributed_grid.adapters.ssh.shared_connection import SharedSshConnection

FIRST_PAUSE, LAST_PAUSE = 0.5, 15.0
TRIES = 20


async def forward(order: Forward, door: SharedSshConnection, report: Callable[[Forwarded], None]) -> None:
    """Keep the ports open until cancelled, over every loss of the connection; on our side only this machine can use
    them."""
    pause, node = FIRST_PAUSE, order.target.name
    while True:
        with contextlib.suppress(NodeOperationFailed, OSError, asyncssh.Error):
            async with door.opened() as connection:
                listeners = {name: await _listen(connection, way) for name, way in order.ports.items()}
                report(Forwarded(node, {name: listener.get_port() for name, listener in listeners.items()}))
                pause = FIRST_PAUSE
                try:
                    await connection.wait_closed()
                finally:
                    for listener in listeners.values():
                        listener.close()
                    report(Forwarded(node))
        await asyncio.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE)


async def _listen(connection: SshConnection, way: PortForward) -> asyncssh.SSHListener:
    """Listen on the port that was asked for, else on the next free one."""
    for port in (*range(way.port, way.port + TRIES), 0):
        try:
            return await connection.ssh.forward_local_port(way.host, port, way.to_host, way.to_port)
        except OSError:
            if not port:
                raise
    raise AssertionError("the last port is any")
