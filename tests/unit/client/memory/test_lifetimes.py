"""Holdings of a program are renewed while it lives, again after a failure, and not once it has ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from distributed_grid.client.memory.lifetimes import Renewals
from distributed_grid.errors import NotFound, Unreachable

OFTEN = 0.005


@pytest.fixture
def renewals() -> Iterator[Renewals]:
    renewals = Renewals()
    yield renewals
    renewals.stop()
    renewals.stop()


class CountingRenewal:
    """Counts renewals, and fails as it is told."""

    def __init__(self, enough: int, *failures: Exception) -> None:
        self.count = 0
        self.enough = threading.Event()
        self._enough = enough
        self._failures = list(failures)

    def __call__(self) -> None:
        self.count += 1
        if self.count >= self._enough:
            self.enough.set()
        if self._failures:
            raise self._failures.pop(0)


def test_it_is_renewed_again_and_again_and_failures_do_not_end_that(renewals: Renewals) -> None:
    one, other = CountingRenewal(4, Unreachable("away"), OSError("no line"), ValueError("?")), CountingRenewal(3)
    renewals.add("one", OFTEN, one)
    renewals.add("other", OFTEN, other)
    assert one.enough.wait(10)
    assert other.enough.wait(10)


def test_what_is_gone_or_dropped_is_renewed_no_more(renewals: Renewals) -> None:
    gone, dropped, kept = CountingRenewal(1, NotFound("it has ended")), CountingRenewal(1), CountingRenewal(5)
    renewals.add("dropped", OFTEN, dropped)
    assert dropped.enough.wait(10)
    renewals.remove("dropped")
    renewals.remove("dropped")
    renewals.add("gone", OFTEN, gone)
    assert gone.enough.wait(10)
    before = dropped.count
    renewals.add("kept", OFTEN, kept)
    assert kept.enough.wait(10)
    assert gone.count == 1
    assert dropped.count <= before + 1


def test_nothing_is_kept_twice_or_after_the_end(renewals: Renewals) -> None:
    first, second, late = CountingRenewal(3), CountingRenewal(1), CountingRenewal(1)
    renewals.add("name", OFTEN, first)
    renewals.add("name", OFTEN, second)
    assert first.enough.wait(10)
    assert second.count == 0
    renewals.stop()
    renewals.add("late", OFTEN, late)
    assert late.count == 0
