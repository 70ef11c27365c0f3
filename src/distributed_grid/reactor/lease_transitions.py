"""Transitions of a lease that several deciders share: grant, preemption, end."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from distributed_grid.domain.engines import Binding
from distributed_grid.domain.events import CopyLost, Event, JobCancelled
from distributed_grid.domain.followups import ScanQueue
from distributed_grid.domain.jobs import Attempt, Ending, Job, StopOrder
from distributed_grid.domain.leases import Lease, fence_on
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import GRID_USER, USED, RebalanceState, claimed_amount, resource_of
from distributed_grid.domain.resources import Claim, Priority
from distributed_grid.domain.rows import Counter, Row
from distributed_grid.domain.states import LeaseEnd, LeaseState, Step, advance
from distributed_grid.reactor.decision import Decision, Record, RecordType
from distributed_grid.scheduling.placement.explanation import choice_of
from distributed_grid.scheduling.placement.placement import Placement
from distributed_grid.scheduling.preemption.preemption import PreemptionPlan
from distributed_grid.scheduling.pressure.loans import describe, is_used_up
from distributed_grid.scheduling.queue import fairness, reasons
from distributed_grid.scheduling.queue.order import progress_started

FENCE = "fence"


def grant(
    ledger: Ledger,
    lease: Lease,
    place: Placement,
    now: int,
    *,
    job: Job | None,
    awaits: tuple[str, ...] = (),
    displaced: tuple[str, ...] = (),
) -> tuple[Decision, Lease, Job | None]:
    """Grant a lease its placement; a job gets its next attempt, a gang one lease for each member."""
    claim = place.claim
    fence = ledger.counters.get(FENCE, 0) + 1
    bound = job is None and not awaits
    granted = _granted(ledger, lease, place.node, claim, now, fence=fence, bound=bound)
    shrunk = Decision()
    if place.carved:
        granted = replace(granted, carved_from=tuple(lease_id for lease_id, _ in place.carved))
        shrunk, fence = _carve(ledger, place, granted, fence, now)
    if awaits:
        granted = replace(granted, awaits=awaits)
    members: list[Lease] = []
    if place.others:
        nodes = (place.node, *(node for node, _ in place.others))
        granted = replace(granted, gang=lease.id, gang_nodes=nodes)
        for number, (node, share) in enumerate(place.others, 2):
            fence += 1
            member = replace(lease, id=f"{lease.id}:{number}", gang=lease.id, gang_nodes=nodes)
            members.append(_granted(ledger, member, node, share, now, fence=fence, bound=bound))
    choice = choice_of(ledger, lease.request, place, now, displaced=displaced)
    rows: list[Row] = [*shrunk.changes, granted, *members, Counter(FENCE, fence)]
    rows += [binding_for(ledger, one, one.fence, now) for one in (granted, *members) if one.engine]
    decision = Decision(changes=rows, choice=choice, follow=shrunk.follow)
    decision.changes += settle_account(ledger, lease.request.user, now, begins=lease)
    decision.changes += progress_started(ledger, lease, now)
    record = lease_record("granted", granted, job)
    record.data["asked"] = reasons.describe_amounts(lease.request.ask)
    record.data["priority"] = lease.request.priority.name.lower()
    record.data["waited_ms"] = now - lease.asked_at_ms
    record.data["choice"] = choice
    if claim.gpus:
        record.data["gpus"] = [str(share.index) for share in claim.gpus]
    if place.others:
        record.data["gang"] = list(granted.gang_nodes)
    decision.records += [record, *shrunk.records]
    if job is None:
        return decision, granted, None
    seen = ledger.observations.get(place.node)
    boot, machine = (seen.boot, seen.machine) if seen is not None else ("", "")
    used = ledger.leases.get(lease.request.use_lease, granted).claim
    attempt = Attempt(
        number=len(job.attempts) + 1,
        lease_id=lease.id,
        node=place.node,
        fence=granted.fence,
        assigned_at_ms=now,
        boot=boot,
        machine=machine,
        memory_limit_bytes=used.memory_bytes if used is not None else 0,
    )
    assigned = replace(job, state=advance(job.state, Step.ASSIGN), attempts=(*job.attempts, attempt))
    if seen is not None and seen.asking_since_ms:  # one task for each time that it asks
        decision.changes.append(replace(seen, asking_since_ms=0))
    decision.changes.append(assigned)
    return decision, granted, assigned


def _granted(ledger: Ledger, lease: Lease, node: str, claim: Claim, now: int, *, fence: int, bound: bool) -> Lease:
    """The granted lease, with this fence of the grid as it is on its node."""
    state = advance(lease.state, Step.GRANT)
    duration, seen = lease.request.duration_ms, ledger.observations.get(node)
    lender = ledger.nodes[node]
    engine = lender.engine if lender.engine_node and not lease.request.use_lease else ""
    return replace(
        lease,
        state=advance(state, Step.BIND) if bound and not engine else state,
        engine=engine,
        node=node,
        claim=claim,
        fence=fence_on(lender, fence),
        granted_at_ms=now,
        ends_at_ms=now + duration if duration else 0,
        generation=seen.generation if seen is not None else 0,
    )


def _carve(ledger: Ledger, place: Placement, user: Lease, fence: int, now: int) -> tuple[Decision, int]:
    """Shrink the automatic leases that a granted lease is carved from; the second value is the last fence.

    A lease without a rest ends. An engine's group cannot shrink: the lease is bound anew with its rest.
    """
    decision = Decision(follow=[ScanQueue()] if ledger.waiting else [])
    states: dict[str, RebalanceState] = {}
    for lease_id, left in place.carved:
        lease = ledger.leases[lease_id]
        target, resource = lease.request.target, resource_of(lease.request.ask)
        taken = claimed_amount(lease, resource) - claimed_amount(replace(lease, claim=left), resource)
        state = states.get(target) or ledger.rebalance_states.get(target) or RebalanceState(node=target)
        states[target] = replace(state, **{str(resource): replace(state.watch(resource), used_at_ms=now)})
        reason = f"{describe(resource, taken)} of it for {user.job or user.id}"
        data: dict[str, str | int | list[str]] = {"action": USED, "resource_type": str(resource), "target_node": target}
        data |= {"source_node": lease.node, "allocation_id": user.id}
        decision.records.append(Record("rebalanced", GRID_USER, lease_id, target, reason, data=data))
        if is_used_up(lease, left):
            leaving = replace(lease, state=advance(lease.state, Step.RELEASE))
            decision.changes.append(_ended(leaving, LeaseEnd.RELEASED, "all of it is used", now))
            continue
        smaller = replace(lease, claim=left)
        if lease.engine:
            fence += 1
            smaller = replace(smaller, state=advance(lease.state, Step.UNBIND))
            decision.changes.append(
                binding_for(ledger, smaller, fence_on(ledger.nodes[lease.node], fence), now, again=True)
            )
        decision.changes.append(smaller)
    decision.changes += [state for state in states.values() if state.node in ledger.nodes]
    decision.changes += settle_account(ledger, GRID_USER, now)
    return decision, fence


def binding_for(ledger: Ledger, lease: Lease, fence: int, now: int, *, again: bool = False) -> Binding:
    """The binding that a lease needs in the engine of its node, under this fence."""
    return Binding(
        lease_id=lease.id,
        fence=fence,
        node=lease.node,
        place=ledger.nodes[lease.node].engine_node,
        made_at_ms=now,
        again=again,
    )


def lease_record(type_: RecordType, lease: Lease, job: Job | None, reason: str = "") -> Record:
    """An audit record about a lease; that of a job has the job as its subject."""
    data: dict[str, str | int | list[str]] = {"allocation_id": lease.id}
    if job is not None:
        data["job_id"] = job.id
    return Record(type_, lease.request.user, lease.job or lease.id, lease.node, reason, data=data)


def preempt_victims(
    ledger: Ledger, plan: PreemptionPlan, preemptor: Lease, now: int
) -> tuple[Decision, tuple[str, ...]]:
    """Stop the victims of a preemption; the second value are the leases that the preemptor waits for."""
    decision = Decision()
    ended = set()
    for lease_id in plan.victims:
        victim = ledger.leases[lease_id]
        reason = f"made room for {preemptor.request.priority.name.lower()} request {preemptor.id}"
        record = lease_record("preempted", victim, ledger.jobs.get(victim.job), reason)
        record.data["preemptor"] = preemptor.id
        decision.records.append(record)
        leaving = replace(victim, state=advance(victim.state, Step.RELEASE), preempted_by=preemptor.id, detail=reason)
        if not victim.job:
            decision.changes.append(_ended(leaving, LeaseEnd.PREEMPTED, reason, now))
            decision.changes += _gang_ended(ledger, victim, LeaseEnd.PREEMPTED, reason, now, besides=set(plan.victims))
            decision.changes += settle_account(ledger, victim.request.user, now)
            decision.changes += _used_workers(ledger, decision.changes, now)
            ended.add(lease_id)
            continue
        job = ledger.jobs[victim.job]
        stop = StopOrder(Ending.PREEMPTED, reason, now, requeue=True)
        decision.changes += [leaving, replace(job, state=advance(job.state, Step.STOP), stop=stop)]
    return decision, tuple(lease_id for lease_id in plan.awaits if lease_id not in ended)


def end_lease(ledger: Ledger, lease: Lease, end: LeaseEnd, detail: str, now: int) -> Decision:
    """End a lease without a running attempt, and unblock the preemptors that wait for it."""
    if lease.state in (LeaseState.RESERVING, LeaseState.ACTIVE):
        lease = replace(lease, state=advance(lease.state, Step.RELEASE))
    held = lease.holds
    over = _ended(lease, end, detail, now)
    kind: RecordType = (
        "withdrawn" if end is LeaseEnd.WITHDRAWN else "expired" if end is LeaseEnd.EXPIRED else "released"
    )
    record = lease_record(kind, lease, ledger.jobs.get(lease.job), detail or str(end))
    decision = Decision(changes=[over], records=[record])
    if held:
        decision.changes += _unblock_preemptors(ledger, lease)
        decision.changes += _gang_ended(ledger, lease, end, detail, now)
        decision.changes += settle_account(ledger, lease.request.user, now, over=over)
        decision.changes += _used_workers(ledger, decision.changes, now)
    decision.follow = [ScanQueue()] if ledger.waiting else []
    decision.follow += cancel_dependents(ledger, lease.id)
    if lease.request.block:
        decision.follow.append(CopyLost(lease.request.block, lease.id, detail))
    return decision


def _used_workers(ledger: Ledger, changes: Collection[Row], now: int) -> list[Row]:
    """The workers on which one of these leases has ended: they are idle from now on at the earliest."""
    if not ledger.workers:
        return []
    over = (row for row in changes if isinstance(row, Lease) and row.is_over and not row.request.block)
    nodes = dict.fromkeys(lease.node for lease in over if lease.node in ledger.workers)
    return [replace(ledger.workers[node], used_at_ms=now) for node in nodes]


def cancel_dependents(ledger: Ledger, lease_id: str) -> list[Event]:
    """Cancel the jobs that run within a lease that has ended."""
    users = (ledger.leases[user].job for user in ledger.dependents.get(lease_id, ()))
    return [JobCancelled(uid, GRID_USER, f"what it used ({lease_id}) is over") for uid in users]


def settle_account(
    ledger: Ledger, user: str, now: int, *, begins: Lease | None = None, over: Lease | None = None
) -> list[Row]:
    """The settled account of a user whose holdings are about to change, unless it stays the same."""
    account = fairness.settle_account(ledger, user, now, begins=begins, over=over)
    return [] if account == ledger.accounts.get(user) else [account]


def _gang_ended(
    ledger: Ledger, lease: Lease, end: LeaseEnd, detail: str, now: int, *, besides: Collection[str] = ()
) -> list[Row]:
    """The ends of the other members of a gang, with the one that ended."""
    gone: list[Row] = []
    for member_id in ledger.gangs.get(lease.gang, ()):
        if member_id == lease.id or member_id in besides:
            continue
        member = ledger.leases[member_id]
        if member.state is not LeaseState.RELEASING:
            member = replace(member, state=advance(member.state, Step.RELEASE))
        gone.append(_ended(member, end, f"its gang ended on {lease.node}: {detail or end}", now))
        gone += _unblock_preemptors(ledger, member)
    return gone


def _ended(lease: Lease, end: LeaseEnd, detail: str, now: int) -> Lease:
    step = Step.WITHDRAW if lease.state is LeaseState.ASKED else Step.END
    state = advance(lease.state, step)
    return replace(lease, state=state, claim=None, awaits=(), end=end, detail=detail, ended_at_ms=now)


def _unblock_preemptors(ledger: Ledger, gone: Lease) -> list[Row]:
    """The preemptors that waited for this lease, without it."""
    changed: list[Row] = []
    for waiting in [ledger.leases[lease_id] for lease_id in ledger.awaiting.get(gone.id, ())]:
        left = tuple(lease_id for lease_id in waiting.awaits if lease_id != gone.id)
        state = waiting.state
        if not left and not waiting.job and not waiting.engine:
            state = advance(state, Step.BIND)
        changed.append(replace(waiting, awaits=left, state=state))
    return changed


def is_urgent(lease: Lease) -> bool:
    return lease.request.priority >= Priority.URGENT
