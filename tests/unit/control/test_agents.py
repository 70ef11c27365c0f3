"""Agents are answered and their holds renewed whatever the store does, and none of them waits for another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec.structs import replace

from distributed_grid import wire
from distributed_grid.control.agent_sessions import MAX_WAITING_REPORTS, NodeRegistry
from distributed_grid.control.agents import AgentGateway
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import ClocksConfirmed, NodeDeclared, ReassessmentRequested, TimePassed
from distributed_grid.domain.jobs import Ending, Job, Outcome
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Capacity
from distributed_grid.domain.states import JobState, NodeState, WorkerState
from distributed_grid.domain.workers import Worker, WorkerResources
from distributed_grid.reactor.effects import AttemptEffect
from tests.support.builders import a_capacity, a_node, a_request, a_submission
from tests.unit.control.test_grid import ShakyStore

HOLD_S = 60
BEGIN_MS = 1_700_000_000_000


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.ms = BEGIN_MS

    def now_ms(self) -> int:
        return self.ms


class FarAgent:
    """An agent's end of a link."""

    def __init__(self, gateway: AgentGateway, node: str) -> None:
        self.nodes = (node,)
        self.got: list[wire.ToAgent] = []
        self.closed = False
        self._gateway = gateway

    def send(self, message: wire.ToAgent) -> None:
        self.got.append(message)

    def close(self, why: str) -> None:
        self.closed = True

    def say(self, message: wire.FromAgent) -> None:
        self._gateway.received(message, self)

    def hello(self, *attempts: str) -> None:
        self.say(wire.AgentHello(protocol=wire.PROTOCOL, version="0.2.0", node=self.nodes[0], attempts=attempts))

    def beat(self, number: int, *marks: wire.CheckpointAge) -> None:
        self.say(wire.Heartbeat(node=self.nodes[0], usage=Usage(), beat=number, marks=marks))

    def started(self, job: Job, seq: int = 1) -> None:
        assert job.attempt is not None
        self.say(
            wire.AttemptStartedReport(seq=seq, lease_id=job.attempt.lease_id, fence=job.attempt.fence, pid=7, cores=())
        )

    def ended(self, job: Job, seq: int = 2) -> None:
        assert job.attempt is not None
        outcome = Outcome(Ending.EXITED, exit_code=0)
        self.say(
            wire.AttemptEndedReport(seq=seq, lease_id=job.attempt.lease_id, fence=job.attempt.fence, outcome=outcome)
        )

    def all(self, kind: type) -> list[Any]:
        return [message for message in self.got if isinstance(message, kind)]

    @property
    def renewed(self) -> list[tuple[int, int]]:
        return [(reply.beat, reply.hold_ms) for reply in self.all(wire.HeartbeatReply)]


class World:
    """A control plane with two far nodes, each with its agent, on a store that may fail or hang."""

    def __init__(self, registry: NodeRegistry) -> None:
        self.store, self.clock = ShakyStore(), Clock()
        self.grid = Grid(self.store, self.clock)
        self.gateway = AgentGateway(self.grid, registry)
        self.grid.perform_with({AttemptEffect: self.gateway.sessions.perform})
        self.ash, self.elm = FarAgent(self.gateway, "ash"), FarAgent(self.gateway, "elm")

    async def open(self) -> None:
        await self.grid.start()
        self.gateway.start()
        for agent in (self.ash, self.elm):
            await self.grid.handle(NodeDeclared(a_node(agent.nodes[0], cores=4, hold_s=HOLD_S)))
            agent.hello()
            agent.beat(1)
        await self.gateway.settled()

    async def job_on(self, agent: FarAgent, uid: str) -> Job:
        """A job whose start order the agent has got."""
        await self.grid.handle(a_submission(a_request(uid, cores=1, require=agent.nodes)))
        return await self.grid.read(lambda ledger, now: ledger.jobs[uid])

    def state(self, uid: str) -> JobState | None:
        job = self.grid.ledger.jobs.get(uid)
        return job.state if job is not None else None

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.01)


def play(story: Callable[[World], Coroutine[Any, Any, None]], registry: NodeRegistry | None = None) -> None:
    async def run() -> None:
        world = World(registry or NodeRegistry())
        await world.open()
        try:
            await asyncio.wait_for(story(world), 20)
        finally:
            world.store.full = False
            world.store.may_commit.set()
            await world.gateway.stop()
            await world.grid.stop()

    asyncio.run(run())


def test_while_a_report_waits_for_the_store_every_heartbeat_is_answered() -> None:
    async def story(world: World) -> None:
        job = await world.job_on(world.ash, "job")
        world.ash.started(job)
        await world.gateway.settled()
        world.store.full = True
        world.ash.ended(job)
        for beat in range(2, 30):
            world.clock.ms += 10_000
            world.ash.beat(beat)
            world.elm.beat(beat)
            await asyncio.sleep(0.02)
        expected = [(beat, 1000 * HOLD_S) for beat in range(1, 30)]
        assert (world.ash.renewed, world.elm.renewed) == (expected, expected)
        assert world.state("job") is JobState.RUNNING
        assert [ack.seq for ack in world.ash.all(wire.AcknowledgeReport)] == [1]
        world.store.full = False
        await world.until(lambda: [ack.seq for ack in world.ash.all(wire.AcknowledgeReport)] == [1, 2])
        assert world.state("job") is None

    play(story)


def test_while_a_commit_hangs_every_heartbeat_is_answered_and_nobody_is_doubted_afterwards() -> None:
    async def story(world: World) -> None:
        job = await world.job_on(world.ash, "job")
        world.store.may_commit.clear()
        world.ash.started(job)
        await asyncio.sleep(0.05)
        passed = asyncio.ensure_future(world.grid.handle(TimePassed()))
        for beat in range(2, 20):
            world.clock.ms += 10_000
            world.ash.beat(beat)
            world.elm.beat(beat)
        await asyncio.sleep(0.05)
        assert [beat for beat, _ in world.elm.renewed] == [*range(1, 20)]
        world.store.may_commit.set()
        await passed
        nodes = await world.grid.read(lambda ledger, now: [node.state for node in ledger.nodes.values()])
        assert nodes == [NodeState.ALIVE, NodeState.ALIVE]
        assert world.state("job") is JobState.RUNNING

    play(story)


def test_an_agent_that_comes_back_while_nothing_can_be_stored_is_welcomed_and_renewed() -> None:
    async def story(world: World) -> None:
        job = await world.job_on(world.ash, "job")
        world.ash.started(job)
        await world.gateway.settled()
        world.store.full = True
        world.gateway.gone(world.ash)
        again = FarAgent(world.gateway, "ash")
        world.clock.ms += 20_000
        await world.until(lambda: world.grid.ledger.nodes["ash"].state is NodeState.ALIVE)
        again.hello("job.1")
        again.beat(5)
        assert [type(message) for message in again.got] == [wire.Welcome, wire.HeartbeatReply]
        assert again.renewed == [(5, 1000 * HOLD_S)]
        world.store.full = False
        again.beat(6)
        await world.gateway.settled()
        again.ended(job)
        await world.until(lambda: again.all(wire.AcknowledgeReport))

    play(story)


def test_what_an_agent_says_with_its_greeting_does_not_count_once_it_is_gone() -> None:
    async def story(world: World) -> None:
        job = await world.job_on(world.ash, "job")
        world.ash.started(job)
        await world.gateway.settled()
        world.store.full = True
        await world.grid.read(lambda ledger, now: None)
        late = FarAgent(world.gateway, "ash")
        capacity = wire.ReportedCapacity.of(a_node("ash", cores=2).capacity)
        late.say(
            wire.AgentHello(
                protocol=wire.PROTOCOL, version="0.2.0", node="ash", attempts=(), capacity=capacity, boot="new"
            )
        )
        await asyncio.sleep(0.05)
        world.gateway.gone(late)
        world.store.full = False
        await asyncio.sleep(0.7)
        assert world.state("job") is JobState.RUNNING

    play(story)


def test_one_failed_commit_fails_no_heartbeat_and_no_question_of_its_batch() -> None:
    async def story(world: World) -> None:
        world.store.may_commit.clear()
        first = asyncio.ensure_future(world.grid.handle(a_submission(a_request("first", cores=1))))
        await asyncio.sleep(0.02)
        world.store.full = True
        refused = asyncio.ensure_future(world.grid.handle(a_submission(a_request("second", cores=1))))
        world.elm.beat(2)
        asked = asyncio.ensure_future(world.grid.read(lambda ledger, now: len(ledger.nodes)))
        await asyncio.sleep(0.02)
        world.store.may_commit.set()
        assert await asked == 2
        assert world.elm.renewed[-1] == (2, 1000 * HOLD_S)
        results = await asyncio.gather(first, refused, return_exceptions=True)
        assert all(isinstance(result, Exception) for result in results)

    play(story)


def test_marks_are_acknowledged_when_they_are_in_the_ledger_and_not_before() -> None:
    async def story(world: World) -> None:
        job = await world.job_on(world.ash, "job")
        world.ash.started(job)
        await world.gateway.settled()
        assert job.attempt is not None
        mark = wire.CheckpointAge("job.1", job.attempt.fence, 0)
        world.store.full = True
        world.clock.ms += 1000
        world.ash.beat(2, mark)
        await world.gateway.settled()
        assert (world.ash.renewed[-1][0], world.ash.all(wire.AcknowledgeMarks)) == (2, [])
        world.store.full = False
        world.ash.beat(3, mark)
        await world.gateway.settled()
        assert world.ash.all(wire.AcknowledgeMarks) == [wire.AcknowledgeMarks(3)]
        assert world.grid.ledger.jobs["job"].attempts[0].marked_at_ms == world.clock.ms

    play(story)


def test_an_agent_that_says_too_much_is_cut_off_once_the_rest_is_stored_and_delays_nobody() -> None:
    async def story(world: World) -> None:
        job = await world.job_on(world.ash, "job")
        other = await world.job_on(world.elm, "other")
        await world.gateway.settled()
        world.store.may_commit.clear()
        world.ash.started(job, seq=1)
        await asyncio.sleep(0.05)
        for seq in range(2, MAX_WAITING_REPORTS + 100):
            world.ash.say(wire.AttemptPausedReport(seq, "job.1", job.attempt.fence, seq % 2 == 0))
        world.ash.beat(2)
        world.elm.started(other)
        assert world.ash.renewed[-1] == (2, 1000 * HOLD_S)
        assert not world.ash.closed
        world.store.may_commit.set()
        await world.until(lambda: world.elm.all(wire.AcknowledgeReport))
        await world.until(lambda: world.ash.closed)
        assert len(world.ash.all(wire.AcknowledgeReport)) == MAX_WAITING_REPORTS + 1

    play(story)


def test_a_confirmed_clock_is_told_to_its_agent_until_that_has_heard():
    async def story(world: World) -> None:
        jumped = wire.Heartbeat(node="ash", usage=Usage(), beat=2, clock_jump=wire.PendingClockJump(-3_600_000, 60_000))
        world.ash.say(jumped)
        await world.gateway.settled()
        assert world.grid.ledger.observations["ash"].clock_jump_ms == -3_600_000
        assert not world.ash.all(wire.HeartbeatReply)[-1].clock_confirmed
        await world.grid.handle(ClocksConfirmed("ana"))
        world.ash.say(jumped)
        world.elm.beat(3)
        assert world.ash.all(wire.HeartbeatReply)[-1].clock_confirmed
        assert not world.elm.all(wire.HeartbeatReply)[-1].clock_confirmed
        world.ash.beat(4)
        assert not world.ash.all(wire.HeartbeatReply)[-1].clock_confirmed

    play(story)


class Believing(NodeRegistry):
    """A registry that believes what agents detect."""

    def described(self, node: Node, capacity: Capacity) -> Node:
        return replace(node, capacity=capacity)


def test_an_agent_that_is_asked_to_says_anew_what_its_machine_has():
    async def story(world: World) -> None:
        world.ash.beat(2)
        await world.grid.handle(ReassessmentRequested())
        world.ash.beat(3)
        world.elm.beat(3)
        assert [reply.report_capacity for reply in world.ash.all(wire.HeartbeatReply)[-2:]] == [False, True]
        more = wire.ReportedCapacity.of(a_capacity(8, 32))
        world.ash.say(wire.Heartbeat(node="ash", usage=Usage(), beat=4, capacity=more))
        world.ash.beat(5)  # before the last one was taken in: what that said is not lost
        await world.gateway.settled()
        assert world.grid.ledger.nodes["ash"].capacity == a_capacity(8, 32)
        assert not world.ash.all(wire.HeartbeatReply)[-1].report_capacity
        world.elm.beat(6)
        assert world.elm.all(wire.HeartbeatReply)[-1].report_capacity  # until it does

    play(story, Believing())


class YieldingRegistry(NodeRegistry):
    """All nodes yield to their owners by these rules."""

    def __init__(self) -> None:
        self.rules: wire.OwnerRules | None = wire.OwnerRules(
            cpu_busy_max_milli=300,
            memory_used_max_milli=500,
            memory_min_bytes=0,
            gpu_busy_max_milli=200,
            gpu_memory_min_bytes=0,
        )

    def owner_rules(self, name: str) -> wire.OwnerRules | None:
        return self.rules


def test_other_rules_of_the_owner_reach_agents_that_are_connected_already() -> None:
    registry = YieldingRegistry()

    async def story(world: World) -> None:
        assert [one.owner for one in world.ash.all(wire.Welcome)][-1] == registry.rules
        registry.rules = None  # its machine is dedicated from now on
        world.gateway.sessions.send_owner_rules()
        assert [one.owner for one in world.ash.all(wire.Welcome)][-1] is None
        assert not world.ash.closed

    play(story, registry)


def test_a_machine_that_says_it_ends_gets_nothing_of_what_its_next_report_frees() -> None:
    async def story(world: World) -> None:
        resources = WorkerResources(4000, 4 << 30)
        joined = Worker(
            id="ash",
            provider="slurm",
            worker_type="cpu",
            resources=resources,
            created_at_ms=0,
            state=WorkerState.JOINED,
        )
        world.grid.ledger.apply([joined])
        job = await world.job_on(world.ash, "job")
        await world.grid.handle(a_submission(a_request("next", cores=4, require=("ash",))))
        world.ash.started(job)
        await world.gateway.settled()
        end = wire.AnnouncedEnd("SIGTERM: the time of this machine is over", 20_000)
        world.ash.say(wire.Heartbeat(node="ash", usage=Usage(), beat=2, end=end))
        world.ash.ended(job)  # taken in together with it
        await world.gateway.settled()
        assert world.state("job") is None, "it is over"
        assert world.state("next") is JobState.QUEUED

    play(story)
