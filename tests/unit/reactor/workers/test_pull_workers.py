"""Pull workers: registered without an agent, they ask for their tasks and report them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from distributed_grid.domain.events import (
    AttemptEnded,
    BlockAsked,
    ControlPlaneStarted,
    HeartbeatReceived,
    JobSubmitted,
    LeaseAsked,
    NodeDeclared,
    NodeDrained,
    PullWorkerRegistered,
    ReassessmentRequested,
    TaskAsked,
    TaskAskWithdrawn,
    TimePassed,
)
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.jobs import Command, Ending, Job, Outcome
from distributed_grid.domain.leases import NodeKind
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import PULL_HOST, Node, Usage
from distributed_grid.domain.resources import Claim
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.domain.states import JobState, LeaseState, NodeState
from distributed_grid.errors import BadInput, NotFound, Refused
from distributed_grid.reactor import JobAnswer, decide, step
from distributed_grid.reactor.effects import attempt_effects
from distributed_grid.reactor.node_liveness import ASKING_MS, DESERTED_MS, UNTAKEN_MS
from distributed_grid.reactor.nodes import HOLD_GRACE_MS
from distributed_grid.reactor.workers.pull_workers import reported_usage
from tests.support.builders import GB, Scenario, a_capacity, a_ledger, a_node, a_request, an_exit

HOLD = 60
PAYLOAD = '{"type": "test"}'


def a_worker(name: str = "w1", *, incarnation: str = "one", cores: float = 4, **kwargs) -> Node:
    node = a_node(name, cores=cores, hold_s=HOLD, **kwargs)
    return replace(node, host=PULL_HOST, incarnation=incarnation, joined=True)


class Workers(Scenario):
    """A grid whose pull workers say things."""

    def register(self, name: str = "w1", **kwargs) -> None:
        self.handle(PullWorkerRegistered(a_worker(name, **kwargs), Usage()))

    def add(self, name: str = "t1", *, retries: int = 0, command: Command | None = None, **asks) -> Job:
        """A task for pull workers, or with a command for any node."""
        runs_on = NodeKind.PULL if command is None else NodeKind.ANY
        request = a_request(name, runs_on=runs_on, strategy=Strategy.FITTEST, **asks)
        self.handle(
            JobSubmitted(id=name, command=command or Command((), payload=PAYLOAD), request=request, retries=retries)
        )
        return self.job(name)

    def take(self, name: str = "w1", *, incarnation: str = "one", running: tuple[str, ...] = ()) -> Job | None:
        """The task that a worker gets; it looks again where it was only just assigned one."""
        asked = TaskAsked(name, incarnation, running)
        answer = self.handle(asked).answer or self.handle(asked).answer
        assert answer is None or isinstance(answer, JobAnswer)
        return answer.job if answer is not None else None

    def report(self, job: Job, outcome: Outcome | None = None, *, by: str = "", fence: int = 0, result: str = ""):
        attempt = job.attempts[-1]
        by = by or attempt.node
        end = AttemptEnded(
            uid=job.uid,
            number=attempt.number,
            fence=fence or attempt.fence,
            outcome=outcome or an_exit(),
            nodes=(by,),
            result=result,
        )
        return self.handle(end)


@pytest.fixture
def grid() -> Iterator[Workers]:
    workers = Workers(ledger=Ledger())
    yield workers
    workers.ledger.check()


def stored(result) -> list:
    """Durable rows of a step."""
    return [row for row in result.changes if not row.is_volatile]


def state_of(grid: Workers, name: str = "w1") -> NodeState:
    return grid.ledger.nodes[name].state


def test_a_registered_worker_is_a_node_that_is_alive_and_offers_what_it_has(grid: Workers) -> None:
    grid.register(cores=4)
    assert state_of(grid) is NodeState.ALIVE
    assert grid.ledger.lends("w1").cpu_milli == 4000


def test_a_task_waits_until_a_worker_asks_for_one(grid: Workers) -> None:
    assert grid.add().state is JobState.QUEUED  # before there is any worker
    grid.register()
    assert grid.job("t1").state is JobState.QUEUED
    taken = grid.take()
    assert taken is not None
    assert (taken.id, taken.state, taken.attempts[-1].node) == ("t1", JobState.RUNNING, "w1")
    assert grid.lease_of("t1").state is LeaseState.ACTIVE


def test_a_worker_that_only_asks_is_heard(grid: Workers) -> None:
    grid.register()
    grid.handle(ControlPlaneStarted(epoch=2))  # by which nobody is heard yet
    assert state_of(grid) is NodeState.SUSPECT
    for _ in range(5):
        grid.now += 4_000
        assert grid.take() is None
        grid.handle(TimePassed())
        assert state_of(grid) is NodeState.ALIVE
    grid.add()
    assert grid.take() is not None


def test_the_same_attempt_is_handed_out_again_when_the_worker_asks_again(grid: Workers) -> None:
    grid.register()
    grid.add("t1")
    grid.add("t2")
    first, again = grid.take(), grid.take()
    assert first is not None
    assert again == first
    other = grid.take(running=("t1",))
    assert other is not None
    assert other.id == "t2"


def test_a_reported_task_ends_with_its_result(grid: Workers) -> None:
    grid.register()
    grid.add()
    taken = grid.take()
    assert taken is not None
    ended = [row for row in grid.report(taken, result='{"ok": true}').changes if isinstance(row, Job)][-1]
    assert ended.outcome is not None
    assert ended.outcome.succeeded
    assert ended.result == '{"ok": true}'
    assert not grid.ledger.leases


@pytest.mark.parametrize("lie", [{"fence": 7}, {"by": "w2"}], ids=["a stale fence", "another worker's task"])
def test_a_report_changes_nothing_with(lie, grid: Workers) -> None:
    grid.register("w1")
    grid.register("w2")
    grid.add()
    taken = grid.take()
    assert taken is not None
    assert stored(grid.report(taken, **lie)) == []
    assert grid.job("t1").state is JobState.RUNNING


def test_a_failed_task_is_run_again_only_where_it_has_retries(grid: Workers) -> None:
    grid.register()
    grid.add("t1", retries=1)
    for _ in range(2):
        taken = grid.take()
        assert taken is not None
        grid.report(taken, an_exit(1))
    assert "t1" not in grid.ledger.jobs


def test_the_newer_registration_wins_and_what_the_older_one_ran_is_lost(grid: Workers) -> None:
    grid.register(incarnation="one")
    grid.add("t1", retries=1)
    old = grid.take(incarnation="one")
    assert old is not None
    grid.register(incarnation="two")
    assert stored(grid.report(old)) == []  # its fence is stale
    with pytest.raises(Refused, match="registered by another process"):
        grid.take(incarnation="one")
    new = grid.take(incarnation="two")
    assert new is not None
    assert (new.id, new.attempts[-1].number) == ("t1", 2)
    assert new.attempts[0].outcome is not None
    assert new.attempts[0].outcome.ending is Ending.LOST


def test_the_same_process_that_registers_again_keeps_what_it_runs(grid: Workers) -> None:
    grid.register()
    grid.add()
    taken = grid.take()
    grid.register()
    assert grid.take() == taken


def test_a_task_of_a_lost_worker_without_retries_is_lost_and_one_not_taken_goes_on(grid: Workers) -> None:
    grid.register("w1")
    grid.register("w2")
    grid.add("ran")
    assert grid.take("w1") is not None
    grid.handle(TaskAsked("w1", "one", ("ran",)))
    grid.add("waits")
    assert grid.job("waits").state is JobState.ASSIGNED
    grid.advance(HOLD + HOLD_GRACE_MS / 1000 + 1, heard=False)
    grid.handle(TimePassed())
    assert "ran" not in grid.ledger.jobs  # lost for good: nobody allowed another run
    assert grid.job("waits").state is JobState.QUEUED
    assert grid.job("waits").retries_left == 0


def test_after_its_hold_nothing_a_worker_reports_counts(grid: Workers) -> None:
    grid.register()
    grid.add("t1", retries=3)
    taken = grid.take()
    assert taken is not None
    grid.advance(7, heard=False)
    grid.advance(HOLD + 20, heard=False)
    grid.advance(1, heard=False)
    assert state_of(grid) is NodeState.LOST
    assert stored(grid.report(taken)) == []
    assert grid.job("t1").state is JobState.QUEUED
    grid.heartbeat("w1")
    assert state_of(grid) is NodeState.ALIVE


def test_a_worker_is_heard_less_often_than_an_agent_before_it_is_doubted(grid: Workers) -> None:
    grid.register()
    grid.advance(15, heard=False)
    assert state_of(grid) is NodeState.ALIVE
    grid.advance(6, heard=False)
    assert state_of(grid) is NodeState.SUSPECT


def test_a_worker_that_was_lost_for_long_is_forgotten(grid: Workers) -> None:
    grid.register()
    for seconds in (30, HOLD, 1, DESERTED_MS / 1000 + HOLD):
        grid.advance(seconds, heard=False)
    assert "w1" not in grid.ledger.nodes


def test_what_is_assigned_and_not_taken_goes_to_another_worker(grid: Workers) -> None:
    grid.register("w1", cores=8)
    grid.register("w2")
    assert grid.take("w1") is None
    grid.add()
    assert grid.job("t1").attempts[-1].node == "w1"
    grid.advance(UNTAKEN_MS / 1000 + 1)
    assert grid.job("t1").state is JobState.QUEUED
    taken = grid.take("w2")
    assert taken is not None
    assert taken.id == "t1"


def test_who_has_not_asked_for_a_while_gets_nothing(grid: Workers) -> None:
    grid.register()
    assert grid.take() is None
    grid.advance(ASKING_MS / 1000 + 1)
    assert grid.add().state is JobState.QUEUED


def test_a_task_goes_to_the_fittest_of_those_who_ask(grid: Workers) -> None:
    for name, cores in (("small", 2), ("large", 16), ("middle", 8)):
        grid.register(name, cores=cores)
        assert grid.take(name) is None
    assert grid.add("t1").attempts[-1].node == "large"
    assert grid.add("t2").attempts[-1].node == "middle"  # each gets one for each time it asks
    assert grid.add("t3").attempts[-1].node == "small"


def test_a_cancelled_task_that_nobody_took_ends_at_once(grid: Workers) -> None:
    grid.register()
    assert grid.take() is None
    grid.add()
    assert grid.job("t1").state is JobState.ASSIGNED
    grid.cancel("t1")
    assert not grid.ledger.jobs


def test_a_cancelled_task_that_runs_ends_when_its_worker_has_it_no_more(grid: Workers) -> None:
    grid.register()
    grid.add()
    assert grid.take() is not None
    grid.cancel("t1")
    assert grid.job("t1").state is JobState.STOPPING
    assert grid.take(running=("t1",)) is None
    assert grid.job("t1").state is JobState.STOPPING
    assert grid.take() is None
    assert not grid.ledger.jobs


def test_draining_a_worker_requeues_what_it_has_not_taken(grid: Workers) -> None:
    grid.register("w1")
    assert grid.take() is None
    grid.add()
    grid.handle(NodeDrained("w1"))
    assert grid.job("t1").state is JobState.QUEUED


def test_no_order_is_ever_pending_for_a_pull_worker(grid: Workers) -> None:
    grid.register()
    grid.add("t1")
    assert grid.take() is not None
    grid.handle(TaskAsked("w1", "one", ("t1",)))
    grid.add("t2")
    grid.cancel("t1")
    assert grid.job("t2").state is JobState.ASSIGNED
    assert attempt_effects(grid.ledger) == []


def test_only_tasks_run_on_a_pull_worker(grid: Workers) -> None:
    grid.register(cores=64)
    grid.handle(TaskAsked("w1", "one"))
    with pytest.raises(Refused, match="a pull worker, which only runs tasks"):
        grid.submit(a_request("r1"))
    with pytest.raises(Refused):
        grid.ask(a_request("r2"))
    with pytest.raises(Refused):
        grid.handle(BlockAsked(id="b1", user="ada", size_bytes=GB, term_ms=60_000))


def test_a_task_with_a_command_runs_on_an_agent_too_and_one_without_does_not() -> None:
    grid = Workers(ledger=a_ledger(a_node("gpu1")))
    assert grid.add("payload").state is JobState.QUEUED
    assert grid.add("command", command=Command(("true",), payload=PAYLOAD)).attempts[-1].node == "gpu1"
    with pytest.raises(BadInput, match="only run on a pull worker"):
        grid.handle(JobSubmitted(id="t", command=Command((), payload=PAYLOAD), request=a_request("t")))


def test_a_waiting_task_keeps_no_agent_from_its_work() -> None:
    grid = Workers(ledger=a_ledger(a_node("gpu1", cores=4)))
    grid.add("payload", cores=4, priority="high")
    grid.advance(120)
    assert grid.submit(a_request("r1", cores=4)).state is JobState.ASSIGNED


def test_a_worker_cannot_take_the_name_of_a_node_with_an_agent() -> None:
    grid = Workers(ledger=a_ledger(a_node("gpu1")))
    with pytest.raises(Refused, match="a node with an agent"):
        grid.register("gpu1")
    with pytest.raises(NotFound, match="register it first"):
        grid.take("gpu1")


def test_a_config_that_names_a_pull_worker_makes_another_node_of_it(grid: Workers) -> None:
    grid.register()
    grid.add()
    assert grid.take() is not None
    grid.handle(NodeDeclared(a_node("w1")))
    assert not grid.ledger.jobs
    assert not grid.ledger.pull_nodes


def test_what_runs_survives_the_control_plane(grid: Workers) -> None:
    grid.register()
    grid.add()
    taken = grid.take()
    assert taken is not None
    again = Workers(ledger=Ledger(grid.ledger.rows(durable_only=True)), now=grid.now)
    again.handle(ControlPlaneStarted(2))
    assert again.take() == taken
    assert [row for row in again.report(taken).changes if isinstance(row, Job)][-1].state is JobState.ENDED


def reserve(grid: Workers, name: str, cores: float = 1) -> None:
    request = a_request(name, cores=cores, wait_s=0, duration_s=3600, require=("w1",))
    grid.handle(LeaseAsked(replace(request, runs_on=NodeKind.ANY, task=f"task-{name}")))


def test_a_reservation_holds_what_heartbeats_do_not_give_back(grid: Workers) -> None:
    grid.register(cores=4)
    reserve(grid, "r1", cores=3)
    grid.heartbeat("w1")
    with pytest.raises(Refused, match="1 core free, 2 cores asked"):
        reserve(grid, "r2", cores=2)


def test_a_reservation_is_renewed_by_the_heartbeats_of_its_worker_and_ends_without_them(grid: Workers) -> None:
    grid.register()
    reserve(grid, "r1")
    for _ in range(10):
        grid.advance(15)
        grid.now += 700_000
        grid.heartbeat("w1")
    assert grid.ledger.leases["r1"].ends_at_ms > grid.now
    grid.advance(3601, heard=False)
    assert "r1" not in grid.ledger.leases


def test_workers_are_asked_to_report_anew_until_they_do(grid: Workers) -> None:
    grid.register()
    grid.handle(ReassessmentRequested())
    grid.handle(HeartbeatReceived(name="w1", usage=Usage(), repeats=True))
    assert grid.ledger.observations["w1"].report_wanted
    grid.heartbeat("w1")
    assert not grid.ledger.observations["w1"].report_wanted


def test_asking_is_stored_nowhere(grid: Workers) -> None:
    grid.register()
    changed = decide(grid.ledger, TaskAsked("w1", "one"), grid.now).changes
    assert [row.kind for row in changed] == ["observation"]


def test_what_others_use_of_a_worker_is_not_lent(grid: Workers) -> None:
    has = a_capacity(4, 16, 2)
    grid.handle(PullWorkerRegistered(a_worker(gpus=2), Usage()))
    usage = reported_usage(has, a_capacity(1, 4, 1), NodeClaims())
    grid.heartbeat("w1", usage)
    lends = grid.ledger.lends("w1")
    assert (lends.cpu_milli, lends.memory_bytes, len(lends.gpus)) == (1000, 4 * GB, 1)


def test_what_its_own_tasks_use_is_not_counted_twice() -> None:
    held = NodeClaims([Claim(cpu_milli=3000, memory_bytes=12 * GB)])
    usage = reported_usage(a_capacity(4, 16), a_capacity(1, 4), held)
    assert (usage.cpu_outside_milli, usage.memory_outside_bytes) == (0, 0)
    assert usage.cpu_busy_milli == 750


def test_a_step_changes_little_with_thousands_of_tasks_waiting_and_two_hundred_workers_asking(grid: Workers) -> None:
    for number in range(2_000):
        request = a_request(f"t{number}", runs_on=NodeKind.PULL, strategy=Strategy.FITTEST)
        step(
            grid.ledger, JobSubmitted(id=f"t{number}", command=Command((), payload=PAYLOAD), request=request), grid.now
        )
    for number in range(200):
        grid.register(f"w{number}")
    got = set()
    for number in range(200):
        asked = [step(grid.ledger, TaskAsked(f"w{number}", "one"), grid.now) for _ in range(2)]
        assert max(len(one.changes) for one in asked) < 20  # bench/worker_steps.py measures how long it takes
        answer = asked[-1].answer
        assert isinstance(answer, JobAnswer)
        got.add(answer.job.id)
    assert len(got) == 200


# ------------------------------------------------------------------ a connection that is gone


def hand_out(grid: Workers, name: str = "w1", *, ask_id: str) -> Job:
    asked = TaskAsked(name, "one", (), ask_id)
    answer = grid.handle(asked).answer or grid.handle(asked).answer
    assert isinstance(answer, JobAnswer)
    return answer.job


def test_who_is_gone_asks_no_more_and_the_next_task_goes_to_another(grid: Workers) -> None:
    grid.register("w1")
    assert grid.take("w1") is None
    grid.handle(TaskAskWithdrawn("w1", "one", "a1"))
    grid.register("w2")
    assert grid.take("w2") is None
    grid.add("t1")
    assert grid.job("t1").attempts[-1].node == "w2"


def test_a_task_that_was_not_delivered_goes_to_another_and_uses_up_no_retry(grid: Workers) -> None:
    grid.register("w1")
    grid.add("t1")
    assert hand_out(grid, ask_id="a1").state is JobState.RUNNING
    grid.register("w2")
    assert grid.take("w2") is None
    grid.handle(TaskAskWithdrawn("w1", "one", "a1"))
    job = grid.take("w2")
    assert job is not None
    assert (job.id, job.retries_left, job.attempts[-1].node) == ("t1", 0, "w2")
    first = job.attempts[0]
    assert (first.started_at_ms, first.outcome.ending if first.outcome else None) == (0, Ending.NEVER_STARTED)
    assert grid.report(job).answer is not None
    assert grid.handle(TaskAskWithdrawn("w1", "one", "a1")).answer is None  # a second time changes nothing


@pytest.mark.parametrize("change", ["handed out again", "another process", "another ask", "reported"])
def test_a_task_that_may_run_is_not_given_to_another(grid: Workers, change: str) -> None:
    grid.register("w1")
    grid.add("t1")
    job = hand_out(grid, ask_id="a1")
    if change == "handed out again":
        assert hand_out(grid, ask_id="a2").id == "t1"
    elif change == "reported":
        grid.report(job)
    incarnation = "two" if change == "another process" else "one"
    grid.handle(TaskAskWithdrawn("w1", incarnation, "a0" if change == "another ask" else "a1"))
    if change != "reported":
        assert (grid.job("t1").state, len(grid.job("t1").attempts)) == (JobState.RUNNING, 1)
    grid.register("w2")
    assert grid.take("w2") is None


def test_a_task_that_is_assigned_and_not_taken_goes_to_another_at_once(grid: Workers) -> None:
    grid.register("w1")
    assert grid.take("w1") is None
    grid.add("t1")
    assert grid.job("t1").state is JobState.ASSIGNED
    grid.register("w2")
    assert grid.take("w2") is None
    grid.handle(TaskAskWithdrawn("w1", "one", "a1"))
    assert grid.take("w2") is not None
