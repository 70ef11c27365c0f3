"""Reasons as shown to a person, word for word."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain.events import HeartbeatReceived, NodeForgotten
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import GpuDevice, cores, gigabytes, gpus
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import Worker, WorkerResources
from distributed_grid.scheduling.queue.reasons import MAX_NODES_LISTED, describe_amounts, never_fits, texts, why_not_now
from tests.support.builders import GB, Scenario, a_node, a_request, a_usage, an_ask, caps, thresholds


def why(scenario: Scenario, **request) -> tuple[str, ...]:
    return texts(why_not_now(scenario.ledger, a_request("x", **request), scenario.now))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (cores(1000), "1 core"),
        (cores(500), "0.5 cores"),
        (cores(0), "0 cores"),
        (cores(1_000_000_000), "1000000 cores"),
        (gigabytes(100), "100 bytes"),
        (gigabytes(4 * GB), "4.0 GB"),
        (gigabytes(GB // 2), "0.5 GB"),
        (gigabytes(50 * 1024**2), "50.0 MB"),
        (gpus(1000), "1 GPU"),
        (gpus(250), "0.25 GPUs"),
        (describe_amounts(an_ask(2)), "2 cores"),
        (
            describe_amounts(an_ask(1, 4, 2, gpu_memory_gb=8, custom={"fpga": 3})),
            "1 core, 4.0 GB, 2 GPUs, 8.0 GB of GPU memory, 3 fpga",
        ),
    ],
)
def test_amounts_are_said_in_the_units_of_a_person(said, words):
    assert said == words


@pytest.mark.parametrize(
    ("node", "request_", "words"),
    [
        (a_node(cores=4), {"cores": 5}, "gpu1: 4 cores at most, 5 cores asked"),
        (a_node(cores=4, caps=caps(cores=1)), {"cores": 2}, "gpu1: 1 core at most, 2 cores asked"),
        (a_node(memory_gb=3.2), {"memory_gb": 4}, "gpu1: 3.2 GB at most, 4.0 GB asked"),
        (a_node(gpus=1), {"gpus": 2}, "gpu1: 1 GPU at most, 2 GPUs asked"),
        (a_node(), {"gpus": 0.5}, "gpu1: 0 GPUs at most, 0.5 GPUs asked"),
        (a_node(gpus=1, exclusive=True), {"gpus": 0.5}, "gpu1: 0 GPUs at most, 0.5 GPUs asked"),
        (
            a_node(gpus=1, gpu_memory_gb=8),
            {"gpus": 1, "gpu_memory_gb": 24},
            "gpu1: 8.0 GB GPU memory at most, 24.0 GB asked",
        ),
        (
            a_node(gpus=[GpuDevice(0, 24 * GB), GpuDevice(1, 8 * GB)]),
            {"gpus": 2, "gpu_memory_gb": 12},
            "gpu1: does not fit",
        ),
        (a_node(custom={"fpga": 1}), {"custom": {"fpga": 2}}, "gpu1: 1 fpga at most, 2 asked"),
        (a_node(), {"custom": {"fpga": 2}}, "gpu1: 0 fpga at most, 2 asked"),
        (
            a_node(cores=1, memory_gb=1),
            {"cores": 2, "memory_gb": 2},
            "gpu1: 1 core at most, 2 cores asked; 1.0 GB at most, 2.0 GB asked",
        ),
        (a_node(caps=caps(can_share=False)), {"cores": 1}, "gpu1: does not share"),
    ],
)
def test_impossible_request_names_the_limit_of_each_node(node, request_, words):
    scenario = Scenario(node)
    assert texts(never_fits(scenario.ledger, a_request("x", **request_)) or ()) == (words,)
    assert why(scenario, **request_) == (words,)


def test_request_that_one_node_could_serve_later_is_possible():
    scenario = Scenario(a_node("gpu1", cores=1), a_node("gpu2", cores=4))
    scenario.ask(a_request("r1", cores=4))
    assert never_fits(scenario.ledger, a_request("x", cores=4)) is None


def test_a_required_node_that_is_not_there_is_named():
    scenario = Scenario(a_node("gpu1", cores=1))
    request = a_request("x", cores=2, require=["gpu1", "gpu9"])
    reasons = texts(never_fits(scenario.ledger, request) or ())
    assert reasons == ("gpu1: 1 core at most, 2 cores asked", "gpu9: no such node")


def test_a_grid_without_nodes_can_never_lend():
    assert never_fits(Ledger(), a_request("x")) == ()


def test_current_shortage_has_numbers():
    scenario = Scenario(a_node("gpu1", cores=4, memory_gb=16, gpus=1, custom={"fpga": 1}))
    scenario.ask(a_request("r1", cores=3, memory_gb=12.8, gpus=0.5, custom={"fpga": 1}))
    assert why(scenario, cores=2) == ("gpu1: 1 core free, 2 cores asked",)
    assert why(scenario, memory_gb=4) == ("gpu1: 3.2 GB free, 4.0 GB asked",)
    assert why(scenario, gpus=1) == ("gpu1: 0 GPUs free, 1 GPU asked",)
    assert why(scenario, gpus=0.7) == ("gpu1: 0.5 GPUs free, 0.7 GPUs asked",)
    assert why(scenario, gpus=0.2, gpu_memory_gb=20) == ("gpu1: 12.0 GB GPU memory free, 20.0 GB asked",)
    assert why(scenario, custom={"fpga": 1}) == ("gpu1: 0 fpga free, 1 asked",)


def test_only_required_nodes_are_asked_why():
    scenario = Scenario(a_node("gpu1", cores=1), a_node("gpu2", cores=1))
    assert why(scenario, cores=2, require=["gpu2"]) == ("gpu2: 1 core at most, 2 cores asked",)


def test_a_node_nobody_hears_says_for_how_long():
    scenario = Scenario(a_node("gpu2"))
    scenario.advance(41, heard=False)
    assert why(scenario) == ("gpu2: not heard from for 41 s",)


def test_a_node_that_was_never_heard_says_so():
    assert texts(why_not_now(Ledger([a_node("gpu1")]), a_request(), 0)) == ("gpu1: not heard from yet",)


def test_a_draining_node_says_so():
    scenario = Scenario(a_node("gpu1"))
    scenario.ask(a_request("r1"))
    scenario.handle(NodeForgotten("gpu1"))
    assert why(scenario) == ("gpu1: draining",)


def test_a_node_without_a_fresh_measurement_says_so():
    scenario = Scenario(a_node("gpu1"))
    scenario.ledger.apply([replace(scenario.ledger.offers["gpu1"], withdrawn=True)])
    assert why(scenario) == ("gpu1: no fresh measurement",)


def test_a_busy_owner_is_the_reason():
    scenario = Scenario(a_node("gpu1", thresholds=thresholds(cpu_busy_max=0.7)))
    scenario.handle(HeartbeatReceived(name="gpu1", usage=a_usage(cpu_outside=0.85)))
    paused = "CPU 85 % over the last minute, limit 70 %"
    assert why(scenario) == (f"gpu1: its owner uses 85 % of the CPU (limit 70 %); {paused}",)


def test_owners_who_use_their_machines_are_the_reason_and_dedicated_is_named_once():
    limits = thresholds(cpu_busy_max=0.3)
    scenario = Scenario(*(replace(a_node(name, thresholds=limits), host=name) for name in ("gpu1", "gpu2")))
    for name in ("gpu1", "gpu2"):
        scenario.handle(HeartbeatReceived(name=name, usage=a_usage(cpu_outside=0.97)))
    first, second, hint = why(scenario)
    assert first.startswith("gpu1: its owner uses 97 % of the CPU (limit 30 %)")
    assert second.startswith("gpu2: its owner uses 97 % of the CPU (limit 30 %)")
    assert hint == "if such a machine is yours alone, set dedicated: true on its node"


def test_a_node_that_no_cluster_file_names_gets_no_advice_about_one():
    joined = replace(a_node("gpu1", thresholds=thresholds(cpu_busy_max=0.3)), host="joined", joined=True)
    scenario = Scenario(joined)
    scenario.handle(HeartbeatReceived(name="gpu1", usage=a_usage(cpu_outside=0.97)))
    assert len(why(scenario)) == 1


def test_owner_is_no_reason_if_another_resource_is_short():
    scenario = Scenario(a_node("gpu1", cores=4, gpus=1, thresholds=thresholds()))
    scenario.handle(HeartbeatReceived(name="gpu1", usage=a_usage(gpus={0: (0.9, 1)})))
    scenario.ask(a_request("r1", cores=4))
    assert why(scenario, cores=1) == ("gpu1: 0 cores free, 1 core asked",)


def test_devices_that_only_fail_together_do_not_fit():
    devices = [GpuDevice(0, 24 * GB), GpuDevice(1, 24 * GB), GpuDevice(2, 8 * GB)]
    scenario = Scenario(a_node("gpu1", gpus=devices))
    scenario.ask(a_request("r1", gpus=1, gpu_memory_gb=20))
    assert why(scenario, gpus=2, gpu_memory_gb=20) == ("gpu1: does not fit",)


def test_a_node_that_is_kept_for_somebody_says_so():
    scenario = Scenario(a_node("gpu1", cores=4))
    scenario.ask(a_request("r1", cores=3))
    scenario.ask(a_request("r2", cores=4, wait_s=600))
    scenario.advance(31)
    assert why(scenario, cores=1) == ("gpu1: kept for a request that comes before it",)


def test_a_node_nobody_has_heard_yet_may_still_serve():
    scenario = Scenario(Node(name="far"))
    assert never_fits(scenario.ledger, a_request("x", cores=1)) is None
    assert texts(why_not_now(scenario.ledger, a_request("x", cores=1), 0)) == ("far: not heard from yet",)


def test_of_very_many_nodes_only_some_are_told_of() -> None:
    ledger = Ledger([a_node(f"n{number}") for number in range(MAX_NODES_LISTED + 23)])
    reasons = texts(why_not_now(ledger, a_request(), 0))
    assert (len(reasons), reasons[0], reasons[-1]) == (
        MAX_NODES_LISTED + 1,
        "n0: not heard from yet",
        "and 23 more nodes",
    )


def test_of_very_many_nodes_that_never_could_only_some_are_told_of() -> None:
    ledger = Ledger([a_node(f"n{number}", cores=2) for number in range(MAX_NODES_LISTED + 23)])
    reasons = texts(never_fits(ledger, a_request(cores=4)) or ())
    assert (len(reasons), reasons[-1]) == (MAX_NODES_LISTED + 1, "and 23 more nodes")
    assert reasons[0] == "n0: 2 cores at most, 4 cores asked"


def test_a_worker_on_its_way_that_could_serve_it_is_named():
    scenario = Scenario(a_node("gpu1", cores=4))
    coming = Worker(
        id="w1",
        provider="docker_local",
        worker_type="cpu",
        resources=WorkerResources(8000, 8 * GB),
        created_at_ms=1,
        state=WorkerState.BOOTING,
    )
    scenario.ledger.apply([coming, replace(coming, id="w2", state=WorkerState.TERMINATING)])
    assert why(scenario, cores=6)[0] == "w1: a worker of docker_local that could serve it; it is booting"
    assert [line.partition(":")[0] for line in why(scenario, cores=9)] == ["gpu1"]
    assert [line.partition(":")[0] for line in why(scenario, cores=6, require=("gpu1",))] == ["gpu1"]
