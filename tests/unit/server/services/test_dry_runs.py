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


async def verdict(house: InProcessGrid, deed: str, request_id: str, **fields: Any) -> Any:
    """What a caller hears."""
    try:
        return await getattr(house, deed)(request_id, **fields)
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
@pytest.mark.parametrize("deed", ["ask", "submit"])
@pytest.mark.parametrize("sharing", [True, False])
def test_every_door_gets_the_verdict_and_leaves_no_trace(deed: str, fields: dict[str, Any], sharing: bool) -> None:
    async def story() -> None:
        house = InProcessGrid(sharing_enabled=sharing)
        await house.open(a_node("ash", cores=8), a_node("elm", cores=4, gpus=2, custom={"fpga": 2}))
        if sharing:
            await house.ask("before", amount=4, require=["ash"])
            await house.ask("queued", amount=8, expects_seconds=60)
        rows, events = house.grid.ledger.rows(), house.events()
        dry = await verdict(house, deed, "r1", dry_run=True, **fields)
        assert house.grid.ledger.rows() == rows
        assert house.events() == events
        assert dry == await verdict(house, deed, "r1", **fields)
        assert house.events() > events
        await house.grid.stop()

    asyncio.run(asyncio.wait_for(story(), 20))


def test_an_id_that_was_used_before_is_told_as_it_would_be() -> None:
    async def story() -> None:
        house = await InProcessGrid().open(a_node("ash", cores=8))
        await house.ask("r1")
        await house.handle(LeaseReleased("r1", "ann"))
        over = await house.ask("r1", dry_run=True)
        assert over["allocation"]["state"] == "ended"
        assert over == await house.ask("r1")
        for dry_run in (True, False):
            with pytest.raises(Conflict, match="used before"):
                await house.ask("r1", amount=2, dry_run=dry_run)
        await house.grid.stop()

    asyncio.run(story())


def test_the_decision_has_the_same_shape_whether_it_goes_or_waits() -> None:
    async def story() -> None:
        house = await InProcessGrid().open(a_node("ash", cores=4), a_node("elm", cores=2))
        goes = (await house.submit("r1", amount=4, dry_run=True))["decision"]
        await house.ask("r2", amount=4, duration_seconds=600)
        waits = (await house.ask("r3", amount=3, dry_run=True))["decision"]
        fields = {"node_id", "strategy", "confidence", "reasoning", "alternatives", "estimated_start"}
        assert set(goes) == set(waits) == fields
        assert (goes["node_id"], goes["confidence"], goes["strategy"]) == ("ash", 1.0, "load_balanced")
        assert (waits["node_id"], waits["confidence"], waits["alternatives"]) == (None, 0.0, [])
        assert waits["reasoning"] == ["ash: 0 cores free, 3 cores asked", "elm: 2 cores at most, 3 cores asked"]
        assert waits["estimated_start"] == house.viewer.time(house.clock.ms + 600_000)
        await house.grid.stop()

    asyncio.run(story())


def test_bad_input_is_bad_in_a_dry_run_too() -> None:
    async def story() -> None:
        house = await InProcessGrid().open(a_node("ash"))
        with pytest.raises(BadInput, match="more than zero"):
            await house.ask("r1", amount=0, dry_run=True)
        await house.grid.stop()

    asyncio.run(story())
