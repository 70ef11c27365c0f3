"""Announced ends: an agent's claims about its machine, leaving work and its time, lifetimes, and lies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_grid.control.agent_messages import announced_end, order_of
from distributed_grid.domain.events import (
    BlockAsked,
    ScalingRequested,
    WallTimePassed,
    WorkerBooted,
    WorkerDrainRequested,
    WorkerEndAnnounced,
)
from distributed_grid.domain.jobs import Command, Ending, Outcome
from distributed_grid.domain.states import JobState, NodeState, WorkerState
from distributed_grid.domain.workers import MAX_NOTICE_MS, SCALED_UP, EndNotice, Worker
from distributed_grid.reactor.effects import StopAttempt, attempt_effects, collection_effects
from distributed_grid.reactor.workers.announced_ends import BELIEVED_EVERY_MS
from distributed_grid.wire import StopAttemptOrder
from tests.support.builders import GB, a_node, a_request, a_submission
from tests.support.scaling import ScalingScenario, rules

SPOT = "spot notice"


class TakenScenario(ScalingScenario):
    """A grid that is full at home, with one worker of four cores."""

    def __init__(self, **fields: int) -> None:
        super().__init__(a_node("home", cores=2), scaling=rules(**fields))
        self.ask(a_request("all", cores=2))
        self.ask(a_request("first", cores=4))
        self.evaluate()
        (self.id,) = self.deliver()
        self.release("first")

    @property
    def worker(self) -> Worker:
        return self.ledger.workers[self.id]

    @property
    def state(self) -> str:
        return str(self.worker.state)

    def run(self, uid: str, *, cores: float = 4, grace_s: float = 5) -> None:
        command = Command(("true",), grace_ms=round(1000 * grace_s))
        self.handle(a_submission(a_request(uid, cores=cores), command=command))
        self.start(uid)

    def announce(self, seconds: float | None, why: str = SPOT, *, withdrawn: bool = False) -> list[str]:
        """Lines of the audit trail about the agent's announcement."""
        ends_in_ms = None if seconds is None else round(1000 * seconds)
        result = self.handle(WorkerEndAnnounced(self.id, why, ends_in_ms, withdrawn=withdrawn))
        return [f"{record.type}: {record.reason}" for record in result.records]

    def check(self, *, seconds: float = 0) -> None:
        """The next look at the time; the worker is heard meanwhile."""
        if seconds:
            self.now += round(1000 * seconds)
            for name in list(self.ledger.nodes):
                self.heartbeat(name)
        self.handle(WallTimePassed(self.wall_ms))

    def states(self, uid: str) -> tuple[JobState, str]:
        job = self.job(uid)
        return job.state, job.stop.detail if job.stop is not None else ""


def test_an_announced_end_cordons_at_once_and_stops_a_job_so_that_its_grace_is_over_in_time() -> None:
    grid = TakenScenario()
    grid.run("long")
    begun = grid.now
    assert grid.announce(120) == [
        "end-announced: it ends in 120 s: spot notice",
        "node-draining: spot notice",
    ]
    assert grid.state == WorkerState.DRAINING
    assert grid.worker.notice == EndNotice(SPOT, begun + 120_000, begun + 90_000, drained=True)
    assert grid.ledger.nodes[grid.id].state is NodeState.DRAINING
    grid.ask(a_request("new", cores=0.1))
    assert not grid.ledger.leases["new"].holds
    grid.check(seconds=84)
    assert grid.states("long") == (JobState.RUNNING, "")
    grid.check(seconds=1)
    assert grid.states("long") == (JobState.STOPPING, f"{grid.id} is taken away: spot notice")
    grid.end("long", Outcome(Ending.CANCELLED))
    assert grid.job("long").state is JobState.QUEUED, "it runs elsewhere, before the machine is gone"
    assert [effect.worker.id for effect in collection_effects(grid.ledger)] == [grid.id]
    grid.bring_home()
    assert grid.state == WorkerState.TERMINATING


def test_a_job_that_ends_in_time_may_finish() -> None:
    grid = TakenScenario()
    grid.run("short")
    grid.announce(120)
    grid.check(seconds=60)
    grid.end("short")
    assert "short" not in grid.ledger.jobs


@pytest.mark.parametrize(
    ("notice_s", "grace_s", "stops_at_s", "grace_left_s"),
    [
        (120, 5, 85, 5),
        (120, 60, 30, 60),
        (120, 600, 0, 90),  # there is no time for all of it
        (30, 5, 17.5, 5),
        (8, 5, 1, 5),
        (2, 5, 0, 1.5),
        (0, 5, 0, 0),
    ],
)
def test_the_grace_of_a_job_fits_before_the_end(
    notice_s: float, grace_s: float, stops_at_s: float, grace_left_s: float
) -> None:
    grid = TakenScenario()
    grid.run("job", grace_s=grace_s)
    grid.announce(notice_s)
    if stops_at_s:
        grid.check(seconds=stops_at_s - 0.1)
        assert grid.states("job")[0] is JobState.RUNNING
        grid.check(seconds=0.1)
    assert grid.states("job")[0] is JobState.STOPPING
    (effect,) = [one for one in attempt_effects(grid.ledger, node=grid.id) if isinstance(one, StopAttempt)]
    order = order_of(grid.ledger, effect)
    assert isinstance(order, StopAttemptOrder)
    assert order.grace_ms == 1000 * grace_left_s
    assert order.ending == "reclaimed"


def test_a_lease_without_a_job_ends_when_jobs_must_be_over() -> None:
    grid = TakenScenario()
    grid.ask(a_request("held", cores=4))
    grid.announce(120)
    grid.check(seconds=89)
    assert grid.ledger.leases["held"].holds
    grid.check(seconds=1)
    assert "held" not in grid.ledger.leases


def test_copies_of_blocks_move_at_once() -> None:
    grid = TakenScenario()
    grid.handle(BlockAsked(id="b", user="ada", size_bytes=GB, term_ms=3_600_000, home="home", prefer=grid.id))
    (copy,) = grid.ledger.blocks["b"].places
    assert copy.node == grid.id
    grid.announce(120)
    moving = grid.ledger.blocks["b"].moving
    assert moving is not None
    assert moving.source == copy.copy


def test_a_recommendation_to_move_away_only_stops_new_work() -> None:
    grid = TakenScenario()
    grid.run("long")
    assert grid.announce(None, "rebalance")[0] == "end-announced: it takes nothing new: rebalance"
    assert (grid.worker.state, grid.worker.leaving_at_ms) == (WorkerState.DRAINING, 0)
    grid.check(seconds=3600)
    assert grid.states("long") == (JobState.RUNNING, "")
    assert announced_end(grid.ledger, grid.id, grid.now) is None, "jobs are not told"
    grid.announce(120)
    assert grid.worker.leaving_at_ms == grid.now + 120_000
    end = announced_end(grid.ledger, grid.id, grid.now + 20_000)
    assert end is not None
    assert (end.why, end.ends_in_ms) == (SPOT, 100_000)


def test_a_notice_that_is_withdrawn_lets_the_worker_be_used_again() -> None:
    grid = TakenScenario()
    grid.announce(55, "maintenance")
    assert not grid.announce(None, "called off", withdrawn=True), "not believed so soon"
    grid.now += BELIEVED_EVERY_MS
    assert grid.announce(None, "called off", withdrawn=True)[0] == "end-withdrawn: called off"
    assert (grid.worker.state, grid.worker.notice) == (WorkerState.JOINED, None)
    grid.heartbeat(grid.id)
    grid.ask(a_request("new", cores=4))
    assert grid.ledger.leases["new"].node == grid.id


def test_a_worker_that_drained_already_drains_on_after_a_withdrawn_notice() -> None:
    grid = TakenScenario()
    grid.handle(WorkerDrainRequested(grid.id, "ada", "not needed"))
    grid.announce(60)
    grid.now += BELIEVED_EVERY_MS
    grid.announce(None, "called off", withdrawn=True)
    assert (grid.worker.state, grid.worker.notice) == (WorkerState.DRAINING, None)


def test_an_end_may_come_earlier_and_never_later() -> None:
    grid = TakenScenario()
    grid.announce(120)
    known = grid.worker
    grid.now += BELIEVED_EVERY_MS
    for seconds in (115, 114, 120, 3600):  # the same end, read a little later, and lies
        assert grid.announce(seconds) == []
        assert grid.worker == known
    assert grid.announce(20)
    assert grid.worker.leaving_at_ms == grid.now + 20_000


@pytest.mark.parametrize("seconds", [-5, 0, 1e9])
def test_a_lie_about_the_time_is_bounded(seconds: float) -> None:
    grid = TakenScenario()
    grid.announce(seconds)
    assert grid.now <= grid.worker.leaving_at_ms <= grid.now + MAX_NOTICE_MS


def test_an_agent_cannot_extend_the_life_that_its_provider_gives() -> None:
    grid = TakenScenario()
    grid.handle(WorkerBooted(grid.id, "i-1", ends_in_ms=100_000))
    ends_at = grid.worker.ends_at_ms
    grid.announce(3600)
    assert grid.worker.leaving_at_ms == ends_at
    grid.now += BELIEVED_EVERY_MS
    assert grid.announce(None, "stays", withdrawn=True) == []
    assert grid.worker.leaving_at_ms == ends_at


def test_an_agent_that_changes_its_word_all_the_time_is_believed_once_in_a_while() -> None:
    grid = TakenScenario()
    said = 0
    for number in range(1000):
        grid.now += 100
        said += len(grid.announce(600 - number * 0.1, withdrawn=number % 2 == 1)) > 0
    assert said <= 2 * (100_000 // BELIEVED_EVERY_MS + 1)


def test_the_word_about_a_machine_that_is_no_worker_or_is_gone_changes_nothing() -> None:
    grid = TakenScenario()
    before = dict(grid.ledger.nodes)
    for name in ("home", "nobody"):
        assert not grid.handle(WorkerEndAnnounced(name, SPOT, 0)).changes
    assert grid.ledger.nodes == before


def test_the_lifetime_of_a_machine_is_announced_ahead() -> None:
    grid = TakenScenario()
    grid.handle(WorkerBooted(grid.id, "i-1", ends_in_ms=24 * 3_600_000))
    grid.run("long")
    grid.check(seconds=24 * 3600 - 601)
    assert grid.state == WorkerState.JOINED
    grid.check(seconds=1)
    assert grid.state == WorkerState.DRAINING
    assert grid.worker.leaving_at_ms == grid.worker.ends_at_ms
    end = announced_end(grid.ledger, grid.id, grid.now)
    assert end is not None
    assert (end.why, end.ends_in_ms) == ("its lifetime at the provider is over then", 600_000)
    grid.check(seconds=565)
    assert grid.states("long")[0] is JobState.STOPPING


def test_a_provider_may_end_a_machine_earlier_than_was_announced() -> None:
    grid = TakenScenario()
    grid.announce(3600)
    grid.handle(WorkerBooted(grid.id, "i-1", ends_in_ms=10_000))
    grid.check()
    assert grid.worker.leaving_at_ms == grid.now + 3_600_000, "it is not so near yet"
    grid.check(seconds=9.9)
    assert grid.worker.leaving_at_ms == grid.worker.ends_at_ms


def test_the_lifetime_is_announced_early_enough_for_the_longest_grace() -> None:
    grid = TakenScenario()
    grid.handle(WorkerBooted(grid.id, "i-1", ends_in_ms=3_600_000))
    grid.run("slow", grace_s=900)
    grid.check(seconds=3600 - 961)
    assert grid.state == WorkerState.JOINED
    grid.check(seconds=1)
    assert grid.state == WorkerState.DRAINING
    grid.check(seconds=31)
    (effect,) = attempt_effects(grid.ledger, node=grid.id)
    order = order_of(grid.ledger, effect)
    assert isinstance(order, StopAttemptOrder)
    assert order.grace_ms > 890_000


def test_a_machine_whose_time_is_over_is_terminated_and_its_job_runs_elsewhere() -> None:
    grid = TakenScenario()
    grid.run("deaf")
    grid.announce(60)
    for _ in range(61):  # its machine is silent from here on
        grid.now += 1000
        grid.handle(WallTimePassed(grid.wall_ms))
    assert (grid.worker.state, grid.worker.why) == (WorkerState.TERMINATING, "its time is over: spot notice")
    grid.end_terminating()
    assert grid.id not in grid.ledger.workers
    assert grid.job("deaf").state in (JobState.QUEUED, JobState.ENDED)


def test_scaling_does_not_rest_after_a_machine_was_taken_away() -> None:
    grid = TakenScenario(up_cooldown_ms=3_600_000)
    assert grid.ledger.counters[SCALED_UP] > grid.now - 3_600_000
    grid.announce(60)
    assert grid.ledger.counters[SCALED_UP] + 3_600_000 <= grid.now


steps = st.lists(
    st.tuples(st.sampled_from(["submit", "ask", "announce", "risk", "stay", "wait", "evaluate"]), st.integers(0, 200)),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_after_an_announced_end_nothing_new_is_placed_there(history: list[tuple[str, int]]) -> None:
    grid = TakenScenario()
    for number, (what, amount) in enumerate(history):
        if grid.id not in grid.ledger.workers:
            return
        is_taken = grid.worker.notice is not None
        before = {lease.id for lease in grid.ledger.leases_of(grid.id)}
        if what == "submit":
            grid.handle(a_submission(a_request(f"j{number}", cores=1 + amount % 4)))
        elif what == "ask":
            grid.ask(a_request(f"r{number}", cores=1 + amount % 4))
        elif what == "announce":
            grid.announce(amount)
        elif what == "risk":
            grid.announce(None)
        elif what == "stay":
            grid.announce(None, withdrawn=True)
        elif what == "evaluate":
            ids = tuple(f"x{number}-{one}" for one in range(3))
            grid.handle(ScalingRequested(ids, grid.wall_ms))
        else:
            grid.check(seconds=amount)
        if is_taken and what != "stay" and grid.id in grid.ledger.workers:
            assert grid.worker.notice is not None, "only who announced it withdraws it"
            assert {lease.id for lease in grid.ledger.leases_of(grid.id)} <= before
        grid.ledger.check()
