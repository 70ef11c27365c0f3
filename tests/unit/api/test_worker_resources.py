"""What workers say they have and tasks say they need: nested or flat, checked, in the ledger's integers."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.api.answers.workers import NodeResources
from distributed_grid.api.worker_resources import (
    reported_resources,
    required_amounts,
    requirements_view,
)
from distributed_grid.domain.resources import MAX_AMOUNT, Amounts
from distributed_grid.errors import BadInput

MIB = 1024**2


def test_resources_in_the_form_of_the_guide() -> None:
    found = reported_resources(
        {
            "cpu": {"cores": 8, "physical_cores": 4, "available_cores": 6.5},
            "memory": {"total_mb": 16384, "available_mb": 8192},
            "gpu": {"devices": 2, "available_devices": 1, "total_memory_mb": 32768, "available_memory_mb": 16384},
        }
    )
    assert (found.has.cpu_milli, found.free.cpu_milli, found.physical_cores) == (8000, 6500, 4)
    assert (found.has.memory_bytes, found.free.memory_bytes) == (16384 * MIB, 8192 * MIB)
    assert [device.memory_bytes for device in found.has.gpus] == [16384 * MIB] * 2
    assert len(found.free.gpus) == 1


def test_what_is_not_said_to_be_taken_is_free() -> None:
    found = reported_resources({"cpu": {"cores": 2}, "memory": {"total_mb": 10}})
    assert found.free == found.has


@pytest.mark.parametrize(
    ("needs", "ask"),
    [
        ({}, Amounts(cpu_milli=1000)),
        ({"cpu_cores": 0.5}, Amounts(cpu_milli=500)),
        ({"cpu": {"cores": 2}, "memory": {"total_mb": 3}}, Amounts(cpu_milli=2000, memory_bytes=3 * MIB)),
        ({"cpu_cores": 1, "memory_mb": 4}, Amounts(cpu_milli=1000, memory_bytes=4 * MIB)),
        ({"gpu_memory_mb": 5}, Amounts(gpu_milli=1000, gpu_memory_bytes=5 * MIB)),
        ({"gpu": {"devices": 2, "total_memory_mb": 8}}, Amounts(gpu_milli=2000, gpu_memory_bytes=4 * MIB)),
        ({"gpu_devices": 0.5}, Amounts(gpu_milli=500)),
        ({"cpu_cores": 2, "cpu": {"cores": 2}}, Amounts(cpu_milli=2000)),
    ],
)
def test_requirements_nested_and_flat(needs: dict[str, Any], ask: Amounts) -> None:
    assert required_amounts(needs) == ask


@pytest.mark.parametrize(
    ("needs", "line"),
    [
        ({"cpu_cores": -1}, "cpu_cores must be at least 0"),
        ({"memory_mb": math.inf}, "memory_mb must be a finite number"),
        ({"memory_mb": "4 GB"}, "memory_mb must be a number"),
        ({"cores": 1}, "requirements have no 'cores'"),
        ({"cpu": 4}, "cpu must be a mapping"),
        ({"cpu_cores": 1, "cpu": {"cores": 2}}, "cpu_cores is given twice"),
        ({"gpu_devices": 1.5}, "in whole devices"),
        ({"memory_mb": 1e40}, "larger than any machine"),
    ],
)
def test_what_nobody_can_need_is_one_line(needs: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput, match=line):
        required_amounts(needs)


numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3))
groups = st.dictionaries(
    st.sampled_from(["cores", "available_cores", "total_mb", "available_mb", "devices", "available_devices"]), numbers
)
nonsense = st.dictionaries(st.sampled_from(["cpu", "memory", "gpu", "cpu_cores", "memory_mb"]), groups | numbers)


@given(said=nonsense)
def test_anything_is_either_within_bounds_or_refused(said: dict[str, Any]) -> None:
    with contextlib.suppress(BadInput):
        found = reported_resources(said)
        assert 0 < found.has.cpu_milli <= MAX_AMOUNT
        assert 0 <= found.free.cpu_milli <= found.has.cpu_milli
        assert 0 <= found.free.memory_bytes <= found.has.memory_bytes <= MAX_AMOUNT
    with contextlib.suppress(BadInput):
        ask = required_amounts(said)
        assert ask.problem() is None


def test_views_are_what_was_said() -> None:
    said = {
        "cpu": {"cores": 4, "physical_cores": 2, "available_cores": 3},
        "memory": {"total_mb": 9, "available_mb": 8},
    }
    found = reported_resources(said)
    shown = msgspec.to_builtins(NodeResources.of(found.has, found.free, 0, found.physical_cores))
    assert (shown["cpu"], shown["memory"]) == (said["cpu"], said["memory"])
    assert requirements_view(required_amounts({"cpu_cores": 2, "memory_mb": 3})) == {"cpu_cores": 2, "memory_mb": 3}


def test_totals_that_a_report_leaves_out_are_the_registered_ones() -> None:
    registered = reported_resources({"cpu": {"cores": 8}, "memory": {"total_mb": 10}, "gpu": {"devices": 2}}).has
    found = reported_resources({"cpu": {"available_cores": 3}}, registered)
    assert (found.has, found.free.cpu_milli, found.named) == (registered, 3000, frozenset({"cpu"}))
    with pytest.raises(BadInput, match=r"memory.available_mb must be at most 10, not 11"):
        reported_resources({"memory": {"available_mb": 11}}, registered)
