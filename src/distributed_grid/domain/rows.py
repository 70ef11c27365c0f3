"""Rows of the ledger, and the encoding of the durable ones.

A change is a whole row in its new state. Observations, offers, engine capacities, memory servers, rebalance states
and offload watches are volatile: they are applied, never stored. Rows of leases and jobs are stored without the fields
that have their defaults, so a default that is changed changes what older rows mean: give such a field a new name. The
garbage collector does not track them (`gc=False`): they are many, and hold nothing that could refer back to them.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import msgspec
from msgspec import Struct

from distributed_grid.domain.blocks import Block, MemoryServerRow
from distributed_grid.domain.deliveries import Delivery
from distributed_grid.domain.engines import Binding, EngineCapacity, EngineRow
from distributed_grid.domain.jobs import Job
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.moves import AutoOffloadState, DegradedNode, Move, MoveConsent, OffloadWatch
from distributed_grid.domain.nodes import Node, NodeObservation, Offer
from distributed_grid.domain.rebalancing import RebalanceState
from distributed_grid.domain.scheduling_policy import SchedulingPolicy
from distributed_grid.domain.statistics import Account, QueueProgress, RequestShapes
from distributed_grid.domain.workers import OfferClosure, ScalingRules, Spending, UtilizationWindow, Worker, WorkerRules


class Counter(Struct, frozen=True):
    """A number that only grows: the epoch of the control plane, the last fence."""

    kind: ClassVar[str] = "counter"

    name: str
    value: int

    @property
    def key(self) -> str:
        return self.name

    @property
    def is_over(self) -> bool:
        return False


Stored = (
    Node
    | Lease
    | Job
    | Counter
    | SchedulingPolicy
    | Account
    | RequestShapes
    | QueueProgress
    | EngineRow
    | Binding
    | Block
    | Worker
    | WorkerRules
    | Spending
    | OfferClosure
    | ScalingRules
    | Move
    | MoveConsent
    | AutoOffloadState
    | DegradedNode
    | Delivery
)
Row = (
    Stored
    | NodeObservation
    | Offer
    | RebalanceState
    | EngineCapacity
    | MemoryServerRow
    | UtilizationWindow
    | OffloadWatch
)
VOLATILE = frozenset(
    row.kind
    for row in (
        *(NodeObservation, Offer, RebalanceState, EngineCapacity, MemoryServerRow, UtilizationWindow, OffloadWatch),
    )
)

_STORED: dict[str, type[Stored]] = {
    row.kind: row
    for row in (
        *(Node, Lease, Job, Counter, SchedulingPolicy, Account, RequestShapes, EngineRow, Binding, Block),
        QueueProgress,
        *(Worker, WorkerRules, Spending, OfferClosure, ScalingRules, Move, MoveConsent, AutoOffloadState),
        *(DegradedNode, Delivery),
    )
}
_encoder = msgspec.msgpack.Encoder()


def encode_row(row: Row) -> bytes:
    """The row as it is stored."""
    return _encoder.encode(row)


def decode_row(kind: str, blob: bytes) -> Row:
    """The row that was stored; unknown fields of a newer build are ignored, missing ones get their defaults."""
    return _decoder_of(kind).decode(blob)


@functools.cache
def _decoder_of(kind: str) -> msgspec.msgpack.Decoder[Stored]:
    """The decoder of a kind of rows, made when the first one is read."""
    return msgspec.msgpack.Decoder(_STORED[kind])
