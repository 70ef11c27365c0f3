"""Backoff of a node that takes back what was placed on it, time after time.

Its owner is at home, or its agent is out of order. Either way a job that is placed there at once is requeued at once,
and so on for ever. After the second time in a row the node offers nothing for `FIRST_REST_MS`, after each further one
for twice as long, up to `MAX_REST_MS`. A node that has kept what was placed on it for a while (`SETTLED_MS`, or as long
as it rested) begins anew. What was placed before the last time belongs to that one: an owner takes all back at once.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.nodes import NodeObservation

FIRST_REST_MS = 10_000
MAX_REST_MS = 600_000
SETTLED_MS = 60_000
_MAX_DOUBLINGS = 16


def count_reclaim(seen: NodeObservation, placed_at_ms: int, now: int) -> NodeObservation:
    """The node has taken back what was placed on it at this moment."""
    if seen.reclaims and placed_at_ms < seen.reclaimed_at_ms:
        return seen
    rest_ms = _rest_ms(seen.reclaims)
    kept_ms = now - seen.reclaimed_at_ms - rest_ms
    in_a_row = seen.reclaims if kept_ms < max(SETTLED_MS, rest_ms) else 0
    return replace(seen, reclaims=in_a_row + 1, reclaimed_at_ms=now)


def rest_left_ms(seen: NodeObservation | None, now: int) -> int:
    """How long the node offers nothing yet; 0 where it may."""
    return max(seen.reclaimed_at_ms + _rest_ms(seen.reclaims) - now, 0) if seen is not None and seen.reclaims else 0


def _rest_ms(reclaims: int) -> int:
    """How long a node rests that has taken work back so many times in a row."""
    return min(FIRST_REST_MS << min(reclaims - 2, _MAX_DOUBLINGS), MAX_REST_MS) if reclaims > 1 else 0
