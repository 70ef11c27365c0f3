"""Messages between the control plane and an agent, as values; how they travel is the link's business.

Rule 1: every order carries the fence of its lease; an agent refuses one older than it has seen.
Rule 2: a report stays with the agent until it is acknowledged.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from distributed_grid.domain.jobs import Command, Outcome
from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.resources import Claim


class Hello(Struct, frozen=True, tag=True):
    """An agent is there; these attempts it has a record of (by lease id)."""

    node: str
    attempts: tuple[str, ...]


class Heartbeat(Struct, frozen=True, tag=True):
    """The agent lives, and this is what it measured."""

    node: str
    usage: Usage


class Started(Struct, frozen=True, tag=True):
    """The command of an attempt runs."""

    lease_id: str
    fence: int
    pid: int
    cores: tuple[int, ...]


class Ended(Struct, frozen=True, tag=True):
    """An attempt is over, its whole process tree gone."""

    lease_id: str
    fence: int
    outcome: Outcome


class Start(Struct, frozen=True, tag=True):
    """Run a command under a lease."""

    node: str
    lease_id: str
    fence: int
    job_id: str
    command: Command
    claim: Claim
    hold_ms: int


class Stop(Struct, frozen=True, tag=True):
    """Stop what runs under a lease; `ending` is what the end is to be called."""

    lease_id: str
    fence: int
    ending: str
    detail: str
    grace_ms: int


class Acknowledge(Struct, frozen=True, tag=True):
    """The end of an attempt is in the ledger: the agent may forget it."""

    lease_id: str


FromAgent = Hello | Heartbeat | Started | Ended
ToAgent = Start | Stop | Acknowledge


class AgentSide(Protocol):
    """Where the control plane's orders go."""

    def send(self, message: ToAgent) -> None:
        """Pass an order on, in order; a repeated one changes nothing."""


class ControlSide(Protocol):
    """Where an agent's messages go."""

    def received(self, message: FromAgent, via: AgentSide) -> None:
        """Take a message in; a repeated one changes nothing. Answers go back the way it came."""
