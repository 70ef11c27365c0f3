"""Nodes: declared, heard, doubted, forgotten; and what they offer meanwhile."""

# mypy: disable-error-code="comparison-overlap"
# A state changes between two lines that look at it; mypy does not see that.

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import ControlPlaneStarted, NodeDeclared, NodeForgotten
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import NodeState
from distributed_grid.reactor import pending
from distributed_grid.reactor.nodes import SUSPECT_AFTER_MS
from tests.support.builders import NOW, a_capacity, a_node, a_request, a_usage, caps, thresholds


def test_a_declared_node_joins_and_is_alive_from_its_first_heartbeat(story):
    tale = story(ledger=Ledger())
    declared = tale.tell(NodeDeclared(a_node("gpu1")))
    assert tale.ledger.nodes["gpu1"].state is NodeState.JOINING
    assert [record.type for record in declared.records] == ["node-declared"]
    heard = tale.hear("gpu1")
    assert tale.ledger.nodes["gpu1"].state is NodeState.ALIVE
    assert [record.type for record in heard.records] == ["node-alive"]
    assert tale.ledger.lends("gpu1") == a_capacity()


def test_a_heartbeat_of_a_node_nobody_declared_changes_nothing(story):
    tale = story()
    assert tale.hear("stranger").changes == []


def test_declaring_the_same_node_again_changes_nothing(story):
    tale = story(a_node("gpu1"))
    assert tale.tell(NodeDeclared(a_node("gpu1"))).changes == []


def test_a_heartbeat_that_says_nothing_new_is_only_a_sighting(story):
    tale = story()
    tale.now += 2_000
    assert [row.kind for row in tale.hear("gpu1").changes] == ["sighting"]


def test_an_offer_is_made_anew_when_it_says_something_else(story):
    tale = story(a_node("gpu1", cores=4, thresholds=thresholds()))
    tale.hear("gpu1", a_usage(cpu_outside=0.5))
    offer = tale.ledger.offers["gpu1"]
    assert (offer.generation, offer.lends.cpu_milli) == (2, 2000)


def test_an_owners_short_visit_leaves_the_offer_but_not_its_size(story):
    tale = story(a_node("gpu1", cores=10, thresholds=thresholds(cpu_busy_max=0.3)))
    for outside in (0.6, 0.0, 0.6, 0.0):
        tale.now += 2_000
        tale.hear("gpu1", a_usage(cpu_outside=outside))
        assert tale.ledger.lends("gpu1").cpu_milli == 10_000 * (1 - outside)


def test_an_owner_who_stays_gets_the_offer_withdrawn_and_keeps_the_node_for_a_while(story):
    tale = story(a_node("gpu1", cores=10, thresholds=thresholds(cpu_busy_max=0.3, dwell_s=60)))
    lends = []
    for usage in [a_usage(cpu_outside=0.6)] * 30 + [a_usage()] * 60:
        tale.now += 2_000
        tale.hear("gpu1", usage)
        lends.append(tale.ledger.lends("gpu1").cpu_milli)
    assert [amount for amount, before in zip(lends, [None, *lends], strict=False) if amount != before] == [
        4_000,
        0,
        10_000,
    ]
    assert lends.index(0) < 30
    assert lends.index(10_000) > 60


def test_what_a_withdrawn_offer_had_learnt_is_not_forgotten(story):
    tale = story(a_node("gpu1", cores=10, thresholds=thresholds(cpu_busy_max=0.3, dwell_s=60)))
    for _ in range(30):
        tale.now += 2_000
        tale.hear("gpu1", a_usage(cpu_outside=0.6))
    tale.ledger.apply([replace(tale.ledger.offers["gpu1"], withdrawn=True)])
    tale.now += 2_000
    tale.hear("gpu1")
    assert tale.ledger.lends("gpu1").cpu_milli == 0


def test_other_thresholds_hold_at_once(story):
    tale = story(a_node("gpu1", cores=10, thresholds=thresholds(cpu_busy_max=0.7)))
    tale.now += 2_000
    tale.hear("gpu1", a_usage(cpu_outside=0.5))
    tale.tell(NodeDeclared(a_node("gpu1", cores=10, thresholds=thresholds(cpu_busy_max=0.3))))
    assert tale.ledger.lends("gpu1").cpu_milli == 0
    tale.tell(NodeDeclared(a_node("gpu1", cores=10)))
    assert tale.ledger.lends("gpu1").cpu_milli == 10_000


def test_an_offer_is_made_anew_when_it_grows_old(story):
    tale = story(replace(a_node("gpu1"), refresh_ms=60_000, offer_ms=300_000))
    tale.now += 60_000
    tale.hear("gpu1")
    offer = tale.ledger.offers["gpu1"]
    assert (offer.generation, offer.made_at_ms, offer.expires_at_ms) == (2, NOW + 60_000, NOW + 360_000)


def test_an_offer_expires_when_nobody_renews_it(story):
    tale = story(replace(a_node("gpu1"), offer_ms=5_000))
    tale.later(4.999, heard=False)
    assert "gpu1" in tale.ledger.offers
    tale.later(0.001, heard=False)
    assert tale.ledger.offers == {}
    assert tale.ask(a_request()).state == "asked"


def test_a_node_nobody_hears_is_suspect_gets_nothing_new_and_keeps_what_it_has(story):
    tale = story()
    tale.ask(a_request("r1"))
    tale.later(SUSPECT_AFTER_MS / 1000, heard=False)
    assert tale.ledger.nodes["gpu1"].state is NodeState.ALIVE
    passed = tale.later(0.001, heard=False)
    assert tale.ledger.nodes["gpu1"].state is NodeState.SUSPECT
    assert [record.type for record in passed.records] == ["node-suspect"]
    assert tale.ledger.leases["r1"].state == "active"
    assert tale.ask(a_request("r2")).state == "asked"


def test_a_suspect_node_that_is_heard_serves_those_who_waited(story):
    tale = story()
    tale.later(7, heard=False)
    assert tale.ask(a_request("r1")).state == "asked"
    tale.hear("gpu1")
    assert tale.ledger.leases["r1"].state == "active"


def test_a_lost_node_that_is_heard_joins_again(story):
    tale = story()
    tale.ledger.apply([replace(tale.ledger.nodes["gpu1"], state=NodeState.LOST)])
    tale.hear("gpu1")
    assert tale.ledger.nodes["gpu1"].state is NodeState.ALIVE


def test_a_new_control_plane_doubts_everybody_and_starts_its_fences_above_all_earlier_ones(story):
    tale = story(a_node("gpu1"), a_node("gpu2"))
    before = tale.ask(a_request("r1")).fence
    tale.tell(ControlPlaneStarted(3))
    assert {node.state for node in tale.ledger.nodes.values()} == {NodeState.SUSPECT}
    assert tale.ledger.counters == {"epoch": 3, "fence": 3 << 32}
    assert tale.ask(a_request("r2")).state == "asked"
    tale.hear("gpu2")
    assert tale.ledger.leases["r2"].fence == (3 << 32) + 1 > before


def test_a_fence_above_the_new_epoch_is_not_lowered(story):
    tale = story()
    tale.tell(ControlPlaneStarted(9))
    tale.tell(ControlPlaneStarted(9))
    lease = None
    tale.hear("gpu1")
    lease = tale.ask(a_request("r1"))
    tale.tell(ControlPlaneStarted(9))
    assert tale.ledger.counters["fence"] == lease.fence


def test_after_a_restart_nobody_was_heard_and_nothing_is_offered(story):
    tale = story()
    tale.submit(a_request("j1"))
    again = Ledger(tale.ledger.rows(durable_only=True))
    assert again.observations == again.offers == {}
    assert pending(again) == pending(tale.ledger)


def test_a_node_declared_larger_lends_more_at_once_also_to_those_who_wait(story):
    tale = story(a_node("gpu1", cores=4), a_node("gpu2", cores=1))
    tale.ask(a_request("r1", cores=4))
    assert tale.ask(a_request("r2", cores=4)).state == "asked"
    tale.tell(NodeDeclared(a_node("gpu1", cores=8)))
    assert tale.ledger.leases["r2"].node == "gpu1"


def test_a_node_declared_smaller_lends_less_at_once(story):
    tale = story(a_node("gpu1", cores=4))
    tale.ask(a_request("r1", cores=1))
    tale.tell(NodeDeclared(a_node("gpu1", cores=2)))
    assert tale.ledger.lends("gpu1") == a_capacity(cores=2)
    assert tale.ask(a_request("r2", cores=2)).state == "asked"


def test_a_node_declared_smaller_than_what_it_lent_keeps_its_old_limits(story):
    tale = story(a_node("gpu1", cores=4, caps=caps(cores=3)))
    tale.ask(a_request("r1", cores=3))
    told = tale.tell(NodeDeclared(a_node("gpu1", cores=2, rank=7)))
    node = tale.ledger.nodes["gpu1"]
    assert (node.capacity, node.caps, node.rank) == (a_capacity(cores=4), caps(cores=3), 7)
    assert [(record.type, record.reason) for record in told.records] == [
        ("node-kept", "still 3000 of 2000 millicores lent: keeps its old limits until the next start")
    ]


def test_a_gpu_declared_exclusive_while_it_is_shared_stays_as_it_was(story):
    tale = story(a_node("gpu1", gpus=1))
    tale.ask(a_request("r1", gpus=0.5))
    told = tale.tell(NodeDeclared(a_node("gpu1", gpus=1, exclusive=True)))
    assert not tale.ledger.nodes["gpu1"].capacity.gpus[0].exclusive
    assert "GPU 0 lent in parts, though exclusive" in told.records[0].reason


def test_declaring_the_same_limits_while_somebody_makes_room_is_no_excess(story):
    tale = story(a_node("gpu1", cores=4))
    tale.submit(a_request("j1", cores=4, priority="low"), starts=True)
    tale.later(2)
    tale.submit(a_request("j2", cores=4, priority="urgent"))
    assert tale.tell(NodeDeclared(a_node("gpu1", cores=4))).records == []


def test_a_node_that_cannot_lend_what_a_preemptor_waits_for_keeps_its_old_limits(story):
    tale = story(a_node("gpu1", cores=4))
    tale.submit(a_request("j1", cores=1, priority="low"), starts=True)
    tale.later(2)
    tale.submit(a_request("j2", cores=4, priority="urgent"))
    tale.tell(NodeDeclared(a_node("gpu1", cores=2)))
    tale.end("j1")
    assert tale.ledger.nodes["gpu1"].capacity == a_capacity(cores=4)


def test_a_node_declared_before_it_was_heard_has_no_offer_to_renew(story):
    tale = story(ledger=Ledger([a_node("gpu1", cores=4)]))
    tale.tell(NodeDeclared(a_node("gpu1", cores=8)))
    assert tale.ledger.offers == {}


def test_a_forgotten_node_that_lends_nothing_leaves_at_once(story):
    tale = story(a_node("gpu1"), a_node("gpu2"))
    told = tale.tell(NodeForgotten("gpu1"))
    assert set(tale.ledger.nodes) == {"gpu2"}
    assert [record.type for record in told.records] == ["node-forgotten"]


def test_a_forgotten_node_that_never_joined_leaves_too(story):
    tale = story(ledger=Ledger([a_node("gpu1")]))
    tale.tell(NodeForgotten("gpu1"))
    assert tale.ledger.nodes == {}


def test_a_forgotten_node_that_nobody_hears_leaves_when_its_hold_is_over(story):
    tale = story(a_node("gpu1", hold_s=30), a_node("gpu2"))
    tale.ask(a_request("r1", require=("gpu1",)))
    tale.tell(NodeForgotten("gpu1"))
    tale.later(40, heard=False)
    tale.later(1, heard=False)
    assert set(tale.ledger.nodes) == {"gpu2"}
    assert tale.ledger.leases == {}


def test_forgetting_a_stranger_is_harmless(story):
    assert story().tell(NodeForgotten("stranger")).changes == []


def test_a_forgotten_node_that_lends_drains_and_then_leaves(story):
    tale = story()
    tale.ask(a_request("r1"))
    tale.tell(NodeForgotten("gpu1"))
    assert tale.ledger.nodes["gpu1"].state is NodeState.DRAINING
    tale.hear("gpu1")
    assert tale.ask(a_request("r2")).state == "asked"
    tale.later(1)
    assert "gpu1" in tale.ledger.nodes
    tale.release("r1")
    tale.later(1)
    assert tale.ledger.nodes == {}


def test_forgetting_a_node_twice_is_harmless(story):
    tale = story()
    tale.ask(a_request("r1"))
    tale.tell(NodeForgotten("gpu1"))
    tale.tell(NodeForgotten("gpu1"))
    assert tale.ledger.nodes["gpu1"].state is NodeState.DRAINING


def test_a_draining_node_that_is_declared_again_is_back_once_it_is_heard(story):
    tale = story()
    tale.ask(a_request("r1"))
    tale.tell(NodeForgotten("gpu1"))
    tale.tell(NodeDeclared(a_node("gpu1", cores=4, memory_gb=16)))
    node = tale.ledger.nodes["gpu1"]
    assert (node.state, node.forgotten) == (NodeState.SUSPECT, False)
    tale.hear("gpu1")
    assert tale.ask(a_request("r2")).state == "active"


def test_a_node_that_left_may_come_back(story):
    tale = story(a_node("gpu1"))
    tale.tell(NodeForgotten("gpu1"))
    tale.tell(NodeDeclared(a_node("gpu1", cores=2)))
    tale.hear("gpu1")
    assert tale.ask(a_request("r1")).node == "gpu1"
