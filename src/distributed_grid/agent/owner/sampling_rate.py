"""How often to measure: often while the owner may be coming back, seldom while nothing happens. Pure.

Rule 1. With borrowed work on the machine and the owner's use changing, or near the point where it must yield, the
        next look is a quarter of a second away.
Rule 2. Every calm look doubles the wait: to half a second while work is borrowed, to two seconds at rest.
Rule 3. Without borrowed work there is nothing to take back, so nothing hurries.
"""

from __future__ import annotations

from msgspec import Struct

FAST_MS = 250
WATCHFUL_MS = 500
REST_MS = 2000
CHANGE_MILLI = 100
NEAR_MILLI = 150


class ActivitySample(Struct, frozen=True):
    """What one measurement saw: the owner's use in thousandths, and the most it may be before work must yield.

    Each `(used, most)` pair is one resource (CPU, memory, each GPU); without thresholds nothing is ever near.
    """

    borrowed: bool
    outside: tuple[tuple[int, int | None], ...]


class SamplingRate:
    """Decides from look to look how long to wait for the next one."""

    def __init__(self) -> None:
        self._wait_ms = FAST_MS
        self._anchor: tuple[int, ...] | None = None

    def after(self, look: ActivitySample) -> int:
        """Milliseconds from this look to the next."""
        used = tuple(amount for amount, _ in look.outside)
        changed = self._has_changed(used)
        if look.borrowed and (changed or _is_near(look)):
            self._wait_ms = FAST_MS
        else:
            self._wait_ms = min(2 * self._wait_ms, WATCHFUL_MS if look.borrowed else REST_MS)
        return self._wait_ms

    def _has_changed(self, used: tuple[int, ...]) -> bool:
        """Whether use went away from where it last stood still, so that a slow climb is a change, too."""
        anchor = self._anchor
        if anchor is not None and _is_close(used, anchor):
            return False
        self._anchor = used
        return anchor is not None


def _is_close(used: tuple[int, ...], before: tuple[int, ...]) -> bool:
    """Whether these are the same resources, none of them used much differently."""
    same = len(used) == len(before)
    return same and all(abs(now - then) < CHANGE_MILLI for now, then in zip(used, before, strict=True))


def _is_near(look: ActivitySample) -> bool:
    """Whether some use is close to, or over, what the owner's machine puts up with."""
    return any(most is not None and used >= most - NEAR_MILLI for used, most in look.outside)
