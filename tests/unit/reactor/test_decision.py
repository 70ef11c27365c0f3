"""Decisions: lines of the audit trail about a request and a node, in numbers and without defaults."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.resources import Capacity, GpuDevice
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.reactor.decision import (
    RECORD_TYPES,
    Decision,
    Record,
    capacity_details,
    request_details,
)
from tests.support.builders import GB, NOW, a_capacity, a_request


def test_a_plain_request_is_told_by_its_amounts_its_priority_and_its_wait():
    assert request_details(a_request(cores=2, wait_s=5, priority="high"), NOW) == {
        "cpu_milli": 2000,
        "priority": "high",
        "wait_ms": 5000,
    }


def test_a_wait_of_nothing_is_told_too():
    assert request_details(a_request(wait_s=0), NOW)["wait_ms"] == 0


@pytest.mark.parametrize(
    ("wish", "name", "told"),
    [
        ({"gang": 3}, "gang", 3),
        ({"strategy": Strategy.BEST_FIT}, "strategy", "best_fit"),
        ({"labels": (("disk", "fast"),)}, "labels", ["disk=fast"]),
        ({"anti_affinity": ("gpu1",)}, "anti_affinity", ["gpu1"]),
        ({"deadline_ms": NOW + 700}, "deadline_in_ms", 700),
    ],
)
def test_a_wish_is_told_and_without_it_nothing(wish, name, told):
    assert request_details(replace(a_request(), **wish), NOW)[name] == told
    assert name not in request_details(a_request(), NOW)


def test_a_deadline_that_has_passed_is_not_told_as_a_negative_time():
    assert "deadline_in_ms" not in request_details(replace(a_request(), deadline_ms=NOW - 1), NOW)


def test_custom_resources_and_retries_are_told():
    details = request_details(a_request(custom={"fpga": 2, "tpu": 1}), NOW, retries=3)
    assert (details["custom"], details["retries"]) == (["fpga=2", "tpu=1"], 3)


@given(cores=st.integers(0, 64), gpus=st.integers(0, 8), wait=st.integers(0, 10**6), deadline=st.integers(0, 2 * NOW))
def test_nothing_that_is_told_is_empty_but_a_wait(cores, gpus, wait, deadline):
    details = request_details(replace(a_request(cores=cores, gpus=gpus, wait_s=wait), deadline_ms=deadline), NOW)
    assert all(value for name, value in details.items() if name != "wait_ms")
    assert msgspec.json.decode(msgspec.json.encode(details)) == details


def test_a_node_is_told_by_what_it_has():
    devices = (GpuDevice(0, 16 * GB, "Tesla T4"), GpuDevice(1, 24 * GB, "NVIDIA A10"))
    assert capacity_details(a_capacity(4, 8, devices, custom={"fpga": 1})) == {
        "cpu_milli": 4000,
        "memory_bytes": 8 * GB,
        "gpus": ["Tesla T4", "NVIDIA A10"],
        "gpu_memory_bytes": 24 * GB,
        "custom": ["fpga=1"],
    }
    assert capacity_details(Capacity()) == {}


def test_every_type_of_record_has_a_name_of_its_own():
    assert len(set(RECORD_TYPES)) == len(RECORD_TYPES)
    assert all(name == name.lower() and name.replace("-", "").isalpha() for name in RECORD_TYPES)


def test_decisions_and_records_share_nothing():
    record = Record("granted", "ada", "r1")
    record.data["asked"] = "1 core"
    Decision().records.append(record)
    assert Decision().records == []
    assert Record("granted", "ada", "r1").data == {}
