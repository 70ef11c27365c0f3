"""Pages of lists: a bounded number of rows in a fixed order, and a cursor that names the place of the last one.

A place is named by what never changes of a row (the time it began, its id), never by a position: rows that come or go
meanwhile move nothing. The rows of a page are taken in one read; they are compared in slices, outside of any batch.

A list with history has living rows from the ledger and ended ones from the store. A row may end while somebody walks
through the list, so a cursor has two numbers of ended rows (`NumberedRow`): that of the last one when the walk began,
and that of the last one that an earlier page has looked at. A page begins with what has ended since, as far as no
earlier page had it as living; then come living rows; then those that had ended when the walk began. So a row that is
kept during the whole walk is in exactly one page.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace

from distributed_grid.control.grid import Grid, LoopSlices
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import Row, decode_as
from distributed_grid.errors import BadInput
from distributed_grid.ports import EndedRow, NumberedRow

MAX_RECENT = 1_000
"""Rows that ended during a walk and are looked at for one page."""
T = TypeVar("T")
R = TypeVar("R", bound=Row)
Count = Annotated[int, Meta(ge=0, le=2**62)]
Order = tuple[int, str]
"""Place of a row in its list: a time in milliseconds, and its id."""


class ListPlace(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Place after a row of the list of this name."""

    of: str

    def cursor(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")


class RowPlace(ListPlace, frozen=True):
    """Place in a list without history."""

    at_ms: Count
    key: str


class LivingPlace(ListPlace, frozen=True, tag="living"):
    """Place among the living rows; `at_ms` is -1 before the first one."""

    begin: Count  # number of the last ended row when the walk began
    seen: Count  # number of the last ended row that an earlier page has looked at
    at_ms: Annotated[int, Meta(ge=-1, le=2**62)] = -1
    key: str = ""


class EndedPlace(ListPlace, frozen=True, tag="ended"):
    """Place among the rows that had ended when the walk began."""

    begin: Count
    at_ms: Count
    number: Count


def place_of(cursor: str, name: str, kinds: Any) -> Any:
    """The place that a cursor of a list names; None for the beginning, BadInput for a cursor that is none of it."""
    if not cursor:
        return None
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        place = msgspec.json.decode(text, type=kinds)
        if place.of == name:
            return place
    except (ValueError, msgspec.DecodeError):
        pass
    raise BadInput(f"this is no cursor of the list of {name}: give the `next` of an earlier page")


class Page(Struct, Generic[T], frozen=True):
    """Rows of one page; `end` is None where the list ends with it."""

    rows: Sequence[T]
    end: ListPlace | None
    place_after: Callable[[int], ListPlace]
    """The place after the first so many rows, at least one and fewer than all."""

    def next(self, count: int | None = None) -> str | None:
        """Cursor of the page that begins after the first `count` rows, or after all; None at the end of the list."""
        place = self.end if count is None or count == len(self.rows) else self.place_after(count)
        return place.cursor() if place is not None else None


async def select_page(
    slices: LoopSlices,
    rows: Sequence[T],
    order: Callable[[T], Order],
    *,
    name: str,
    cursor: str,
    limit: int,
) -> Page[T]:
    """The rows behind a cursor, in their order."""
    place: RowPlace | None = place_of(cursor, name, RowPlace)
    first, has_more = await _first_rows(slices, rows, order, (place.at_ms, place.key) if place else None, limit)

    def place_after(count: int) -> RowPlace:
        return RowPlace(name, *order(first[count - 1]))

    return Page(first, place_after(len(first)) if has_more else None, place_after)


async def _first_rows(
    slices: LoopSlices,
    rows: Sequence[T],
    order: Callable[[T], Order],
    after: Order | None,
    limit: int,
    *,
    newest_first: bool = False,
) -> tuple[list[T], bool]:
    """At most `limit` rows behind a place, in their order or newest first; and whether there are more."""
    if after is not None:
        place = after
        rows = await slices.select(
            rows, (lambda row: order(row) < place) if newest_first else (lambda row: order(row) > place)
        )
    has_more = len(rows) > limit
    if has_more:
        times = np.array(await slices.convert(rows, lambda row: order(row)[0]))
        nth = len(rows) - limit if newest_first else limit - 1
        bound = int(np.partition(times, nth)[nth])
        await slices.wait()
        rows = await slices.select(
            rows, (lambda row: order(row)[0] >= bound) if newest_first else (lambda row: order(row)[0] <= bound)
        )
    keys = await slices.convert(rows, order)
    positions = sorted(range(len(rows)), key=keys.__getitem__, reverse=newest_first)
    return [rows[position] for position in positions[:limit]], has_more


class HistoryList(Generic[R]):
    """A list of living and of ended rows of one kind. Living rows come in the order in which they began, or newest
    first; ended ones come the last ended first."""

    def __init__(
        self,
        grid: Grid,
        kind: type[R],
        living: Callable[[Ledger], Iterable[R]],
        began_ms: Callable[[R], int],
        *,
        newest_first: bool = False,
    ) -> None:
        self._grid = grid
        self._kind = kind
        self._name = f"{kind.kind}s"
        self._living = living
        self._order: Callable[[R], Order] = lambda row: (began_ms(row), row.key)
        self._newest_first = newest_first

    def decode(self, row: R | NumberedRow) -> R:
        """A row of a page, decoded where it comes from the store."""
        return decode_as(self._kind, row.row.blob) if isinstance(row, NumberedRow) else row

    async def page(
        self,
        cursor: str,
        limit: int,
        *,
        choose: Callable[[Sequence[R]], Awaitable[Sequence[R]]],
        fits: Callable[[EndedRow], bool] | None = lambda row: True,
        user: str | None = None,
    ) -> Page[R | NumberedRow]:
        """The page behind a cursor. `choose` selects among all living rows, once a page, and `fits` among ended ones,
        of one user or of all; without `fits` they are left out."""
        place: LivingPlace | EndedPlace | None = place_of(cursor, self._name, LivingPlace | EndedPlace)
        if place is None:  # before the living rows are read: a row that ends in between is found by its number
            last = await self._grid.query(lambda store: store.last_ended_number())
            place = LivingPlace(self._name, begin=last, seen=last)
        living = await choose(await self._grid.read(lambda ledger, now: tuple(self._living(ledger))))
        rows: list[R | NumberedRow] = []
        places: list[ListPlace] = []
        latest: ListPlace
        if isinstance(place, LivingPlace):
            latest, has_more = await self._add_living(rows, places, place, living, limit, user, fits)
            if has_more or fits is None:
                return Page(rows, latest if has_more else None, lambda count: places[count - 1])
            before = None
        else:
            before, latest = (place.at_ms, place.number), place
        begin, room = place.begin, limit - len(rows)
        past = await self._grid.query(
            lambda store: store.ended_before(self._kind.kind, begin, limit=room + 1, place=before, user=user)
        )

        def place_of_ended(each: NumberedRow) -> EndedPlace:
            return EndedPlace(self._name, begin, each.row.ended_at_ms, each.number)

        shown = await self._grid.slices.select(past[:room], lambda each: fits is None or fits(each.row))
        rows += shown
        places += await self._grid.slices.convert(shown, place_of_ended)
        end = None
        if len(past) > room:
            end = place_of_ended(past[room - 1]) if room else latest
        return Page(rows, end, lambda count: places[count - 1])

    async def _add_living(
        self,
        rows: list[R | NumberedRow],
        places: list[ListPlace],
        place: LivingPlace,
        living: Sequence[R],
        limit: int,
        user: str | None,
        fits: Callable[[EndedRow], bool] | None,
    ) -> tuple[LivingPlace, bool]:
        """Add the rows that ended since the last page and that no page had as living, then living ones; the place
        after them, and whether there are more."""
        order, window = self._order, min(limit, MAX_RECENT)
        after, first_unseen = (place.at_ms, place.key) if place.at_ms >= 0 else None, place.seen
        recent: list[NumberedRow] = []
        if fits is not None:
            recent = await self._grid.query(
                lambda store: store.ended_after(self._kind.kind, first_unseen, limit=window, user=user)
            )
        decoded = await self._grid.slices.convert(recent, self.decode)
        for each, row in zip(recent, decoded, strict=True):
            place = replace(place, seen=each.number)
            is_behind = after is None or (order(row) < after if self._newest_first else order(row) > after)
            if is_behind and fits is not None and fits(each.row):
                rows.append(each)
                places.append(place)
        if len(recent) == window:  # there may be more of them, which come first
            return place, True
        ended_keys = {row.key for row in decoded}
        if ended_keys:
            living = await self._grid.slices.select(living, lambda row: row.key not in ended_keys)
        shown, has_more = await _first_rows(
            self._grid.slices, living, order, after, limit - len(rows), newest_first=self._newest_first
        )
        name, begin, seen = self._name, place.begin, place.seen
        living_places = await self._grid.slices.convert(shown, lambda row: LivingPlace(name, begin, seen, *order(row)))
        rows += shown
        places += living_places
        return living_places[-1] if shown else place, has_more
