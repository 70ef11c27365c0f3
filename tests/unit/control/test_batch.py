"""The batch settler: refusals are answers, bugs are not, and what is over is recalled."""

from __future__ import annotations

import pytest

from distributed_grid.adapters.stores.in_memory import InMemoryStore
from distributed_grid.control.batch import BatchSettler, DecisionFailed, Entry
from distributed_grid.domain.blocks import MemoryServerRow
from distributed_grid.domain.events import (
    BlockAsked,
    BlockReleased,
    ControlPlaneStarted,
    CopiesFreed,
    Event,
    HeartbeatReceived,
    JobCancelled,
    LeaseReleased,
    MemoryServed,
    MoveCancelled,
    MoveRequested,
    NodeDeclared,
    TimePassed,
)
from distributed_grid.domain.followups import Cause
from distributed_grid.domain.jobs import Ending
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import MoveEnd
from distributed_grid.domain.nodes import Usage
from distributed_grid.errors import Conflict, IllegalStep, NotFound, Refused
from distributed_grid.reactor import step
from distributed_grid.reactor.dispatch import StepResult
from distributed_grid.reactor.effects import OrderMoveStep, ShipFiles, StartAttempt, pending
from distributed_grid.reactor.lease_lifetime import MAX_EXPIRED_PER_STEP
from tests.support.builders import a_node, a_request, a_submission
from tests.unit.reactor.offloading.move_builders import a_process_move

NOW = 1_000_000


class Settled:
    """A settler on a store, with one node of four cores."""

    def __init__(self, **options) -> None:
        self.store = InMemoryStore()
        self.settler = BatchSettler(self.store, **options)
        self.settle(
            ControlPlaneStarted(1), NodeDeclared(a_node("here", cores=4)), HeartbeatReceived(name="here", usage=Usage())
        )

    def settle(self, *events: Event) -> list[Entry]:
        entries = [Entry(event) for event in events]
        batch = self.settler.decide(entries, NOW)
        stored = self.settler.to_commit(batch)
        if stored is not None:
            self.store.commit(stored)
            self.settler.committed(stored)
        return entries


def test_a_refusal_is_the_answer_of_its_entry_and_stops_no_other() -> None:
    refused, accepted = Settled().settle(LeaseReleased("nobody", "ada"), a_submission(a_request("job", cores=1)))
    assert isinstance(refused.failure, NotFound)
    assert (accepted.failure, accepted.answer.job.uid) == (None, "job")


def test_what_a_batch_calls_for_is_known_once_it_is_decided() -> None:
    settled = Settled()
    batch = settled.settler.decide([Entry(a_submission(a_request("job", cores=1)))], NOW)
    (effect,) = pending(settled.settler.ledger, batch.now, batch.changes)
    assert isinstance(effect, StartAttempt)
    assert effect.job.uid == "job"


def test_a_sign_of_life_alone_need_not_be_stored_and_a_question_sees_what_came_before_it() -> None:
    settled = Settled()
    question = Entry(None, lambda ledger, now: (ledger.observations["here"].beat, now))
    batch = settled.settler.decide([Entry(HeartbeatReceived(name="here", usage=Usage(), beat=7)), question], NOW)
    assert settled.settler.to_commit(batch) is None
    assert question.answer == (7, NOW)


def test_a_batch_that_was_not_committed_has_not_happened() -> None:
    settled = Settled()
    settled.settler.decide([Entry(a_submission(a_request("job", cores=1)))], NOW)
    assert "job" in settled.settler.ledger.jobs
    settled.settler.load(settled.store.load())
    assert "job" not in settled.settler.ledger.jobs
    assert "here" in settled.settler.ledger.observations  # never stored, and kept


def test_another_process_knows_only_what_is_stored() -> None:
    settled = Settled()
    settled.settler.load(settled.store.load(), keep_volatile=False)
    assert (set(settled.settler.ledger.nodes), dict(settled.settler.ledger.observations)) == ({"here"}, {})


@pytest.mark.parametrize("batches", [1, 2])
def test_a_request_that_is_over_is_recalled_and_its_id_is_good_for_nothing_else(batches: int) -> None:
    settled = Settled()
    settled.settle(a_submission(a_request("first", cores=4)))
    submitted, cancelled = a_submission(a_request("job", cores=1, wait_s=9)), JobCancelled("job", "ada")
    others = (submitted, a_submission(a_request("job", cores=2)))
    if batches == 1:
        again, other = settled.settle(submitted, cancelled, *others)[2:]
    else:
        settled.settle(submitted, cancelled)
        again, other = settled.settle(*others)
    assert (again.failure, again.answer.job.outcome.ending) == (None, Ending.CANCELLED)
    assert isinstance(other.failure, Conflict)
    assert "job" not in settled.settler.ledger.jobs


@pytest.mark.parametrize("batches", [1, 2])
def test_a_block_that_is_over_is_not_allocated_again(batches: int) -> None:
    settled = Settled()
    settled.settle(
        MemoryServed(MemoryServerRow(node="here", host="", port=0, incarnation="life1", key_bytes=b"k" * 32), ())
    )
    asked = BlockAsked(id="block", user="ada", size_bytes=1 << 20, term_ms=60_000)
    (copy,) = settled.settle(asked)[0].answer.block.places
    over = (BlockReleased("block", "ada"), CopiesFreed((copy.copy,), ("here",)))
    if batches == 1:
        again = settled.settle(*over, asked)[-1]
    else:
        settled.settle(*over)
        (again,) = settled.settle(asked)
    assert isinstance(again.failure, Conflict)
    assert (settled.settler.ledger.blocks, settled.settler.ledger.leases) == ({}, {})


def test_a_bug_names_the_entry_it_is_about() -> None:
    def broken(ledger: Ledger, event: Cause, now: int) -> StepResult:
        if isinstance(event, LeaseReleased):
            raise IllegalStep("a bug")
        return step(ledger, event, now)

    settled = Settled(step=broken)
    entries = [Entry(HeartbeatReceived(name="here", usage=Usage())), Entry(LeaseReleased("any", "ada"))]
    with pytest.raises(DecisionFailed) as failed:
        settled.settler.decide(entries, NOW)
    assert failed.value.culprit is entries[1]
    assert isinstance(failed.value.cause, IllegalStep)


def test_a_batch_that_gets_long_leaves_the_rest_undecided() -> None:
    settled = Settled()
    entries = [Entry(a_submission(a_request(name, cores=1))) for name in ("one", "two", "three")]
    batch = settled.settler.decide(entries, NOW, is_long=lambda: "two" in settled.settler.ledger.jobs)
    assert batch.decided == 2
    assert [entry.answer is not None for entry in entries] == [True, True, False]


def test_what_is_left_for_later_steps_is_entered_once() -> None:
    settled = Settled()
    waiting = MAX_EXPIRED_PER_STEP + 5
    settled.settle(*(a_submission(a_request(f"job{number}", cores=4, wait_s=1)) for number in range(waiting + 1)))
    batch = settled.settler.decide([Entry(TimePassed()), Entry(TimePassed())], NOW + 1_000)
    assert (len(settled.settler.ledger.waiting), list(batch.later)) == (0, [TimePassed()])


def test_a_node_that_gives_way_offers_nothing_from_its_heartbeat_on() -> None:
    settled = Settled()
    assert "here" in settled.settler.ledger.offers
    settled.settler.observe(HeartbeatReceived(name="here", usage=Usage(), beat=8, yields=True), NOW)
    assert "here" not in settled.settler.ledger.offers


def test_a_move_is_an_effect_at_once_and_is_recalled_when_it_is_over() -> None:
    settled = Settled()
    names = ("gpu1", "gpu2")
    settled.settle(
        *(NodeDeclared(a_node(name)) for name in names), *(HeartbeatReceived(name=one, usage=Usage()) for one in names)
    )
    batch = settled.settler.decide([Entry(MoveRequested(a_process_move()))], NOW)
    effects = pending(settled.settler.ledger, batch.now, batch.changes)
    assert [type(effect) for effect in effects] == [OrderMoveStep, ShipFiles]
    settled.settle(MoveRequested(a_process_move()), MoveCancelled("move-1", "ada"))
    (again,) = settled.settle(MoveRequested(a_process_move()))
    assert (again.answer.move.end, again.answer.move.problem) == (MoveEnd.CANCELLED, "cancelled by ada")
    (found,) = settled.store.ended("move")
    assert (found.key, found.user, found.node, found.target, found.reason) == (
        "move-1",
        "ada",
        "gpu1",
        "gpu2",
        "cancelled",
    )


def test_a_move_that_is_refused_is_in_the_audit_trail() -> None:
    settled = Settled()
    (refused,) = settled.settle(MoveRequested(a_process_move()))
    assert isinstance(refused.failure, Refused)
    (record,) = settled.store.events(types=("refused",))
    assert (record.user, record.subject, record.node) == ("ada", "move-1", "gpu1")
