"""A socket of this machine behind which a node's own program speaks to Ray: the engine's child, run there by SSH.

Ray's own client would do the same through a server of its own, but takes seconds to be there and one more port.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path

from distributed_grid.adapters.node.agent_link import copy
from distributed_grid.adapters.node.errors import NodeOperationFailed
from distributed_grid.adapters.node.messages import RunRayDriver
from distributed_grid.adapters.node.script_session import ray_script
from distributed_grid.adapters.ssh.shared_connection import SharedSshConnection
from distributed_grid.posix.unix_sockets import short_path

log = logging.getLogger(__name__)


async def drive(order: RunRayDriver, door: SharedSshConnection) -> None:
    """Serve the socket until cancelled; each connection gets a program on the node of its own."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with door.talking(ray_script()) as talk:
                await talk.ask("ray-drive", **order.data)
                there_in, there_out = talk.streams()
                copies = [asyncio.create_task(copy(reader, there_out)), asyncio.create_task(copy(there_in, writer))]
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
                for one in copies:
                    one.cancel()
                await asyncio.gather(*copies, return_exceptions=True)
        except NodeOperationFailed as failure:
            log.warning("no way to Ray on %s: %s", order.target.name, failure)
        finally:
            writer.close()

    Path(order.socket).unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        with short_path(order.socket) as path:
            server = await asyncio.start_unix_server(serve, path)
    finally:
        os.umask(before)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        server.close()
        with contextlib.suppress(OSError):
            Path(order.socket).unlink()
