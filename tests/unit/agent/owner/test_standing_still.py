"""Attempts that stand still for their node, beside an owner who may want that, too."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.agent.owner.guard import NODE_PAUSE_MS, OwnerGuard
from distributed_grid.agent.owner.yield_policy import Borrowed, UsageSample, YieldStep
from distributed_grid.wire import OwnerRules

GB = 1024**3
NAMES = ("a.1", "b.1", "c.1")
RULES = OwnerRules(
    cpu_busy_max_milli=300,
    memory_used_max_milli=800,
    memory_min_bytes=0,
    gpu_busy_max_milli=1000,
    gpu_memory_min_bytes=0,
    evict=False,
)


class StandingWork:
    """Borrowed work that remembers who stands still; its owner uses so much of four cores."""

    def __init__(self) -> None:
        self.attempts = list(NAMES)
        self.still: set[str] = set()
        self.owner_milli = 0
        self.said: list[tuple[str, bool, str]] = []

    def running(self) -> list[str]:
        return self.attempts

    def sample(self) -> UsageSample | None:
        here = tuple(Borrowed(one, "here", 1000, GB, GB) for one in self.attempts)
        own = 4000 - self.owner_milli if len(self.still) < len(here) else 0
        return UsageSample(4000, self.owner_milli, own, here, 16 * GB, 12 * GB, GB) if here else None

    def throttle(self, cores: int | None, running_milli: int) -> None: ...

    def pause(self, spared: frozenset[str]) -> list[tuple[str, int]]:
        fresh = [one for one in self.attempts if one not in spared and one not in self.still]
        self.still.update(fresh)
        return [(one, 7) for one in fresh]

    def resume(self, attempt_id: str | None = None) -> None:
        self.still -= self.still if attempt_id is None else {attempt_id}

    def release(self) -> None:
        self.still.clear()

    def give_notice(self, attempt_id: str, why: str, in_ms: int) -> int:
        return in_ms

    def withdraw_notice(self, attempt_id: str) -> None: ...

    async def evict(self, attempt_id: str, why: str, grace_ms: int) -> None: ...


class Guarded:
    """A guard over such work, with a clock that the test moves."""

    def __init__(self, rules: OwnerRules | None = RULES) -> None:
        self.work, self.now = StandingWork(), 1000
        self.guard = OwnerGuard(self.work, lambda: self.now, report_pause=self._said)
        self.guard.rules = rules

    def _said(self, attempt_id: str, fence: int, paused: bool, why: str) -> None:
        assert fence == 7
        self.work.said.append((attempt_id, paused, why))

    def wait(self, ms: int) -> None:
        for _ in range(ms // 250):
            self.now += 250
            asyncio.run(self.guard.observe())

    def paused_by_owner(self) -> bool:
        return self.guard.state.step is YieldStep.PAUSED


def test_an_attempt_stands_still_at_once_and_goes_on_when_told_so() -> None:
    one = Guarded()
    one.guard.pause_for_node("a.1", 7, "ash is degraded")
    assert one.work.still == {"a.1"}
    one.guard.pause_for_node("a.1", 7, "ash is degraded")
    one.guard.resume("a.1")
    one.guard.resume("a.1")
    assert one.work.still == set()
    assert one.work.said == [("a.1", True, "ash is degraded"), ("a.1", False, "")]


def test_it_goes_on_by_itself_when_nobody_says_so_again() -> None:
    one = Guarded(rules=None)  # also on a machine whose owner has set no rules
    one.guard.pause_for_node("a.1", 7, "why")
    one.wait(NODE_PAUSE_MS - 1000)
    one.guard.pause_for_node("a.1", 7, "why")
    one.wait(NODE_PAUSE_MS - 1000)
    assert one.work.still == {"a.1"}
    one.wait(2000)
    assert one.work.still == set()
    assert one.work.said[-1] == ("a.1", False, "")


def test_what_the_owner_wants_still_stays_so_when_its_node_does_not_need_it_any_more() -> None:
    one = Guarded()
    one.guard.pause_for_node("a.1", 7, "why")
    one.work.owner_milli = 3950
    one.wait(10_000)
    assert one.paused_by_owner()
    assert one.work.still == set(NAMES)
    one.guard.resume("a.1")
    assert one.work.still == set(NAMES)
    one.work.owner_milli = 0
    one.wait(10_000)
    assert one.work.still == set()


def test_what_its_node_wants_still_stays_so_when_the_owner_has_gone() -> None:
    one = Guarded()
    one.work.owner_milli = 3950
    one.wait(10_000)
    one.guard.pause_for_node("a.1", 7, "why")
    one.work.owner_milli = 0
    one.wait(10_000)
    assert not one.paused_by_owner()
    assert one.work.still == {"a.1"}
    assert ("a.1", False, "") not in one.work.said
    one.guard.resume("a.1")
    assert one.work.still == set()


def test_who_has_to_make_room_may_read_its_notice() -> None:
    one = Guarded()
    one.guard.pause_for_node("a.1", 7, "why")
    one.guard.displace("a.1", "for another", 1000)
    one.wait(1000)
    assert one.work.still == set()


def test_when_the_agent_stops_nothing_is_left_standing() -> None:
    one = Guarded()
    one.guard.pause_for_node("a.1", 7, "why")
    one.guard.release()
    assert one.work.still == set()
    assert one.work.said[-1] == ("a.1", False, "")


STEPS = st.one_of(
    st.tuples(st.just("still"), st.sampled_from(NAMES)),
    st.tuples(st.just("on"), st.sampled_from(NAMES)),
    st.tuples(st.just("owner"), st.sampled_from([0, 3950])),
    st.tuples(st.just("wait"), st.sampled_from([250, 1000, 10_000])),
    st.tuples(st.just("end"), st.sampled_from(NAMES)),
)


@given(st.lists(STEPS, max_size=30))
def test_nobody_stands_still_whom_neither_owner_nor_node_wants_to(steps: list[tuple[str, str | int]]) -> None:
    one, wanted = Guarded(), dict[str, int]()
    for what, value in steps:
        if what == "still" and value in one.work.attempts:
            one.guard.pause_for_node(str(value), 7, "why")
            wanted[str(value)] = one.now
        elif what == "on":
            one.guard.resume(str(value))
            wanted.pop(str(value), None)
        elif what == "owner":
            one.work.owner_milli = int(value)
        elif what == "wait":
            one.wait(int(value))
        elif what == "end" and value in one.work.attempts:
            one.work.attempts.remove(str(value))
            one.work.still.discard(str(value))
            wanted.pop(str(value), None)
        wanted = {name: at for name, at in wanted.items() if one.now - at < NODE_PAUSE_MS}
        one.wait(250)
        still = {name for name in one.work.still if name in one.work.attempts}
        if one.paused_by_owner():
            assert still == set(one.work.attempts)
        else:
            assert still == {name for name, at in wanted.items() if one.now - at < NODE_PAUSE_MS}
    last = {name: paused for name, paused, _ in one.work.said}
    assert {name for name, paused in last.items() if paused and name in one.work.attempts} == {
        name for name in one.work.still if name in one.work.attempts
    }
