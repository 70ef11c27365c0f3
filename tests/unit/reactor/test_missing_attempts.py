"""That an agent has no trace of an attempt is no proof that it is over: never two live attempts of one job."""

from __future__ import annotations

import pytest

from distributed_grid.domain.events import (
    AttemptsGone,
    AttemptsListed,
    ControlPlaneStarted,
    Event,
    NodeStopped,
    TimePassed,
)
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import VOLATILE
from distributed_grid.domain.states import JobState
from distributed_grid.reactor import step
from distributed_grid.reactor.decision import MAX_LEASES_PER_STEP
from distributed_grid.reactor.nodes import HOLD_GRACE_MS
from tests.support.builders import Scenario, a_node, a_request

HOLD = 60


@pytest.fixture
def far():
    """A node of another machine whose agent runs one job that may be retried."""
    scenario = Scenario(a_node("gpu2", cores=4, hold_s=HOLD))
    scenario.handle(AttemptsListed("gpu2", (), "boot-1", "dir-1"))
    scenario.submit(a_request("r1", cores=4), retries=1, starts=True)
    yield scenario
    scenario.ledger.check()


@pytest.fixture
def here():
    """The same on the control plane's own machine, which has no hold."""
    scenario = Scenario(a_node("gpu2", cores=4))
    scenario.handle(AttemptsListed("gpu2", (), "boot-1", "dir-1"))
    scenario.submit(a_request("r1", cores=4), retries=1, starts=True)
    yield scenario
    scenario.ledger.check()


def attempts(scenario: Scenario) -> int:
    return len(scenario.job("r1").attempts)


def test_an_agent_with_another_directory_ends_nothing_until_the_hold_it_may_have_is_over(far: Scenario) -> None:
    far.handle(AttemptsListed("gpu2", (), "boot-1", "dir-2"))
    for _ in range((HOLD * 1000 + HOLD_GRACE_MS) // 2000 - 1):
        far.advance(2)  # the new agent is heard all the time
        assert (far.job("r1").state, attempts(far)) == (JobState.RUNNING, 1)
    far.advance(4)
    assert (far.job("r1").state, attempts(far)) == (JobState.ASSIGNED, 2)
    attempt = far.job("r1").attempt
    assert attempt is not None
    assert attempt.machine == "dir-2"


def test_an_end_that_could_not_be_stored_is_decided_again(far: Scenario) -> None:
    far.handle(AttemptsListed("gpu2", (), "boot-1", "dir-2"))
    for _ in range((HOLD * 1000 + HOLD_GRACE_MS) // 2000 - 1):
        far.advance(2)
    stored = [row for row in far.ledger.rows() if row.kind not in VOLATILE]
    far.advance(4)
    assert attempts(far) == 2
    observed = [row for row in far.ledger.rows() if row.kind in VOLATILE]
    far.ledger = Ledger(stored)
    far.ledger.apply(observed)
    assert attempts(far) == 1
    far.advance(2)
    assert attempts(far) == 2


def test_greeting_again_and_again_does_not_keep_it_for_ever(far: Scenario) -> None:
    for _ in range(HOLD // 2 + 2):
        far.handle(AttemptsListed("gpu2", (), "boot-1", "dir-2"))
        far.advance(2)
    assert attempts(far) == 2


def test_another_boot_proves_it_only_for_the_same_machine_and_directory(far: Scenario) -> None:
    far.handle(AttemptsListed("gpu2", (), "boot-2", "dir-2"))
    assert (far.job("r1").state, attempts(far)) == (JobState.RUNNING, 1)
    far.handle(AttemptsListed("gpu2", (), "boot-2", "dir-1"))
    assert attempts(far) == 2


def test_an_agent_that_lost_its_record_is_not_believed_either(far: Scenario) -> None:
    far.handle(AttemptsListed("gpu2", (), "boot-1", "dir-1"))
    assert (far.job("r1").state, attempts(far)) == (JobState.RUNNING, 1)


def test_the_agent_that_runs_it_comes_back_and_nothing_was(far: Scenario) -> None:
    far.handle(AttemptsListed("gpu2", (), "boot-1", "dir-2"))
    far.advance(30)
    far.handle(AttemptsListed("gpu2", ("r1.1",), "boot-1", "dir-1"))
    far.advance(HOLD + 10)
    assert (far.job("r1").state, attempts(far)) == (JobState.RUNNING, 1)


def test_a_control_plane_that_was_restarted_waits_a_whole_hold_again(far: Scenario) -> None:
    far.handle(AttemptsListed("gpu2", (), "boot-1", "dir-2"))
    far.advance(HOLD - 5)
    far.handle(ControlPlaneStarted(9))
    far.handle(AttemptsListed("gpu2", (), "boot-1", "dir-2"))
    far.heartbeat("gpu2")
    far.advance(HOLD - 5)
    assert attempts(far) == 1
    far.advance(10)
    assert attempts(far) == 2


def test_what_another_agent_was_ordered_and_has_not_reported_is_kept_as_long(far: Scenario) -> None:
    far.end("r1")
    far.submit(a_request("r2", cores=4))
    far.handle(AttemptsListed("gpu2", (), "boot-1", "dir-2"))
    far.advance(HOLD - 5)
    assert far.job("r2").state is JobState.ASSIGNED
    far.advance(10)
    assert "r2" not in far.ledger.jobs


def test_stopping_the_new_agent_does_not_end_what_the_old_one_runs(far: Scenario) -> None:
    far.handle(AttemptsListed("gpu2", (), "boot-1", "dir-2"))
    far.handle(NodeStopped("gpu2"))
    assert far.job("r1").state is JobState.RUNNING
    far.advance(HOLD + 3, heard=False)
    assert far.job("r1").state is JobState.QUEUED


def test_on_this_machine_what_is_seen_to_run_is_kept_and_what_is_not_is_lost(here: Scenario) -> None:
    here.handle(AttemptsListed("gpu2", (), "boot-1", "dir-2", running=("r1.1",)))
    here.advance(100_000)
    assert (here.job("r1").state, attempts(here)) == (JobState.RUNNING, 1)
    here.handle(AttemptsGone("gpu2", ("r1.1", "other.1")))
    assert attempts(here) == 2


def test_on_this_machine_what_nobody_sees_is_lost_at_once(here: Scenario) -> None:
    here.handle(AttemptsListed("gpu2", (), "boot-1", "dir-2"))
    assert attempts(here) == 2


def test_only_what_was_missing_can_be_gone(here: Scenario) -> None:
    here.handle(AttemptsGone("gpu2", ("r1.1",)))
    assert (here.job("r1").state, attempts(here)) == (JobState.RUNNING, 1)


def test_what_is_lost_at_once_is_given_up_so_much_in_one_step() -> None:
    jobs = 2 * MAX_LEASES_PER_STEP + 1
    scenario = Scenario(a_node("gpu2", cores=jobs, hold_s=HOLD))
    scenario.handle(AttemptsListed("gpu2", (), "boot-1", "dir-1"))
    for number in range(jobs):
        scenario.submit(a_request(f"r{number}", cores=1), starts=True)
    listed = step(scenario.ledger, AttemptsListed("gpu2", (), "boot-2", "dir-1"), scenario.now)
    assert (len(scenario.ledger.jobs), listed.later) == (jobs - MAX_LEASES_PER_STEP, [])
    left: list[int] = []
    ahead: list[Event] = [TimePassed()]
    while ahead:
        ahead = step(scenario.ledger, ahead[0], scenario.now).later
        left.append(len(scenario.ledger.jobs))
    assert left == [1, 0]
    scenario.ledger.check()


@pytest.mark.parametrize("ordered", [False, True])
def test_what_was_assigned_and_never_ordered_is_the_new_agents_and_what_was_ordered_may_run(ordered: bool) -> None:
    scenario = Scenario(a_node("gpu2", cores=4, hold_s=HOLD))
    scenario.handle(AttemptsListed("gpu2", (), "boot-1", "dir-1"))
    since_ms = scenario.now
    scenario.advance(1)
    scenario.submit(a_request("r1", cores=4))
    attempt = scenario.job("r1").attempt
    assert attempt is not None
    sent = (attempt.lease_id,) if ordered else ()
    scenario.handle(AttemptsListed("gpu2", (), "boot-2", "dir-2", ordered=sent, ordered_since_ms=since_ms))
    again = scenario.job("r1").attempt
    assert again is not None
    assert (again.number, again.machine) == (1, "dir-1" if ordered else "dir-2")
    for _ in range(HOLD):
        scenario.advance(2)
    assert ("r1" in scenario.ledger.jobs) is not ordered
    scenario.ledger.check()
