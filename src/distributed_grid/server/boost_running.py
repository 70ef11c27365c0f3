"""Commands that use a boost: jobs under its lease, on the node that lends it, with Ray set up to use it, too."""

from __future__ import annotations

from distributed_grid.domain.events import JobSubmitted
from distributed_grid.domain.jobs import Command
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.resources import Amounts
from distributed_grid.orchestration.views import View
from distributed_grid.reactor import JobAnswer
from distributed_grid.server import requests
from distributed_grid.server.boosting import Boosting
from distributed_grid.server.deeds import Caller
from distributed_grid.server.house import House


async def run_in_boost(house: House, boosts: Boosting, op: requests.RunBoost, caller: Caller) -> View:
    """Submit a command that runs with what a boost holds."""
    lease = await boosts.find(op.boost_id)
    caller.must_own(lease.request.user, f"the boost {lease.id}")

    def group(ledger: Ledger, now: int) -> str:
        binding = ledger.binding_of(lease)
        return binding.group if binding is not None else ""

    told = {"GRID_BOOST": lease.id}
    name = await house.grid.read(group)
    if name:
        told |= {"GRID_BOOST_GROUP": name, **await house.ray_environment(lease.node)}
    command = Command(op.argv, tuple(sorted((op.env | told).items())), op.cwd, workdir=op.workdir, given=op.given)
    request = Request(op.request_id, lease.request.user, Amounts(), lease.request.priority, within=lease.id)
    answer = await house.grid.handle(JobSubmitted(op.job_id or f"job-{op.request_id[:12]}", command, request))
    assert isinstance(answer, JobAnswer)
    return {"job": house.viewer.job(answer.job)}
