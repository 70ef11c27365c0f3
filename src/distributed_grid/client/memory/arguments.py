"""What callers of the memory pool hand in, made what it has to be; BadInput where that cannot be."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from distributed_grid.errors import BadInput

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from distributed_grid.client.placement_arguments import Span


def checked_name(name: str) -> str:
    """A name that can be one; BadInput where it cannot."""
    if not name or type(name) is not str:
        raise BadInput(f"a key is a text of at least one letter, not {name!r}")
    return name


def bytes_view(data: Buffer) -> memoryview:
    """The bytes of any contiguous buffer, without a copy."""
    try:
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError):
        raise BadInput(f"contiguous bytes can be stored, and not this {type(data).__name__}; see put_array") from None


def whole(number: int, what: str) -> int:
    """A whole number; BadInput for anything else."""
    try:
        return operator.index(number)
    except TypeError:
        raise BadInput(f"{what} is a whole number of bytes, not {number!r}") from None


def seconds(ttl: Span) -> float:
    """How long a block is to last."""
    from distributed_grid.client.placement_arguments import seconds_of

    return seconds_of(ttl, "the time of a block")
