"""The invariants of the grid, over random scripts and in state machines."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from distributed_grid.domain.leases import MAX_EPOCH, MAX_EPOCH_LEAD, NodeKind
from distributed_grid.domain.resources import Priority
from tests.simulation.invariants import INVARIANTS
from tests.support.builders import a_request
from tests.unit.reactor.state_machine import NAMES, NODES, OUTCOMES, PULLERS, USAGES, World

some_nodes = st.sampled_from([(), (), (), (), NAMES[:1], NAMES[1:2], NAMES[:2], NAMES[2:], ("nowhere",)])
whichever = st.integers(0, 7)
names = st.integers(0, len(NAMES) - 1)
kinds = st.integers(0, len(NODES) - 1)
pullers = st.integers(0, len(PULLERS) - 1)
incarnations = st.sampled_from(["one", "one", "two"])
usages = st.sampled_from([0, 0, 0, *range(len(USAGES))])
offs = st.sampled_from([0, 0, 0, 0, -1, 1, 1 << 32])
outcomes = st.integers(0, len(OUTCOMES) - 1)
moments = st.sampled_from([0, 1, 999, 1_000, 2_000, 2_000, 6_000, 6_001, 30_001, 61_000, 301_000, 86_400_000])
extras = st.sampled_from([-1, 0, 1, 60_000])
ages = st.sampled_from([-5_000, 0, 1, 1_500, 10_000, 10**12])


ASKS = (
    {"cores": 1},
    {"cores": 2},
    {"cores": 3, "memory_gb": 6},
    {"cores": 4},
    {"memory_gb": 12},
    {"cores": 0.5, "gpus": 0.3},
    {"gpus": 0.5, "gpu_memory_gb": 4},
    {"gpus": 0.7},
    {"cores": 1, "gpus": 1},
    {"gpus": 1, "gpu_memory_gb": 12},
    {"gpus": 2},
    {"custom": {"fpga": 1}},
    {"cores": 1, "custom": {"fpga": 2}},
    {"cores": 9},
)


# An ask of a size that a few of them fill a node, seldom impossible.
requests = st.builds(
    lambda ask, **wishes: a_request(**ask, **wishes),
    st.sampled_from((*ASKS[:4], *ASKS)),
    priority=st.sampled_from([*Priority, Priority.URGENT]),
    prefer=some_nodes,
    require=some_nodes,
    wait_s=st.sampled_from([300, 3600, 5, 0]),
    duration_s=st.sampled_from([0, 0, 2, 60, 7200]),
    target=st.sampled_from(["", "", *NAMES[:2]]),
)
modest_requests = st.builds(
    lambda ask, priority: a_request(**ask, priority=priority, wait_s=60),
    st.sampled_from([ASKS[0], ASKS[0], ASKS[1], ASKS[5], ASKS[6], ASKS[11]]),
    st.sampled_from([Priority.LOW, Priority.MEDIUM, Priority.HIGH]),
)
urgent_requests = st.builds(
    lambda ask, wait_s: a_request(**ask, priority=Priority.URGENT, wait_s=wait_s),
    st.sampled_from(ASKS[:-1]),
    st.sampled_from([0, 60]),
)


def action(name: str, *args):
    return st.tuples(st.just(name), st.tuples(*args))


ACTIONS = {
    "declare": (names, kinds),
    "heartbeat": (names, usages),
    "forget": (names,),
    "ask": (requests,),
    "urge": (urgent_requests,),
    "submit": (requests, st.sampled_from([0, 0, 1, 3])),
    "submit_sized": (requests, st.sampled_from([1, 4, 20]), st.sampled_from([0, 1])),
    "ask_again": (whichever, st.booleans()),
    "release": (whichever, st.booleans()),
    "extend": (whichever, extras),
    "cancel": (whichever, st.booleans()),
    "detach": (whichever,),
    "deliver": (whichever, st.sampled_from(["delivered", "delayed", "gone", "fetched"])),
    "started": (whichever, offs),
    "ended": (whichever, offs, outcomes),
    "displaced": (whichever, st.booleans()),
    "ship": (whichever, st.sampled_from(["", "", "it is gone"])),
    "started_too_soon": (whichever,),
    "listed": (names, st.integers(0, 2), st.sampled_from(["", "one", "two"])),
    "yield_to_owner": (names, st.booleans()),
    "jump_clock": (names, st.sampled_from([0, 3_600_000, -86_400_000]), st.booleans()),
    "drain": (names,),
    "want": (names, st.booleans()),
    "cool": (names, st.booleans()),
    "report_epoch": (names, st.sampled_from([-1, 0, 1, 5, MAX_EPOCH_LEAD, MAX_EPOCH_LEAD + 1, MAX_EPOCH])),
    "reject": (names,),
    "expire_starts": (names,),
    "claim": (names, st.integers(1, 5), st.sampled_from([1, 60_000])),
    "stop_node": (names,),
    "pause": (whichever, offs, st.booleans()),
    "mark": (whichever, offs, ages),
    "outgrow": (whichever, offs, st.sampled_from([1, 2, 5, 15, 40])),
    "spare": (st.sampled_from([0, 1_000, 5_000]), st.integers(0, 3)),
    "scale": (st.integers(0, 3), st.integers(0, 2)),
    "provide": (whichever, st.sampled_from([True, True, False])),
    "take_away": (whichever, st.sampled_from([None, 0, 2_000, 120_000]), st.sampled_from([False, False, True])),
    "look": (),
    "register": (pullers, incarnations),
    "submit_task": (modest_requests, st.sampled_from([0, 0, 1]), st.sampled_from([NodeKind.PULL, NodeKind.ANY])),
    "take": (pullers, incarnations, st.booleans()),
    "withdraw_ask": (pullers, incarnations),
    "reserve": (pullers, st.integers(1, 3)),
    "fill": (modest_requests, st.integers(2, 5)),
    "work": (st.sampled_from([0, 0, 1]),),
    "wait": (moments, st.sampled_from([True, True, True, False])),
    "jump": (moments,),
    "restart": (),
}
OFTEN = (
    "register",
    "submit_task",
    "take",
    "take",
    "ask",
    "submit",
    "submit",
    "submit_sized",
    "outgrow",
    "urge",
    "urge",
    "fill",
    "work",
    "wait",
    "wait",
)
SELDOM = (
    *("displaced", "displaced", "ship", "ship", "started_too_soon"),
    *("scale", "scale", "provide", "provide", "provide", "take_away"),
    *("register", "register", "submit_task", "submit_task", "take", "take", "take", "reserve"),
    "withdraw_ask",
    *(
        "declare",
        "forget",
        "ask_again",
        "extend",
        "detach",
        "deliver",
        "deliver",
        "started",
        "listed",
        "look",
        "jump",
        "restart",
    ),
    *(
        "yield_to_owner",
        "jump_clock",
        "drain",
        "want",
        "cool",
        "claim",
        "report_epoch",
        "reject",
        "expire_starts",
        "stop_node",
        "pause",
        "mark",
        "spare",
    ),
)
CALLS = {name: action(name, *args) for name, args in ACTIONS.items()}
scripts = st.lists(st.sampled_from([*ACTIONS, *OFTEN]).flatmap(CALLS.__getitem__), max_size=25)


def begin(world: World, first: int, second: int) -> None:
    """Two nodes that have been heard."""
    for which, kind in ((0, first), (1, second)):
        world.declare(which, kind)
        world.heartbeat(which, 0)


@settings(max_examples=150)
@given(first=kinds, second=kinds, script=scripts)
def test_every_invariant_holds_over_any_script(first: int, second: int, script: list[tuple[str, tuple]]):
    world = World(*INVARIANTS)
    begin(world, first, second)
    for name, args in script:
        getattr(world, name)(*args)


class AnythingMayHappen(RuleBasedStateMachine):
    """All invariants at once, over longer lives than a script has."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(*INVARIANTS)

    @initialize(first=kinds, second=kinds)
    def begin(self, first, second):
        begin(self.world, first, second)

    @rule(request=requests)
    def a_lease_is_asked_for(self, request):
        self.world.ask(request)

    @rule(request=requests, retries=st.sampled_from([0, 1, 3]))
    def a_job_is_submitted(self, request, retries):
        self.world.submit(request, retries)

    @rule(request=requests, first_gb=st.sampled_from([1, 4, 20]), retries=st.sampled_from([0, 1]))
    def a_job_without_stated_needs_is_submitted(self, request, first_gb, retries):
        self.world.submit_sized(request, first_gb, retries)

    @rule(which=whichever, off=offs, held_gb=st.sampled_from([1, 2, 5, 15, 40]))
    def a_job_outgrows_its_lease(self, which, off, held_gb):
        self.world.outgrow(which, off, held_gb)

    @rule(request=modest_requests, jobs=st.integers(2, 5))
    def the_grid_fills_up(self, request, jobs):
        self.world.fill(request, jobs)

    @rule(request=urgent_requests)
    def somebody_is_in_a_hurry(self, request):
        self.world.urge(request)

    @rule(which=names, usage=usages)
    def a_node_is_heard(self, which, usage):
        self.world.heartbeat(which, usage)

    @rule(ms=moments, heard=st.sampled_from([True, True, True, False]))
    def time_passes(self, ms, heard):
        self.world.wait(ms, heard)

    @rule(every=st.sampled_from([0, 0, 1]))
    def the_agents_do_their_work(self, every):
        self.world.work(every)

    @rule(which=whichever, off=offs, outcome=outcomes)
    def an_attempt_ends(self, which, off, outcome):
        self.world.ended(which, off, outcome)

    @rule(which=whichever, twice=st.booleans())
    def a_lease_is_released(self, which, twice):
        self.world.release(which, twice)

    @rule(which=whichever, twice=st.booleans())
    def a_job_is_cancelled(self, which, twice):
        self.world.cancel(which, twice)

    @rule(seldom=st.sampled_from(SELDOM).flatmap(CALLS.__getitem__))
    def something_rare_happens(self, seldom):
        name, args = seldom
        getattr(self.world, name)(*args)


class EverybodyIsInAHurry(RuleBasedStateMachine):
    """One small node, full of modest jobs; the urgent push in, and the agent stops one victim at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(*INVARIANTS)
        self.world.declare(0, 1)
        self.world.heartbeat(0, 0)

    @initialize(ask=st.sampled_from([ASKS[0], ASKS[0], ASKS[1], ASKS[6]]))
    def the_node_is_full(self, ask):
        self.world.fill(a_request(**ask, priority=Priority.LOW), 4)

    @rule(ask=st.sampled_from([*ASKS[:4], *ASKS[6:10]]))
    def somebody_pushes_in(self, ask):
        self.world.submit(a_request(**ask, priority=Priority.URGENT), 0)

    @rule(request=urgent_requests)
    def somebody_wants_a_lease_at_once(self, request):
        self.world.ask(request)

    @rule(which=whichever)
    def one_victim_is_gone(self, which):
        self.world.vanish(which)

    @rule(which=whichever, age_ms=ages)
    def a_checkpoint_is_marked(self, which, age_ms):
        self.world.mark(which, 0, age_ms)

    @rule(cap=st.integers(0, 2))
    def the_cap_is_set_anew(self, cap):
        self.world.spare(1_000, cap)

    @rule(which=whichever)
    def an_attempt_starts_whether_it_may_or_not(self, which):
        self.world.started_too_soon(which)

    @rule()
    def the_agent_starts_what_it_may(self):
        self.world.work(0, stops=False)

    @rule(which=whichever)
    def somebody_gives_up(self, which):
        self.world.cancel(which, twice=False)

    @rule(request=modest_requests)
    def more_work_comes(self, request):
        self.world.fill(request, 1)

    @rule(ms=st.sampled_from([0, 1_000, 2_000]))
    def a_moment_passes(self, ms):
        self.world.wait(ms, heard=True)


AnythingMayHappen.TestCase.settings = settings(max_examples=35, stateful_step_count=30)
EverybodyIsInAHurry.TestCase.settings = settings(max_examples=60, stateful_step_count=20)
# A few seconds of work, which a busy machine may make minutes of.
patiently = pytest.mark.timeout(600)
test_all_laws_hold_whatever_happens = patiently(AnythingMayHappen.TestCase)
test_all_laws_hold_when_everybody_is_in_a_hurry = patiently(EverybodyIsInAHurry.TestCase)
