"""Rebalancing plan: when a loan goes back, when it is renewed, and which work is recommended to move."""

from __future__ import annotations

import pytest

from distributed_grid.domain.leases import Lease
from distributed_grid.domain.rebalancing import SHARING_POLICIES
from tests.support.builders import a_request, a_submission
from tests.support.rebalance_rounds import (
    CALM,
    HARD,
    IDLE,
    INTERVAL_MS,
    SHARE,
    Rounds,
    a_reading,
    actions,
    begin_rounds,
    rules,
)


def test_it_is_given_back_below_the_low_mark_and_not_before():
    scenario = begin_rounds()
    scenario.round(HARD, times=3)
    assert actions(scenario.round(CALM, times=20)) == []
    assert len(scenario.leases) == 1
    records = scenario.round(IDLE, times=2)
    assert scenario.leases == []
    assert actions(records) == ["given_back"]
    assert "memory of master at 10 %, below the mark of 30 %" in records[-1].reason


@pytest.mark.parametrize(("policy", "rounds"), [("conservative", 10), ("balanced", 2), ("aggressive", 0)])
def test_a_policy_waits_before_it_acts(policy, rounds):
    scenario = begin_rounds(policy)
    assert scenario.round(HARD, times=rounds) == []
    assert "asked" in actions(scenario.round(HARD))


def test_one_calm_reading_begins_the_wait_anew():
    scenario = begin_rounds("balanced")
    for _ in range(10):
        assert scenario.round(HARD, HARD, times=1) == []
        assert scenario.round(CALM) == []
    assert scenario.leases == []


def test_a_lease_is_renewed_while_it_is_needed_and_runs_out_when_nobody_hears_of_its_node():
    scenario = begin_rounds(unused_after=1000)
    scenario.round(HARD, times=100)
    (lease,) = scenario.leases
    assert lease.granted_at_ms < scenario.now - 99 * INTERVAL_MS
    assert lease.ends_at_ms > scenario.now + SHARING_POLICIES["aggressive"].renew_at * INTERVAL_MS - INTERVAL_MS
    records = scenario.round(a_reading("master", memory=None), times=41)
    assert scenario.leases == []
    assert actions(records) == []


def test_another_policy_after_a_restart_gives_back_what_is_too_much_for_it():
    scenario = begin_rounds(portion_milli=100, cool_down=1, leases_max=6)
    scenario.round(HARD, times=20)
    assert len(scenario.leases) > 2
    scenario.rules = rules("conservative", SHARE)
    records = scenario.read(HARD)
    assert len(scenario.leases) == 2
    assert "2 leases for one node are enough" in records[-1].reason


def test_a_mode_that_only_recommends_gives_back_what_another_borrowed():
    scenario = begin_rounds()
    scenario.round(HARD)
    scenario.rules = rules("aggressive", "offload_only")
    assert "given_back" in actions(scenario.read(HARD))
    assert scenario.leases == []


def test_a_lender_that_comes_above_its_own_mark_gets_its_part_back():
    scenario = begin_rounds()
    scenario.round(HARD)
    (lease,) = scenario.leases
    records = scenario.round(HARD, a_reading(lease.node, memory=850))
    assert f"{lease.node} needs it itself: memory at 85 %" in records[1].reason
    assert lease.id not in scenario.ledger.leases
    scenario.round(HARD, a_reading(lease.node, memory=850))
    assert scenario.leases[0].node != lease.node


def test_a_user_who_waits_gets_what_the_grid_holds():
    scenario = begin_rounds()
    scenario.ask(a_request("r1", memory_gb=28, require=("gpu1",), duration_s=300))
    scenario.ask(a_request("r2", memory_gb=6, require=("gpu2",)))
    scenario.round(HARD)
    (lease,) = scenario.leases
    assert lease.node == "gpu2"
    scenario.ledger.apply(
        [Lease(id="r3", request=a_request("r3", memory_gb=20, require=("gpu2",)), asked_at_ms=scenario.now)]
    )
    records = scenario.read(HARD)
    assert "ada waits for it: request r3" in records[1].reason
    assert scenario.ledger.leases["r3"].node == "gpu2"
    assert scenario.leases == []


def test_no_lease_is_given_back_for_somebody_whom_it_would_not_help():
    scenario = begin_rounds()
    scenario.round(HARD)
    scenario.ask(a_request("other", cores=8, require=("gpu1",)))
    scenario.ask(a_request("waits", cores=8, require=("gpu1",)))
    assert scenario.ledger.waiting
    scenario.round(HARD, times=5)
    assert len(scenario.leases) == 1


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
    scenario = begin_rounds(mode="offload_only")
    scenario.round(HARD, a_reading("gpu1", memory=300))
    advice = scenario.advice("master")
    assert (advice.job, advice.to) == ("", "gpu2")
    assert advice.reason == "memory at 90 %, above the mark of 80 %; gpu2 is at 0 %, 24.0 GB to spare"


def test_the_same_thing_is_not_recommended_twice():
    scenario = begin_rounds(mode="offload_only")
    a_pinned_job(scenario)
    scenario.round(HARD, times=100)
    assert actions(scenario.records).count("recommended") == 1


def test_a_recommendation_ends_with_its_cause_its_job_or_its_place():
    scenario = begin_rounds(mode="offload_only")
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
    scenario = begin_rounds(mode="offload_only")
    a_pinned_job(scenario)
    scenario.round(HARD)
    assert scenario.advice("master").job == ""


def test_the_least_important_job_moves_first():
    scenario = begin_rounds(mode="offload_only")
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
