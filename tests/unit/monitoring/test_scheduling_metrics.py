"""How well requests are served, out of an audit trail whose every number is known."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.adapters.stores.sqlite import SqliteStore
from distributed_grid.api.answers.metrics import SchedulingFigures
from distributed_grid.control.batch import batch_of, refusal_record
from distributed_grid.domain.events import JobCancelled, LeaseAsked, LeaseExtended
from distributed_grid.domain.jobs import Attempt, Ending, Job, Outcome
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.rows import Row
from distributed_grid.domain.states import JobState
from distributed_grid.errors import Refused
from distributed_grid.monitoring.prometheus import exposition, read_ledger
from distributed_grid.monitoring.scheduling_metrics import (
    DAY_MS,
    HOUR_MS,
    MAX_FIRST_EVENTS,
    SchedulingMetrics,
)
from distributed_grid.reactor import Record
from distributed_grid.reactor.decision import RecordType
from tests.support.builders import NOW, a_command, a_request

NOTHING: SchedulingFigures = {
    "jobs_measured": 0,
    "task_time_mean_seconds": None,
    "task_time_p95_seconds": None,
    "resource_efficiency": None,
    "granted": 0,
    "refused": 0,
    "withdrawn": 0,
    "allocation_success_rate": None,
    "rebalances_per_hour": 0,
}


class Trail:
    """A store whose history a test writes line by line."""

    def __init__(self, store: InMemoryStore | SqliteStore | None = None) -> None:
        self.store = store or InMemoryStore()
        self.now = NOW
        self._seq = 0
        self._jobs = 0

    def note(self, *records: Record, rows: tuple[Row, ...] = ()) -> None:
        self.store.commit(batch_of(rows, records, self.now, self._seq))
        self._seq += len(records)

    def tell(self, *types: RecordType, user: str = "ada", **data: str | int | list[str]) -> None:
        self.note(*(Record(type_, user, "auto-1" if user == GRID_USER else "r1", data=dict(data)) for type_ in types))

    def end_job(self, *, ran_s: float = 10, cpu_s: float = 5, cores: float = 1, held_s: float | None = None) -> None:
        """A job of one attempt is over; it held its cores for as long as it ran, unless given."""
        self._jobs += 1
        outcome = Outcome(Ending.EXITED, 0, cpu_ms=round(1000 * cpu_s))
        held_ms = round(1000 * (ran_s if held_s is None else held_s))
        begun, assigned = self.now - round(1000 * ran_s), self.now - held_ms
        attempt = Attempt(
            number=1,
            lease_id=f"j{self._jobs}.1",
            node="here",
            fence=1,
            assigned_at_ms=assigned,
            started_at_ms=begun,
            ended_at_ms=self.now,
            outcome=outcome,
        )
        self.note_end(attempt, outcome, cores=cores)

    def note_end(self, attempt: Attempt | None, outcome: Outcome, *, cores: float = 1) -> None:
        uid = f"j{self._jobs}"
        request = a_request(uid, cores=cores, memory_gb=1)
        job = Job(
            uid=uid,
            id=f"job-{uid}",
            command=a_command(),
            request=request,
            submitted_at_ms=1,
            state=JobState.ENDED,
            attempts=(attempt,) if attempt else (),
        )
        self.note(
            Record("stopped", "ada", uid, data={"ending": str(outcome.ending)}),
            rows=(replace(job, outcome=outcome, ended_at_ms=self.now),),
        )

    def figures(self) -> SchedulingFigures:
        return SchedulingMetrics(self.store).read(self.now)


def test_before_anything_has_happened_nothing_is_claimed() -> None:
    assert Trail().figures() == NOTHING


def test_task_times_are_those_of_the_jobs_that_ran() -> None:
    trail = Trail()
    for seconds in range(1, 21):
        trail.end_job(ran_s=seconds)
    figures = trail.figures()
    assert figures["jobs_measured"] == 20
    assert figures["task_time_mean_seconds"] == 10.5
    assert figures["task_time_p95_seconds"] == 19.0


def test_all_attempts_of_a_job_count_together() -> None:
    trail = Trail()
    trail._jobs = 1
    first = Attempt(
        number=1,
        lease_id="j1.1",
        node="here",
        fence=1,
        assigned_at_ms=NOW - 9_000,
        started_at_ms=NOW - 8_000,
        ended_at_ms=NOW - 5_000,
        outcome=Outcome(Ending.PREEMPTED, cpu_ms=2_000),
    )
    last = Attempt(
        number=2,
        lease_id="j1.2",
        node="here",
        fence=2,
        assigned_at_ms=NOW - 2_000,
        started_at_ms=NOW - 1_000,
        ended_at_ms=NOW,
        outcome=Outcome(Ending.EXITED, 0, cpu_ms=1_000),
    )
    request = a_request("j1", cores=2)
    job = Job(
        uid="j1",
        id="job-j1",
        command=a_command(),
        request=request,
        submitted_at_ms=1,
        state=JobState.ENDED,
        attempts=(first, last),
        outcome=last.outcome,
        ended_at_ms=NOW,
    )
    trail.note(Record("stopped", "ada", "j1"), rows=(job,))
    figures = trail.figures()
    assert figures["task_time_mean_seconds"] == 3 + 1
    assert figures["resource_efficiency"] == 3 / (2 * (4 + 2))


def test_a_job_that_never_ran_has_no_time_and_no_efficiency() -> None:
    trail = Trail()
    trail.note_end(None, Outcome(Ending.WAITED_TOO_LONG))
    assert trail.figures() == NOTHING


def test_efficiency_is_cpu_time_of_core_time_and_leaves_out_who_held_no_cores() -> None:
    trail = Trail()
    trail.end_job(ran_s=10, cpu_s=15, cores=2)
    trail.end_job(ran_s=8, cpu_s=4, cores=1, held_s=10)
    trail.end_job(ran_s=10, cpu_s=10, cores=0)
    assert trail.figures()["resource_efficiency"] == round((15 + 4) / (20 + 10), 4)
    assert trail.figures()["jobs_measured"] == 3


def test_the_success_rate_is_granted_of_all_that_was_settled() -> None:
    trail = Trail()
    trail.tell("requested", "granted", "granted", "granted", "refused", "withdrawn", "queued", "released")
    figures = trail.figures()
    assert (figures["granted"], figures["refused"], figures["withdrawn"]) == (3, 1, 1)
    assert figures["allocation_success_rate"] == 0.6


def test_refusing_to_extend_or_to_cancel_refuses_no_resources() -> None:
    trail = Trail()
    events = (LeaseExtended("r1", "ada", 1), JobCancelled("r1", "ada"), LeaseAsked(a_request("r2")))
    for event in events:
        record = refusal_record(event, Refused("no"))
        assert record is not None
        trail.note(record)
    assert trail.figures()["refused"] == 1


def test_automatic_leases_are_no_users_success() -> None:
    trail = Trail()
    trail.tell("granted", user=GRID_USER)
    trail.tell("granted", "refused")
    assert trail.figures()["allocation_success_rate"] == 0.5


def test_rebalances_are_those_of_the_last_hour_that_changed_something() -> None:
    trail = Trail()
    trail.tell("rebalanced", user=GRID_USER, action="asked")
    trail.now += HOUR_MS + 120_000
    trail.tell("rebalanced", user=GRID_USER, action="asked")
    trail.tell("rebalanced", user=GRID_USER, action="given_back")
    trail.tell("rebalanced", user=GRID_USER, action="refused")
    assert trail.figures()["rebalances_per_hour"] == 2


def test_events_older_than_a_day_are_forgotten() -> None:
    trail = Trail()
    metrics = SchedulingMetrics(trail.store)
    trail.end_job()
    trail.tell("granted")
    assert metrics.read(trail.now)["granted"] == 1
    trail.now += DAY_MS + 120_000
    assert metrics.read(trail.now) == NOTHING
    assert trail.figures() == NOTHING


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_reading_again_counts_nothing_twice_and_a_restart_forgets_nothing(kind: str, tmp_path: Path) -> None:
    dice = random.Random(4)
    trail = Trail(SqliteStore(tmp_path / "grid.db") if kind == "sqlite" else None)
    metrics = SchedulingMetrics(trail.store)
    outcomes: dict[str, RecordType] = {"granted": "granted", "refused": "refused", "withdrawn": "withdrawn"}
    for _ in range(150):
        trail.now += dice.randrange(60_000)
        step = dice.choice(("granted", "refused", "withdrawn", "rebalanced", "job", "read"))
        if step == "job":
            trail.end_job(ran_s=dice.uniform(0.1, 100), cpu_s=dice.uniform(0, 50))
        elif step == "read":
            metrics.read(trail.now)
        elif step == "rebalanced":
            trail.tell("rebalanced", user=GRID_USER, action="asked")
        else:
            trail.tell(outcomes[step])
    figures = metrics.read(trail.now)
    assert figures["granted"] > 10
    assert figures["jobs_measured"] > 10
    assert metrics.read(trail.now) == figures
    assert trail.figures() == figures
    trail.store.close()


def test_only_so_much_is_kept_and_the_newest_counts() -> None:
    trail = Trail()
    metrics = SchedulingMetrics(trail.store, max_jobs=50)
    for _ in range(50):
        trail.end_job(ran_s=100)
    assert metrics.read(trail.now)["task_time_p95_seconds"] == 100
    for _ in range(50):
        trail.end_job(ran_s=1)
    figures = metrics.read(trail.now)
    assert (figures["jobs_measured"], figures["task_time_mean_seconds"]) == (50, 1)
    assert SchedulingMetrics(trail.store, max_jobs=50).read(trail.now) == figures


def test_a_long_history_is_begun_near_its_end() -> None:
    trail = Trail()
    for _ in range(3):
        trail.note(*(Record("refused", "ada", f"r{number}") for number in range(MAX_FIRST_EVENTS // 2)))
    trail.tell("granted")
    figures = trail.figures()
    assert (figures["granted"], figures["refused"]) == (1, MAX_FIRST_EVENTS - 1)


def test_every_event_between_two_reads_is_counted() -> None:
    trail = Trail()
    metrics = SchedulingMetrics(trail.store)
    metrics.read(trail.now)
    trail.note(*(Record("granted", "ada", f"r{number}") for number in range(2_500)))
    assert metrics.read(trail.now)["granted"] == 2_500


def test_the_figures_are_gauges_for_prometheus_and_absent_where_nobody_knows() -> None:
    trail = Trail()
    reading = read_ledger(Ledger(), trail.now)

    def gauges() -> dict[str, float]:
        text = exposition(reading, {}, {}, figures=trail.figures()).decode()
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return {sample.name: sample.value for sample in samples if not sample.labels}

    assert "grid_task_time_mean_seconds" not in gauges()
    assert gauges()["grid_rebalances_per_hour"] == 0
    trail.end_job(ran_s=2, cpu_s=1)
    trail.tell("granted", "refused")
    shown = gauges()
    assert shown["grid_task_time_mean_seconds"] == shown["grid_task_time_p95_seconds"] == 2
    assert shown["grid_resource_efficiency_ratio"] == 0.5
    assert shown["grid_allocation_success_ratio"] == 0.5
