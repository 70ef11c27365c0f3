"""From what people write to what the ledger counts, and no further."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.api import requests
from distributed_grid.domain.resources import Amounts
from distributed_grid.errors import BadInput
from distributed_grid.server.access.tokens import Caller
from distributed_grid.server.services.leases import GB, amounts_of
from tests.support.builders import a_node
from tests.unit.server.in_process_grid import InProcessGrid


@pytest.mark.parametrize(
    ("kind", "amount", "expected"),
    [
        ("cpu", 1, Amounts(cpu_milli=1000)),
        ("CPU", 0.25, Amounts(cpu_milli=250)),
        ("memory", 4, Amounts(memory_bytes=4 * GB)),
        ("Memory", 0.5, Amounts(memory_bytes=GB // 2)),
        ("gpu", 2, Amounts(gpu_milli=2000)),
        ("tpu", 3, Amounts(custom=(("TPU", 3),))),
    ],
)
def test_amounts_become_integers(kind: str, amount: float, expected: Amounts) -> None:
    assert amounts_of(kind, amount, {"TPU"}) == expected


@pytest.mark.parametrize(
    ("kind", "amount"),
    [
        *(("cpu", amount) for amount in (0, -1, float("nan"), float("inf"), 0.0001, 1e30)),
        *(("memory", 1e30), ("memory", 1e-12), ("bananas", 1), ("TPU", 1.5), ("", 1)),
    ],
)
def test_what_is_no_amount_of_anything_is_refused(kind: str, amount: float) -> None:
    with pytest.raises(BadInput):
        amounts_of(kind, amount, {"TPU"})


@given(st.sampled_from(["cpu", "gpu", "memory", "TPU"]), st.floats())
def test_nothing_but_a_sound_amount_or_a_refusal_comes_out(kind: str, amount: float) -> None:
    try:
        asked = amounts_of(kind, amount, {"TPU"})
    except BadInput:
        return
    assert max(asked.cpu_milli, asked.gpu_milli, asked.memory_bytes, *dict(asked.custom).values(), 0) > 0


def test_a_second_release_says_when_the_lease_ended() -> None:
    async def scenario() -> None:
        cluster = InProcessGrid()
        await cluster.open(a_node("ash"))
        await cluster.ask("r1")
        release = requests.ReleaseLease("r1")
        first = await cluster.leases.release(release, Caller("ann"))
        released_at = cluster.viewer.time(cluster.clock.now_ms())
        await cluster.later(60)
        again = await cluster.leases.release(release, Caller("ann"))
        assert (first.already_ended_at, again.already_ended_at) == (None, released_at)
        assert first.allocation.reason == again.allocation.reason == "released"
        await cluster.grid.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("cores", [1, 4], ids=["granted at once", "waiting for another"])
def test_lease_of_a_client_that_hangs_up_is_released_whenever_it_does(cores: int) -> None:
    async def scenario() -> None:
        cluster = InProcessGrid()
        await cluster.open(a_node("ash", cores=4))
        held = await cluster.ask("held") if cores == 4 else None
        answered = 0
        for steps in range(40):
            op = requests.RequestLease(
                request_id=f"r{steps}", resource_type="cpu", amount=cores, wait_seconds=60, duration_seconds=600
            )
            call = asyncio.create_task(cluster.leases.request_and_wait(op, Caller("ann")))
            for _ in range(steps):
                await asyncio.sleep(0)
            if not call.done():
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
            else:
                answered += 1
                await cluster.leases.release(requests.ReleaseLease(op.request_id, exact=True), Caller("ann"))
            alive = await cluster.grid.read(lambda ledger, now: list(ledger.leases))
            assert alive == (["held"] if held is not None else []), f"hung up after {steps} steps"
        assert answered < 40
        await cluster.grid.stop()

    asyncio.run(scenario())
