"""What Python programs say about placing, as the control plane hears it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from distributed_grid.api.requests import RequestLease, convert
from distributed_grid.client.placement_arguments import placement_fields
from distributed_grid.domain.resources import Priority, ResourceType
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.errors import BadInput
from distributed_grid.orchestration import resource_sharing, resource_sharing_manager
from distributed_grid.orchestration.intelligent_scheduler import (
    ResourceRequirement,
    SchedulingRequest,
    SchedulingStrategy,
    TaskPriority,
)
from distributed_grid.orchestration.resource_sharing_manager import (
    AllocationPriority,
    ResourceRequest,
    SharingPolicy,
)
from distributed_grid.server.services.leases import request_of


def as_asked(request: SchedulingRequest | ResourceRequest) -> Any:
    """The request as the ledger decides about it: through the socket's own types."""
    return request_of(convert(request.message(), RequestLease), "ada", "", ("licence",))


def test_the_words_are_the_same_under_every_name() -> None:
    assert resource_sharing.ResourceSharingManager is resource_sharing_manager.ResourceSharingManager
    assert resource_sharing.ResourceRequest is ResourceRequest
    assert AllocationPriority is TaskPriority is Priority
    assert TaskPriority.parse("critical") is TaskPriority.parse("URGENT")
    assert SchedulingStrategy is Strategy
    assert [str(policy) for policy in SharingPolicy] == ["conservative", "balanced", "aggressive", "predictive"]
    assert SharingPolicy("PREDICTIVE") is SharingPolicy.PREDICTIVE


def test_every_field_of_a_scheduling_request_arrives() -> None:
    before = time.time()
    asked = as_asked(
        SchedulingRequest(
            "train-1",
            [
                ResourceRequirement(ResourceType.GPU, 2, gpu_models=["A100"], gpu_memory_gb=40),
                ResourceRequirement("CPU", 1.5),
                ResourceRequirement("licence", 3),
            ],
            priority="critical",
            strategy="best-fit",
            preferred_nodes=["gpu1"],
            required_nodes=["gpu1", "gpu2"],
            affinity=["data"],
            anti_affinity=["web"],
            labels={"disk": "ssd", "fast": ""},
            group="training",
            gang=2,
            deadline=timedelta(hours=2),
            expects=timedelta(minutes=1),
            duration=90,
            target_node="gpu-master",
            wait_seconds=7,
        )
    )
    assert (asked.id, asked.user) == ("train-1", "ada")
    assert (asked.ask.gpu_milli, asked.ask.cpu_milli, asked.ask.custom) == (2000, 1500, (("licence", 3),))
    assert (asked.ask.gpu_models, asked.ask.gpu_memory_bytes) == (("A100",), 40 * 1024**3)
    assert (asked.priority, asked.strategy) == (Priority.URGENT, Strategy.BEST_FIT)
    assert (asked.prefer, asked.require) == (("gpu1",), ("gpu1", "gpu2"))
    assert (asked.affinity, asked.anti_affinity, asked.group) == (("data",), ("web",), "training")
    assert asked.labels == (("disk", "ssd"), ("fast", ""))
    assert (asked.gang, asked.target) == (2, "gpu-master")
    assert (asked.expects_ms, asked.duration_ms, asked.wait_ms) == (60_000, 90_000, 7_000)
    assert abs(asked.deadline_ms - 1000 * (before + 7200)) < 60_000


def test_requirements_may_be_a_mapping() -> None:
    asked = as_asked(SchedulingRequest("t", {ResourceType.MEMORY: 2, ResourceType.CPU: 1}))
    assert (asked.ask.memory_bytes, asked.ask.cpu_milli) == (2 * 1024**3, 1000)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (SchedulingRequest("t", []), "at least one requirement"),
        (SchedulingRequest("t", {}), "at least one requirement"),
        (
            SchedulingRequest("t", [ResourceRequirement("cpu", 1), ResourceRequirement("CPU", 2)]),
            "asked for twice: cpu",
        ),
        (
            SchedulingRequest("t", {"gpu": 1, "memory": 1, "Memory": 2}),
            "asked for twice: memory",
        ),
        (SchedulingRequest("t", {"cpu": float("nan")}), "must be a number"),
        (SchedulingRequest("t", {"cpu": 1, "memory": float("inf")}), "must be a number"),
        (SchedulingRequest("t", {"cpu": 1}, priority="soon"), "no priority 'soon'"),
        (SchedulingRequest("t", {"cpu": 1}, strategy="luck"), "no strategy 'luck'"),
        (SchedulingRequest("t", {"cpu": 1}, duration=0), "a duration must be more than zero"),
        (SchedulingRequest("t", {"cpu": 1}, expects=timedelta(seconds=-1)), "an expected time must be more than zero"),
        (SchedulingRequest("t", {"cpu": 1}, deadline=datetime(2020, 1, 1, tzinfo=UTC)), "is over already"),
        (SchedulingRequest("t", {"cpu": 1}, preferred_nodes="gpu1"), "preferred_nodes is a list of names"),
        (SchedulingRequest("t", {"cpu": 1}, labels="ssd"), "labels is a list of names"),
        (ResourceRequest("gpu1", "cpu", float("nan")), "must be a number"),
        (ResourceRequest("gpu1", "cpu", 1, duration=float("inf")), "a duration must be more than zero"),
    ],
)
def test_what_makes_no_sense_is_refused_before_it_is_sent(
    request_: SchedulingRequest | ResourceRequest, why: str
) -> None:
    with pytest.raises(BadInput, match=why):
        request_.message()


@pytest.mark.parametrize("task_id", ["", "two words", "dots.are.for.jobs", "-first", "x" * 65])
def test_a_task_id_that_cannot_name_a_lease_is_refused(task_id: str) -> None:
    with pytest.raises(BadInput, match="invalid request"):
        as_asked(SchedulingRequest(task_id, {"cpu": 1}))


def test_insisting_makes_the_preferred_nodes_musts() -> None:
    asked = as_asked(SchedulingRequest("t", {"cpu": 1}, strategy="node_specific", preferred_nodes=["gpu2"]))
    assert (asked.prefer, asked.require) == ((), ("gpu2",))
    both = placement_fields({"strategy": "node_specific", "required_nodes": ["gpu1"]}, ["gpu2"])
    assert (both["prefer"], both["require"]) == (["gpu2"], ["gpu1"])


def test_a_resource_request_is_for_its_node_and_from_the_others() -> None:
    asked = as_asked(ResourceRequest("gpu-master", "CPU", 2.0, "high", timedelta(minutes=30), ["gpu1"]))
    assert (asked.target, asked.anti_affinity, asked.prefer) == ("gpu-master", ("gpu-master",), ("gpu1",))
    insists = as_asked(ResourceRequest("gpu-master", "CPU", 2.0, source=["gpu1"], only=True))
    assert (asked.require, insists.prefer, insists.require) == ((), (), ("gpu1",))
    assert (asked.ask.cpu_milli, asked.priority, asked.duration_ms) == (2000, Priority.HIGH, 1_800_000)
    anybody = as_asked(ResourceRequest("", "memory", 1))
    assert (anybody.target, anybody.anti_affinity, anybody.duration_ms) == ("", (), 3_600_000)


def test_two_requests_never_have_the_same_id() -> None:
    request = ResourceRequest("gpu1", "cpu", 1)
    assert request.message()["request_id"] != request.message()["request_id"]


def test_a_wish_that_does_not_exist_is_a_mistake_in_the_program() -> None:
    with pytest.raises(TypeError, match="no such placement argument: stratgy"):
        placement_fields({"stratgy": "spread"})  # type: ignore[typeddict-unknown-key]
