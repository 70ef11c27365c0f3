"""A small world to prove the laws in: a live ledger, a store beside it, and whatever may happen to both.

Every action takes plain numbers and finds its target among what is there, so that any sequence of actions means
something. `tell` is the only way in; it hands a `ObservedStep` to every law.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from distributed_grid.domain import events
from distributed_grid.domain.deliveries import DeliveredFiles, FetchOrder
from distributed_grid.domain.followups import Cause, ScanQueue
from distributed_grid.domain.jobs import MAX_RERUNS, Command, Ending, JobEstimate, Outcome
from distributed_grid.domain.leases import NodeKind, Request
from distributed_grid.domain.nodes import PULL_HOST, Node, Usage
from distributed_grid.domain.resources import Claim, GpuDevice
from distributed_grid.domain.states import JobState, WorkerState
from distributed_grid.errors import GridError
from distributed_grid.reactor import step
from distributed_grid.reactor.effects import StartAttempt, StopAttempt, attempt_effects
from tests.simulation.invariants import Invariant, LedgerWatch, ObservedStep
from tests.support.builders import GB, NOW, a_node, a_request, a_submission, a_usage, an_exit, caps, thresholds
from tests.support.scaling import MIDDAY_MS
from tests.support.scaling import rules as scaling_rules

NAMES = ("ash", "birch", "cedar")
PULLERS = ("larch", "maple")
TASK = Command((), payload='{"type": "test"}')
MIXED = (GpuDevice(0, 24 * GB), GpuDevice(1, 8 * GB, exclusive=True))
TURNED = (GpuDevice(0, 24 * GB, exclusive=True), GpuDevice(1, 8 * GB))
NODES: tuple[Callable[[str], Node], ...] = (
    lambda name: a_node(name, cores=4, memory_gb=16),
    lambda name: a_node(name, cores=4, memory_gb=16, gpus=MIXED, custom={"fpga": 2}),
    lambda name: a_node(name, cores=4, memory_gb=16, gpus=TURNED, custom={"fpga": 1}),
    lambda name: a_node(name, cores=2, memory_gb=8, gpus=MIXED[:1], rank=2000),
    lambda name: a_node(name, cores=8, memory_gb=32, gpus=2, caps=caps(cores=3, memory_gb=9, gpus=1)),
    lambda name: a_node(name, cores=4, memory_gb=16, gpus=2, thresholds=thresholds()),
    lambda name: a_node(name, cores=4, caps=caps(can_share=False)),
    lambda name: a_node(name, cores=4, custom={"fpga": 4}, caps=caps(custom={"fpga": 1})),
    lambda name: a_node(name, cores=4, memory_gb=16, gpus=MIXED, hold_s=20),
    lambda name: a_node(name, cores=3, memory_gb=8, hold_s=60, thresholds=thresholds()),
)
USAGES = (
    Usage(),
    a_usage(cpu_outside=0.5, memory_outside_gb=6),
    a_usage(cpu_outside=0.95, memory_outside_gb=15, gpus={0: (0.9, 20.0), 1: (0.0, 7.5)}),
)
OUTCOMES = (
    an_exit(0),
    an_exit(1),
    Outcome(Ending.SIGNALLED, signal=9),
    Outcome(Ending.PREEMPTED),
    Outcome(Ending.OVER_LIMIT, detail="used 2.1 GB of 1.0 GB"),
    Outcome(Ending.NEVER_STARTED, detail="no such program"),
    Outcome(Ending.RECLAIMED, detail="its owner needs it"),
)


class World(LedgerWatch):
    """A ledger that is told things, with some laws held against each of them."""

    def __init__(self, *laws: Invariant) -> None:
        super().__init__(NOW)
        self.laws = laws
        self.epoch = 0
        self.asked = 0

    def handle(self, event: Cause) -> ObservedStep:
        """Let something happen, store what changed, and hold every law against it."""
        moment = self.begin(event)
        try:
            self.end(moment, step(self.ledger, event, self.now))
        except GridError as refusal:
            self.end(moment, refusal)
        for law in self.laws:
            law(self, moment)
        return moment

    # what may happen

    def declare(self, which: int, kind: int) -> None:
        self.handle(events.NodeDeclared(NODES[kind](NAMES[which])))

    def heartbeat(self, which: int, usage: int) -> None:
        self.handle(events.HeartbeatReceived(name=NAMES[which], usage=USAGES[usage]))

    def yield_to_owner(self, which: int, yields: bool) -> None:
        """An agent gives way to its owner, or does not any more."""
        self.handle(events.HeartbeatReceived(name=NAMES[which], usage=USAGES[0], generation=self.now, yields=yields))

    def jump_clock(self, which: int, by_ms: int, confirms: bool) -> None:
        """The wall clock of a node jumps, or is steady again; perhaps somebody confirms all clocks."""
        self.handle(
            events.HeartbeatReceived(name=NAMES[which], usage=USAGES[0], clock_jump_ms=by_ms, clock_waits_ms=1_000)
        )
        if confirms:
            self.handle(events.ClocksConfirmed("ana"))

    def drain(self, which: int) -> None:
        self.handle(events.NodeDrained(NAMES[which]))

    def cool(self, which: int, off: bool) -> None:
        """An owner wants a node back, or lends it again."""
        name = NAMES[which]
        self.handle(events.NodeResumed(name) if off else events.NodeDrained(name, cooling=True))

    def report_epoch(self, which: int, ahead: int) -> None:
        """An agent has seen an epoch that the ledger may not know of."""
        self.handle(events.EpochReported(NAMES[which], self.epoch + ahead))

    def reject(self, which: int) -> None:
        """An agent is turned away."""
        self.handle(events.AgentRejected(NAMES[which], "it lies"))

    def claim(self, which: int, cores: int, ends_ms: int) -> None:
        """Somebody knows of a lease that the ledger does not."""
        target = NAMES[(which + 1) % len(NAMES)]
        request = self._named(a_request(cores=cores, target=target, anti_affinity=(target,)))
        fence = 1 + max([self.ledger.counters.get("fence", 0), *(one.fence for one in self.ledger.leases.values())])
        claim = Claim(cpu_milli=1000 * cores)
        self.handle(
            events.LeaseRecovered(
                request=request,
                node=NAMES[which],
                claim=claim,
                fence=fence,
                granted_at_ms=self.now,
                ends_at_ms=self.now + ends_ms,
            )
        )

    def want(self, which: int, wanted: bool) -> None:
        self.handle(events.AgentRequested(NAMES[which], wanted))

    def stop_node(self, which: int) -> None:
        """The agent of a node was ended, with everything it ran."""
        self.handle(events.NodeStopped(NAMES[which]))

    def pause(self, which: int, off: int, paused: bool) -> None:
        for uid, number, fence in self._attempts(which):
            self.handle(events.AttemptPaused(uid=uid, number=number, fence=fence + off, paused=paused))

    def mark(self, which: int, off: int, age_ms: int) -> None:
        """An agent reports that an attempt marked a checkpoint."""
        for uid, number, fence in self._attempts(which):
            self.handle(events.AttemptMarked(uid, number, fence + off, age_ms))

    def outgrow(self, which: int, off: int, held_gb: int) -> None:
        """An agent reports that an attempt holds so much memory; a heartbeat later it does so again."""
        for uid, number, fence in self._attempts(which):
            for _ in range(2):
                self.handle(events.AttemptOutgrown(uid, number, fence + off, held_gb * GB))

    def spare(self, minimum_run_ms: int, preemptions_max: int) -> None:
        """The config says anew who is not displaced."""
        policy = replace(self.ledger.policy, minimum_run_ms=minimum_run_ms, preemptions_max=preemptions_max)
        self.handle(events.PolicySet(policy))

    def forget(self, which: int) -> None:
        self.handle(events.NodeForgotten(NAMES[which]))

    def ask(self, request: Request) -> None:
        self.handle(events.LeaseAsked(self._named(request)))

    def submit(self, request: Request, retries: int) -> None:
        """Every other job wants files back."""
        submission = a_submission(self._named(request), retries=retries)
        self.handle(replace(submission, fetch=FetchOrder(("out/**",))) if self.asked % 2 else submission)

    def deliver(self, which: int, how: str) -> None:
        """The files of an ended job are delivered, delayed or gone; also those of one that wants none."""
        wanted = [*self.ledger.deliveries, *self.ledger.jobs, "r1"]
        uid = wanted[which % len(wanted)]
        if how == "delivered":
            self.handle(events.FilesDelivered(uid, DeliveredFiles(directory="/data", files=1, bytes=2)))
        elif how == "fetched":
            self.handle(
                events.FilesFetched(
                    job=uid,
                    job_id="job",
                    user="ada",
                    node="n1",
                    patterns=("**",),
                    delivered=DeliveredFiles(directory="/data", files=1, bytes=2),
                )
            )
        else:
            kind = events.FilesDelayed if how == "delayed" else events.FilesUndeliverable
            self.handle(kind(uid, "it cannot be reached"))

    def submit_sized(self, request: Request, first_gb: int, retries: int) -> None:
        """A job that states no memory, and is given some by the grid: twice as much after each overrun."""
        asked = self._named(replace(request, ask=replace(request.ask, memory_bytes=0), limits_memory=True))
        estimate = JobEstimate(memory_limits=tuple(first_gb * GB << at for at in range(1 + MAX_RERUNS)), run_ms=60_000)
        self.handle(replace(a_submission(asked, retries=retries), estimate=estimate))

    def urge(self, request: Request) -> None:
        """Every other time a job is in a hurry, every other time a plain lease."""
        if self.asked % 2:
            self.submit(request, 0)
        else:
            self.ask(request)

    def _named(self, request: Request) -> Request:
        self.asked += 1
        return Request(
            id=f"r{self.asked}",
            user=request.user,
            ask=request.ask,
            priority=request.priority,
            prefer=request.prefer,
            require=request.require,
            wait_ms=request.wait_ms,
            duration_ms=request.duration_ms,
            target=request.target,
        )

    def ask_again(self, which: int, changed: bool) -> None:
        """The same request id once more, with the same content or other."""
        known = list(self.ledger.by_request)
        if not known:
            return
        uid = known[which % len(known)]
        job = self.ledger.jobs.get(uid)
        request = job.request if job is not None else self.ledger.leases[uid].request
        if changed:
            request = Request(id=uid, user="mallory", ask=request.ask)
        if job is None:
            self.handle(events.LeaseAsked(request))
        else:
            self.handle(a_submission(request))

    def release(self, which: int, twice: bool) -> None:
        held = list(self.ledger.leases)
        if held:
            for _ in range(1 + twice):
                self.handle(events.LeaseReleased(held[which % len(held)], "ada"))

    def extend(self, which: int, extra_ms: int) -> None:
        held = list(self.ledger.leases)
        if held:
            self.handle(events.LeaseExtended(held[which % len(held)], "ada", extra_ms))

    def cancel(self, which: int, twice: bool) -> None:
        going = list(self.ledger.jobs)
        if going:
            for _ in range(1 + twice):
                self.handle(events.JobCancelled(going[which % len(going)], "ada"))

    def detach(self, which: int) -> None:
        """The terminal of a job closes."""
        going = list(self.ledger.jobs)
        if going:
            self.handle(events.JobDetached(going[which % len(going)], "ada", "the terminal closed"))

    def started(self, which: int, off: int) -> None:
        """An agent reports a start; `off` moves the fence into the past or the future."""
        for uid, number, fence in self._attempts(which):
            self.handle(events.AttemptStarted(uid=uid, number=number, fence=fence + off, pid=100 + which))

    def ended(self, which: int, off: int, outcome: int) -> None:
        for uid, number, fence in self._attempts(which):
            self.handle(events.AttemptEnded(uid=uid, number=number, fence=fence + off, outcome=OUTCOMES[outcome]))

    def displaced(self, which: int, left: bool) -> None:
        """A node reports that its owner took back what an attempt had, and whether that left a checkpoint."""
        for uid, number, fence in self._attempts(which):
            nodes = (self.ledger.jobs[uid].attempts[-1].node,)
            outcome = Outcome(Ending.RECLAIMED)
            self.handle(
                events.AttemptEnded(
                    uid=uid, number=number, fence=fence, outcome=outcome, nodes=nodes, pid=7, has_checkpoint=left
                )
            )

    def ship(self, which: int, problem: str) -> None:
        """A checkpoint that a job waits for is here, or cannot be had."""
        waiting = list(self.ledger.awaited_checkpoints)
        if waiting:
            job = self.ledger.jobs[waiting[which % len(waiting)]]
            self.handle(
                events.CheckpointShipped(
                    uid=job.uid, number=job.checkpoint_from, manifest="" if problem else "m", problem=problem
                )
            )

    def _attempts(self, which: int) -> list[tuple[str, int, int]]:
        going = [job for job in self.ledger.jobs.values() if job.attempts]
        if not going:
            return []
        job = going[which % len(going)]
        last = job.attempts[-1]
        return [(job.uid, last.number, last.fence)]

    def listed(self, which: int, every: int, boot: str) -> None:
        """An agent comes back, from this boot or another, and knows only each so-manieth of its attempts."""
        name = NAMES[which]
        known = tuple(lease.id for lease in self.ledger.leases_of(name) if lease.job)
        self.handle(events.AttemptsListed(node=name, attempts=known[:: every + 1], boot=boot))

    def expire_starts(self, which: int) -> None:
        """A node has not started its jobs in time; started ones are named, too."""
        name = NAMES[which]
        self.handle(events.StartsExpired(name, tuple(lease.id for lease in self.ledger.leases_of(name))))

    def vanish(self, which: int) -> None:
        """One of those that are being stopped is gone."""
        stopping = [job for job in self.ledger.jobs.values() if job.state is JobState.STOPPING]
        if stopping:
            job = stopping[which % len(stopping)]
            last = job.attempts[-1]
            self.handle(events.AttemptEnded(uid=job.uid, number=last.number, fence=last.fence, outcome=OUTCOMES[2]))

    def started_too_soon(self, which: int) -> None:
        """An agent reports a start that was never ordered: the victims are still there."""
        early = [lease.job for lease in self.ledger.leases.values() if lease.awaits and lease.job]
        early += [uid for uid in self.ledger.awaited_checkpoints if self.ledger.jobs[uid].attempt is not None]
        if early:
            last = self.ledger.jobs[early[which % len(early)]].attempts[-1]
            self.handle(
                events.AttemptStarted(uid=early[which % len(early)], number=last.number, fence=last.fence, pid=8)
            )

    def work(self, every: int, stops: bool = True) -> None:
        """The agents do what they are told: start what is to start, stop what is to stop; some are slow."""
        for effect in attempt_effects(self.ledger)[:: every + 1]:
            attempt = effect.job.attempt
            assert attempt is not None
            if isinstance(effect, StartAttempt):
                self.handle(
                    events.AttemptStarted(uid=effect.job.uid, number=attempt.number, fence=attempt.fence, pid=7)
                )
            elif stops and isinstance(effect, StopAttempt):
                self.handle(
                    events.AttemptEnded(
                        uid=effect.job.uid, number=attempt.number, fence=attempt.fence, outcome=OUTCOMES[2]
                    )
                )

    def fill(self, request: Request, jobs: int) -> None:
        """So many jobs of one kind run, and have run for a while."""
        for _ in range(jobs):
            self.submit(request, 0)
        self.work(0, stops=False)
        self.wait(2_000, heard=True)

    def register(self, which: int, incarnation: str) -> None:
        """A worker without an agent says what it has: the same process again, or another one."""
        node = replace(a_node(PULLERS[which], cores=2, hold_s=20), host=PULL_HOST, incarnation=incarnation)
        self.handle(events.PullWorkerRegistered(node, USAGES[0]))

    def submit_task(self, request: Request, retries: int, runs_on: NodeKind) -> None:
        """A task that a pull worker can run, or only such a one."""
        command = TASK if runs_on is NodeKind.PULL else Command(("true",), payload=TASK.payload)
        task = replace(self._named(request), runs_on=runs_on, require=(), prefer=())
        self.handle(a_submission(task, retries=retries, command=command))

    def take(self, which: int, incarnation: str, keeps: bool) -> None:
        """A pull worker asks for its next task; it has those that it was given, or says that it has none."""
        name = PULLERS[which]
        mine = tuple(job.id for job in self.ledger.jobs_of(name) if job.state is JobState.RUNNING) if keeps else ()
        self.handle(events.TaskAsked(name, incarnation, mine, f"{name}-{incarnation}"))

    def withdraw_ask(self, which: int, incarnation: str) -> None:
        """The connection on which a pull worker asked last is gone."""
        self.handle(events.TaskAskWithdrawn(PULLERS[which], incarnation, f"{PULLERS[which]}-{incarnation}"))

    def reserve(self, which: int, cores: int) -> None:
        """Somebody reserves some of a pull worker for a task."""
        request = replace(self._named(a_request(cores=cores, wait_s=0, duration_s=60)), require=(PULLERS[which],))
        self.handle(events.LeaseAsked(replace(request, task=request.id, runs_on=NodeKind.ANY)))

    def scale(self, most: int, warm: int) -> None:
        """Scaling is evaluated, with a maximum that may have changed."""
        self.handle(events.ScalingRulesSet(scaling_rules(max_workers=most, window_ms=10_000, down_cooldown_ms=2_000)))
        self.asked += 1
        ids = tuple(f"worker-{self.asked}-{number}" for number in range(3))
        self.handle(events.ScalingRequested(ids, MIDDAY_MS + self.now, warm))

    def provide(self, which: int, joins: bool) -> None:
        """A provider starts a worker, which joins or refuses to be made; or it ends one."""
        workers = list(self.ledger.workers.values())
        if not workers:
            return
        worker = workers[which % len(workers)]
        wall_ms = MIDDAY_MS + self.now
        if worker.state is WorkerState.TERMINATING:
            self.handle(events.WorkerGone(worker.id, "it is gone", wall_ms))
        elif not joins and worker.state is WorkerState.WANTED:
            self.handle(events.WorkerRefused(worker.id, "no room", wall_ms, scope=worker.offer))
        elif worker.is_on_its_way:
            self.handle(events.WorkerAsked(worker.id))
            self.handle(events.WorkerBooted(worker.id, "i-1"))
            self.handle(events.NodeDeclared(replace(a_node(worker.id, cores=4, hold_s=60), joined=True)))
            self.handle(events.HeartbeatReceived(name=worker.id, usage=USAGES[0]))
        else:
            self.handle(events.OutputsCollected(worker.id, wall_ms))

    def take_away(self, which: int, ends_in_ms: int | None, withdrawn: bool) -> None:
        """The agent of a worker says that its machine ends, and time is compared with what was announced."""
        workers = list(self.ledger.workers)
        if workers:
            worker_id = workers[which % len(workers)]
            self.handle(events.WorkerEndAnnounced(worker_id, "spot notice", ends_in_ms, withdrawn=withdrawn))
            self.handle(events.WallTimePassed(MIDDAY_MS + self.now))

    def look(self) -> None:
        self.handle(ScanQueue())

    def wait(self, ms: int, heard: bool) -> None:
        """Time passes, with heartbeats or in silence."""
        self.now += ms
        if heard:
            for name in list(self.ledger.nodes):
                self.handle(events.HeartbeatReceived(name=name, usage=USAGES[0]))
        self.handle(events.TimePassed())

    def jump(self, ms: int) -> None:
        """Time passes and nobody has looked at the clock yet."""
        self.now += ms

    def restart(self) -> None:
        """The control plane dies; the next one knows what was stored."""
        self.begin_anew(self.rebuilt())
        self.epoch += 1
        self.handle(events.ControlPlaneStarted(self.epoch))
