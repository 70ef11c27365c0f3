"""Invariants of the grid, each a function that checks one step of a watched ledger.

One list for whoever proves them: random scripts in the tests, seeded faults in the simulator.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable
from typing import TypeGuard

from msgspec import Struct

from distributed_grid.domain.deliveries import Delivery
from distributed_grid.domain.events import (
    FilesDelivered,
    FilesUndeliverable,
    HeartbeatReceived,
    JobSubmitted,
    LeaseAsked,
    LeaseReleased,
    TimePassed,
)
from distributed_grid.domain.followups import Cause
from distributed_grid.domain.jobs import MAX_RERUNS, Ending, Job
from distributed_grid.domain.leases import Lease, epoch_of
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, NodeObservation, Offer
from distributed_grid.domain.rebalancing import is_automatic
from distributed_grid.domain.resources import WHOLE_GPU
from distributed_grid.domain.rows import Counter, Row, decode_row, encode_row
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.domain.states import JobState, LeaseEnd
from distributed_grid.errors import GridError, NotFound
from distributed_grid.reactor import JobAnswer, LeaseAnswer, decide
from distributed_grid.reactor.decision import Answer
from distributed_grid.reactor.dispatch import StepResult
from distributed_grid.reactor.effects import AttemptEffect, attempt_effects
from distributed_grid.scheduling.offers.pause import start_rest_left_ms
from distributed_grid.scheduling.queue.queue import next_grant


class ObservedStep(Struct):
    """One event with the ledger before it, its decision and its effects."""

    event: Cause
    rows_before: list[Row]
    fence_before: int
    leases_before: list[Lease]
    jobs_before: list[Job]
    pending_before: list[AttemptEffect]
    rows_decided: list[Row]
    refusal: GridError | None = None
    changes: list[Row] = []
    answer: Answer = None


def in_order(rows: list[Row]) -> list[Row]:
    """Rows in the order a store gives them back."""
    return sorted(rows, key=lambda row: (row.kind, row.key))


def by_job(effects: list[AttemptEffect]) -> list[AttemptEffect]:
    return sorted(effects, key=lambda effect: effect.job.uid)


class _Seen(Struct):
    """Memory of a ledger: its rows as in a store, and the leases that began and ended."""

    stored: dict[tuple[str, str], bytes]
    leases: set[str]
    ends: Tally[str]


class LedgerWatch:
    """The live ledger, its rows as in a store, and the observations so far.

    Whoever steps the ledger says so before (`begin`) and after (`end`); what was seen since the last `keep` can be
    taken back with the ledger (`undo`).
    """

    def __init__(self, now: int) -> None:
        self.ledger = Ledger()
        self.now = self.began_at = now
        self.heard_at: dict[str, int] = {}
        self._seen = _Seen({}, set(), Tally())
        self._kept = _Seen({}, set(), Tally())
        self._rebuilt: Ledger | None = None
        self._rebuilt_is_checked = False

    @property
    def seen(self) -> set[str]:
        """Every lease there ever was."""
        return self._seen.leases

    @property
    def ends(self) -> Tally[str]:
        """How often each lease has ended; one of the grid's own may begin again under its old id."""
        return self._seen.ends

    def begin(self, event: Cause) -> ObservedStep:
        """An event is about to be decided; deciding it ahead of time must not change anything."""
        ledger = self.ledger
        fence, leases, jobs = ledger.counters.get("fence", 0), [*ledger.leases.values()], [*ledger.jobs.values()]
        moment = ObservedStep(event, ledger.rows(), fence, leases, jobs, attempt_effects(ledger), [])
        try:
            decide(self.ledger, event, self.now)
        except GridError:
            pass  # refused now, and again when it counts
        moment.rows_decided = self.ledger.rows()
        return moment

    def end(self, moment: ObservedStep, came_of_it: StepResult | GridError) -> None:
        """It was decided and applied, or refused."""
        if isinstance(came_of_it, GridError):
            moment.refusal = came_of_it
            return
        moment.changes, moment.answer = came_of_it.changes, came_of_it.answer
        for row in moment.changes:
            self._take(row)
        if isinstance(moment.event, HeartbeatReceived):
            self.heard_at[moment.event.name] = self.now

    def _take(self, row: Row) -> None:
        key = (row.kind, row.key)
        if not row.is_volatile:
            stored = None if row.is_over else encode_row(row)
            if stored != self._seen.stored.get(key):
                self._rebuilt = None
            if stored is None:
                self._seen.stored.pop(key, None)
            else:
                self._seen.stored[key] = stored
        if isinstance(row, Lease):
            if is_automatic(row.request) and not row.is_over:
                self.ends.pop(row.id, None)
            self.seen.add(row.id)
            self.ends[row.id] += row.is_over

    def keep(self) -> None:
        """Make the observations up to now durable."""
        seen = self._seen
        self._kept = _Seen(dict(seen.stored), set(seen.leases), Tally(seen.ends))

    def undo(self) -> None:
        """Drop the observations since the last `keep`."""
        kept = self._kept
        self._seen = _Seen(dict(kept.stored), set(kept.leases), Tally(kept.ends))
        self._rebuilt = None

    def begin_anew(self, ledger: Ledger) -> None:
        """A new control plane begins with this ledger, and has heard nobody."""
        self.ledger, self._rebuilt = ledger, None
        self.heard_at, self.began_at = {}, self.now

    def rebuilt(self) -> Ledger:
        """The ledger that a new control plane would load; do not write to it."""
        if self._rebuilt is None:
            stored = self._seen.stored
            self._rebuilt = Ledger([decode_row(kind, stored[kind, key]) for kind, key in sorted(stored)])
            self._rebuilt_is_checked = False
        return self._rebuilt

    def check_rebuilt(self) -> None:
        """Raise AssertionError where an index of `rebuilt` is not what its rows say; once while it stays the same."""
        found = self.rebuilt()
        if not self._rebuilt_is_checked:
            found.check()
            self._rebuilt_is_checked = True


Invariant = Callable[[LedgerWatch, ObservedStep], None]


def _started(ledger: Ledger, name: str) -> list[Lease]:
    """The leases that use a node now: a preemptor whose victims are still there does not, nor does a mere claim."""
    there = (lease for lease in ledger.leases.values() if lease.node == name and lease.holds)
    return [lease for lease in there if not lease.awaits and not lease.recovered]


def a_node_is_never_lent_more_than_capacity_and_caps_allow(watch: LedgerWatch, moment: ObservedStep) -> None:
    for name, node in watch.ledger.nodes.items():
        claims = [lease.claim for lease in _started(watch.ledger, name) if lease.claim is not None]
        most = [node.capacity.cpu_milli, node.capacity.memory_bytes]
        if node.caps.cpu_milli is not None:
            most[0] = min(most[0], node.caps.cpu_milli)
        if node.caps.memory_bytes is not None:
            most[1] = min(most[1], node.caps.memory_bytes)
        if not node.caps.can_share:
            most = [0, 0]
        assert sum(claim.cpu_milli for claim in claims) <= most[0]
        assert sum(claim.memory_bytes for claim in claims) <= most[1]
        has = dict(node.capacity.custom)
        limit = dict(node.caps.custom or ())
        for kind in {kind for claim in claims for kind, _ in claim.custom}:
            lent = sum(dict(claim.custom).get(kind, 0) for claim in claims)
            assert lent <= min(has.get(kind, 0), limit.get(kind, lent))
        devices = {share.index for claim in claims for share in claim.gpus}
        if node.caps.gpu_count is not None:
            assert len(devices) <= node.caps.gpu_count
        assert devices <= {device.index for device in node.capacity.gpus}
    assert {lease.node for lease in watch.ledger.leases.values() if lease.holds} <= set(watch.ledger.nodes)


def a_gpu_is_never_lent_twice(watch: LedgerWatch, moment: ObservedStep) -> None:
    for name, node in watch.ledger.nodes.items():
        for device in node.capacity.gpus:
            shares = [
                share
                for lease in _started(watch.ledger, name)
                if lease.claim is not None
                for share in lease.claim.gpus
                if share.index == device.index
            ]
            assert sum(share.milli for share in shares) <= WHOLE_GPU
            assert sum(share.memory_bytes for share in shares) <= device.memory_bytes
            if device.exclusive or any(share.milli == WHOLE_GPU for share in shares):
                assert [share.milli for share in shares] in ([], [WHOLE_GPU])


def every_lease_ends_exactly_once(watch: LedgerWatch, moment: ObservedStep) -> None:
    assert all(times <= 1 for times in watch.ends.values())
    over = {lease_id for lease_id, times in watch.ends.items() if times}
    assert watch.seen - over == set(watch.ledger.leases)
    for row in moment.changes:
        if isinstance(row, Lease) and row.is_over:
            assert row.end is not None
            assert row.claim is None
            assert row.ended_at_ms == watch.now


def _is_fence(row: Row) -> TypeGuard[Counter]:
    return isinstance(row, Counter) and row.name == "fence"


def fences_only_grow(watch: LedgerWatch, moment: ObservedStep) -> None:
    counted = [moment.fence_before, *(row.value for row in moment.changes if _is_fence(row))]
    assert counted == sorted(counted)
    before = {lease.id: lease for lease in moment.leases_before if lease.fence}
    for lease in watch.ledger.leases.values():
        old = before.get(lease.id)
        assert old is None or old.fence == lease.fence
        if old is None and lease.fence and not lease.recovered:
            assert all(lease.fence > other.fence for other in before.values() if other.node == lease.node)
    given = [(lease.node, lease.fence) for lease in watch.ledger.leases.values() if lease.fence and not lease.recovered]
    assert len(set(given)) == len(given)
    for job in watch.ledger.jobs.values():
        numbers: dict[tuple[str, int], list[int]] = {}
        for attempt in job.attempts:
            numbers.setdefault((attempt.node, epoch_of(attempt.fence)), []).append(attempt.fence)
        assert all(fences == sorted(set(fences)) for fences in numbers.values())


def a_refused_event_changes_nothing(watch: LedgerWatch, moment: ObservedStep) -> None:
    if moment.refusal is not None:
        assert watch.ledger.rows() == moment.rows_before


def deciding_changes_nothing(watch: LedgerWatch, moment: ObservedStep) -> None:
    assert moment.rows_decided == moment.rows_before


def what_is_stored_is_the_ledger(watch: LedgerWatch, moment: ObservedStep) -> None:
    found = watch.rebuilt()
    assert in_order(found.rows()) == in_order(watch.ledger.rows(durable_only=True))
    watch.check_rebuilt()


def the_same_request_twice_is_one_grant(watch: LedgerWatch, moment: ObservedStep) -> None:
    """Whatever was asked for and accepted: asked again, at once, gets the same answer and nothing else."""
    if moment.refusal is not None or not isinstance(moment.event, LeaseAsked | JobSubmitted):
        return
    again = decide(watch.ledger, moment.event, watch.now)
    assert again.changes == []
    assert again.follow == []
    first = moment.answer
    if isinstance(first, LeaseAnswer):
        assert isinstance(again.answer, LeaseAnswer)
        assert again.answer.lease.id == first.lease.id
    else:
        assert isinstance(first, JobAnswer)
        assert isinstance(again.answer, JobAnswer)
        assert again.answer.job.uid == first.job.uid


def a_restart_finds_the_same_things_to_do(watch: LedgerWatch, moment: ObservedStep) -> None:
    assert by_job(attempt_effects(watch.rebuilt())) == by_job(attempt_effects(watch.ledger))


def what_is_new_to_do_follows_from_what_changed(watch: LedgerWatch, moment: ObservedStep) -> None:
    every, some = attempt_effects(watch.ledger), attempt_effects(watch.ledger, moment.changes)
    assert all(effect in every for effect in some)
    assert all(effect in some for effect in every if effect not in moment.pending_before)


def releasing_twice_is_harmless(watch: LedgerWatch, moment: ObservedStep) -> None:
    """The second release changes nothing: the lease is gone (the runtime makes a success of that) or going."""
    if moment.refusal is not None or not isinstance(moment.event, LeaseReleased):
        return
    rows = watch.ledger.rows()
    if moment.event.lease_id in watch.ledger.leases:
        again = decide(watch.ledger, moment.event, watch.now)
        assert (again.changes, again.follow) == ([], [])
    else:
        try:
            decide(watch.ledger, moment.event, watch.now)
        except NotFound:
            pass
        else:
            raise AssertionError(f"{moment.event.lease_id} is gone, and can be released")
    assert watch.ledger.rows() == rows


def nobody_waits_who_could_be_served(watch: LedgerWatch, moment: ObservedStep) -> None:
    """When something came free, or time has passed, whoever fits has been served; nobody new waits without need.

    A place that is kept for somebody opens to others by the clock alone, and when somebody is expected to leave sooner
    than before: that is found when time passes.
    """
    if moment.refusal is not None:
        return
    held = {lease.id for lease in moment.leases_before if lease.holds}
    freed = any(
        isinstance(row, SchedulingPolicy)
        or (isinstance(row, Offer) and not row.is_over)
        or (isinstance(row, Lease) and row.is_over and row.id in held)
        for row in moment.changes
    )
    if not freed and not isinstance(moment.event, TimePassed | LeaseAsked | JobSubmitted):
        return
    turn = next_grant(watch.ledger, watch.now)
    if turn is not None:
        assert not freed, f"{turn.lease.id} waits, though something came free"
        assert not isinstance(moment.event, TimePassed), f"{turn.lease.id} waits, though time has passed"
        if isinstance(moment.event, LeaseAsked | JobSubmitted):
            assert turn.lease.request.id != moment.event.request.id, f"{turn.lease.id} waits without need"


def an_offer_is_within_what_its_node_may_lend(watch: LedgerWatch, moment: ObservedStep) -> None:
    for name, offer in watch.ledger.offers.items():
        most = watch.ledger.nodes[name].lendable
        assert offer.lends.cpu_milli <= most.cpu_milli
        assert offer.lends.memory_bytes <= most.memory_bytes
        assert set(offer.lends.gpus) <= set(most.gpus)
        assert all(count <= dict(most.custom).get(kind, 0) for kind, count in offer.lends.custom)


def nothing_is_given_up_before_its_hold_is_over(watch: LedgerWatch, moment: ObservedStep) -> None:
    """What silence alone ends was silent for longer than its node's hold, counted from the last sign of life, or from
    the start of a control plane that has heard none; of a gang, one member was. What its node's agent had no trace of
    was kept until the hold was over that it may have had."""
    ended = [row for row in moment.changes if isinstance(row, Lease) and row.end is LeaseEnd.LOST]
    if not ended or not isinstance(moment.event, TimePassed):
        return
    held = {lease.id: lease.node for lease in moment.leases_before if lease.holds}
    nodes = {row.name: row for row in moment.rows_before if isinstance(row, Node)}
    lost: dict[str, list[Node]] = {}
    seen = [row for row in moment.rows_before if isinstance(row, NodeObservation)]
    missing = {one.lease_id: one for row in seen for one in row.missing}
    for lease in ended:
        if lease.id in missing and 0 < missing[lease.id].until_ms <= watch.now:
            continue
        if lease.id in held:
            lost.setdefault(lease.gang or lease.id, []).append(nodes[held[lease.id]])
    for lease_id, silent in lost.items():
        assert any(
            node.hold_ms and watch.now - watch.heard_at.get(node.name, watch.began_at) >= node.hold_ms
            for node in silent
        ), f"{lease_id} was given up too soon"


def a_node_that_gives_way_or_is_silent_gets_nothing_new(watch: LedgerWatch, moment: ObservedStep) -> None:
    before = {lease.id for lease in moment.leases_before if lease.holds}
    for row in moment.changes:
        if isinstance(row, Lease) and row.holds and row.id not in before and not row.recovered:
            seen = watch.ledger.observations[row.node]
            assert not seen.yields
            assert seen.at_ms


def a_black_hole_and_a_full_disk_get_nothing_new(watch: LedgerWatch, moment: ObservedStep) -> None:
    """A node that has not started what it was given rests, and one with a full disk lends nothing."""
    before = {lease.id for lease in moment.leases_before if lease.holds}
    for row in moment.changes:
        if isinstance(row, Lease) and row.holds and row.id not in before and not row.recovered:
            seen = watch.ledger.observations[row.node]
            assert not start_rest_left_ms(seen, watch.now), f"{row.id} is placed on {row.node}, which rests"
            assert not seen.disk_full, f"{row.id} is placed on {row.node}, whose disk is full"


def whoever_is_displaced_is_less_important_has_run_and_was_not_displaced_too_often(
    watch: LedgerWatch, moment: ObservedStep
) -> None:
    before = {lease.id: lease for lease in moment.leases_before}
    jobs = {job.uid: job for job in moment.jobs_before}
    rows = {row.id: row for row in moment.changes if isinstance(row, Lease)}
    for row in rows.values():
        known = before.get(row.id)
        if not row.preempted_by or known is None or known.preempted_by or is_automatic(row.request):
            continue  # what the grid holds for its own sake gives way to anybody
        policy, job = watch.ledger.policy, jobs.get(row.job)
        preemptor = rows.get(row.preempted_by) or watch.ledger.leases[row.preempted_by]
        assert row.request.priority < preemptor.request.priority
        attempt = job.attempt if job is not None else None
        began = attempt.started_at_ms if attempt is not None else row.granted_at_ms
        assert watch.now - began >= policy.minimum_run_ms
        ends = [one.outcome.ending for one in job.attempts if one.outcome is not None] if job is not None else []
        assert ends.count(Ending.PREEMPTED) < policy.preemptions_max


def a_mark_is_of_its_attempt_and_only_moves_on(watch: LedgerWatch, moment: ObservedStep) -> None:
    known = {job.uid: job.attempts for job in moment.jobs_before}
    for row in moment.changes:
        for attempt in row.attempts if isinstance(row, Job) else ():
            if attempt.marked_at_ms:
                assert attempt.assigned_at_ms <= attempt.started_at_ms <= attempt.marked_at_ms <= watch.now
            for before in known.get(row.key, ())[attempt.number - 1 : attempt.number]:
                assert before.marked_at_ms <= attempt.marked_at_ms


def an_attempt_starts_when_what_the_last_one_left_is_there(watch: LedgerWatch, moment: ObservedStep) -> None:
    for row in moment.changes:
        if isinstance(row, Job):
            runs = row.state in (JobState.RUNNING, JobState.PAUSED)
            assert not (runs and row.checkpoint_from), f"{row.id} runs without the checkpoint of its last attempt"
            left = [one.outcome for one in row.attempts if one.number == row.checkpoint_from]
            assert left.count(None) == 0, f"{row.id} waits for what an attempt leaves that is not over"


def who_runs_over_a_given_limit_is_run_again_bigger_at_most_three_times(
    watch: LedgerWatch, moment: ObservedStep
) -> None:
    for row in moment.changes:
        if not isinstance(row, Job):
            continue
        limits = row.estimate.memory_limits if row.estimate is not None else ()
        ends = [(one.memory_limit_bytes, one.outcome.ending) for one in row.attempts if one.outcome is not None]
        overrun = [limit for limit, ending in ends if ending is Ending.OVER_LIMIT]
        assert len(limits) <= 1 + MAX_RERUNS
        assert overrun == sorted(set(overrun))
        assert row.overruns <= len(overrun) <= row.overruns + row.is_over


def who_is_not_declared_restartable_is_not_run_again_for_a_learned_limit(
    watch: LedgerWatch, moment: ObservedStep
) -> None:
    before = {job.uid: job for job in moment.jobs_before}
    for row in moment.changes:
        known = before.get(row.uid) if isinstance(row, Job) else None
        if known is not None and isinstance(row, Job) and row.overruns > known.overruns:
            assert known.may_run_again, f"{row.id} is run again, and nobody has allowed that"


def a_lease_that_may_grow_is_as_large_as_its_attempt_says(watch: LedgerWatch, moment: ObservedStep) -> None:
    for row in moment.changes:
        attempt = row.attempt if isinstance(row, Job) and not row.request.use_lease else None
        lease = watch.ledger.leases.get(attempt.lease_id) if attempt is not None else None
        if attempt is not None and lease is not None and lease.claim is not None:
            assert attempt.memory_limit_bytes == lease.claim.memory_bytes


def the_indexes_say_what_the_rows_say(watch: LedgerWatch, moment: ObservedStep) -> None:
    watch.ledger.check()


def wanted_files_are_on_their_way_until_they_are_reported(watch: LedgerWatch, moment: ObservedStep) -> None:
    """A job that ends and wants files back leaves a delivery, which only a report about these files ends."""
    ended = [row for row in moment.changes if isinstance(row, Job) and row.is_over and row.fetch is not None]
    for job in ended:
        assert job.uid in watch.ledger.deliveries, f"the files of {job.id} are forgotten"
    for row in moment.rows_before:
        if isinstance(row, Delivery) and row.job not in watch.ledger.deliveries:
            assert isinstance(moment.event, FilesDelivered | FilesUndeliverable), f"{row.job_id} lost its delivery"


INVARIANTS: tuple[Invariant, ...] = (
    wanted_files_are_on_their_way_until_they_are_reported,
    the_indexes_say_what_the_rows_say,
    a_node_is_never_lent_more_than_capacity_and_caps_allow,
    a_gpu_is_never_lent_twice,
    every_lease_ends_exactly_once,
    fences_only_grow,
    a_refused_event_changes_nothing,
    deciding_changes_nothing,
    what_is_stored_is_the_ledger,
    the_same_request_twice_is_one_grant,
    a_restart_finds_the_same_things_to_do,
    what_is_new_to_do_follows_from_what_changed,
    releasing_twice_is_harmless,
    nobody_waits_who_could_be_served,
    an_offer_is_within_what_its_node_may_lend,
    nothing_is_given_up_before_its_hold_is_over,
    a_node_that_gives_way_or_is_silent_gets_nothing_new,
    a_black_hole_and_a_full_disk_get_nothing_new,
    whoever_is_displaced_is_less_important_has_run_and_was_not_displaced_too_often,
    a_mark_is_of_its_attempt_and_only_moves_on,
    an_attempt_starts_when_what_the_last_one_left_is_there,
    who_runs_over_a_given_limit_is_run_again_bigger_at_most_three_times,
    who_is_not_declared_restartable_is_not_run_again_for_a_learned_limit,
    a_lease_that_may_grow_is_as_large_as_its_attempt_says,
)

REBUILDING_INVARIANTS: frozenset[Invariant] = frozenset(
    (the_indexes_say_what_the_rows_say, what_is_stored_is_the_ledger, a_restart_finds_the_same_things_to_do)
)
"""These build a ledger anew, which takes longer than all the others together."""
