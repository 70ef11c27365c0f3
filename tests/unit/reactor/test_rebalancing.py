"""Leases for nodes under pressure, and recommendations: when, from whom, how much, and when not."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from distributed_grid.config import ClusterConfig
from distributed_grid.config_mapping import nodes_from, rebalance_rules
from distributed_grid.domain.events import NodeForgotten, PressureRead, TimePassed
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import SHARING_POLICIES, Forecast, is_automatic
from distributed_grid.domain.resources import NOTHING, Priority
from distributed_grid.domain.states import LeaseEnd
from tests.support.builders import GB, a_node, a_request, a_submission, a_usage, caps, thresholds
from tests.support.project import PROJECT
from tests.unit.reactor.rebalance_rounds import INTERVAL_MS, Rounds, a_reading, actions, apart, rules

SHARE = "share_and_offload"
HARD = a_reading("master", memory=900)
CALM = a_reading("master", memory=500)
IDLE = a_reading("master", memory=100)


def a_scenario(policy: str = "aggressive", mode: str = SHARE, **numbers) -> Rounds:
    return Rounds(rules=rules(policy, mode, **numbers))


# ------------------------------------------------------------------ borrowing and giving back


def test_a_node_above_its_high_mark_gets_a_lease_with_itself_as_the_target():
    scenario = a_scenario()
    records = scenario.round(HARD)
    (lease,) = scenario.leases
    assert lease.request.target == "master"
    assert lease.node in {"gpu1", "gpu2"}
    assert lease.request.user == "grid"
    assert lease.request.wait_ms == 0
    assert lease.request.ask.memory_bytes == 30 * GB * 350 // 1000 // 1024**2 * 1024**2  # down to the middle, 550
    (line,) = [record for record in records if record.type == "rebalanced"]
    assert (line.node, line.subject, line.data["source_node"]) == ("master", lease.id, lease.node)
    assert line.reason == "memory at 90 %, above the mark of 80 %: 10.5 GB of 10.5 GB in excess"


def test_it_is_given_back_below_the_low_mark_and_not_before():
    scenario = a_scenario()
    scenario.round(HARD, times=3)
    assert actions(scenario.round(CALM, times=20)) == []
    assert len(scenario.leases) == 1
    records = scenario.round(IDLE, times=2)
    assert scenario.leases == []
    assert actions(records) == ["given_back"]
    assert "memory of master at 10 %, below the mark of 30 %" in records[-1].reason


@pytest.mark.parametrize("level", [300, 550, 800])
def test_between_the_marks_nothing_happens(level):
    scenario = a_scenario()
    assert scenario.round(a_reading("master", memory=level, cpu=level), times=30) == []


@pytest.mark.parametrize(("policy", "rounds"), [("conservative", 10), ("balanced", 2), ("aggressive", 0)])
def test_a_policy_waits_before_it_acts(policy, rounds):
    scenario = a_scenario(policy)
    assert scenario.round(HARD, times=rounds) == []
    assert "asked" in actions(scenario.round(HARD))


def test_one_calm_reading_begins_the_wait_anew():
    scenario = a_scenario("balanced")
    for _ in range(10):
        assert scenario.round(HARD, HARD, times=1) == []
        assert scenario.round(CALM) == []
    assert scenario.leases == []


def test_a_part_of_the_excess_is_asked_for_at_once_and_the_rest_after_the_cool_down():
    scenario = a_scenario("balanced", unused_after=1000)
    scenario.round(HARD, times=3)
    (first,) = scenario.leases
    assert abs(first.request.ask.memory_bytes - 5.25 * GB) < 1024**2
    scenario.round(HARD, times=3)
    assert len(scenario.leases) == 1
    scenario.round(HARD)
    assert len(scenario.leases) == 2
    scenario.round(HARD, times=40)
    assert len(scenario.leases) == 2  # all of the excess is covered


def test_a_node_never_gets_more_leases_than_the_policy_says():
    scenario = a_scenario(portion_milli=100, leases_max=3, cool_down=1)
    scenario.round(HARD, times=30)
    assert len(scenario.leases) == 3


def test_cpu_is_borrowed_the_same_way():
    scenario = a_scenario()
    scenario.round(a_reading("master", cpu=900))
    (lease,) = scenario.leases
    assert lease.request.ask.cpu_milli == 2800
    scenario.round(a_reading("master", cpu=200), times=2)
    assert scenario.leases == []


def test_memory_comes_before_cpu():
    scenario = a_scenario(leases_max=1)
    scenario.round(a_reading("master", memory=850, cpu=1000))
    assert scenario.leases[0].request.ask.memory_bytes


def test_gpus_are_borrowed_in_parts_and_from_one_on_whole():
    nodes = [apart(a_node(name, gpus=count)) for name, count in (("master", 4), ("gpu1", 4))]
    scenario = Rounds(*nodes, rules=rules("aggressive", SHARE))
    scenario.round(a_reading("master", gpu=900))
    (lease,) = scenario.leases
    assert lease.request.ask.gpu_milli == 1000
    scenario.round(a_reading("master", gpu=900))
    assert [lease.request.ask.gpu_milli for lease in scenario.leases] == [1000, 400]
    small = Rounds(*(apart(a_node(name, gpus=1)) for name in ("master", "gpu1")), rules=rules("aggressive", SHARE))
    small.round(a_reading("master", gpu=900))
    assert small.leases[0].request.ask.gpu_milli == 300


def test_a_lease_is_renewed_while_it_is_needed_and_runs_out_when_nobody_hears_of_its_node():
    scenario = a_scenario(unused_after=1000)
    scenario.round(HARD, times=100)
    (lease,) = scenario.leases
    assert lease.granted_at_ms < scenario.now - 99 * INTERVAL_MS
    assert lease.ends_at_ms > scenario.now + SHARING_POLICIES["aggressive"].renew_at * INTERVAL_MS - INTERVAL_MS
    records = scenario.round(a_reading("master", memory=None), times=41)
    assert scenario.leases == []
    assert actions(records) == []


def test_after_a_restart_what_is_held_is_kept_and_given_back_below_the_low_mark():
    scenario = a_scenario("balanced")
    scenario.round(HARD, times=4)
    before = scenario.leases
    scenario.ledger = Ledger(scenario.ledger.rows(durable_only=True))
    assert scenario.ledger.rebalance_states == {}
    for name in scenario.ledger.nodes:
        scenario.heartbeat(name)
    assert actions(scenario.round(CALM, times=10)) == []
    assert [lease.id for lease in scenario.leases] == [lease.id for lease in before]
    assert actions(scenario.round(IDLE, times=10)) == ["given_back"]


def test_another_policy_after_a_restart_gives_back_what_is_too_much_for_it():
    scenario = a_scenario(portion_milli=100, cool_down=1, leases_max=6)
    scenario.round(HARD, times=20)
    assert len(scenario.leases) > 2
    scenario.rules = rules("conservative", SHARE)
    records = scenario.read(HARD)
    assert len(scenario.leases) == 2
    assert "2 leases for one node are enough" in records[-1].reason


def test_a_mode_that_only_recommends_gives_back_what_another_borrowed():
    scenario = a_scenario()
    scenario.round(HARD)
    scenario.rules = rules("aggressive", "offload_only")
    assert "given_back" in actions(scenario.read(HARD))
    assert scenario.leases == []


def test_the_ids_are_numbered_for_good_and_fit_wherever_ids_are_asked_for():
    long = "node.with.dots." + 48 * "x"
    scenario = Rounds(apart(a_node(long)), apart(a_node("gpu1")), rules=rules("aggressive", SHARE))
    for _ in range(2):
        scenario.round(a_reading(long, memory=900))
        (lease,) = scenario.leases
        assert re.fullmatch(r"auto-[A-Za-z0-9_-]{0,59}", lease.id)
        assert lease.request.problem() is None
        scenario.round(a_reading(long), times=3)
    assert scenario.ledger.counters["automatic"] == 2


# ------------------------------------------------------------------ from whom


def test_nothing_is_taken_from_a_node_above_its_own_marks():
    scenario = a_scenario()
    scenario.round(HARD, a_reading("gpu1", cpu=850), a_reading("gpu2", memory=810))
    assert scenario.leases == []
    assert actions(scenario.records) == 3 * ["refused"]  # each needs something, and none can help another
    (reason,) = [record.reason for record in scenario.records if record.node == "master"]
    assert reason == (
        "memory at 90 %, above the mark of 80 %, and nobody can help: "
        "gpu1: cpu at 85 % itself, above the mark of 80 %; gpu2: memory at 81 % itself, above the mark of 80 %"
    )


def test_only_the_free_share_above_the_excess_threshold_is_taken():
    scenario = a_scenario(excess=500)
    scenario.round(HARD, a_reading("gpu1", memory=300), a_reading("gpu2", memory=400))
    (lease,) = scenario.leases
    assert lease.node == "gpu1"
    assert lease.request.ask.memory_bytes == 6 * GB


def test_a_node_whose_free_share_is_below_the_excess_threshold_lends_nothing():
    scenario = a_scenario(excess=500)
    scenario.round(HARD, a_reading("gpu1", memory=500), a_reading("gpu2", memory=700))
    assert scenario.leases == []


def test_what_is_lent_already_is_not_free():
    scenario = a_scenario()
    scenario.ask(a_request("r1", memory_gb=22, require=("gpu1",)))
    scenario.ask(a_request("r2", memory_gb=20, require=("gpu2",)))
    scenario.round(HARD)
    (lease,) = scenario.leases
    assert lease.node == "gpu2"
    assert lease.request.ask.memory_bytes == 4 * GB


def test_what_is_lent_and_not_used_yet_comes_on_top_of_what_the_owner_uses():
    scenario = a_scenario()
    scenario.ask(a_request("r1", memory_gb=8, require=("gpu2",)))
    scenario.heartbeat("gpu2", a_usage(memory_outside_gb=12))
    scenario.read(HARD, a_reading("gpu1", memory=900), a_reading("gpu2", memory=400))
    (lease,) = [lease for lease in scenario.leases if lease.request.target == "gpu1"]
    assert lease.request.ask.memory_bytes == 4 * GB  # of 30: 12 are in use, 8 are lent, 6 are kept


def test_never_so_much_that_the_lender_would_come_above_its_own_mark():
    scenario = a_scenario(high=600, low=200, excess=0)
    scenario.round(a_reading("master", memory=950), a_reading("gpu1", memory=500), a_reading("gpu2", memory=550))
    (lease,) = scenario.leases
    assert lease.node == "gpu1"
    assert lease.request.ask.memory_bytes == 3 * GB


def test_the_caps_of_a_lender_hold():
    nodes = (apart(a_node("master", memory_gb=30)), apart(a_node("gpu1", memory_gb=30, caps=caps(memory_gb=2))))
    scenario = Rounds(*nodes, rules=rules("aggressive", SHARE))
    scenario.round(HARD)
    assert scenario.leases[0].request.ask.memory_bytes == 2 * GB


def test_a_lender_that_comes_above_its_own_mark_gets_its_part_back():
    scenario = a_scenario()
    scenario.round(HARD)
    (lease,) = scenario.leases
    records = scenario.round(HARD, a_reading(lease.node, memory=850))
    assert f"{lease.node} needs it itself: memory at 85 %" in records[1].reason
    assert lease.id not in scenario.ledger.leases
    scenario.round(HARD, a_reading(lease.node, memory=850))
    assert scenario.leases[0].node != lease.node


def test_unknown_nodes_are_neither_helped_nor_asked():
    scenario = a_scenario()
    assert scenario.round(a_reading("master", memory=None), times=5) == []
    scenario.round(HARD, a_reading("gpu1", memory=None), a_reading("gpu2", memory=None), times=5)
    assert actions(scenario.records) == ["refused"]
    assert "gpu1: not heard from; gpu2: not heard from" in scenario.records[-1].reason


def test_a_node_that_is_suspect_by_the_ledger_is_unknown_whatever_was_read():
    scenario = a_scenario()
    scenario.now += 60_000
    scenario.heartbeat("gpu1")
    scenario.heartbeat("gpu2")
    scenario.handle(TimePassed())
    assert scenario.read(HARD) == []


def test_what_nobody_can_help_with_is_told_once():
    scenario = a_scenario()
    scenario.round(HARD, a_reading("gpu1", memory=900), a_reading("gpu2", memory=900), times=100)
    assert actions(scenario.records) == 3 * ["refused"]  # once for each of the three
    scenario.round(IDLE, times=2)
    scenario.round(HARD, a_reading("gpu1", memory=900), a_reading("gpu2", memory=900), times=5)
    assert actions(scenario.records).count("refused") == 4 + 2  # the others were idle, too, in between


# ------------------------------------------------------------------ users first


def test_a_user_who_waits_gets_what_the_grid_holds():
    scenario = a_scenario()
    scenario.ask(a_request("r1", memory_gb=28, require=("gpu1",), duration_s=300))
    scenario.ask(a_request("r2", memory_gb=6, require=("gpu2",)))
    scenario.round(HARD)
    (lease,) = scenario.leases
    assert lease.node == "gpu2"
    scenario.ledger.apply([Lease("r3", a_request("r3", memory_gb=20, require=("gpu2",)), scenario.now)])
    records = scenario.read(HARD)
    assert "ada waits for it: request r3" in records[1].reason
    assert scenario.ledger.leases["r3"].node == "gpu2"
    assert scenario.leases == []


@pytest.mark.parametrize("priority", ["low", "medium", "high", "urgent"])
def test_whoever_asks_takes_what_the_grid_holds_at_once(priority):
    scenario = a_scenario()
    scenario.round(HARD)
    (lease,) = scenario.leases
    lent = scenario.ask(a_request("r1", memory_gb=25, require=(lease.node,), priority=priority, wait_s=0))
    assert lent is not None
    assert lent.node == lease.node
    assert scenario.leases == []
    scenario.round(HARD, times=5)
    assert all(lease.node != lent.node for lease in scenario.leases)


def test_no_more_of_it_goes_than_is_needed():
    scenario = a_scenario(portion_milli=100, cool_down=1, leases_max=6)
    scenario.round(HARD, a_reading("gpu1", memory=900), times=10)
    held = [lease.id for lease in scenario.leases if lease.node == "gpu2"]
    assert len(held) > 3
    free = 30 - sum(lease.request.ask.memory_bytes for lease in scenario.leases) / GB
    scenario.ask(a_request("r1", memory_gb=free + 0.5, require=("gpu2",), wait_s=0))
    assert len([lease.id for lease in scenario.leases if lease.node == "gpu2"]) == len(held) - 1


def test_a_request_that_is_served_anyway_takes_nothing_from_the_grid():
    scenario = a_scenario()
    scenario.round(HARD)
    scenario.ask(a_request("r1", memory_gb=25, wait_s=0))
    assert len(scenario.leases) == 1


def test_while_users_wait_for_a_resource_the_grid_does_not_ask_for_it():
    scenario = a_scenario()
    for name in ("gpu1", "gpu2"):
        scenario.ask(a_request(f"full-{name}", memory_gb=15, require=(name,)))
    scenario.ask(a_request("big", memory_gb=28, require=("gpu1", "gpu2")))
    assert "big" in scenario.ledger.leases
    scenario.round(HARD, times=5)
    assert scenario.leases == []


def test_no_lease_is_given_back_for_somebody_whom_it_would_not_help():
    scenario = a_scenario()
    scenario.round(HARD)
    scenario.ask(a_request("other", cores=8, require=("gpu1",)))
    scenario.ask(a_request("waits", cores=8, require=("gpu1",)))
    assert scenario.ledger.waiting
    scenario.round(HARD, times=5)
    assert len(scenario.leases) == 1


def test_the_priority_is_never_above_a_users_usual_one():
    assert all(policy.priority <= Priority.MEDIUM for policy in SHARING_POLICIES.values())


# ------------------------------------------------------------------ one machine


def test_on_a_grid_of_one_node_nothing_happens():
    scenario = Rounds(a_node("master"), rules=rules("aggressive"))
    assert scenario.round(HARD, times=5) == []


def test_nodes_that_share_a_machine_have_nothing_to_give_each_other():
    scenario = Rounds(*(a_node(name) for name in ("master", "gpu1", "gpu2")), rules=rules("aggressive"))
    assert scenario.round(HARD, a_reading("gpu1", memory=100), times=5) == []


def test_local_nodes_with_thresholds_of_their_own_count_as_machines():
    nodes = [a_node(name, memory_gb=30, thresholds=thresholds()) for name in ("master", "gpu1")]
    scenario = Rounds(*nodes, rules=rules("aggressive", SHARE))
    scenario.round(HARD)
    assert scenario.leases[0].node == "gpu1"


def test_simulated_nodes_count_as_machines():
    nodes = [replace(a_node(name, memory_gb=30), simulated=True) for name in ("master", "gpu1")]
    scenario = Rounds(*nodes, rules=rules("aggressive", SHARE))
    scenario.round(HARD)
    assert scenario.leases[0].node == "gpu1"


def test_the_master_of_the_shipped_config_borrows_from_gpu2_in_the_third_round():
    config = ClusterConfig.from_yaml(PROJECT / "config/my-cluster-enhanced.yaml")
    shipped = rebalance_rules(config)
    assert shipped is not None
    scenario = Rounds(*nodes_from(config, NOTHING), rules=shipped)
    levels = {node.name: round(1000 * node.background.memory_used) for node in config.nodes}
    readings = [a_reading(name, memory=level) for name, level in levels.items()]
    scenario.round(*readings, times=2)
    assert scenario.leases == []
    scenario.round(*readings)
    assert [(lease.request.target, lease.node) for lease in scenario.leases] == [("gpu-master", "gpu2")]


def test_of_the_nodes_of_one_machine_only_the_head_borrows():
    local = [a_node("alpha", memory_gb=30), replace(a_node("master", memory_gb=30), role="head")]
    scenario = Rounds(*local, apart(a_node("far", memory_gb=60)), rules=rules("aggressive", SHARE))
    scenario.round(HARD, a_reading("alpha", memory=900), times=3)
    assert [lease.request.target for lease in scenario.leases] == ["master"]


# ------------------------------------------------------------------ forecasts


SURE = Forecast(900, 50)
VAGUE = Forecast(820, 200)


def test_predictive_acts_before_the_mark_is_crossed():
    scenario = a_scenario("predictive")
    records = scenario.round(a_reading("master", memory=(600, SURE)), times=3)
    assert len(scenario.leases) == 1
    assert records[2].reason.startswith(
        "memory at 60 %, expected at 90 % (± 5 %) in 300 s, above the mark of 80 %: 5.2 GB of 10.5 GB in excess"
    )


@pytest.mark.parametrize("policy", ["conservative", "balanced", "aggressive"])
def test_the_others_do_not_look_ahead(policy):
    scenario = a_scenario(policy)
    assert scenario.round(a_reading("master", memory=(600, SURE)), times=30) == []


def test_a_vague_forecast_is_not_acted_upon():
    scenario = a_scenario("predictive")
    assert scenario.round(a_reading("master", memory=(600, VAGUE)), times=30) == []


def test_nothing_is_asked_for_at_a_level_at_which_it_would_be_given_back():
    scenario = a_scenario("predictive")
    assert scenario.round(a_reading("master", memory=(290, SURE)), times=30) == []


def test_predictive_keeps_what_will_be_needed_again():
    scenario = a_scenario("predictive")
    scenario.round(HARD, times=3)
    assert scenario.leases
    scenario.round(a_reading("master", memory=(100, SURE)), times=9)
    assert scenario.leases
    scenario.round(a_reading("master", memory=(100, Forecast(150, 50))), times=3)
    assert scenario.leases == []


def test_a_lender_that_will_need_it_itself_is_not_asked():
    scenario = a_scenario("predictive")
    scenario.round(
        HARD, a_reading("gpu1", memory=(600, SURE)), a_reading("gpu2", memory=(100, Forecast(120, 10))), times=3
    )
    assert {lease.node for lease in scenario.leases if lease.request.target == "master"} == {"gpu2"}


# ------------------------------------------------------------------ recommendations


def a_pinned_job(scenario: Rounds) -> None:
    scenario.submit(a_request("r1", memory_gb=4, require=("master",)), starts=True)


@pytest.mark.parametrize("mode", ["offload_only", SHARE, "dynamic_balancing"])
def test_a_job_of_a_pressed_node_is_recommended_to_move_in_every_mode(mode):
    scenario = Rounds(rules=rules("aggressive", mode))
    scenario.handle(a_submission(a_request("r1", memory_gb=4, prefer=("master",)), name="train"))
    scenario.start("r1")
    records = [record for record in scenario.round(HARD) if record.type == "recommended"]
    assert len(records) == 1
    assert (records[0].node, records[0].subject, records[0].data["job_id"]) == ("master", "r1", "train")
    assert (records[0].data["from"], records[0].data["to"], records[0].data["cause"]) == ("master", "gpu1", "memory")
    assert records[0].reason == "memory at 90 %, above the mark of 80 %; gpu1 is at 0 %; job train holds 4.0 GB"
    assert (scenario.leases == []) is (mode == "offload_only")


def test_without_a_job_it_is_recommended_to_move_whatever_else_runs_there():
    scenario = a_scenario(mode="offload_only")
    scenario.round(HARD, a_reading("gpu1", memory=300))
    advice = scenario.advice("master")
    assert (advice.job, advice.to) == ("", "gpu2")
    assert advice.reason == "memory at 90 %, above the mark of 80 %; gpu2 is at 0 %, 24.0 GB to spare"


def test_the_same_thing_is_not_recommended_twice():
    scenario = a_scenario(mode="offload_only")
    a_pinned_job(scenario)
    scenario.round(HARD, times=100)
    assert actions(scenario.records).count("recommended") == 1


def test_a_recommendation_ends_with_its_cause_its_job_or_its_place():
    scenario = a_scenario(mode="offload_only")
    scenario.submit(a_request("r1", memory_gb=4, prefer=("master",)), starts=True)
    scenario.round(HARD)
    to = scenario.advice("master").to
    scenario.round(a_reading("master", memory=600))
    assert scenario.advice("master") is not None
    scenario.round(a_reading("master", memory=550))
    assert scenario.advice("master") is None
    scenario.round(HARD, times=2)
    assert scenario.advice("master").job == "r1"
    scenario.round(HARD, a_reading(to, memory=900))
    assert scenario.advice("master") is None or scenario.advice("master").to != to
    scenario.round(HARD, times=2)
    scenario.end("r1")
    scenario.read(HARD)
    assert scenario.advice("master") is None or scenario.advice("master").job == ""


def test_a_job_that_must_be_where_it_is_is_not_recommended_to_move():
    scenario = a_scenario(mode="offload_only")
    a_pinned_job(scenario)
    scenario.round(HARD)
    assert scenario.advice("master").job == ""


def test_the_least_important_job_moves_first():
    scenario = a_scenario(mode="offload_only")
    scenario.submit(a_request("big", memory_gb=8, prefer=("master",), priority="high"), starts=True)
    scenario.submit(a_request("small", memory_gb=2, prefer=("master",), priority="low"), starts=True)
    scenario.round(HARD)
    assert scenario.advice("master").job == "small"


def a_small_job(scenario: Rounds) -> None:
    scenario.submit(a_request("r1", cores=2, prefer=("master",)), starts=True)


def test_dynamic_balancing_evens_out_below_the_marks():
    scenario = Rounds(rules=rules("aggressive"))
    a_small_job(scenario)
    records = scenario.round(a_reading("master", memory=700, cpu=700), a_reading("gpu1", memory=100, cpu=100))
    assert actions(records) == ["recommended"]
    assert records[0].data["cause"] == "spread"
    assert records[0].reason == "master works at 70 %, gpu2 at 0 %, may differ by 20 %; job job-r1 holds 2 cores"


@pytest.mark.parametrize(("policy", "mode"), [("aggressive", SHARE), ("conservative", "dynamic_balancing")])
def test_other_modes_and_the_conservative_policy_do_not_even_out(policy, mode):
    scenario = Rounds(rules=rules(policy, mode))
    a_small_job(scenario)
    assert scenario.round(a_reading("master", memory=700, cpu=700), times=30) == []


def test_evening_out_never_turns_the_order_around():
    scenario = Rounds(rules=rules("aggressive"))
    scenario.submit(a_request("r1", cores=5, prefer=("master",)), starts=True)
    assert scenario.round(a_reading("master", memory=700, cpu=700), times=5) == []


def test_nodes_that_differ_less_than_the_policy_allows_are_left_alone():
    scenario = Rounds(rules=rules("balanced"))
    a_small_job(scenario)
    assert scenario.round(a_reading("master", memory=400, cpu=400), times=30) == []


# ------------------------------------------------------------------ what is remembered


def test_a_node_that_leaves_takes_what_was_remembered_of_it_along():
    scenario = a_scenario()
    scenario.round(HARD)
    assert "master" in scenario.ledger.rebalance_states
    scenario.handle(NodeForgotten("master"))
    assert "master" not in scenario.ledger.rebalance_states
    assert all(is_automatic(lease.request) for lease in scenario.leases)
    scenario.round(times=41)
    assert scenario.leases == []


def test_a_refusal_by_the_grid_itself_is_a_line_and_nothing_else():
    scenario = a_scenario()
    scenario.round(HARD, times=1)
    (lease,) = scenario.leases
    taken = Lease("auto-master-memory-2", a_request("auto-master-memory-2", memory_gb=1), scenario.now)
    scenario.ledger.apply([taken])  # somebody used that id before: the grid's own request is refused
    records = scenario.round(a_reading("master", memory=1000), times=3)
    assert "refused" in actions(records)
    assert actions(records).count("refused") == 1
    assert [lease.id for lease in scenario.leases] == [lease.id]


def test_reading_twice_at_the_same_moment_changes_nothing():
    scenario = a_scenario("balanced")
    scenario.round(HARD, times=2)
    scenario.read(HARD)
    rows = scenario.ledger.rows()
    assert scenario.read(HARD) == []
    assert scenario.ledger.rows() == rows


def test_the_lease_that_is_given_back_ended_as_released():
    scenario = a_scenario()
    scenario.round(HARD)
    (lease,) = scenario.leases
    scenario.advance(30)
    stepped = scenario.handle(PressureRead((IDLE,), scenario.rules))
    over = [row for row in stepped.changes if isinstance(row, Lease)]
    assert [(row.id, row.end) for row in over] == [(lease.id, LeaseEnd.RELEASED)]
