"""Join tokens of workers: one for each, good once and for its name alone, the same again whenever it is asked for.

The secret is derived from the worker's id and a key that only this control plane has (0600), so the identical order can
be made again after a crash and no secret is in the ledger. The store of tokens has its hash.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import secrets
from pathlib import Path

from distributed_grid.errors import GridError, NotFound
from distributed_grid.posix.private_files import write_private
from distributed_grid.server.access.admission import Admission

KEY_FILE = "worker-token.key"


class WorkerJoinTokens:
    """Issues and revokes the join tokens of workers."""

    def __init__(self, folder: Path, admission: Admission) -> None:
        self._path = folder / KEY_FILE
        self._admission = admission
        self._key = b""

    async def is_loopback_only(self) -> bool:
        """Whether only this machine can reach the control plane."""
        return (await self._admission.address()).is_loopback_only

    async def issue(self, worker_id: str, ttl_seconds: float) -> str:
        """The text of the worker's token; it lets a node of its name join once."""
        key = await asyncio.to_thread(self._read_key)
        digest = hmac.digest(key, worker_id.encode(), "sha256")
        secret = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        return await self._admission.grant_join(token_id(worker_id), secret, worker_id, ttl_seconds)

    async def revoke(self, worker_id: str) -> None:
        """Let nobody join under this name any more, and disconnect who did; a second time is harmless."""
        try:
            await self._admission.revoke_join(token_id(worker_id))
        except NotFound:
            return

    def _read_key(self) -> bytes:
        if not self._key:
            try:
                if not self._path.exists():
                    write_private(self._path, secrets.token_bytes(32))
                self._key = self._path.read_bytes()
            except OSError as failure:
                raise GridError(f"cannot use {self._path}: {failure.strerror}") from failure
        return self._key


def token_id(worker_id: str) -> str:
    """The id of a worker's join token; it may be shown."""
    return hashlib.sha256(f"worker {worker_id}".encode()).hexdigest()[:32]
