"""`explain` answers: why it waits, why there, why it was stopped, when it will start, why it was refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from distributed_grid.api.answers.explanation import PreemptorRow, WaitReason
from distributed_grid.domain.events import LeaseReleased, NodeDrained, PolicySet
from distributed_grid.domain.jobs import Ending
from distributed_grid.domain.scheduling_policy import Quota, SchedulingPolicy
from distributed_grid.errors import Ambiguous, NotFound, Refused
from tests.support.builders import a_node
from tests.unit.server.in_process_grid import InProcessGrid

Scenario = Callable[[InProcessGrid], Awaitable[None]]


def run_scenario(scenario: Scenario, **cluster: Any) -> None:
    async def run() -> None:
        opened = InProcessGrid(**cluster)
        try:
            await scenario(opened)
        finally:
            await opened.grid.stop()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_job_that_waits_is_told_node_by_node_with_its_place_in_line() -> None:
    async def scenario(cluster: InProcessGrid) -> None:
        await cluster.open(a_node("ash", cores=4), a_node("elm", cores=2))
        await cluster.submit("r1", amount=4, job_id="big", expects_seconds=60)
        await cluster.submit("r2", "bob", amount=4, job_id="first", expects_seconds=60)
        await cluster.submit("r3", amount=3, job_id="mine", wait_seconds=900)
        await cluster.later(5)
        found = await cluster.explain("mine")
        assert (found.kind, found.state, found.asked, found.priority) == (
            "job",
            "queued",
            "3 cores",
            "medium",
        )
        waiting = found.waiting
        assert (waiting.position, waiting.of, waiting.waited_seconds) == (2, 2, 5)
        assert [(one.job_id, one.user, one.asked) for one in waiting.ahead] == [("first", "bob", "4 cores")]
        assert waiting.reasons == [
            WaitReason("ash", "0 cores free, 3 cores asked"),
            WaitReason("elm", "2 cores at most, 3 cores asked"),
        ]
        assert waiting.gives_up_at is not None
        assert waiting.estimated_start is not None
        assert "first" in waiting.start_reason
        assert found.placements == []

    run_scenario(scenario)


def test_a_quota_that_keeps_a_job_waiting_is_named() -> None:
    async def scenario(cluster: InProcessGrid) -> None:
        await cluster.open(a_node("ash", cores=4))
        await cluster.handle(PolicySet(SchedulingPolicy(quotas=(Quota(name="ann", cpu_milli=1000),))))
        await cluster.submit("r1", job_id="one")
        await cluster.submit("r2", job_id="two")
        (reason,) = (await cluster.explain("two")).waiting.reasons
        assert reason.node_id is None
        assert reason.why.startswith("quota of ann: ")

    run_scenario(scenario)


def test_a_job_that_runs_is_told_why_there_as_it_was_decided() -> None:
    async def scenario(cluster: InProcessGrid) -> None:
        await cluster.open(a_node("ash"), a_node("elm", cores=8))
        decided = (await cluster.submit("r1", job_id="mine")).decision
        await cluster.starts("r1")
        await cluster.ask("r2", amount=6, require=["elm"])  # what counts now would be another scenario
        found = await cluster.explain("mine")
        (place,) = found.placements
        assert place.decision == decided
        assert (place.node_id, place.waited_seconds) == ("elm", 0)
        assert decided.reasoning[0] == "elm is the best of 2 nodes that fit, by load_balanced"
        assert [one.node_id for one in decided.alternatives] == ["ash"]
        assert found.waiting is None
        assert [event.type for event in found.events] == ["requested", "granted", "started"]

    run_scenario(scenario)


def test_a_displaced_job_is_told_for_whom_it_went_and_where_it_ran_again() -> None:
    async def scenario(cluster: InProcessGrid) -> None:
        await cluster.open(a_node("ash", cores=1))
        await cluster.submit("r1", job_id="victim", priority="low")
        await cluster.starts("r1")
        await cluster.later(10)
        await cluster.submit("r2", "bob", job_id="boss", priority="urgent")
        boss = await cluster.explain("boss")
        assert [one.job_id for one in boss.waiting.for_] == ["victim"]
        assert boss.placements[0].displaced == ["r1.1"]
        assert (await cluster.explain("victim")).stopping == "made room for urgent request r2.1"
        await cluster.ends("r1", Ending.SIGNALLED)
        await cluster.starts("r2")
        waiting = await cluster.explain("victim")
        assert waiting.waiting.position == 1
        assert waiting.waiting.gives_up_at is None
        await cluster.ends("r2")
        await cluster.starts("r1")
        await cluster.ends("r1")
        found = await cluster.explain("victim")
        assert found.end.reason == "exited"
        first, second = found.placements
        assert first.outcome == "preempted"
        assert first.made_room_for == PreemptorRow("r2.1", "boss", "bob", "made room for urgent request r2.1")
        assert (second.number, second.outcome, second.made_room_for) == (2, "exited", None)
        assert second.decision.node_id == "ash"

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("ending", "detail"),
    [
        (Ending.RECLAIMED, "its owner needs ash's memory: 0.8 GB free, 2.0 GB must be"),
        (Ending.LOST, "ash has no trace of it"),
        (Ending.OVER_LIMIT, "used 2.1 GB of 1.0 GB"),
    ],
)
def test_why_an_attempt_was_stopped_is_told(ending: Ending, detail: str) -> None:
    async def scenario(cluster: InProcessGrid) -> None:
        await cluster.open(a_node("ash", cores=1))
        await cluster.submit("r1", job_id="mine")
        await cluster.starts("r1")
        await cluster.ends("r1", ending, detail)
        (place,) = (await cluster.explain("mine")).placements
        assert (place.outcome, place.detail) == (str(ending), detail)

    run_scenario(scenario)


def test_a_lease_is_explained_alive_and_ended() -> None:
    async def scenario(cluster: InProcessGrid) -> None:
        await cluster.open(a_node("ash"), a_node("elm", cores=8))
        await cluster.ask("borrowed", duration_seconds=60)
        alive = await cluster.explain("borrowed")
        assert (alive.kind, alive.state, alive.end) == ("lease", "active", None)
        assert alive.placements[0].decision.node_id == "elm"
        await cluster.later(61)
        over = await cluster.explain("borrowed")
        assert over.end.reason == "expired"
        assert over.end.detail == "the lease's term is over"
        assert over.placements[0].decision == alive.placements[0].decision

    run_scenario(scenario)


def test_a_drained_node_is_the_reason_a_lease_ended() -> None:
    async def scenario(cluster: InProcessGrid) -> None:
        await cluster.open(a_node("ash"))
        await cluster.ask("borrowed")
        await cluster.handle(NodeDrained("ash"))
        end = (await cluster.explain("borrowed")).end
        assert (end.reason, end.detail) == ("reclaimed", "the node is being drained")

    run_scenario(scenario)


def test_every_member_of_a_gang_is_explained_by_the_choice_of_all() -> None:
    async def scenario(cluster: InProcessGrid) -> None:
        await cluster.open(a_node("ash"), a_node("elm"))
        await cluster.ask("g", gang=2)
        members = [(await cluster.explain(name)).placements[0] for name in ("g", "g:2")]
        assert [one.node_id for one in members] == ["ash", "elm"]
        assert members[0].decision == members[1].decision
        assert "the other members of its gang are on elm" in members[0].decision.reasoning

    run_scenario(scenario)


def test_a_refused_request_is_explained_by_its_id_a_prefix_or_the_name_of_the_job() -> None:
    async def scenario(cluster: InProcessGrid) -> None:
        await cluster.open(a_node("ash", cores=4))
        with pytest.raises(Refused):
            await cluster.submit("refused1", amount=99, job_id="huge")
        with pytest.raises(Refused):
            await cluster.ask("other", amount=99)
        for name in ("refused1", "refu", "huge"):
            found = await cluster.explain(name)
            assert (found.kind, found.id, found.state) == ("request", "refused1", "refused")
            assert found.job_id == "huge"
            assert found.refusal.reason.startswith("No node can ever lend 99 cores: ash: 4 cores at most")

    run_scenario(scenario)


def test_what_is_refused_before_the_ledger_is_explained_too() -> None:
    async def scenario(cluster: InProcessGrid) -> None:
        await cluster.open(a_node("ash"))
        with pytest.raises(Refused, match="not enabled"):
            await cluster.submit("early", job_id="mine")
        assert "not enabled" in (await cluster.explain("early")).refusal.reason

    run_scenario(scenario, sharing_enabled=False)


def test_any_unique_prefix_will_do_and_others_are_listed() -> None:
    async def scenario(cluster: InProcessGrid) -> None:
        await cluster.open(a_node("ash", cores=8))
        await cluster.submit("aa1122", job_id="train-1")
        await cluster.submit("ab22", job_id="train-2")
        await cluster.ask("lease-1")
        assert (await cluster.explain("train-1")).id == "train-1"
        assert (await cluster.explain("aa11")).id == "train-1"
        assert (await cluster.explain("aa1122.1")).id == "train-1"
        assert (await cluster.explain("leas")).kind == "lease"
        with pytest.raises(Ambiguous, match="train-1, train-2"):
            await cluster.explain("train")
        with pytest.raises(NotFound, match=r"nothing is called 'zzzz': no job, no lease and .* days$"):
            await cluster.explain("zzzz")
        for short in ("", "a", "aa1"):
            with pytest.raises(NotFound, match="the beginning of an id needs 4 characters of its own"):
                await cluster.explain(short)

    run_scenario(scenario)


def test_a_job_of_many_attempts_is_found_by_the_beginning_of_its_uid() -> None:
    async def scenario(cluster: InProcessGrid) -> None:
        await cluster.open(a_node("ash"))
        await cluster.submit("abc123", job_id="mine", retries=2)
        for ending in (Ending.SIGNALLED, Ending.SIGNALLED, Ending.EXITED):
            await cluster.starts("abc123")
            await cluster.ends("abc123", ending)
        assert len((await cluster.explain("abc1")).placements) == 3
        assert (await cluster.explain("abc123.2")).id == "mine"
        with pytest.raises(Ambiguous, match=r"abc123\.1, abc123\.2"):
            await cluster.explain("abc1", "lease")

    run_scenario(scenario)


def test_leases_that_belong_to_no_job_are_not_taken_for_those_of_one() -> None:
    async def scenario(cluster: InProcessGrid) -> None:
        await cluster.open(a_node("ash"))
        await cluster.submit("x1", job_id="mine")
        for name in ("efgh1", "efgh2"):
            await cluster.ask(name)
        with pytest.raises(Ambiguous, match="efgh1, efgh2"):
            await cluster.explain("efgh")

    run_scenario(scenario)


def test_an_exact_name_wins_over_names_that_begin_so() -> None:
    async def scenario(cluster: InProcessGrid) -> None:
        await cluster.open(a_node("ash", cores=8))
        for name in ("abab", "abab1", "abab2"):
            await cluster.ask(name)
        await cluster.submit("x1", job_id="abab11")
        await cluster.submit("x2", job_id="abab22")
        assert (await cluster.explain("abab")).id == "abab"
        await cluster.submit("x3", job_id="a")
        assert (await cluster.explain("a")).id == "a"
        await cluster.ask("cdcd1")
        await cluster.submit("x4", job_id="cdcd2")
        with pytest.raises(Ambiguous, match="fits several: cdcd1, cdcd2"):
            await cluster.explain("cdcd")

    run_scenario(scenario)


def test_a_door_that_asks_for_a_job_gets_no_lease() -> None:
    async def scenario(cluster: InProcessGrid) -> None:
        await cluster.open(a_node("ash"))
        await cluster.submit("r1", job_id="mine")
        await cluster.ask("lease-1")
        assert (await cluster.explain("lease-1", "lease")).kind == "lease"
        assert (await cluster.explain("r1.1", "lease")).kind == "lease"
        with pytest.raises(NotFound, match="no job is called 'lease-1'"):
            await cluster.explain("lease-1", "job")
        with pytest.raises(NotFound, match="no lease is called 'mine'"):
            await cluster.explain("mine", "lease")

    run_scenario(scenario)


def test_what_was_asked_before_is_answered_with_the_decision_of_then() -> None:
    async def scenario(cluster: InProcessGrid) -> None:
        await cluster.open(a_node("ash"), a_node("elm", cores=8))
        first = await cluster.ask("r1")
        assert (await cluster.ask("r1")).decision == first.decision
        await cluster.handle(LeaseReleased("r1", "ann"))
        again = await cluster.ask("r1")
        assert again.decision.node_id == first.decision.node_id
        assert again.decision.reasoning == first.decision.reasoning

    run_scenario(scenario)


def test_a_stopped_node_is_told_as_stopped() -> None:
    async def scenario(cluster: InProcessGrid) -> None:
        await cluster.open(a_node("ash"))
        await cluster.grid.handle(NodeDrained("ash"))
        found = await cluster.explain("ash")
        assert (found.kind, found.state, found.unused_borrowing) == ("node", "stopped", [])

    run_scenario(scenario)
