"""Moves of a scenario: processes that users have started by hand, and which work is asked to move when.

What is asked for depends on where a job is at that moment, so the request itself is made then.
"""

from __future__ import annotations

from random import Random

from msgspec import Struct

from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import MOVE_PREFIX, Move, MovedProcess, Way
from distributed_grid.domain.processes import ProcessIdentity
from distributed_grid.domain.resources import Amounts
from distributed_grid.domain.states import JobState
from distributed_grid.simulation.machine import ScriptedJob

FREEZES_MS = (500, 3_000, 10_000)
WITHIN_MS = (300, 3_000, 20_000)
"""Soon after a request: in a moment, while its files are shipped, or later."""


class PlannedOriginal(Struct, frozen=True):
    """A process that a user starts on a node, and how long it works."""

    at_ms: int
    node: str
    pid: int
    run_ms: int


class PlannedMove(Struct, frozen=True):
    """Somebody asks that a job, or a process (`pid`), goes to another node. `cancel_ms` later they do not want it any
    more, and `guard_dies_ms` later its guard is killed; 0 is never."""

    at_ms: int
    number: int
    target: str
    job: str = ""
    pid: int = 0
    freeze_ms: int = 10_000
    run_ms: int = 5_000
    cancel_ms: int = 0
    guard_dies_ms: int = 0

    @property
    def id(self) -> str:
        return f"{MOVE_PREFIX}{self.number}"


def draw_originals(random: Random, nodes: tuple[str, ...], *, until_ms: int) -> list[PlannedOriginal]:
    """A few processes, most of which outlive the busy time."""
    count = random.choice((0, 1, 3, 6))
    return [
        PlannedOriginal(
            random.randrange(until_ms // 2), random.choice(nodes), 1_000 + number, until_ms * number // 2 + 30_000
        )
        for number in range(1, count + 1)
    ]


def draw_moves(
    random: Random, nodes: tuple[str, ...], originals: list[PlannedOriginal], jobs: list[str], *, until_ms: int
) -> list[PlannedMove]:
    """Moves of some of the jobs, and of every original, some of them twice."""
    moves: list[PlannedMove] = []
    for original in originals:
        for _ in range(random.choice((1, 2))):
            at_ms = original.at_ms + random.randrange(1_000, until_ms // 2)
            moves.append(_move(random, nodes, at_ms, len(moves), pid=original.pid))
    for job in random.sample(jobs, min(len(jobs), random.choice((0, 2, 8)))):
        moves.append(_move(random, nodes, random.randrange(until_ms), len(moves), job=job))
    return moves


def _move(
    random: Random, nodes: tuple[str, ...], at_ms: int, number: int, *, job: str = "", pid: int = 0
) -> PlannedMove:
    return PlannedMove(
        at_ms,
        number,
        random.choice(nodes),
        job,
        pid,
        random.choice(FREEZES_MS),
        random.choice((500, 5_000, 40_000)),
        random.randrange(1, random.choice(WITHIN_MS)) if random.random() < 0.25 else 0,
        random.randrange(1, random.choice(WITHIN_MS)) if random.random() < 0.35 else 0,
    )


def requested_move(plan: PlannedMove, ledger: Ledger, node: str, identity: ProcessIdentity | None) -> Move | None:
    """What a user asks for, as things are; None where there is nothing to move."""
    asked = Request("unused", "ada", Amounts(500))
    if identity is not None:
        return Move(
            plan.id,
            "ada",
            node,
            _target(plan, ledger, node),
            Way.PROCESS_RESTART,
            asked,
            0,
            process=MovedProcess(identity, "data"),
            command=ScriptedJob(plan.run_ms).command(),
            freeze_ms=plan.freeze_ms,
        )
    job = ledger.jobs.get(plan.job)
    if job is None:
        return None
    way = Way.RESTART if job.restartable else Way.CHECKPOINT_RESTART
    way = Way.QUEUE_ELSEWHERE if job.state in (JobState.QUEUED, JobState.ASSIGNED) else way
    source = job.attempt.node if job.attempt is not None else min(ledger.nodes)
    return Move(plan.id, job.request.user, source, _target(plan, ledger, source), way, asked, 0, job=job.uid)


def _target(plan: PlannedMove, ledger: Ledger, source: str) -> str:
    """Where it is to go: not where it is."""
    return plan.target if plan.target != source else max(name for name in ledger.nodes if name != source)
