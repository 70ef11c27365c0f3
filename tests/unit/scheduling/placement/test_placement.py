"""Where a request goes: required nodes are a must, preferred ones a wish, then rank, then slack."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import GpuDevice
from distributed_grid.scheduling.placement.filters import fitting
from distributed_grid.scheduling.placement.placement import place
from tests.support.builders import GB, NOW, Scenario, a_ledger, a_node, a_request, an_ask


def where(ledger: Ledger, avoid: frozenset[str] = frozenset(), **request) -> str | None:
    found = place(ledger, a_request(**request), avoid=avoid)
    return None if found is None else found.node


@pytest.fixture
def trio() -> Ledger:
    """Three nodes: a busy-looking small one, a middle one, a large one."""
    return a_ledger(a_node("small", cores=2), a_node("middle", cores=4), a_node("large", cores=8, gpus=1))


def test_the_node_with_most_slack_gets_it():
    story = Scenario(a_node("gpu1", cores=4), a_node("gpu2", cores=4))
    story.ask(a_request("r1", cores=1, require=["gpu1"]))
    assert where(story.ledger) == "gpu2"


def test_the_higher_rank_lends_first_whatever_the_slack():
    story = Scenario(a_node("gpu1", cores=4, rank=2000), a_node("gpu2", cores=4, rank=1000))
    story.ask(a_request("r1", cores=3, require=["gpu1"]))
    assert where(story.ledger, cores=1) == "gpu1"
    assert where(story.ledger, cores=2) == "gpu2"


def test_a_preferred_node_comes_before_any_score(trio):
    assert where(trio, prefer=["small"]) == "small"


def test_of_several_preferred_nodes_the_one_with_most_slack_is_taken(trio):
    assert where(trio, cores=2, prefer=["small", "middle", "large"]) == "large"


def test_a_wish_that_cannot_be_granted_is_forgotten(trio):
    assert where(trio, cores=3, prefer=["small"]) == "large"


def test_a_required_node_is_a_must(trio):
    assert where(trio, require=["middle"]) == "middle"
    assert where(trio, cores=5, require=["middle"]) is None


def test_a_name_nobody_has_is_no_place(trio):
    assert where(trio, require=["nowhere"]) is None
    assert where(trio, prefer=["nowhere"]) == "large"


def test_a_node_to_avoid_is_never_taken_not_even_when_required(trio):
    assert where(trio, avoid=frozenset({"large"})) != "large"
    assert where(trio, avoid=frozenset({"large"}), prefer=["large"]) != "large"
    assert where(trio, avoid=frozenset({"large"}), require=["large"]) is None
    assert where(trio, avoid=frozenset({"nowhere"})) == "large"


def test_only_nodes_with_a_fresh_offer_are_considered():
    ledger = Ledger([a_node("gpu1")])
    assert where(ledger) is None
    assert where(ledger, require=["gpu1"]) is None


def test_a_grid_without_nodes_has_no_place():
    assert where(Ledger()) is None


def test_a_node_that_passes_the_filter_but_not_the_detail_is_passed_over():
    ledger = a_ledger(
        a_node("gpu1", gpus=[GpuDevice(0, 8 * GB)], rank=3000),
        a_node("gpu2", gpus=[GpuDevice(0, 24 * GB)], rank=2000),
        a_node("gpu3", custom={"fpga": 1}),
    )
    assert where(ledger, gpus=1, gpu_memory_gb=12) == "gpu2"
    assert where(ledger, custom={"fpga": 1}) == "gpu3"
    assert where(ledger, gpus=1, gpu_memory_gb=48) is None


@pytest.mark.parametrize(
    ("ask", "nodes"),
    [
        (an_ask(cores=3), {"middle", "large"}),
        (an_ask(memory_gb=16), {"small", "middle", "large"}),
        (an_ask(memory_gb=17), set()),
        (an_ask(gpus=1), {"large"}),
        (an_ask(gpus=0.1), {"large"}),
        (an_ask(gpus=2), set()),
    ],
)
def test_the_filter_finds_every_node_with_room(trio, ask, nodes):
    assert {trio.columns.names[row] for row in fitting(trio, ask).nonzero()[0]} == nodes


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=6),
    st.builds(an_ask, cores=st.integers(0, 9), gpus=st.sampled_from([0, 0.5, 1, 2, 3])),
)
def test_a_place_is_found_exactly_where_one_exists_and_the_best_rank_wins(shapes, ask):
    nodes = [a_node(f"n{i}", cores=cores, gpus=gpus, rank=rank) for i, (cores, gpus, rank) in enumerate(shapes)]
    ledger = a_ledger(*nodes)
    fit = [node for node in nodes if ledger.book(node.name).claim_for(ask, node.lendable) is not None]
    found = place(ledger, a_request(cores=ask.cpu_milli / 1000, gpus=ask.gpu_milli / 1000))
    assert (found is None) == (not fit)
    if found is not None:
        assert ledger.nodes[found.node].rank == max(node.rank for node in fit)


def test_the_same_ledger_and_request_give_the_same_place(trio):
    request = a_request(cores=1)
    assert place(trio, request) == place(trio, request) == place(Ledger(trio.rows()), request)


def test_a_place_is_a_node_and_the_exact_claim_there(trio):
    found = place(trio, a_request(cores=1, memory_gb=2, gpus=0.5))
    assert found is not None
    assert found.claim == trio.book("large").claim_for(an_ask(1, 2, 0.5), trio.lends("large"))
    assert trio.offers["large"].made_at_ms == NOW
