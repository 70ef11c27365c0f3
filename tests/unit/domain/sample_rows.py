"""Rows that the tests of several modules look at."""

from __future__ import annotations

from distributed_grid.domain.jobs import Attempt, Job
from distributed_grid.domain.leases import Lease
from tests.support.builders import NOW, a_command, a_request

LEASE = Lease(id="r1", request=a_request(wait_s=5, priority="high"), asked_at_ms=NOW)
ATTEMPT = Attempt(number=1, lease_id="r1.1", node="gpu1", fence=7, assigned_at_ms=NOW, cores=(0, 1), pid=4242)
JOB = Job(
    uid="r1",
    id="train",
    command=a_command("python", "train.py"),
    request=a_request(),
    submitted_at_ms=NOW,
    attempts=(ATTEMPT,),
    lease_id="r1.1",
)
