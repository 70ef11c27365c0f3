"""Musts: named nodes, labels, affinity and GPU models, each with its named reason where it is not met."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain.events import LeaseAsked, NodeDeclared
from distributed_grid.domain.resources import Amounts, GpuDevice
from distributed_grid.errors import BadInput, Refused
from distributed_grid.scheduling.placement.placement import place
from distributed_grid.scheduling.queue.reasons import why_not_now
from tests.support.builders import GB, Scenario, a_node, a_request

ZONES = (
    replace(a_node("a1", cores=2), labels=(("zone", "a"), ("disk", "ssd")), tags=("quiet",)),
    replace(a_node("a2", cores=4), labels=(("zone", "a"),)),
    replace(a_node("b1", cores=8), labels=(("zone", "b"),), tags=("disk",)),
)


@pytest.fixture
def zones() -> Scenario:
    return Scenario(*ZONES)


def where(story: Scenario, **request) -> str | None:
    found = place(story.ledger, a_request(**request))
    return None if found is None else found.node


def test_a_label_is_a_must(zones):
    assert where(zones) == "b1"
    assert where(zones, labels=(("zone", "a"),)) == "a2"
    assert where(zones, labels=(("zone", "a"), ("disk", "ssd"))) == "a1"
    assert where(zones, labels=(("zone", "c"),)) is None


def test_a_key_alone_means_the_label_with_any_value_or_the_tag(zones):
    assert where(zones, labels=(("disk", ""),)) == "b1"
    assert where(zones, labels=(("disk", ""),), cores=1, prefer=["a1"]) == "a1"
    assert where(zones, labels=(("quiet", ""),)) == "a1"


def test_labels_follow_the_declaration(zones):
    zones.tell(NodeDeclared(replace(ZONES[2], labels=(("zone", "a"),), tags=())))
    assert where(zones, labels=(("zone", "a"),)) == "b1"
    assert where(zones, labels=(("zone", "b"),)) is None
    zones.ledger.check()


def test_what_no_node_can_ever_meet_is_refused_with_each_nodes_reason(zones):
    with pytest.raises(Refused, match=r"a1: has no label zone=c; a2: has no label zone=c; b1: has no label zone=c"):
        zones.tell(LeaseAsked(a_request(labels=(("zone", "c"),))))


def test_near_to_a_job_is_where_that_job_is(zones):
    zones.submit(a_request("j1", require=["a2"]), starts=True)
    assert where(zones, affinity=("job-j1",)) == "a2"
    assert where(zones, anti_affinity=("job-j1",), cores=2) == "b1"
    assert where(zones, anti_affinity=("job-j1", "b1")) == "a1"


def test_near_to_a_group_is_where_any_of_it_is(zones):
    zones.ask(a_request("r1", require=["a1"], group="train"))
    zones.ask(a_request("r2", require=["a2"], group="train"))
    assert where(zones, affinity=("train",)) == "a2"
    assert where(zones, anti_affinity=("train",)) == "b1"
    zones.release("r2")
    assert where(zones, affinity=("train",)) == "a1"


def test_who_must_be_near_to_nobody_waits_and_hears_why(zones):
    lease = zones.ask(a_request("r1", affinity=("job-later",)))
    assert lease.node == ""
    assert why_not_now(zones.ledger, lease.request, zones.now)[0] == (
        "a1: nothing of job-later is running that it could be near to"
    )
    zones.submit(a_request("later", require=["a1"]), starts=True)
    zones.later(1)
    zones.ask(a_request("r2"))
    zones.release("r2")
    assert zones.ledger.leases["r1"].node == "a1"


def test_who_must_be_apart_hears_from_what(zones):
    zones.ask(a_request("r1", require=["a1"], group="train"))
    reasons = why_not_now(zones.ledger, a_request("r2", anti_affinity=("train", "b1"), cores=4), zones.now)
    assert reasons[0] == "a1: train is here, and it must not be near to that"
    assert reasons[2] == "b1: it must not be here"


def test_a_gpu_model_is_a_must_for_every_device_that_is_lent():
    mixed = [GpuDevice(0, 24 * GB, "NVIDIA A10"), GpuDevice(1, 40 * GB, "NVIDIA A100-SXM4-40GB")]
    story = Scenario(a_node("mixed", gpus=mixed), a_node("plain", gpus=[GpuDevice(0, 16 * GB, "Tesla T4")]))
    request = replace(a_request(), ask=Amounts(gpu_milli=1000, gpu_models=("a100",)))
    found = place(story.ledger, request)
    assert (found.node, [share.index for share in found.claim.gpus]) == ("mixed", [1])
    story.tell(LeaseAsked(request))
    again = replace(request, id="r2")
    assert place(story.ledger, again) is None
    assert why_not_now(story.ledger, again, story.now)[1] == "plain: its GPUs are Tesla T4, a100 asked"


def test_a_gpu_model_nobody_has_is_refused_at_once():
    story = Scenario(a_node("one", gpus=[GpuDevice(0, 16 * GB, "Tesla T4")]))
    request = replace(a_request(), ask=Amounts(gpu_milli=500, gpu_models=("H100", "A100")))
    with pytest.raises(Refused, match=r"one: its GPUs are Tesla T4, H100 or A100 asked"):
        story.tell(LeaseAsked(request))


def test_a_model_without_a_gpu_makes_no_sense():
    story = Scenario(a_node("one"))
    with pytest.raises(BadInput, match="together with a GPU"):
        story.tell(LeaseAsked(replace(a_request(), ask=Amounts(cpu_milli=1000, gpu_models=("A100",)))))
