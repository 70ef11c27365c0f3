"""Agents and Ray that were started on nodes, with the way to each, so that what runs on one that left the config can
still be stopped.

The note is a file beside the ledger (0600). A node is in it from before the start of its agent, or of Ray on this
machine, until the stop is proven.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from distributed_grid.adapters.ssh.process import SshProcess, SshTarget
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import LeaseLost, LeaseReclaimed
from distributed_grid.errors import GridError
from distributed_grid.posix.private_files import write_private

RETRY_SECONDS = 60.0
log = logging.getLogger(__name__)


class StartedAgents:
    """The note, and the stopping of agents and Ray on nodes that no config names any more."""

    def __init__(self, file: Path, grid: Grid, ssh: SshProcess) -> None:
        self._file = file
        self._grid = grid
        self._ssh = ssh

    def add(self, target: SshTarget) -> None:
        """Remember the way to a node, the last one for each."""
        self._write({**self._read(), target.name: target})

    def remove(self, name: str) -> None:
        """Forget an agent that is stopped; forgetting it twice is harmless."""
        known = self._read()
        if known.pop(name, None) is not None:
            self._write(known)

    async def stop_unnamed(self, is_named: Callable[[SshTarget], bool]) -> None:
        """Stop what runs on every node that is not named, trying again until it is stopped."""
        tried: set[str] = set()
        while left := [target for target in self._read().values() if not is_named(target)]:
            for target in left:
                try:
                    await self._stop(target)
                except GridError as failure:
                    if target.name not in tried:
                        log.warning("what runs on %s, which left the config, goes on: %s", target.name, failure)
                    tried.add(target.name)
            if not all(map(is_named, self._read().values())):
                await asyncio.sleep(RETRY_SECONDS)

    async def _stop(self, target: SshTarget) -> None:
        """Stop one agent and its Ray; what is lent there is taken back before, so that jobs go back into the queue."""
        why = f"{target.name} left the config"
        await self._grid.handle_all(LeaseReclaimed(lease_id, why) for lease_id in await self._held(target.name))
        ended = (await self._ssh.ask("ray-stop", target, {"purge": False}))["stopped"]
        summary = await self._ssh.run("stop", target, lambda step: None) if target.hop.host != "local" else ""
        log.info("%s: %s processes of Ray were stopped. %s", why, ended, summary)
        self.remove(target.name)
        await self._grid.handle_all(LeaseLost(lease_id, why) for lease_id in await self._held(target.name))

    async def _held(self, name: str) -> list[str]:
        return await self._grid.read(lambda ledger, now: [lease.id for lease in ledger.leases_of(name)])

    def _read(self) -> dict[str, SshTarget]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, SshTarget])
        except (OSError, msgspec.DecodeError):
            return {}

    def _write(self, known: dict[str, SshTarget]) -> None:
        with contextlib.suppress(OSError):
            write_private(self._file, msgspec.json.encode(known))
