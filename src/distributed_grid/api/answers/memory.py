"""Answers about the memory pool: blocks, the places of their copies, and the usage of the pool."""

from __future__ import annotations

from msgspec import field

from distributed_grid.api.answers.common import Answer, Viewer
from distributed_grid.domain.blocks import Block


class BlockRow(Answer, frozen=True, kw_only=True):
    """A block of the memory pool."""

    block_id: str
    name: str
    size: int
    user: str
    state: str
    copies: int
    nodes: list[str]
    on_disk: bool
    generation: int
    created_at: str | None
    expires_at: str | None
    term_seconds: float
    session: bool
    meta: str
    detail: str

    @classmethod
    def of(cls, viewer: Viewer, block: Block) -> BlockRow:
        state = "ready" if block.moving is None else "moving"
        return cls(
            block_id=block.id,
            name=block.name,
            size=block.size_bytes,
            user=block.user,
            state="freeing" if block.freeing else "lost" if block.lost else state,
            copies=block.copies,
            nodes=[place.node for place in block.places if not place.on_disk],
            on_disk=any(place.on_disk for place in block.places),
            generation=block.generation,
            created_at=viewer.time(block.made_at_ms),
            expires_at=viewer.time(block.ends_at_ms),
            term_seconds=block.term_ms / 1000,
            session=bool(block.session),
            meta=block.meta,
            detail=block.detail,
        )


class BlockDetail(Answer, frozen=True):
    block: BlockRow


class BlockPlace(Answer, frozen=True, kw_only=True):
    """Place of a copy, with its ticket; without an address if it cannot be used at present."""

    node: str
    copy_: str = field(name="copy")
    on_disk: bool
    host: str = ""
    port: int = 0
    fingerprint: str = ""
    path: str = ""
    incarnation: str = ""
    claims: str = ""
    secret: str = ""


class LocatedBlock(Answer, frozen=True):
    """A block and its copies, with tickets to read and write them."""

    block: BlockRow
    places: list[BlockPlace]


class BlockList(Answer, frozen=True):
    """A page of blocks, by their ids."""

    blocks: list[BlockRow]
    more: bool


class RenewedBlocks(Answer, frozen=True):
    renewed: int


class LenderRow(Answer, frozen=True, kw_only=True):
    """Memory that a node lends to the pool."""

    node: str
    blocks: int
    bytes: int
    free_bytes: int
    serving: bool
    address: str


class MemoryStats(Answer, frozen=True, kw_only=True):
    """Usage of the pool, in all and by node."""

    blocks: int
    bytes: int
    bytes_on_disk: int
    moving: int
    lost: int
    nodes: list[LenderRow]
