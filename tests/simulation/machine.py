"""Simulated machine: its clock, its disk, its power, and the processes that outlive every agent.

A process is ended by its own shim when its hold runs out, whatever became of agent, link and control plane. The disk
keeps the record of an attempt from before its start until its end was acknowledged, and every end for good; a power
failure may take records along that were not ended. A hold is a moment of the clock since boot, so it counts only in the
boot it was given in.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from random import Random
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from distributed_grid.agent.execution.disk_guard import largest_writer
from distributed_grid.domain.jobs import Command, Ending, Outcome
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import Claim
from distributed_grid.replay.event_queue import EventQueue, ScheduledEvent
from distributed_grid.wire import StartAttemptOrder
from tests.simulation.guarded_process import SimulatedGuard, SimulatedJournal, SimulatedOriginal
from tests.simulation.simulated_memory import SimulatedMemory

MILLION = 1_000_000
WATCHER_MS = 500
"""How long after a hold the second watcher ends what is left."""
SHIM_RETRY_MS = 1_000
DISK_CHECK_MS, FLOOD_LIMIT_MS = 1_000, 15_000
"""How often an agent looks at its disk, and how long a flood may last while it does."""
FLOOD_BYTES, RESERVE_BYTES = 10 << 30, 64 << 20
USUAL_DRIFT, MAX_SKEW = 500, 15_000
"""By how many millionths a clock is usually off, and by how many at worst: the grace of a hold covers that."""


class Owner(enum.StrEnum):
    """Use of a machine by its owner, when present."""

    AWAY = "away"
    CPU = "cpu"
    MEMORY = "memory"


class ScriptedJob(Struct, frozen=True):
    """Behaviour of a simulated command: its length, its end, whether it heeds SIGTERM. That is written into its
    arguments, so that it travels as any command does."""

    run_ms: int
    exit_code: int = 0
    heeds: bool = True
    exists: bool = True
    workdir: bool = False
    marks_ms: int = 0
    held_bytes: int = 0
    """The memory that it holds; 0: as much as its lease has."""

    def command(self, *, grace_ms: int = 5_000) -> Command:
        """The command that means this."""
        words = (self.run_ms, self.exit_code, int(self.heeds), int(self.exists), self.marks_ms, self.held_bytes)
        return Command(("work", *map(str, words)), grace_ms=grace_ms, workdir="0" * 64 if self.workdir else "")

    @classmethod
    def of(cls, command: Command) -> ScriptedJob:
        """Behaviour encoded in a command."""
        run_ms, exit_code, heeds, exists, marks_ms, held_bytes = map(int, command.argv[1:])
        return cls(run_ms, exit_code, bool(heeds), bool(exists), bool(command.workdir), marks_ms, held_bytes)


class SimulatedProcess:
    """One attempt on a machine: its record on the disk and, while it has one, its process."""

    def __init__(self, order: StartAttemptOrder, boot: str, launched_boot_ms: int, start_by_boot_ms: int = 0) -> None:
        self.order = order
        self.start_by_boot_ms = start_by_boot_ms
        self.fence = order.fence
        self.boot = boot
        self.launched_boot_ms = launched_boot_ms
        self.work = ScriptedJob.of(order.command)
        self.begun = False
        self.runs = False
        self.paused = False
        self.outcome: Outcome | None = None
        self.real_outcome: Outcome | None = None
        """How it has ended, also where no record of that is left."""
        self.stop: tuple[Outcome, int] | None = None
        self.shim_is_stopped = False
        self.has_ended_unseen = False
        """Its command has ended while its shim was stopped."""
        self.written_bytes = 0
        self.left_ms = self.work.run_ms
        self.leased_bytes = order.claim.memory_bytes
        self.began_at = self.resumed_at = 0
        self.orphaned_hold: int | None = None
        """Its hold, once its record is lost with the directory: nobody renews that."""
        self.plans: list[ScheduledEvent] = []
        self.finish: ScheduledEvent | None = None

    @property
    def lease_id(self) -> str:
        return self.order.lease_id

    @property
    def held_bytes(self) -> int:
        """The memory that it holds: no more than its limit."""
        held = self.work.held_bytes or self.leased_bytes
        return min(held, self.order.most_memory_bytes) if self.order.most_memory_bytes else self.leased_bytes

    @property
    def has_outgrown_lease(self) -> bool:
        """Whether it holds more than its lease, which may grow."""
        return self.held_bytes > self.leased_bytes

    @property
    def is_over_limit(self) -> bool:
        """Whether it needs more than a limit that stays."""
        return not self.order.most_memory_bytes and 0 < self.claim.memory_bytes < self.work.held_bytes

    @property
    def claim(self) -> Claim:
        return self.order.claim


class Witness(Protocol):
    """Who sees what really happens on the machines."""

    def began(self, machine: Machine, run: SimulatedProcess) -> None: ...
    def ended(self, machine: Machine, run: SimulatedProcess) -> None: ...
    def hold_expired(self, machine: Machine, run: SimulatedProcess) -> None: ...
    def flood_outlasted(self, machine: Machine, run: SimulatedProcess) -> None: ...


class SimulatedHost(Protocol):
    """The agent that hears of the attempts here, while there is one."""

    @property
    def is_stopped(self) -> bool: ...

    def run_began(self, run: SimulatedProcess) -> None: ...
    def run_ended(self, run: SimulatedProcess) -> None: ...


class Machine:
    """One machine of the simulated world."""

    guard_type = SimulatedGuard

    def __init__(self, node: Node, queue: EventQueue, random: Random, witness: Witness) -> None:
        self.node = node
        self.queue = queue
        self.random = random
        self.witness = witness
        self.boots = 0
        self.is_on = False
        self.records: dict[str, SimulatedProcess] = {}
        self.originals: dict[int, SimulatedOriginal] = {}
        self.journals: dict[str, SimulatedJournal] = {}
        self.guards: dict[str, SimulatedGuard] = {}
        self.live: dict[str, None] = {}
        self.launching: dict[str, ScheduledEvent] = {}
        self.orphans: list[SimulatedProcess] = []
        self.hold_on_disk = (0, "")
        self.epoch_on_disk = 0
        self.disk_is_full = False
        self.disk_is_flooded = False
        """Full of the files of a job; ends are recorded all the same, in blocks that were reserved for them."""
        self._flooded_ms = 0
        self.flooders: set[str] = set()
        self.unrecorded: set[str] = set()
        self.directories = 1
        self.host: SimulatedHost | None = None
        self.owner = Owner.AWAY
        self.slowness = 1
        self.ignores_sigterm = False
        self.ignores_starts = False
        """Its agent is heard, and does nothing about orders to start."""
        self.spawner_stands_still = False
        self._stalled: list[SimulatedProcess] = []
        self.lies = False
        self.memory = SimulatedMemory(node.name)
        self.neighbours: dict[str, Machine] = {}
        self._stepped: tuple[int, int] = (0, 0)
        self._booted_at = 0
        self._uptime_ms = 0
        self._drift = 0
        self.power_on()

    # ------------------------------------------------------------------ the clock since boot

    @property
    def boot(self) -> str:
        return f"{self.node.name}-boot-{self.boots}"

    @property
    def boot_ms(self) -> int:
        """Reading of the boot clock: it has an offset of its own, and runs a little fast or slow."""
        passed = self.queue.now - self._booted_at
        return self._uptime_ms + passed + passed * self._drift // MILLION

    def moment(self, boot_ms: int) -> int:
        """When, in the world's time, this clock will show that."""
        ahead = boot_ms - self._uptime_ms
        return self._booted_at - (-ahead * MILLION // (MILLION + self._drift))

    def skew(self, much: float) -> None:
        """From now on the clock runs fast or slow: 1 and -1 are the most, 0 is as usual."""
        now = self.boot_ms
        self._uptime_ms, self._booted_at = now, self.queue.now
        self._drift = round(much * MAX_SKEW) or self.random.randint(-USUAL_DRIFT, USUAL_DRIFT)
        for run in (*self.running, *self.orphans):  # whoever sleeps until a moment of this clock looks at it anew
            self.await_kill(run)
            self.watch_hold(run)

    def step_wall_clock(self, by_ms: int) -> None:
        """The wall clock jumps, ahead or back: files that were written before seem older, or of the future."""
        self._stepped = (self.queue.now, by_ms)

    # ------------------------------------------------------------------ power

    def power_on(self) -> None:
        """Begin a new boot; some machines have been up for long when the run begins."""
        self.boots += 1
        self.is_on = True
        self._booted_at = self.queue.now
        self._uptime_ms = self.random.randrange(1_000, 40_000) * (1_000 if self.boots == 1 else 1)
        self._drift = self.random.randint(-USUAL_DRIFT, USUAL_DRIFT)

    def power_off(self) -> None:
        """Everything that runs is gone at once; of what had not ended, some records are too."""
        self.is_on = False
        for original in self.originals.values():
            original.end("with its machine")
        for guard in self.guards.values():
            guard.die(for_good=True)
        self.guards.clear()
        for journal in self.journals.values():
            journal.lose_power(self.random)
        self.memory.lose()
        for planned in self.launching.values():
            planned.cancel()
        self.launching.clear()
        self._stalled.clear()
        for lease_id in list(self.live):
            run = self.records[lease_id]
            if run.runs:
                self._gone(run)
            if lease_id in self.unrecorded:
                run.outcome = None
            run.shim_is_stopped = run.has_ended_unseen = False
            if run.outcome is None and self.random.random() < 0.3:
                del self.records[lease_id], self.live[lease_id]
        self.unrecorded.clear()
        for run in self.orphans:
            if run.runs:
                self._gone(run)
        self.orphans.clear()

    def agent_died(self) -> None:
        """An order handed to the agent's spawner is started or lost; it is not handed over again."""
        for lease_id, planned in list(self.launching.items()):
            planned.cancel()
            if self.random.random() < 0.5:
                self._begin(self.records[lease_id])
        self.launching.clear()

    @property
    def directory(self) -> str:
        """Names this machine and the directory of its agent."""
        return f"{self.node.name}-directory-{self.directories}"

    def lose_directory(self) -> None:
        """The agent's directory is lost, with all that is recorded in it; what runs goes on until its hold is over."""
        for run in self.running:
            if run.runs:
                run.orphaned_hold = self.holds_until(run)
                self.orphans.append(run)
        self.directories += 1
        self.journals.clear()  # guards have theirs open, and go on
        self.records.clear()
        self.live.clear()
        self.unrecorded.clear()
        self.hold_on_disk, self.epoch_on_disk = (0, ""), 0
        self.memory.lose()  # a memory server ends with its directory
        self.memory.on_disk.clear()

    def fill_disk(self, is_full: bool) -> None:
        """From now on nothing can be recorded, or everything can again."""
        self.disk_is_full = is_full
        if not is_full:
            self.unrecorded.clear()  # shims try again until their ends are on the disk

    def flood_disk(self, is_flooded: bool) -> None:
        """The oldest command that runs begins to fill the disk; or somebody makes room again."""
        if not is_flooded:
            self.disk_is_flooded = False
        elif not self.disk_is_flooded and (flooder := next((run for run in self.running if run.runs), None)):
            self.disk_is_flooded, self._flooded_ms = True, 0
            self.flooders.add(flooder.lease_id)
            flooder.written_bytes = FLOOD_BYTES
            self._watch_disk(flooder)

    def _watch_disk(self, flooder: SimulatedProcess) -> None:
        """The agent looks at its disk, if one is there; it has a few seconds to end the flood."""
        if not self.is_on or not flooder.runs or not self.disk_is_flooded:
            return
        if self.host is not None and not self.host.is_stopped:
            self._flooded_ms += DISK_CHECK_MS
            self.guard_disk()
        if self._flooded_ms > FLOOD_LIMIT_MS + flooder.order.command.grace_ms:
            self.witness.flood_outlasted(self, flooder)
        self.queue.after(DISK_CHECK_MS, lambda: self._watch_disk(flooder))

    def guard_disk(self) -> None:
        """End the command that has written most, as the disk guard of an agent does."""
        sizes = {run.lease_id: run.written_bytes for run in self.running if run.runs and run.stop is None}
        worst = largest_writer(sizes, RESERVE_BYTES)
        if worst is not None:
            overrun = Outcome(Ending.OVER_LIMIT, detail="it fills the disk of its node", is_disk_overrun=True)
            self.stop(self.records[worst], overrun, 0)

    # ------------------------------------------------------------------ running

    def start_original(self, pid: int, run_ms: int) -> None:
        """A user starts a process by hand, unless the machine is off."""
        if self.is_on:
            self.originals[pid] = SimulatedOriginal(self, pid, run_ms)

    def kill_guard(self, move_id: str) -> None:
        """The guard of a move is killed, if there is one."""
        if move_id in self.guards:
            self.guards[move_id].die()

    @property
    def running(self) -> list[SimulatedProcess]:
        """The attempts that have a record and no end, the oldest first."""
        return [run for run in map(self.records.__getitem__, self.live) if run.outcome is None]

    def stall_spawner(self, stands_still: bool) -> None:
        """From now on nothing is started, or all is that was to be and is not over."""
        self.spawner_stands_still = stands_still
        if not stands_still:
            stalled, self._stalled = self._stalled, []
            for run in stalled:
                if self.records.get(run.lease_id) is run and run.outcome is None:
                    self._begin(run)

    def launch(self, order: StartAttemptOrder, start_by_boot_ms: int = 0) -> SimulatedProcess:
        """Record an attempt and have it started in a moment."""
        run = SimulatedProcess(order, self.boot, self.boot_ms, start_by_boot_ms)
        if start_by_boot_ms:
            self.queue.at(max(self.moment(start_by_boot_ms), self.queue.now), lambda: self._expire_start(run))
        self.records[run.lease_id] = run
        self.live[run.lease_id] = None
        delay = self.random.randint(2, 60) * self.slowness
        self.launching[run.lease_id] = self.queue.after(delay, lambda: self._begin(run))
        return run

    def _expire_start(self, run: SimulatedProcess) -> None:
        """The agent seals what was not started in time; without one, the shim refuses to start it."""
        is_there = self.records.get(run.lease_id) is run and run.outcome is None and not run.begun
        if not is_there or self.host is None:
            return
        if self.host.is_stopped:
            self.queue.after(SHIM_RETRY_MS, lambda: self._expire_start(run))
            return
        if self.boot_ms < run.start_by_boot_ms:  # the clock was skewed meanwhile
            self.queue.at(self.moment(run.start_by_boot_ms), lambda: self._expire_start(run))
            return
        self._seal(run)

    def _seal(self, run: SimulatedProcess) -> None:
        """No shim gets it any more."""
        planned = self.launching.pop(run.lease_id, None)
        if planned is not None:
            planned.cancel()
        if run in self._stalled:
            self._stalled.remove(run)
        expired = Outcome(Ending.NEVER_STARTED, detail="not started in time", node_fault=True)
        self._conclude(run, expired if run.stop is None else run.stop[0])

    def _begin(self, run: SimulatedProcess) -> None:
        self.launching.pop(run.lease_id, None)
        if self.spawner_stands_still:
            self._stalled.append(run)
            return
        run.begun = True
        now = self.boot_ms
        if run.stop is not None:
            self._conclude(run, run.stop[0])
            return
        if run.order.hold_ms and now >= self.holds_until(run):
            self._conclude(run, Outcome(Ending.LOST, detail="its hold expired: no answer from the control plane"))
            return
        if 0 < run.start_by_boot_ms <= now:
            self._conclude(run, Outcome(Ending.NEVER_STARTED, detail="not started in time", node_fault=True))
            return
        if not run.work.exists:
            self._conclude(run, Outcome(Ending.NEVER_STARTED, detail="no such program"))
            return
        run.runs = True
        run.began_at = run.resumed_at = self.queue.now
        self.witness.began(self, run)
        run.finish = self.queue.after(run.left_ms, lambda: self._exit(run))
        if run.is_over_limit:
            self._schedule(run, self.queue.now + self.random.randint(20, 500), self._overrun)
        self.watch_hold(run)
        if self.host is not None:
            self.host.run_began(run)

    def _exit(self, run: SimulatedProcess) -> None:
        self._gone(run)
        if run.shim_is_stopped:
            run.has_ended_unseen = True
            return
        self._conclude(run, Outcome(Ending.EXITED, exit_code=run.work.exit_code, wall_ms=self.wall_ms(run)))

    def _overrun(self, run: SimulatedProcess) -> None:
        if run.runs:
            self._gone(run)
            self._conclude(run, Outcome(Ending.OVER_LIMIT, detail="over limit", wall_ms=self.wall_ms(run)))

    def wall_ms(self, run: SimulatedProcess) -> int:
        return self.queue.now - run.began_at

    def _gone(self, run: SimulatedProcess) -> None:
        """Its process is no more."""
        run.runs = False
        for planned in (*run.plans, run.finish):
            if planned is not None:
                planned.cancel()
        run.plans.clear()
        self.witness.ended(self, run)

    def _conclude(self, run: SimulatedProcess, outcome: Outcome) -> None:
        """Have the end on the disk, then report it; on a full disk it is reported first."""
        run.outcome = run.real_outcome = outcome
        if self.disk_is_full:
            self.unrecorded.add(run.lease_id)
        if run in self.orphans:
            self.orphans.remove(run)
        elif self.host is not None:
            self.host.run_ended(run)

    def mark_age_ms(self, run: SimulatedProcess) -> int | None:
        """How long ago it last marked a checkpoint, as it does every so often; None where it never did."""
        every, ran = run.work.marks_ms, self.wall_ms(run)
        if not every or not run.began_at or ran < every:
            return None
        age, (at, by) = ran % every, self._stepped
        return max(age + by, 0) if self.queue.now - age < at else age

    def note_lost(self, run: SimulatedProcess) -> None:
        """Its process is gone without an end: nobody knows how it would have ended."""
        run.outcome = Outcome(Ending.LOST, detail="its supervisor died; nothing of it is left")

    def forget(self, lease_id: str) -> None:
        """Its end is known where it matters; forgetting twice is harmless."""
        self.live.pop(lease_id, None)

    # ------------------------------------------------------------------ stopped shims

    def stop_shims(self, are_stopped: bool) -> None:
        """Stop the shims of all that runs, or let them go on."""
        for run in (*self.running, *self.orphans):
            if not are_stopped:
                self._wake_shim(run)
            elif run.runs:
                run.shim_is_stopped = True
                self.watch_hold(run)

    def _wake_shim(self, run: SimulatedProcess) -> None:
        """A shim goes on: it records what it has missed, and does what is due. Safe twice."""
        if not run.shim_is_stopped:
            return
        run.shim_is_stopped = False
        if run.has_ended_unseen:
            run.has_ended_unseen = False
            self._conclude(run, Outcome(Ending.EXITED, exit_code=run.work.exit_code, wall_ms=self.wall_ms(run)))
            return
        self.watch_hold(run)
        self.await_kill(run)

    def watch_for_shim(self, run: SimulatedProcess) -> None:
        """The second watcher: ends what has outlived its hold, and its shim with it."""
        if not run.runs or not run.shim_is_stopped:
            return
        due = self.holds_until(run) + WATCHER_MS
        if self.boot_ms < due:
            self._schedule(run, self.moment(due), self.watch_for_shim)
            return
        if run.orphaned_hold is None and run.stop is None:
            self.witness.hold_expired(self, run)
        run.shim_is_stopped = False
        self._gone(run)
        outcome = run.stop[0] if run.stop is not None else Outcome(Ending.LOST, detail="its hold expired")
        self._conclude(run, replace(outcome, wall_ms=self.wall_ms(run)))

    # ------------------------------------------------------------------ stopping, holding, pausing

    def stop(self, run: SimulatedProcess, outcome: Outcome, grace_ms: int) -> None:
        """Stop it: ask, then force. The first outcome stays; a later call may shorten the grace."""
        self._wake_shim(run)  # an agent that stops an attempt makes its shim go on
        if run.outcome is not None:
            return
        kill_at = self.boot_ms + grace_ms
        asked = run.stop
        run.stop = (outcome, kill_at) if asked is None else (asked[0], min(asked[1], kill_at))
        if run.runs:
            self._carry_out_stop(run, ask=asked is None)
        elif run in self._stalled:
            self._seal(run)

    def _carry_out_stop(self, run: SimulatedProcess, *, ask: bool) -> None:
        if ask and run.work.heeds and not self.ignores_sigterm:
            run.plans.append(self.queue.after(self.random.randint(5, 900), lambda: self._killed(run)))
        self.await_kill(run)

    def await_kill(self, run: SimulatedProcess) -> None:
        """Force it when its grace is over, or its hold if that comes first."""
        if not run.runs or run.stop is None:
            return
        if self._is_stuck(run):
            self._schedule(run, self.queue.now + SHIM_RETRY_MS, self.await_kill)
            return
        kill_at = min(run.stop[1], self.holds_until(run)) if run.order.hold_ms else run.stop[1]
        if self.boot_ms < kill_at:
            self._schedule(run, self.moment(kill_at), self.await_kill)
        else:
            self._schedule(run, self.queue.now + self.random.randint(0, 40) * self.slowness, self._killed)

    def _schedule(self, run: SimulatedProcess, when: int, callback: Callable[[SimulatedProcess], None]) -> None:
        run.plans = [planned for planned in run.plans if planned.is_pending]
        run.plans.append(self.queue.at(when, lambda: callback(run)))

    def _is_stuck(self, run: SimulatedProcess) -> bool:
        """Whether its shim is stopped, and no agent is there that would make it go on."""
        if run.shim_is_stopped and self.host is not None and not self.host.is_stopped:
            run.shim_is_stopped = False
        return run.shim_is_stopped

    def _killed(self, run: SimulatedProcess) -> None:
        if not run.runs or run.stop is None:
            return
        if self._is_stuck(run):
            self._schedule(run, self.queue.now + SHIM_RETRY_MS, self._killed)
            return
        self._gone(run)
        self._conclude(run, replace(run.stop[0], wall_ms=self.wall_ms(run), signal=15))

    def hold(self, until_boot_ms: int) -> None:
        """Let everything that has a hold go on until then; a hold never gets shorter."""
        self.check_memory_hold()
        if until_boot_ms > self.held_until:
            self.hold_on_disk = (until_boot_ms, self.boot)

    def check_memory_hold(self) -> None:
        """The memory server frees what it has when the hold is over; looked at when somebody asks it for something."""
        if 0 < self.held_until <= self.boot_ms:
            self.memory.expire()

    @property
    def held_until(self) -> int:
        """The end of the hold of everything here; 0 where none was given in this boot."""
        until, boot = self.hold_on_disk
        return until if boot == self.boot else 0

    def holds_until(self, run: SimulatedProcess) -> int:
        """When a run must be gone by."""
        if run.orphaned_hold is not None:
            return run.orphaned_hold
        return self.held_until or run.launched_boot_ms + run.order.hold_ms

    def watch_hold(self, run: SimulatedProcess) -> None:
        """Ask it to end in time to be gone when its hold is; looked at again when the hold was renewed meanwhile."""
        hold_ms = run.order.hold_ms
        if hold_ms and run.runs and run.shim_is_stopped:
            self.watch_for_shim(run)
            return
        if not hold_ms or not run.runs or run.stop is not None:
            return
        until = self.holds_until(run)
        term_at = until - min(run.order.command.grace_ms, hold_ms // 4)
        if self.boot_ms < term_at:
            self._schedule(run, self.moment(term_at), self.watch_hold)
            return
        if run.orphaned_hold is None:
            self.witness.hold_expired(self, run)
        run.stop = (Outcome(Ending.LOST, detail="its hold expired: no answer from the control plane"), until)
        self._carry_out_stop(run, ask=True)

    def pause(self, run: SimulatedProcess) -> None:
        """Let it stand still; it keeps what it holds."""
        if run.runs and not run.paused and run.finish is not None:
            run.paused = True
            run.finish.cancel()
            run.left_ms -= min(self.queue.now - run.resumed_at, run.left_ms)

    def resume(self, run: SimulatedProcess) -> None:
        if run.runs and run.paused:
            run.paused = False
            run.resumed_at = self.queue.now
            run.finish = self.queue.after(run.left_ms, lambda: self._exit(run))
