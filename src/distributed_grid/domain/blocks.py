"""A block: bytes of the memory pool, with a copy in the memory of one or more nodes, or on a disk.

Rule 1: the ledger is the directory of blocks. A copy in memory is a lease of its node; one on disk needs none.
Rule 2: whenever the places of a block change its generation grows, so that whoever knows the old ones finds out.
Rule 3: a copy that is not wanted any more is `leaving` until its node has said that nothing of it is left.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

MAX_BLOCK_BYTES = 1 << 46
MAX_COPIES = 3
MAX_NAME_CHARS = 512
MAX_META_CHARS = 4096


class BlockCopy(Struct, frozen=True):
    """Where a copy is: its name there (and its lease's id), the node ("" is the control plane's own machine), which
    life of that node's memory it belongs to (not known yet: ""), and whether it is on disk instead."""

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
    """So many bytes, for whom, until when, and where.

    `places` has the copy that is read first. `session` is the program that renews it while it lives, for `term_ms`
    each time; without one its time is fixed. `home` is the node of whoever asked for it: there it goes to disk when no
    node has room. `lost` says that its bytes are gone; `freeing` that nobody wants it any more.
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
        """Whether nothing has to be done about it now, other than to keep it."""
        short = len(self.places) < self.copies or any(place.on_disk for place in self.places)
        return not (short or self.leaving or self.moving or self.lost)

    @property
    def everywhere(self) -> tuple[BlockCopy, ...]:
        """Every place that has, gets or still has a copy."""
        return (*self.places, *self.leaving, *((self.moving.place,) if self.moving is not None else ()))


class MemoryServerRow(Struct, frozen=True):
    """How the memory of a node can be used now. Never stored: the key is a secret."""

    kind: ClassVar[str] = "lender"

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
        return f"Lender({self.node}, {self.host}:{self.port}, {self.incarnation})"


def block_of(copy: str) -> str:
    """The block that a copy belongs to, by its name."""
    return copy.rpartition(":")[0]
