"""Memory limits of a job's first run and its reruns."""

from __future__ import annotations

import pytest

from distributed_grid.domain.jobs import MAX_RERUNS
from distributed_grid.domain.resources import MAX_AMOUNT
from distributed_grid.prediction.job_limits import MIN_LIMIT_BYTES, limits_of, rounded_limit
from distributed_grid.prediction.task_runs import MemoryPrediction
from distributed_grid.prediction.tiers import Tier

MB = 1 << 20


def test_limits_grow_and_are_four_whatever_the_predictor_says() -> None:
    for following in ((), (200 * MB,), (50 * MB, 100 * MB, 100 * MB), tuple(range(MB, 9 * MB, MB))):
        limits = limits_of(MemoryPrediction(100 * MB, following, None, Tier.STATISTICS, 0.8, 9))
        assert len(limits) == 1 + MAX_RERUNS
        assert list(limits) == sorted(set(limits))
        assert limits[-1] >= 10 * limits[0]
    assert limits_of(MemoryPrediction(MAX_AMOUNT, (), None, Tier.ML, 0.8, 9)) == (MAX_AMOUNT,)


@pytest.mark.parametrize("size", [1, MIN_LIMIT_BYTES, 100 * MB + 1, 1023 * MB, 1 << 40, MAX_AMOUNT, MAX_AMOUNT + 1])
def test_a_limit_is_rounded_up_by_less_than_a_hundredth(size: int) -> None:
    rounded = rounded_limit(size)
    most = size + size // 128
    assert min(max(size, MIN_LIMIT_BYTES), MAX_AMOUNT) <= rounded <= min(max(most, MIN_LIMIT_BYTES), MAX_AMOUNT)
    assert rounded_limit(rounded) == rounded
