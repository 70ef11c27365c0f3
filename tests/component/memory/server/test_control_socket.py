"""A memory server and a supervisor that does not speak its protocol."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from distributed_grid.memory.protocol.control_messages import ControlSocket, FreeCopy, Message, StartServing
from tests.component.memory.memory_servers import wait_for
from tests.fuzz.memory_server import DataFrames, ServerProcess


def test_unexpected_messages_with_descriptors_leave_none_open(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "memory")
    try:
        client = DataFrames(server, "seed")  # it holds a block, so it does not end

        def open_files() -> int:
            return len(os.listdir(f"/proc/{server.pid}/fd"))

        before = open_files()
        messages: list[Message] = [FreeCopy(("a:1",)), StartServing(), *[FreeCopy(("a:1",))] * 5]
        for _ in range(20):
            control = ControlSocket(server.connect_control())
            with contextlib.suppress(ConnectionError):  # the server may hang up before all is sent
                for message in messages:
                    control.send(message, [0, 1, 2])
            control.close()
        client.check()
        wait_for(lambda: open_files() <= before + 2)
    finally:
        server.close()
