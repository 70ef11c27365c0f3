"""Blocks: bytes of the memory pool, with a copy in the memory of one or more nodes, or on a disk.

The ledger is the directory of blocks. A copy in memory is a lease of its node; one on disk needs none. Whenever the
copies of a block change its generation grows, so that who knows the old ones finds out. A copy that is no longer needed
is `leaving` until its node has reported that it is freed.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

MAX_BLOCK_BYTES = 1 << 46
MAX_COPIES = 3
MAX_NAME_CHARS = 512
MAX_META_CHARS = 4096


def copy_id(block_id: str, number: int) -> str:
    """The request, and the lease, of a block's first, second, … copy."""
    return f"{block_id}:{number}"


class BlockCopy(Struct, frozen=True):
    """Where a copy is: its name (also its lease's id), the node ("" is the control plane's own machine), the
    incarnation of that node's memory (not known yet: ""), and whether it is on disk instead."""

    copy: str
    node: str
    incarnation: str = ""
    on_disk: bool = False


class CopyMove(Struct, frozen=True):
    """A copy that is being made of another, under the next generation; with `keep` the source stays."""

    source: str
    place: BlockCopy
    generation: int
    keep: bool
    why: str


class Block(Struct, frozen=True):
    """A block: its size, user, end, and copies.

    `places` has the copy that is read first. `session` is the program that renews it while it runs, for `term_ms`
    each time; without one its end is fixed. `home` is the node of the borrower: there it goes to disk when no node
    has room. `lost` says that its bytes are gone; `freeing` that it was released.
    """

    kind: ClassVar[str] = "block"

    id: str
    user: str
    size_bytes: int
    made_at_ms: int
    ends_at_ms: int
    copies: int = 1
    name: str = ""
    meta: str = ""
    session: str = ""
    term_ms: int = 0
    home: str = ""
    prefer: str = ""
    generation: int = 1
    next_copy: int = 1
    places: tuple[BlockCopy, ...] = ()
    leaving: tuple[BlockCopy, ...] = ()
    moving: CopyMove | None = None
    tried_at_ms: int = 0
    freeing: bool = False
    lost: bool = False
    detail: str = ""

    @property
    def key(self) -> str:
        return self.id

    @property
    def is_over(self) -> bool:
        return self.freeing and not self.leaving

    @property
    def is_settled(self) -> bool:
        """Whether nothing has to be done about it now."""
        short = len(self.places) < self.copies or any(place.on_disk for place in self.places)
        return not (short or self.leaving or self.moving or self.lost)

    @property
    def everywhere(self) -> tuple[BlockCopy, ...]:
        """Every copy: present, being made, or being freed."""
        return (*self.places, *self.leaving, *((self.moving.place,) if self.moving is not None else ()))


class MemoryServerRow(Struct, frozen=True):
    """How the memory of a node can be used now. Never stored: the key is a secret."""

    kind: ClassVar[str] = "memory_server"

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
    """The block that a copy belongs to, by its name."""
    return copy.rpartition(":")[0]
