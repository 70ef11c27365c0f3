"""Chains of displacement: whoever comes in whatever order, nobody displaces its displacer, and it comes to rest."""

from __future__ import annotations

from collections import Counter as Tally

from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_grid.domain.events import PolicySet
from distributed_grid.domain.jobs import Ending, Job, Outcome
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.domain.states import JobState
from distributed_grid.reactor.dispatch import StepResult
from distributed_grid.reactor.effects import attempt_effects
from tests.support.builders import Scenario, a_node, a_request, a_submission

STOPPED = Outcome(Ending.SIGNALLED, signal=15)
CAP = 2

arrivals = st.lists(
    st.tuples(
        st.sampled_from([1, 1, 2, 3, 4]),
        st.sampled_from(["low", "low", "medium", "high", "urgent", "urgent", "urgent"]),
        st.sampled_from([0, 1, 2, 5]),
        st.booleans(),
    ),
    min_size=4,
    max_size=25,
)


class Contest:
    """Two nodes, jobs that never end by themselves unless told to, and who displaced whom."""

    def __init__(self) -> None:
        self.scenario = Scenario(a_node("gpu1", cores=4), a_node("gpu2", cores=4))
        self.scenario.handle(PolicySet(SchedulingPolicy(preemptions_max=CAP)))
        self.displaced: list[tuple[str, str]] = []

    def note(self, result: StepResult) -> None:
        """Remember each one that began to yield, and to whom."""
        for row in result.changes:
            if isinstance(row, Job) and row.stop is not None and row.stop.ending is Ending.PREEMPTED:
                leaving = [one for one in result.changes if isinstance(one, Lease) and one.id == row.lease_id]
                self.displaced.append((leaving[-1].preempted_by.split(".")[0], row.uid))

    def comes(self, uid: str, cores: int, priority: str) -> None:
        self.note(self.scenario.handle(a_submission(a_request(uid, cores=cores, priority=priority, wait_s=1e6))))

    def agents_work(self) -> None:
        """Everything that is to start starts, everything that is to stop stops."""
        while effects := attempt_effects(self.scenario.ledger):
            for effect in effects:
                job = self.scenario.ledger.jobs.get(effect.job.uid)
                if job is None or job.attempt is None:
                    continue
                if job.state is JobState.STOPPING:
                    self.note(self.scenario.end(job.uid, STOPPED))
                elif job.state is JobState.ASSIGNED and not self.scenario.lease_of(job.uid).awaits:
                    self.scenario.start(job.uid)

    def passes(self, seconds: float) -> None:
        self.note(self.scenario.advance(seconds))
        self.agents_work()


@settings(max_examples=60)
@given(arrivals)
def test_no_two_requests_displace_each_other_in_turn_and_nobody_is_displaced_beyond_the_cap(coming):
    contest = Contest()
    for number, (cores, priority, seconds, ends) in enumerate(coming):
        contest.comes(f"j{number}", cores, priority)
        contest.agents_work()
        contest.passes(seconds)
        running = [job.uid for job in contest.scenario.ledger.jobs.values() if job.state is JobState.RUNNING]
        if ends and running:
            contest.note(contest.scenario.end(running[number % len(running)]))
            contest.agents_work()
    edges = set(contest.displaced)
    assert all(not is_below(victim, preemptor, edges) for preemptor, victim in edges)
    times = Tally(victim for _, victim in contest.displaced)
    assert all(count <= CAP for count in times.values())
    for _ in range(CAP * len(coming) + 2):
        contest.passes(2)
    before = len(contest.displaced)
    for _ in range(5):
        contest.passes(60)
    assert len(contest.displaced) == before
    contest.scenario.ledger.check()


def is_below(top: str, bottom: str, edges: set[tuple[str, str]]) -> bool:
    """Whether one displaced another, directly or through others."""
    reached, ahead = {top}, [top]
    while ahead:
        one = ahead.pop()
        for victim in {victim for preemptor, victim in edges if preemptor == one} - reached:
            reached.add(victim)
            ahead.append(victim)
    return bottom in reached - {top}


def test_a_job_that_was_displaced_and_came_back_does_not_displace_in_turn():
    contest = Contest()
    contest.comes("a", 4, "high")
    contest.comes("b", 4, "high")
    contest.agents_work()
    contest.passes(2)
    contest.comes("vip", 4, "urgent")
    contest.agents_work()
    for _ in range(10):
        contest.passes(5)
    assert len(contest.displaced) == 1
    assert contest.displaced[0][0] == "vip"


def test_after_the_cap_it_is_somebody_elses_turn():
    contest = Contest()
    contest.comes("a", 4, "low")
    contest.comes("rest", 4, "urgent")
    contest.agents_work()
    for number in range(CAP + 1):
        contest.passes(2)
        contest.comes(f"vip{number}", 4, "urgent")
        contest.agents_work()
        contest.passes(2)
        if contest.scenario.job(f"vip{number}").state is JobState.RUNNING:
            contest.scenario.end(f"vip{number}")
            contest.agents_work()
    assert [victim for _, victim in contest.displaced] == ["a"] * CAP
    assert contest.scenario.job("a").state is JobState.RUNNING
    assert contest.scenario.job(f"vip{CAP}").state is JobState.QUEUED
