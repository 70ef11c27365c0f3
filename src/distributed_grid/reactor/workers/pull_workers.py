"""Deciders of pull workers: nodes without an agent, which report what they have and ask for their tasks.

A task is assigned to a worker that is asking for one, and waits until the worker takes it: only then does it run. Asked
again, the same attempt is handed out again. Another registration of the same worker is another process: the tasks
of the earlier one are lost, for nobody can know how they ended, and its fence is stale.
"""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import (
    AttemptEnded,
    HeartbeatReceived,
    LeaseLost,
    LeaseReclaimed,
    NodeDeclared,
    PullWorkerRegistered,
    ReassessmentRequested,
    TaskAsked,
    TaskAskWithdrawn,
)
from distributed_grid.domain.followups import Cause, ScanQueue
from distributed_grid.domain.indexes.node_claims import NodeClaims
from distributed_grid.domain.jobs import Ending, Job, Outcome
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import GpuUsage, Node, NodeObservation, Usage
from distributed_grid.domain.resources import Capacity
from distributed_grid.domain.states import JobState, LeaseEnd, LeaseState, Step, advance
from distributed_grid.errors import NotFound, Refused
from distributed_grid.reactor.decision import MAX_LEASES_PER_STEP, Decision, JobAnswer, Record
from distributed_grid.reactor.jobs import requeue_unstarted
from distributed_grid.reactor.nodes import on_declared


def on_registered(ledger: Ledger, event: PullWorkerRegistered, now: int) -> Decision:
    """Take a pull worker in, or take in anew what it has; it counts as heard."""
    node = event.node
    old = ledger.nodes.get(node.name)
    if old is not None and not old.is_pull:
        raise Refused(f"{node.name} is a node with an agent, and cannot be registered as a pull worker")
    decision = on_declared(ledger, NodeDeclared(node), now)
    taken = [job.attempt for job in ledger.jobs_of(node.name) if job.attempt is not None]
    stale = [one.lease_id for one in taken if one.started_at_ms and one.machine != node.incarnation]
    reason = f"{node.name} was registered anew, by another process than the one that ran it"
    lost: list[Cause] = [LeaseLost(lease_id, reason) for lease_id in stale[:MAX_LEASES_PER_STEP]]
    decision.follow = [*lost, HeartbeatReceived(name=node.name, usage=event.usage), *decision.follow]
    if stale[MAX_LEASES_PER_STEP:]:
        decision.later = [event]
    return decision


def registered_worker(ledger: Ledger, name: str, incarnation: str) -> Node:
    """The pull worker of that name; Refused where somebody else is registered under it. No incarnation is any."""
    node = ledger.nodes.get(name)
    if node is None or not node.is_pull:
        raise NotFound(f"no pull worker is called {name}: register it first")
    if incarnation and incarnation != node.incarnation:
        raise Refused(f"{name} was registered by another process since: this one does not count any more")
    return node


def on_task_asked(ledger: Ledger, event: TaskAsked, now: int) -> Decision:
    """Hand out the attempt that waits for a worker, or that it was given and does not have; else remember that it asks.

    What is to be stopped, and what it says it does not have, is over. Who asks is heard, with what was last reported.
    """
    node = registered_worker(ledger, event.worker, event.incarnation)
    last = ledger.observations.get(node.name)
    usage = last.usage if last is not None and last.usage is not None else Usage()
    running, over = frozenset(event.running), Decision(follow=[HeartbeatReceived(name=node.name, usage=usage)])
    attempts = [(job.attempt.assigned_at_ms, job.uid, job) for job in ledger.jobs_of(node.name) if job.attempt]
    for _, _, job in sorted(attempts, key=lambda entry: entry[:2]):
        attempt = job.attempt
        assert attempt is not None
        if job.id in running or ledger.leases[attempt.lease_id].awaits:
            continue
        if job.state is JobState.STOPPING:
            assert job.stop is not None
            outcome = Outcome(job.stop.ending, detail=job.stop.detail)
            over.follow.append(AttemptEnded(uid=job.uid, number=attempt.number, fence=attempt.fence, outcome=outcome))
            continue
        attempt, lease = job.attempt, ledger.leases[job.lease_id]
        assert attempt is not None
        decision = Decision(answer=JobAnswer(job, lease))
        if job.state is JobState.ASSIGNED:  # it runs from now on
            attempt = replace(attempt, started_at_ms=now, machine=node.incarnation)
            job = replace(job, state=advance(job.state, Step.START), attempts=(*job.attempts[:-1], attempt))
            decision.changes.append(job)
            if lease.state is LeaseState.RESERVING:
                lease = replace(lease, state=advance(lease.state, Step.BIND))
                decision.changes.append(lease)
            data = {"job_id": job.id, "attempt": attempt.number}
            taken = Record("started", job.request.user, job.uid, node.name, "taken by the worker", data=data)
            decision.records.append(taken)
            decision.answer = JobAnswer(job, lease)
        seen = last or NodeObservation(node=node.name, at_ms=0)
        decision.changes.append(replace(seen, handed_out=job.uid, handed_out_ask=event.ask_id))
        decision.follow = over.follow
        return decision
    seen = ledger.observations.get(node.name) or NodeObservation(node=node.name, at_ms=0)
    over.changes.append(replace(seen, asking_since_ms=now))
    if ledger.waiting and not seen.asking_since_ms:
        over.follow.append(ScanQueue())
    return over


def on_task_ask_withdrawn(ledger: Ledger, event: TaskAskWithdrawn, now: int) -> Decision:
    """The worker asks no more. Its untaken tasks go to others, and so does the answer to this ask,
    which it never got: that uses up no retry. A task that was handed out again since may run, and stays."""
    node, seen = ledger.nodes.get(event.worker), ledger.observations.get(event.worker)
    if node is None or not node.is_pull or seen is None:
        return Decision()
    if event.incarnation and event.incarnation != node.incarnation:
        return Decision()
    reason = f"the connection of {node.name} was lost before it got the task"
    decision, job = Decision(), ledger.jobs.get(seen.handed_out)
    if event.ask_id and event.ask_id == seen.handed_out_ask and job is not None:
        decision = _given_back(ledger, job, node, reason, now)
        seen = replace(seen, handed_out="", handed_out_ask="")
    for one in ledger.jobs_of(node.name):
        if one.state is JobState.ASSIGNED and not ledger.leases[one.lease_id].awaits:
            decision.follow.insert(0, LeaseReclaimed(one.lease_id, reason))
    decision.changes.append(replace(seen, asking_since_ms=0))
    return decision


def _given_back(ledger: Ledger, job: Job, node: Node, why: str, now: int) -> Decision:
    """An attempt that was handed out and not delivered never started."""
    attempt = job.attempt
    if attempt is None or attempt.node != node.name or job.state not in (JobState.RUNNING, JobState.STOPPING):
        return Decision()
    if job.state is JobState.STOPPING:
        assert job.stop is not None
        outcome = Outcome(job.stop.ending, detail=job.stop.detail)
        return Decision(follow=[AttemptEnded(uid=job.uid, number=attempt.number, fence=attempt.fence, outcome=outcome)])
    untaken = replace(job, attempts=(*job.attempts[:-1], replace(attempt, started_at_ms=0, machine="")))
    return requeue_unstarted(ledger, untaken, LeaseEnd.RECLAIMED, why, now, ending=Ending.NEVER_STARTED)


def on_reassessment_requested(ledger: Ledger, event: ReassessmentRequested, now: int) -> Decision:
    """Have every worker of another machine say anew what it has; it hears so with the answer to its next heartbeat."""
    seen = [ledger.observations.get(node.name) for node in ledger.nodes.values() if node.host != "local"]
    return Decision([replace(one, report_wanted=True) for one in seen if one is not None and not one.report_wanted])


def reported_usage(has: Capacity, free: Capacity, claims: NodeClaims) -> Usage:
    """The usage of a pull worker that has so much and says that so much is free. Its own tasks use no more than they
    hold; the rest is others'."""
    cpu_used = max(has.cpu_milli - free.cpu_milli, 0)
    memory_used = max(has.memory_bytes - free.memory_bytes, 0)
    memory_outside = max(memory_used - claims.memory_bytes, 0)
    idle = [device.index for device in has.gpus if device.index not in claims.gpu_milli]
    taken = max(len(has.gpus) - len(free.gpus) - len(claims.gpu_milli), 0)
    whole = max(has.cpu_milli, 1)
    return Usage(
        cpu_busy_milli=1000 * cpu_used // whole,
        cpu_outside_milli=1000 * max(cpu_used - claims.cpu_milli, 0) // whole,
        memory_bytes=memory_used,
        memory_outside_bytes=memory_outside,
        gpus=tuple(GpuUsage(index, busy_milli=1000) for index in idle[len(idle) - taken :]) if taken else (),
    )


def usage_where_named(usage: Usage, named: frozenset[str], last: Usage | None) -> Usage:
    """The reported usage of the named groups (`cpu`, `memory`, `gpu`), and the last one of the others."""
    if last is None:
        return usage
    if "cpu" not in named:
        usage = replace(usage, cpu_busy_milli=last.cpu_busy_milli, cpu_outside_milli=last.cpu_outside_milli)
    if "memory" not in named:
        memory, outside = last.memory_bytes, last.memory_outside_bytes
        usage = replace(usage, memory_bytes=memory, memory_outside_bytes=outside)
    return usage if "gpu" in named else replace(usage, gpus=last.gpus)
