"""Who a memory server is, whichever process is it just now.

Rule 1. A server that is started again is the one before: the same life, the same key, the same hold, the same address
        where that is to be had.
Rule 2. All nodes of an agent share one server: the first one's word counts.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from distributed_grid.memory.protocol.control_messages import Begin, NewIncarnation, ServerReady
from distributed_grid.memory.server.copy_store import KEY_BYTES
from distributed_grid.memory.server.saved_incarnation import take_life
from distributed_grid.wire import ServeMemoryOrder

ANY_HOST: Final = "127.0.0.1"


class ServerIdentity:
    """What the next server of a folder is told to be. For `alone_ms` it waits for a keeper that is gone."""

    def __init__(self, folder: Path, alone_ms: int) -> None:
        self._folder = folder
        self._alone_ms = alone_ms
        self._life: tuple[str, bytes] | None = None
        self._at = ("", 0)
        self.order: ServeMemoryOrder | None = None
        self.until_boot_ms = 0

    def forget(self) -> None:
        """Nobody wants a server any more; safe twice."""
        self._life = self.order = None

    def end_life(self) -> None:
        """The hold has run out while no server ran: the next one begins a life of its own."""
        self._life = None
        self.until_boot_ms = 0

    # ------------------------------------------------------------------ what is ordered

    def take_order(self, order: ServeMemoryOrder, *, is_serving: bool) -> None:
        """Be what is ordered, where nobody else's word counts."""
        if not is_serving or self.order is None or self.order.node in ("", order.node):
            self.order = order

    def differs(self, order: ServeMemoryOrder, serving: ServerReady) -> bool:
        """Whether the server has to be another one for this order."""
        if self.order is not None and self.order.node not in ("", order.node):
            return False
        moved = (order.host or ANY_HOST) != serving.endpoint.host
        return moved or bool(order.certificate) != bool(serving.certificate)

    def begin(self) -> Begin:
        """What a fresh server is told first. Where there is no life to go on with, one begins."""
        assert self.order is not None
        if self._life is None:
            self._life = take_life(self._folder) or (secrets.token_hex(8), secrets.token_bytes(KEY_BYTES))
        order, (incarnation, key) = self.order, self._life
        host = order.host or ANY_HOST
        port = self._at[1] if self._at[0] == host else 0
        return Begin(
            str(self._folder),
            host,
            port,
            incarnation,
            key,
            order.certificate,
            order.private_key,
            self.until_boot_ms,
            self._alone_ms,
        )

    # ------------------------------------------------------------------ what is found

    def serves(self, serving: ServerReady) -> bool:
        """Go on with what this server is; whether it has to be told another hold than it has."""
        endpoint = serving.endpoint
        self._life = (endpoint.incarnation, serving.key)
        self._at = (endpoint.host, endpoint.port)
        if self.order is None:
            self.order = ServeMemoryOrder("", serving.certificate, serving.private_key, endpoint.host)
        if self.until_boot_ms and self.until_boot_ms != serving.until_boot_ms:
            return True
        self.until_boot_ms = serving.until_boot_ms
        return False

    def lives_anew(self, life: NewIncarnation) -> None:
        """The hold ran out, and the server has begun another life."""
        self._life = (life.incarnation, life.key)
        self.until_boot_ms = 0
