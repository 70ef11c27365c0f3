"""Request and lease: who asks for how much, and what was lent to them."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from distributed_grid.domain.lives import LeaseEnd, LeaseState
from distributed_grid.domain.resources import Amounts, Claim, Priority

LONGEST_MS = 200 * 365 * 86_400_000


class Request(Struct, frozen=True):
    """Who asks for how much, for how long, how urgent, where."""

    id: str
    user: str
    ask: Amounts
    priority: Priority = Priority.MEDIUM
    prefer: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    wait_ms: int = 300_000
    duration_ms: int = 0
    target: str = ""

    def problem(self) -> str | None:
        """Why nobody can ask for this, or None. A dot in an id would make it look like a job's lease."""
        if "." in self.id or not self.id:
            return f"a request id must not be empty or have a dot: {self.id!r}"
        if not (0 <= self.wait_ms <= LONGEST_MS and 0 <= self.duration_ms <= LONGEST_MS):
            return "a wait or a duration must not be negative or longer than 200 years"
        return self.ask.problem()


class Lease(Struct, frozen=True):
    """A request on its way through its life; the claim is set from the grant on.

    `awaits` names the leases that must end before this preemptor may start;
    `yields_to` names the preemptor that this victim makes room for.
    """

    kind: ClassVar[str] = "lease"

    id: str
    request: Request
    asked_at_ms: int
    state: LeaseState = LeaseState.ASKED
    job: str = ""
    node: str = ""
    claim: Claim | None = None
    fence: int = 0
    granted_at_ms: int = 0
    ends_at_ms: int = 0
    generation: int = 0
    awaits: tuple[str, ...] = ()
    yields_to: str = ""
    end: LeaseEnd | None = None
    detail: str = ""
    ended_at_ms: int = 0

    @property
    def key(self) -> str:
        return self.id

    @property
    def is_over(self) -> bool:
        return self.state is LeaseState.ENDED

    @property
    def holds(self) -> bool:
        """Whether this lease counts against its node."""
        return self.state in _HOLDING

    @property
    def wait_until_ms(self) -> int:
        """When an ask that could not be met gives up."""
        return self.asked_at_ms + self.request.wait_ms

    @property
    def deadline_ms(self) -> int:
        """When time alone changes this lease; 0 is never."""
        if self.state is LeaseState.ASKED:
            return self.wait_until_ms
        return self.ends_at_ms if self.state in _TERMED else 0

    @property
    def place_in_line(self) -> tuple[int, int, str]:
        """The order of waiting: priority first, then age."""
        return (-int(self.request.priority), self.asked_at_ms, self.id)


_HOLDING = frozenset({LeaseState.RESERVING, LeaseState.ACTIVE, LeaseState.RELEASING})
_TERMED = frozenset({LeaseState.RESERVING, LeaseState.ACTIVE})
