"""Deciders of consents: which command shapes a user allows to be restarted elsewhere."""

from __future__ import annotations

from msgspec.structs import replace

from distributed_grid.domain.events import ConsentGiven, ConsentWithdrawn
from distributed_grid.domain.ledger import Ledger
from distributed_grid.reactor.decision import Decision, Record


def on_given(ledger: Ledger, event: ConsentGiven, now: int) -> Decision:
    """Remember a consent; given again, its variables are replaced."""
    consent = replace(event.consent, given_at_ms=now)
    known = ledger.consents.get(consent.key)
    if known is not None and known.variables == consent.variables:
        return Decision()
    record = Record("move-consent", consent.user, consent.shape, "", "given", {"variables": [*consent.variables]})
    return Decision([consent], [record])


def on_withdrawn(ledger: Ledger, event: ConsentWithdrawn, now: int) -> Decision:
    """Forget a consent; a second time is harmless."""
    known = ledger.consents.get(f"{event.user}/{event.shape}")
    if known is None:
        return Decision()
    return Decision(
        [replace(known, withdrawn=True)], [Record("move-consent", event.user, event.shape, "", "withdrawn")]
    )
