"""A dry run is the verdict: the same answer or refusal as the real thing, and nothing happens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bench.dry_run import compare
from distributed_grid.domain.events import LeaseReleased
from distributed_grid.errors import BadInput, Conflict, GridError
from tests.support.builders import a_node
from tests.unit.server.in_process_grid import InProcessGrid


def test_a_dry_run_equals_the_real_verdict_on_random_states() -> None:
    requests = 400
    same, kinds = asyncio.run(compare(requests, seed=7))
    assert same == requests
    for kind in ("granted", "gang granted", "displaces", "waits", "recalled", "Refused", "BadInput", "Conflict"):
        assert kinds[kind], f"no {kind} among {dict(kinds)}"


async def verdict(cluster: InProcessGrid, method: str, request_id: str, **fields: Any) -> Any:
    """Answer to a caller."""
    try:
        return await getattr(cluster, method)(request_id, **fields)
    except GridError as refusal:
        return type(refusal), str(refusal)


NONSENSE: tuple[dict[str, Any], ...] = (
    {"amount": 0},
    {"amount": -1},
    {"resource_type": "unicorns"},
    {"priority": "asap"},
    {"strategy": "best_guess"},
    {"labels": ["=x"]},
    {"resources": {"cpu": 1}},
    {"require": ["nowhere"]},
    {"resource_type": "gpu", "amount": 1.5},
    {"resource_type": "fpga", "amount": 0.5},
    {"strategy": "node_specific"},
    {"amount": 100},
    {"wait_seconds": 0, "amount": 8},
)
SENSE: tuple[dict[str, Any], ...] = (
    {},
    {"amount": 7},
    {"prefer": ["elm"], "strategy": "spread", "group": "web"},
    {"resource_type": "memory", "amount": 2, "resources": {"cpu": 1}},
    {"expects_seconds": 60},
)


@pytest.mark.parametrize("fields", [*NONSENSE, *SENSE])
@pytest.mark.parametrize("method", ["ask", "submit"])
@pytest.mark.parametrize("sharing", [True, False])
def test_every_request_gets_the_verdict_and_leaves_no_trace(method: str, fields: dict[str, Any], sharing: bool) -> None:
    async def scenario() -> None:
        cluster = InProcessGrid(sharing_enabled=sharing)
        await cluster.open(a_node("ash", cores=8), a_node("elm", cores=4, gpus=2, custom={"fpga": 2}))
        if sharing:
            await cluster.ask("before", amount=4, require=["ash"])
            await cluster.ask("queued", amount=8, expects_seconds=60)
        rows, events = cluster.grid.ledger.rows(), cluster.events()
        dry = await verdict(cluster, method, "r1", dry_run=True, **fields)
        assert cluster.grid.ledger.rows() == rows
        assert cluster.events() == events
        assert dry == await verdict(cluster, method, "r1", **fields)
        assert cluster.events() > events
        await cluster.grid.stop()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_an_id_that_was_used_before_is_told_as_it_would_be() -> None:
    async def scenario() -> None:
        cluster = await InProcessGrid().open(a_node("ash", cores=8))
        await cluster.ask("r1")
        await cluster.handle(LeaseReleased("r1", "ann"))
        over = await cluster.ask("r1", dry_run=True)
        assert over.allocation.state == "ended"
        assert over == await cluster.ask("r1")
        for dry_run in (True, False):
            with pytest.raises(Conflict, match="used before"):
                await cluster.ask("r1", amount=2, dry_run=dry_run)
        await cluster.grid.stop()

    asyncio.run(scenario())


def test_the_decision_has_the_same_shape_whether_it_goes_or_waits() -> None:
    async def scenario() -> None:
        cluster = await InProcessGrid().open(a_node("ash", cores=4), a_node("elm", cores=2))
        goes = (await cluster.submit("r1", amount=4, dry_run=True)).decision
        await cluster.ask("r2", amount=4, duration_seconds=600)
        waits = (await cluster.ask("r3", amount=3, dry_run=True)).decision
        assert (goes.node_id, goes.confidence, goes.strategy) == ("ash", 1.0, "load_balanced")
        assert (waits.node_id, waits.confidence, waits.alternatives) == (None, 0.0, [])
        assert waits.reasoning == ["ash: 0 cores free, 3 cores asked", "elm: 2 cores at most, 3 cores asked"]
        assert waits.estimated_start == cluster.viewer.time(cluster.clock.ms + 600_000)
        await cluster.grid.stop()

    asyncio.run(scenario())


def test_bad_input_is_bad_in_a_dry_run_too() -> None:
    async def scenario() -> None:
        cluster = await InProcessGrid().open(a_node("ash"))
        with pytest.raises(BadInput, match="more than zero"):
            await cluster.ask("r1", amount=0, dry_run=True)
        await cluster.grid.stop()

    asyncio.run(scenario())
