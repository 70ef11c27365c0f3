"""Why there, in words with numbers; and the numbers are those that counted."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.agent.owner import yield_policy
from distributed_grid.agent.owner.yield_policy import Borrowed, UsageSample, reclaim
from distributed_grid.domain.events import HeartbeatReceived, LeaseAsked
from distributed_grid.domain.followups import ScanQueue
from distributed_grid.domain.leases import Request
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import Claim
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.reactor import JobAnswer, LeaseAnswer
from distributed_grid.scheduling.placement.explanation import (
    DEFAULT_TERM_MS,
    Choice,
    choice_of,
    cpu_mark,
    duration,
    freshness,
    margin,
    memory_mark,
    reasoning,
    runners_up,
    scores,
    stay_probability,
    term_of,
)
from distributed_grid.scheduling.placement.placement import Placement, find_placement
from distributed_grid.wire import OwnerRules
from tests.support.builders import GB, Scenario, a_node, a_request, a_submission, a_usage, thresholds
from tests.unit.scheduling.owner_traces import Day, Fate


def chosen(scenario: Scenario, request: Request) -> Choice:
    placement = find_placement(scenario.ledger, request)
    assert placement is not None
    return choice_of(scenario.ledger, request, placement, scenario.now)


def why(choice: Choice) -> str:
    return " | ".join(reasoning(choice))


def seconds(choice: Choice) -> dict[str, str]:
    return {one.node: one.why for one in runners_up(choice)}


def far(name: str, **fields: object) -> Node:
    return replace(a_node(name), **fields)


def test_the_most_room_is_told_with_what_is_free_of_what_is_lent() -> None:
    scenario = Scenario(a_node("ash", cores=4, memory_gb=16), a_node("elm", cores=8, memory_gb=32, gpus=2))
    scenario.ask(a_request("r1", cores=0.5, memory_gb=1, require=("elm",)))
    choice = chosen(scenario, a_request("r2", cores=1))
    assert choice.node == "elm"
    assert why(choice).startswith("elm is the best of 2 nodes that fit, by load_balanced | ")
    assert "elm has most room: 7.5 of 8 cores, 31.0 of 32.0 GB, 2 of 2 GPUs free" in why(choice)
    assert seconds(choice) == {"ash": "less room: 4 of 4 cores, 16.0 of 16.0 GB free"}


def test_the_only_node_that_fits_has_nobody_to_be_compared_with() -> None:
    scenario = Scenario(a_node("ash", cores=1), a_node("elm", cores=4))
    choice = chosen(scenario, a_request(cores=2))
    assert why(choice).startswith("elm is the only node that fits | free there: 4 of 4 cores")
    assert runners_up(choice) == ()


def test_equals_are_told_apart_by_their_order() -> None:
    choice = chosen(Scenario(a_node("ash"), a_node("elm")), a_request(cores=1))
    assert choice.node == "ash"
    assert seconds(choice)["elm"].startswith("as good, but later in order")
    assert choice.margin < 1000


def test_a_higher_priority_of_a_node_is_named_on_both_sides() -> None:
    choice = chosen(Scenario(a_node("ash", cores=64), a_node("elm", cores=32, rank=2000)), a_request(cores=1))
    assert "ash is about as good, and the priority 2 of elm weighs more than 1" in why(choice)
    assert seconds(choice) == {"ash": "about as good, but its priority 1 weighs less than 2"}


def test_the_scores_that_decided_are_told_part_by_part() -> None:
    choice = chosen(Scenario(a_node("ash", cores=4), a_node("elm", cores=8, rank=2000)), a_request(cores=1))
    best, second = scores(choice)
    assert (best.node, best.room, best.priority) == ("elm", 1.875, 0.1)
    assert (second.node, second.room, second.priority) == ("ash", 1.75, 0.05)
    assert best.score - second.score == 175_000
    fitted = scores(
        chosen(Scenario(a_node("ash", cores=4), a_node("elm", cores=8)), a_request(strategy=Strategy.BEST_FIT))
    )
    assert [(one.node, one.room, one.priority) for one in fitted] == [("ash", -0.375, 0.1), ("elm", -0.875, 0.1)]
    spread = scores(chosen(Scenario(a_node("ash"), a_node("elm")), a_request(strategy=Strategy.SPREAD)))
    assert [one.criterion for one in spread] == ["has 0 leases", "has 0 leases"]
    gpus = scores(
        chosen(Scenario(a_node("ash", gpus=2), a_node("elm")), a_request(strategy=Strategy.FRAGMENTATION_AWARE))
    )
    assert [(one.node, one.room, one.priority) for one in gpus] == [("elm", 0.0, 0.1), ("ash", -2.0, 0.1)]


def test_a_choice_that_was_recorded_without_the_parts_of_its_scores_shows_none() -> None:
    choice = chosen(Scenario(a_node("ash"), a_node("elm")), a_request(cores=1))
    assert scores(choice)
    assert scores(replace(choice, best=replace(choice.best, weight=-1))) == ()


def test_a_preferred_node_is_told_to_be_preferred() -> None:
    choice = chosen(Scenario(a_node("ash"), a_node("elm", cores=8)), a_request(cores=1, prefer=("ash",)))
    assert "ash is preferred by the request" in why(choice)


def test_a_preference_that_decided_nothing_is_not_told() -> None:
    best = Scenario(a_node("ash", cores=8), a_node("elm", cores=4), a_node("fir", cores=2))
    choice = chosen(best, a_request(cores=1, prefer=("ash",)))
    assert "preferred" not in why(choice)
    assert [one.node for one in runners_up(choice)] == ["elm", "fir"]
    only = chosen(Scenario(a_node("ash"), a_node("elm", cores=1)), a_request(cores=2, prefer=("ash",)))
    assert why(only).startswith("ash is the only node that fits")
    assert "preferred" not in why(only)


@pytest.mark.parametrize(
    ("strategy", "better", "sentence", "second"),
    [
        ("cost_optimized", {"cost_milli": 120}, "ash costs 0.12 an hour", "costs 0.9 an hour"),
        (
            "performance_optimized",
            {"speed_milli": 2500},
            "ash has 2.5 times the usual speed to spare",
            "has the usual",
        ),
        (
            "local_first",
            {"host": "local"},
            "ash is the node it was submitted on",
            "is not the node it was submitted on",
        ),
    ],
)
def test_criterion_of_the_strategy_comes_first(
    strategy: str, better: dict[str, object], sentence: str, second: str
) -> None:
    scenario = Scenario(
        far("elm", host="far", cost_milli=900), far("ash", **({"host": "far", "cost_milli": 900} | better))
    )
    choice = chosen(scenario, a_request(cores=1, strategy=Strategy.parse(strategy)))
    assert sentence in why(choice)
    assert seconds(choice)["elm"].startswith(second)


def test_spreading_counts_the_leases_of_the_group() -> None:
    scenario = Scenario(a_node("ash"), a_node("elm"))
    scenario.ask(a_request("r1", cores=1, group="web", require=("ash",)))
    choice = chosen(scenario, a_request("r2", cores=1, group="web", strategy=Strategy.SPREAD))
    assert "elm has 0 leases of group web" in why(choice)
    assert seconds(choice) == {"ash": "has 1 lease of group web"}


def test_the_node_it_is_for_is_named() -> None:
    scenario = Scenario(a_node("ash"), a_node("elm"))
    choice = chosen(scenario, a_request(cores=1, target="elm", strategy=Strategy.LOCAL_FIRST))
    assert "elm is the node it is for (elm)" in why(choice)
    assert "it is for ash" in why(chosen(scenario, a_request(cores=1, target="ash")))


def test_best_fit_tells_what_is_left() -> None:
    scenario = Scenario(a_node("ash", cores=8), a_node("elm", cores=2))
    choice = chosen(scenario, a_request(cores=1, strategy=Strategy.BEST_FIT))
    assert "elm is left with least: 2 of 2 cores" in why(choice)
    assert seconds(choice)["ash"].startswith("more would be left over: 8 of 8 cores")


@pytest.mark.parametrize(("strategy", "cores"), [(Strategy.BEST_FIT, 63), (Strategy.LOAD_BALANCED, 60)])
def test_where_the_priority_of_the_node_decided_its_room_is_told_and_not_praised(
    strategy: Strategy, cores: int
) -> None:
    scenario = Scenario(a_node("ash", cores=cores, rank=2000), a_node("elm", cores=124 - cores))
    choice = chosen(scenario, a_request(cores=1, strategy=strategy))
    assert choice.node == "ash"
    assert reasoning(choice)[1:3] == (
        "elm is about as good, and the priority 2 of ash weighs more than 1",
        f"free there: {cores} of {cores} cores, 16.0 of 16.0 GB",
    )


def test_where_the_cost_or_a_wish_decided_the_room_is_told_and_not_praised() -> None:
    scenario = Scenario(far("ash", host="far", cost_milli=100), far("elm", host="far", cost_milli=900))
    scenario.ask(a_request("r1", cores=2, require=("elm",)))
    assert "least" not in why(chosen(scenario, a_request(cores=1, strategy=Strategy.COST_OPTIMIZED)))
    scenario = Scenario(a_node("ash"), a_node("elm", cores=8))
    assert "free there: 4 of 4 cores" in why(chosen(scenario, a_request(cores=1, prefer=("ash",))))


def test_where_the_room_decides_it_says_so() -> None:
    scenario = Scenario(a_node("ash", cores=8, rank=2000), a_node("elm", cores=2, rank=2000), a_node("oak", cores=1))
    choice = chosen(scenario, a_request(cores=1, strategy=Strategy.BEST_FIT))
    assert choice.node == "oak"
    choice = chosen(scenario, a_request(cores=2, strategy=Strategy.BEST_FIT))
    assert "elm is left with least: 2 of 2 cores" in why(choice)


def test_a_gang_names_its_other_places() -> None:
    choice = chosen(Scenario(a_node("ash"), a_node("elm")), a_request(cores=1, gang=2))
    assert "the other members of its gang are on elm" in why(choice)


def test_an_owner_is_told_with_a_probability_and_a_term() -> None:
    scenario = Scenario(a_node("ash", thresholds=thresholds(), hold_s=60))
    choice = chosen(scenario, a_request(cores=1, expects_ms=7_200_000))
    assert "its owner will leave it alone for 2 h with a probability of 98." in why(choice)
    certain = chosen(Scenario(a_node("ash")), a_request(cores=1))
    assert "nobody takes it back within 10 min" in why(certain)


def test_a_grant_carries_its_choice_in_the_answer_and_in_the_audit_trail() -> None:
    scenario = Scenario(a_node("ash"))
    stepped = scenario.handle(LeaseAsked(a_request("r1", cores=1)))
    assert isinstance(stepped.answer, LeaseAnswer)
    assert stepped.answer.choice is not None
    assert stepped.records[-1].data["choice"] == stepped.answer.choice
    stepped = scenario.handle(a_submission(a_request("r2", cores=1)))
    assert isinstance(stepped.answer, JobAnswer)
    assert stepped.answer.choice is not None


def test_waiting_request_gets_its_choice_when_granted() -> None:
    scenario = Scenario(a_node("ash", cores=1))
    scenario.ask(a_request("r1", cores=1))
    waiting = scenario.handle(LeaseAsked(a_request("r2", cores=1))).answer
    assert isinstance(waiting, LeaseAnswer)
    assert waiting.choice is None
    granted = [record for record in scenario.release("r1").records if record.type == "granted"]
    assert granted[0].data["choice"].node == "ash"
    assert scenario.handle(ScanQueue()).records == []


def test_preempting_choice_names_the_displaced_leases() -> None:
    scenario = Scenario(a_node("ash", cores=1))
    scenario.submit(a_request("r1", cores=1, priority="low"), starts=True)
    scenario.advance(5)
    stepped = scenario.handle(LeaseAsked(a_request("r2", cores=1, priority="urgent")))
    assert isinstance(stepped.answer, LeaseAnswer)
    choice = stepped.answer.choice
    assert choice is not None
    assert (choice.displaced, choice.fits) == (("r1.1",), 0)
    assert why(choice).startswith("nothing was free: 1 lease makes room on ash")


@given(
    cores=st.sampled_from((0.5, 1, 2)),
    gpus=st.sampled_from((0, 0.5, 1)),
    strategy=st.sampled_from([one for one in Strategy if one is not Strategy.NODE_SPECIFIC]),
    prefer=st.sampled_from(((), ("elm",))),
    owner=st.booleans(),
)
def test_every_choice_survives_being_stored_and_can_be_told(
    cores: float, gpus: float, strategy: Strategy, prefer: tuple[str, ...], owner: bool
) -> None:
    limits = thresholds() if owner else None
    scenario = Scenario(a_node("ash", gpus=2), a_node("elm", cores=8, gpus=1, thresholds=limits), a_node("fir"))
    choice = chosen(scenario, a_request(cores=cores, gpus=gpus, strategy=strategy, prefer=prefer))
    stored = msgspec.json.decode(msgspec.json.encode(choice))
    assert msgspec.convert(stored, Choice) == choice
    assert all(reasoning(choice))
    assert all(one.why for one in runners_up(choice))
    assert 0 <= choice.confidence <= 1000
    assert len(msgspec.json.encode(choice)) < 500


def test_durations_read_well() -> None:
    assert [duration(ms) for ms in (500, 45_000, 90_000, 600_000, 3_600_000, 86_400_000, 200_000_000)] == [
        "0.5 s",
        "45 s",
        "90 s",
        "10 min",
        "1 h",
        "1 d",
        "2.31 d",
    ]


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
        placement = Placement(
            node="a", claim=Claim(), strategy=strategy, fits=2, score=score, runners_up=(("b", second),)
        )
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
    rules = OwnerRules(
        cpu_busy_max_milli=300,
        memory_used_max_milli=500,
        memory_min_bytes=0,
        gpu_busy_max_milli=500,
        gpu_memory_min_bytes=0,
    )

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
    rules = OwnerRules(
        cpu_busy_max_milli=300,
        memory_used_max_milli=500,
        memory_min_bytes=2 * GB,
        gpu_busy_max_milli=500,
        gpu_memory_min_bytes=0,
    )
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
    scenario.handle(HeartbeatReceived(name="gpu1", usage=a_usage(cpu_outside=0.5)))
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
