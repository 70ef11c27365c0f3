"""Work of a node under pressure gets its lease out of what the grid holds for that node."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain.blocks import Block
from distributed_grid.domain.engines import Binding, EngineResources
from distributed_grid.domain.events import (
    BlockAsked,
    EngineNode,
    EngineObserved,
    EngineRegistered,
    GroupBound,
    JobSubmitted,
    NodeDeclared,
    PolicySet,
)
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.resources import Amounts, GpuShare, ResourceType
from distributed_grid.domain.scheduling_policy import Quota, Strategy
from distributed_grid.domain.states import JobState, LeaseEnd, LeaseState
from distributed_grid.errors import Refused
from distributed_grid.scheduling.pressure.loans import used_amount
from distributed_grid.scheduling.pressure.scan import RETRY_UNUSED
from tests.support.builders import GB, a_command, a_node, a_request
from tests.support.rebalance_rounds import Rounds, a_reading, actions, apart, rules

HARD = a_reading("master", memory=900)
BETWEEN = a_reading("master", memory=500)
IDLE = a_reading("master", memory=100)


def pressed(**numbers: int) -> tuple[Rounds, Lease]:
    """A grid that holds 10.5 GB of another node for the master."""
    scenario = Rounds(rules=rules("aggressive", "share_and_offload", **numbers))
    scenario.round(HARD)
    (lease,) = scenario.leases
    return scenario, lease


def held_gb(scenario: Rounds) -> float:
    return sum(lease.claim.memory_bytes for lease in scenario.leases if lease.claim is not None) / GB


# ------------------------------------------------------------------ what belongs to the node
def test_a_job_for_the_node_is_carved_out_of_its_lease_though_other_nodes_are_free():
    scenario, lease = pressed()
    before, lent = held_gb(scenario), scenario.ledger.claims_on(lease.node).memory_bytes
    scenario.submit(a_request("job1", memory_gb=4, target="master"), starts=True)
    mine = scenario.lease_of("job1")
    assert (mine.node, mine.carved_from) == (lease.node, (lease.id,))
    assert held_gb(scenario) == before - 4
    assert scenario.ledger.claims_on(lease.node).memory_bytes == lent
    assert used_amount(scenario.leases[0]) == 4 * GB
    scenario.end("job1")
    assert scenario.ledger.claims_on(lease.node).memory_bytes == lent - 4 * GB
    assert held_gb(scenario) == before - 4
    scenario.ledger.check()


def test_what_was_typed_on_the_node_is_its_work_too():
    scenario, lease = pressed()
    scenario.submit(a_request("job1", memory_gb=4, origin="master"))
    assert scenario.lease_of("job1").carved_from == (lease.id,)


@pytest.mark.parametrize(
    "wishes",
    [
        {},
        {"target": "gpu1"},
        {"origin": "gpu1"},
        {"origin": "master", "strategy": Strategy.SPREAD},
        {"origin": "master", "prefer": ("gpu1", "gpu2")},
        {"target": "master", "require": ("master",)},
        {"target": "master", "prefer": ("master",)},
    ],
)
def test_work_of_others_and_work_with_other_wishes_leave_it_as_it_is(wishes):
    scenario, lease = pressed()
    scenario.submit(a_request("job1", memory_gb=2, **wishes))
    assert scenario.lease_of("job1").carved_from == ()
    assert scenario.leases == [lease]


def test_work_that_asks_for_something_else_leaves_it_as_it_is():
    scenario, lease = pressed()
    scenario.submit(a_request("job1", cores=2, target="master"))
    assert scenario.leases == [lease]


def test_what_else_the_work_needs_has_to_be_free_on_the_lender():
    scenario, lease = pressed()
    scenario.submit(a_request("job1", cores=3, memory_gb=4, target="master"))
    assert scenario.lease_of("job1").node == lease.node
    scenario.submit(a_request("job2", cores=6, memory_gb=1, target="master"))
    assert scenario.lease_of("job2").node != lease.node
    assert scenario.lease_of("job2").carved_from == ()


def test_a_waiting_job_that_names_the_node_gets_its_part_and_no_more_of_it_goes():
    scenario, lease = pressed()
    for number, name in enumerate(scenario.ledger.nodes):
        free = 30 - scenario.ledger.claims_on(name).memory_bytes / GB
        scenario.submit(a_request(f"full{number}", memory_gb=free, require=(name,)), starts=True)
    before = held_gb(scenario)
    scenario.submit(a_request("job1", memory_gb=3, prefer=("master",)))
    assert scenario.lease_of("job1").carved_from == (lease.id,)
    assert held_gb(scenario) == before - 3
    scenario.submit(a_request("job2", memory_gb=3, require=("master",)))
    assert scenario.job("job2").state is JobState.QUEUED


def test_a_new_block_of_the_nodes_programs_is_carved_out_of_its_lease():
    scenario, lease = pressed()
    before = held_gb(scenario)
    scenario.handle(BlockAsked(id="block1", user="ada", size_bytes=2 * GB, term_ms=60_000, home="master"))
    block = scenario.ledger.blocks["block1"]
    assert isinstance(block, Block)
    assert [place.node for place in block.places] == [lease.node]
    assert scenario.ledger.leases[block.places[0].copy].carved_from == (lease.id,)
    assert held_gb(scenario) == before - 2


def test_a_block_without_room_elsewhere_gets_a_part_too():
    scenario, lease = pressed()
    for number, name in enumerate(scenario.ledger.nodes):
        free = 30 - scenario.ledger.claims_on(name).memory_bytes / GB
        scenario.submit(a_request(f"full{number}", memory_gb=free, require=(name,)), starts=True)
    scenario.handle(
        BlockAsked(id="block1", user="ada", size_bytes=2 * GB, term_ms=60_000, home="master", prefer="gpu1")
    )
    assert scenario.ledger.leases["block1:1"].carved_from == (lease.id,)


# ------------------------------------------------------------------ how much, and what is left
def test_all_of_it_is_used_and_the_rest_comes_from_what_is_free():
    scenario, lease = pressed()
    records = scenario.handle(
        JobSubmitted(id="big", command=a_command("true"), request=a_request("job1", memory_gb=15, target="master"))
    ).records
    assert scenario.leases == []
    assert scenario.lease_of("job1").node == lease.node
    (line,) = [record for record in records if record.type == "rebalanced"]
    assert (line.subject, line.node, line.data["action"]) == (lease.id, "master", "used")
    assert line.reason == "10.5 GB of it for job1"
    assert scenario.ledger.claims_on(lease.node).memory_bytes == 15 * GB


def test_several_leases_give_together():
    scenario, _ = pressed(portion_milli=300, cool_down=1)
    scenario.round(HARD, a_reading("gpu1", memory=900), times=5)
    held = [lease for lease in scenario.leases if (lease.node, lease.request.target) == ("gpu2", "master")]
    others = [lease for lease in scenario.leases if lease not in held]
    assert len(held) > 1
    assert others
    together = sum(lease.request.ask.memory_bytes for lease in held) / GB
    scenario.submit(a_request("job1", memory_gb=together, target="master", require=("gpu2",)))
    assert set(scenario.lease_of("job1").carved_from) == {lease.id for lease in held}
    assert scenario.leases == others


def test_of_several_gpus_whole_ones_stay():
    nodes = [apart(a_node(name, cores=8, gpus=8)) for name in ("master", "gpu1")]
    scenario = Rounds(*nodes, rules=rules("aggressive", "share_and_offload"))
    scenario.round(a_reading("master", gpu=900))
    (lease,) = scenario.leases
    assert lease.claim is not None
    assert [share.milli for share in lease.claim.gpus] == [1000, 1000]
    scenario.submit(a_request("part", gpus=0.5, target="master"))
    (left,) = scenario.leases
    part = scenario.lease_of("part")
    assert part.claim is not None
    assert part.claim.gpus[0].index == lease.claim.gpus[0].index
    assert left.claim is not None
    assert [share.index for share in left.claim.gpus] == [lease.claim.gpus[1].index]
    scenario.submit(a_request("whole", gpus=1, target="master"))
    assert scenario.leases == []
    assert [type(share) for share in scenario.lease_of("whole").claim.gpus] == [GpuShare]
    scenario.ledger.check()


def test_a_displaced_job_comes_back_like_any():
    scenario, lease = pressed()
    scenario.submit(a_request("job1", memory_gb=4, target="master"), starts=True, restartable=True)
    scenario.end("job1", Outcome(Ending.RECLAIMED, detail="its owner needs it"))
    assert len(scenario.job("job1").attempts) == 2
    assert scenario.lease_of("job1").carved_from == ()  # the lender is withdrawn until it is heard again
    assert scenario.lease_of("job1").node != lease.node


def test_a_job_beyond_its_quota_gets_nothing():
    scenario, lease = pressed()
    scenario.handle(PolicySet(replace(scenario.ledger.policy, quotas=(Quota(name="ada", memory_bytes=GB),))))
    with pytest.raises(Refused, match="quota of ada"):
        scenario.submit(a_request("job1", memory_gb=4, target="master"))
    assert scenario.leases == [lease]


def test_in_an_engine_the_lease_is_bound_anew_with_what_it_has_left():
    scenario, lease = pressed()
    node = replace(scenario.ledger.nodes[lease.node], engine="ray", engine_node="n1")
    scenario.handle(NodeDeclared(node))
    scenario.ledger.apply([replace(lease, engine="ray"), node])
    scenario.submit(a_request("job1", memory_gb=4, target="master"))
    left = scenario.ledger.leases[lease.id]
    assert left.state is LeaseState.RESERVING
    mine, its = scenario.lease_of("job1"), scenario.ledger.binding_of(left)
    assert its is not None
    assert its.again
    assert its.fence > mine.fence


# ------------------------------------------------------------------ tasks of an engine that use all of it
def in_ray(**numbers: int) -> tuple[Rounds, Lease, Binding]:
    """A grid that holds 10.5 GB for the master, bound in Ray."""
    scenario, lease = pressed(**numbers)
    scenario.handle(EngineRegistered(name="ray", mode="attached", address="head:6379"))
    observe(scenario, lease)
    binding = scenario.ledger.binding_of(scenario.ledger.leases[lease.id])
    assert binding is not None
    scenario.handle(GroupBound(binding.key))
    return scenario, lease, binding


def observe(scenario: Rounds, lease: Lease, *in_use: str) -> list[str]:
    """Ray sees the node of a lease, and these groups at work; what that did."""
    room = EngineResources(8000, 30 * GB, 0)
    nodes = (EngineNode(id="n1", name=lease.node, has=room, room=room),)
    return actions(
        scenario.handle(
            EngineObserved(name="ray", session="s", asked_at_ms=scenario.now, nodes=nodes, groups=None, in_use=in_use)
        ).records
    )


def test_while_tasks_of_an_engine_use_it_nothing_is_carved_out_and_it_stays():
    scenario, lease, binding = in_ray(unused_after=5, leases_max=1)
    assert observe(scenario, lease, binding.group) == ["used"]
    assert observe(scenario, lease, binding.group) == []
    scenario.submit(a_request("job1", memory_gb=4, target="master"))
    assert scenario.lease_of("job1").carved_from == ()
    assert actions(scenario.round(HARD, times=20)) == []
    observe(scenario, lease)
    records = scenario.round(HARD, times=6)
    assert actions(records) == ["given_back"]
    told = "unused for 2.5 min; nothing of 10.5 GB was used, and tasks of ray used the rest"
    assert told in [record.reason for record in records]


def test_a_use_that_no_round_has_seen_counts_too():
    scenario, lease, binding = in_ray(unused_after=5, leases_max=1)
    scenario.round(HARD, times=3)
    observe(scenario, lease, binding.group)
    observe(scenario, lease)
    assert actions(scenario.round(HARD, times=4)) == []
    assert actions(scenario.round(HARD, times=3)) == ["given_back"]


def test_the_use_of_a_boost_that_somebody_requested_is_not_noted():
    scenario, lease, _ = in_ray()
    scenario.ask(a_request("boost", memory_gb=2, require=(lease.node,)))
    binding = scenario.ledger.binding_of(scenario.ledger.leases["boost"])
    assert binding is not None
    scenario.handle(GroupBound(binding.key))
    assert observe(scenario, lease, binding.group) == []
    assert not scenario.ledger.bindings[binding.key].in_use


# ------------------------------------------------------------------ a command that uses all of it
def run_in(scenario: Rounds, lease: Lease, user: str = "bob") -> None:
    request = a_request("within", user=user, use_lease=lease.id)
    scenario.handle(JobSubmitted(id="within", command=a_command("true"), request=replace(request, ask=Amounts())))


def test_anybody_may_run_a_command_with_it_and_then_nothing_takes_it_away():
    scenario, lease = pressed(unused_after=3)
    run_in(scenario, lease)
    scenario.submit(a_request("job1", memory_gb=4, target="master"))
    assert scenario.lease_of("job1").carved_from == ()
    scenario.submit(a_request("job2", memory_gb=25, require=(lease.node,), wait_s=100_000))
    assert scenario.job("job2").state is JobState.QUEUED
    assert "given_back" not in actions(scenario.round(IDLE, times=100))
    assert [one.id for one in scenario.leases] == [lease.id]
    scenario.end("within")
    scenario.round(IDLE)
    assert scenario.leases == []
    assert scenario.job("job2").state is JobState.ASSIGNED


def test_a_command_beyond_its_users_quota_is_refused():
    scenario, lease = pressed()
    scenario.handle(PolicySet(replace(scenario.ledger.policy, quotas=(Quota(name="bob", memory_bytes=GB),))))
    with pytest.raises(Refused, match="quota of bob"):
        run_in(scenario, lease)
    run_in(scenario, lease, user="ada")


# ------------------------------------------------------------------ unused
def test_what_nothing_uses_goes_back_and_is_asked_for_again_at_a_slow_pace():
    scenario, _ = pressed(unused_after=5)
    assert actions(scenario.round(HARD, times=4)) == []
    records = scenario.round(HARD, times=5 + 5 * RETRY_UNUSED - 5)
    assert actions(records) == ["given_back"]
    assert actions(scenario.round(HARD, times=5)) == ["asked"]


def test_what_nothing_uses_is_asked_for_again_after_the_pressure_was_low():
    scenario, _ = pressed(unused_after=5)
    records = scenario.round(HARD, times=10)
    assert actions(records) == ["given_back"]
    (line,) = [record for record in records if record.type == "rebalanced"]
    assert line.reason == "unused for 2.5 min; nothing of 10.5 GB was used"
    assert scenario.ledger.rebalance_states["master"].watch(ResourceType.MEMORY).unused_amount
    assert actions(scenario.round(BETWEEN, times=5)) == []
    assert "asked" not in actions(scenario.round(HARD, times=5))
    scenario.round(IDLE)
    assert "asked" in actions(scenario.round(HARD))


def test_use_of_a_part_begins_the_wait_anew_and_is_told_at_the_end():
    scenario, _ = pressed(unused_after=5, leases_max=1)
    scenario.round(HARD, times=3)
    scenario.submit(a_request("job1", memory_gb=4, target="master"), starts=True)
    assert actions(scenario.round(HARD, times=4)) == []
    records = scenario.round(HARD, times=3)
    assert actions(records) == ["given_back"]
    assert "unused for 2.5 min; 4.0 GB of 10.5 GB was used" in [record.reason for record in records]
    assert scenario.job("job1").state is JobState.RUNNING


def test_it_is_asked_for_again_with_the_next_round_when_work_of_the_node_arrives():
    scenario, _ = pressed(unused_after=5)
    scenario.round(HARD, times=6)
    assert scenario.leases == []
    scenario.submit(a_request("other", memory_gb=1, target="gpu1"))
    assert actions(scenario.round(HARD)) == []
    scenario.submit(a_request("short", memory_gb=1, target="master"), starts=True)
    scenario.end("short")
    assert actions(scenario.round(HARD)) == ["asked"]


def test_it_is_asked_for_again_when_work_of_the_node_has_waited():
    scenario, _ = pressed(unused_after=5)
    scenario.round(HARD, times=20)
    assert scenario.leases == []
    scenario.submit(a_request("job0", memory_gb=28, require=("gpu1",)), starts=True)
    scenario.submit(a_request("job1", memory_gb=28, require=("gpu1",)))
    assert actions(scenario.round(HARD, times=3)) == []
    scenario.cancel("job1")
    scenario.submit(a_request("full", memory_gb=30, require=("master",)), starts=True)
    scenario.submit(a_request("job2", memory_gb=28, require=("master",)))
    assert actions(scenario.round(HARD)) == []  # while somebody waits for memory nothing is asked for
    scenario.cancel("job2")
    assert actions(scenario.round(HARD)) == ["asked"]


def test_the_lease_that_is_used_up_ended_as_released():
    scenario, lease = pressed()
    changes = scenario.handle(
        JobSubmitted(id="big", command=a_command("true"), request=a_request("job1", memory_gb=15, target="master"))
    ).changes
    (over,) = [row for row in changes if isinstance(row, Lease) and row.is_over]
    assert (over.id, over.end, over.detail) == (lease.id, LeaseEnd.RELEASED, "all of it is used")
