"""Typical request shapes: counted, bounded, forgotten after a while, and weighed by how scarce its GPUs are.

What requests teach: the request_shapes ones are counted in the ledger, and the index of losses follows its rows.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.domain.statistics import RequestShape, RequestShapes
from distributed_grid.scheduling.placement.fragmentation import (
    HALVE_AFTER,
    MAX_SHAPES,
    TOTAL_WEIGHT,
    FragmentationIndex,
    count_shape,
    fragmentation_index,
    reweigh,
    shape_of,
)
from distributed_grid.scheduling.placement.placement import find_placement
from tests.support.builders import Scenario, a_node, a_request

shapes = st.builds(RequestShape, st.integers(0, 40), st.just(0), st.sampled_from([10, 250, 500, 1000, 4000]))


def after(*asked: RequestShape) -> RequestShapes:
    request_shapes = RequestShapes()
    for shape in asked:
        request_shapes = count_shape(request_shapes, shape)
    return request_shapes


def test_a_request_without_a_gpu_teaches_nothing():
    assert after(RequestShape(4000, 2**30)) == RequestShapes()


def test_what_is_nearly_the_same_is_counted_as_the_same():
    assert after(RequestShape(8000, 2**30, 500), RequestShape(8100, 2**30, 505)).counts == (
        (RequestShape(7680, 2**30, 500), 2),
    )
    assert len(after(RequestShape(7000, 2**30, 500), RequestShape(8000, 2**30, 500)).counts) == 2
    assert after(RequestShape(gpu_milli=3)).counts == ((RequestShape(gpu_milli=3), 1),)


def test_the_order_in_which_models_are_named_does_not_matter():
    assert (
        len(
            after(
                RequestShape(gpu_milli=1000, models=("b", "a")), RequestShape(gpu_milli=1000, models=("a", "b"))
            ).counts
        )
        == 1
    )


@given(st.integers(0, 2**60))
def test_rounding_leaves_out_at_most_an_eighth_and_rounding_again_nothing(amount):
    rounded = RequestShape(cpu_milli=amount).rounded
    assert amount - amount // 8 <= rounded.cpu_milli <= amount
    assert rounded.rounded == rounded


@given(st.lists(shapes, max_size=300))
def test_few_shapes_are_kept_and_none_of_them_counts_too_little(asked):
    request_shapes, truth = after(*asked), Counter(shape.rounded for shape in asked)
    kept = dict(request_shapes.counts)
    assert len(kept) == len(request_shapes.counts) <= MAX_SHAPES
    assert sum(kept.values()) == request_shapes.counted == len(asked)
    rarest = min(kept.values(), default=0) if len(kept) == MAX_SHAPES else 0
    assert all(truth[shape] <= count <= truth[shape] + rarest for shape, count in kept.items())
    assert all(truth[shape] <= rarest for shape in truth.keys() - kept.keys())


def test_what_nobody_asks_for_any_more_is_forgotten():
    old, new = RequestShape(gpu_milli=500), RequestShape(gpu_milli=1000)
    request_shapes = RequestShapes(((old, 3), (new, HALVE_AFTER - 4)), HALVE_AFTER - 1, taken=HALVE_AFTER - 1)
    request_shapes = count_shape(request_shapes, new)
    assert request_shapes.counts == ((old, 1), (new, (HALVE_AFTER - 3) // 2))
    assert (request_shapes.counted, request_shapes.taken) == (1 + (HALVE_AFTER - 3) // 2, (HALVE_AFTER - 1) // 2)
    request_shapes = count_shape(RequestShapes(request_shapes.counts, HALVE_AFTER - 1), new)
    assert [shape for shape, _ in request_shapes.counts] == [new]


def test_weights_are_due_with_the_first_request_and_then_after_a_fifth_more():
    request_shapes, due = RequestShapes(), []
    for number in range(1, 60):
        request_shapes = count_shape(request_shapes, RequestShape(gpu_milli=1000))
        if request_shapes.is_due:
            due.append(number)
            request_shapes = reweigh(request_shapes, [8000], 8000)
    assert due == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 19, 22, 26, 31, 37, 44, 52]


def test_the_scarcer_its_gpus_the_more_a_shape_matters():
    request_shapes = after(
        *[RequestShape(gpu_milli=1000)] * 3, RequestShape(gpu_milli=500), RequestShape(gpu_milli=8000)
    )
    weights = dict(reweigh(request_shapes, [6000, 6000, 1000], 6000).weights)
    assert weights[RequestShape(gpu_milli=1000)] == pytest.approx(3 * weights[RequestShape(gpu_milli=500)], abs=3)
    assert weights[RequestShape(gpu_milli=8000)] == pytest.approx(6 * weights[RequestShape(gpu_milli=500)], abs=6)


@given(st.lists(shapes, min_size=1, max_size=100), st.data())
def test_every_shape_weighs_something_and_all_together_stay_below_the_limit(asked, data):
    request_shapes = after(*asked)
    supply = data.draw(
        st.lists(st.integers(0, 2**40), min_size=len(request_shapes.counts), max_size=len(request_shapes.counts))
    )
    taken = reweigh(request_shapes, supply, 2**40)
    assert [shape for shape, _ in taken.weights] == [shape for shape, _ in request_shapes.counts]
    assert all(weight >= 1 for _, weight in taken.weights)
    assert sum(weight for _, weight in taken.weights) <= TOTAL_WEIGHT + MAX_SHAPES
    assert (taken.counts, taken.taken) == (request_shapes.counts, request_shapes.counted)
    assert not taken.is_due


SPARING = Strategy.FRAGMENTATION_AWARE


def a_grid_that_has_seen(*asks: float) -> Scenario:
    """Two nodes with two GPUs each, after requests for so many GPUs each came and went."""
    scenario = Scenario(a_node("one", gpus=2), a_node("two", gpus=2))
    for number, gpus in enumerate(asks):
        scenario.ask(a_request(f"t{number}", gpus=gpus))
        scenario.release(f"t{number}")
    return scenario


def test_only_requests_for_gpus_teach_something():
    scenario = a_grid_that_has_seen()
    scenario.ask(a_request("r1", cores=1))
    assert scenario.ledger.request_shapes.counted == 0
    scenario.ask(a_request("r2", gpus=1))
    scenario.ask(a_request("r2", gpus=1))
    assert scenario.ledger.request_shapes.counted == 1, "asking again is the same request"


def test_what_was_learned_is_stored_and_found_again():
    scenario = a_grid_that_has_seen(1, 1, 2, 0.5)
    request_shapes = scenario.ledger.request_shapes
    assert {shape.gpu_milli for shape, _ in request_shapes.weights} == {500, 1000, 2000}
    again = Ledger(decode_row(row.kind, encode_row(row)) for row in scenario.ledger.rows(durable_only=True))
    assert again.request_shapes == request_shapes


def test_where_pairs_are_usual_a_single_one_goes_where_a_pair_is_broken_already():
    scenario = a_grid_that_has_seen(2, 2, 2)
    scenario.ask(a_request("r1", gpus=1, require=["two"]))
    assert find_placement(scenario.ledger, a_request("r2", gpus=1, strategy=SPARING)).node == "two"


def test_a_part_goes_onto_the_device_where_it_leaves_the_least_useless():
    scenario = a_grid_that_has_seen(1, 1, 1, 0.5)
    scenario.ask(a_request("r1", gpus=0.5, require=["two"]))
    found = find_placement(scenario.ledger, a_request("r2", gpus=0.5, strategy=SPARING))
    (used,) = scenario.ledger.leases["r1"].claim.gpus
    assert (found.node, found.claim.gpus[0].index) == ("two", used.index)


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0.25, 0.5, 1, 2]), st.integers(0, 3), st.booleans()), min_size=1, max_size=20
    )
)
def test_the_index_always_says_what_one_made_anew_would_say(steps):
    scenario = Scenario(*(a_node(f"n{i}", cores=8, gpus=i) for i in range(4)))
    for number, (gpus, cores, lets_go) in enumerate(steps):
        scenario.ask(a_request(f"r{number}", gpus=gpus, cores=cores or 1, strategy=SPARING))
        if lets_go:
            held = sorted(lease.id for lease in scenario.ledger.leases.values() if lease.holds)
            if held:
                scenario.release(held[number % len(held)])
        shape = shape_of(a_request(gpus=gpus, cores=cores or 1).ask)
        anew = FragmentationIndex(scenario.ledger.columns, scenario.ledger.request_shapes).losses(shape)
        assert np.array_equal(fragmentation_index(scenario.ledger).losses(shape), anew)
        scenario.ledger.check()
