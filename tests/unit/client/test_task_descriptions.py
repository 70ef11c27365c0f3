"""Tasks and runs as people write them down: names that mean the same are taken alike, mistakes are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.client.task_descriptions import execution_fields, task_fields
from distributed_grid.errors import BadInput

MB = 1024**2


@pytest.mark.parametrize(
    "execution",
    [
        {"memory_mb": 512, "duration_seconds": 2, "cpu_cores": 1.5},
        {"peak_memory_mb": 512, "execution_time": 2.0, "cpu_seconds": 3},
        {"metrics": {"memory": {"used_mb": 512}, "cpu": {"percent": 150}}, "execution_time_seconds": 2},
        {"resource_usage": {"memory_bytes": 512 * MB, "cpu_percent": 150, "duration_ms": 2000}},
        {"resources": {"memory_gb": 0.5, "run_seconds": 2}, "cpu_ms": 3000},
    ],
)
def test_names_that_mean_the_same_are_taken_alike(execution: dict[str, Any]) -> None:
    fields = execution_fields("t1", {"task_type": "train", "batch_size": 8, **execution})
    assert (fields["memory_bytes"], fields["run_ms"], fields["cpu_ms"]) == (512 * MB, 2000, 3000)
    assert (fields["task_type"], fields["parameters"]) == ("train", {"batch_size": 8.0})
    assert (fields["task_id"], fields["attempt"], fields["cut_short"]) == ("t1", 1, False)


def test_the_task_of_an_execution_is_the_task_that_is_predicted() -> None:
    task = {"type": "benchmark", "parameters": {"batch_size": 4, "sequence_length": 128}, "model": "bert"}
    measured = {"memory_mb": 10, "throughput": 99.5, "worker_id": "w1"}
    described = task_fields(task)
    for execution in ({**task, **measured}, {"task": task, **measured}, {"task_data": task, **measured}):
        fields = execution_fields("t1", execution)
        assert {name: fields[name] for name in described} == described


def test_a_command_is_words_or_one_text() -> None:
    assert task_fields({"command": "sort -S '1 G'"})["argv"] == ["sort", "-S", "1 G"]
    assert task_fields({"argv": ["sort", "x"], "input_mb": 2}) == {"argv": ["sort", "x"], "input_bytes": 2 * MB}


def test_a_run_that_failed_or_was_cut_short_used_at_least_this() -> None:
    for mark in ({"success": False}, {"cut_short": True}):
        assert execution_fields("t", {"type": "x", "memory_mb": 1, **mark})["cut_short"]
    assert not execution_fields("t", {"type": "x", "memory_mb": 1, "success": True})["cut_short"]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({}, "needs a task_type or a command"),
        ({"task_type": 5}, "needs a task_type or a command"),
        ({"command": "sort '"}, "cannot be split"),
        ({"command": ["sort", 1]}, "list of words"),
        ({"type": "x", "input_bytes": -1}, "input_bytes must be a number"),
        ({"type": "x", "input_bytes": "many"}, "input_bytes must be a number"),
    ],
)
def test_a_mistake_is_refused_in_one_line(task: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        task_fields(task)


anything = st.none() | st.booleans() | st.floats() | st.text() | st.dictionaries(st.text(), st.floats())
names = st.sampled_from(["memory_mb", "batch_size", "model", "duration", "parameters", "cpu"])


@given(st.dictionaries(names, anything))
def test_anything_is_either_understood_or_bad_input(execution: dict[str, Any]) -> None:
    try:
        fields = execution_fields("t", {"type": "x", **execution})
    except BadInput:
        return
    assert all(0 <= fields[name] <= 2**60 for name in ("memory_bytes", "run_ms", "cpu_ms", "gpu_memory_bytes"))
