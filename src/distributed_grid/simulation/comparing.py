"""Replaying a trace under one policy after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distributed_grid.simulation.candidates import Candidate
from distributed_grid.simulation.figures import Figures
from distributed_grid.simulation.owners import comings
from distributed_grid.simulation.replay import BEGIN_MS, Progress, Replay
from distributed_grid.simulation.traces import Trace

OWNER_STAYS_MS = 3_600_000


def compared(
    trace: Trace, policies: Sequence[Candidate], *, seed: int, owners_per_day: float, progress: Progress | None = None
) -> Iterator[tuple[str, Figures]]:
    """Each policy's name and what it would have made of the work; owners come and go the same for all of them."""
    for policy in policies:
        owners = [
            comings(seed, node.name, per_day=owners_per_day, lasts_ms=OWNER_STAYS_MS, begin_ms=BEGIN_MS)
            for node in policy.nodes
        ]
        replay = Replay(policy.work(trace.work), policy.nodes, policy.policy, owners=owners, progress=progress)
        yield policy.name, replay.run()
