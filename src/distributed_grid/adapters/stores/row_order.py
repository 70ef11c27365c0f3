"""In which order keys and event numbers stand, the same for every store."""

from collections.abc import Iterable

from distributed_grid.errors import Conflict
from distributed_grid.ports import EventRow

LAST_CHARACTER = chr(0x10FFFF)


def last_seq_after(events: Iterable[EventRow], last_seq: int) -> int:
    """The number of the last event once these are stored; `Conflict` when they do not follow."""
    for event in events:
        if event.seq <= last_seq:
            raise Conflict(f"event {event.seq} does not follow event {last_seq}: numbers must grow")
        last_seq = event.seq
    return last_seq


def end_of_prefix(prefix: str) -> str | None:
    """The smallest string above all that begin with `prefix`; None when there is none."""
    stem = prefix.rstrip(LAST_CHARACTER)
    if not stem:
        return None
    following = ord(stem[-1]) + 1
    if 0xD800 <= following <= 0xDFFF:  # surrogates are no characters of their own
        following = 0xE000
    return stem[:-1] + chr(following)
