"""Whatever runs wherever: nobody else could have gone instead. Held against every set of victims on every node."""

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
from distributed_grid.domain.jobs import Ending
from distributed_grid.domain.leases import Lease, Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import GpuDevice, Priority
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.domain.states import JobState, LeaseState, NodeState
from distributed_grid.errors import GridError
from distributed_grid.scheduling.preemption.preemption import PreemptionPlan, plan_preemption
from distributed_grid.scheduling.preemption.victims import PreemptionCandidates, work_lost
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
def test_whoever_goes_may_go_is_needed_and_makes_the_room_that_is_claimed(machines, work, request):
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
    request = Request("vip", "ada", an_ask(Random(seed), kind), Priority.URGENT)
    way = plan_preemption(ledger, request, NOW)
    alone = [plan_preemption(ledger, replace(request, require=(node,)), NOW) for node in ledger.nodes]
    prices = [paid(ledger, one, request) for one in alone if one is not None]
    assert (way is None) == (not prices)
    if way is not None:
        assert paid(ledger, way, request) == min(prices)


def paid(ledger: Ledger, way: PreemptionPlan, request: Request) -> tuple:
    return price(ledger, [ledger.leases[victim] for victim in way.victims], way.node, request, NOW)
