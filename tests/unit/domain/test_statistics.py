"""Statistics: the shape that a request is counted as, when weights are due, and the idleness of one device."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.statistics import RequestShape


@given(st.integers(0, 2**60))
def test_rounding_leaves_out_at_most_an_eighth_and_rounding_again_nothing(amount):
    rounded = RequestShape(cpu_milli=amount).rounded
    assert amount - amount // 8 <= rounded.cpu_milli <= amount
    assert rounded.rounded == rounded
