"""Blocks as they are asked for: granted and served, found by their user alone, refused in the guide's words."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from distributed_grid.api import requests
from distributed_grid.api.answers.memory import LocatedBlock, RenewedBlocks
from distributed_grid.control.grid import Grid
from distributed_grid.domain.blocks import MemoryServerRow
from distributed_grid.domain.events import LeaseLost, MemoryServed, NodeDrained, PullWorkerRegistered
from distributed_grid.domain.nodes import PULL_HOST, Node, Usage
from distributed_grid.domain.resources import Capacity
from distributed_grid.errors import Ambiguous, BadInput, BlockLost, NotFound, Refused, Unreachable
from distributed_grid.memory.protocol.frames import READ, WRITE, derive_secret, read_claims
from distributed_grid.reactor.effects import MemoryEffect, ServeMemory
from distributed_grid.server.access.tokens import Caller, Forbidden
from distributed_grid.server.services.memory import MemoryService
from distributed_grid.wire import MAX_CHUNK_BYTES
from tests.support.builders import a_node
from tests.unit.server.in_process_grid import InProcessGrid

ANN, BOB, ROOT = Caller("ann"), Caller("bob"), Caller("root", admin=True)
KEY, MB = b"k" * 32, 1024**2
Scenario = Callable[["MemoryGrid"], Awaitable[None]]


class MemoryGrid(InProcessGrid):
    """A small cluster whose two nodes open their memory when they are told to, or not."""

    def __init__(self, *, problem: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.grid = Grid(self.store, self.clock)
        self.grid.perform_with({MemoryEffect: self.lend})
        self.memory = MemoryService(
            self.grid, self.get_viewer, sharing_enabled=self.sharing_enabled, is_stopping=self.stopping
        )
        self.problem = problem
        self.serves = True
        self.ordered: list[MemoryEffect] = []

    def lend(self, effect: MemoryEffect) -> None:
        self.ordered.append(effect)
        if isinstance(effect, ServeMemory) and self.serves:
            asyncio.get_running_loop().call_soon(self.serve, effect.node)

    def serve(self, node: str) -> None:
        lender = MemoryServerRow(
            node=node, host="10.0.0.1", port=7000, incarnation=f"{node}-life", key_bytes=KEY, gone=bool(self.problem)
        )
        self.reported = asyncio.ensure_future(self.grid.handle(MemoryServed(lender, problem=self.problem)))

    async def allocate(self, block_id: str, size: int = MB, caller: Caller = ANN, **fields: Any) -> LocatedBlock:
        op = requests.convert({"request_id": block_id, "size": size, **fields}, requests.AllocateBlock)
        return await self.memory.allocate(op, caller)

    async def find(self, name: str, caller: Caller = ANN) -> LocatedBlock:
        return await self.memory.find(requests.FindBlock(name), caller)


@pytest.fixture
def run_scenario() -> Callable[..., None]:
    """Runs a scenario in a cluster with two nodes of 16 GB."""

    def run_whole(scenario: Scenario, **options: Any) -> None:
        async def run() -> None:
            cluster = MemoryGrid(**options)
            await cluster.open(a_node("ash"), a_node("birch"))
            await cluster.run(scenario)

        asyncio.run(run())

    return run_whole


def test_a_block_is_answered_with_tickets_once_its_node_serves_its_memory(run_scenario: Any) -> None:
    async def scenario(cluster: MemoryGrid) -> None:
        found = await cluster.allocate("b1", 5 * MB, preferred_node="birch", name="model", meta="{}")
        block, (place,) = found.block, found.places
        assert (block.nodes, block.size, block.name, block.state) == (["birch"], 5 * MB, "model", "ready")
        packed = base64.b64decode(place.claims)
        claims = read_claims(packed)
        assert (claims.copy, claims.size, claims.rights) == (place.copy_, 5 * MB, READ | WRITE)
        assert claims.incarnation == place.incarnation == "birch-life"
        assert base64.b64decode(place.secret) == derive_secret(KEY, packed)
        assert cluster.ordered == [ServeMemory("birch")]
        assert (await cluster.allocate("b1", 5 * MB, preferred_node="birch", name="model", meta="{}")).block == block

    run_scenario(scenario)


def test_only_nodes_that_can_hold_blocks_count_as_lenders(run_scenario: Any) -> None:
    async def scenario(cluster: MemoryGrid) -> None:
        has = Capacity(4000, 8 << 30)
        pull = Node(name="browser", capacity=has, host=PULL_HOST, joined=True, hold_ms=60_000, incarnation="one")
        await cluster.grid.handle(PullWorkerRegistered(pull, Usage()))
        await cluster.grid.handle(NodeDrained("birch", "ann asked for it", cooling=True))
        nodes = {node.node: node for node in (await cluster.memory.stats(requests.GetMemoryStats(), ROOT)).nodes}
        assert list(nodes) == ["ash", "birch"]
        assert nodes["ash"].free_bytes > 0
        assert nodes["birch"].free_bytes == 0

    run_scenario(scenario)


def test_nobody_but_its_user_gets_a_block_or_frees_it(run_scenario: Any) -> None:
    async def scenario(cluster: MemoryGrid) -> None:
        await cluster.allocate("b1", name="mine")
        memory = cluster.memory
        for answer in (
            memory.find(requests.FindBlock("b1"), BOB),
            memory.free(requests.FreeBlock("b1"), BOB),
            memory.name(requests.NameBlock("b1", "yours"), BOB),
        ):
            with pytest.raises(Forbidden, match="block b1 belongs to ann, not to bob"):
                await answer
        with pytest.raises(NotFound):
            await cluster.memory.find(requests.FindBlock(name="mine"), BOB)
        assert (await cluster.find("b1", ROOT)).block.name == "mine"

    run_scenario(scenario)


def test_a_block_is_found_by_a_beginning_of_its_id_that_fits_no_other(run_scenario: Any) -> None:
    async def scenario(cluster: MemoryGrid) -> None:
        await cluster.allocate("abcde1")
        await cluster.allocate("abcdf2")
        assert (await cluster.find("abcde")).block.block_id == "abcde1"
        with pytest.raises(Ambiguous, match="'abcd' fits several: abcde1, abcdf2"):
            await cluster.find("abcd")
        for nothing in ("", "a", "abc", "zzzz"):
            with pytest.raises(NotFound):
                await cluster.find(nothing)

    run_scenario(scenario)


def test_a_node_that_cannot_open_its_memory_is_a_refusal_and_nothing_is_held(run_scenario: Any) -> None:
    async def scenario(cluster: MemoryGrid) -> None:
        with pytest.raises(Refused, match=r"^Failed to allocate memory block: .*ash.*no space left.*; nothing of it"):
            await cluster.allocate("b1", preferred_node="ash")
        assert not (await cluster.grid.read(lambda ledger, now: (dict(ledger.leases), dict(ledger.blocks))))[0]
        assert (await cluster.memory.list(requests.ListBlocks(), ROOT)).blocks == []

    run_scenario(scenario, problem="no space left")


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"size": 0}, BadInput, "1 to 70,368,744,177,664 bytes, not 0"),
        ({"size": -5}, BadInput, "not -5"),
        ({"size": 1 << 50}, BadInput, "bytes, not"),
        ({"copies": 0}, BadInput, "1 to 3 copies, not 0"),
        ({"size": 20 * 1024 * MB}, Refused, "No available nodes for memory allocation: ash: 16.0 GB at most"),
        ({"copies": 3}, Refused, "No available nodes for memory allocation"),
        ({"preferred_node": "cedar"}, Refused, "no node is called cedar; the nodes are: ash, birch"),
        ({"meta": "x" * 4097}, BadInput, "4096"),
    ],
)
def test_an_invalid_request_is_refused_and_changes_nothing(
    run_scenario: Any, fields: Any, kind: Any, words: str
) -> None:
    async def scenario(cluster: MemoryGrid) -> None:
        with pytest.raises(kind, match=words):
            await cluster.allocate("b1", **fields)
        assert (await cluster.memory.list(requests.ListBlocks(), ROOT)).blocks == []

    run_scenario(scenario)


def test_sharing_that_is_switched_off_refuses_memory_too(run_scenario: Any) -> None:
    async def scenario(cluster: MemoryGrid) -> None:
        with pytest.raises(Refused, match="Resource sharing not enabled"):
            await cluster.allocate("b1")

    run_scenario(scenario, sharing_enabled=False)


def test_a_lost_block_says_what_was_lost_and_where(run_scenario: Any) -> None:
    async def scenario(cluster: MemoryGrid) -> None:
        found = await cluster.allocate("b1", name="dear", preferred_node="ash")
        await cluster.grid.handle(LeaseLost(found.places[0].copy_, "ash was not heard from"))
        with pytest.raises(BlockLost, match=r"b1 \(1,048,576 bytes, 'dear'\) is lost with ash: ash was not heard from"):
            await cluster.find("b1")
        assert (await cluster.memory.list(requests.ListBlocks(), ROOT)).blocks[0].state == "lost"
        assert (await cluster.memory.stats(requests.GetMemoryStats(), ROOT)).lost == 1
        await cluster.memory.free(requests.FreeBlock("b1"), ANN)
        with pytest.raises(NotFound):
            await cluster.find("b1")

    run_scenario(scenario)


def test_a_block_whose_node_is_away_is_unreachable_and_not_lost(run_scenario: Any) -> None:
    async def scenario(cluster: MemoryGrid) -> None:
        await cluster.allocate("b1", preferred_node="ash")
        await cluster.grid.handle(MemoryServed(MemoryServerRow(node="ash", gone=True)))
        with pytest.raises(Unreachable, match="ash holds block b1, and is not connected"):
            await cluster.find("b1")
        cluster.serve("ash")
        assert (await cluster.find("b1")).places[0].port == 7000

    run_scenario(scenario)


def test_an_allocation_whose_client_hangs_up_is_undone(run_scenario: Any) -> None:
    async def scenario(cluster: MemoryGrid) -> None:
        cluster.serves = False
        asked = asyncio.create_task(cluster.allocate("b1"))
        while "b1" not in await cluster.grid.read(lambda ledger, now: set(ledger.blocks)):
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert (await cluster.memory.list(requests.ListBlocks(), ROOT)).blocks == []

    run_scenario(scenario)


def test_a_session_renews_its_own_blocks_and_no_others(run_scenario: Any) -> None:
    async def scenario(cluster: MemoryGrid) -> None:
        await cluster.allocate("b1", session="s1")
        await cluster.allocate("b2", ttl_seconds=600)
        assert await cluster.memory.renew(requests.RenewBlocks("s1"), BOB) == RenewedBlocks(0)
        await cluster.later(500)
        assert await cluster.memory.renew(requests.RenewBlocks("s1"), ANN) == RenewedBlocks(1)
        await cluster.later(3300)
        assert [block.block_id for block in (await cluster.memory.list(requests.ListBlocks(), ROOT)).blocks] == ["b1"]

    run_scenario(scenario)


def test_blocks_are_listed_in_pages_that_an_agent_can_be_sent(run_scenario: Any) -> None:
    async def scenario(cluster: MemoryGrid) -> None:
        made = [f"b{number:02}" for number in range(40)]
        for name in made:
            await cluster.allocate(name, size=1, ttl_seconds=600, meta="\x01" * 4000, name=f"{name}-" + "\x02" * 500)
        found: list[str] = []
        pages = 0
        while True:
            page = await cluster.memory.list(requests.ListBlocks(found[-1] if found else ""), ROOT)
            assert len(msgspec.json.encode(page)) <= MAX_CHUNK_BYTES
            found += [block.block_id for block in page.blocks]
            pages += 1
            if not page.more:
                break
        assert found == made
        assert pages > 5

    run_scenario(scenario)
