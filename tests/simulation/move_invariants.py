"""Invariants of moves, held against what really happens on the machines.

- Never two: the job that takes the place of a process begins only when nothing of that process is left.
- Never none: a process that a guard has frozen goes on, or is ended for good, when its freeze lease is over.
- What was ended by a guard is a job from then on, which starts from what was last written.
- What was ended by a guard was, at its end, as it was when its move was asked for.
- A process that was moved by nobody is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import Move
from distributed_grid.domain.processes import ProcessLook
from distributed_grid.domain.states import MoveState
from distributed_grid.reactor.offloading.process_moves import job_uid
from tests.simulation.guarded_process import SimulatedOriginal
from tests.simulation.machine import Machine, SimulatedProcess

SLACK_MS = 3_000
"""What thawing may take on top of the lease, also where the guard has to be replaced on a slow machine."""
TWO, NONE, LOST = "never two of what is moved", "never none for longer than a freeze lease", "what was ended goes on"
CHANGED = "what is ended is what was asked for"
Hold = Callable[[bool, str, str], None]


class MoveInvariants:
    """Knows which original each move is about."""

    def __init__(self, hold: Hold, liars: set[str]) -> None:
        self._hold = hold
        self._liars = liars
        self.machines: Mapping[str, Machine] = {}
        self.moved: dict[str, tuple[Machine, SimulatedOriginal, int]] = {}
        """By move: where its original is, the original, and its freeze lease."""
        self._looks: dict[str, ProcessLook | None] = {}

    def changed(self, move: Move) -> None:
        """The ledger knows of a move."""
        if move.process is not None and move.id not in self.moved:
            machine = self.machines[move.source]
            self._looks[move.id] = move.process.look
            self.moved[move.id] = (machine, machine.originals[move.process.identity.pid], move.freeze_ms)

    def began(self, run: SimulatedProcess) -> None:
        """An attempt begins: of a moved process nothing may be left, and it has all that was written."""
        uid = run.lease_id.rpartition(".")[0]
        for move_id, (machine, original, _) in self.moved.items():
            if job_uid(move_id) != uid or machine.node.name in self._liars:
                continue
            self._hold(not original.is_alive, TWO, f"{run.lease_id} begins beside process {original.identity.pid}")
            if original.ended == "killed":
                wrote, has = original.worked_ms, int(run.order.command.workdir)
                self._hold(has == wrote, LOST, f"{run.lease_id} has files of {has} ms of work, {wrote} were done")
                same = original.look == self._looks[move_id]
                self._hold(same, CHANGED, f"{run.lease_id} is not what process {original.identity.pid} was")

    def check_freezes(self) -> None:
        """No process stands still for longer than its lease; a decided one never continues."""
        for move_id, (machine, original, _) in self.moved.items():
            stood = original.still_ms or original.longest_still_ms
            if stood and machine.node.name not in self._liars and not self._is_decided(machine, original):
                lease_ms = max(freeze_ms for _, one, freeze_ms in self.moved.values() if one is original)
                most = lease_ms + lease_ms // 20 + SLACK_MS
                self._hold(stood <= most, NONE, f"{move_id}: process {original.identity.pid} for {stood} ms")

    def _is_decided(self, machine: Machine, original: SimulatedOriginal) -> bool:
        guards = (one for one in machine.guards.values() if one.journal.identity == original.identity)
        return any(guard.phase is MoveState.DECIDED for guard in guards)

    def may_wait(self, move: Move) -> bool:
        """Whether the word of its source can never come: its agent has lost its directory, or has lied."""
        machine = self.machines[move.source]
        lost = machine.directory != move.machine and move.commit_asked_at_ms > 0
        return move.source in self._liars or (lost and not move.result)

    def unsettled(self, ledger: Ledger, over: Mapping[str, None]) -> str | None:
        """Unfinished moves."""
        for move in ledger.moves.values():
            if not self.may_wait(move):
                return f"{move.id} is {move.state}, its job {move.job or 'not there'}, {move.problem or 'no problem'}"
        for move_id, (machine, original, _) in self.moved.items():
            name = machine.node.name
            if name in self._liars:
                continue
            if original.is_still:
                return f"process {original.identity.pid} on {name} stands still"
            waits = move_id in ledger.moves
            if original.ended == "killed" and not waits and not self._has_job(original, ledger, over):
                return f"process {original.identity.pid} on {name} was ended for a move, and nothing goes on"
        return None

    def _has_job(self, original: SimulatedOriginal, ledger: Ledger, over: Mapping[str, None]) -> bool:
        uids = [job_uid(move_id) for move_id, (_, one, _) in self.moved.items() if one is original]
        return any(uid in over or uid in ledger.jobs for uid in uids)
