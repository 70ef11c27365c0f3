"""Follow-ups: commands that a decider leaves for the same step, or for a later one.

A follow-up has no caller and is never stored: whatever is lost of it in a crash, a tick or the next reading of the
world finds again. It cannot be refused. Facts that follow from a decision (`LeaseLost`) are events.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from distributed_grid.domain.events import Event, OffloadPressureRead, PressureRead
from distributed_grid.domain.rebalancing import RebalanceSchedule
from distributed_grid.domain.workers import ScalingPlan


class Followup(Struct, frozen=True):
    """Base of all follow-ups, of which exactly one decider each is in `reactor/dispatch.py`."""


class CheckMove(Followup, frozen=True):
    """Take the next step of a move: its lease, its job, its node or the time has changed."""

    move_id: str


class ContinueScan(Followup, frozen=True):
    """Go on with a scan of the queue after a grant."""

    tried: frozenset[object] = frozenset()  # fit keys of requests that did not fit during this scan
    granted: int = 0  # requests that this scan has granted


class ScanQueue(Followup, frozen=True):
    """Scan the queue: capacity may have come free."""


class SettleDue(Followup, frozen=True):
    """Settle the rows whose time has come."""

    expired: int = 0  # leases that were settled in this step already
    freed: bool = False  # whether some of them held anything, since the last scan of the queue


class AssessNode(Followup, frozen=True):
    """Settle the state and the offer of a node after its heartbeat."""

    name: str


class CheckClaims(Followup, frozen=True):
    """Confirm or end the recovered leases of a node that was heard."""

    node: str


class AddCopy(Followup, frozen=True):
    """Reserve another copy of a new block, which has no bytes yet."""

    block_id: str


class RestoreCopy(Followup, frozen=True):
    """Start a copy that a block lacks, or bring one back from disk."""

    block_id: str


class CheckWorkers(Followup, frozen=True):
    """Compare deadlines and budgets of workers with the time."""

    wall_ms: int


class ScaleWorkers(Followup, frozen=True, kw_only=True):
    """Carry out the rest of a scaling plan."""

    plan: ScalingPlan
    ids: tuple[str, ...]  # of new workers
    wall_ms: int


class RebalanceNodes(Followup, frozen=True):
    """Take the next action of a round of rebalancing."""

    reading: PressureRead
    schedule: RebalanceSchedule


class RelieveNodes(Followup, frozen=True):
    """Relieve the next of the nodes under pressure by automatic offloading."""

    reading: OffloadPressureRead
    nodes: tuple[str, ...]
    ids: tuple[str, ...]  # of new moves


Cause = Event | Followup
"""Input of one decision."""


class Place(enum.Enum):
    """Where a follow-up is put among those that wait in its step."""

    FIRST = "first"
    LAST = "last"
    LAST_ONCE = "last once"  # nothing is put in where an equal one waits


PLACES: dict[type, Place] = {
    CheckMove: Place.FIRST,  # moved work gets its place before the queue does
    ContinueScan: Place.FIRST,  # a scan ends before anything else begins
    ScanQueue: Place.LAST_ONCE,
}
"""The order of a step: everything that is not named here, events included, comes last."""
