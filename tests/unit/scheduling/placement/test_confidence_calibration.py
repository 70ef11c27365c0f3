"""A confidence is kept: of the choices that were 90 % sure, about nine in ten were left alone by their owners.

Made-up owners (bursts at rates of their own, random walks of memory, short fits, hardly ever there) live on twenty
machines; the real reactor places jobs, and the agent's own rules decide whom an owner drives away. The constants of
`scheduling/placement/confidence.py` about CPU were fitted on real machines (`bench confidence`), not on these
owners. One constant is about these: `ONE_OF_SEVERAL`, how often the agent's rule chose a lease that was not alone. So
for memory beside others this is a check of the whole and no independent one.
"""

from __future__ import annotations

import itertools

import pytest

from tests.unit.scheduling.owner_traces import Day, Fate

pytestmark = pytest.mark.slow

SEEDS = range(1, 7)
"""So many days that chance does not decide: an owner who comes drives away several at once, so with two days alone a
bin may be off by twice the tolerance."""
BINS = (0.0, 0.7, 0.9, 0.98, 1.001)
TOLERANCE = 0.1
"""How far the confidence of a bin may be from what was seen."""


@pytest.fixture(scope="module")
def fates() -> list[Fate]:
    found: list[Fate] = []
    for seed in SEEDS:
        day = Day(seed, nodes=20)
        day.pass_by(4)
        day.pass_by(8, requests_per_hour=200)
        day.ledger.check()
        found += day.fates
    return found


def test_in_every_bin_as_many_are_left_alone_as_was_promised(fates: list[Fate]) -> None:
    for low, high in itertools.pairwise(BINS):
        here = [one for one in fates if low <= one.confidence < high]
        assert len(here) >= 50, f"only {len(here)} choices between {low} and {high}"
        promised = sum(one.confidence for one in here) / len(here)
        kept = sum(one.kept for one in here) / len(here)
        assert abs(promised - kept) <= TOLERANCE, f"{len(here)} choices: {promised:.3f} promised, {kept:.3f} kept"


def test_it_tells_more_than_the_best_constant(fates: list[Fate]) -> None:
    rate = sum(one.kept for one in fates) / len(fates)
    brier = sum((one.confidence - one.kept) ** 2 for one in fates) / len(fates)
    assert brier < 0.95 * rate * (1 - rate)


def test_choices_differ_in_how_sure_they_are(fates: list[Fate]) -> None:
    assert min(one.confidence for one in fates) < 0.5
    assert max(one.confidence for one in fates) > 0.99
    assert len({one.confidence for one in fates}) > 100
