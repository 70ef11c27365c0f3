"""Fitness: 0 for the unfit, more for the freer, and the same order in the columns that the scheduler uses."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.resources import Amounts, Capacity, Claim, GpuDevice
from distributed_grid.scheduling.placement.fitness import fitness_of, fitness_rows
from tests.support.builders import GB, a_capacity, a_ledger, a_node, an_ask

amounts = st.builds(
    lambda cores, memory, gpus: Amounts(cores * 500, memory * GB, gpus * 1000),
    st.integers(0, 8),
    st.integers(0, 16),
    st.integers(0, 2),
)
capacities = st.builds(
    lambda cores, memory, gpus: Capacity(cores * 500, memory * GB, tuple(GpuDevice(at, 8 * GB) for at in range(gpus))),
    st.integers(0, 16),
    st.integers(0, 32),
    st.integers(0, 3),
)
more = st.tuples(st.integers(0, 8000), st.integers(0, 8 * GB), st.integers(0, 2))


@given(ask=amounts, lends=capacities, extra=more)
def test_a_freer_node_is_never_less_fit(ask: Amounts, lends: Capacity, extra: tuple[int, int, int]) -> None:
    cpu, memory, gpus = extra
    devices = (*lends.gpus, *(GpuDevice(len(lends.gpus) + at, 8 * GB) for at in range(gpus)))
    freer = Capacity(lends.cpu_milli + cpu, lends.memory_bytes + memory, devices)
    assert fitness_of(ask, freer, NodeClaims()) >= fitness_of(ask, lends, NodeClaims())


@given(ask=amounts, lends=capacities, taken=amounts)
def test_what_is_taken_makes_nobody_fitter(ask: Amounts, lends: Capacity, taken: Amounts) -> None:
    claim = NodeClaims().claim_for(taken, lends)
    assume(claim is not None)
    assert claim is not None
    assert fitness_of(ask, lends, NodeClaims([claim])) <= fitness_of(ask, lends, NodeClaims())


@given(ask=amounts, lends=capacities)
def test_fitness_is_zero_for_the_unfit_and_from_a_half_to_one_for_the_fit(ask: Amounts, lends: Capacity) -> None:
    fits = NodeClaims().claim_for(ask, lends) is not None
    found = fitness_of(ask, lends, NodeClaims())
    assert 0.5 <= found <= 1 if fits else found == 0


@pytest.mark.parametrize(
    ("ask", "free", "fitness"),
    [
        (an_ask(cores=4), a_capacity(4, 16), 0.5),
        (an_ask(cores=1), a_capacity(4, 16), 0.875),
        (an_ask(cores=2, memory_gb=4), a_capacity(4, 16), 0.8125),
        (an_ask(cores=8), a_capacity(4, 16), 0.0),
        (an_ask(gpus=1), a_capacity(4, 16, 2), 0.75),
    ],
)
def test_the_formula(ask: Amounts, free: Capacity, fitness: float) -> None:
    assert fitness_of(ask, free, NodeClaims()) == fitness


@given(ask=amounts, sizes=st.lists(st.tuples(st.integers(1, 16), st.integers(1, 32)), min_size=1, max_size=6))
def test_the_columns_say_the_same(ask: Amounts, sizes: list[tuple[int, int]]) -> None:
    nodes = [a_node(f"n{at}", cores=cores, memory_gb=memory) for at, (cores, memory) in enumerate(sizes)]
    ledger = a_ledger(*nodes)
    scores = fitness_rows(ledger, ask)
    for node in nodes:
        alone = fitness_of(ask, ledger.lends(node.name), ledger.claims_on(node.name))
        if alone:
            assert scores[ledger.columns.rows[node.name]] == pytest.approx(1_000_000 * alone, abs=2)


def test_a_claim_counts() -> None:
    held = NodeClaims([Claim(cpu_milli=3000)])
    assert fitness_of(an_ask(cores=1), a_capacity(4, 16), held) == 0.5
