"""Lifetime of machines in placement: what states how long it takes goes only where the machine lives so long."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import WorkerBooted
from distributed_grid.scheduling.queue.reasons import why_not_now
from distributed_grid.scheduling.scaling.demand import TOO_LONG, read_demand, worker_could_serve
from tests.support.builders import a_node, a_request
from tests.support.scaling import ScalingScenario, a_type, rules

HOUR = 3600.0


def a_grid(lifetime_s: float) -> tuple[ScalingScenario, str]:
    """A worker of four cores that its provider ends after so long; the node at home is full."""
    offered = replace(a_type(), lifetime_ms=round(1000 * lifetime_s))
    scenario = ScalingScenario(a_node("home", cores=2), scaling=rules(offered, up_cooldown_ms=0))
    scenario.ask(a_request("all", cores=2))
    scenario.ask(a_request("first", cores=4))
    scenario.evaluate()
    (worker_id,) = scenario.deliver()
    scenario.handle(WorkerBooted(worker_id, "i-1", ends_in_ms=round(1000 * lifetime_s)))
    scenario.release("first")
    return scenario, worker_id


def test_a_lease_that_would_outlive_the_machine_is_not_placed_there() -> None:
    grid, worker = a_grid(HOUR)
    grid.ask(a_request("long", cores=1, duration_s=2 * HOUR))
    grid.ask(a_request("expected", cores=1, expects_ms=round(2000 * HOUR)))
    assert not grid.ledger.leases.keys() & {"long", "expected"} or not grid.ledger.leases_on.get(worker)
    grid.ask(a_request("short", cores=1, duration_s=HOUR / 2))
    grid.ask(a_request("unknown", cores=1))
    assert grid.ledger.leases["short"].node == worker, "nobody waits behind what cannot be placed there"
    assert grid.ledger.leases["unknown"].node == worker


def test_explain_says_why() -> None:
    grid, worker = a_grid(HOUR)
    request = a_request("long", cores=1, duration_s=2 * HOUR)
    assert f"{worker}: its machine ends in 3600 s, and this takes 7200 s" in why_not_now(grid.ledger, request, grid.now)


def test_a_worker_that_lives_too_short_by_now_makes_room_for_another_one() -> None:
    grid, worker = a_grid(HOUR)
    for _ in range(18):
        grid.advance(100)
    grid.ask(a_request("long", cores=4, duration_s=3 * HOUR / 4))
    assert not grid.ledger.leases["long"].holds
    plan = grid.evaluate()
    assert (plan.action, plan.count) == ("scale_up", 1), plan.reason
    (other,) = grid.deliver()
    assert grid.ledger.leases["long"].node == other != worker


def test_what_no_machine_lives_long_enough_for_starts_none() -> None:
    grid, _ = a_grid(HOUR)
    request = a_request("too-long", cores=4, duration_s=2 * HOUR)
    grid.ask(request)
    lent = [one.resources for one in grid.ledger.scaling.types]
    assert read_demand(grid.ledger, lent).not_counted == {TOO_LONG: 1}
    assert not worker_could_serve(grid.ledger, request)
    assert grid.evaluate(seconds=1).action == "none"
