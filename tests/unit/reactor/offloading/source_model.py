"""A model of the machine that work leaves, with its guard; and of all that may get lost between it and the grid."""

from __future__ import annotations

from distributed_grid.domain import events
from distributed_grid.domain.followups import Cause, CheckMove
from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.moves import MovedProcess, Way
from distributed_grid.domain.processes import ProcessIdentity
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.domain.states import MoveState, Step
from distributed_grid.errors import GridError
from distributed_grid.reactor import step
from distributed_grid.reactor.effects import BringResults, OrderMoveStep, StartAttempt, attempt_effects, move_effects
from tests.support.builders import Scenario, a_node, a_request, a_submission, an_exit
from tests.unit.reactor.offloading.move_builders import a_job_move, a_process_move, reported

SOURCE, TARGETS = "gpu1", ("gpu2", "gpu3")
NODES = (SOURCE, *TARGETS)
LIVING = ("runs", "stands still")
MARGIN_MS = 500


class Guarded:
    """One original and its guard: the journal survives everything, orders come in the order in which they were sent."""

    def __init__(self, identity: ProcessIdentity) -> None:
        self.identity = identity
        self.original = "runs"
        self.phase = "unknown"
        self.until_ms = 0
        self.reports: list[str] = []

    def order(self, step: str, freeze_ms: int, now: int) -> None:
        self.tick(now)
        if step == Step.OPEN and self.phase == "unknown":
            self._enter("opened")
            self.tick(now)
        elif step == Step.FREEZE and self.phase == "opened":
            self.original, self.until_ms = "stands still", now + freeze_ms
            self._enter("frozen")
        elif step == Step.COMMIT and self.phase in ("opened", "frozen"):
            has_margin = self.phase == "frozen" and self.until_ms - now >= MARGIN_MS
            self._enter("decided") if has_margin else self._thaw()
        elif step == Step.COMMIT and self.phase == "decided":
            self.kill()
        elif step == Step.THAW and self.phase in ("opened", "frozen"):
            self._thaw()
        elif step == Step.CLOSE and self.phase != "decided":
            if self.phase == "frozen":
                self._thaw()
            self.phase, self.reports = "unknown", []
        elif self.phase != "unknown":
            self.reports.append(self.phase)
        else:
            self.reports.append("thawed")

    def kill(self) -> None:
        """End a decided process."""
        if self.phase == "decided":
            self.original = "killed"
            self._enter("dead")

    def tick(self, now: int) -> None:
        if self.phase == "frozen" and now >= self.until_ms:
            self._thaw()
        if self.phase in ("opened", "frozen") and self.original not in LIVING:
            self._enter("gone")

    def finish(self) -> None:
        if self.original == "runs":
            self.original = "ended"

    def reboot(self) -> None:
        if self.original in LIVING:
            self.original = "gone with its machine"
        if self.phase == "decided":
            self._enter("dead")
        elif self.phase in ("opened", "frozen"):
            self._enter("gone")

    def _thaw(self) -> None:
        if self.original == "stands still":
            self.original = "runs"
        self._enter("thawed")

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self.reports.append(phase)


class Scene:
    """A grid of three nodes, one process and one job on the first of them, and whatever happens to all of it."""

    def __init__(self) -> None:
        self.scenario = Scenario(*(a_node(name) for name in NODES))
        self.boot = 1
        self.guards: dict[str, Guarded] = {}
        self.in_flight: list[OrderMoveStep] = []
        self.running: dict[str, tuple[str, int, int, str]] = {}  # by lease: uid, number, fence, node
        self.over: dict[str, events.AttemptEnded] = {}
        self.late: list[Cause] = []
        self.submitted: set[str] = set()
        self.completed: set[str] = set()
        self.cancelled: set[str] = set()
        self.count = 0
        self.original = Guarded(ProcessIdentity(4711, 815, "boot-1"))
        self._greet(SOURCE)
        self.scenario.handle(
            events.JobSubmitted(
                id="job",
                command=a_submission().command,
                request=a_request("r1", cores=2, prefer=(SOURCE,)),
                restartable=True,
            )
        )

    @property
    def ledger(self) -> Ledger:
        return self.scenario.ledger

    def handle(self, event: Cause) -> None:
        """Handle one event and send some of its effects."""
        try:
            result = step(self.ledger, event, self.scenario.now)
        except GridError:
            return
        while result.later:
            more = step(self.ledger, result.later.pop(0), self.scenario.now)
            result.later += more.later
        self.ledger.check()
        self.submitted |= {uid for uid in self.ledger.jobs if uid.startswith("moved-")}
        for effect in move_effects(self.ledger, result.changes):
            if isinstance(effect, OrderMoveStep):
                self.in_flight.append(effect)

    # -------------------------------------------------------------- moves

    def request(self, which: int) -> None:
        self.count += 1
        if which % 2:
            move = a_job_move("r1", Way.RESTART, move_id=f"move-{self.count}", target=TARGETS[which % 4 // 2])
        elif self.original.phase == "unknown" and self.original.original == "runs":
            move = a_process_move(move_id=f"move-{self.count}", identity=self.original.identity)
            assert isinstance(move.process, MovedProcess)
            self.guards[move.id] = self.original
        else:
            return
        self.handle(events.MoveRequested(move))
        self.handle(events.MoveRequested(move))

    def send(self) -> None:
        """Orders and shipping that rows call for are done again."""
        for effect in move_effects(self.ledger):
            if isinstance(effect, OrderMoveStep):
                self.in_flight.append(effect)
            elif isinstance(effect, BringResults):
                self.late.append(events.MoveResultsBrought(effect.move.id, "results"))
            elif effect.move.frozen_at_ms:
                self.late.append(events.MoveFilesSettled(effect.move.id, "final"))
            elif self.guards[effect.move.id].phase == "opened":
                self.late.append(events.MoveShipped(effect.move.id, "ahead"))

    def deliver(self, many: int) -> None:
        """So many orders arrive, in their order."""
        arrived, self.in_flight = self.in_flight[:many], self.in_flight[many:]
        for order in arrived:
            guard = self.guards.get(order.move.id)
            if guard is None:
                continue
            if order.step == Step.RETURN:
                self.late.append(
                    events.MoveReported(move_id=order.move.id, state=MoveState.RETURNED, nodes=(SOURCE,), files=1)
                )
            else:
                guard.order(order.step, order.move.freeze_ms, self.scenario.now)

    def report(self, *, lies: bool = False, backwards: bool = False) -> None:
        """The source reports all that it has not forgotten, perhaps not in its order; or another node says so."""
        nodes = (TARGETS[0],) if lies else (SOURCE,)
        for move_id in list(self.guards):
            guard = self.guards[move_id]
            if move_id != max(self.guards, key=lambda one: int(one.removeprefix("move-"))):
                continue  # the guard of a move that was closed knows nothing
            said = ["frozen", "decided", "dead", "thawed"] if lies else list(guard.reports)
            for phase in reversed(said) if backwards else said:
                self.handle(_event_of(phase, move_id, nodes))

    # -------------------------------------------------------------- attempts

    def run_attempts(self) -> None:
        """Agents do what is called for: nothing may start while the original could go on, or twice."""
        for effect in attempt_effects(self.ledger):
            attempt = effect.job.attempt
            assert attempt is not None
            about = (effect.job.uid, attempt.number, attempt.fence, effect.node)
            if isinstance(effect, StartAttempt):
                if attempt.lease_id in self.over or attempt.lease_id in self.running:
                    continue
                uid = effect.job.uid
                assert uid not in {one[0] for one in self.running.values()}, f"{uid} runs twice"
                if uid.startswith("moved-"):
                    assert self.original.original not in LIVING, f"{uid} starts beside the original"
                self.running[attempt.lease_id] = about
                self.late.append(
                    events.AttemptStarted(
                        uid=uid, number=attempt.number, fence=attempt.fence, pid=7, nodes=(effect.node,)
                    )
                )
            elif self.running.pop(attempt.lease_id, None) is not None:
                self._ended(attempt.lease_id, about, Outcome(Ending.PREEMPTED))
            elif attempt.lease_id not in self.over:
                self._ended(attempt.lease_id, about, Outcome(Ending.NEVER_STARTED))

    def complete(self) -> None:
        """What runs ends by itself."""
        for lease_id, about in list(self.running.items()):
            del self.running[lease_id]
            self.completed.add(about[0])
            self._ended(lease_id, about, an_exit(0), pid=7)

    def _ended(self, lease_id: str, about: tuple[str, int, int, str], outcome: Outcome, pid: int = 0) -> None:
        uid, number, fence, node = about
        self.over[lease_id] = events.AttemptEnded(
            uid=uid, number=number, fence=fence, outcome=outcome, nodes=(node,), pid=pid
        )
        self.late.append(self.over[lease_id])

    def hear(self, *, again: bool = False, backwards: bool = False) -> None:
        """Deliver the messages under way; some of them twice, or in another order."""
        heard, self.late = self.late, self.late if again else []
        for event in list(reversed(heard) if backwards else heard):
            self.handle(event)

    def lose(self, name: str) -> None:
        """The agent of a node is ended with all that it ran; its machine goes on."""
        self._kill_attempts(name)
        self.handle(events.NodeStopped(name))
        self._greet(name)
        self.scenario.heartbeat(name)

    def _kill_attempts(self, name: str) -> None:
        for lease_id in [one for one, about in self.running.items() if about[3] == name]:
            del self.running[lease_id]
            self.over[lease_id] = events.AttemptEnded(uid="", number=0, fence=0, outcome=an_exit(1))

    def reboot(self) -> None:
        self.boot += 1
        self.in_flight = []
        self._kill_attempts(SOURCE)
        self.original.reboot()
        self._greet(SOURCE)

    def restart_control_plane(self) -> None:
        rows = [decode_row(row.kind, encode_row(row)) for row in self.ledger.rows(durable_only=True)]
        self.scenario.ledger = Ledger(rows)
        self.in_flight, self.late = [], [one for one in self.late if isinstance(one, events.AttemptEnded)]
        self.handle(events.ControlPlaneStarted(self.ledger.counters.get("epoch", 0) + 1))
        for name in NODES:
            if name in self.ledger.nodes:
                self._greet(name)
                self.scenario.heartbeat(name)

    def _greet(self, name: str) -> None:
        known = [lease_id for lease_id, about in self.running.items() if about[3] == name]
        known += [lease_id for lease_id, end in self.over.items() if end.nodes == (name,)]
        boot = f"boot-{self.boot}" if name == SOURCE else f"{name}-boot"
        self.handle(events.AttemptsListed(node=name, attempts=tuple(known), boot=boot, machine=f"{name}-dir"))
        for lease_id in known:
            if lease_id in self.over:
                self.late.append(self.over[lease_id])
            else:
                uid, number, fence, node = self.running[lease_id]
                self.late.append(events.AttemptStarted(uid=uid, number=number, fence=fence, pid=7, nodes=(node,)))

    # -------------------------------------------------------------- time

    def advance(self, ms: int) -> None:
        self.scenario.now += ms
        self.original.tick(self.scenario.now)
        for name in NODES:
            if name in self.ledger.nodes:
                self.scenario.heartbeat(name)
        self.handle(events.TimePassed())

    def settle(self) -> None:
        """Nothing goes wrong any more, until nothing more happens."""
        for name in NODES:
            if name not in self.ledger.nodes or self.ledger.nodes[name].forgotten:
                self.handle(events.NodeDeclared(a_node(name)))
            self.handle(events.NodeResumed(name))
            self._greet(name)
            self.scenario.heartbeat(name)
        for _ in range(40):
            self.send()
            self.deliver(len(self.in_flight))
            self.original.kill()
            self.report()
            self.run_attempts()
            self.hear()
            self.complete()
            self.hear()
            self.advance(2_000)
            if self.ledger.is_empty:
                break
        self.advance(60_000)  # what stands still goes on by itself


def _event_of(phase: str, move_id: str, nodes: tuple[str, ...]) -> Cause:
    if phase == "opened":
        return CheckMove(move_id)
    return reported(MoveState(phase), nodes, move_id)
