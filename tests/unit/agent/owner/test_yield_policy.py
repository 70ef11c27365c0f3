"""Borrowed work gives way at once, comes back slowly, and ends up beside the owner whatever the owner does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.agent.owner.yield_policy import (
    CONFLICT_MS,
    EVICT_AFTER_MS,
    EVICTION_COST,
    FLOOR_MILLI,
    GPU_SAMPLES,
    MAX_DWELL_MS,
    PAUSE_AFTER_MS,
    URGENT_GRACE_MS,
    WORTH_BYTES,
    Action,
    Borrowed,
    CancelEviction,
    Continue,
    Evict,
    OwnerOnGpu,
    OwnerState,
    Pause,
    Throttle,
    UsageSample,
    Warn,
    YieldStep,
    cheapest,
    decide,
    throttle_of,
)
from distributed_grid.wire import OwnerRules

GB = 1024**3
SAMPLE_MS = 250
RULES = OwnerRules(
    cpu_busy_max_milli=300,
    memory_used_max_milli=500,
    memory_min_bytes=2 * GB,
    gpu_busy_max_milli=200,
    gpu_memory_min_bytes=GB,
)


def an_attempt(attempt_id: str = "a.1", **changes: object) -> Borrowed:
    return replace(Borrowed(attempt_id, "gpu2"), **changes)


@dataclass
class Machine:
    """A machine whose owner wants `owner_milli`, and whose scheduler divides what is wanted too much by want."""

    cores: int = 2
    wanted_milli: int = 2000
    leases: bool = True
    rules: OwnerRules = RULES
    state: OwnerState = field(default_factory=OwnerState)
    now_ms: int = 0
    outside_milli: int = 0
    own_milli: int = 0
    happened: list[tuple[int, Action]] = field(default_factory=list)
    may_run_again: bool = True

    def borrowed_may(self) -> int:
        grip = throttle_of(self.state)
        if self.state.step is YieldStep.PAUSED:
            return 0
        cores = self.cores if grip.cores is None else grip.cores
        return min(self.wanted_milli, cores * grip.running_milli)

    def live(self, ms: int, owner_milli: int, noise: list[int] | None = None) -> None:
        noise = noise or [0]
        machine = 1000 * self.cores
        for number in range(ms // SAMPLE_MS):
            self.now_ms += SAMPLE_MS
            wanted, may = min(owner_milli, machine), self.borrowed_may()
            crowded = max(1000, (wanted + may) * 1000 // machine)
            self.outside_milli, self.own_milli = wanted * 1000 // crowded, may * 1000 // crowded
            seen = max(0, self.outside_milli + noise[number % len(noise)])
            cpu_milli = self.wanted_milli if self.leases else 0
            attempts = (an_attempt(cpu_milli=cpu_milli, may_run_again=self.may_run_again),)
            sample = UsageSample(machine, min(machine, seen), self.own_milli, attempts, 16 * GB, 8 * GB, 2 * GB)
            self.state, actions = decide(self.state, sample, self.rules, self.now_ms)
            self.happened += [(self.now_ms, action) for action in actions]

    def steps(self) -> list[Action]:
        return [action for _, action in self.happened]


def test_a_full_machine_without_an_owner_is_left_alone() -> None:
    machine = Machine()
    machine.live(60_000, owner_milli=20)
    assert machine.steps() == []


def test_an_owner_who_fits_beside_what_is_lent_changes_nothing() -> None:
    machine = Machine(cores=4, wanted_milli=2000)
    machine.live(60_000, owner_milli=1500)
    assert machine.steps() == []


def test_the_first_look_that_shows_the_owner_hands_almost_everything_back() -> None:
    machine = Machine()
    machine.live(SAMPLE_MS, owner_milli=2000)
    assert machine.steps() == [Throttle(1, FLOOR_MILLI)]
    assert machine.state.yields


def test_the_second_look_gives_back_what_the_owner_does_not_want() -> None:
    machine = Machine(cores=8, wanted_milli=8000)
    machine.live(3 * SAMPLE_MS, owner_milli=2000)
    assert machine.steps() == [Throttle(1, FLOOR_MILLI), Throttle(5)]
    machine.live(10_000, owner_milli=2000)
    assert (machine.outside_milli, len(machine.steps())) == (2000, 2)


def test_an_owner_who_takes_everything_pauses_then_evicts() -> None:
    machine = Machine()
    machine.live(PAUSE_AFTER_MS + 2 * SAMPLE_MS, owner_milli=4000)
    assert [type(action) for action in machine.steps()] == [Throttle, Pause]
    assert machine.steps()[-1] == Pause("its owner uses 2.0 of 2 cores")
    machine.live(EVICT_AFTER_MS + RULES.notice_ms, owner_milli=4000)
    why = "its owner needs gpu2's CPU: 2.0 of 2 cores"
    assert machine.steps()[2:] == [Warn("a.1", why, RULES.notice_ms), Evict("a.1", why, RULES.grace_ms)]
    warned, evicted = (at for at, action in machine.happened[2:])
    assert evicted - warned == RULES.notice_ms


def test_work_that_may_not_run_again_stays_paused_beside_an_owner_who_takes_everything() -> None:
    machine = Machine(may_run_again=False)
    machine.live(2 * EVICT_AFTER_MS, owner_milli=4000)
    assert [type(action) for action in machine.steps()] == [Throttle, Pause]
    machine.live(5_000, owner_milli=0)
    assert machine.steps()[-1] == Continue()


def test_work_that_may_not_run_again_is_evicted_where_the_rules_allow_nothing_gentler() -> None:
    machine = Machine(may_run_again=False, rules=replace(RULES, throttle=False, pause=False))
    machine.live(EVICT_AFTER_MS, owner_milli=4000)
    assert isinstance(machine.steps()[-1], Evict)


def test_when_the_owner_goes_everything_runs_freely_within_a_few_seconds() -> None:
    machine = Machine()
    machine.live(10_000, owner_milli=2000)
    assert machine.state.step is YieldStep.PAUSED
    machine.live(3_000, owner_milli=0)
    assert machine.steps()[-2:] == [Throttle(), Continue()]
    assert not machine.state.yields


def test_who_was_warned_is_spared_when_the_owner_goes() -> None:
    machine = Machine(rules=replace(RULES, notice_ms=10_000))
    machine.live(EVICT_AFTER_MS + 1_000, owner_milli=2000)
    assert isinstance(machine.steps()[-1], Warn)
    machine.live(5_000, owner_milli=0)
    assert machine.steps()[-1] == CancelEviction("a.1")
    assert not machine.state.yields


def test_steps_that_the_rules_leave_out_are_skipped() -> None:
    harmless = Machine(rules=replace(RULES, throttle=False, pause=False, evict=False))
    harmless.live(200_000, owner_milli=2000)
    assert harmless.steps() == []
    only_pause = Machine(rules=replace(RULES, throttle=False, evict=False))
    only_pause.live(200_000, owner_milli=2000)
    assert [type(action) for action in only_pause.steps()] == [Throttle, Pause]
    only_throttle = Machine(rules=replace(RULES, pause=False, evict=False))
    only_throttle.live(200_000, owner_milli=2000)
    assert only_throttle.steps() == [Throttle(1, FLOOR_MILLI)]
    only_evict = Machine(rules=replace(RULES, throttle=False, pause=False))
    only_evict.live(60_000, owner_milli=0)
    only_evict.live(CONFLICT_MS, owner_milli=2000)
    assert only_evict.steps() == []
    only_evict.live(RULES.notice_ms + 2 * SAMPLE_MS, owner_milli=2000)
    assert [type(action) for action in only_evict.steps()] == [Warn, Evict]


def test_only_paused_work_goes_on_when_all_of_it_fits() -> None:
    machine = Machine(cores=4, wanted_milli=2000, rules=replace(RULES, throttle=False))
    machine.live(2_000, owner_milli=4000)
    machine.live(5_000, owner_milli=2500)
    while_busy = machine.state.step
    machine.live(5_000, owner_milli=1000)
    assert (while_busy, machine.state.step) == (YieldStep.PAUSED, YieldStep.FREE)


MACHINES = st.sampled_from([1, 2, 4, 16, 64])
NOISE = st.lists(st.integers(-60, 60), min_size=1, max_size=40)


@given(MACHINES, st.integers(0, 1500), st.integers(1, 1000), st.booleans(), NOISE)
def test_any_constant_owner_ends_up_with_all_it_wants(
    cores: int, owner_part: int, wanted_part: int, leases: bool, noise: list[int]
) -> None:
    owner = cores * owner_part
    machine = Machine(cores, cores * wanted_part, leases, rules=replace(RULES, evict=False))
    machine.live(20_000, owner, noise)
    machine.live(60_000, owner, noise)
    wanted = min(owner, 1000 * cores)
    assert machine.outside_milli + machine.own_milli <= 1000 * cores
    noticed = max(210, 10 * cores + 60)  # below this an owner may go unnoticed
    assert machine.outside_milli >= 0.9 * wanted - noticed


@given(MACHINES, st.integers(0, 1500), st.integers(1, 1000), st.booleans(), NOISE)
def test_a_constant_owner_is_not_answered_with_constant_changes(
    cores: int, owner_part: int, wanted_part: int, leases: bool, noise: list[int]
) -> None:
    machine = Machine(cores, cores * wanted_part, leases, rules=replace(RULES, evict=False))
    machine.live(30_000, cores * owner_part, noise)
    machine.happened.clear()
    machine.live(60_000, cores * owner_part, noise)
    assert len(machine.happened) <= 4, machine.happened


CURVES = st.lists(st.tuples(st.integers(0, 1500), st.integers(1, 40)), min_size=1, max_size=25)


@given(MACHINES, CURVES, st.booleans(), st.booleans())
def test_after_any_history_an_absent_owner_means_freedom(
    cores: int, curve: list[tuple[int, int]], throttle: bool, pause: bool
) -> None:
    machine = Machine(cores, 1000 * cores, True, rules=replace(RULES, throttle=throttle, pause=pause, evict=False))
    for part, samples in curve:
        machine.live(SAMPLE_MS * samples, cores * part)
    machine.live(2 * MAX_DWELL_MS, owner_milli=0)
    assert machine.state.step is YieldStep.FREE
    assert throttle_of(machine.state) == Throttle()
    pauses = [action for action in machine.steps() if isinstance(action, Pause | Continue)]
    assert all(isinstance(action, Continue) == bool(at % 2) for at, action in enumerate(pauses))
    assert len(pauses) % 2 == 0


@given(MACHINES, CURVES)
def test_a_wild_owner_waits_longer_and_longer_before_work_comes_back(cores: int, curve: list[tuple[int, int]]) -> None:
    machine = Machine(cores, 1000 * cores, True, rules=replace(RULES, evict=False))
    for part, samples in curve * 4:
        machine.live(SAMPLE_MS * samples, cores * part)
    grips = [(at, action) for at, action in machine.happened if isinstance(action, Throttle)]
    frees = [(at, at - before) for (before, _), (at, action) in pairwise(grips) if action == Throttle()]
    probes = [at for at, since in frees if since < 2_000]  # one squeeze in five seconds may be given back at once
    assert all(later - earlier >= 3_000 for earlier, later in pairwise(probes))


# ---------------------------------------------------------------------- memory and GPUs


def decide_all(samples: list[UsageSample], rules: OwnerRules = RULES) -> list[Action]:
    state = OwnerState()
    happened: list[Action] = []
    for number, sample in enumerate(samples):
        state, actions = decide(state, sample, rules, number * SAMPLE_MS)
        happened += actions
    return happened


def short(free_gb: float, *attempts: Borrowed, owner_gb: float = 10) -> UsageSample:
    return UsageSample(4000, 0, 0, attempts, 16 * GB, int(free_gb * GB), int(owner_gb * GB))


def test_memory_comes_back_by_ending_the_youngest_that_is_enough() -> None:
    old = an_attempt("old", memory_bytes=2 * GB)
    young = an_attempt("young", memory_bytes=GB)
    small = an_attempt("small", memory_bytes=GB // 4)
    why = "its owner needs gpu2's memory: 1.5 GB free, 2.0 GB must be"
    assert decide_all([short(1.5, old, young, small)]) == [Warn("young", why, RULES.notice_ms)]


def test_a_warning_is_taken_back_when_the_owner_gives_memory_back() -> None:
    job = an_attempt(memory_bytes=2 * GB)
    happened = decide_all([short(1, job), short(3, job)])
    assert [type(action) for action in happened] == [Warn, CancelEviction]


def test_a_machine_about_to_swap_does_not_wait() -> None:
    job = an_attempt(memory_bytes=2 * GB)
    (evicted,) = decide_all([short(0.5, job)])
    assert isinstance(evicted, Evict)
    assert evicted.grace_ms == URGENT_GRACE_MS


def test_a_job_within_its_lease_is_not_blamed_for_using_it() -> None:
    job = an_attempt(memory_leased_bytes=12 * GB, memory_bytes=12 * GB)
    assert decide_all([short(0.5, job, owner_gb=3.5)] * 10) == []
    assert decide_all([short(0.5, job, owner_gb=4.5)]) != []


def test_nobody_is_ended_for_memory_not_worth_it() -> None:
    assert decide_all([short(0.5, an_attempt(memory_bytes=WORTH_BYTES - 1))] * 10) == []


def test_without_eviction_memory_stays_lent() -> None:
    assert decide_all([short(0.5, an_attempt(memory_bytes=4 * GB))] * 10, replace(RULES, evict=False)) == []


def test_two_who_lose_little_go_before_one_who_loses_much() -> None:
    hours = an_attempt("hours", memory_bytes=4 * GB, at_stake=100 * EVICTION_COST)
    marked = [an_attempt(f"marked{number}", memory_bytes=GB, at_stake=EVICTION_COST) for number in range(3)]
    warned = decide_all([short(0.9, hours, *marked)])
    assert [one.attempt_id for one in warned if isinstance(one, Warn)] == ["marked2", "marked1"]


def test_one_goes_rather_than_two_who_lose_about_the_same() -> None:
    wide = an_attempt("wide", memory_bytes=2 * GB, at_stake=3 * EVICTION_COST)
    narrow = [an_attempt(f"narrow{number}", memory_bytes=GB, at_stake=EVICTION_COST + 1) for number in range(2)]
    (warned,) = decide_all([short(0.9, wide, *narrow)])
    assert isinstance(warned, Warn)
    assert warned.attempt_id == "wide"


HOLDINGS = st.lists(st.tuples(st.integers(0, 8 * 1024), st.integers(0, 50)), max_size=8).map(
    lambda each: tuple(
        an_attempt(f"a.{number}", memory_bytes=size * 1024**2, at_stake=stake * EVICTION_COST // 5)
        for number, (size, stake) in enumerate(each)
    )
)


@given(HOLDINGS, st.integers(1, 40 * 1024))
def test_no_others_would_lose_less(attempts: tuple[Borrowed, ...], short_mb: int) -> None:
    def price(gone: Iterable[Borrowed]) -> int:
        return sum(EVICTION_COST + one.at_stake for one in gone)

    chosen = cheapest(attempts, short_mb * 1024**2)
    worth = [one for one in attempts if one.memory_bytes >= WORTH_BYTES]
    sets = [gone for size in range(len(worth) + 1) for gone in combinations(worth, size)]
    enough = [gone for gone in sets if sum(one.memory_bytes for one in gone) >= short_mb * 1024**2]
    if enough:
        assert chosen in [tuple(reversed(gone)) for gone in enough]
        assert price(chosen) == min(price(gone) for gone in enough)
    else:
        assert set(chosen) == set(worth)


@given(HOLDINGS, st.integers(1, 40 * 1024), st.integers(0, 7))
def test_who_is_going_already_stays_among_those_who_go(
    attempts: tuple[Borrowed, ...], short_mb: int, first: int
) -> None:
    worth = [one for one in attempts if one.memory_bytes >= WORTH_BYTES][first : first + 1]
    chosen = cheapest(attempts, short_mb * 1024**2, [one.attempt_id for one in worth])
    assert set(worth) <= set(chosen)


def test_a_gpu_goes_back_when_its_owner_is_seen_several_times() -> None:
    job = an_attempt(gpu_indexes=(1,))
    other = an_attempt("other", gpu_indexes=(0,))
    owner = (OwnerOnGpu(0, 0, 8 * GB), OwnerOnGpu(1, 900, 8 * GB))
    seen = UsageSample(4000, 0, 0, (job, other), 16 * GB, 8 * GB, 0, owner)
    assert decide_all([seen] * (GPU_SAMPLES - 1)) == []
    unseen = replace(seen, gpus=None)
    (warned,) = decide_all([seen, unseen, seen, unseen, seen])
    assert warned == Warn("a.1", "its owner needs gpu2's GPU 1", RULES.notice_ms)


def test_a_gpu_without_memory_left_goes_back_too() -> None:
    seen = UsageSample(4000, 0, 0, (an_attempt(gpu_indexes=(0,)),), 16 * GB, 8 * GB, 0, (OwnerOnGpu(0, 0, GB - 1),))
    assert [type(action) for action in decide_all([seen] * 3)] == [Warn]


def test_the_time_is_up_after_the_notice() -> None:
    job = an_attempt(memory_bytes=2 * GB)
    samples = RULES.notice_ms // SAMPLE_MS
    assert [type(action) for action in decide_all([short(1, job)] * samples)] == [Warn]
    assert [type(action) for action in decide_all([short(1, job)] * (samples + 5))] == [Warn, Evict]
    at_once = decide_all([short(1, job)], replace(RULES, notice_ms=0))
    assert [type(action) for action in at_once] == [Evict]
