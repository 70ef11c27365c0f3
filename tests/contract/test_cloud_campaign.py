"""A few schedules of the fault campaign on every stand-in; `make chaos` runs hundreds of each."""

from __future__ import annotations

import pytest

from tests.clouds.schedule import CloudSchedule

pytestmark = pytest.mark.slow

SEEDS = {"scripted": range(12), "slurm": range(3), "gcp": range(2), "aws": range(1)}


@pytest.mark.parametrize(("provider", "seed"), [(name, seed) for name, seeds in SEEDS.items() for seed in seeds])
def test_no_machine_is_left_no_budget_exceeded_and_nobody_elses_ended(provider: str, seed: int) -> None:
    report = CloudSchedule(provider, seed).run()
    assert not report.broken, "\n".join([*report.history[-40:], str(report)])


def test_the_same_seed_is_the_same_schedule() -> None:
    first, second = CloudSchedule("scripted", 3).run(), CloudSchedule("scripted", 3).run()
    assert first.history == second.history
    assert first.counts == second.counts
