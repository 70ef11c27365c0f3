"""The fault campaign: the invariants hold over many seeds, and machines or agents that break one are caught."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import pytest
from msgspec.structs import replace

from distributed_grid.agent.orders import OrderExecutor
from distributed_grid.domain.events import JobSubmitted, LeaseAsked, TimePassed
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import SharingMode
from distributed_grid.domain.resources import Priority
from distributed_grid.domain.rows import Counter, Row
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.reactor.dispatch import StepResult
from distributed_grid.replay.event_queue import SimulatedTask
from distributed_grid.wire import StartAttemptOrder, StopAttemptOrder
from tests.simulation.campaign import Summary, failure_text, run_seed
from tests.simulation.faults import Fault, FaultKind
from tests.simulation.invariant_checker import InvariantChecker, InvariantViolated
from tests.simulation.machine import FLOOD_BYTES, MAX_SKEW, Machine, SimulatedProcess
from tests.simulation.scenario import Scenario, draw_scenario
from tests.simulation.simulated_control_plane import SimulatedControlPlane, WaitingEntry
from tests.simulation.world import RunReport, World
from tests.support.builders import Scenario as Ready
from tests.support.builders import a_node, a_request
from tests.unit.simulation.scenarios import a_cancel, a_fault, a_job, a_scenario

SOME = (1, 6, 13, 14, 31, 0, 41, 44, 45, 62, 75, 79, 82, 129)
"""Small seeds, which together have every kind of fault; in 129 somebody is preempted, in 0 paused, and in 75
starts expire. In 0 leases grow, too."""
QUICK = SOME[:5]
"""The others are among the slow tests."""
once = functools.cache(run_seed)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed in QUICK else pytest.mark.slow) for seed in SOME])
def test_every_invariant_holds_over_seed(seed: int) -> None:
    report = once(seed)
    assert not report.violated, failure_text(report)
    assert report.steps > 100
    assert sum(report.checks.values()) > 10 * report.steps


def test_a_campaign_says_what_it_has_seen() -> None:
    summary = Summary()
    for seed in SOME[:3]:
        summary.count(once(seed))
    assert (summary.seeds, summary.broken) == (3, [])
    assert summary.checks.total() == sum(sum(once(seed).checks.values()) for seed in SOME[:3])
    assert str(summary).startswith("3 seeds, 0 broken; ")
    covered = summary.coverage()
    for name in ("a job runs once at a time", "fences only grow", *FaultKind):
        assert f"  {name}\n" in covered


class Forgetful(Machine):
    """Has what was ordered to stop run on."""

    def stop(self, run: SimulatedProcess, outcome: Outcome, grace_ms: int) -> None:
        """Look away."""


def test_a_machine_that_does_not_stop_what_it_was_told_to_is_caught() -> None:
    report = caught(a_scenario([a_job(10, 500), a_cancel(30)]), machine=Forgetful)
    assert (report.violated, report.detail) == (
        "a stop that was acknowledged is carried out",
        "job.1 on ash still runs",
    )


@pytest.mark.slow
def test_these_seeds_see_every_kind_of_fault_and_most_of_what_can_happen() -> None:
    assert {fault.kind for seed in SOME for fault in draw_scenario(seed).faults} == {*FaultKind}
    visited = {name for seed in SOME for name in once(seed).visited}
    told_to_the_ledger = {
        *("ControlPlaneStarted", "PolicySet", "NodeDeclared", "HeartbeatReceived", "AgentRequested", "NodeDrained"),
        *("LeaseAsked", "LeaseReleased", "LeaseExtended", "JobSubmitted", "JobCancelled", "AttemptStarted"),
        *("AttemptPaused", "AttemptMarked", "AttemptEnded", "AttemptsListed", "PressureRead", "TimePassed"),
        "AttemptOutgrown",
        "StartsExpired",
        *(
            "MoveRequested",
            "MoveShipped",
            "move-frozen",
            "MoveFilesSettled",
            "move-decided",
            "move-dead",
            "move-returned",
        ),
        *("move-thawed", "MoveFailed", "MoveCancelled", "MoveResultsBrought"),
    }
    told_by_it = {
        *("requested", "queued", "granted", "started", "stopped", "released", "expired", "extended", "withdrawn"),
        *("requeued", "preempted", "late-report", "node-suspect", "node-lost", "node-alive", "node-draining", "paused"),
        *("move-requested", "move-advanced", "move-ended", "grown"),
    }
    assert told_to_the_ledger | told_by_it <= visited


def test_a_load_uses_what_can_be_asked_for() -> None:
    scenarios = [draw_scenario(seed) for seed in range(25)]
    asked = [
        event.request
        for scenario in scenarios
        for request in scenario.requests
        if isinstance(event := request.event_at(1), JobSubmitted | LeaseAsked)
    ]
    assert {request.strategy for request in asked} == {None, *Strategy} - {Strategy.NODE_SPECIFIC}
    assert {request.priority for request in asked} == {*Priority}
    assert {request.gang for request in asked} == {1, 2, 3}
    for name in ("team", "labels", "affinity", "anti_affinity", "group", "prefer", "require", "target", "deadline_ms"):
        assert any(getattr(request, name) for request in asked), name
    assert any(scenario.policy.quotas for scenario in scenarios)
    assert {scenario.rules.mode for scenario in scenarios if scenario.rules is not None} == {*SharingMode}
    assert {bool(scenario.local) for scenario in scenarios} == {True, False}


def test_the_same_seed_is_the_same_story_in_every_process() -> None:
    def history(hash_seed: str) -> str:
        words = [sys.executable, "-m", "tests.simulation", "--seed", str(SOME[3])]
        done = subprocess.run(
            words, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": hash_seed}
        )
        return done.stdout

    first = history("1")
    assert first.count("\n") > 100
    assert first == history("2")


@pytest.mark.slow
def test_other_seeds_are_other_stories() -> None:
    assert len({once(seed).fingerprint for seed in SOME}) == len(SOME)


def test_the_same_seed_is_the_same_story_twice_in_one_process() -> None:
    assert once(SOME[3]) == run_seed(SOME[3])


# ------------------------------------------------------------------ the invariants notice


CUT = a_fault(FaultKind.CUT, 60, 100)
STILL_RUNS = ("what the ledger calls free is free", "job.1 ended (lost), and still runs")


def caught(
    scenario: Scenario,
    *,
    machine: type[Machine] = Machine,
    orders: type[OrderExecutor[SimulatedTask]] = OrderExecutor,
    control: type[SimulatedControlPlane] = SimulatedControlPlane,
) -> RunReport:
    """Findings of the invariants about a broken state; none about a correct one."""
    fine = World(scenario).run()
    assert not fine.violated, failure_text(fine)
    return World(scenario, machine=machine, orders=orders, control=control).run()


class IgnoresHolds(Machine):
    """Runs on, whatever its hold."""

    def watch_hold(self, run: SimulatedProcess) -> None:
        """Look away."""


def test_a_machine_that_ignores_its_holds_is_caught() -> None:
    report = caught(a_scenario([a_job(10, 300)], [CUT]), machine=IgnoresHolds)
    assert (report.violated, report.detail) == (
        "what the ledger calls free is free",
        "job.1 ended (lost), and still runs",
    )


class HoldsOutliveBoots(Machine):
    """Takes a moment of the last boot's clock for one of this boot's."""

    @property
    def held_until(self) -> int:
        return self.hold_on_disk[0]


def test_a_hold_that_outlives_its_boot_is_caught() -> None:
    restarted = a_fault(FaultKind.MACHINE_DIES, 30, 5)
    jobs = [a_job(10, 15, uid="first", retries=1), a_job(50, 300)]
    report = caught(a_scenario(jobs, [restarted, CUT]), machine=HoldsOutliveBoots)
    assert (report.violated, report.detail) == (
        "what the ledger calls free is free",
        "job.1 ended (lost), and still runs",
    )


class PatientKiller(Machine):
    """Gives a job all of its grace, though its hold is over before."""

    def await_kill(self, run: SimulatedProcess) -> None:
        hold_ms, order = run.order.hold_ms, run.order
        run.order = replace(order, hold_ms=0)
        super().await_kill(run)
        run.order = replace(order, hold_ms=hold_ms)


def test_a_grace_that_outlasts_the_hold_is_caught() -> None:
    stubborn = a_job(10, 300, grace_s=200, heeds=False)
    report = caught(a_scenario([stubborn, a_cancel(58)], [CUT]), machine=PatientKiller)
    assert report.violated == "what the ledger calls free is free"


class NeverTooLate(OrderExecutor[SimulatedTask]):
    """Takes every order for a fresh one."""

    def is_in_time(self, order: StartAttemptOrder) -> bool:
        self.renew_hold(self._boot_ms() + order.hold_ms)
        return True


def test_an_agent_that_obeys_orders_that_came_too_late_is_caught() -> None:
    cut = a_fault(FaultKind.CUT, 60, 7)
    report = caught(a_scenario([a_job(60.1, 30)], [cut], hold_s=4), orders=NeverTooLate)
    assert report.violated in ("what runs is held in the ledger", "a job runs once at a time")


class VerySlowClock(Machine):
    """Its clock is off by ten times as much as the grace of a hold covers."""

    def skew(self, much: float) -> None:
        now, self._drift = self.boot_ms, round(10 * much * MAX_SKEW)
        self._uptime_ms, self._booted_at = now, self.queue.now


def test_a_clock_that_is_slower_than_the_grace_of_a_hold_covers_is_caught() -> None:
    slow = a_fault(FaultKind.CLOCK_SKEWED, 30, 130, strength=0.0)
    report = caught(a_scenario([a_job(10, 300, heeds=False)], [slow, CUT], hold_s=60), machine=VerySlowClock)
    assert (report.violated, report.detail) == (
        "what the ledger calls free is free",
        "job.1 ended (lost), and still runs",
    )


class Absentminded(OrderExecutor[SimulatedTask]):
    """Greets without telling what runs."""

    def listed(self) -> tuple[str, ...]:
        return ()


def test_an_agent_that_does_not_tell_what_runs_is_caught() -> None:
    blip = a_fault(FaultKind.AGENT_DIES, 40, 3)
    report = caught(a_scenario([a_job(10, 100)], [blip]), orders=Absentminded)
    assert (report.violated, report.detail) == (
        "what the ledger calls free is free",
        "job.1 ended (lost), and still runs",
    )


class GoesOnPreparing(OrderExecutor[SimulatedTask]):
    """Starts what was being prepared when its hold ran out, and does not tell of it either."""

    def renew_hold(self, until_boot_ms: int) -> None:
        self._attempts.hold(until_boot_ms)

    def listed(self) -> tuple[str, ...]:
        return tuple(one for one in super().listed() if one not in self._preparing)


def test_an_agent_that_starts_what_was_given_up_while_it_was_prepared_is_caught() -> None:
    cut = a_fault(FaultKind.CUT, 10.1, 100)
    stories = (a_scenario([a_job(10, 300, workdir=True)], [cut], seed=seed) for seed in (2, 0, 1))
    violated = (caught(scenario, orders=GoesOnPreparing).violated for scenario in stories)
    assert "what runs is held in the ledger" in violated


class ForgetsRefusals(OrderExecutor[SimulatedTask]):
    """Thinks again when an order comes a second time."""

    def has_refused(self, lease_id: str) -> bool:
        return False


def test_an_agent_that_obeys_an_order_it_has_refused_is_caught() -> None:
    control_dies = a_fault(FaultKind.CONTROL_DIES, 10.1, 18.5, node="")
    stories = (a_scenario([a_job(10, 300, workdir=True)], [control_dies], seed=seed) for seed in range(17, 20))
    violated = (caught(scenario, orders=ForgetsRefusals).violated for scenario in stories)
    assert any(one in ("what runs is held in the ledger", "a job runs once at a time") for one in violated)


STALLED, IGNORING = 0.2, 0.9
"""Strengths of a node that starts nothing: its spawner stands still, or its agent ignores orders."""


@pytest.mark.parametrize("strength", [STALLED, IGNORING])
def test_a_node_that_starts_nothing_loses_its_jobs_to_another_and_they_run_once(strength: float) -> None:
    black_hole = a_fault(FaultKind.STARTS_NOTHING, 5, 200, strength=strength)
    jobs = [a_job(10, 30, uid=f"job{number}", on="", retries=0) for number in range(8)]
    world = World(a_scenario(jobs, [black_hole]))
    report = world.run()
    assert not report.violated, failure_text(report)
    assert "requeued" in report.visited
    assert all(f"job{number}" in world.checker.over for number in range(8))


@pytest.mark.parametrize("strength", [STALLED, IGNORING])
def test_a_job_on_a_node_that_starts_nothing_can_be_cancelled_while_that_lasts(strength: float) -> None:
    black_hole = a_fault(FaultKind.STARTS_NOTHING, 5, 400, strength=strength)
    world = World(a_scenario([a_job(10, 30), a_cancel(20)], [black_hole]))
    report = world.run()
    assert not report.violated, failure_text(report)
    (ended,) = [line for line in world.log.lines if "stopped job" in line]
    assert float(ended.split()[0]) < 100


class StartsLate(Machine):
    """Its shims do not look at the time before they start a command."""

    def launch(self, order: StartAttemptOrder, start_by_boot_ms: int = 0) -> SimulatedProcess:
        return super().launch(order)


class NamesNothing(OrderExecutor[SimulatedTask]):
    """Its heartbeats do not say what may have started."""

    def starting(self, node: str, beat: int) -> tuple[str, ...]:
        return ()


def test_a_shim_that_starts_what_was_given_up_is_caught() -> None:
    stalled = a_fault(FaultKind.STARTS_NOTHING, 5, 100, strength=STALLED)
    jobs = [a_job(10, 300, uid=f"job{number}", on="", retries=0) for number in range(4)]
    report = caught(a_scenario(jobs, [stalled]), machine=StartsLate, orders=NamesNothing)
    assert report.violated == "a job runs once at a time"


class KnowsNoFence(OrderExecutor[SimulatedTask]):
    """Answers a stop of what it does not have as if nobody had ordered it, and names it as starting for ever."""

    def starting(self, node: str, beat: int) -> tuple[str, ...]:
        return ("job.1",)

    async def stop(self, order: StopAttemptOrder) -> None:
        if self._attempts.knows(order.lease_id):
            await super().stop(order)
            return
        if order.lease_id in self._preparing:
            preparing = self._preparing.pop(order.lease_id)
            assert preparing.task is not None
            preparing.task.cancel()
        self._outbox.ended(order.lease_id, 0, Outcome(Ending.NEVER_STARTED, detail="not known here"))


def test_a_job_that_never_comes_to_its_end_is_caught() -> None:
    story = a_scenario([a_job(10, 30, workdir=True), a_cancel(10.05)])
    assert caught(story, orders=KnowsNoFence).violated == "everything comes to its end"


class StartsStale(Machine):
    """Runs what it is told to under an older fence."""

    def launch(self, order: StartAttemptOrder, start_by_boot_ms: int = 0) -> SimulatedProcess:
        return super().launch(replace(order, fence=order.fence - 1), start_by_boot_ms)


def test_a_run_under_a_stale_fence_is_caught() -> None:
    report = caught(a_scenario([a_job(10, 30)]), machine=StartsStale)
    assert report.violated == "no stale fence acts"


class RunsTwice(Machine):
    """Starts everything once more."""

    def launch(self, order: StartAttemptOrder, start_by_boot_ms: int = 0) -> SimulatedProcess:
        super().launch(order, start_by_boot_ms)
        return super().launch(order, start_by_boot_ms)


def test_an_attempt_that_runs_twice_is_caught() -> None:
    report = caught(a_scenario([a_job(10, 30)]), machine=RunsTwice)
    assert (report.violated, report.detail) == ("an attempt runs once", "job.1 runs again, on ash")


def test_a_violated_invariant_is_reported_with_what_led_to_it_and_how_to_see_it_again() -> None:
    report = caught(a_scenario([a_job(10, 30)], seed=7), machine=RunsTwice)
    text = failure_text(report)
    assert "ash       job.1 begins under fence" in text
    assert f"seed 7, step {report.steps}, 10." in text
    assert " s: an attempt runs once: job.1 runs again, on ash" in text
    assert "python -m tests.simulation --seed 7" in text


# ------------------------------------------------------------------ stopped agents and shims


def watchdogs(at_s: float = 20, lasts_s: float = 150) -> Fault:
    return a_fault(FaultKind.WATCHDOGS_STOPPED, at_s, lasts_s)


class HasNoSecondWatcher(Machine):
    """Nobody ends what has outlived its hold while its shim is stopped."""

    def watch_for_shim(self, run: SimulatedProcess) -> None:
        """Look away."""


def test_with_agent_and_shims_stopped_jobs_end_with_their_hold_and_run_elsewhere_once() -> None:
    jobs = [a_job(10, 60, uid=f"job{number}", on="", retries=1) for number in range(6)]
    world = World(a_scenario(jobs, [watchdogs()]))
    report = world.run()
    assert not report.violated, failure_text(report)
    assert all(f"job{number}" in world.checker.over for number in range(6))
    assert report.runs > 6


def test_without_a_second_watcher_a_command_that_outlives_its_hold_is_caught() -> None:
    report = caught(a_scenario([a_job(10, 300)], [watchdogs()]), machine=HasNoSecondWatcher)
    assert (report.violated, report.detail) == STILL_RUNS


class WatchesLate(Machine):
    """Its second watcher takes a minute, longer than the machine needs to be declared lost."""

    def watch_for_shim(self, run: SimulatedProcess) -> None:
        if run.runs and run.shim_is_stopped:
            self.queue.after(60_000, lambda: super(WatchesLate, self).watch_for_shim(run))


def test_a_command_that_is_ended_long_after_its_hold_is_caught() -> None:
    cut = a_fault(FaultKind.AGENT_DIES, 20, 150)
    shims = a_fault(FaultKind.SHIMS_STOPPED, 20, 150)
    report = caught(a_scenario([a_job(10, 300)], [cut, shims]), machine=WatchesLate)
    assert report.violated in ("a command is gone soon after its hold", "what the ledger calls free is free")


def test_a_stopped_shim_that_goes_on_tells_the_end_it_has_missed() -> None:
    world = World(a_scenario([a_job(10, 20, retries=0)], [a_fault(FaultKind.SHIMS_STOPPED, 20, 40)]))
    report = world.run()
    assert not report.violated, failure_text(report)
    times = {line.split(maxsplit=2)[2]: float(line.split()[0]) for line in world.log.lines}
    assert times["job.1 is gone"] < 31, "it ends by itself"
    assert 60 <= times["stopped job exited"] < 61, "its shim tells that when it goes on"


# ------------------------------------------------------------------ floods of disks

FLOOD = a_fault(FaultKind.DISK_FLOODED, 20, 60)


class LetsDisksFill(Machine):
    """Its agent does not look at its disk."""

    def guard_disk(self) -> None:
        """Look away."""


class EndsTheInnocent(Machine):
    """Its agent ends whoever runs last on a full disk."""

    def guard_disk(self) -> None:
        last = [run for run in self.running if run.runs and run.stop is None][-1:]
        for run in last:
            run.written_bytes = FLOOD_BYTES + 1
        super().guard_disk()


def test_a_job_that_fills_the_disk_of_its_node_is_ended_and_the_others_finish() -> None:
    jobs = [a_job(10 + number / 10, 40, uid=f"job{number}", retries=0) for number in range(3)]
    world = World(a_scenario(jobs, [FLOOD]))
    report = world.run()
    assert not report.violated, failure_text(report)
    outcomes = {uid: run.real_outcome for uid, run in world.checker.ran.items()}
    endings = sorted(str(one.ending) for one in outcomes.values() if one is not None)
    assert endings == ["exited", "exited", "over_limit"]


def test_a_flood_that_nobody_ends_is_caught() -> None:
    report = caught(a_scenario([a_job(10, 60)], [FLOOD]), machine=LetsDisksFill)
    assert (report.violated, report.detail) == ("a job that fills the disk of its node is ended", "job.1 on ash")


def test_an_agent_that_ends_another_job_than_the_flood_is_caught() -> None:
    jobs = [a_job(10, 60, uid="flood"), a_job(11, 60, uid="innocent")]
    report = caught(a_scenario(jobs, [FLOOD]), machine=EndsTheInnocent)
    assert (report.violated, report.detail) == ("only the job that fills a disk is ended for it", "innocent.1")


# ------------------------------------------------------------------ readers

CROWD = a_fault(FaultKind.READERS, 20, 60, node="", strength=1.0)


class AnswersReadsFirst(SimulatedControlPlane):
    """Has requests wait while anybody reads."""

    def _in_turn(self, entries: list[WaitingEntry]) -> list[WaitingEntry]:
        return sorted(entries, key=lambda entry: entry.question is None)


class RendersAllAtOnce(SimulatedControlPlane):
    """Answers all who wait in one go, and hears nobody meanwhile."""

    def _is_long(self) -> bool:
        return False


def test_jobs_come_to_their_end_while_a_crowd_reads() -> None:
    world = World(a_scenario([a_job(15, 20, uid=f"job{number}", on="") for number in range(4)], [CROWD], hold_s=8))
    report = world.run()
    assert not report.violated, failure_text(report)
    assert all(f"job{number}" in world.checker.over for number in range(4))


def test_a_control_plane_that_answers_readers_first_is_caught() -> None:
    report = caught(a_scenario([a_job(30, 20)], [CROWD]), control=AnswersReadsFirst)
    assert report.violated == "no read that came later keeps a request waiting"


def test_a_control_plane_that_hears_no_heartbeat_while_it_renders_is_caught() -> None:
    crowd = a_fault(FaultKind.READERS, 20, 300, node="", strength=1.0)
    report = caught(a_scenario([a_job(10, 200)], [crowd], hold_s=8), control=RendersAllAtOnce)
    assert report.violated == "a healthy agent's holds are renewed"


# ------------------------------------------------------------------ the ledger's own invariants are checked, too


class TamperedLedger:
    """A ledger that is changed behind the reactor's back."""

    def __init__(self) -> None:
        self.checker = InvariantChecker(lambda who, what: None, 1_000, lambda node: 0)
        self.ledger = Ledger()

    def change(self, *rows: Row) -> None:
        self.checker.about_to(self.ledger, TimePassed(), 1_000)
        self.ledger.apply(rows)
        self.checker.stepped(StepResult([*rows]))


def test_a_fence_that_goes_back_is_caught() -> None:
    tampered = TamperedLedger()
    tampered.change(Counter("fence", 5))
    with pytest.raises(InvariantViolated, match="fences only grow: assert counted == sorted"):
        tampered.change(Counter("fence", 4))


def test_a_fence_may_go_back_with_what_could_not_be_committed() -> None:
    tampered = TamperedLedger()
    tampered.change(Counter("fence", 5))
    tampered.checker.committed([])
    tampered.change(Counter("fence", 7))
    tampered.ledger = Ledger([Counter("fence", 5)])
    tampered.checker.reloaded(tampered.ledger, 1_000, anew=False)
    tampered.change(Counter("fence", 6))


def test_what_was_committed_and_is_not_there_after_a_restart_is_caught() -> None:
    tampered = TamperedLedger()
    tampered.change(Counter("fence", 5))
    tampered.checker.committed([])
    with pytest.raises(InvariantViolated, match="what was committed is stored: 1 rows were, 0 are there"):
        tampered.checker.reloaded(Ledger(), 1_000, anew=True)


@pytest.mark.parametrize(
    ("wrong", "detail"),
    [
        ({}, ""),
        ({"failed_starts": 1, "start_failed_at_ms": 1_000}, "j1 is placed on n1, which rests"),
        ({"disk_full": True}, "j1 is placed on n1, whose disk is full"),
    ],
    ids=["fine", "rests", "full"],
)
def test_work_for_a_black_hole_or_a_full_disk_is_caught(wrong: dict[str, Any], detail: str) -> None:
    placed = Ready(a_node("n1", cores=4))
    placed.handle(LeaseAsked(a_request("j1", cores=1)))
    lease = placed.ledger.leases["j1"]
    tampered = TamperedLedger()
    others = [row for row in placed.ledger.rows() if row != lease and row.kind != "observation"]
    seen = replace(placed.ledger.observations["n1"], at_ms=1_000, **wrong)
    tampered.change(*others, seen)
    if not detail:
        tampered.change(lease)
        return
    with pytest.raises(InvariantViolated, match=f"a black hole and a full disk get nothing new: {detail}"):
        tampered.change(lease)


def test_a_change_that_nobody_was_told_of_is_caught() -> None:
    tampered = TamperedLedger()
    tampered.ledger.apply([Counter("fence", 5)])
    with pytest.raises(InvariantViolated, match="what is stored is the ledger"):
        tampered.change(Counter("epoch", 1))
