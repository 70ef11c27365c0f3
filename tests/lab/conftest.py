"""One lab of three hosts for all tests of a run; changes to cables, disks and clocks are reverted after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.lab import skewed_clocks
from tests.lab.lab import Lab, problem


@pytest.fixture(scope="session")
def shared_lab() -> Iterator[Lab]:
    """The lab itself; tests ask for `lab`."""
    if reason := problem():
        pytest.skip(reason)
    with Lab() as lab:
        yield lab


@pytest.fixture
def lab(shared_lab: Lab) -> Iterator[Lab]:
    """gpu-master, gpu1 and gpu2, each with two cores and 3 GB, all in order."""
    yield shared_lab
    shared_lab.mend()


@pytest.fixture
def a_lab() -> Callable[..., Lab]:
    """Makes a lab of one's own, for a `with` statement; it takes what `Lab` takes."""
    if reason := problem():
        pytest.skip(reason)
    return Lab


@pytest.fixture
def needs_skew() -> None:
    """For tests that call `skew_seconds`."""
    if reason := skewed_clocks.problem():
        pytest.skip(reason)
