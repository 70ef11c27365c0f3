"""Pages of a list, one after the other, for commands and for the Python front."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

if TYPE_CHECKING:  # most of its users import no msgspec
    from msgspec import UnsetType

    from distributed_grid.api.answers.reports import GridStatus
    from distributed_grid.client.operations import AsyncOperations, Operations


class PageOfRows(Protocol):
    """An answer with some rows of a list; `next` is None in the last one."""

    @property
    def next(self) -> str | UnsetType | None: ...


P = TypeVar("P", bound=PageOfRows)


def every_page(ask: Callable[..., P], **arguments: Any) -> Iterator[P]:
    """All pages of a list: `every_page(client.list_boosts, node="gpu1")`."""
    cursor: str | UnsetType | None = ""
    while isinstance(cursor, str):
        page = ask(cursor=cursor, **arguments)
        yield page
        cursor = page.next


async def every_page_async(ask: Callable[..., Awaitable[P]], **arguments: Any) -> AsyncIterator[P]:
    """All pages of a list, from an asyncio client."""
    cursor: str | UnsetType | None = ""
    while isinstance(cursor, str):
        page = await ask(cursor=cursor, **arguments)
        yield page
        cursor = page.next


def joined(pages: Iterable[P], rows: str) -> P:
    """The first page, with the rows of all pages."""
    first, *others = pages
    answer: Any = first
    for page in others:
        answer[rows] += cast("Any", page)[rows]
    answer.update(more=False, next=None)
    return first


STATUS_LISTS = {
    "nodes": "list_nodes",
    "offers": "list_offers",
    "allocations": "list_leases",
    "recommendations": "list_recommendations",
}
"""Lists in a status, apart from the jobs, and the requests for all of their rows."""


def whole_status(client: Operations) -> GridStatus:
    """The status with every row of its lists; of the jobs those of `get_status`."""
    status: Any = client.get_status()
    for name, op in STATUS_LISTS.items():
        if status.omitted[name]:
            pages: Iterator[Any] = every_page(getattr(client, op))
            status[name] = [row for page in pages for row in page[name]]
            status.omitted[name] = 0
    return cast("GridStatus", status)


async def whole_status_async(client: AsyncOperations) -> GridStatus:
    """The same of an asyncio client."""
    status: Any = await client.get_status()
    for name, op in STATUS_LISTS.items():
        if status.omitted[name]:
            pages: AsyncIterator[Any] = every_page_async(getattr(client, op))
            status[name] = [row async for page in pages for row in page[name]]
            status.omitted[name] = 0
    return cast("GridStatus", status)
