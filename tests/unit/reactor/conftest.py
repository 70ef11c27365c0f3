"""Hypothesis without dice, and stories whose ledgers are checked on the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from distributed_grid.domain.ledger import Ledger
from distributed_grid.testing.builders import Story, a_ledger, a_node

settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """One node of four cores, heard and offering; its books are checked at the end."""
    found = a_ledger(a_node("gpu1", cores=4, memory_gb=16))
    yield found
    found.check()


@pytest.fixture
def story() -> Iterator[Callable[..., Story]]:
    """`story(node, …)` begins one; every ledger it led to is checked at the end."""
    begun: list[Story] = []

    def begin(*nodes, **kwargs) -> Story:
        begun.append(Story(*(nodes or (a_node("gpu1", cores=4, memory_gb=16),)), **kwargs))
        return begun[-1]

    yield begin
    for one in begun:
        one.ledger.check()
