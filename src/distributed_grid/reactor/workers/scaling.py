"""Deciders of scaling: its rules, evaluations and their actions, and the end of a drained worker.

The evaluation is a step of its own and records its sample of the utilization. Its actions are performed one worker
after the other, some in that step and the others in later ones: each checks the leases and the budget of its moment.
A refused one is a record in the audit trail, never an error.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import (
    OutputsCollected,
    ScalingRequested,
    ScalingRulesSet,
    WorkerDrainRequested,
    WorkerRequested,
    WorkerResumed,
    WorkerTerminationRequested,
)
from distributed_grid.domain.followups import ScaleWorkers
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import GRID_USER
from distributed_grid.domain.rows import Row
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import ScalingPlan, Worker
from distributed_grid.errors import GridError
from distributed_grid.reactor.decision import Decision, Record, ScalingAnswer
from distributed_grid.reactor.workers import lifecycle
from distributed_grid.scheduling.scaling.evaluation import evaluate

MAX_ACTIONS_PER_STEP = 8
MAX_LOST_LISTED = 20


def on_rules_set(ledger: Ledger, event: ScalingRulesSet, now: int) -> Decision:
    """Set the rules of scaling."""
    return Decision([event.rules] if event.rules != ledger.scaling else [])


def on_scaling_requested(ledger: Ledger, event: ScalingRequested, now: int) -> Decision:
    """Evaluate the pool; its plan follows."""
    evaluation = evaluate(ledger, now, event.wall_ms, warm=event.warm, limit=len(event.ids))
    plan = evaluation.plan
    decision = Decision([evaluation.window], answer=ScalingAnswer(plan))
    if plan.action != "none":
        decision.follow = [ScaleWorkers(plan=plan, ids=event.ids, wall_ms=event.wall_ms)]
    return decision


def scale_workers(ledger: Ledger, order: ScaleWorkers, now: int) -> Decision:
    """Take one action of a plan; the rest follows, a bounded number of actions in this step."""
    plan = order.plan
    decision, rest = _next_action(ledger, order, now)
    decision.answer = None
    if not rest.worker_ids and not (rest.action == "scale_up" and rest.count):
        return decision
    ids = order.ids if rest.count == plan.count or plan.action == "scale_down" else order.ids[1:]
    following = replace(order, plan=rest, ids=ids)
    left = len(rest.worker_ids) + (rest.count if rest.action == "scale_up" else 0)
    if left % MAX_ACTIONS_PER_STEP:
        decision.follow.append(following)
    else:
        decision.later.append(following)
    return decision


def _next_action(ledger: Ledger, order: ScaleWorkers, now: int) -> tuple[Decision, ScalingPlan]:
    """The first action of a plan, and the rest of the plan."""
    plan = order.plan
    try:
        if plan.worker_ids:
            worker_id, *others = plan.worker_ids
            rest = replace(plan, worker_ids=tuple(others))
            if plan.action == "scale_up":
                resumed = lifecycle.on_resumed(ledger, WorkerResumed(worker_id, GRID_USER, plan.reason), now)
                return _marked(resumed, surplus=False), rest
            drain = WorkerDrainRequested(worker_id, GRID_USER, plan.reason)
            return _marked(lifecycle.on_drain_requested(ledger, drain, now), surplus=True), rest
        assert plan.worker is not None, "workers are started of some type"
        rest = replace(plan, count=plan.count - 1)
        wanted = replace(plan.worker, id=order.ids[0], by=GRID_USER, why=plan.reason)
        return lifecycle.on_requested(ledger, WorkerRequested(wanted, order.wall_ms), now), rest
    except GridError as refusal:
        record = Record("not-scaled", GRID_USER, "scaling", "", str(refusal), data={"action": plan.action})
        return Decision(records=[record]), replace(plan, worker_ids=(), count=0)


def _marked(decision: Decision, *, surplus: bool) -> Decision:
    """With the worker marked as one that nobody needs, or not any more."""
    rows: list[Row] = [replace(row, surplus=surplus) if isinstance(row, Worker) else row for row in decision.changes]
    decision.changes = rows
    return decision


def on_outputs_collected(ledger: Ledger, event: OutputsCollected, now: int) -> Decision:
    """Terminate a draining worker if nothing is lent there; files that could not be copied are recorded."""
    worker = ledger.workers.get(event.worker_id)
    if worker is None or worker.state is not WorkerState.DRAINING or ledger.leases_on.get(worker.node):
        return Decision()
    order = WorkerTerminationRequested(worker.id, GRID_USER, worker.why, event.wall_ms)
    decision = lifecycle.on_termination_requested(ledger, order, now)
    decision.answer = None
    files = f"{event.files:,} file{'' if event.files == 1 else 's'} of ended jobs brought home"
    lost = f", {len(event.lost):,} lost: {'; '.join(event.lost[:MAX_LOST_LISTED])}" if event.lost else ""
    data = {"files": event.files, "bytes": event.bytes, "lost": list(event.lost[:MAX_LOST_LISTED])}
    decision.records.insert(0, Record("outputs-kept", GRID_USER, worker.id, worker.node, files + lost, data=data))
    return decision
