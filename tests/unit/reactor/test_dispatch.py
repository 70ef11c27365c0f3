"""Deciders of all events and follow-ups; the budget of reports of an agent that reports without end."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from distributed_grid.domain.events import AttemptEnded, AttemptPaused, EpochReported, Event, NodeDeclared
from distributed_grid.domain.followups import Followup
from distributed_grid.domain.states import JobState
from distributed_grid.reactor.dispatch import DECIDERS, MAX_REASON_CHARS, REPORT_BURST, REPORT_REFILL_MS
from tests.support.builders import Scenario, a_node, a_request, an_exit

LIES = 10 * REPORT_BURST


@pytest.fixture
def scenario() -> Scenario:
    return Scenario(a_node("gpu1"), a_node("gpu2"))


def late(number: int, node: str = "gpu1", detail: str = "") -> AttemptEnded:
    return AttemptEnded(
        uid=f"nobody-{number}", number=1, fence=1, outcome=replace(an_exit(), detail=detail), nodes=(node,)
    )


def test_every_event_and_every_follow_up_has_a_decider() -> None:
    assert set(DECIDERS) == {*Event.__subclasses__(), *Followup.__subclasses__()}


def test_late_reports_of_one_node_are_bounded_and_the_rest_is_counted(scenario: Scenario) -> None:
    records = [record for n in range(LIES) for record in scenario.handle(late(n)).records]
    assert Counter(record.type for record in records) == {"late-report": REPORT_BURST}
    assert scenario.handle(late(LIES)).records == []
    scenario.advance(REPORT_REFILL_MS / 1000)
    summary, record = scenario.handle(late(LIES + 1)).records
    assert (summary.type, summary.node, summary.data) == ("reports-omitted", "gpu1", {"count": LIES + 1 - REPORT_BURST})
    assert (record.type, record.subject) == ("late-report", f"nobody-{LIES + 1}")
    assert scenario.handle(late(LIES + 2)).records == []


def test_what_another_node_reports_is_recorded_all_the_same(scenario: Scenario) -> None:
    for n in range(LIES):
        scenario.handle(late(n))
    assert [record.node for record in scenario.handle(late(0, "gpu2")).records] == ["gpu2"]


def test_what_happens_to_jobs_is_recorded_whatever_else_the_node_reports(scenario: Scenario) -> None:
    for n in range(LIES):
        scenario.handle(late(n))
    scenario.submit(a_request("r1", require=("gpu1",)), starts=True)
    assert "stopped" in {record.type for record in scenario.end("r1").records}


def test_pauses_are_bounded_and_happen_all_the_same(scenario: Scenario) -> None:
    scenario.submit(a_request("r1", require=("gpu1",)), starts=True)
    attempt = scenario.job("r1").attempt
    assert attempt is not None
    written, states = 0, []
    for n in range(LIES):
        event = AttemptPaused(
            uid="r1", number=attempt.number, fence=attempt.fence, paused=n % 2 == 0, detail="its owner", nodes=("gpu1",)
        )
        written += len(scenario.handle(event).records)
        states.append(scenario.job("r1").state)
    assert written == REPORT_BURST
    assert states[-2:] == [JobState.PAUSED, JobState.RUNNING]


def test_declarations_and_epochs_are_bounded(scenario: Scenario) -> None:
    node, written = scenario.ledger.nodes["gpu1"], 0
    for n in range(LIES):
        caps = a_node("gpu1", cores=4 + n % 2).capacity
        written += len(scenario.handle(NodeDeclared(replace(node, capacity=caps))).records)
        written += len(scenario.handle(EpochReported("gpu1", 10 + 2 * n)).records)
    assert written == REPORT_BURST
    assert scenario.ledger.nodes["gpu1"].epoch == 10 + 2 * (LIES - 1) + 1


def test_a_long_reason_is_cut(scenario: Scenario) -> None:
    (record,) = scenario.handle(late(0, detail="x" * 8000)).records
    assert len(record.reason) == MAX_REASON_CHARS
