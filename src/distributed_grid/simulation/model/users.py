"""Simulated users: they submit, ask for leases, cancel and release, and ask again when nobody answered.

Rule 1: the load is drawn before anything happens, so that faults do not change what is asked for.
Rule 2: a request keeps its id until it is answered: whoever did not hear back asks the same again.
Rule 3: what was answered is acknowledged, and held against the grid from then on.
"""

from __future__ import annotations

from random import Random

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.domain.events import (
    Event,
    JobCancelled,
    JobSubmitted,
    LeaseAsked,
    LeaseExtended,
    LeaseReleased,
)
from distributed_grid.domain.leases import Request
from distributed_grid.domain.resources import Amounts, Priority
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.errors import GridError
from distributed_grid.simulation.invariant_checker import InvariantChecker, Note
from distributed_grid.simulation.model.control_plane import ControlPlane
from distributed_grid.simulation.model.event_queue import EventQueue
from distributed_grid.simulation.model.machine import ScriptedJob

GB = 1024**3
ASKS = (
    Amounts(1000),
    Amounts(1000, GB),
    Amounts(2000, 2 * GB),
    Amounts(500, 6 * GB),
    Amounts(3000),
    Amounts(0, 10 * GB),
    Amounts(500, 0, 300),
    Amounts(1000, GB, 500, 2 * GB),
    Amounts(1000, 0, 1000),
    Amounts(1000, 0, 1000, gpu_models=("L4",)),
    Amounts(0, 0, 2000),
    Amounts(1000, custom=(("fpga", 1),)),
)
TEAMS = {"ada": "green", "bob": "green", "cyd": ""}
ZONES = ("north", "south")
PRIORITIES = (Priority.LOW, Priority.MEDIUM, Priority.MEDIUM, Priority.HIGH, Priority.URGENT)
STRATEGIES = (None, None, *(one for one in Strategy if one is not Strategy.NODE_SPECIFIC))
WAITS_MS = (0, 20_000, 300_000, 300_000, 3_600_000)
DEADLINES_MS = (0, 0, 0, 0, 20_000, 120_000)
GRACES_MS = (500, 5_000, 5_000, 120_000)
ANSWER_MS = 3_000
"""Who has not heard back by then asks again."""


class UserRequest(Struct, frozen=True):
    """Something a user wants at a moment."""

    at_ms: int
    event: Event
    deadline_in_ms: int = 0

    def told(self, at_ms: int) -> Event:
        """The event as it is told when its moment comes."""
        if not self.deadline_in_ms or not isinstance(self.event, JobSubmitted | LeaseAsked):
            return self.event
        return replace(self.event, request=replace(self.event.request, deadline_ms=at_ms + self.deadline_in_ms))

    @property
    def uid(self) -> str:
        """Whom it is about; empty where it is not a request."""
        return self.event.request.id if isinstance(self.event, JobSubmitted | LeaseAsked) else ""

    @property
    def lasts_ms(self) -> int:
        """How long it may keep the grid busy, run as often as it may be."""
        if isinstance(self.event, JobSubmitted):
            return (ScriptedJob.of(self.event.command).run_ms + 10_000) * (1 + self.event.retries)
        return self.event.request.duration_ms + 10_000 if isinstance(self.event, LeaseAsked) else 0


def load(random: Random, nodes: tuple[str, ...], *, jobs: int, leases: int, until_ms: int) -> list[UserRequest]:
    """A seeded load: jobs of all sizes and tempers, plain leases, and second thoughts about both."""
    wishes = []
    for number in range(jobs):
        at = random.randrange(until_ms)
        request = _request(random, f"job{number}", nodes)
        work = ScriptedJob(
            run_ms=round(random.choice((300, 3_000, 15_000, 60_000)) * random.uniform(0.2, 1.5)),
            exit_code=random.choice((0, 0, 0, 1)),
            heeds=random.random() < 0.7,
            exists=random.random() < 0.95,
            workdir=random.random() < 0.3,
            marks_ms=random.choice((0, 0, 2_000, 12_000)),
        )
        command = work.command(grace_ms=random.choice(GRACES_MS))
        submitted = JobSubmitted(f"{request.id}-name", command, request, random.choice((0, 0, 1, 2)))
        wishes.append(UserRequest(at, submitted, random.choice(DEADLINES_MS)))
        if random.random() < 0.2:
            wishes.append(UserRequest(at + random.randrange(40_000), JobCancelled(request.id, request.user)))
    for number in range(leases):
        at = random.randrange(until_ms)
        request = _request(random, f"lease{number}", nodes, duration_ms=random.randint(5_000, 90_000))
        if random.random() < 0.2:
            request = replace(request, target=random.choice(nodes))
        wishes.append(UserRequest(at, LeaseAsked(request)))
        if random.random() < 0.3:
            wishes.append(UserRequest(at + random.randrange(20_000), LeaseReleased(request.id, request.user)))
        if random.random() < 0.2:
            wishes.append(UserRequest(at + random.randrange(5_000), LeaseExtended(request.id, request.user, 10_000)))
    return wishes


def _request(random: Random, uid: str, nodes: tuple[str, ...], *, duration_ms: int = 0) -> Request:
    named = (random.choice(nodes),)
    others = (f"group{random.randrange(2)}",)
    user = random.choice([*TEAMS])
    return Request(
        uid,
        user,
        random.choice(ASKS),
        random.choice(PRIORITIES),
        prefer=named if random.random() < 0.15 else (),
        require=named if random.random() < 0.1 else (),
        wait_ms=random.choice(WAITS_MS),
        duration_ms=duration_ms or random.choice((0, 0, 0, 60_000)),
        strategy=random.choice(STRATEGIES),
        group=others[0] if random.random() < 0.2 else "",
        team=TEAMS[user],
        labels=(("zone", random.choice(ZONES)),) if random.random() < 0.08 else (),
        affinity=others if random.random() < 0.03 else (),
        anti_affinity=others if random.random() < 0.1 else (),
        gang=random.choice((1, 1, 2, 3)) if duration_ms else 1,
        expects_ms=random.choice((0, 0, 5_000, 60_000)),
    )


class _Asking:
    """A wish on its way."""

    def __init__(self, event: Event) -> None:
        self.event = event
        self.is_told = self.is_answered = False


class Users:
    """Send the wishes of a load, each until it is answered."""

    def __init__(self, queue: EventQueue, control: ControlPlane, laws: InvariantChecker, note: Note) -> None:
        self._queue = queue
        self._control = control
        self._laws = laws
        self._note = note
        self.accepted = self.refused = self.waiting = 0

    def plan(self, wishes: list[UserRequest], begin_ms: int) -> None:
        """Have each wish told at its moment."""
        for wish in wishes:
            at_ms = begin_ms + wish.at_ms
            event = wish.told(at_ms)
            if isinstance(event, JobSubmitted):
                self._laws.allowed_runs[event.request.id] = 1 + event.retries
            self._plan(at_ms, _Asking(event))

    def want(self, event: Event) -> None:
        """Have an event told now, and again until it is answered."""
        self._plan(self._queue.now, _Asking(event))

    def _plan(self, at_ms: int, asking: _Asking) -> None:
        self.waiting += not asking.is_told
        asking.is_told = True
        self._queue.at(at_ms, lambda: self._ask(asking))

    def _ask(self, asking: _Asking) -> None:
        if asking.is_answered:
            return
        if self._control.is_up:
            self._control.handle(asking.event, lambda entry: self._answered(asking, entry.failure))
        self._plan(self._queue.now + ANSWER_MS, asking)

    def _answered(self, asking: _Asking, failure: Exception | None) -> None:
        if asking.is_answered or (isinstance(failure, GridError) and failure.retryable):
            return
        asking.is_answered = True
        self.waiting -= 1
        event = asking.event
        if not isinstance(event, JobSubmitted | LeaseAsked):
            return
        if failure is None:
            self.accepted += 1
            self._laws.acknowledged[event.request.id] = None
        else:
            self.refused += 1
            self._note(event.request.user, f"{event.request.id} is refused: {failure}")
