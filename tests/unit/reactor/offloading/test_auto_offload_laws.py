"""Whatever the load does: automatic offloading never moves what it may not, nor too often, nor back and forth."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_grid.domain.jobs import Ending, Outcome
from distributed_grid.domain.moves import Move, OffloadRules, Way
from distributed_grid.domain.rebalancing import SHARING_POLICIES, Forecast, PressureReading, SharingMode
from distributed_grid.domain.resources import Priority
from distributed_grid.domain.states import JobState, MoveState
from distributed_grid.scheduling.pressure.relief import HOUR_MS
from tests.support.offload_looks import Looks, apart, rebalance_rules

NAMES = ("ash", "birch", "cedar")
LEVELS = st.sampled_from([None, 0, 300, 699, 700, 790, 801, 900, 1000])
JOBS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.sampled_from([0.5, 2, 8]),
        st.booleans(),  # restartable
        st.booleans(),  # marks checkpoints
        st.sampled_from([0, 60, 3600, 86_400]),
        st.sampled_from([Priority.LOW, Priority.MEDIUM]),
    ),
    max_size=6,
).filter(lambda jobs: all(sum(job[1] for job in jobs if job[0] == name) <= 32 for name in NAMES))
"""Jobs that fit on the nodes that they prefer."""
ROUNDS = st.lists(
    st.tuples(
        st.tuples(*(st.tuples(LEVELS, LEVELS) for _ in NAMES)),
        st.sampled_from([None, Forecast(950, 5)]),
        st.sampled_from(["start", "start", "drain", "nothing"]),
        st.sampled_from([60, 60, 60, 600, 4000]),
    ),
    max_size=14,
)
RULES = st.tuples(st.sampled_from([*SharingMode]), st.sampled_from([*SHARING_POLICIES]))


class Lawful(Looks):
    """Looks that are held against the rules as they go."""

    def __init__(self, mode: str, policy: str) -> None:
        super().__init__(*apart(*NAMES), rules=rebalance_rules(mode, policy), offload=OffloadRules(enabled=True))
        self.begun: dict[str, list[Move]] = defaultdict(list)
        self.given: dict[str, list[int]] = defaultdict(list)
        self.seen: set[str] = set()

    def hold_to_the_rules(self, above: dict[str, list[bool]]) -> None:
        """What moves now may, not too often, and only off a node that was above at this look and the last one."""
        for move in self.ledger.moves.values():
            if move.id in self.seen:
                continue
            self.seen.add(move.id)
            job = self.ledger.jobs[move.job]
            assert move.automatic
            assert move.process is None
            assert move.way in (Way.CHECKPOINT_RESTART, Way.RESTART)
            assert job.restartable or any(one.marked_at_ms for one in job.attempts)
            before = self.begun[move.job]
            assert all(self.now - one.requested_at_ms >= HOUR_MS for one in before)
            cooldown = self.offload.cooldown_ms
            assert all(self.now - at >= cooldown for at in (*self.given[move.source], *self.given[move.target]))
            if self.rules.mode is not SharingMode.DYNAMIC_BALANCING:
                assert above[move.source][-2:] == [True, True]
            assert not above[move.target][-1]
            assert move.target not in self.ledger.degraded
            before.append(move)
            for name in (move.source, move.target):
                self.given[name].append(self.now)
        sources = [move.source for move in self.ledger.moves.values()]
        assert len(sources) == len(set(sources))

    def let_agents_act(self, what: str) -> None:
        for move in list(self.ledger.moves.values()):
            job = self.ledger.jobs[move.job]
            if what != "nothing" and move.state is MoveState.DECIDED and job.state is JobState.STOPPING:
                self.end(move.job, Outcome(Ending.MOVED))
                self.start(move.job)


@settings(max_examples=60, deadline=None)
@given(RULES, JOBS, ROUNDS)
def test_it_moves_only_what_it_may_and_never_too_often(rules, jobs, rounds):
    grid = Lawful(*rules)
    for at, (node, memory_gb, restartable, marks, expected_s, priority) in enumerate(jobs):
        uid = f"r{at}"
        grid.run_job(uid, node, memory_gb=memory_gb, restartable=restartable, expected_s=expected_s, priority=priority)
        if marks:
            grid.mark(uid)
    above: dict[str, list[bool]] = defaultdict(list)
    for levels, forecast, act, seconds in rounds:
        readings = {
            name: _reading(name, memory, cpu, forecast) for name, (memory, cpu) in zip(NAMES, levels, strict=True)
        }
        for name, one in readings.items():
            known = [level for level in (one.memory, one.cpu) if level is not None]
            above[name].append(any(level > 800 for level in known))
        grid.look(**readings)
        grid.hold_to_the_rules(above)
        for name in grid.ledger.degraded:
            assert grid.ledger.lends(name).memory_bytes == 0
        grid.let_agents_act(act)
        grid.advance(seconds)
        grid.ledger.check()
    calm = {name: PressureReading(node=name, score=0, memory=0, cpu=0) for name in NAMES}
    grid.looks(3, **calm)
    assert not grid.ledger.degraded  # everything is undone


def _reading(name: str, memory: int | None, cpu: int | None, forecast: Forecast | None) -> PressureReading:
    if memory is None or cpu is None:
        return PressureReading(node=name)
    return PressureReading(node=name, score=(memory + cpu) // 2, memory=memory, cpu=cpu, memory_ahead=forecast)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([*SharingMode]), st.sampled_from([*SHARING_POLICIES]), st.integers(1, 4), st.integers(12, 40))
def test_two_nodes_do_not_play_ping_pong(mode, policy, jobs, looks):
    """The load follows the jobs: a node is at what its jobs hold besides a load of its own."""
    grid = Lawful(mode, policy)
    for at in range(jobs):
        grid.run_job(f"r{at}", "ash", memory_gb=8 if at % 2 else 4)
        grid.mark(f"r{at}")
    above: dict[str, list[bool]] = defaultdict(list)
    for _ in range(looks):
        used = {name: 600 if name == "ash" else 100 for name in NAMES}
        for lease in grid.ledger.leases.values():
            if lease.holds and lease.claim is not None and lease.job:
                used[lease.node] += 1000 * lease.claim.memory_bytes // (32 * 1024**3)
        grid.look(**{name: (min(level, 1000), 100) for name, level in used.items()})
        for name, level in used.items():
            above[name].append(level > 800)
        grid.hold_to_the_rules(above)
        grid.let_agents_act("start")
        grid.advance(60)
    trips = [(move.source, move.target) for moves in grid.begun.values() for move in moves]
    assert not any((to, source) in trips for source, to in trips)
    assert all(len(moves) == 1 for moves in grid.begun.values())


def test_pressure_that_follows_a_job_moves_it_once_an_hour():
    """Whichever node has the job is the pressed one: without the rule it would move after every rest."""
    grid = Lawful("offload_only", "aggressive")
    grid.run_job("r0", "ash", expected_s=10 * 86_400)
    above: dict[str, list[bool]] = defaultdict(list)
    for _ in range(4 * 60):
        attempt = grid.job("r0").attempt
        assert attempt is not None
        grid.mark("r0")
        for name in NAMES:
            above[name].append(name == attempt.node)
        grid.look(**{attempt.node: (100, 900)})
        grid.hold_to_the_rules(above)
        grid.let_agents_act("start")
        grid.advance(60)
    assert 3 <= len(grid.begun["r0"]) <= 4
