"""Pages of a list, one after the other, for commands and for the Python front."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:  # most of its users import no msgspec
    from msgspec import UnsetType


class PageOfRows(Protocol):
    """An answer with some rows of a list; `next` is None in the last one."""

    @property
    def next(self) -> str | UnsetType | None: ...


P = TypeVar("P", bound=PageOfRows)


def every_page(ask: Callable[[str], P]) -> Iterator[P]:
    """All pages of a list: `every_page(lambda cursor: client.list_nodes(cursor=cursor))`."""
    cursor: str | UnsetType | None = ""
    while isinstance(cursor, str):
        page = ask(cursor)
        yield page
        cursor = page.next


async def every_page_async(ask: Callable[[str], Awaitable[P]]) -> AsyncIterator[P]:
    """All pages of a list, from an asyncio client."""
    cursor: str | UnsetType | None = ""
    while isinstance(cursor, str):
        page = await ask(cursor)
        yield page
        cursor = page.next
