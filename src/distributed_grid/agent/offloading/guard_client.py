"""Agent's end of a guard: starts it, sends it orders, receives its records; either of the two may die.

An order is sent again until it is answered, also to the guard that takes over. A guard that is gone without its standby
is started anew: it finds everything in the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed_grid.agent.offloading.guard_core import FINAL_PHASES, GuardRecord
from distributed_grid.agent.offloading.guard_process import GUARDED_ALREADY
from distributed_grid.agent.offloading.move_journal import LOCK, SOCKET, decode_record, read_journal
from distributed_grid.domain.states import Step
from distributed_grid.posix.private_files import open_regular, try_lock
from distributed_grid.posix.sockets import is_own_peer, short_path

START_SECONDS = 20.0
RECONNECT_SECONDS, MAX_RECONNECT_SECONDS = 0.01, 2.0
YOUNG_SECONDS = 1.0
MAX_LINE_BYTES = 1 << 20
log = logging.getLogger(__name__)


class GuardClient:
    """The guard of one move; `on_record` gets every record, some of them more than once."""

    def __init__(
        self, folder: Path, on_record: Callable[[GuardRecord], None], on_problem: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._on_record, self._on_problem = on_record, on_problem
        self._order: dict[str, Any] | None = None
        self._writer: asyncio.StreamWriter | None = None

    def order(self, name: str, **details: Any) -> None:
        """Give an order; it is sent until it is answered, or until there is another one."""
        self._order = {"order": name, **details}
        self._send_order()

    async def run(self) -> None:
        """Serve until the guard has ended and by the journal nothing is left to guard, or until an order to close."""
        pause = RECONNECT_SECONDS
        if await self._is_over():
            return
        while True:
            began = time.monotonic()
            try:
                await self._converse()
            except OSError as failure:
                log.debug("no guard answers in %s: %s", self._folder, failure)
            if await self._is_over():
                return
            await asyncio.sleep(pause)
            is_young = time.monotonic() - began < YOUNG_SECONDS
            pause = min(2 * pause, MAX_RECONNECT_SECONDS) if is_young else RECONNECT_SECONDS

    async def _converse(self) -> None:
        """Connect, starting a guard where there is none, and pass on its records until it ends."""
        try:
            connection = self._connect()
        except (FileNotFoundError, ConnectionRefusedError):
            await self._start()
            connection = self._connect()
        if not is_own_peer(connection):
            connection.close()
            raise PermissionError("the guard's socket belongs to another user")
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_LINE_BYTES)
        self._writer = writer
        try:
            first = await reader.readline()
            if first:
                self._receive(first, is_greeting=True)
                self._send_order()
            while line := await reader.readline():
                self._receive(line)
        except (ValueError, ConnectionError):  # a line that is too long; or it was killed
            pass
        finally:
            self._writer = None
            writer.close()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(self._folder / SOCKET) as path:
                connection.connect(path)
        except BaseException:
            connection.close()
            raise
        connection.setblocking(False)
        return connection

    async def _start(self) -> None:
        """Start a guard, and wait until it takes orders."""
        package_home = __file__.rsplit("/", 4)[0]
        command = [sys.executable, "-P", "-S", "-m", "distributed_grid.agent.offloading.guard_process"]
        inherited = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONHOME") if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            *command,
            str(self._folder),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            cwd="/",
            env=inherited | {"GRID_ROLE": "guard", "PYTHONPATH": package_home},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                _, errors = await process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        if process.returncode is not None and process.returncode < 0:
            raise OSError(f"killed by signal {-process.returncode}")
        if process.returncode not in (0, GUARDED_ALREADY):
            last = errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
            log.warning("the guard in %s could not be started: %s", self._folder, last)
            self._on_problem(f"its guard could not be started: {last[:300]}")
            self._order = None
            raise OSError(last)

    def _send_order(self) -> None:
        if self._order is not None and self._writer is not None:
            self._writer.write(json.dumps(self._order).encode() + b"\n")

    def _receive(self, line: bytes, *, is_greeting: bool = False) -> None:
        record = decode_record(line)
        if not is_greeting:
            self._order = None
        if record is not None:
            self._on_record(record)
            return
        with contextlib.suppress(ValueError):
            problem = json.loads(line).get("problem")
            if isinstance(problem, str):
                self._on_problem(problem)

    async def _is_over(self) -> bool:
        """True if there is no guard and none is needed. The last record of the journal is passed on once more."""
        try:
            _, records = await asyncio.to_thread(read_journal, self._folder)
        except (OSError, ValueError) as failure:
            self._on_problem(f"its journal cannot be read: {failure}")
            return True
        if records:
            self._on_record(records[-1])
        is_closed = self._order is not None and self._order["order"] == Step.CLOSE
        return bool(records and records[-1].step in FINAL_PHASES) or (is_closed and not is_guarded(self._folder))


def is_guarded(folder: Path) -> bool:
    """True if there is a guard or its standby."""
    try:
        fd = open_regular(str(folder / LOCK), os.O_RDWR)
    except OSError:
        return False
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)
