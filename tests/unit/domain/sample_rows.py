"""Rows that the tests of several modules look at."""

from __future__ import annotations

from distributed_grid.domain.jobs import Attempt, Job
from distributed_grid.domain.leases import Lease
from tests.support.builders import NOW, a_command, a_request

LEASE = Lease("r1", a_request(wait_s=5, priority="high"), NOW)
ATTEMPT = Attempt(1, "r1.1", "gpu1", 7, NOW, cores=(0, 1), pid=4242)
JOB = Job("r1", "train", a_command("python", "train.py"), a_request(), NOW, attempts=(ATTEMPT,), lease_id="r1.1")
