"""Automatic offloading in the server: when it looks, whom it alerts, and who may switch it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

import pytest
from msgspec.structs import replace

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.api import requests
from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.offloading import NOT_SHARED
from distributed_grid.control.grid import Grid
from distributed_grid.domain.events import HeartbeatReceived, NodeDeclared, TimePassed
from distributed_grid.domain.moves import OffloadRules
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.rebalancing import PressureReading, RebalanceRules
from distributed_grid.monitoring.alerts import Alert
from distributed_grid.server.access.tokens import Caller, Forbidden
from distributed_grid.server.offloading.auto_offload import AutoOffloader
from distributed_grid.server.services.auto_offload import AutoOffloadService
from tests.support.builders import a_node
from tests.support.offload_looks import rebalance_rules
from tests.unit.server.in_process_grid import Clock

ADMIN, OTHER = Caller("ada", admin=True), Caller("bob", admin=False)


class Pressure:
    """A monitor that reads what the test says, and counts how often it was asked."""

    def __init__(self) -> None:
        self.level, self.asked = 900, 0

    async def readings(self, ahead_ms: int = 0, *, only: Collection[str] | None = None) -> tuple[PressureReading, ...]:
        assert not ahead_ms  # there are no blocks: nothing is forecast
        self.asked += 1
        return (PressureReading(node="ash", score=self.level, memory=self.level, cpu=0),)


class Server:
    """One node, and automatic offloading over it."""

    def __init__(self, rules: RebalanceRules | None, *, enabled: bool) -> None:
        self.clock, self.pressure = Clock(), Pressure()
        self.alerts: list[Alert] = []
        self.grid = Grid(InMemoryStore(), self.clock)
        offload = OffloadRules(enabled=enabled)
        self.offloader = AutoOffloader(self.grid, self.pressure, rules, offload, alert=self.alerts.append)
        self.service = AutoOffloadService(self.grid, lambda: Viewer(0), self.offloader)

    async def evaluate(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.ms += 60_000
            await self.grid.handle(HeartbeatReceived(name="ash", usage=Usage()))
            await self.grid.handle(TimePassed())
            await self.offloader.evaluate()

    def said(self) -> list[tuple[str, str, bool]]:
        return [(one.node, one.resource, one.raised) for one in self.alerts]


SHARED = rebalance_rules()


def served(
    story: Callable[[Server], Awaitable[None]], rules: RebalanceRules | None = SHARED, *, enabled: bool = True
) -> None:
    async def whole() -> None:
        server = Server(rules, enabled=enabled)
        await server.grid.start()
        try:
            await server.grid.handle(NodeDeclared(replace(a_node("ash"), host="ash")))
            await story(server)
        finally:
            await server.grid.stop()

    asyncio.run(whole())


def test_while_it_is_off_nothing_is_even_read() -> None:
    async def story(server: Server) -> None:
        await server.evaluate(5)
        assert server.pressure.asked == 0

    served(story, enabled=False)


def test_without_sharing_nothing_is_read_and_the_status_says_why() -> None:
    async def story(server: Server) -> None:
        await server.evaluate(5)
        assert server.pressure.asked == 0
        view = (await server.service.status(requests.GetAutoOffload(), ADMIN)).auto_offload
        assert (view.enabled, view.configured) == (False, True)
        assert view.stopped == NOT_SHARED

    served(story, None)


def test_a_node_that_is_degraded_and_restored_is_alerted_of_once_each() -> None:
    async def story(server: Server) -> None:
        await server.evaluate(4)
        assert server.said() == [("ash", "degraded", True)]
        assert "ash is degraded: memory at 90 %" in server.alerts[0].detail
        server.pressure.level = 100
        await server.evaluate(3)
        assert server.said()[1:] == [("ash", "degraded", False)]

    served(story)


def test_what_a_control_plane_finds_at_its_start_was_told_before() -> None:
    async def story(server: Server) -> None:
        await server.evaluate(4)
        next_one = AutoOffloader(
            server.grid, server.pressure, SHARED, server.offloader.offload, alert=server.alerts.append
        )
        await next_one.evaluate()
        assert len(server.alerts) == 1

    served(story)


def test_it_is_alerted_when_it_has_stopped_itself_and_when_it_goes_on() -> None:
    async def story(server: Server) -> None:
        server.pressure.level = 100
        await server.evaluate()
        ledger = server.grid.ledger
        ledger.apply([replace(ledger.auto_offload, failures=3, stopped_why="automatic offloading has stopped")])
        await server.evaluate(2)
        assert server.said() == [("auto_offload", "auto_offload", True)]
        view = (await server.service.set(requests.SetAutoOffload("enable"), ADMIN)).auto_offload
        assert (view.enabled, view.set_by, view.stopped, view.failures) == (True, "ada", None, 0)
        await server.evaluate()
        assert server.said()[1:] == [("auto_offload", "auto_offload", False)]

    served(story)


def test_only_an_admin_switches_it_and_it_looks_at_once() -> None:
    async def story(server: Server) -> None:
        with pytest.raises(Forbidden, match="bob may not switch"):
            await server.service.set(requests.SetAutoOffload("enable"), OTHER)
        assert server.grid.ledger.auto_offload.enabled is None
        running = asyncio.create_task(server.offloader.run())
        try:
            await server.service.set(requests.SetAutoOffload("enable"), ADMIN)
            async with asyncio.timeout(30):
                while not server.pressure.asked:
                    await asyncio.sleep(0)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        view = (await server.service.status(requests.GetAutoOffload(), ADMIN)).auto_offload
        assert [one.node_id for one in view.nodes] == ["ash"]

    served(story, enabled=False)
