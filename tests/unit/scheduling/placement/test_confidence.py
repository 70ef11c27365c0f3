"""How sure a choice is: a probability that falls with the term, the owner's history and the age of the news.

A confidence is kept: of the choices that were 90 % sure, about nine in ten were left alone by their owners. Made-up
owners (bursts at rates of their own, random walks of memory, short fits, hardly ever there) live on twenty machines;
the real reactor places jobs, and the agent's own rules decide whom an owner drives away. The constants of
`scheduling/placement/confidence.py` about CPU were fitted on real machines (`bench confidence`), not on these owners.
One constant is about these: `ONE_OF_SEVERAL`, how often the agent's rule chose a lease that was not alone. So for
memory beside others this is a check of the whole and no independent one.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.agent.owner import yield_policy
from distributed_grid.agent.owner.eviction import Borrowed, UsageSample, reclaim
from distributed_grid.domain.events import HeartbeatReceived
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import Claim
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.scheduling.placement.confidence import (
    DEFAULT_TERM_MS,
    cpu_mark,
    freshness,
    margin,
    memory_mark,
    stay_probability,
    term_of,
)
from distributed_grid.scheduling.placement.explanation import choice_of
from distributed_grid.scheduling.placement.placement import Placement, find_placement
from distributed_grid.wire import OwnerRules
from tests.support.builders import GB, Scenario, a_node, a_request, a_usage, thresholds
from tests.unit.scheduling.owner_traces import Day, Fate

HOUR_MS = 3_600_000


def owned(name: str = "gpu1", **fields: object) -> Node:
    fields = {"cores": 16, "memory_gb": 64, "thresholds": thresholds(), "hold_s": 60} | fields
    return a_node(name, **fields)  # type: ignore[arg-type]


def watched(*nodes: Node, hours: float = 6, returns: int = 0, memory_gb: float = 4) -> Scenario:
    """Nodes that were watched for hours, whose owners came back so many times for ten minutes."""
    scenario = Scenario(*nodes)
    beats = round(hours * 60)
    busy = {round((turn + 0.5) * beats / max(returns, 1)) + at for turn in range(returns) for at in range(10)}
    for beat in range(beats):
        scenario.now += 60_000
        for node in nodes:
            scenario.heartbeat(
                node.name, a_usage(cpu_outside=1.0 if beat in busy else 0.05, memory_outside_gb=memory_gb)
            )
    return scenario


def stay(scenario: Scenario, node: str = "gpu1", *, term_ms: int = HOUR_MS, **ask: float) -> float:
    return stay_probability(scenario.ledger, a_request("r", **(ask or {"cores": 1})), node, scenario.now, term_ms)  # type: ignore[arg-type]


def test_where_nobody_takes_anything_back_the_stay_is_certain() -> None:
    scenario = Scenario(a_node("here"))
    assert stay(scenario, "here", term_ms=1000 * HOUR_MS) == 1.0
    placement = find_placement(scenario.ledger, a_request(cores=1))
    assert placement is not None
    assert choice_of(scenario.ledger, a_request(cores=1), placement, scenario.now).confidence == 1000


def test_an_owner_who_came_often_is_expected_sooner_than_one_who_never_did() -> None:
    never, once, often = (stay(watched(owned(), returns=count)) for count in (0, 1, 6))
    assert 0.98 < never < 1
    assert often < once < never
    assert often < 0.7


def test_nothing_is_certain_about_an_owner_who_was_hardly_watched() -> None:
    assert stay(Scenario(owned())) < stay(watched(owned(), hours=12)) < 1


@given(terms=st.lists(st.integers(1_000, 100 * HOUR_MS), min_size=2, max_size=6))
def test_the_longer_the_term_the_less_sure(terms: list[int]) -> None:
    scenario = _RESTLESS
    found = [stay(scenario, term_ms=term) for term in sorted(terms)]
    assert found == sorted(found, reverse=True)
    assert all(0 <= one <= 1 for one in found)


_RESTLESS = watched(owned(), hours=3, returns=2)


def test_memory_that_is_lent_to_the_last_byte_is_less_sure_than_memory_with_room_to_grow() -> None:
    scenario = watched(owned())
    for step in range(30):
        scenario.now += 300_000
        scenario.heartbeat("gpu1", a_usage(cpu_outside=0.05, memory_outside_gb=4 + 0.5 * (step % 3)))
    roomy, tight = stay(scenario, memory_gb=10), stay(scenario, memory_gb=58)
    assert tight < roomy - 0.2


def test_a_gpu_counts_only_for_those_who_ask_for_one() -> None:
    scenario = Scenario(owned(gpus=1))
    for beat in range(240):
        scenario.now += 60_000
        scenario.heartbeat("gpu1", a_usage(gpus={0: (1.0 if beat % 60 < 10 else 0.0, 1.0)}))
    assert stay(scenario, cores=1, gpus=1) < 0.7 < stay(scenario, cores=1)


def test_news_grow_old() -> None:
    scenario = Scenario(owned())
    ages = [freshness(scenario.ledger, "gpu1", scenario.now + ms) for ms in (0, 2_000, 6_000, 30_000, 300_000)]
    assert ages == sorted(ages, reverse=True)
    assert ages[0] == 1
    assert ages[1] > 0.99
    assert ages[3] == 0.5
    assert freshness(scenario.ledger, "nobody", scenario.now) == 0.5


def test_the_margin_means_the_same_by_every_strategy() -> None:
    def of(score: int, second: int, strategy: Strategy = Strategy.LOAD_BALANCED, **fields: object) -> float:
        placement = Placement("a", Claim(), strategy, 2, score, (("b", second),))
        return margin(replace(placement, **fields))

    assert of(5_000, 5_000) == 0
    assert of(505_000, 5_000) == 0.5  # half a node more is left
    assert of(505_000, 5_000, Strategy.BEST_FIT) == 0.5
    assert of(10_005_000, 5_000) == 1
    assert of(-3 * 10**10, -4 * 10**10, Strategy.SPREAD) == 1  # another class
    assert of(5_000, 5_000, preferred=True) == 1
    assert of(5_000, 5_000, runners_up=()) == 1


def test_the_term_is_what_is_said_else_ten_minutes() -> None:
    assert term_of(a_request()) == DEFAULT_TERM_MS == 600_000
    assert term_of(a_request(duration_s=60)) == 60_000
    assert term_of(a_request(duration_s=60, expects_ms=5_000)) == 5_000
    assert term_of(a_request(duration_s=5, expects_ms=60_000)) == 5_000


def test_a_gang_is_as_sure_as_all_its_members_together() -> None:
    scenario = watched(owned("gpu1"), owned("gpu2"), returns=2)
    alone, both = (
        choice_of(scenario.ledger, request, placement, scenario.now)
        for request in (a_request(cores=1, expects_ms=HOUR_MS), a_request(cores=1, expects_ms=HOUR_MS, gang=2))
        if (placement := find_placement(scenario.ledger, request)) is not None
    )
    assert both.stay == pytest.approx(alone.stay**2 / 1000, abs=2)


@pytest.mark.parametrize("cores", [1, 2, 4, 16, 64, 192])
def test_the_cpu_mark_is_where_the_agent_leaves_borrowed_work_nothing(cores: int) -> None:
    """The mark belongs to the agent; here it is written down again, since deciding knows no agents."""
    mark = cpu_mark(a_node(cores=cores))
    rules = OwnerRules(300, 500, 0, 500, 0)

    def starves(outside_milli: int) -> bool:
        look = UsageSample(1000 * cores, outside_milli, 0, (Borrowed("a.1", cpu_milli=100),))
        state = yield_policy.OwnerState()
        for beat in range(4):
            state, _ = yield_policy.decide(state, look, rules, 2_500 * beat)
        return state.starved_since_ms is not None

    at = round(mark * cores)
    assert starves(at + 2)
    assert not starves(at - 2)


@given(lent=st.integers(1, 60), owner=st.integers(0, 62))
def test_the_memory_mark_is_where_the_agent_evicts(lent: int, owner: int) -> None:
    node = a_node(memory_gb=64, thresholds=thresholds(memory_used_max=0.5, memory_gb_min=2))
    rules = OwnerRules(300, 500, 2 * GB, 500, 0)
    outside = owner * GB
    available = max(64 * GB - outside - lent * GB, 0)
    borrowed = (Borrowed("a.1", memory_leased_bytes=lent * GB, memory_bytes=lent * GB),)
    look = UsageSample(1000, 0, 0, borrowed, 64 * GB, available, outside)
    going, _, _ = reclaim((), (), look, rules, 0, {})
    assert node.thresholds is not None
    assert bool(going) == (1000 * owner / 64 > memory_mark(node, node.thresholds, lent * GB))


def test_a_heartbeat_carries_the_owners_history_on() -> None:
    scenario = Scenario(owned(), a_node("here"))
    scenario.now += 2_000
    scenario.handle(HeartbeatReceived("gpu1", a_usage(cpu_outside=0.5)))
    seen = scenario.ledger.observations["gpu1"]
    assert seen.volatility is not None
    assert 0 < seen.volatility.cpu.level < 500
    assert scenario.ledger.observations["here"].volatility is None


DAYS = 6
"""So many that chance does not decide: an owner who comes drives away several at once, so with two days alone a bin may
be off by twice the tolerance. One day is enough to see that choices differ, and that they tell something."""

BINS = (0.0, 0.7, 0.9, 0.98, 1.001)
TOLERANCE = 0.1
"""How far the confidence of a bin may be from what was seen."""


@pytest.fixture(scope="module", params=[1, pytest.param(DAYS, marks=pytest.mark.chaos)])
def fates(request: pytest.FixtureRequest) -> list[Fate]:
    found: list[Fate] = []
    for seed in range(1, 1 + request.param):
        day = Day(seed, nodes=20)
        day.pass_by(4)
        day.pass_by(8, requests_per_hour=200)
        day.ledger.check()
        found += day.fates
    return found


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("fates", [DAYS], indirect=True)
def test_in_every_bin_as_many_are_left_alone_as_was_promised(fates: list[Fate]) -> None:
    for low, high in itertools.pairwise(BINS):
        here = [one for one in fates if low <= one.confidence < high]
        assert len(here) >= 50, f"only {len(here)} choices between {low} and {high}"
        promised = sum(one.confidence for one in here) / len(here)
        kept = sum(one.kept for one in here) / len(here)
        assert abs(promised - kept) <= TOLERANCE, f"{len(here)} choices: {promised:.3f} promised, {kept:.3f} kept"


@pytest.mark.slow
def test_it_tells_more_than_the_best_constant(fates: list[Fate]) -> None:
    rate = sum(one.kept for one in fates) / len(fates)
    brier = sum((one.confidence - one.kept) ** 2 for one in fates) / len(fates)
    assert brier < 0.95 * rate * (1 - rate)


@pytest.mark.slow
def test_choices_differ_in_how_sure_they_are(fates: list[Fate]) -> None:
    assert min(one.confidence for one in fates) < 0.5
    assert max(one.confidence for one in fates) > 0.99
    assert len({one.confidence for one in fates}) > 100
