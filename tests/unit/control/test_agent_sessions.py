"""Sessions of agents: messages of one raise its own fences at most, and nothing of the others."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.control.agent_sessions import MAX_RESENT, RESEND_MS
from distributed_grid.control.agents import AgentGateway
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import JobCancelled, NodeDeclared, TimePassed
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.leases import MAX_EPOCH, MAX_EPOCH_LEAD
from distributed_grid.domain.nodes import START_MS, Usage
from distributed_grid.domain.states import JobState, NodeState
from distributed_grid.errors import StoreFailed
from distributed_grid.ports import Batch
from distributed_grid.reactor.dispatch import REPORT_BURST
from distributed_grid.reactor.effects import AttemptEffect
from distributed_grid.reactor.nodes import HOLD_GRACE_MS
from distributed_grid.scheduling.queue.reasons import why_not_lent
from distributed_grid.wire import (
    MAX_ATTEMPTS,
    MAX_IDS,
    PROTOCOL,
    AgentHello,
    AttemptEndedReport,
    AttemptPausedReport,
    AttemptsPage,
    AttemptStartedReport,
    Heartbeat,
    HeartbeatReply,
    RejectAgent,
    ReportedCapacity,
    StartAttemptOrder,
    StopAttemptOrder,
    ToAgent,
    Welcome,
    decode_to_agent,
    encode,
    greeting,
)
from tests.support.builders import NOW, a_capacity, a_node, a_request, a_submission

Story = Callable[[Grid, AgentGateway], Awaitable[None]]


class Clock:
    """The grid's time, which passes when a test says so."""

    def __init__(self) -> None:
        self.passed_ms = 0

    def now_ms(self) -> int:
        return NOW + self.passed_ms


class Agent:
    """An agent's end of a link; every order is one that it can decode."""

    def __init__(self, node: str) -> None:
        self.nodes = (node,)
        self.orders: list[ToAgent] = []

    def close(self, why: str) -> None:
        raise AssertionError(why)

    def send(self, message: ToAgent) -> None:
        self.orders.append(decode_to_agent(encode(message)))

    def of(self, *kinds: type) -> list[ToAgent]:
        return [order for order in self.orders if isinstance(order, kinds)]


def hello(node: str, epoch: int = 0) -> AgentHello:
    return AgentHello(
        protocol=PROTOCOL,
        version="0.2.0",
        node=node,
        capacity=ReportedCapacity.of(a_capacity()),
        epoch=epoch,
        boot="boot",
    )


async def joined(gateway: AgentGateway, greeting: AgentHello) -> Agent:
    """An agent that has said hello, and sent a heartbeat."""
    agent = Agent(greeting.node)
    gateway.received(greeting, agent)
    gateway.received(Heartbeat(node=greeting.node, usage=Usage(), beat=1), agent)
    await gateway.settled()
    return agent


CLOCK = Clock()


def with_a_grid(story: Story, store: InMemoryStore | None = None) -> None:
    async def run() -> None:
        grid = Grid(store or InMemoryStore(), CLOCK)
        gateway = AgentGateway(grid)
        grid.perform_with({AttemptEffect: gateway.sessions.perform})
        await grid.start()
        gateway.start()
        try:
            for name in ("ash", "birch"):
                await grid.handle(NodeDeclared(replace(a_node(name), hold_ms=60_000)))
            await asyncio.wait_for(story(grid, gateway), 20)
            (await grid.read(lambda ledger, now: ledger)).check()
        finally:
            await gateway.stop()
            await grid.stop()

    asyncio.run(run())


def test_the_epoch_of_an_agent_counts_on_its_node_and_nowhere_else() -> None:
    async def story(grid: Grid, gateway: AgentGateway) -> None:
        birch = await joined(gateway, hello("birch"))
        ash = await joined(gateway, replace(hello("ash", MAX_EPOCH_LEAD), attempts=("old.1",)))
        (welcome,) = ash.of(Welcome)
        assert isinstance(welcome, Welcome)
        assert welcome.epoch == MAX_EPOCH_LEAD + 1
        for name in ("ash", "birch"):
            await grid.handle(a_submission(a_request(f"job-{name}", cores=1, require=[name])))
        (stop,), (start,), (other,) = ash.of(StopAttemptOrder), ash.of(StartAttemptOrder), birch.of(StartAttemptOrder)
        assert isinstance(stop, StopAttemptOrder)
        assert isinstance(start, StartAttemptOrder)
        assert isinstance(other, StartAttemptOrder)
        assert min(stop.fence, start.fence) > MAX_EPOCH_LEAD + 1 << 32
        assert other.fence < 2 << 32
        assert grid.ledger.counters["epoch"] == 1
        assert (await joined(gateway, hello("birch"))).of(Welcome)

    with_a_grid(story)


@pytest.mark.parametrize("epoch", [MAX_EPOCH_LEAD + 2, MAX_EPOCH])
def test_an_epoch_that_cannot_be_true_turns_that_agent_away_and_says_why(epoch: int) -> None:
    async def story(grid: Grid, gateway: AgentGateway) -> None:
        await joined(gateway, hello("birch"))
        for _ in range(20):
            liar = await joined(gateway, hello("ash", epoch))
            (refusal,) = liar.orders
            assert isinstance(refusal, RejectAgent)
            assert f"epoch {epoch}" in refusal.message
        ledger = grid.ledger
        assert ledger.nodes["ash"].state is NodeState.JOINING
        assert "epoch.json" in ledger.observations["ash"].rejected
        assert len(grid.store.events(types=["agent-rejected"])) == 1
        assert ledger.counters["epoch"] == 1
        assert ledger.nodes["birch"].state is NodeState.ALIVE
        honest = await joined(gateway, hello("ash", 1))
        assert honest.of(Welcome)
        assert grid.ledger.nodes["ash"].state is NodeState.ALIVE

    with_a_grid(story)


def test_attempts_are_compared_only_when_the_last_page_is_there() -> None:
    async def story(grid: Grid, gateway: AgentGateway) -> None:
        ash = await joined(gateway, hello("ash"))
        await grid.handle(a_submission(a_request("job", cores=1, require=["ash"])))
        (start,) = ash.of(StartAttemptOrder)
        assert isinstance(start, StartAttemptOrder)
        gateway.received(
            AttemptStartedReport(seq=1, lease_id=start.lease_id, fence=start.fence, pid=77, cores=(0,)), ash
        )
        await gateway.settled()
        gateway.gone(ash)
        gone = tuple(f"gone{number}.1" for number in range(2 * MAX_IDS))
        pages = greeting(replace(hello("ash"), attempts=(*gone, start.lease_id)))
        again = Agent("ash")
        for page in pages[:-1]:
            gateway.received(page, again)
        gateway.received(Heartbeat(node="ash", usage=Usage(), beat=2), again)
        await gateway.settled()
        assert again.of(Welcome)
        assert not again.of(StopAttemptOrder)
        assert grid.ledger.jobs["job"].attempt is not None, "it is on the last page"
        gateway.received(pages[-1], again)
        gateway.received(Heartbeat(node="ash", usage=Usage(), beat=3), again)
        await gateway.settled()
        assert grid.ledger.jobs["job"].attempt is not None
        assert {stop.lease_id for stop in again.of(StopAttemptOrder) if isinstance(stop, StopAttemptOrder)} == set(gone)

    with_a_grid(story)


def test_an_agent_that_lists_without_end_is_turned_away() -> None:
    async def story(grid: Grid, gateway: AgentGateway) -> None:
        ash = Agent("ash")
        gateway.received(replace(hello("ash"), more=True), ash)
        for _ in range(MAX_ATTEMPTS // MAX_IDS + 1):
            gateway.received(AttemptsPage("ash", ("x.1",) * MAX_IDS, True), ash)
        await gateway.settled()
        assert len(ash.of(RejectAgent)) == 1

    with_a_grid(story)


def test_what_is_no_message_is_recorded_as_the_reason_too() -> None:
    async def story(grid: Grid, gateway: AgentGateway) -> None:
        for _ in range(100):
            gateway.rejected("not a message of this protocol", Agent("ash"))
        while "ash" not in grid.ledger.observations:
            await asyncio.sleep(0.01)
        await grid.read(lambda ledger, now: None)
        assert grid.ledger.observations["ash"].rejected == "not a message of this protocol"
        assert len(grid.store.events(types=["agent-rejected"])) == 1

    with_a_grid(story)


# ------------------------------------------------------------------ orders are repeated


async def beat(gateway: AgentGateway, agent: Agent, after_ms: int = 0) -> list[ToAgent]:
    """The orders that come with a heartbeat after this time."""
    agent.orders.clear()
    CLOCK.passed_ms += after_ms
    gateway.received(Heartbeat(node=agent.nodes[0], usage=Usage(), beat=2), agent)
    await gateway.settled()
    return agent.of(StartAttemptOrder, StopAttemptOrder)


def test_a_stop_is_ordered_again_every_so_often_until_the_end_is_reported() -> None:
    async def story(grid: Grid, gateway: AgentGateway) -> None:
        ash = await joined(gateway, hello("ash"))
        await grid.handle(a_submission(a_request("job", cores=1)))
        (start,) = ash.of(StartAttemptOrder)
        assert isinstance(start, StartAttemptOrder)
        gateway.received(AttemptStartedReport(seq=1, lease_id=start.lease_id, fence=start.fence, pid=7, cores=()), ash)
        await gateway.settled()
        assert await beat(gateway, ash, RESEND_MS) == []
        ash.orders.clear()
        await grid.handle(JobCancelled("job", "ann"))
        (stop,) = ash.of(StopAttemptOrder)
        assert await beat(gateway, ash, RESEND_MS // 2) == []
        for _ in range(3):
            assert await beat(gateway, ash, RESEND_MS + 1) == [stop]
            assert await beat(gateway, ash) == []
        gateway.received(
            AttemptEndedReport(seq=2, lease_id=start.lease_id, fence=start.fence, outcome=Outcome(Ending.CANCELLED)),
            ash,
        )
        await gateway.settled()
        assert await beat(gateway, ash, 2 * RESEND_MS) == []

    with_a_grid(story)


def test_a_start_that_is_not_reported_is_ordered_again() -> None:
    async def story(grid: Grid, gateway: AgentGateway) -> None:
        ash = await joined(gateway, hello("ash"))
        await grid.handle(a_submission(a_request("job", cores=1)))
        (start,) = ash.of(StartAttemptOrder)
        (again,) = await beat(gateway, ash, RESEND_MS + 1)
        assert isinstance(start, StartAttemptOrder)
        assert isinstance(again, StartAttemptOrder)
        assert again.start_by_ms < start.start_by_ms  # the time began with the first order
        assert replace(again, beat=start.beat, start_by_ms=start.start_by_ms) == start

    with_a_grid(story)


def test_a_job_that_its_node_does_not_start_goes_to_another_node_that_then_gets_the_order() -> None:
    async def story(grid: Grid, gateway: AgentGateway) -> None:
        ash = await joined(gateway, hello("ash"))
        await grid.handle(a_submission(a_request("job", cores=1)))
        (order,) = ash.of(StartAttemptOrder)
        assert isinstance(order, StartAttemptOrder)
        birch = await joined(gateway, hello("birch"))
        await late_beat(gateway, ash, order.start_by_ms, order.beat + order.start_by_ms)
        assert grid.ledger.jobs["job"].attempt is not None, "the margin is not over"
        await late_beat(gateway, ash, HOLD_GRACE_MS + 1, order.beat + order.start_by_ms + 1)
        await late_beat(gateway, birch, 1, 2)
        first, second = grid.ledger.jobs["job"].attempts
        assert first.outcome == Outcome(Ending.NEVER_STARTED, detail="ash did not start it in time", node_fault=True)
        assert (second.node, grid.ledger.jobs["job"].retries_left) == ("birch", 0)
        assert birch.of(StartAttemptOrder)
        reasons = await grid.read(lambda ledger, now: why_not_lent(ledger, ledger.nodes["ash"], now))
        assert reasons == ("rests for 60 s: it did not start what it was given",)

    with_a_grid(story)


def test_a_job_on_a_node_that_neither_starts_nor_stops_it_can_be_cancelled() -> None:
    async def story(grid: Grid, gateway: AgentGateway) -> None:
        ash = await joined(gateway, hello("ash"))
        await grid.handle(a_submission(a_request("job", cores=1)))
        (order,) = ash.of(StartAttemptOrder)
        assert isinstance(order, StartAttemptOrder)
        await grid.handle(JobCancelled("job", "ada"))
        assert grid.ledger.jobs["job"].state is JobState.STOPPING
        await late_beat(gateway, ash, order.start_by_ms + HOLD_GRACE_MS, order.beat + order.start_by_ms)
        assert "job" not in grid.ledger.jobs

    with_a_grid(story)


def test_an_attempt_that_its_agent_names_as_starting_is_not_given_up() -> None:
    async def story(grid: Grid, gateway: AgentGateway) -> None:
        ash = await joined(gateway, hello("ash"))
        await grid.handle(a_submission(a_request("job", cores=1)))
        for number in range(10):
            await late_beat(gateway, ash, START_MS // 2, 1 + (number + 1) * START_MS // 2, starting=("job.1",))
        await late_beat(gateway, ash, START_MS + HOLD_GRACE_MS - 1, 11 * START_MS)
        assert grid.ledger.jobs["job"].attempt is not None
        await late_beat(gateway, ash, 1, 11 * START_MS)
        assert grid.ledger.jobs["job"].attempt is None

    with_a_grid(story)


def test_an_old_heartbeat_that_arrives_late_proves_nothing_until_the_hold_is_over() -> None:
    async def story(grid: Grid, gateway: AgentGateway) -> None:
        ash = await joined(gateway, hello("ash"))
        await grid.handle(a_submission(a_request("job", cores=1)))
        await late_beat(gateway, ash, START_MS + HOLD_GRACE_MS, 2)  # it was sent before the order came
        assert grid.ledger.jobs["job"].attempt is not None
        await late_beat(gateway, ash, 60_000, 3)  # a hold: what it may run had to be renewed by an answer
        assert grid.ledger.jobs["job"].attempt is None

    with_a_grid(story)


async def late_beat(
    gateway: AgentGateway, agent: Agent, after_ms: int, number: int, starting: tuple[str, ...] = ()
) -> None:
    """A heartbeat of this number, so much later."""
    CLOCK.passed_ms += after_ms
    gateway.received(Heartbeat(node=agent.nodes[0], usage=Usage(), beat=number, starting=starting), agent)
    await gateway.settled()


def test_an_unwanted_attempt_is_stopped_again_until_its_end_is_reported() -> None:
    async def story(grid: Grid, gateway: AgentGateway) -> None:
        ash = await joined(gateway, replace(hello("ash"), attempts=("old.1",)))
        (stop,) = ash.of(StopAttemptOrder)
        assert isinstance(stop, StopAttemptOrder)
        assert stop.lease_id == "old.1"
        for _ in range(2):
            assert await beat(gateway, ash, RESEND_MS + 1) == [stop]
        gateway.received(
            AttemptEndedReport(seq=1, lease_id="old.1", fence=stop.fence, outcome=Outcome(Ending.CANCELLED)), ash
        )
        await gateway.settled()
        assert await beat(gateway, ash, RESEND_MS + 1) == []

    with_a_grid(story)


def test_an_agent_that_reports_ends_without_end_does_not_fill_the_audit_trail() -> None:
    async def story(grid: Grid, gateway: AgentGateway) -> None:
        ash, birch = await joined(gateway, hello("ash")), await joined(gateway, hello("birch"))
        for n in range(3 * REPORT_BURST):
            gateway.received(
                AttemptEndedReport(
                    seq=n, lease_id=f"job-{n}.1", fence=1, outcome=Outcome(Ending.EXITED, detail="x" * 8000)
                ),
                ash,
            )
        gateway.received(AttemptEndedReport(seq=0, lease_id="mine.1", fence=1, outcome=Outcome(Ending.EXITED)), birch)
        await gateway.settled()
        late = grid.store.events(types=["late-report"], limit=10 * REPORT_BURST)
        assert Counter(event.node for event in late) == {"ash": REPORT_BURST, "birch": 1}
        assert max(len(event.reason) for event in late) <= 500

    with_a_grid(story)


def test_what_begins_after_it_was_given_up_is_stopped() -> None:
    async def story(grid: Grid, gateway: AgentGateway) -> None:
        ash = await joined(gateway, hello("ash"))
        gateway.received(AttemptStartedReport(seq=1, lease_id="gone.1", fence=5, pid=7, cores=()), ash)
        await gateway.settled()
        (stop,) = ash.of(StopAttemptOrder)
        assert isinstance(stop, StopAttemptOrder)
        assert (stop.lease_id, stop.fence) == ("gone.1", 5)
        assert await beat(gateway, ash, RESEND_MS + 1) == [stop]

    with_a_grid(story)


def test_short_jobs_whose_start_and_end_come_together_have_simply_ended(caplog: pytest.LogCaptureFixture) -> None:
    async def story(grid: Grid, gateway: AgentGateway) -> None:
        ash = await joined(gateway, hello("ash"))
        for n in range(4):
            await grid.handle(a_submission(a_request(f"short{n}", cores=1, require=["ash"])))
        for seq, order in enumerate(ash.of(StartAttemptOrder)):
            assert isinstance(order, StartAttemptOrder)
            gateway.received(
                AttemptStartedReport(seq=2 * seq, lease_id=order.lease_id, fence=order.fence, pid=7, cores=()), ash
            )
            gateway.received(
                AttemptEndedReport(
                    seq=2 * seq + 1,
                    lease_id=order.lease_id,
                    fence=order.fence,
                    outcome=Outcome(Ending.EXITED, exit_code=0),
                ),
                ash,
            )
        await gateway.settled()
        assert not grid.ledger.jobs
        assert ash.of(StopAttemptOrder) == []
        assert "after it was given up" not in caplog.text
        for message in (
            AttemptStartedReport(seq=50, lease_id="gone.1", fence=5, pid=7, cores=()),
            AttemptPausedReport(51, "gone.1", 5, True, "its owner is back"),
        ):
            gateway.received(message, ash)
        await gateway.settled()
        assert len(ash.of(StopAttemptOrder)) == 1, "what was given up and goes on is still stopped"
        assert caplog.text.count("after it was given up") == 1

    caplog.set_level(logging.INFO)
    with_a_grid(story)


def test_orders_are_repeated_so_many_at_a_time_and_each_has_its_turn() -> None:
    async def story(grid: Grid, gateway: AgentGateway) -> None:
        large = replace(a_capacity(), cpu_milli=10_000_000)
        await grid.handle(NodeDeclared(replace(a_node("ash"), hold_ms=60_000, capacity=large)))
        ash = await joined(gateway, hello("ash"))
        count = MAX_RESENT + 50
        for number in range(count):
            await grid.handle(a_submission(a_request(f"job{number}", cores=1, require=["ash"])))
        assert len(ash.of(StartAttemptOrder)) == count
        first = await beat(gateway, ash, RESEND_MS + 1)
        second = await beat(gateway, ash, RESEND_MS + 1)
        assert len(first) == len(second) == MAX_RESENT
        names = {order.lease_id for order in (*first, *second) if isinstance(order, StartAttemptOrder)}
        assert len(names) == count

    with_a_grid(story)


def test_a_job_assigned_while_its_node_was_away_is_started_by_the_agent_that_comes_with_another_directory() -> None:
    async def story(grid: Grid, gateway: AgentGateway) -> None:
        old = await joined(gateway, replace(hello("ash"), machine="dir-1"))
        gateway.gone(old)
        CLOCK.passed_ms += 10
        await grid.handle(a_submission(a_request("r1", cores=1, require=["ash"])))
        assert not old.of(StartAttemptOrder)
        new = await joined(gateway, replace(hello("ash"), machine="dir-2"))
        (start,) = new.of(StartAttemptOrder)
        assert isinstance(start, StartAttemptOrder)
        assert grid.ledger.observations["ash"].missing == ()

    with_a_grid(story)


class SlowStore(InMemoryStore):
    """A store whose commits wait until they may go on, and fail where told."""

    def __init__(self) -> None:
        super().__init__()
        self.may_commit = threading.Event()
        self.may_commit.set()
        self.fails = False

    def commit(self, batch: Batch) -> None:
        assert self.may_commit.wait(10)
        if self.fails:
            raise StoreFailed("the disk is full")
        super().commit(batch)


class ClosedAgent(Agent):
    """An agent whose connection the control plane may end."""

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self.closed = ""

    def close(self, why: str) -> None:
        self.closed = why


def state_of(grid: Grid) -> NodeState:
    return grid.ledger.nodes["ash"].state


@pytest.mark.parametrize("fails", [False, True])
def test_a_heartbeat_renews_nothing_once_its_node_is_declared_lost_whatever_the_store_does(fails: bool) -> None:
    store = SlowStore()

    async def story(grid: Grid, gateway: AgentGateway) -> None:
        ash = ClosedAgent("ash")
        for message in (hello("ash"), Heartbeat(node="ash", usage=Usage(), beat=1)):
            gateway.received(message, ash)
        await gateway.settled()
        await grid.handle(a_submission(a_request("job", cores=1, require=["ash"])))
        CLOCK.passed_ms += 7_000
        await grid.handle(TimePassed())
        assert state_of(grid) is NodeState.SUSPECT
        CLOCK.passed_ms += 60_000
        store.may_commit.clear()
        tick = asyncio.create_task(grid.handle(TimePassed()))
        while state_of(grid) is not NodeState.LOST:
            await asyncio.sleep(0)
        held_until_ms = grid.ledger.observations["ash"].held_until_ms
        gateway.received(Heartbeat(node="ash", usage=Usage(), beat=2), ash)
        store.fails = fails
        store.may_commit.set()
        await asyncio.gather(tick, return_exceptions=True)
        store.fails = False
        await gateway.settled()
        assert [reply.beat for reply in ash.of(HeartbeatReply) if isinstance(reply, HeartbeatReply)] == [1]
        assert ash.closed == "this node was declared lost"
        assert grid.ledger.observations["ash"].held_until_ms == held_until_ms
        assert state_of(grid) in (NodeState.LOST, NodeState.SUSPECT)
        gateway.gone(ash)
        again = await joined(gateway, hello("ash"))
        assert again.of(HeartbeatReply)
        assert state_of(grid) is NodeState.ALIVE
        assert grid.ledger.observations["ash"].held_until_ms > held_until_ms

    with_a_grid(story, store)
