"""How often an agent measures, and that what it decides for the owner is done, not only decided."""

import asyncio
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.adapters.probes.machine_probe import MachineProbe
from distributed_grid.agent.owner.guard import (
    FAST_MS,
    REST_MS,
    WATCHFUL_MS,
    ActivitySample,
    OwnerGuard,
    SamplingRate,
)
from distributed_grid.agent.owner.yield_policy import Borrowed, UsageSample
from distributed_grid.wire import OwnerRules

GB = 1024**3

FAR = 300
"""The most the owner's CPU may be used in these tests."""


def look(used: int = 0, *, borrowed: bool = True, most: int | None = FAR) -> ActivitySample:
    return ActivitySample(borrowed, ((used, most),))


def test_at_rest_the_wait_grows_to_two_seconds() -> None:
    pace = SamplingRate()
    assert [pace.after(look(borrowed=False)) for _ in range(5)] == [500, 1000, 2000, 2000, 2000]


def test_at_rest_nothing_hurries_whatever_the_owner_does() -> None:
    pace = SamplingRate()
    waits = [pace.after(look(used, borrowed=False)) for used in (0, 900, 100, 1000, 0, 400)]
    assert waits[-1] == REST_MS


def test_borrowed_work_is_watched_even_when_calm() -> None:
    pace = SamplingRate()
    assert [pace.after(look(20)) for _ in range(4)] == [WATCHFUL_MS] * 4


def test_a_change_of_the_owners_use_is_looked_at_closely() -> None:
    pace = SamplingRate()
    for _ in range(3):
        pace.after(look(0, most=None))
    assert pace.after(look(110, most=None)) == FAST_MS
    assert pace.after(look(120, most=None)) == WATCHFUL_MS


def test_a_slow_climb_is_a_change_too() -> None:
    pace = SamplingRate()
    waits = [pace.after(look(used, most=None)) for used in range(0, 1000, 30)]
    assert waits.count(FAST_MS) >= 8


def test_near_the_threshold_and_over_it_every_look_is_fast() -> None:
    pace = SamplingRate()
    pace.after(look(0))
    assert [pace.after(look(used)) for used in (200, 200, 250, 250, 999, 999, 999)] == [FAST_MS] * 7


def test_any_resource_can_be_the_one_that_is_near() -> None:
    pace = SamplingRate()
    calm, near = (0, 300), (480, 500)
    for _ in range(3):
        assert pace.after(ActivitySample(borrowed=True, outside=(calm, calm, near))) == FAST_MS


def test_work_that_begins_ends_the_rest_at_the_next_look() -> None:
    pace = SamplingRate()
    for _ in range(5):
        pace.after(look(borrowed=False))
    assert pace.after(look(borrowed=True)) == WATCHFUL_MS


def test_a_gpu_that_appears_is_a_change() -> None:
    pace = SamplingRate()
    pace.after(ActivitySample(borrowed=True, outside=((0, None),)))
    assert pace.after(ActivitySample(borrowed=True, outside=((0, None), (0, None)))) == FAST_MS


LOOKS = st.lists(
    st.builds(
        ActivitySample,
        st.booleans(),
        st.lists(st.tuples(st.integers(0, 1000), st.none() | st.integers(0, 1000)), max_size=3).map(tuple),
    )
)


@given(LOOKS)
def test_every_wait_is_between_fast_and_rest_and_short_while_work_is_borrowed(looks: list[ActivitySample]) -> None:
    pace = SamplingRate()
    for seen in looks:
        wait = pace.after(seen)
        assert FAST_MS <= wait <= (WATCHFUL_MS if seen.borrowed else REST_MS)


def test_measuring_at_rest_costs_less_than_a_thousandth_of_a_core() -> None:
    probe, rounds = MachineProbe(), 200
    began = time.process_time()
    for _ in range(rounds):
        probe.sample(0, 0)
        probe.outside_now(0)
    assert (time.process_time() - began) / rounds < 0.001 * REST_MS / 1000


# ------------------------------------------------------------------ actions


class BrokenWork:
    """Borrowed work on a machine whose owner needs everything; orders to it fail `failures` times."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.attempts = ["a.1", "b.1"]
        self.evicted: list[str] = []
        self.throttled: list[tuple[int | None, int]] = []

    def running(self) -> list[str]:
        return self.attempts

    def sample(self) -> UsageSample:
        here = tuple(Borrowed(one, "here", 1000, 2 * GB, 2 * GB) for one in self.attempts)
        return UsageSample(4000, 3900, 100, here, 16 * GB, 0, 14 * GB)

    def _may_fail(self) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise OSError(28, "No space left on device")

    def throttle(self, cores: int | None, running_milli: int) -> None:
        self._may_fail()
        self.throttled.append((cores, running_milli))

    def pause(self, spared: frozenset[str]) -> list[tuple[str, int]]:
        return []

    def resume(self, attempt_id: str | None = None) -> None: ...

    def release(self) -> None: ...

    def give_notice(self, attempt_id: str, why: str, in_ms: int) -> int:
        return in_ms

    def withdraw_notice(self, attempt_id: str) -> None: ...

    async def evict(self, attempt_id: str, why: str, grace_ms: int) -> None:
        self._may_fail()
        self.evicted.append(attempt_id)


RULES = OwnerRules(
    cpu_busy_max_milli=300,
    memory_used_max_milli=800,
    memory_min_bytes=3 * GB,
    gpu_busy_max_milli=1000,
    gpu_memory_min_bytes=0,
)


def watch(work: BrokenWork, samples: int) -> OwnerGuard:
    guard = OwnerGuard(work, itertools.count(1000, 250).__next__, report_pause=lambda *said: None)
    guard.rules = RULES
    for _ in range(samples):
        asyncio.run(guard.observe())
    return guard


def test_an_eviction_is_repeated_until_the_attempt_is_gone() -> None:
    work = BrokenWork(0)
    guard = watch(work, 3)
    assert sorted(work.evicted) == ["a.1"] * 3 + ["b.1"] * 3
    work.attempts.remove("a.1")
    asyncio.run(guard.observe())
    assert work.evicted[6:] == ["b.1"]


@pytest.mark.parametrize("failures", range(1, 6))
def test_an_action_that_fails_keeps_none_of_the_others_and_is_tried_again(failures: int) -> None:
    work = BrokenWork(failures)
    watch(work, 1)
    assert len(work.throttled) + len(work.evicted) == max(3 - failures, 0)
    watched = BrokenWork(failures)
    watch(watched, 4)
    assert len(watched.throttled) == 1
    assert set(watched.evicted) == {"a.1", "b.1"}
