"""Dispatch: the decider of each event and follow-up, the order of a step, and the budget of reports.

A lying or broken agent can report without end, and each report may be worth an audit record. A node may cause
`REPORT_BURST` records at once, and one more every `REPORT_REFILL_MS`. Records beyond that are only counted, and the
count is recorded with the next record that fits. The changes that a report makes are not affected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from distributed_grid.domain import events, followups
from distributed_grid.domain.events import AttemptEnded, AttemptPaused, EpochReported, NodeDeclared, NodeHeard
from distributed_grid.domain.followups import PLACES, AssessNode, Cause, Place, ScanQueue
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import NodeObservation
from distributed_grid.domain.rows import Row
from distributed_grid.reactor import (
    block_copies,
    blocks,
    deliveries,
    engines,
    jobs,
    lease_growth,
    lease_lifetime,
    leases,
    node_liveness,
    nodes,
    pressure,
    reruns,
)
from distributed_grid.reactor.decision import Answer, Decision, Record
from distributed_grid.reactor.offloading import moves
from distributed_grid.reactor.workers import (
    announced_ends,
    lifecycle,
    provider_lists,
    pull_workers,
    scaling,
    worker_checks,
)

REPORT_BURST = 200
REPORT_REFILL_MS = 10_000
MAX_REASON_CHARS = 500
_REPORTS = (AttemptEnded, AttemptPaused, NodeDeclared, EpochReported, NodeHeard, AssessNode)
"""Causes that an agent can bring about as often as it likes."""
_OMITTED = frozenset(
    {"late-report", "paused", "resumed", "node-declared", "node-kept", "node-epoch", "clock-jumped", "clock-steady"}
)
"""Records that can be left out: all others follow from decisions of the grid, and belong to the history of a job."""

Decider = Callable[[Ledger, Any, int], Decision]
DECIDERS: dict[type, Decider] = {
    events.ControlPlaneStarted: nodes.on_control_plane_started,
    events.PolicySet: nodes.on_policy_set,
    events.NodeDeclared: nodes.on_declared,
    events.EpochReported: nodes.on_epoch_reported,
    events.AgentRejected: nodes.on_agent_rejected,
    events.NodeForgotten: nodes.on_forgotten,
    events.HeartbeatReceived: node_liveness.on_heartbeat,
    events.NodeHeard: node_liveness.assess_node,
    events.PullWorkerRegistered: pull_workers.on_registered,
    events.TaskAsked: pull_workers.on_task_asked,
    events.TaskAskWithdrawn: pull_workers.on_task_ask_withdrawn,
    events.ReassessmentRequested: pull_workers.on_reassessment_requested,
    events.AgentRequested: nodes.on_agent_requested,
    events.NodeDrained: nodes.on_drained,
    events.NodeResumed: nodes.on_resumed,
    events.NodeStopped: nodes.on_stopped,
    events.EngineRegistered: engines.on_registered,
    events.EngineRemoved: engines.on_removed,
    events.EngineObserved: engines.on_observed,
    events.GroupBound: engines.on_bound,
    events.GroupTermSet: engines.on_term_set,
    events.GroupRefused: engines.on_refused,
    events.GroupFreed: engines.on_freed,
    events.LeaseAsked: leases.on_asked,
    events.LeaseRecovered: lease_lifetime.on_claimed,
    events.LeasesRecovered: lease_lifetime.on_read,
    events.RequestRefused: leases.on_refused,
    events.AlertChanged: nodes.on_alert,
    events.ClocksConfirmed: node_liveness.on_clocks_confirmed,
    events.LeaseReleased: jobs.on_released,
    events.LeaseReclaimed: lease_lifetime.on_reclaimed,
    events.LeaseLost: lease_lifetime.on_lost,
    events.LeaseExtended: leases.on_extended,
    events.JobSubmitted: jobs.on_submitted,
    events.JobCancelled: jobs.on_cancelled,
    events.JobDetached: jobs.on_detached,
    events.AttemptStarted: jobs.on_started,
    events.AttemptPaused: jobs.on_paused,
    events.AttemptMarked: jobs.on_marked,
    events.AttemptOutgrown: lease_growth.on_outgrown,
    events.AttemptEnded: jobs.on_ended,
    events.AttemptsListed: jobs.on_listed,
    events.AttemptsGone: jobs.on_gone,
    events.StartsExpired: jobs.on_starts_expired,
    events.BlockAsked: blocks.on_asked,
    events.BlockReleased: blocks.on_released,
    events.BlockNamed: blocks.on_named,
    events.BlocksRenewed: blocks.on_renewed,
    events.CopyUnwanted: block_copies.on_unwanted,
    events.CopyMade: block_copies.on_made,
    events.CopiesFreed: block_copies.on_freed,
    events.CopyLost: block_copies.on_lost,
    events.MemoryServed: block_copies.on_served,
    events.MemoryReclaimRequested: block_copies.on_memory_reclaim_requested,
    events.WorkerRulesSet: lifecycle.on_rules_set,
    events.WorkerRequested: lifecycle.on_requested,
    events.WorkerAsked: lifecycle.on_asked,
    events.WorkerBooted: lifecycle.on_booted,
    events.WorkerJoined: lifecycle.on_joined,
    events.WorkerCallFailed: lifecycle.on_call_failed,
    events.WorkerRefused: lifecycle.on_refused,
    events.WorkerDrainRequested: lifecycle.on_drain_requested,
    events.WorkerEndAnnounced: announced_ends.on_announced,
    events.WorkerResumed: lifecycle.on_resumed,
    events.WorkerTerminationRequested: lifecycle.on_termination_requested,
    events.WorkerTerminationAccepted: lifecycle.on_termination_accepted,
    events.WorkerGone: lifecycle.on_gone,
    events.WorkersListed: provider_lists.on_listed,
    events.WallTimePassed: worker_checks.on_wall_time_passed,
    events.StrayInstanceFound: provider_lists.on_stray_found,
    events.ScalingRulesSet: scaling.on_rules_set,
    events.ScalingRequested: scaling.on_scaling_requested,
    events.OutputsCollected: scaling.on_outputs_collected,
    events.MoveRequested: moves.on_requested,
    events.MoveShipped: moves.on_shipped,
    events.MoveReported: moves.on_reported,
    events.MoveFilesSettled: moves.on_files_settled,
    events.MoveFailed: moves.on_failed,
    events.MoveCancelled: moves.on_cancelled,
    events.MoveResultsBrought: moves.on_results_brought,
    events.ConsentGiven: moves.on_consent_given,
    events.ConsentWithdrawn: moves.on_consent_withdrawn,
    events.AutoOffloadSet: pressure.on_auto_offload_set,
    events.OffloadPressureRead: pressure.on_offload_pressure_read,
    events.CheckpointShipped: reruns.on_checkpoint_shipped,
    events.FilesDelivered: deliveries.on_delivered,
    events.FilesDelayed: deliveries.on_delayed,
    events.FilesUndeliverable: deliveries.on_undeliverable,
    events.FilesFetched: deliveries.on_fetched,
    events.PressureRead: pressure.on_pressure_read,
    events.TimePassed: lease_lifetime.on_time_passed,
    followups.CheckMove: moves.check_move,
    followups.ContinueScan: leases.continue_scan,
    followups.ScanQueue: leases.scan_queue,
    followups.SettleDue: lease_lifetime.settle_due,
    followups.AssessNode: node_liveness.assess_node,
    followups.CheckClaims: lease_lifetime.check_claims,
    followups.AddCopy: blocks.add_further_copy,
    followups.RestoreCopy: block_copies.restore_copy,
    followups.CheckWorkers: worker_checks.check_workers,
    followups.ScaleWorkers: scaling.scale_workers,
    followups.RebalanceNodes: pressure.rebalance_nodes,
    followups.RelieveNodes: pressure.relieve_nodes,
}
"""The decider of each event and of each follow-up."""


class StepResult(Struct):
    """Changes and records of one cause and of everything that followed in the same step."""

    changes: list[Row] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    answer: Answer = None
    later: list[Cause] = field(default_factory=list)


def decide(ledger: Ledger, cause: Cause, now: int) -> Decision:
    """The decision about an event or a follow-up; changes nothing, raises where an event is refused."""
    decision = _charge(ledger, cause, DECIDERS[type(cause)](ledger, cause, now), now)
    return deliveries.begin_deliveries(moves.follow_changes(ledger, decision, now), now)


def step(ledger: Ledger, cause: Cause, now: int, *, scan_queue: bool = True) -> StepResult:
    """Decide and apply a cause and all that follow from it, in the order of `PLACES`; a refusal leaves the ledger as it
    was. Without `scan_queue` no waiting request is granted; the scan of the next second does that."""
    decision = decide(ledger, cause, now)
    stepped = StepResult(decision.changes, decision.records, decision.answer, decision.later)
    ledger.apply(decision.changes)
    ahead = deque(decision.follow)
    while ahead:
        cause = ahead.popleft()
        if not scan_queue and isinstance(cause, ScanQueue):
            continue
        decision = decide(ledger, cause, now)
        ledger.apply(decision.changes)
        stepped.changes += decision.changes
        stepped.records += decision.records
        stepped.later += decision.later
        first = []
        for follower in decision.follow:
            place = PLACES.get(type(follower), Place.LAST)
            if place is Place.FIRST:
                first.append(follower)
            elif place is Place.LAST or follower not in ahead:
                ahead.append(follower)
        ahead.extendleft(reversed(first))
    return stepped


def step_through(ledger: Ledger, cause: Cause, now: int) -> StepResult:
    """A step and all later ones that it leads to."""
    stepped = step(ledger, cause, now)
    while stepped.later:
        after = step(ledger, stepped.later.pop(0), now)
        stepped.changes += after.changes
        stepped.records += after.records
        stepped.later += after.later
    return stepped


def _charge(ledger: Ledger, cause: Cause, decision: Decision, now: int) -> Decision:
    """The decision about a report, with no more records than the budget of the reporting node allows."""
    if not isinstance(cause, _REPORTS) or not decision.records:
        return decision
    name = decision.records[0].node
    changed = [row for row in decision.changes if isinstance(row, NodeObservation)]
    seen = changed[0] if changed else ledger.observations.get(name)
    if seen is None and isinstance(cause, NodeDeclared):
        return decision  # by the config: its agent was not heard yet
    before = seen = seen or NodeObservation(node=name, at_ms=0)
    records: list[Record] = []
    for record in decision.records:
        left = REPORT_BURST - -(-max(seen.records_spent_until_ms - now, 0) // REPORT_REFILL_MS)
        if record.type in _OMITTED and left < 1:
            seen = replace(seen, records_omitted=seen.records_omitted + 1)
            continue
        if record.type in _OMITTED:
            seen = replace(seen, records_spent_until_ms=max(seen.records_spent_until_ms, now) + REPORT_REFILL_MS)
        if record.type in _OMITTED and seen.records_omitted:
            reason = f"{seen.records_omitted} reports of its agent were not recorded: there were too many"
            records.append(Record("reports-omitted", "", name, name, reason, data={"count": seen.records_omitted}))
            seen = replace(seen, records_omitted=0)
        records.append(replace(record, reason=record.reason[:MAX_REASON_CHARS]) if record.type in _OMITTED else record)
    decision.records = records
    if seen is not before:
        decision.changes = [row for row in decision.changes if row is not before]
        decision.changes.append(seen)
    return decision
