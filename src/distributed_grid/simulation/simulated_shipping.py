"""Simulated reconciler of moves: orders go to agents, files are read over the links, which takes a while or fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from distributed_grid.control.batch import Entry
from distributed_grid.control.move_messages import move_order
from distributed_grid.domain.events import Event, MoveFailed, MoveFilesSettled, MoveResultsBrought, MoveShipped
from distributed_grid.domain.moves import Move
from distributed_grid.domain.states import MoveState, NodeState
from distributed_grid.errors import GridError
from distributed_grid.reactor.effects import BringResults, MoveEffect, OrderMoveStep, pending_moves

if TYPE_CHECKING:
    from distributed_grid.simulation.simulated_control_plane import SimulatedControlPlane

RETRY_MS = 500


class SourceFiles(NamedTuple):
    """How the files of originals and jobs are read: what the working directory of a move's original on a node says of
    its work (None where it cannot be read), and whether a node can be asked for files."""

    progress: Callable[[str, str], int | None]
    reaches: Callable[[str], bool]


class SimulatedReconciler:
    """Performs the effects of moves during one life of the control plane."""

    def __init__(self, control: SimulatedControlPlane, files: SourceFiles) -> None:
        self._control = control
        self._files = files
        self._life = control.starts
        self._in_flight: set[tuple[str, str]] = set()

    def poll(self) -> None:
        """Repeat what is called for and not under way; orders are repeated by the sessions of agents."""
        found = pending_moves(self._control.ledger, self._control.now)
        self.perform(effect for effect in found if not isinstance(effect, OrderMoveStep))

    def perform(self, effects: Iterable[MoveEffect]) -> None:
        for effect in effects:
            move = effect.move
            if isinstance(effect, OrderMoveStep):
                self._control.gateway.order_moves([move_order(effect)])
            elif isinstance(effect, BringResults):
                self._begin(move, "results", partial(self._bring, move))
            elif move.state is MoveState.FROZEN:
                self._begin(move, "difference", partial(self._settle, move))
            else:
                self._begin(move, "ahead", partial(self._ship, move))

    def _begin(self, move: Move, what: str, work: Callable[[], None]) -> None:
        key = (move.id, what)
        if key in self._in_flight:
            return
        self._in_flight.add(key)

        def done() -> None:
            self._in_flight.discard(key)
            if self._is_current():
                work()

        delay = self._control.random.choice((20, 200, 2_000)) * self._control.random.randint(1, 3)
        self._control.queue.after(delay, done)

    def _is_current(self) -> bool:
        return self._control.is_up and self._control.starts == self._life

    def _ship(self, move: Move) -> None:
        found = self._files.progress(move.source, move.id)
        if found is not None:
            self._record(MoveShipped(move.id, str(found), 50))

    def _settle(self, move: Move) -> None:
        found = self._files.progress(move.source, move.id)
        failed = MoveFailed(move.id, "what had changed could not be shipped")
        self._record(failed if found is None else MoveFilesSettled(move.id, str(found), 1))

    def _bring(self, move: Move) -> None:
        node = self._control.ledger.nodes.get(move.ran_on)
        if self._files.reaches(move.ran_on):
            self._record(MoveResultsBrought(move.id, "results"))
        elif node is None or node.state in (NodeState.LOST, NodeState.LEFT):
            self._record(MoveResultsBrought(move.id, problem=f"its files are lost with {move.ran_on}"))

    def _record(self, event: Event) -> None:
        def then(entry: Entry) -> None:
            if isinstance(entry.failure, GridError) and entry.failure.retryable:
                self._control.queue.after(RETRY_MS, lambda: self._record(event))

        if self._is_current():
            self._control.handle(event, then)
