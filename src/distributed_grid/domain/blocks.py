"""Blocks: bytes of the memory pool, with a copy in the memory of one or more nodes, or on a disk.

The ledger is the directory of blocks. A copy in memory is a lease of its node; one on disk needs none. Whenever the
copies of a block change its generation grows, so that an outdated list of copies is noticed. A copy that is no longer
needed is `leaving` until its node has reported that it is freed.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from distributed_grid.domain.rows import Row

MAX_BLOCK_BYTES = 1 << 46
MAX_COPIES = 3
MAX_NAME_CHARS = 512
MAX_META_CHARS = 4096


def copy_id(block_id: str, number: int) -> str:
    """Id of the request and the lease of a block's first, second, … copy."""
    return f"{block_id}:{number}"


class BlockCopy(Struct, frozen=True):
    """A copy and its place."""

    copy: str  # also the id of its lease
    node: str  # empty: the control plane's own machine
    incarnation: str = ""  # of the node's memory; empty: not known yet
    on_disk: bool = False


class CopyMove(Struct, frozen=True):
    """A copy that is being made of another."""

    source: str
    place: BlockCopy
    generation: int  # the next one
    keep: bool  # the source stays
    why: str


class Block(Row, frozen=True, kw_only=True):
    kind: ClassVar[str] = "block"

    id: str
    user: str
    size_bytes: int
    made_at_ms: int
    ends_at_ms: int
    copies: int = 1
    name: str = ""
    meta: str = ""
    session: str = ""  # program that renews it for `term_ms` each time while it runs; empty: the end is fixed
    term_ms: int = 0
    home: str = ""  # node of the borrower, to whose disk it goes when no node has room
    prefer: str = ""
    generation: int = 1
    next_copy: int = 1
    places: tuple[BlockCopy, ...] = ()  # the first one is read
    leaving: tuple[BlockCopy, ...] = ()
    moving: CopyMove | None = None
    tried_at_ms: int = 0
    freeing: bool = False  # it was released
    lost: bool = False  # its bytes are gone
    detail: str = ""

    @property
    def key(self) -> str:
        return self.id

    @property
    def is_over(self) -> bool:
        return self.freeing and not self.leaving

    @property
    def is_settled(self) -> bool:
        """Whether it has all its copies in memory, and none to free."""
        short = len(self.places) < self.copies or any(place.on_disk for place in self.places)
        return not (short or self.leaving or self.moving or self.lost)

    @property
    def everywhere(self) -> tuple[BlockCopy, ...]:
        """Every copy: present, being made, or being freed."""
        return (*self.places, *self.leaving, *((self.moving.place,) if self.moving is not None else ()))


class MemoryServerRow(Row, frozen=True, kw_only=True):
    """Memory server of a node that can be used now. Never stored: the key is a secret."""

    kind: ClassVar[str] = "memory_server"
    is_volatile: ClassVar[bool] = True

    node: str
    host: str = ""
    port: int = 0
    fingerprint: str = ""
    path: str = ""
    incarnation: str = ""
    key_bytes: bytes = b""
    gone: bool = False

    @property
    def key(self) -> str:
        return self.node

    @property
    def is_over(self) -> bool:
        return self.gone

    def __repr__(self) -> str:
        return f"MemoryServerRow({self.node}, {self.host}:{self.port}, {self.incarnation})"


def block_of(copy: str) -> str:
    return copy.rpartition(":")[0]
