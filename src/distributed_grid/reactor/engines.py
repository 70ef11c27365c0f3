"""Deciding about engines: wanted, and given up."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.engines import EngineRow
from distributed_grid.domain.events import EngineGivenUp, EngineWanted
from distributed_grid.domain.ledger import Ledger
from distributed_grid.errors import Refused
from distributed_grid.reactor.binding import released_from
from distributed_grid.reactor.decision import Decision, Record


def on_wanted(ledger: Ledger, event: EngineWanted, now: int) -> Decision:
    """Note an engine, or what has changed about it; one that was come by in another way has to be given up first."""
    old = ledger.engines.get(event.name)
    if old is not None and old.mode != event.mode:
        raise Refused(f"{event.name} is {old.mode} at {old.address} already; give that up first")
    row = EngineRow(event.name, event.mode, event.address, event.namespace, event.session, event.nodes)
    if row == old:
        return Decision()
    data = {"mode": row.mode, "address": row.address, "session": row.session, "nodes": list(row.nodes)}
    return Decision([row], [Record("engine-wanted", "", row.name, data=data)])


def on_given_up(ledger: Ledger, event: EngineGivenUp, now: int) -> Decision:
    """Let an engine go; giving up one that is not wanted is harmless."""
    row = ledger.engines.get(event.name)
    if row is None:
        return Decision()
    changes = [replace(row, given_up=True), *released_from(ledger, row.name)]
    return Decision(changes, [Record("engine-given-up", "", row.name, reason=event.detail)])
