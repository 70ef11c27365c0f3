"""How long things are expected to take: by their term, by what was said, by how long the user's last jobs took.

Rule 1: what was said counts, within what is enforced (a term). Where only a term is known a guess may shorten it: a
term is a limit, and people ask for more than they need.
Rule 2: the guess for a job is the mean of its user's last two run times; leases without a command are not guessed.
Rule 3: nothing is expected to have ended in the past: what is due is expected to be over any moment, and what has
outlived an expectation to go on: up to what is enforced, else for as long again as it was expected to take, and so on,
doubling.
"""

from __future__ import annotations

from distributed_grid.domain.leases import Lease
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import LeaseState

UNKNOWN = 0
LEAVING_MS = 10_000
"""What has been told to go, or is due, is expected to be gone within this."""


def said_ms(lease: Lease) -> int:
    """How long a lease will be held by its term or by what was said of it, whichever is less."""
    said, term = lease.request.expects_ms, lease.request.duration_ms
    return min(said, term) if said and term else said or term


def guessed_ms(ledger: Ledger, lease: Lease) -> int:
    """How long a job will take, going by its user's last two."""
    account = ledger.accounts.get(lease.request.user) if lease.job else None
    return max(sum(account.runs) // 2, 1) if account is not None and len(account.runs) == 2 else UNKNOWN


def expected_ms(ledger: Ledger, lease: Lease) -> int:
    """How long a lease will be held, as far as anybody knows; 0 where nobody does."""
    if lease.request.expects_ms:
        return said_ms(lease)
    term, guess = lease.request.duration_ms, guessed_ms(ledger, lease)
    return min(term, guess) if term and guess else term or guess


def end_ms(ledger: Ledger, lease: Lease, now: int, *, guess: bool = True) -> int:
    """When a lease that is held will be over, always after now; 0 where nobody knows. Without `guess` only words
    and terms count, and a word that was broken does not count any more."""
    if lease.state is LeaseState.RELEASING:
        return now + LEAVING_MS
    said = lease.expected_end_ms
    if said and said + LEAVING_MS > now:
        return max(said, now + 1)
    if lease.ends_at_ms:
        return max(lease.ends_at_ms, now + 1)
    if not guess:
        return UNKNOWN
    length = lease.request.expects_ms or guessed_ms(ledger, lease)
    if not length:
        return UNKNOWN
    held = now - lease.granted_at_ms
    while length <= held:
        length *= 2
    return lease.granted_at_ms + length
