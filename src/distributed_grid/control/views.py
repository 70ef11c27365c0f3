"""Views: the ledger's rows as JSON, with the documented field names (`view_types`).

Field names, once shipped, do not change. Amounts are in cores, GPUs and GB; times are ISO 8601 in UTC, by the wall
clock. Environment values are never shown, only their names. A reader who is not an admin sees of another user's work
its id, owner, state, resources, node and times, and no text that the work or its owner wrote (`Viewer.for_reader`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from distributed_grid.domain.clock_jumps import jump_text
from distributed_grid.domain.deliveries import DeliveredFiles, Delivery
from distributed_grid.domain.jobs import Attempt, Command, Ending, Job, JobEstimate, Outcome
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, Offer, pressure
from distributed_grid.domain.rebalancing import (
    WATCHED_RESOURCES,
    Advice,
    claimed_amount,
    is_automatic,
    resource_of,
)
from distributed_grid.domain.resources import Amounts, Claim
from distributed_grid.domain.states import LeaseState, NodeState
from distributed_grid.masking.command_line import CUT_MARGIN_CHARS, mask_text, shown_command
from distributed_grid.monitoring.snapshots import utc
from distributed_grid.scheduling.offers.offer import lendable_now
from distributed_grid.scheduling.offers.pause import OfferPause, pauses
from distributed_grid.scheduling.pressure.loans import amounts_of, used_amount
from distributed_grid.scheduling.pressure.scan import is_in_use
from distributed_grid.scheduling.queue.reasons import is_stopped, why_not_lent

GB = 1024**3
MAX_LISTED_CHARS, MAX_LISTED_VARIABLES, MAX_LISTED_ATTEMPTS = 1000, 200, 50
"""Of one job in a list."""
MAX_CORRECTION_MS = 60_000
"""A time keeps the way it is displayed where a clock was only corrected by so much."""
HIDDEN = "(of another user)"
"""Stands for a command that the reader may not see."""
View = dict[str, Any]


class Viewer:
    """Turns rows into JSON; `offset_ms` is how far the wall clock is ahead of the grid's own time.

    `earlier` are pairs of a time of the grid and how far the wall clock was ahead until then, oldest first: the grid's
    time steps forward at a reboot, and under a wrong clock by anything. `reader` None is an admin.
    """

    def __init__(
        self,
        offset_ms: int,
        max_offers_per_node: int = 5,
        *,
        earlier: Sequence[tuple[int, int]] = (),
        reader: str | None = None,
    ) -> None:
        self._offset_ms = offset_ms
        self._max_offers_per_node = max_offers_per_node
        self._earlier = earlier
        self.reader = reader

    def for_reader(self, reader: str | None) -> Viewer:
        """The same for this user, or for an admin where it is None."""
        return Viewer(self._offset_ms, self._max_offers_per_node, earlier=self._earlier, reader=reader)

    def shows(self, owner: str) -> bool:
        """Whether the reader may see what this user's work says and does."""
        return self.reader is None or self.reader == owner

    def time(self, at_ms: int) -> str | None:
        """A moment of grid time in ISO 8601; None for "never"."""
        if not at_ms:
            return None
        then_ms = next((offset_ms for until_ms, offset_ms in self._earlier if at_ms <= until_ms), self._offset_ms)
        return utc(at_ms + (then_ms if abs(then_ms - self._offset_ms) > MAX_CORRECTION_MS else self._offset_ms))

    def recommendations(self, ledger: Ledger) -> list[View]:
        """The work that should move to another node."""
        return [
            self.recommendation(ledger, name, balance.advice)
            for name, balance in ledger.rebalance_states.items()
            if balance.advice is not None
        ]

    def recommendation(self, ledger: Ledger, node: str, advice: Advice) -> View:
        job = ledger.jobs.get(advice.job)
        return {
            "node_id": node,
            "job_id": job.id if job is not None else None,
            "source_node": node,
            "target_node": advice.to,
            "cause": advice.cause,
            "reason": advice.reason if job is None or self.shows(job.request.user) else HIDDEN,
            "since": self.time(advice.since_ms),
        }

    def node(self, ledger: Ledger, node: Node, now: int) -> View:
        seen = ledger.observations.get(node.name)
        usage = seen.usage if seen is not None else None
        book = ledger.claims_on(node.name)
        is_alive = node.state is NodeState.ALIVE
        fresh = is_alive and usage is not None
        return {
            "node_id": node.name,
            "host": node.host,
            "role": node.role,
            "state": str(node.state),
            "simulated": node.simulated,
            "cooling": node.cooling,
            "stopped": is_stopped(ledger, node),
            "cpu_cores": node.capacity.cpu_milli / 1000,
            "memory_gb": _gb(node.capacity.memory_bytes),
            "gpus": len(node.capacity.gpus),
            "custom": dict(node.capacity.custom),
            "cpu_lent": book.cpu_milli / 1000,
            "memory_lent_gb": _gb(book.memory_bytes),
            "gpus_lent": sum(book.gpu_milli.values()) / 1000,
            **_lends(ledger, node, now),
            "pressure": pressure(node.capacity, usage) if fresh and usage is not None else None,
            "cpu_percent": usage.cpu_busy_milli / 10 if fresh and usage is not None else None,
            "memory_used_gb": _gb(usage.memory_bytes) if fresh and usage is not None else None,
            "seconds_since_heard": (now - seen.at_ms) / 1000 if seen is not None and seen.at_ms else None,
            "rejected": seen.rejected if seen is not None and seen.is_rejected and not is_alive else None,
            "degraded": ledger.degraded[node.name].why if node.name in ledger.degraded else None,
            "unused_borrowing": unused_borrowing(ledger, node.name),
            "clock_jump": jump_text(node.name, seen.clock_jump_ms, seen.clock_waits_ms)
            if seen is not None and seen.clock_jump_ms
            else None,
        }

    def offers(self, ledger: Ledger) -> list[View]:
        """What is offered, one row per node and kind of resource."""
        return [row for name in ledger.offers for row in self.offers_of(ledger, name)]

    def offers_of(self, ledger: Ledger, name: str) -> list[View]:
        """The offers of one node, one row per kind of resource, up to the configured number; paused ones last."""
        offer = ledger.offers.get(name)
        if offer is None or ledger.nodes[name].state is not NodeState.ALIVE or name in ledger.pull_nodes:
            return []  # a pull worker offers only to its tasks
        book, lends = ledger.claims_on(name), offer.lends
        taken = dict(book.custom)
        free: list[tuple[str, float]] = [
            ("cpu", max(lends.cpu_milli - book.cpu_milli, 0) / 1000),
            ("memory", _gb(max(lends.memory_bytes - book.memory_bytes, 0))),
            ("gpu", sum(book.free_milli(device) for device in lends.gpus) / 1000),
        ]
        free += [(kind, count - taken.get(kind, 0)) for kind, count in lends.custom]
        there = [(kind, amount) for kind, amount in free if amount > 0]
        rows: list[View] = [
            {
                "node_id": name,
                "resource_type": kind,
                "amount": amount,
                "generation": offer.generation,
                "expires_at": self.time(offer.expires_at_ms),
                **_NOT_PAUSED,
            }
            for kind, amount in there[: self._max_offers_per_node]
        ]
        return rows + self._paused(ledger, offer)[: max(self._max_offers_per_node - len(there), 0)]

    def _paused(self, ledger: Ledger, offer: Offer) -> list[View]:
        """What of an offer is paused, one row per kind: what it will be again, the mark, the measure, and when it may
        return; of several GPUs the one that may return first."""
        node, seen = ledger.nodes[offer.node], ledger.observations.get(offer.node)
        if not offer.paused or seen is None or seen.usage is None:
            return []
        lends, claims = lendable_now(node, seen.usage, seen.idleness)[0], ledger.claims_on(node.name)
        amounts = {
            "cpu": max(lends.cpu_milli - claims.cpu_milli, 0) / 1000,
            "memory": _gb(max(lends.memory_bytes - claims.memory_bytes, 0)),
            "gpu": sum(claims.free_milli(one) for one in lends.gpus if f"gpu{one.index}" in offer.paused) / 1000,
        }
        first: dict[str, OfferPause] = {}
        for pause in sorted(pauses(node, seen), key=lambda one: one.returns_at_ms):
            first.setdefault(pause.resource, pause)
        return [
            {
                "node_id": offer.node,
                "resource_type": kind,
                "amount": amounts[kind],
                "generation": offer.generation,
                "expires_at": self.time(offer.expires_at_ms),
                "state": "paused",
                "mark_percent": pause.mark_milli / 10,
                "measured_percent": pause.measured_milli / 10,
                "returns_at": self.time(pause.returns_at_ms),
            }
            for kind, pause in first.items()
        ]

    def allocations(self, ledger: Ledger) -> list[View]:
        """The leases that hold something."""
        return [self.lease(lease, job) for lease, job in held_leases(ledger)]

    def lease(self, lease: Lease, job: Job | None = None) -> View:
        kind, amount = headline(held_amounts(lease))
        return {
            "allocation_id": lease.id,
            "request_id": lease.request.id,
            "job_id": job.id if job is not None else None,
            "node_id": lease.node or None,
            "target_node": lease.request.target or None,
            "resource_type": kind,
            "amount": amount,
            "resources": claim_view(lease.claim) if lease.claim is not None else _unheld_view(lease.request.ask),
            "gang_id": lease.gang or None,
            "gang_nodes": list(lease.gang_nodes),
            "user": lease.request.user,
            "priority": lease.request.priority.name.lower(),
            "state": str(lease.state),
            "fence": lease.fence,
            "requested_at": self.time(lease.asked_at_ms),
            "allocated_at": self.time(lease.granted_at_ms),
            "expires_at": self.time(lease.ends_at_ms),
            "carved_from": list(lease.carved_from),
            "reason": str(lease.end) if lease.end is not None else None,
            "detail": lease.detail or None if self.shows(lease.request.user) else None,
        }

    def boost(self, ledger: Ledger, lease: Lease) -> View:
        kind, amount = headline(held_amounts(lease))
        binding = ledger.binding_of(lease)
        return {
            "boost_id": lease.id,
            "source_node": lease.node or None,
            "target_node": lease.request.target,
            "resource_type": kind,
            "amount": amount,
            "user": lease.request.user,
            "priority": lease.request.priority.name.lower(),
            "state": str(lease.state),
            "is_active": lease.state is LeaseState.ACTIVE,
            "recovered": lease.recovered,
            "allocated_at": self.time(lease.granted_at_ms),
            "expires_at": self.time(lease.ends_at_ms),
            "enforced_by": lease.engine or "grid",
            "placement_group": binding.group if binding is not None else None,
            "automatic": is_automatic(lease.request),
            "used_amount": _used(ledger, lease),
            "reason": str(lease.end) if lease.end is not None else None,
            "detail": lease.detail or None if self.shows(lease.request.user) else None,
        }

    def job(self, job: Job) -> View:
        if not self.shows(job.request.user):
            job = _without_texts(job)
        kind, amount = headline(job.request.ask)
        last = job.attempts[-1] if job.attempts else None
        return {
            "job_id": job.id,
            "uid": job.uid,
            "command": (shown_command(job.command.argv) or f"task {mask_text(job.command.payload)}")
            if self.shows(job.request.user)
            else HIDDEN,
            "cwd": job.command.cwd or None,
            "environment_names": sorted(name for name, _ in job.command.env),
            "user": job.request.user,
            "state": str(job.state),
            "node_id": last.node if last is not None else None,
            "resource_type": kind,
            "amount": amount,
            "resources": ask_view(job.sized_request.ask),
            "sizing": _sizing(job),
            "expected_seconds": _expected_seconds(job.estimate),
            "priority": job.request.priority.name.lower(),
            "wait_seconds": None if job.request.waits_forever else job.request.wait_ms / 1000,
            "submitted_at": self.time(job.submitted_at_ms),
            "ended_at": self.time(job.ended_at_ms),
            "attempts": [self.attempt(attempt) for attempt in job.attempts],
            "checkpoint": _checkpoint(job),
            "retries_left": job.retries_left,
            "restartable": job.restartable,
            "moved_at": self.time(job.moved_at_ms),
            "detached_at": self.time(job.detached_at_ms),
            "detached_reason": job.detached_reason or None,
            "result": json.loads(job.result) if job.result else None,
            **_outcome(job.outcome),
        }

    def delivery(self, job: Job, delivery: Delivery | None) -> View | None:
        """The files of a job that are brought back; None where nobody wants any, or the reader may not see them."""
        if (delivery is None and job.fetch is None) or not self.shows(job.request.user):
            return None
        order = delivery.order if delivery is not None else job.fetch
        assert order is not None
        files = delivery.delivered if delivery is not None else DeliveredFiles()
        return {
            "state": _delivery_state(delivery),
            "patterns": list(order.patterns),
            "directory": files.directory or order.directory or None,
            "files": files.files,
            "bytes": files.bytes,
            "unchanged": files.unchanged,
            "in_place": files.in_place,
            "beside": dict(files.beside),
            "protected": list(files.protected),
            "executable": list(files.executable),
            "skipped": list(files.skipped),
            "problem": delivery.problem or None if delivery is not None else None,
            "ended_at": self.time(delivery.ended_at_ms) if delivery is not None else None,
        }

    def listed_job(self, job: Job) -> View:
        """A job among many: of what is long, only the beginning of its command and the last of its attempts."""
        attempts = job.attempts[-MAX_LISTED_ATTEMPTS:]
        view = self.job(replace(job, command=_short_command(job.command), attempts=attempts, result=""))
        if len(view["command"]) > MAX_LISTED_CHARS:
            view["command"] = view["command"][:MAX_LISTED_CHARS] + "…"
        return view

    def attempt(self, attempt: Attempt) -> View:
        return {
            "number": attempt.number,
            "allocation_id": attempt.lease_id,
            "node_id": attempt.node,
            "fence": attempt.fence,
            "pid": attempt.pid or None,
            "cores": list(attempt.cores),
            "memory_limit_gb": _gb(attempt.memory_limit_bytes) if attempt.memory_limit_bytes else None,
            "growths": attempt.growths,
            "growth_refused": attempt.growth_refused or None,
            "assigned_at": self.time(attempt.assigned_at_ms),
            "started_at": self.time(attempt.started_at_ms),
            "checkpoint_at": self.time(attempt.marked_at_ms),
            "ended_at": self.time(attempt.ended_at_ms),
            **_outcome(attempt.outcome),
        }


def held_leases(ledger: Ledger) -> list[tuple[Lease, Job | None]]:
    """The leases that hold something, the oldest first, each with its job."""
    held = sorted(
        (lease for node in ledger.leases_on for lease in ledger.leases_of(node)), key=lambda lease: lease.asked_at_ms
    )
    return [(lease, ledger.jobs.get(lease.job)) for lease in held]


def _without_texts(job: Job) -> Job:
    """A job without anything that its owner or its command wrote."""
    attempts = tuple(replace(attempt, outcome=_without_detail(attempt.outcome)) for attempt in job.attempts)
    return replace(
        job,
        command=replace(job.command, argv=(), env=(), cwd="", payload=""),
        attempts=attempts,
        outcome=_without_detail(job.outcome),
        result="",
        detached_reason="",
        checkpoint_problem="",
    )


def _without_detail(outcome: Outcome | None) -> Outcome | None:
    return None if outcome is None else replace(outcome, detail="")


def _delivery_state(delivery: Delivery | None) -> str:
    if delivery is None:
        return "waiting"
    return str(delivery.end) if delivery.end is not None else "delivering"


def _sizing(job: Job) -> View | None:
    """The memory limit that the grid gave a job, and why; None where it gave none."""
    estimate = job.estimate
    if estimate is None or not estimate.memory_limits:
        return None
    return {
        "memory_gb": _gb(job.given_limit_bytes),
        "limits_gb": [_gb(limit) for limit in estimate.memory_limits],
        "tier": estimate.tier,
        "confidence": estimate.confidence_milli / 1000,
        "samples": estimate.samples,
        "overruns": job.overruns,
        "may_outgrow": job.may_outgrow,
        "reduced_from_gb": _gb(estimate.reduced_from_bytes) if estimate.reduced_from_bytes else None,
    }


def _checkpoint(job: Job) -> View | None:
    """What is known of a job's checkpoint directory; None where no attempt has left anything."""
    if not (job.checkpoint or job.checkpoint_from or job.checkpoint_problem):
        return None
    return {
        "attempt": job.checkpoint_attempt or None,
        "files": job.checkpoint_files,
        "bytes": job.checkpoint_bytes,
        "awaited_attempt": job.checkpoint_from or None,
        "problem": job.checkpoint_problem or None,
    }


def _expected_seconds(estimate: JobEstimate | None) -> float | None:
    return estimate.run_ms / 1000 if estimate is not None and estimate.run_ms else None


_NOT_PAUSED: View = {"state": "open", "mark_percent": None, "measured_percent": None, "returns_at": None}


def held_amounts(lease: Lease) -> Amounts:
    """How much a lease is about: what was asked for, or what is left of an automatic one."""
    if lease.claim is None or not is_automatic(lease.request):
        return lease.request.ask
    resource = resource_of(lease.request.ask)
    return amounts_of(resource, claimed_amount(lease, resource))


def _used(ledger: Ledger, lease: Lease) -> float | None:
    """How much of a living automatic lease was used: what was carved out of it, or all while a command runs with it."""
    if lease.is_over or not is_automatic(lease.request):
        return None
    if is_in_use(ledger, lease):
        return headline(lease.request.ask)[1]
    used = used_amount(lease)
    return headline(amounts_of(resource_of(lease.request.ask), used))[1] if used else 0.0


def unused_borrowing(ledger: Ledger, node: str) -> list[View]:
    """The resources that were borrowed for a node and went back because nothing had used them."""
    state = ledger.rebalance_states.get(node)
    watches = [(kind, state.watch(kind)) for kind in WATCHED_RESOURCES] if state is not None else []
    return [
        {
            "resource_type": str(kind),
            "amount": headline(amounts_of(kind, watch.unused_amount))[1],
            "unused_seconds": watch.unused_ms / 1000,
        }
        for kind, watch in watches
        if watch.unused_amount
    ]


def _short_command(command: Command) -> Command:
    """So much of a command as a list shows, and a little more, so that a secret is not cut where it begins."""
    words: list[str] = []
    left = MAX_LISTED_CHARS
    for word in command.argv:
        if left < 0:
            break
        words.append(word[: MAX_LISTED_CHARS + CUT_MARGIN_CHARS])
        left -= len(word) + 1
    env = tuple((name, "") for name, _ in command.env[:MAX_LISTED_VARIABLES])
    return replace(command, argv=tuple(words), env=env, payload=command.payload[: MAX_LISTED_CHARS + CUT_MARGIN_CHARS])


def _lends(ledger: Ledger, node: Node, now: int) -> View:
    """A node as the scheduler sees it: what it has left to lend, how it ranks, and why it keeps what it keeps."""
    columns = ledger.columns
    row = columns.rows[node.name]
    is_open = bool(columns.open[row])
    return {
        "open": is_open,
        "cpu_free": max(int(columns.cpu[row]), 0) / 1000 if is_open else 0.0,
        "memory_free_gb": _gb(max(int(columns.memory[row]), 0)) if is_open else 0.0,
        "gpus_free": int(columns.gpu_left[row]) / 1000 if is_open else 0.0,
        "leases": int(columns.leases[row]),
        "priority": node.rank / 1000,
        "speed": node.speed_milli / 1000,
        "cost_per_hour": node.cost_milli / 1000,
        "labels": dict(node.labels),
        "tags": list(node.tags),
        "keeps": list(why_not_lent(ledger, node, now)),
    }


def _outcome(outcome: Outcome | None) -> View:
    if outcome is None:
        return {"outcome": None, "exit_code": None, "signal": None, "detail": None}
    return {
        "outcome": str(outcome.ending),
        "exit_code": outcome.exit_code,
        "signal": outcome.signal,
        "detail": outcome.detail or None,
        "cpu_seconds": outcome.cpu_ms / 1000,
        "max_memory_gb": _gb(outcome.max_memory_bytes),
        "wall_seconds": outcome.wall_ms / 1000,
        "shell_code": shell_code(outcome),
    }


def shell_code(outcome: Outcome) -> int:
    """The exit code that tells a shell how a job ended."""
    if outcome.ending in (Ending.TIMED_OUT, Ending.WAITED_TOO_LONG):
        return 124
    if outcome.ending is Ending.CANCELLED:
        return 130
    if outcome.ending in (Ending.EXITED, Ending.NEVER_STARTED) and outcome.exit_code is not None:
        return outcome.exit_code
    if outcome.ending is Ending.OVER_LIMIT:
        return 137
    if outcome.signal is not None:
        return 128 + outcome.signal
    return 1


def headline(ask: Amounts) -> tuple[str, float]:
    """The one resource that an ask is mainly about, and how much of it."""
    if ask.gpu_milli:
        return "gpu", ask.gpu_milli / 1000
    if ask.custom:
        return ask.custom[0][0], ask.custom[0][1]
    if ask.cpu_milli:
        return "cpu", ask.cpu_milli / 1000
    return "memory", _gb(ask.memory_bytes)


def ask_view(ask: Amounts) -> View:
    return {
        "cpu_cores": ask.cpu_milli / 1000,
        "memory_gb": _gb(ask.memory_bytes),
        "gpus": ask.gpu_milli / 1000,
        "custom": dict(ask.custom),
    }


def _unheld_view(ask: Amounts) -> View:
    """The resources of a lease that holds none, before its grant or after its end: its GPUs are of no device."""
    gpus = {"index": None, "amount": ask.gpu_milli / 1000, "memory_gb": _gb(ask.gpu_memory_bytes)}
    return {**ask_view(ask), "gpus": [gpus] if ask.gpu_milli else []}


def claim_view(claim: Claim) -> View:
    return {
        "cpu_cores": claim.cpu_milli / 1000,
        "memory_gb": _gb(claim.memory_bytes),
        "gpus": [
            {"index": share.index, "amount": share.milli / 1000, "memory_gb": _gb(share.memory_bytes)}
            for share in claim.gpus
        ],
        "custom": dict(claim.custom),
    }


def _gb(size: int) -> float:
    return round(size / GB, 3)
