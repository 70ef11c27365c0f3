"""Ledgers and scenarios that are checked when the test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from distributed_grid.domain.ledger import Ledger
from tests.support.builders import Scenario, a_ledger, a_node


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """One node of four cores, heard and offering; its ledger is checked at the end."""
    found = a_ledger(a_node("gpu1", cores=4, memory_gb=16))
    yield found
    found.check()


@pytest.fixture
def new_scenario() -> Iterator[Callable[..., Scenario]]:
    """`new_scenario(node, …)` begins one; every ledger it led to is checked at the end."""
    begun: list[Scenario] = []

    def begin(*nodes, **kwargs) -> Scenario:
        begun.append(Scenario(*(nodes or (a_node("gpu1", cores=4, memory_gb=16),)), **kwargs))
        return begun[-1]

    yield begin
    for one in begun:
        one.ledger.check()


@pytest.fixture
def far_scenario() -> Iterator[Scenario]:
    """A node of four cores on another machine that holds what it has for a minute; its ledger is checked at the end."""
    scenario = Scenario(a_node("gpu2", cores=4, hold_s=60))
    yield scenario
    scenario.ledger.check()
