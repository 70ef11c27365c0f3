"""Sessions of agents: what one of them says raises its own fences at most, and nothing of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.control.agents import AgentGateway
from distributed_grid.control.batch import EffectRouter
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import NodeDeclared
from distributed_grid.domain.fences import MAX_EPOCH, MAX_EPOCH_LEAD
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.states import NodeState
from distributed_grid.wire import (
    PROTOCOL,
    AgentHello,
    Heartbeat,
    RejectAgent,
    StartAttemptOrder,
    StopAttemptOrder,
    ToAgent,
    Welcome,
    decode_to_agent,
    encode,
)
from tests.support.builders import NOW, a_capacity, a_node, a_request, a_submission

Story = Callable[[Grid, AgentGateway], Awaitable[None]]


class Clock:
    def now_ms(self) -> int:
        return NOW


class Agent:
    """An agent's end of a link; every order is one that it can decode."""

    def __init__(self, node: str) -> None:
        self.nodes = (node,)
        self.orders: list[ToAgent] = []

    def send(self, message: ToAgent) -> None:
        self.orders.append(decode_to_agent(encode(message)))

    def of(self, *kinds: type) -> list[ToAgent]:
        return [order for order in self.orders if isinstance(order, kinds)]


def hello(node: str, epoch: int = 0) -> AgentHello:
    return AgentHello(PROTOCOL, "0.2.0", node, capacity=a_capacity(), epoch=epoch, boot="boot")


async def joined(gateway: AgentGateway, greeting: AgentHello) -> Agent:
    """An agent that has said hello, and sent a heartbeat."""
    agent = Agent(greeting.node)
    gateway.received(greeting, agent)
    gateway.received(Heartbeat(greeting.node, Usage(), 1), agent)
    await gateway.settled()
    return agent


def with_a_grid(story: Story) -> None:
    async def run() -> None:
        gateway = AgentGateway()
        grid = Grid(InMemoryStore(), Clock(), EffectRouter(gateway.perform))
        await grid.start()
        gateway.start(grid)
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
