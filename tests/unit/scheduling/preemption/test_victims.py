"""Who may be displaced, whom it costs least, and who is spared: checkpoint marks, caps, gangs, musts.

Whatever runs wherever, nobody else could have gone instead: held against every set of victims on every node.
"""

from __future__ import annotations

from itertools import combinations
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bench.preemption import KINDS, NOW, an_ask, full_grid
from distributed_grid.domain.events import AttemptMarked, LeaseAsked, PolicySet
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import GpuDevice, Priority
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.domain.states import JobState, LeaseState, NodeState
from distributed_grid.errors import GridError
from distributed_grid.scheduling.offers.pause import FIRST_REST_MS
from distributed_grid.scheduling.preemption.preemption import PreemptionPlan, plan_preemption
from distributed_grid.scheduling.preemption.victims import (
    NOT_PREFERRED,
    PreemptionCandidates,
    cost_bounds,
    victim_weight,
    work_lost,
)
from tests.support.builders import GB, Scenario, a_node, a_request

POLICY = SchedulingPolicy(minimum_run_ms=2_000, preemptions_max=2)
MIXED = (GpuDevice(0, 24 * GB), GpuDevice(1, 8 * GB), GpuDevice(2, 8 * GB, exclusive=True))

nodes = st.lists(
    st.sampled_from(
        [
            {"cores": 4, "memory_gb": 8},
            {"cores": 8, "memory_gb": 16},
            {"cores": 6, "memory_gb": 12, "custom": {"fpga": 2}},
            {"cores": 8, "memory_gb": 16, "gpus": 2},
            {"cores": 8, "memory_gb": 16, "gpus": 4},
            {"cores": 8, "memory_gb": 16, "gpus": MIXED},
        ]
    ),
    min_size=1,
    max_size=3,
)

asks = st.sampled_from(
    [
        *[{"cores": 1}, {"cores": 2}, {"cores": 0.5, "memory_gb": 3}, {"cores": 2, "memory_gb": 1}, {"memory_gb": 4}],
        *[{"cores": 3, "memory_gb": 4}, {"cores": 4}, {"cores": 1, "custom": {"fpga": 1}}],
        *[{"gpus": 0.3}, {"gpus": 0.5}, {"cores": 1, "gpus": 0.7}, {"gpus": 1}, {"cores": 2, "gpus": 1}, {"gpus": 2}],
    ]
)

held = st.lists(
    st.tuples(
        asks,
        st.sampled_from(["low", "low", "medium", "high", "urgent"]),
        st.sampled_from(["job", "job", "job", "lease", "gang"]),
        st.sampled_from([0, 1, 1, 4, 30]),
        st.sampled_from([None, None, 0, 500, 20_000]),
    ),
    max_size=11,
)


def an_urgent(ask: dict[str, Any], prefer: tuple[str, ...], scale: int) -> Request:
    """An urgent request for so many times an ask; custom resources stay as they are."""
    scaled: dict[str, Any] = {
        kind: amount if isinstance(amount, dict) else amount * scale for kind, amount in ask.items()
    }
    return a_request("vip", **scaled, priority="urgent", prefer=prefer)


wanted = st.builds(
    an_urgent,
    asks,
    st.sampled_from([(), (), ("n0",), ("n1",)]),
    st.sampled_from([1, 2, 2]),
)


def a_busy_grid(machines: list[dict], work: list[tuple]) -> Scenario:
    """Machines on which work began at different times, some of it marked checkpoints, some of it is being stopped."""
    scenario = Scenario(*(a_node(f"n{number}", **kwargs) for number, kwargs in enumerate(machines)))
    scenario.handle(PolicySet(POLICY))
    for number, (ask, priority, kind, seconds, mark) in enumerate(work):
        request = a_request(f"r{number}", **ask, priority=priority, wait_s=0)
        try:
            if kind == "job":
                scenario.submit(request, starts=number % 7 != 6)
            else:
                scenario.handle(LeaseAsked(replace(request, gang=2 if kind == "gang" else 1)))
        except GridError:
            continue  # it does not fit: there is less to displace
        scenario.advance(seconds)
        job = scenario.ledger.jobs.get(request.id)
        if job is not None and job.attempt is not None and mark is not None:
            scenario.handle(AttemptMarked(job.uid, 1, job.attempt.fence, mark))
        if job is not None and mark == 500 and job.state is JobState.RUNNING:
            scenario.cancel(job.uid)
    return scenario


def may_go(ledger: Ledger, lease: Lease, request: Request, now: int) -> bool:
    """Whether a lease may be displaced, told from the rows alone."""
    job, began = ledger.jobs.get(lease.job), lease.granted_at_ms
    if job is not None and job.attempt is not None:
        began = max(began, job.attempt.started_at_ms)
        ends = [one.outcome.ending for one in job.attempts if one.outcome is not None]
        if ends.count(Ending.PREEMPTED) >= ledger.policy.preemptions_max:
            return False
    node = ledger.nodes[lease.node]
    rules = lease.state is LeaseState.ACTIVE, lease.request.priority < request.priority, node.state is NodeState.ALIVE
    return all(rules) and now - began >= ledger.policy.minimum_run_ms


def along(ledger: Ledger, lease: Lease) -> list[Lease]:
    """Who goes when a lease goes."""
    return [ledger.leases[member] for member in ledger.gangs.get(lease.gang, ())] or [lease]


def price(ledger: Ledger, gone: list[Lease], node: str, request: Request, now: int) -> tuple:
    """What displacing these costs: high, medium and low victims, whether the node was wished for, work lost."""
    costs = PreemptionCandidates(ledger, request, now, work_lost).costs
    counts = [sum(lease.request.priority is rank for lease in gone) for rank in reversed(list(Priority)[:-1])]
    lost = sum(int(costs[ledger.running.slots[lease.id]]) for lease in gone)
    return (*counts, node not in request.prefer, lost)


def every_way(ledger: Ledger, request: Request, now: int) -> list[tuple]:
    """The prices of all sets of victims that would be enough, on all nodes that have no room by themselves."""
    found = []
    for node in ledger.nodes:
        lends, leases = ledger.lends(node), list(ledger.leases_of(node))
        if NodeClaims(one.claim for one in leases if one.claim).claim_for(request.ask, lends) is not None:
            continue
        leaving = [lease for lease in leases if lease.state is LeaseState.RELEASING]
        staying = [lease for lease in leases if lease not in leaving]
        able = [one for one in staying if all(may_go(ledger, peer, request, now) for peer in along(ledger, one))]
        for size in range(len(able) + 1):
            for gone in combinations(able, size):
                claims = NodeClaims(lease.claim for lease in staying if lease.claim and lease not in gone)
                if (gone or leaving) and claims.claim_for(request.ask, lends) is not None:
                    victims = [peer for lease in gone for peer in along(ledger, lease)]
                    found.append(price(ledger, victims, node, request, now))
    return found


def price_of(scenario: Scenario, way: PreemptionPlan, request: Request) -> tuple:
    victims = [scenario.ledger.leases[victim] for victim in way.victims]
    return price(scenario.ledger, victims, way.node, request, scenario.now)


@settings(max_examples=120)
@given(machines=nodes, work=held, request=wanted)
def test_no_other_victims_would_have_been_cheaper(machines, work, request):
    scenario = a_busy_grid(machines, work)
    way = plan_preemption(scenario.ledger, request, scenario.now)
    ways = every_way(scenario.ledger, request, scenario.now)
    if way is None:
        assert not ways
    else:
        assert price_of(scenario, way, request) == min(ways)
    scenario.ledger.check()


@settings(max_examples=80)
@given(machines=nodes, work=held, request=wanted)
def test_every_victim_may_be_preempted_is_needed_and_frees_the_claim(machines, work, request):
    scenario = a_busy_grid(machines, work)
    ledger = scenario.ledger
    way = plan_preemption(ledger, request, scenario.now)
    if way is None:
        return
    gone = [ledger.leases[victim] for victim in way.victims]
    assert all(may_go(ledger, lease, request, scenario.now) for lease in gone)
    here = [lease for lease in gone if lease.node == way.node]
    assert {peer.id for lease in here for peer in along(ledger, lease)} == set(way.victims)
    waited_for = set(way.awaits)
    assert {lease.id for lease in here} <= waited_for
    staying = [lease.claim for lease in ledger.leases_of(way.node) if lease.id not in waited_for and lease.claim]
    assert NodeClaims([*staying, way.claim]).excess_over(ledger.lends(way.node)) is None
    leaving = {lease.id for lease in ledger.leases_of(way.node) if lease.state is LeaseState.RELEASING}
    gone_for_good = {lease.id for lease in here} | leaving
    for spared in here:
        left = [one.claim for one in ledger.leases_of(way.node) if one.id not in gone_for_good or one is spared]
        assert NodeClaims(claim for claim in left if claim).claim_for(request.ask, ledger.lends(way.node)) is None


@settings(max_examples=40)
@given(kind=st.sampled_from(KINDS), size=st.integers(5, 25), seed=st.integers(0, 10**6))
def test_looking_closely_at_every_node_finds_nothing_better(kind, size, seed):
    ledger = Ledger(full_grid(size, kind, seed))
    request = Request(id="vip", user="ada", ask=an_ask(Random(seed), kind), priority=Priority.URGENT)
    way = plan_preemption(ledger, request, NOW)
    alone = [plan_preemption(ledger, replace(request, require=(node,)), NOW) for node in ledger.nodes]
    prices = [paid(ledger, one, request) for one in alone if one is not None]
    assert (way is None) == (not prices)
    if way is not None:
        assert paid(ledger, way, request) == min(prices)


def paid(ledger: Ledger, way: PreemptionPlan, request: Request) -> tuple:
    return price(ledger, [ledger.leases[victim] for victim in way.victims], way.node, request, NOW)


PREEMPTED = Outcome(Ending.PREEMPTED)


def runs(
    scenario: Scenario,
    uid: str,
    *,
    on: str = "gpu1",
    cores: float = 0,
    memory_gb: float = 0,
    gpus: float = 0,
    priority: str = "low",
    seconds: float = 0,
) -> None:
    """A job that runs there, and so many seconds later."""
    asked = a_request(uid, cores=cores, memory_gb=memory_gb, gpus=gpus, priority=priority, require=[on])
    scenario.submit(asked, starts=True)
    scenario.advance(seconds)


def marks(scenario: Scenario, uid: str, *, ago_s: float = 0) -> None:
    attempt = scenario.job(uid).attempt
    assert attempt is not None
    scenario.handle(AttemptMarked(uid, attempt.number, attempt.fence, round(1000 * ago_s)))


def urgent(**kwargs) -> Request:
    return a_request("vip", priority="urgent", **kwargs)


def way_for(scenario: Scenario, request: Request) -> PreemptionPlan | None:
    return plan_preemption(scenario.ledger, request, scenario.now)


def victims(scenario: Scenario, **ask) -> list[str] | None:
    way = way_for(scenario, urgent(**ask))
    return None if way is None else sorted(victim.split(".")[0] for victim in way.victims)


def two_nodes(**kwargs) -> Scenario:
    return Scenario(a_node("gpu1", **kwargs), a_node("gpu2", **kwargs))


def test_two_low_ones_on_another_node_go_before_one_high():
    scenario = two_nodes(cores=2)
    runs(scenario, "high", cores=2, priority="high")
    runs(scenario, "a", on="gpu2", cores=1)
    runs(scenario, "b", on="gpu2", cores=1, seconds=3600)
    assert victims(scenario, cores=2) == ["a", "b"]


def test_work_is_counted_in_cores_and_time():
    scenario = two_nodes(cores=8)
    runs(scenario, "narrow", on="gpu1", cores=2)
    runs(scenario, "rest", on="gpu1", cores=6, priority="urgent", seconds=10)
    runs(scenario, "wide", on="gpu2", cores=8, seconds=5)
    assert victims(scenario, cores=2) == ["narrow"]  # 30 core-seconds, not 40
    scenario.advance(10)
    assert victims(scenario, cores=2) == ["narrow"]  # 50, not 120
    assert victims(scenario, cores=8) == ["wide"]


def test_a_gpu_or_memory_counts_as_the_cores_that_are_as_large_a_part_of_the_grid():
    scenario = two_nodes(cores=8, memory_gb=16, gpus=2)
    runs(scenario, "gpu", on="gpu1", cores=1, gpus=1)
    runs(scenario, "rest", on="gpu1", cores=7, priority="urgent")
    runs(scenario, "cores", on="gpu2", cores=3)
    runs(scenario, "other", on="gpu2", cores=5, priority="urgent", seconds=60)
    assert victims(scenario, cores=1) == ["cores"]  # three cores of sixteen are less than one GPU of four
    scenario = two_nodes(cores=8, memory_gb=16)
    runs(scenario, "memory", on="gpu1", cores=1, memory_gb=8)
    runs(scenario, "rest", on="gpu1", cores=7, priority="urgent")
    runs(scenario, "cores", on="gpu2", cores=3)
    runs(scenario, "other", on="gpu2", cores=5, priority="urgent", seconds=60)
    assert victims(scenario, cores=1) == ["cores"]


def test_fresh_checkpoint_is_preempted_before_a_fresh_start():
    scenario = Scenario(a_node(cores=2))
    runs(scenario, "old", cores=1, seconds=3600)
    runs(scenario, "young", cores=1, seconds=60)
    assert victims(scenario, cores=1) == ["young"]
    marks(scenario, "old", ago_s=5)
    assert victims(scenario, cores=1) == ["old"]
    scenario.advance(300)
    marks(scenario, "young")
    assert victims(scenario, cores=1) == ["young"]


def test_the_minimum_run_time_is_the_policys_and_counts_from_the_start():
    scenario = Scenario(a_node(cores=1))
    scenario.handle(PolicySet(SchedulingPolicy(minimum_run_ms=60_000)))
    scenario.submit(a_request("a", cores=1, priority="low"))
    scenario.advance(100)
    scenario.start("a")
    scenario.advance(59.999)
    assert victims(scenario, cores=1) is None
    scenario.advance(0.001)
    assert victims(scenario, cores=1) == ["a"]


def test_job_at_the_preemption_cap_is_not_preempted():
    scenario = Scenario(a_node(cores=1))
    scenario.handle(PolicySet(SchedulingPolicy(preemptions_max=2)))
    runs(scenario, "a", cores=1, seconds=10)
    for _ in range(2):
        assert victims(scenario, cores=1) == ["a"]
        scenario.end("a", PREEMPTED)
        scenario.advance(FIRST_REST_MS / 1000)  # nobody had asked for it, so the node counts as one that takes it back
        scenario.heartbeat("gpu1")
        scenario.start("a")
        scenario.advance(10)
    assert victims(scenario, cores=1) is None


def test_with_a_cap_of_nothing_nobody_is_displaced():
    scenario = Scenario(a_node(cores=1))
    scenario.handle(PolicySet(SchedulingPolicy(preemptions_max=0)))
    runs(scenario, "a", cores=1, seconds=10)
    assert victims(scenario, cores=1) is None


def test_other_ends_do_not_count_for_the_preemption_cap():
    scenario = Scenario(a_node(cores=1))
    scenario.handle(PolicySet(SchedulingPolicy(preemptions_max=1)))
    scenario.submit(a_request("a", cores=1, priority="low"), starts=True, retries=1)
    scenario.advance(10)
    scenario.end("a", Outcome(Ending.LOST))
    scenario.start("a")
    scenario.advance(10)
    assert victims(scenario, cores=1) == ["a"]


def gang(scenario: Scenario, uid: str, *, cores: float, seconds: float = 10, priority: str = "low") -> None:
    """A gang of two plain leases, one on each of two nodes."""
    scenario.handle(LeaseAsked(replace(a_request(uid, cores=cores, priority=priority), gang=2)))
    scenario.advance(seconds)


def test_a_member_of_a_gang_takes_its_gang_along_and_counts_as_many():
    scenario = two_nodes(cores=4)
    gang(scenario, "both", cores=2)
    runs(scenario, "alone", on="gpu1", cores=2)
    runs(scenario, "rest", on="gpu2", cores=2, priority="urgent", seconds=3600)
    assert victims(scenario, cores=2) == ["alone"]
    way = way_for(scenario, urgent(cores=2, require=["gpu2"]))
    assert way is not None
    assert set(way.victims) == {"both", "both:2"}
    assert [scenario.ledger.leases[lease_id].node for lease_id in way.awaits] == ["gpu2"]


def test_a_gang_stays_where_one_of_its_nodes_is_not_heard():
    scenario = two_nodes(cores=2)
    gang(scenario, "both", cores=2)
    scenario.now += 7_000
    scenario.heartbeat("gpu1")
    scenario.advance(0, heard=False)
    assert victims(scenario, cores=1) is None


def test_a_gang_that_asks_does_not_displace():
    scenario = two_nodes(cores=2)
    runs(scenario, "a", on="gpu1", cores=2)
    runs(scenario, "b", on="gpu2", cores=2, seconds=10)
    assert way_for(scenario, replace(urgent(cores=1), gang=2)) is None


def test_stopping_job_is_awaited_instead_of_another_preemption():
    scenario = Scenario(a_node(cores=4))
    runs(scenario, "a", cores=2)
    runs(scenario, "b", cores=2, seconds=10)
    scenario.cancel("a")
    way = way_for(scenario, urgent(cores=2))
    assert way is not None
    assert (way.victims, way.awaits) == ((), ("a.1",))


def test_stopping_job_is_not_awaited_without_need():
    scenario = Scenario(a_node(cores=4))
    runs(scenario, "a", cores=1)
    runs(scenario, "b", cores=3, seconds=10)
    scenario.cancel("a")
    way = way_for(scenario, urgent(cores=3))
    assert way is not None
    assert (way.victims, way.awaits) == (("b.1",), ("b.1",))


def test_a_part_of_an_exclusive_gpu_is_not_made_room_for():
    devices = (GpuDevice(0, 24 * GB, exclusive=True), GpuDevice(1, 24 * GB))
    scenario = Scenario(a_node(cores=4, gpus=devices))
    runs(scenario, "whole", gpus=1)
    runs(scenario, "other", gpus=1, priority="urgent", seconds=10)
    first = scenario.lease_of("whole").claim
    assert first is not None
    assert first.gpus[0].index == 0
    assert victims(scenario, gpus=0.5) is None
    assert victims(scenario, gpus=1) == ["whole"]
    scenario.end("other")
    runs(scenario, "old", gpus=1, seconds=3600)
    scenario.end("whole")
    runs(scenario, "young", gpus=1, seconds=10)
    assert victims(scenario, gpus=1) == ["young"]
    assert victims(scenario, gpus=0.5) == ["old"]


def test_several_gpus_are_cleared_where_the_fewest_are_on_them():
    scenario = Scenario(a_node(cores=16, memory_gb=64, gpus=4))
    runs(scenario, "pair", gpus=2, seconds=600)
    for number in range(4):
        runs(scenario, f"half{number}", gpus=0.5)
    scenario.advance(10)
    assert victims(scenario, gpus=2) == ["pair"]
    assert victims(scenario, gpus=1, cores=1) == ["pair"]
    assert victims(scenario, gpus=3) == ["half0", "half1", "pair"]


def test_only_nodes_that_the_request_may_have_are_cleared():
    fast = replace(a_node("gpu2", cores=2), labels=(("disk", "fast"),))
    scenario = Scenario(a_node("gpu1", cores=2), fast)
    runs(scenario, "a", on="gpu2", cores=2, seconds=3600)
    runs(scenario, "b", on="gpu1", cores=2, seconds=10)
    assert victims(scenario, cores=1) == ["b"]
    labelled = way_for(scenario, replace(urgent(cores=1), labels=(("disk", "fast"),)))
    apart = way_for(scenario, replace(urgent(cores=1), anti_affinity=("gpu1",)))
    near = way_for(scenario, replace(urgent(cores=1), affinity=("job-a",)))
    assert [way.victims for way in (labelled, apart, near) if way is not None] == [("a.1",)] * 3
    assert way_for(scenario, replace(urgent(cores=1), labels=(("disk", "none"),))) is None


def test_a_wish_for_a_node_costs_nobody_more_important_and_not_more_of_them_their_run():
    scenario = two_nodes(cores=2)
    runs(scenario, "high", on="gpu1", cores=2, priority="high")
    runs(scenario, "low", on="gpu2", cores=2, seconds=10)
    assert victims(scenario, cores=1, prefer=["gpu1"]) == ["low"]
    scenario = two_nodes(cores=2)
    runs(scenario, "a", on="gpu1", cores=1)
    runs(scenario, "b", on="gpu1", cores=1)
    runs(scenario, "c", on="gpu2", cores=2, seconds=10)
    assert victims(scenario, cores=2, prefer=["gpu1"]) == ["c"]


def test_custom_resources_are_made_room_for():
    scenario = Scenario(a_node(cores=8, custom={"fpga": 2}))
    scenario.submit(a_request("a", custom={"fpga": 1}, priority="low"), starts=True)
    scenario.advance(60)
    scenario.submit(a_request("b", cores=1, custom={"fpga": 1}, priority="low"), starts=True)
    scenario.advance(60)
    assert victims(scenario, custom={"fpga": 1}) == ["a"]
    assert victims(scenario, custom={"fpga": 2}) == ["a", "b"]


parts = st.sampled_from([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8])
running_leases = st.lists(
    st.tuples(
        st.one_of(parts, st.sampled_from([1, 2])),
        st.sampled_from([1, 2]),
        st.sampled_from(["low", "low", "medium", "high"]),
        st.sampled_from([0, 1, 2, 30]),
        st.sampled_from(["n0", "n1", "n2"]),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=2,
    max_size=14,
)


def a_shared_grid(work: list[tuple[float, int, str, int, str, bool]]) -> Scenario:
    """Three machines with two GPUs each, held in whole and in parts for different times; some are being stopped."""
    scenario = Scenario(*(a_node(f"n{number}", cores=8, gpus=2) for number in range(3)))
    for number, (gpus, cores, priority, seconds, node, leaves) in enumerate(work):
        request = a_request(f"r{number}", gpus=gpus, cores=cores, priority=priority, require=[node], wait_s=0)
        try:
            scenario.submit(request, starts=True)
        except GridError:
            continue  # it has no room: what is there is enough
        scenario.advance(seconds)
        if leaves:
            scenario.cancel(request.id)
    return scenario


def weight(scenario: Scenario, way: PreemptionPlan, request: Request) -> int:
    """Weight of a set of victims."""
    costs, ledger = PreemptionCandidates(scenario.ledger, request, scenario.now, work_lost).costs, scenario.ledger
    unwished = 0 if way.node in request.prefer else NOT_PREFERRED
    return unwished + sum(
        victim_weight(int(ledger.leases[victim].request.priority), int(costs[ledger.running.slots[victim]]))
        for victim in way.victims
    )


def floors_and_truth(scenario: Scenario, request: Request) -> dict[str, tuple[int, int]]:
    """Bound and true cost of every node where room can be made."""
    ledger = scenario.ledger
    low = {
        one.node: one.weight
        for one in cost_bounds(ledger, request, PreemptionCandidates(ledger, request, scenario.now, work_lost))
    }
    ways = {node: plan_preemption(ledger, replace(request, require=(node,)), scenario.now) for node in ledger.nodes}
    return {node: (low[node], weight(scenario, way, request)) for node, way in ways.items() if way is not None}


@settings(max_examples=60)
@given(running_leases, parts, st.sampled_from([0, 1, 4]), st.sampled_from([(), ("n1",)]))
def test_no_floor_is_above_what_making_room_costs(work, gpus, cores, prefer):
    scenario = a_shared_grid(work)
    request = a_request("vip", gpus=gpus, cores=cores, priority="urgent", prefer=prefer)
    for low, true in floors_and_truth(scenario, request).values():
        assert low <= true


def test_the_part_of_a_gpu_that_is_free_already_does_not_have_to_be_made_free():
    scenario = Scenario(a_node("n0", gpus=1), a_node("n1", gpus=1))
    for node, first in (("n0", 0.3), ("n1", 0.5)):
        scenario.ask(a_request(f"small-{node}", gpus=first, priority="low", require=[node]))
        scenario.ask(a_request(f"rest-{node}", gpus=0.3, priority="low", require=[node]))
        scenario.advance(60)
    found = floors_and_truth(scenario, a_request("vip", gpus=0.7, priority="urgent"))
    one = {node: low // victim_weight(0, 0) for node, (low, _) in found.items()}
    assert one == {"n0": 1, "n1": 1}, "0.4 and 0.2 are free: one of 0.3, or one of 0.5, is enough"
    assert all(low == true for low, true in found.values())


def test_claim_of_a_leaving_lease_needs_no_victim():
    scenario = Scenario(a_node("n0", gpus=1), a_node("n1", gpus=1))
    for node in ("n0", "n1"):
        for name in ("a", "b"):
            scenario.submit(a_request(f"{name}-{node}", gpus=0.5, priority="low", require=[node]), starts=True)
        scenario.advance(60)
    scenario.cancel("a-n1")
    found = floors_and_truth(scenario, a_request("vip", gpus=0.5, priority="urgent"))
    assert {node: low // victim_weight(0, 0) for node, (low, _) in found.items()} == {"n0": 1, "n1": 0}
