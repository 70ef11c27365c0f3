"""The nodes of a Ray cluster, and who they are in the grid."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.config import ClusterConfig
from distributed_grid.domain.engines import EngineResources
from distributed_grid.domain.events import EngineNode
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import RAY_HOST
from distributed_grid.server.ray.attachment import map_nodes, name_for, new_node
from tests.support.builders import a_node


def a_place(
    name: str, number: str = "aabbccdd", *, address: str = "10.0.0.9", hostname: str = "vm", **rest
) -> EngineNode:
    return EngineNode(id=number, name=name, address=address, hostname=hostname, **rest)


def names(ledger: Ledger, *places: EngineNode) -> dict[str, str]:
    return {plan.place.id: plan.name for plan in map_nodes(ledger, places)}


def test_a_newcomer_is_called_as_ray_calls_it_unless_that_is_only_its_address():
    assert name_for(a_place("w1"), ()) == "w1"
    assert name_for(a_place("10.0.0.9"), ()) == "vm"
    assert name_for(a_place(""), ()) == "vm"
    assert name_for(a_place("", hostname=""), ()) == "10.0.0.9"


def test_a_name_is_made_unique_and_safe_as_a_file_name():
    assert name_for(a_place("w1"), {"w1"}) == "w1-aabbcc"
    assert name_for(a_place("../../etc/passwd"), ()) == "etc-passwd"
    assert name_for(a_place("…"), ()) == "ray"
    assert len(name_for(a_place("w" * 500), ())) == 60


def test_two_newcomers_of_one_machine_get_two_names():
    found = names(Ledger(), a_place("10.0.0.9", "aaaaaaaa"), a_place("10.0.0.9", "bbbbbbbb"))
    assert found == {"aaaaaaaa": "vm", "bbbbbbbb": "vm-bbbbbb"}


def test_a_node_of_the_config_is_known_by_name_address_or_machine():
    ledger = Ledger([replace(a_node("gpu1"), host="10.0.0.5"), replace(a_node("gpu2"), host="gpu2.lan"), a_node("vm")])
    by_name = a_place("gpu2", "1", address="10.0.0.7", hostname="x")
    by_address = a_place("10.0.0.5", "2", address="10.0.0.5", hostname="y")
    by_machine = a_place("10.0.0.9", "3")
    assert names(ledger, by_name, by_address, by_machine) == {"1": "gpu2", "2": "gpu1", "3": "vm"}


def test_a_name_that_ray_gave_counts_before_an_address_that_several_share():
    ledger = Ledger([replace(a_node("w1"), host="10.0.0.9"), replace(a_node("w2"), host="10.0.0.8")])
    head, worker = a_place("h0", "1", head=True), a_place("w1", "2")
    assert names(ledger, head, worker) == {"1": "h0", "2": "w1"}


def test_only_a_node_without_an_agent_of_another_kind_needs_one():
    here, far = a_node("vm"), replace(a_node("gpu1"), host="10.0.0.5")
    by_ssh = replace(a_node("gpu2"), host="10.0.0.6", wanted=True)
    brought = replace(a_node("w1"), host=RAY_HOST, wanted=True)
    places = [a_place(name, str(number)) for number, name in enumerate(("vm", "gpu1", "gpu2", "w1", "w2"))]
    plans = map_nodes(Ledger([here, far, by_ssh, brought]), places)
    assert {plan.name: plan.needs_agent for plan in plans} == {
        "vm": False,
        "gpu1": True,
        "gpu2": False,
        "w1": True,
        "w2": True,
    }
    assert [plan.name for plan in plans if plan.is_new] == ["w2"]


def test_a_newcomer_lends_no_more_than_ray_has_there():
    config = ClusterConfig.embedded("vm")
    place = a_place("w1", head=True, has=EngineResources(cpu_milli=1000, memory_bytes=2**30, gpu_milli=2000))
    node = new_node(config, map_nodes(Ledger(), [place])[0])
    assert (node.host, node.role, node.engine, node.engine_node) == (RAY_HOST, "head", "ray", place.id)
    assert (node.joined, node.wanted, node.hold_ms) == (True, True, 60_000)
    larger = replace(node, capacity=a_node(cores=64, memory_gb=512, gpus=8).capacity)
    assert (larger.lendable.cpu_milli, larger.lendable.memory_bytes, len(larger.lendable.gpus)) == (1000, 2**30, 2)
