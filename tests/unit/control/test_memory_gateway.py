"""The control plane's end of lent memory: orders to the agents that are there, reports into the ledger."""

from __future__ import annotations

import asyncio
from typing import Any

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.control.grid import Grid
from distributed_grid.control.memory_gateway import MemoryGateway
from distributed_grid.domain.events import BlockAsked, BlockReleased, HeartbeatReceived, NodeDeclared, NodeDrained
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Usage
from distributed_grid.memory.protocol.frames import FILL, read_claims
from distributed_grid.reactor.effects import MemoryEffect
from distributed_grid.wire import (
    MAX_IDS,
    CopiesFreedReport,
    CopyMadeReport,
    Endpoint,
    FreeCopiesOrder,
    MakeCopyOrder,
    MemoryFailedReport,
    MemoryServedReport,
    ServeMemoryOrder,
    ToAgent,
    decode_to_agent,
    encode,
    served_pages,
)
from tests.support.builders import NOW, a_node

MB = 1024**2


class Clock:
    def now_ms(self) -> int:
        return NOW


class Agent:
    """An agent's end of a link that remembers its orders."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = nodes
        self.orders: list[ToAgent] = []

    def close(self, why: str) -> None:
        raise AssertionError(why)

    def send(self, message: ToAgent) -> None:
        self.orders.append(message)

    def last(self, kind: type) -> Any:
        return [order for order in self.orders if isinstance(order, kind)][-1]


def served(node: str, *copies: str) -> MemoryServedReport:
    return MemoryServedReport(
        node=node, endpoint=Endpoint("10.0.0.1", 7000, "", "", f"{node}-life"), key=b"k" * 32, copies=copies
    )


def in_a_pool(story: Any) -> None:
    """Tells a story with two nodes that serve their memory, their agents, and the ledger's checks at the end."""

    async def run() -> None:
        agents = {"ash": Agent("ash"), "birch": Agent("birch")}
        grid = Grid(InMemoryStore(), Clock())
        lending = MemoryGateway(grid, agents, lambda node: (b"certificate", b"key"))
        grid.perform_with({MemoryEffect: lending.perform})
        await grid.start()
        try:
            for name in agents:
                await grid.handle(NodeDeclared(a_node(name)))
                await grid.handle(HeartbeatReceived(name=name, usage=Usage(), beat=5000))
            await asyncio.wait_for(story(grid, lending, agents["ash"], agents["birch"]), 30)
            (await grid.read(lambda ledger, now: ledger)).check()
        finally:
            await grid.stop()

    asyncio.run(run())


async def ledger_of(grid: Grid) -> Ledger:
    return await grid.read(lambda ledger, now: ledger)


def test_a_node_is_told_to_open_its_memory_with_a_certificate_of_its_own() -> None:
    async def story(grid: Grid, lending: MemoryGateway, ash: Agent, birch: Agent) -> None:
        await grid.handle(BlockAsked(id="b1", user="ann", size_bytes=MB, term_ms=1000, prefer="ash"))
        assert ash.orders == [ServeMemoryOrder("ash", b"certificate", b"key", "local")]
        assert not birch.orders

    in_a_pool(story)


def test_a_block_that_has_to_leave_is_copied_with_a_ticket_that_fills_then_freed() -> None:
    async def story(grid: Grid, lending: MemoryGateway, ash: Agent, birch: Agent) -> None:
        await lending.received(served("ash"), ash)
        await lending.received(served("birch"), birch)
        await grid.handle(BlockAsked(id="b1", user="ann", size_bytes=MB, term_ms=1000, prefer="ash"))
        await grid.handle(NodeDrained("ash"))
        order = ash.last(MakeCopyOrder)
        claims = read_claims(order.ticket.claims)
        assert (claims.copy, claims.generation, claims.incarnation) == ("b1:2", 2, "birch-life")
        assert claims.rights & FILL
        assert claims.expires_boot_ms == 5000 + 600_000, "counted from the last heartbeat"
        await lending.received(CopyMadeReport("b1:1", 2), birch)
        assert (await ledger_of(grid)).blocks["b1"].generation == 1, "it is not birch's copy to tell of"
        await lending.received(CopyMadeReport("b1:1", 2), ash)
        assert ash.last(FreeCopiesOrder).copies == ("b1:1",)
        await lending.received(CopiesFreedReport(("b1:1",)), ash)
        assert [place.node for place in (await ledger_of(grid)).blocks["b1"].places] == ["birch"]

    in_a_pool(story)


def test_an_agent_that_comes_back_gets_its_orders_again_and_frees_what_nobody_knows() -> None:
    async def story(grid: Grid, lending: MemoryGateway, ash: Agent, birch: Agent) -> None:
        await lending.received(served("ash"), ash)
        await grid.handle(BlockAsked(id="b1", user="ann", size_bytes=MB, term_ms=1000, prefer="ash"))
        await grid.handle(BlockReleased("b1", "ann"))
        ash.orders.clear()
        await lending.unknown("ash")
        lending.catch_up("ash")
        assert set(ash.orders) == {FreeCopiesOrder(("b1:1",), "ash")}
        await lending.received(served("ash", "b1:1", "old:7"), ash)
        assert set(ash.orders) == {FreeCopiesOrder(("b1:1",), "ash"), FreeCopiesOrder(("old:7",), "ash")}

    in_a_pool(story)


def test_copies_are_ordered_to_be_freed_again_until_they_are() -> None:
    async def story(grid: Grid, lending: MemoryGateway, ash: Agent, birch: Agent) -> None:
        await lending.received(served("ash", "old:7"), ash)
        await grid.handle(BlockAsked(id="b1", user="ann", size_bytes=MB, term_ms=1000, prefer="ash"))
        await grid.handle(BlockReleased("b1", "ann"))
        for _ in range(3):
            ash.orders.clear()
            lending.resend("ash")
            assert ash.orders == [FreeCopiesOrder(("b1:1",), "ash"), FreeCopiesOrder(("old:7",), "ash")]
        await lending.received(CopiesFreedReport(("b1:1", "old:7")), ash)
        ash.orders.clear()
        lending.resend("ash")
        assert (ash.orders, birch.orders) == ([], [])

    in_a_pool(story)


def test_memory_that_is_needed_and_not_served_is_asked_for_again() -> None:
    async def story(grid: Grid, lending: MemoryGateway, ash: Agent, birch: Agent) -> None:
        await grid.handle(BlockAsked(id="b1", user="ann", size_bytes=MB, term_ms=1000, prefer="ash"))
        ash.orders.clear()
        lending.resend("ash")
        assert [type(order) for order in ash.orders] == [ServeMemoryOrder]
        await lending.received(served("ash"), ash)
        ash.orders.clear()
        lending.resend("ash")
        assert ash.orders == []

    in_a_pool(story)


def test_what_an_agent_says_of_another_nodes_memory_is_not_believed() -> None:
    async def story(grid: Grid, lending: MemoryGateway, ash: Agent, birch: Agent) -> None:
        await lending.received(served("birch"), ash)
        await lending.received(served(""), ash)
        assert not (await ledger_of(grid)).memory_servers
        lending.attach_local(ash)
        await lending.received(served(""), ash)
        assert list((await ledger_of(grid)).memory_servers) == [""]

    in_a_pool(story)


def test_memory_that_cannot_be_opened_loses_what_was_to_be_there() -> None:
    async def story(grid: Grid, lending: MemoryGateway, ash: Agent, birch: Agent) -> None:
        await grid.handle(BlockAsked(id="b1", user="ann", size_bytes=MB, term_ms=1000, prefer="ash"))
        await lending.received(MemoryFailedReport("ash", "no address"), ash)
        assert (await ledger_of(grid)).blocks["b1"].lost

    in_a_pool(story)


def test_thousands_of_freed_copies_are_settled_a_few_at_a_time() -> None:
    async def story(grid: Grid, lending: MemoryGateway, ash: Agent, birch: Agent) -> None:
        await lending.received(served("ash"), ash)
        for number in range(450):
            await grid.handle(BlockAsked(id=f"b{number}", user="ann", size_bytes=4096, term_ms=100_000, prefer="ash"))
            await grid.handle(BlockReleased(f"b{number}", "ann"))
        await lending.received(CopiesFreedReport(tuple(f"b{number}:1" for number in range(450))), ash)
        found = await ledger_of(grid)
        assert not found.blocks
        assert not found.leases

    in_a_pool(story)


def test_copies_are_compared_only_when_the_last_page_is_there() -> None:
    async def story(grid: Grid, lending: MemoryGateway, ash: Agent, birch: Agent) -> None:
        names = tuple(f"old{number}:1" for number in range(MAX_IDS))
        report = MemoryServedReport(
            node="ash", endpoint=served("ash").endpoint, key=b"k" * 32, copies=names, on_disk=(*names, "gone:1")
        )
        pages = served_pages(report)
        assert len(pages) == 3
        await lending.received(pages[1], ash)
        assert ash.orders == [], "a page without its report"
        for page in pages[:-1]:
            await lending.received(page, ash)
        assert not (await ledger_of(grid)).memory_servers
        lending.gone(ash)
        await lending.received(pages[-1], ash)
        assert not (await ledger_of(grid)).memory_servers, "the link broke in between"
        for page in pages:
            await lending.received(page, ash)
        assert list((await ledger_of(grid)).memory_servers) == ["ash"]
        freed = [copy for order in ash.orders if isinstance(order, FreeCopiesOrder) for copy in order.copies]
        assert sorted(freed) == sorted((*report.copies, *report.on_disk))
        assert all(decode_to_agent(encode(order)) == order for order in ash.orders)

    in_a_pool(story)
