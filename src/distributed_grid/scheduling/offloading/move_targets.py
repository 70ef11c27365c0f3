"""Targets of moves: the node that can best take a piece of work from another one, or why none can.

A target is on another machine, alive, above none of its own marks, may run the work, has room for it and can spare
that.
A target that the user names only has to be able to run it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.leases import Request
from distributed_grid.domain.rebalancing import WATCHED_RESOURCES
from distributed_grid.domain.resources import Amounts, ResourceType
from distributed_grid.domain.states import NodeState
from distributed_grid.scheduling.placement.explanation import confidence
from distributed_grid.scheduling.placement.placement import find_placement, unmet_constraint
from distributed_grid.scheduling.queue.reasons import stopped_reason
from distributed_grid.scheduling.rebalancing.loans import asked_amount, describe, surplus, why_no_surplus
from distributed_grid.scheduling.rebalancing.pressure import PressureScan, machine_of

MAX_TARGETS = 32
"""Nodes that are compared, least loaded first."""
MAX_REASONS = 4


class MoveTarget(Struct, frozen=True):
    """Where a piece of work can go, and how sure that is right (thousandths); or (without a node) why nowhere.

    `missing` are the files that keep it from nodes that could take it otherwise.
    """

    node: str = ""
    confidence: int = 0
    reason: str = ""
    missing: tuple[str, ...] = ()


class MoveTargets:
    """Finds targets for the work of one node; what was assigned to one of them is not spared twice."""

    def __init__(
        self, scan: PressureScan, node: str, only: str = "", absent: Mapping[str, Collection[str]] | None = None
    ) -> None:
        self._scan = scan
        self._node = node
        self._only = only
        self._absent = absent or {}
        self._assigned: Counter[tuple[str, str]] = Counter()
        self._surplus: dict[tuple[str, str], int] = {}
        self._names = list(self._candidates())

    def _candidates(self) -> Iterator[str]:
        scan, nodes = self._scan, self._scan.ledger.nodes
        if self._only:
            if self._only in nodes and self._only != self._node:
                yield self._only
            return
        others = (name for name in scan.other_machines(self._node) if scan.has_headroom(name))
        by_load = sorted((scan.reading(name).score or 0, name) for name in others)
        yield from (name for _, name in by_load[:MAX_TARGETS])

    def find(self, request: Request, needs: Sequence[tuple[str, int]] = (), *, assign: bool = False) -> MoveTarget:
        """The least loaded node that can take this; with `assign` it can spare that much less from now on."""
        missing: tuple[str, ...] = ()
        refusals: list[str] = []
        for name in self._names:
            refusal = self._refusal(request, name)
            if refusal:
                refusals.append(refusal)
                continue
            lacks = tuple(path for path, _ in needs if path in self._absent.get(name, ()))
            if lacks:
                missing = missing or lacks
                refusals.append(f"{name}: has no {lacks[0]}")
                continue
            place = find_placement(self._scan.ledger, replace(request, require=(name,), prefer=()))
            if place is None:
                refusals.append(f"{name}: no room for it now")
                continue
            if assign:
                self._assigned.update({(name, kind): asked_amount(request.ask, kind) for kind in WATCHED_RESOURCES})
            return MoveTarget(name, confidence(self._scan.ledger, request, place, self._scan.now).whole)
        return MoveTarget(reason=self._why_nowhere(request, refusals), missing=missing)

    def _refusal(self, request: Request, name: str) -> str:
        ledger = self._scan.ledger
        node = ledger.nodes[name]
        if node.state is not NodeState.ALIVE:
            return f"{name}: {stopped_reason(ledger, node) or f'is {node.state}'}"
        if machine_of(node) == machine_of(ledger.nodes[self._node]):
            return f"{name}: is on the same machine"
        unmet = unmet_constraint(ledger, request, name)
        if unmet is not None:
            return f"{name}: {unmet}"
        if self._only:
            return ""
        for kind in WATCHED_RESOURCES:
            asked = asked_amount(request.ask, kind)
            spare = self._spare(name, kind)
            if asked > max(spare, 0):
                return f"{name}: {describe(kind, max(spare, 0))} to spare, {describe(kind, asked)} needed"
        return ""

    def _spare(self, name: str, kind: ResourceType) -> int:
        if (name, kind) not in self._surplus:
            self._surplus[name, kind] = surplus(self._scan, name, kind)
        return self._surplus[name, kind] - self._assigned[name, kind]

    def _why_nowhere(self, request: Request, refusals: list[str]) -> str:
        if self._only and not refusals:
            return f"there is no other node {self._only}"
        if not refusals:
            kind = next((kind for kind in WATCHED_RESOURCES if asked_amount(request.ask, kind)), WATCHED_RESOURCES[0])
            others = self._scan.other_machines(self._node)
            refusals = [why_no_surplus(self._scan, name, kind) for name, _ in zip(others, range(MAX_TARGETS))]  # noqa: B905
        if not refusals:
            return "there is no other machine"
        more = f"; and {len(refusals) - MAX_REASONS} more" if len(refusals) > MAX_REASONS else ""
        return "; ".join(refusals[:MAX_REASONS]) + more


def amounts_text(ask: Amounts) -> str:
    """What is asked for, in words."""
    return ", ".join(describe(kind, asked_amount(ask, kind)) for kind in WATCHED_RESOURCES if asked_amount(ask, kind))
