"""Statistics: the shape that a request is counted as, when weights are due, and the idleness of one device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.statistics import Account, Idleness, IdleTendency, RequestShape, RequestShapes


@given(st.integers(0, 2**60))
def test_rounding_leaves_out_at_most_an_eighth_and_rounding_again_nothing(amount):
    rounded = RequestShape(cpu_milli=amount).rounded
    assert amount - amount // 8 <= rounded.cpu_milli <= amount
    assert rounded.rounded == rounded


@given(st.integers(1, 10_000))
def test_a_part_of_a_device_stays_a_part_and_a_whole_one_whole_when_it_is_rounded(gpu_milli):
    shape = RequestShape(gpu_milli=gpu_milli)
    assert shape.is_part == shape.rounded.is_part == (gpu_milli < 1000)
    assert 0 < shape.rounded.gpu_milli <= gpu_milli


def test_a_request_without_a_gpu_is_no_part_of_one():
    assert not RequestShape(cpu_milli=1000).is_part


@pytest.mark.parametrize(("taken", "due_at"), [(0, 1), (1, 2), (9, 10), (10, 12), (100, 120)])
def test_weights_are_due_after_a_fifth_more_and_at_least_one(taken, due_at):
    assert not RequestShapes(counted=due_at - 1, taken=taken).is_due
    assert RequestShapes(counted=due_at, taken=taken).is_due


def test_the_idleness_of_a_device_that_was_not_there_is_not_known():
    idle, busy = IdleTendency(lent=True, level=0), IdleTendency(lent=False, level=900)
    idleness = Idleness(idle, idle, ((1, busy),))
    assert idleness.gpu(1) is busy
    assert idleness.gpu(0) is None


def test_accounts_and_shapes_are_kept_for_good():
    assert (Account(user="ada", at_ms=0).key, Account(user="ada", at_ms=0).is_over) == ("ada", False)
    assert (RequestShapes().key, RequestShapes().is_over) == ("request_shapes", False)
