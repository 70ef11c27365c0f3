"""Workers under every fault: no sequence of decisions, lost answers, crashes and clock jumps exceeds a budget or leaves
a machine behind."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from distributed_grid.domain.events import WorkerEndAnnounced
from distributed_grid.domain.workers import WorkerRules
from distributed_grid.scheduling.scaling.budget import DAY_MS, HOUR_MS, budget_state
from tests.support.worker_model import WorkerModel

CREATE_FAULTS = ["", "", "lose_before", "lose_after", "throttle", "no_capacity", "refuse", "fail", "late"]
OTHER_FAULTS = ["", "", "lose_before", "lose_after", "throttle", "fail"]
HOUR_MICRO, DAY_MICRO = 1_300_000, 4_000_000


class WorkerMachine(RuleBasedStateMachine):
    """Random decisions and faults."""

    @initialize(
        visible_after=st.sampled_from([0.0, 10.0, 29.0]),
        stops_in=st.sampled_from([0.0, 20.0, 200.0]),
        offset_hours=st.sampled_from([0, 1, -8]),
        joins=st.sampled_from([True, True, False]),
        forgets=st.booleans(),
    )
    def begin(self, visible_after: float, stops_in: float, offset_hours: int, joins: bool, forgets: bool) -> None:
        self.joins = joins
        rules = WorkerRules(budget_per_hour_micro=HOUR_MICRO, budget_per_day_micro=DAY_MICRO)
        self.model = WorkerModel(rules, visible_after=visible_after, stops_in=stops_in, forgets=forgets)
        self.model.wall_offset_ms = offset_hours * HOUR_MS
        self.cost_by_day: dict[int, int] = {}
        self.priced_until = self.model.now

    @rule(
        worker_type=st.sampled_from(["cpu", "cpu", "cpu", "gpu"]),
        count=st.integers(1, 4),
        faults=st.lists(st.sampled_from(CREATE_FAULTS), max_size=4),
        rounds=st.integers(1, 3),
    )
    def want(self, worker_type: str, count: int, faults: list[str], rounds: int) -> None:
        for _ in range(count):
            self.model.want(worker_type)
        self.model.cloud.faults.waiting["create"] = list(faults)
        for _ in range(rounds):
            self.model.perform()
            self.every_machine_has_its_row()
            self.model.pass_time(2_000)

    @rule(which=st.integers(0, 9), ms=st.sampled_from([0, 0, 55_000]))
    def terminate(self, which: int, ms: int) -> None:
        ids = list(self.model.ledger.workers)
        if ids:
            self.model.terminate(ids[which % len(ids)])
            self.run_for(ms)

    @rule(
        create=st.lists(st.sampled_from(CREATE_FAULTS), max_size=3),
        terminate=st.lists(st.sampled_from(OTHER_FAULTS), max_size=3),
        describe=st.lists(st.sampled_from(OTHER_FAULTS), max_size=2),
        listing=st.lists(st.sampled_from(OTHER_FAULTS), max_size=2),
    )
    def script(self, create: list[str], terminate: list[str], describe: list[str], listing: list[str]) -> None:
        faults = {"create": create, "terminate": terminate, "describe": describe, "list": listing}
        self.model.cloud.faults.waiting = {name: list(found) for name, found in faults.items()}

    @rule(dies_at=st.sampled_from(["recorded", "called"]))
    def die(self, dies_at: str) -> None:
        """The control plane is killed in the middle of its next call."""
        self.model.perform(dies_at=dies_at)

    @rule(which=st.integers(0, 9), ms=st.sampled_from([None, 0, 30_000, 120_000]), withdrawn=st.booleans())
    def announce_end(self, which: int, ms: int | None, withdrawn: bool) -> None:
        """An agent says that its machine is taken away, or stays after all."""
        ids = list(self.model.ledger.workers)
        if ids:
            self.model.handle(WorkerEndAnnounced(ids[which % len(ids)], "spot notice", ms, withdrawn=withdrawn))

    @rule()
    def restart(self) -> None:
        self.model.restart()

    @rule(ms=st.sampled_from([1_000, 5_000, 31_000, 31_000, 61_000, 310_000, 1_000_000, 4 * HOUR_MS, 4 * HOUR_MS]))
    def wait(self, ms: int) -> None:
        """Time passes, and the control plane does what it does in every tick."""
        self.run_for(ms)

    @rule(hours=st.sampled_from([-26, -2, 1, 3, 25]))
    def jump(self, hours: int) -> None:
        """The wall clock is set."""
        self.count_cost()
        self.model.wall_offset_ms += hours * HOUR_MS

    def run_for(self, ms: int) -> None:
        end = self.model.now + ms
        while self.model.now < end:
            self.model.perform()
            self.model.compare()
            if self.joins:
                self.model.join()
            self.model.pass_time(min(max(ms // 12, 1000), 120_000, end - self.model.now))
            self.count_cost()
            self.every_machine_has_its_row()

    def count_cost(self) -> None:
        """Real costs of the existing machines, by the day that the grid counts on."""
        model = self.model
        day = budget_state(model.ledger, model.now, model.wall_ms).day
        elapsed = model.now - self.priced_until
        micro = sum(one["price_micro"] * elapsed // HOUR_MS for one in model.cloud.existing())
        self.cost_by_day[day] = self.cost_by_day.get(day, 0) + micro
        self.priced_until = model.now

    @precondition(lambda self: hasattr(self, "model"))
    @invariant()
    def every_machine_has_its_row(self) -> None:
        existing = {one["worker_id"] for one in self.model.cloud.existing()}
        known = frozenset() if self.model.cloud.forgets else self.model.cloud.rows.keys()
        existing |= {order.worker_id for _, _, order in self.model.late} - known
        assert existing <= self.model.ledger.workers.keys(), "a machine that no worker stands for"

    @precondition(lambda self: hasattr(self, "model"))
    @invariant()
    def no_hour_costs_more_than_the_budget(self) -> None:
        assert sum(one["price_micro"] for one in self.model.cloud.existing()) <= HOUR_MICRO

    @precondition(lambda self: hasattr(self, "model"))
    @invariant()
    def no_day_costs_more_than_the_budget_but_with_an_alarm(self) -> None:
        self.count_cost()
        alarmed = any(record.type == "budget-exceeded" for record in self.model.records)
        unanswered = self.model.cloud.stops_in > 60 or any(
            call.startswith(("terminate", "describe")) and len(call.split()) > 2
            for call in self.model.cloud.faults.calls
        )
        for day, micro in self.cost_by_day.items():
            assert micro <= DAY_MICRO or (alarmed and unanswered), f"day {day} cost {micro}"

    @precondition(lambda self: hasattr(self, "model"))
    @invariant()
    def the_ledger_is_consistent(self) -> None:
        self.model.ledger.check()

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        self.model.settle()
        assert not self.model.ledger.workers, "a worker that is never proven gone"
        assert not self.model.cloud.existing(), "a machine is left"


WorkerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
test_no_sequence_exceeds_a_budget_or_leaves_a_machine_behind = WorkerMachine.TestCase


def test_the_day_never_goes_back_with_the_wall_clock() -> None:
    model = WorkerModel(WorkerRules(budget_per_day_micro=10 * DAY_MICRO))
    model.want()
    model.perform()
    model.pass_time(HOUR_MS)
    model.check()
    spent = budget_state(model.ledger, model.now, model.wall_ms)
    model.wall_offset_ms -= DAY_MS
    after = budget_state(model.ledger, model.now, model.wall_ms)
    assert (after.day, after.spent_micro) == (spent.day, spent.spent_micro)
    assert spent.spent_micro >= 100_000
