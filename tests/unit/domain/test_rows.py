"""Rows: the form in which they are stored, and what every one of them has."""

from __future__ import annotations

import gc

import msgspec
import pytest
from msgspec.structs import replace

from distributed_grid.domain.blocks import MemoryServerRow
from distributed_grid.domain.engines import EngineCapacity
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import OffloadWatch
from distributed_grid.domain.nodes import Node, NodeObservation, Offer
from distributed_grid.domain.rebalancing import RebalanceState
from distributed_grid.domain.resources import Claim, GpuShare
from distributed_grid.domain.rows import Counter, Row, decode_as, decode_row, encode_row
from distributed_grid.domain.states import JobState, LeaseState
from distributed_grid.domain.workers import UtilizationWindow
from tests.support.builders import GB, NOW, a_capacity, a_node, caps, thresholds
from tests.unit.domain.sample_rows import ATTEMPT, JOB, LEASE

CLAIM = Claim(1000, GB, (GpuShare(0, 500, GB),), (("fpga", 1),))


@pytest.mark.parametrize(
    "row",
    [
        Counter("fence", 2**62),
        a_node(gpus=2, custom={"fpga": 1}, caps=caps(cores=1, custom={"fpga": 1}), thresholds=thresholds()),
        replace(LEASE, state=LeaseState.RESERVING, claim=CLAIM, node="gpu1", awaits=("r0",)),
        replace(JOB, attempts=(replace(ATTEMPT, outcome=Outcome(Ending.SIGNALLED, signal=9)),)),
    ],
    ids=lambda row: row.kind,
)
def test_a_durable_row_comes_back_as_it_was_stored(row):
    assert decode_row(row.kind, encode_row(row)) == row
    assert not row.is_volatile


def test_a_row_of_a_newer_build_is_read_without_what_it_adds():
    stored = {**msgspec.to_builtins(a_node("gpu1")), "mood": "cheerful"}
    assert decode_row("node", msgspec.msgpack.encode(stored)) == a_node("gpu1")


def test_a_row_of_an_older_build_gets_the_defaults_of_what_it_lacks():
    assert decode_as(Node, msgspec.msgpack.encode({"name": "gpu1"})).name == "gpu1"


def test_what_is_measured_or_derived_anew_is_never_stored():
    assert {
        NodeObservation.kind,
        Offer.kind,
        RebalanceState.kind,
        EngineCapacity.kind,
        MemoryServerRow.kind,
        UtilizationWindow.kind,
        OffloadWatch.kind,
    } == {row_type.kind for row_type in Row.__subclasses__() if row_type.is_volatile}
    with pytest.raises(KeyError):
        decode_row(Offer.kind, b"")


def test_every_row_has_a_key_and_says_whether_it_is_over():
    offer = Offer(node="gpu1", generation=1, lends=a_capacity(), made_at_ms=NOW, expires_at_ms=NOW + 1)
    assert [
        row.key
        for row in (LEASE, JOB, offer, NodeObservation(node="gpu2", at_ms=NOW), Counter("fence", 1), a_node("gpu3"))
    ] == [
        "r1",
        "r1",
        "gpu1",
        "gpu2",
        "fence",
        "gpu3",
    ]
    assert not any(
        row.is_over for row in (LEASE, JOB, offer, NodeObservation(node="gpu2", at_ms=NOW), Counter("fence", 1))
    )
    assert replace(LEASE, state=LeaseState.ENDED).is_over
    assert replace(JOB, state=JobState.ENDED).is_over
    assert replace(offer, withdrawn=True).is_over


def test_rows_of_a_long_queue_are_not_walked_by_the_garbage_collector() -> None:
    for row in (JOB, LEASE):
        stored = decode_row(row.kind, encode_row(row))
        assert isinstance(stored, type(row))
        for value in (row, row.request, stored, stored.request, replace(row, state=row.state)):
            assert not gc.is_tracked(value)
    for part in (ATTEMPT, JOB.command, CLAIM, JOB.request.ask):
        assert not gc.is_tracked(part)


def test_every_kind_of_row_has_a_name_and_a_table_of_its_own() -> None:
    kinds = Row.__subclasses__()
    assert len({kind.kind for kind in kinds}) == len(kinds)
    tables = Ledger()._tables
    assert set(tables) == set(kinds)
