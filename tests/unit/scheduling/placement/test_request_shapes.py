"""What is typical: counted, bounded, forgotten after a while, and weighed by how scarce its GPUs are."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.request_shapes import RequestShape, RequestShapes
from distributed_grid.scheduling.placement.request_shapes import ALL_WEIGHTS, MEMORY, MOST, seen, weighed

shapes = st.builds(RequestShape, st.integers(0, 40), st.just(0), st.sampled_from([10, 250, 500, 1000, 4000]))


def after(*asked: RequestShape) -> RequestShapes:
    typical = RequestShapes()
    for shape in asked:
        typical = seen(typical, shape)
    return typical


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
    typical, truth = after(*asked), Counter(shape.rounded for shape in asked)
    kept = dict(typical.counts)
    assert len(kept) == len(typical.counts) <= MOST
    assert sum(kept.values()) == typical.counted == len(asked)
    rarest = min(kept.values(), default=0) if len(kept) == MOST else 0
    assert all(truth[shape] <= count <= truth[shape] + rarest for shape, count in kept.items())
    assert all(truth[shape] <= rarest for shape in truth.keys() - kept.keys())


def test_what_nobody_asks_for_any_more_is_forgotten():
    old, new = RequestShape(gpu_milli=500), RequestShape(gpu_milli=1000)
    typical = RequestShapes(((old, 3), (new, MEMORY - 4)), MEMORY - 1, taken=MEMORY - 1)
    typical = seen(typical, new)
    assert typical.counts == ((old, 1), (new, (MEMORY - 3) // 2))
    assert (typical.counted, typical.taken) == (1 + (MEMORY - 3) // 2, (MEMORY - 1) // 2)
    typical = seen(RequestShapes(typical.counts, MEMORY - 1), new)
    assert [shape for shape, _ in typical.counts] == [new]


def test_weights_are_due_with_the_first_request_and_then_after_a_fifth_more():
    typical, due = RequestShapes(), []
    for number in range(1, 60):
        typical = seen(typical, RequestShape(gpu_milli=1000))
        if typical.is_due:
            due.append(number)
            typical = weighed(typical, [8000], 8000)
    assert due == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 19, 22, 26, 31, 37, 44, 52]


def test_the_scarcer_its_gpus_the_more_a_shape_matters():
    typical = after(*[RequestShape(gpu_milli=1000)] * 3, RequestShape(gpu_milli=500), RequestShape(gpu_milli=8000))
    weights = dict(weighed(typical, [6000, 6000, 1000], 6000).weights)
    assert weights[RequestShape(gpu_milli=1000)] == pytest.approx(3 * weights[RequestShape(gpu_milli=500)], abs=3)
    assert weights[RequestShape(gpu_milli=8000)] == pytest.approx(6 * weights[RequestShape(gpu_milli=500)], abs=6)


@given(st.lists(shapes, min_size=1, max_size=100), st.data())
def test_every_shape_weighs_something_and_all_together_stay_below_the_limit(asked, data):
    typical = after(*asked)
    supply = data.draw(st.lists(st.integers(0, 2**40), min_size=len(typical.counts), max_size=len(typical.counts)))
    taken = weighed(typical, supply, 2**40)
    assert [shape for shape, _ in taken.weights] == [shape for shape, _ in typical.counts]
    assert all(weight >= 1 for _, weight in taken.weights)
    assert sum(weight for _, weight in taken.weights) <= ALL_WEIGHTS + MOST
    assert (taken.counts, taken.taken) == (typical.counts, typical.counted)
    assert not taken.is_due
