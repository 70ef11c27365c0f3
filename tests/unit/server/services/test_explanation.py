"""`explain` answers: why it waits, why there, why it was stopped, when it will start, why it was refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from distributed_grid.domain.events import LeaseReleased, NodeDrained, PolicySet
from distributed_grid.domain.jobs import Ending
from distributed_grid.domain.scheduling_policy import Quota, SchedulingPolicy
from distributed_grid.errors import Ambiguous, NotFound, Refused
from tests.support.builders import a_node
from tests.unit.server.in_process_grid import InProcessGrid

Told = Callable[[InProcessGrid], Awaitable[None]]


def tell(story: Told, **house: bool) -> None:
    async def told() -> None:
        opened = InProcessGrid(**house)
        try:
            await story(opened)
        finally:
            await opened.grid.stop()

    asyncio.run(asyncio.wait_for(told(), 20))


def test_a_job_that_waits_is_told_node_by_node_with_its_place_in_line() -> None:
    async def story(house: InProcessGrid) -> None:
        await house.open(a_node("ash", cores=4), a_node("elm", cores=2))
        await house.submit("r1", amount=4, job_id="big", expects_seconds=60)
        await house.submit("r2", "bob", amount=4, job_id="first", expects_seconds=60)
        await house.submit("r3", amount=3, job_id="mine", wait_seconds=900)
        await house.later(5)
        found = await house.explain("mine")
        assert (found["kind"], found["state"], found["asked"], found["priority"]) == (
            "job",
            "queued",
            "3 cores",
            "medium",
        )
        waiting = found["waiting"]
        assert (waiting["position"], waiting["of"], waiting["waited_seconds"]) == (2, 2, 5)
        assert [(one["job_id"], one["user"], one["asked"]) for one in waiting["ahead"]] == [("first", "bob", "4 cores")]
        assert waiting["reasons"] == [
            {"node_id": "ash", "why": "0 cores free, 3 cores asked"},
            {"node_id": "elm", "why": "2 cores at most, 3 cores asked"},
        ]
        assert waiting["gives_up_at"] is not None
        assert waiting["estimated_start"] is not None
        assert "first" in waiting["start_reason"]
        assert found["placements"] == []

    tell(story)


def test_a_quota_that_keeps_a_job_waiting_is_named() -> None:
    async def story(house: InProcessGrid) -> None:
        await house.open(a_node("ash", cores=4))
        await house.handle(PolicySet(SchedulingPolicy(quotas=(Quota("ann", cpu_milli=1000),))))
        await house.submit("r1", job_id="one")
        await house.submit("r2", job_id="two")
        (reason,) = (await house.explain("two"))["waiting"]["reasons"]
        assert reason["node_id"] is None
        assert reason["why"].startswith("quota of ann: ")

    tell(story)


def test_a_job_that_runs_is_told_why_there_as_it_was_decided() -> None:
    async def story(house: InProcessGrid) -> None:
        await house.open(a_node("ash"), a_node("elm", cores=8))
        decided = (await house.submit("r1", job_id="mine"))["decision"]
        await house.starts("r1")
        await house.ask("r2", amount=6, require=["elm"])  # what counts now would be another story
        found = await house.explain("mine")
        (place,) = found["placements"]
        assert place["decision"] == decided
        assert (place["node_id"], place["waited_seconds"]) == ("elm", 0)
        assert decided["reasoning"][0] == "elm is the best of 2 nodes that fit, by load_balanced"
        assert [one["node_id"] for one in decided["alternatives"]] == ["ash"]
        assert found["waiting"] is None
        assert [event["type"] for event in found["events"]] == ["requested", "granted", "started"]

    tell(story)


def test_a_displaced_job_is_told_for_whom_it_went_and_where_it_ran_again() -> None:
    async def story(house: InProcessGrid) -> None:
        await house.open(a_node("ash", cores=1))
        await house.submit("r1", job_id="victim", priority="low")
        await house.starts("r1")
        await house.later(10)
        await house.submit("r2", "bob", job_id="boss", priority="urgent")
        boss = await house.explain("boss")
        assert [one["job_id"] for one in boss["waiting"]["for"]] == ["victim"]
        assert boss["placements"][0]["displaced"] == ["r1.1"]
        assert (await house.explain("victim"))["stopping"] == "made room for urgent request r2.1"
        await house.ends("r1", Ending.SIGNALLED)
        await house.starts("r2")
        waiting = await house.explain("victim")
        assert waiting["waiting"]["position"] == 1
        assert waiting["waiting"]["gives_up_at"] is None
        await house.ends("r2")
        await house.starts("r1")
        await house.ends("r1")
        found = await house.explain("victim")
        assert found["end"]["reason"] == "exited"
        first, second = found["placements"]
        assert first["outcome"] == "preempted"
        assert first["made_room_for"] == {
            "allocation_id": "r2.1",
            "job_id": "boss",
            "user": "bob",
            "reason": "made room for urgent request r2.1",
        }
        assert (second["number"], second["outcome"], second["made_room_for"]) == (2, "exited", None)
        assert second["decision"]["node_id"] == "ash"

    tell(story)


@pytest.mark.parametrize(
    ("ending", "detail"),
    [
        (Ending.RECLAIMED, "its owner needs ash's memory: 0.8 GB free, 2.0 GB must be"),
        (Ending.LOST, "ash has no trace of it"),
        (Ending.OVER_LIMIT, "used 2.1 GB of 1.0 GB"),
    ],
)
def test_why_an_attempt_was_stopped_is_told(ending: Ending, detail: str) -> None:
    async def story(house: InProcessGrid) -> None:
        await house.open(a_node("ash", cores=1))
        await house.submit("r1", job_id="mine")
        await house.starts("r1")
        await house.ends("r1", ending, detail)
        (place,) = (await house.explain("mine"))["placements"]
        assert (place["outcome"], place["detail"]) == (str(ending), detail)

    tell(story)


def test_a_lease_is_explained_alive_and_ended() -> None:
    async def story(house: InProcessGrid) -> None:
        await house.open(a_node("ash"), a_node("elm", cores=8))
        await house.ask("borrowed", duration_seconds=60)
        alive = await house.explain("borrowed")
        assert (alive["kind"], alive["state"], alive["end"]) == ("lease", "active", None)
        assert alive["placements"][0]["decision"]["node_id"] == "elm"
        await house.later(61)
        over = await house.explain("borrowed")
        assert over["end"]["reason"] == "expired"
        assert over["end"]["detail"] == "the lease's term is over"
        assert over["placements"][0]["decision"] == alive["placements"][0]["decision"]

    tell(story)


def test_a_drained_node_is_the_reason_a_lease_ended() -> None:
    async def story(house: InProcessGrid) -> None:
        await house.open(a_node("ash"))
        await house.ask("borrowed")
        await house.handle(NodeDrained("ash"))
        end = (await house.explain("borrowed"))["end"]
        assert (end["reason"], end["detail"]) == ("reclaimed", "the node is being drained")

    tell(story)


def test_every_member_of_a_gang_is_explained_by_the_choice_of_all() -> None:
    async def story(house: InProcessGrid) -> None:
        await house.open(a_node("ash"), a_node("elm"))
        await house.ask("g", gang=2)
        members = [(await house.explain(name))["placements"][0] for name in ("g", "g:2")]
        assert [one["node_id"] for one in members] == ["ash", "elm"]
        assert members[0]["decision"] == members[1]["decision"]
        assert "the other members of its gang are on elm" in members[0]["decision"]["reasoning"]

    tell(story)


def test_a_refused_request_is_explained_by_its_id_a_prefix_or_the_name_of_the_job() -> None:
    async def story(house: InProcessGrid) -> None:
        await house.open(a_node("ash", cores=4))
        with pytest.raises(Refused):
            await house.submit("refused1", amount=99, job_id="huge")
        with pytest.raises(Refused):
            await house.ask("other", amount=99)
        for name in ("refused1", "refu", "huge"):
            found = await house.explain(name)
            assert (found["kind"], found["id"], found["state"]) == ("request", "refused1", "refused")
            assert found["job_id"] == "huge"
            assert found["refusal"]["reason"].startswith("No node can ever lend 99 cores: ash: 4 cores at most")

    tell(story)


def test_what_is_refused_before_the_ledger_is_explained_too() -> None:
    async def story(house: InProcessGrid) -> None:
        await house.open(a_node("ash"))
        with pytest.raises(Refused, match="not enabled"):
            await house.submit("early", job_id="mine")
        assert "not enabled" in (await house.explain("early"))["refusal"]["reason"]

    tell(story, sharing_enabled=False)


def test_any_unique_prefix_will_do_and_others_are_listed() -> None:
    async def story(house: InProcessGrid) -> None:
        await house.open(a_node("ash", cores=8))
        await house.submit("aa11", job_id="train-1")
        await house.submit("ab22", job_id="train-2")
        await house.ask("lease-1")
        assert (await house.explain("train-1"))["id"] == "train-1"
        assert (await house.explain("aa"))["id"] == "train-1"
        assert (await house.explain("aa11.1"))["id"] == "train-1"
        assert (await house.explain("leas"))["kind"] == "lease"
        with pytest.raises(Ambiguous, match="train-1, train-2"):
            await house.explain("train")
        with pytest.raises(NotFound, match="nothing is called 'zz'"):
            await house.explain("zz")

    tell(story)


def test_a_job_of_many_attempts_is_found_by_the_beginning_of_its_uid() -> None:
    async def story(house: InProcessGrid) -> None:
        await house.open(a_node("ash"))
        await house.submit("abc123", job_id="mine", retries=2)
        for ending in (Ending.SIGNALLED, Ending.SIGNALLED, Ending.EXITED):
            await house.starts("abc123")
            await house.ends("abc123", ending)
        assert len((await house.explain("abc"))["placements"]) == 3
        assert (await house.explain("abc123.2"))["id"] == "mine"
        with pytest.raises(Ambiguous, match=r"abc123\.1, abc123\.2"):
            await house.explain("abc", "lease")

    tell(story)


def test_leases_that_belong_to_no_job_are_not_taken_for_those_of_one() -> None:
    async def story(house: InProcessGrid) -> None:
        await house.open(a_node("ash"))
        await house.submit("x1", job_id="mine")
        for name in ("ef1", "ef2"):
            await house.ask(name)
        with pytest.raises(Ambiguous, match="ef1, ef2"):
            await house.explain("ef")

    tell(story)


def test_an_exact_name_wins_over_names_that_begin_so() -> None:
    async def story(house: InProcessGrid) -> None:
        await house.open(a_node("ash", cores=8))
        for name in ("ab", "ab1", "ab2"):
            await house.ask(name)
        await house.submit("x1", job_id="ab11")
        await house.submit("x2", job_id="ab22")
        assert (await house.explain("ab"))["id"] == "ab"
        await house.submit("x3", job_id="a")
        assert (await house.explain("a"))["id"] == "a"
        await house.ask("cd1")
        await house.submit("x4", job_id="cd2")
        with pytest.raises(Ambiguous, match="fits several: cd1, cd2"):
            await house.explain("cd")

    tell(story)


def test_a_door_that_asks_for_a_job_gets_no_lease() -> None:
    async def story(house: InProcessGrid) -> None:
        await house.open(a_node("ash"))
        await house.submit("r1", job_id="mine")
        await house.ask("lease-1")
        assert (await house.explain("lease-1", "lease"))["kind"] == "lease"
        assert (await house.explain("r1.1", "lease"))["kind"] == "lease"
        with pytest.raises(NotFound, match="no job is called 'lease-1'"):
            await house.explain("lease-1", "job")
        with pytest.raises(NotFound, match="no lease is called 'mine'"):
            await house.explain("mine", "lease")

    tell(story)


def test_what_was_asked_before_is_answered_with_the_decision_of_then() -> None:
    async def story(house: InProcessGrid) -> None:
        await house.open(a_node("ash"), a_node("elm", cores=8))
        first = await house.ask("r1")
        assert (await house.ask("r1"))["decision"] == first["decision"]
        await house.handle(LeaseReleased("r1", "ann"))
        again = await house.ask("r1")
        assert again["decision"]["node_id"] == first["decision"]["node_id"]
        assert again["decision"]["reasoning"] == first["decision"]["reasoning"]

    tell(story)
