"""Parts of the simulated world: time, links, machines, and the control plane's disk."""

from __future__ import annotations

import functools
from random import Random
from typing import NamedTuple

import pytest
from msgspec import structs

from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Capacity
from distributed_grid.replay.event_queue import EventQueue
from distributed_grid.wire import (
    PROTOCOL,
    AcknowledgeReport,
    AgentHello,
    AnnouncedEnd,
    AttemptEndedReport,
    AttemptPausedReport,
    AttemptStartedReport,
    CheckpointAge,
    FromAgent,
    Heartbeat,
    HeartbeatReply,
    HeldMemory,
    PendingClockJump,
    ReportedCapacity,
    ToAgent,
    decode_from_agent,
    encode,
)
from tests.simulation.campaign import failure_text
from tests.simulation.faults import (
    EVERYWHERE,
    JUMP_MS,
    JUMPS_FROM,
    STEP_MS,
    Fault,
    FaultKind,
    MessageMutator,
)
from tests.simulation.machine import MAX_SKEW, MILLION, USUAL_DRIFT, Machine, ScriptedJob, SimulatedProcess
from tests.simulation.network import UP, Network, SimulatedLink
from tests.simulation.scenario import draw_scenario
from tests.simulation.world import BEGIN_MS, World
from tests.unit.simulation.scenarios import a_cancel, a_fault, a_job, a_scenario

MESSAGES: list[FromAgent] = [
    AgentHello(
        protocol=PROTOCOL,
        version="1",
        node="ash",
        attempts=("job1.1",),
        capacity=ReportedCapacity.of(Capacity(4000, 1 << 34)),
        epoch=3,
        boot="boot",
    ),
    Heartbeat(
        node="ash",
        usage=Usage(),
        beat=5_000,
        generation=2,
        marks=(CheckpointAge("job1.1", 9, 100),),
        capacity=ReportedCapacity.of(Capacity(4000, 1 << 34)),
        end=AnnouncedEnd("spot notice", 120_000),
        clock_jump=PendingClockJump(3_600_000, 60_000),
        outgrown=(HeldMemory("job1.1", 9, 1 << 30),),
    ),
    AttemptStartedReport(seq=1, lease_id="job1.1", fence=9, pid=123, cores=(0, 1)),
    AttemptPausedReport(2, "job1.1", 9, True, "why"),
    AttemptEndedReport(seq=3, lease_id="job1.1", fence=9, outcome=Outcome(Ending.EXITED, exit_code=0)),
]


def lines(world: World) -> list[str]:
    """The story of a world without its times."""
    report = world.run()
    assert not report.violated, report
    return [" ".join(line.split()[1:]) for line in world.log.lines]


def a_world(*args, **kwargs) -> World:
    return World(a_scenario(*args, **kwargs), keep_all=True)


# ------------------------------------------------------------------ time


def test_events_come_by_their_time_and_then_in_the_order_they_were_scheduled() -> None:
    queue, done = EventQueue(100), []
    queue.at(300, lambda: done.append("c"))
    queue.after(50, lambda: done.append("a"))
    queue.after(50, lambda: done.append("b"))
    off = queue.after(60, lambda: done.append("never"))
    off.cancel()
    off.cancel()
    while queue.run_next(250):
        pass
    assert (done, queue.now) == (["a", "b"], 250)
    assert queue.run_next(1000)
    assert (done, queue.now) == (["a", "b", "c"], 300)


def test_what_is_planned_for_the_past_happens_now() -> None:
    queue, seen = EventQueue(100), []
    queue.at(5, lambda: seen.append(queue.now))
    queue.run_next(1000)
    assert seen == [100]


# ------------------------------------------------------------------ links


class Ends:
    """What arrives at both ends of a link."""

    def __init__(self) -> None:
        self.up: list[FromAgent] = []
        self.down: list[ToAgent] = []
        self.over: list[str] = []


class ControlEnd(NamedTuple):
    """The control plane's end."""

    ends: Ends

    def received(self, message: FromAgent, via: SimulatedLink) -> None:
        self.ends.up.append(message)

    def gone(self, via: SimulatedLink) -> None:
        self.ends.over.append("control")


class AgentEnd(NamedTuple):
    """The agent's end."""

    ends: Ends

    def received(self, message: ToAgent, via: SimulatedLink) -> None:
        self.ends.down.append(message)

    def disconnected(self, via: SimulatedLink) -> None:
        self.ends.over.append("agent")


def a_link(seed: int = 1) -> tuple[EventQueue, Network, SimulatedLink, Ends]:
    queue, ends = EventQueue(), Ends()
    network = Network(queue, Random(seed), ("ash",))
    return queue, network, network.connect("ash", AgentEnd(ends), ControlEnd(ends)), ends


def pass_time(queue: EventQueue, until: int = 1_000_000) -> None:
    while queue.run_next(until):
        pass


def test_a_link_keeps_the_order_of_its_messages() -> None:
    queue, network, link, ends = a_link()
    network.routes["ash"].max_delay_ms = 5_000
    sent = [AcknowledgeReport(number) for number in range(50)]
    for message in sent:
        link.send(message)
    pass_time(queue)
    assert ends.down == sent


def test_a_scrambled_link_keeps_the_order_of_one_lease_only() -> None:
    queue, network, link, ends = a_link()
    network.routes["ash"].max_delay_ms, network.routes["ash"].scrambled = 5_000, True
    sent = [
        AttemptStartedReport(seq=number, lease_id=f"job.{number % 3}", fence=1, pid=7, cores=()) for number in range(60)
    ]
    for message in sent:
        link.send_up(message)
    pass_time(queue)
    assert ends.up != sent
    assert sorted(message.seq for message in ends.up) == [*range(60)]
    for lease in ("job.0", "job.1", "job.2"):
        seqs = [message.seq for message in ends.up if message.lease_id == lease]
        assert seqs == sorted(seqs)


def test_a_blocked_direction_delivers_late_and_the_other_one_does_not_care() -> None:
    queue, network, link, ends = a_link()
    network.block("ash", UP)
    assert not network.routes["ash"].is_open
    link.send_up(AttemptStartedReport(seq=1, lease_id="job.1", fence=1, pid=7, cores=()))
    link.send(HeartbeatReply(beat=1, hold_ms=2))
    pass_time(queue, 5_000)
    assert (ends.up, len(ends.down)) == ([], 1)
    network.unblock("ash", UP)
    pass_time(queue)
    assert len(ends.up) == 1


def test_what_is_lost_takes_everything_after_it_along_until_the_link_breaks() -> None:
    queue, network, link, ends = a_link()
    network.routes["ash"].lose = 1.0
    link.send(AcknowledgeReport(1))
    network.routes["ash"].lose = 0.0
    link.send(AcknowledgeReport(2))
    pass_time(queue, 20_000)
    assert ends.down == []
    assert sorted(ends.over) == ["agent", "control"]
    link.send(AcknowledgeReport(3))
    pass_time(queue)
    assert ends.down == []


def test_a_repeating_route_delivers_some_messages_twice() -> None:
    queue, network, link, ends = a_link()
    network.routes["ash"].repeat = 0.5
    for number in range(40):
        link.send(AcknowledgeReport(number))
    pass_time(queue)
    assert 40 < len(ends.down) < 80
    assert {message.seq for message in ends.down} == {*range(40)}


@pytest.mark.parametrize("seed", range(6))
def test_what_a_side_said_that_has_left_arrives_late_or_never(seed: int) -> None:
    queue, network, link, ends = a_link(seed)
    network.block("ash", UP)
    link.send_up(AttemptStartedReport(seq=1, lease_id="job.1", fence=1, pid=7, cores=()))
    link.hang_up()
    network.unblock("ash", UP)
    pass_time(queue)
    assert (len(ends.up), ends.over) in ((1, ["control"]), (0, []))


def test_a_control_plane_that_is_gone_is_noticed_unless_its_machine_went_along() -> None:
    for silently in (False, True):
        queue, network, link, ends = a_link()
        network.drop_all(silently=silently)
        link.send(AcknowledgeReport(1))
        pass_time(queue)
        assert (ends.down, ends.over) == ([], [] if silently else ["agent"])


# ------------------------------------------------------------------ machines


class Nobody:
    """Sees nothing."""

    def began(self, machine: Machine, run: SimulatedProcess) -> None: ...
    def ended(self, machine: Machine, run: SimulatedProcess) -> None: ...
    def hold_expired(self, machine: Machine, run: SimulatedProcess) -> None: ...
    def flood_outlasted(self, machine: Machine, run: SimulatedProcess) -> None: ...


@pytest.mark.parametrize("seed", range(5))
def test_a_clock_since_boot_is_its_own_and_its_moments_come_when_it_says(seed: int) -> None:
    queue = EventQueue(1_000_000)
    machine = Machine(Node(name="ash", capacity=Capacity(1000)), queue, Random(seed), Nobody())
    start = machine.boot_ms
    for ahead in (1, 999, 60_000, 86_400_000):
        moment = machine.moment(start + ahead)
        queue.at(moment, lambda: None)
        queue.run_next(moment)
        assert machine.boot_ms >= start + ahead
        assert machine.boot_ms - (start + ahead) <= 1
    passed = queue.now - 1_000_000
    assert abs(machine.boot_ms - start - passed) <= passed // 200 + 1


def test_a_skewed_clock_runs_as_much_slower_as_was_said_and_as_usual_afterwards() -> None:
    queue = EventQueue(1_000_000)
    machine = Machine(Node(name="ash", capacity=Capacity(1000)), queue, Random(1), Nobody())

    def ran(much: float) -> int:
        before = machine.boot_ms
        machine.skew(much)
        assert machine.boot_ms == before
        queue.run_next(queue.now + MILLION)
        return machine.boot_ms - before

    assert (ran(-1), ran(1)) == (MILLION - MAX_SKEW, MILLION + MAX_SKEW)
    assert abs(ran(0) - MILLION) <= USUAL_DRIFT


def test_a_command_says_what_it_does() -> None:
    for work in (ScriptedJob(1), ScriptedJob(5, 3, heeds=False, exists=False, workdir=True, marks_ms=2)):
        assert ScriptedJob.of(work.command()) == work


# ------------------------------------------------------------------ stories


def test_a_quiet_world_runs_a_job_once() -> None:
    history = lines(a_world([a_job(10, 5)]))
    assert [line for line in history if "job" in line] == [
        "grid requested job 1 core",
        "ash granted job",
        "ash job.1 begins under fence 100000001",
        "ash started job",
        "ash job.1 is gone",
        "ash released job released",
        "ash stopped job exited",
    ]


def test_a_short_cut_changes_nothing_and_a_long_one_loses_the_job() -> None:
    short = lines(a_world([a_job(10, 100)], [a_fault(FaultKind.CUT, 40, 6)]))
    assert "ash node-lost ash its holds have run out" not in short
    assert short.count("ash job.1 is gone") == 1
    assert not any("job.2" in line for line in short)
    long = lines(a_world([a_job(10, 100)], [a_fault(FaultKind.CUT, 40, 60)]))
    lost, gone = long.index("ash node-lost ash its holds have run out"), long.index("ash job.1 is gone")
    assert gone < lost
    assert any("job.2 begins" in line for line in long[lost:])


@pytest.mark.parametrize("kind", [FaultKind.CUT_UP, FaultKind.CUT_DOWN])
def test_a_cut_in_one_direction_loses_the_job_too(kind: FaultKind) -> None:
    history = lines(a_world([a_job(10, 100)], [a_fault(kind, 40, 60)]))
    assert history.index("ash job.1 is gone") < history.index("ash node-lost ash its holds have run out")


def test_a_job_outlives_its_agent() -> None:
    history = lines(a_world([a_job(10, 60)], [a_fault(FaultKind.AGENT_DIES, 30, 8)]))
    assert history.count("ash the agent starts") == 2
    assert [line for line in history if "begins" in line] == ["ash job.1 begins under fence 100000001"]
    assert "ash stopped job exited" in history


def test_a_job_outlives_the_control_plane() -> None:
    history = lines(a_world([a_job(10, 60)], [a_fault(FaultKind.CONTROL_DIES, 30, 6, node="")]))
    assert [line for line in history if "begins" in line] == ["ash job.1 begins under fence 100000001"]
    assert "ash stopped job exited" in history


def test_a_job_dies_with_its_machine_and_runs_again_with_retries_only() -> None:
    again = lines(a_world([a_job(10, 60)], [a_fault(FaultKind.MACHINE_DIES, 30, 10)]))
    assert any("job.2 begins" in line for line in again)
    once = lines(a_world([a_job(10, 60, retries=0)], [a_fault(FaultKind.MACHINE_DIES, 30, 10)]))
    assert not any("job.2" in line for line in once)


def test_what_is_asked_of_a_control_plane_that_is_down_is_asked_again() -> None:
    world = a_world([a_job(31, 5)], [a_fault(FaultKind.CONTROL_DIES, 30, 10, node="")])
    history = lines(world)
    assert (world.users.accepted, history.count("ash stopped job exited")) == (1, 1)


def test_what_is_asked_again_in_the_batch_in_which_it_ended_is_not_asked_for_anew() -> None:
    world = a_world([], [a_fault(FaultKind.MACHINE_DIES, 1, 60)])
    submitted, cancelled = a_job(30, 5).event, a_cancel(30).event

    def at_once() -> None:
        for event in (submitted, cancelled, submitted):
            world.control.handle(event)

    world.queue.at(BEGIN_MS + 30_000, at_once)
    history = [line for line in lines(world) if "job" in line]
    assert history[-1] == "grid stopped job cancelled by ada"
    assert [line for line in history if line.startswith("grid requested")] == ["grid requested job 1 core"]


def test_a_full_disk_delays_and_loses_nothing() -> None:
    world = a_world([a_job(29.999, 5), a_job(33, 5, uid="other")], [a_fault(FaultKind.DISK_FULL, 30, 8, node="")])
    history = lines(world)
    assert world.users.accepted == 2
    assert history.count("ash stopped job exited") == history.count("ash stopped other exited") == 1


def test_borrowed_work_stands_still_for_an_owner_and_goes_when_the_owner_stays() -> None:
    short = lines(a_world([a_job(10, 60)], [a_fault(FaultKind.OWNER, 30, 20, strength=0.0)]))
    assert any(line.startswith("ash paused job") for line in short)
    assert any(line.startswith("ash resumed job") for line in short)
    long = lines(a_world([a_job(10, 60, on="")], [a_fault(FaultKind.OWNER, 30, 110, strength=0.0)]))
    assert any("its owner needs ash" in line for line in long)
    assert any(line.startswith("birch job.2 begins") for line in long)


def test_an_owner_who_needs_memory_gets_it_at_once() -> None:
    history = lines(a_world([a_job(10, 60, on="")], [a_fault(FaultKind.OWNER, 30, 60, strength=1.0)]))
    assert any(line.startswith("birch job.2 begins") for line in history)


def test_a_drained_node_gives_its_jobs_to_others() -> None:
    history = lines(a_world([a_job(10, 60, on="")], [a_fault(FaultKind.DRAINED, 30, 60)]))
    assert any(line.startswith("birch job.2 begins") for line in history)


def test_a_cancelled_job_is_stopped_wherever_it_is() -> None:
    history = lines(a_world([a_job(10, 60), a_cancel(30)]))
    assert "ash stopped job cancelled by ada" in history


BUSY = [a_job(at, 7, uid=f"job{at}", on="" if at % 3 else "ash", workdir=at % 2 == 0) for at in range(10, 80, 6)]

BUSY += [a_job(12, 60, uid="long"), *(a_job(45, 3, uid=f"short{number}") for number in range(3))]
BESIDE = {
    FaultKind.SIGTERM_IGNORED: a_fault(FaultKind.DRAINED, 35, 30),
    FaultKind.CLOCK_SKEWED: a_fault(FaultKind.CUT, 35, 30),
    FaultKind.SHIMS_STOPPED: a_fault(FaultKind.CUT, 35, 30),
    FaultKind.SCRAMBLED: a_fault(FaultKind.SLOW_LINK, 10, 60, strength=0.3),
}
"""What shows only beside another fault: clocks that differ, and shims that are stopped, do not matter while somebody
renews the holds, and what takes no time does not overtake anything."""


def happened(*faults: Fault) -> list[str]:
    world = a_world(BUSY, faults)
    report = world.run()
    assert not report.violated, failure_text(report)
    return world.log.lines


usually = functools.cache(happened)


UNSEEN = {FaultKind.CLOCK_STEPPED}
"""What changes no more than the age of a mark."""


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind not in UNSEEN], ids=lambda kind: kind.name.lower())
def test_every_kind_of_fault_changes_what_happens_while_it_lasts_and_not_before(kind: FaultKind) -> None:
    beside = [BESIDE[kind]] if kind in BESIDE else []
    fault = a_fault(kind, 30, 40, node="" if kind in EVERYWHERE else "ash", strength=0.9)
    story = [line for line in happened(*beside, fault) if str(kind) not in line]
    usual = usually(*beside)
    first = next(at for at, (one, other) in enumerate(zip(story, usual, strict=False)) if one != other)
    assert 30 <= float(usual[first].split()[0]) < 70


def test_a_slow_network_makes_orders_late() -> None:
    slow = a_fault(FaultKind.SLOW_LINK, 5, 60, strength=1.0)
    took = [began(a_world([a_job(10, 5)], faults)) - 10 for faults in ([], [slow])]
    assert took[0] < 0.2 < took[1]


def test_a_slow_machine_makes_starts_late() -> None:
    slow = a_fault(FaultKind.SLOW_NODE, 5, 60, strength=1.0)
    took = [began(a_world([a_job(10, 5)], faults)) for faults in ([], [slow])]
    assert took[0] < took[1]


def test_a_slow_disk_makes_answers_late() -> None:
    slow = a_fault(FaultKind.DISK_SLOW, 5, 60, node="", strength=1.0)
    took = [began(a_world([a_job(10, 5)], faults)) - 10 for faults in ([], [slow])]
    assert took[0] < 0.2 < took[1]


def began(world: World) -> float:
    """When the first job really begins, in seconds."""
    assert not world.run().violated
    return next(float(line.split()[0]) for line in world.log.lines if "job.1 begins" in line)


def test_a_clock_that_jumps_ahead_with_its_machine_ends_what_is_due_by_then() -> None:
    restart = a_fault(FaultKind.CONTROL_MACHINE_DIES, 30, 10, node="", strength=1.0)
    world = a_world([a_job(10, 60)], [restart])
    assert not world.run().violated
    assert world.control.clock_ahead_ms == round(JUMP_MS * (1 - JUMPS_FROM))
    assert world.control.now == world.queue.now + world.control.clock_ahead_ms


def test_the_stronger_of_two_faults_counts_until_it_is_over() -> None:
    weak, strong = (
        a_fault(FaultKind.SLOW_NODE, 10, 60, strength=0.1),
        a_fault(FaultKind.SLOW_NODE, 20, 20, strength=0.9),
    )
    world = a_world([], [weak, strong])
    seen = {}
    for at_s in (5, 15, 25, 45, 75):
        world.queue.at(BEGIN_MS + 1000 * at_s, lambda at_s=at_s: seen.update({at_s: world.machines["ash"].slowness}))
    assert not world.run().violated
    assert seen == {5: 1, 15: 4, 25: 18, 45: 4, 75: 1}


def test_a_stepped_wall_clock_makes_marks_older_or_of_now_until_the_next_one() -> None:
    world = a_world([a_job(10, 100, marks_ms=30_000)], [a_fault(FaultKind.CLOCK_STEPPED, 45, 100, strength=0.0)])
    ahead = a_world([a_job(10, 100, marks_ms=30_000)], [a_fault(FaultKind.CLOCK_STEPPED, 45, 100, strength=1.0)])
    seen: dict[tuple[str, int], int | None] = {}
    for name, one in (("back", world), ("ahead", ahead)):
        for at_s in (44, 46, 75):

            def look(name: str = name, one: World = one, at_s: int = at_s) -> None:
                (run,) = one.machines["ash"].running
                seen[name, at_s] = one.machines["ash"].mark_age_ms(run)

            one.queue.at(BEGIN_MS + 1000 * at_s, look)
        assert not one.run().violated
    assert seen["back", 46] == 0
    assert (seen["ahead", 46] or 0) > STEP_MS
    assert all((seen[name, at_s] or 0) < 30_000 for name in ("back", "ahead") for at_s in (44, 75))


def test_an_agent_that_lies_harms_its_own_jobs_at_most() -> None:
    jobs = [a_job(at, 40, uid=f"{on}{at}", on=on) for at in (10, 15, 20) for on in ("ash", "birch")]
    for strength in (0.1, 0.5, 0.9):
        world = a_world(jobs, [a_fault(FaultKind.AGENT_LIES, 5, 80, strength=strength)])
        told = lines(world)
        assert world.checker.liars == {"ash"}
        for at in (10, 15, 20):
            assert told.count(f"birch stopped birch{at} exited") == 1
            assert sum(line.startswith(f"birch birch{at}.") and "begins" in line for line in told) == 1


def test_jobs_that_ignore_sigterm_have_all_of_their_grace() -> None:
    def gone(*faults: Fault) -> float:
        world = a_world([a_job(10, 100, grace_s=20), a_cancel(30)], faults)
        assert not world.run().violated
        return next(float(line.split()[0]) for line in world.log.lines if "job.1 is gone" in line)

    assert gone() < 32
    assert 50 <= gone(a_fault(FaultKind.SIGTERM_IGNORED, 5, 80)) < 52


def test_scenarios_are_drawn_the_same_every_time() -> None:
    assert draw_scenario(5) == draw_scenario(5)
    assert draw_scenario(5) != draw_scenario(6)
    assert {kind for seed in range(60) for kind in {fault.kind for fault in draw_scenario(seed).faults}} == {*FaultKind}


@pytest.mark.parametrize("kind", [FaultKind.DISK_FULL, FaultKind.DISK_HANGS])
def test_a_disk_that_takes_nothing_for_longer_than_a_hold_ends_no_job(kind: FaultKind) -> None:
    told = lines(a_world([a_job(10, 100)], [a_fault(kind, 30, 90, node="")]))
    assert [line for line in told if "begins" in line] == ["ash job.1 begins under fence 100000001"]
    assert "ash stopped job exited" in told


def test_a_node_whose_disk_is_full_runs_on_what_it_runs_and_begins_nothing() -> None:
    world = a_world([a_job(10, 100)], [a_fault(FaultKind.NODE_DISK_FULL, 30, 90)])
    told = lines(world)
    assert [line for line in told if "begins" in line] == ["ash job.1 begins under fence 100000001"]
    assert "ash stopped job exited" in told


def test_a_node_that_joins_again_runs_a_job_again_only_when_the_old_one_is_gone() -> None:
    told = lines(a_world([a_job(10, 100)], [a_fault(FaultKind.DIRECTORY_LOST, 30, 1)]))
    first, gone = told.index("ash job.1 begins under fence 100000001"), told.index("ash job.1 is gone")
    again = next(at for at, line in enumerate(told) if "job.2 begins" in line)
    assert first < gone < again
    assert any("ash has no trace of it" in line for line in told[gone:again])


def test_a_hold_that_runs_out_without_a_disturbance_is_noticed() -> None:
    class Deaf(Machine):
        """A machine on whose disk no hold is ever renewed."""

        def hold(self, until_boot_ms: int) -> None:
            pass

    world = World(a_scenario([a_job(70, 100)]), machine=Deaf, keep_all=True)
    assert world.run().violated == "a healthy agent's holds are renewed"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_field_is_lied_about_within_the_types_of_the_wire(message: FromAgent) -> None:
    mutator = MessageMutator(Random(1), ("birch", "job2.1"))
    changed = set()
    for _ in range(400):
        said = mutator.mutate(message)
        assert decode_from_agent(encode(said)) == said
        assert type(said) is type(message)
        differs = [name for name, value in structs.asdict(said).items() if value != getattr(message, name)]
        assert len(differs) <= 1
        changed.update(differs)
    assert changed == set(message.__struct_fields__)
