"""A ledger under watch: what the laws look at after every event."""

from __future__ import annotations

from collections import Counter as Tally

from msgspec import Struct

from distributed_grid.domain.effects import Effect
from distributed_grid.domain.events import Event, HeartbeatReceived
from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import is_automatic
from distributed_grid.domain.rows import VOLATILE, Row, decode_row, encode_row
from distributed_grid.errors import GridError
from distributed_grid.reactor import decide, pending
from distributed_grid.reactor.decision import Answer
from distributed_grid.reactor.dispatch import StepResult


class ObservedStep(Struct):
    """One event: what there was before, what was decided, what came of it."""

    event: Event
    rows_before: list[Row]
    pending_before: list[Effect]
    rows_decided: list[Row]
    refusal: GridError | None = None
    changes: list[Row] = []
    answer: Answer = None


def in_order(rows: list[Row]) -> list[Row]:
    """Rows in the order a store gives them back."""
    return sorted(rows, key=lambda row: (row.kind, row.key))


def by_job(effects: list[Effect]) -> list[Effect]:
    return sorted(effects, key=lambda effect: effect.job.uid)


class _Seen(Struct):
    """What is remembered of a ledger: the rows as a store would have them, and which leases began and ended."""

    stored: dict[tuple[str, str], bytes]
    leases: set[str]
    ends: Tally[str]


class LedgerWatch:
    """The live ledger, what a store would hold of it, and what has been seen so far.

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

    @property
    def seen(self) -> set[str]:
        """Every lease there ever was."""
        return self._seen.leases

    @property
    def ends(self) -> Tally[str]:
        """How often each lease has ended; one of the grid's own may begin again under its old id."""
        return self._seen.ends

    def begin(self, event: Event) -> ObservedStep:
        """An event is about to be decided; deciding it ahead of time must not change anything."""
        moment = ObservedStep(event, self.ledger.rows(), pending(self.ledger), [])
        try:
            decide(self.ledger, event, self.now)
        except GridError:
            pass  # refused now, and again when it counts
        moment.rows_decided = self.ledger.rows()
        return moment

    def end(self, moment: ObservedStep, came_of_it: StepResult | GridError) -> None:
        """It was decided and applied, or refused."""
        self._rebuilt = None
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
        if row.kind not in VOLATILE:
            if row.is_over:
                self._seen.stored.pop(key, None)
            else:
                self._seen.stored[key] = encode_row(row)
        if isinstance(row, Lease):
            if is_automatic(row.request) and not row.is_over:
                self.ends.pop(row.id, None)
            self.seen.add(row.id)
            self.ends[row.id] += row.is_over

    def keep(self) -> None:
        """What was seen until now is durable."""
        seen = self._seen
        self._kept = _Seen(dict(seen.stored), set(seen.leases), Tally(seen.ends))

    def undo(self) -> None:
        """What was seen since the last `keep` has not happened."""
        kept = self._kept
        self._seen = _Seen(dict(kept.stored), set(kept.leases), Tally(kept.ends))
        self._rebuilt = None

    def begin_anew(self, ledger: Ledger) -> None:
        """A new control plane begins with this ledger, and has heard nobody."""
        self.ledger, self._rebuilt = ledger, None
        self.heard_at, self.began_at = {}, self.now

    def rebuilt(self) -> Ledger:
        """What a new control plane would find in the store."""
        if self._rebuilt is None:
            stored = self._seen.stored
            self._rebuilt = Ledger([decode_row(kind, stored[kind, key]) for kind, key in sorted(stored)])
        return self._rebuilt
