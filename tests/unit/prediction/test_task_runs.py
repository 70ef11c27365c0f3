"""Summaries of old runs: they add up, and typical values are spread as the runs were."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.prediction.task_runs import MAX_QUANTITY, TYPICAL_VALUES, RunSummary, TaskRun

quantities = st.integers(0, MAX_QUANTITY)


def a_run(memory_bytes: int, run_ms: int = 0, *, is_lower_bound: bool = False) -> TaskRun:
    return TaskRun("t", 1, "ana", "x", memory_bytes=memory_bytes, run_ms=run_ms, is_lower_bound=is_lower_bound)


@given(st.lists(st.builds(a_run, quantities, quantities), max_size=60), st.integers(0, 60))
def test_folding_in_pieces_gives_what_folding_at_once_gives(runs: list[TaskRun], split: int) -> None:
    at_once = RunSummary().plus(runs)
    assert RunSummary().plus(runs[:split]).plus(runs[split:]) == at_once
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(at_once), type=RunSummary) == at_once


@given(st.lists(st.integers(1, MAX_QUANTITY), min_size=1, max_size=TYPICAL_VALUES))
def test_a_typical_value_is_never_below_its_run_and_a_tenth_above_at_most(values: list[int]) -> None:
    typical = RunSummary().plus(map(a_run, values)).typical_memory_bytes()
    assert len(typical) == len(values)
    for value, shown in zip(sorted(values), typical, strict=True):
        assert value <= shown * (1 + 1e-9)
        assert shown <= value * 1.1 + 1


def test_many_runs_leave_so_many_values_with_the_largest() -> None:
    summary = RunSummary().plus(a_run(100 + i, 1000 * i) for i in range(5000))
    memory, times = summary.typical_memory_bytes(), summary.typical_run_ms()
    assert len(memory) == len(times) == TYPICAL_VALUES
    assert memory == sorted(memory)
    assert memory[-1] >= 5099
    assert times[TYPICAL_VALUES // 2] == pytest.approx(2_500_000, rel=0.15)
    assert summary.count == 5000


def test_runs_that_were_cut_short_are_not_counted() -> None:
    assert RunSummary().plus([a_run(5, 5, is_lower_bound=True)]) == RunSummary()
    assert RunSummary().plus([a_run(0, 5)]).count == 0
