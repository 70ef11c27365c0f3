"""Calibration of confidence: requests placed on a day of 1,052 real machines, and what became of them.

Every sample is a heartbeat through the reactor, and so is every request. A lease is taken back when the owner comes
above the mark at which an agent ends borrowed work, at any sample within the term. Half of the machines are those that
the constants of `scheduling/placement/explanation.py` were fitted on; the lines are about the other half.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import time
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from bench.idle_offers import DEFAULT, SAMPLE_MS, Trace, _machines
from bench.sizes import sized
from bench.table import Line
from bench.traces import TRACES
from distributed_grid.domain.events import HeartbeatReceived, LeaseAsked, LeaseReleased
from distributed_grid.domain.leases import Request
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, Usage
from distributed_grid.domain.resources import Amounts, Capacity
from distributed_grid.errors import Refused
from distributed_grid.reactor import LeaseAnswer, step
from distributed_grid.scheduling.offers.owner_activity import HALF_LIFE_MS, decay, rises_above
from distributed_grid.scheduling.placement import explanation
from distributed_grid.scheduling.placement.explanation import choice_of
from distributed_grid.scheduling.placement.placement import find_placement

NODE = Node(name="m", capacity=Capacity(16_000, 2**36), thresholds=DEFAULT, offer_ms=3 * SAMPLE_MS)
SHORTEST_MIN, LONGEST_MIN = 5, 240
HISTORY = 12
"""Samples before the first request: an hour."""
USUAL_GRID, HOURS_GRID = (0.004, 0.006, 0.007, 0.008, 0.009, 0.01, 0.012, 0.016), (1.4, 2.8, 4.0, 5.6, 8.0, 11.2)
BINS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.001)
ENOUGH = sized(100, smoke=1)
MACHINES, SAMPLES = sized((None, None), smoke=(40, 100))
"""Of the trace; None: all."""
CHOICES = sized(20_000, smoke=200)
"""Bins with fewer requests are not judged."""
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """One request: its promise, its outcome, and the knowledge about the owner."""

    promised: float
    kept: bool
    watched_h: float
    risen: float
    term_h: float


def measure() -> list[Line]:
    """Calibration and skill on the machines that were not fitted on; and what noting a choice costs."""
    cost = Line("why a place was chosen, noted with the grant", _cost_us(), 20, "µs", lower_is_better=True)
    found = sorted(TRACES.glob("planetlab/*.csv.gz"))
    if not found:
        print(f"confidence: no machines' load at {TRACES / 'planetlab'}, skipped; see GRID_TRACES", file=sys.stderr)
        return [cost]
    machines = [samples[:SAMPLES] for samples in _machines(found[0])[:MACHINES]]
    _print_fit(_replay(machines[0::2], random.Random(1)))
    placed = _replay(machines[1::2], random.Random(2))
    promised, kept = _arrays(placed)
    print(_table(promised, kept), file=sys.stderr)
    constant = float(kept.mean() * (1 - kept.mean()))
    brier = float(((promised - kept) ** 2).mean())
    gaps = [abs(ours - seen) * 100 for count, ours, seen in _bins(promised, kept) if count >= ENOUGH]
    error = sum(count * abs(ours - seen) for count, ours, seen in _bins(promised, kept)) / len(kept)
    return [
        Line(f"Brier score, best constant over ours, {len(kept):,} requests", constant / brier, 1, "×"),
        Line("  confidence away from what was seen, mean", 100 * error, 1, "points", lower_is_better=True),
        Line("  the same, worst bin", max(gaps), 10, "points", lower_is_better=True),
        cost,
    ]


def _replay(machines: Trace, dice: random.Random) -> list[PlacedRequest]:
    """A request at every sample at which a machine lends, of a term drawn from minutes to hours."""
    mark = explanation.cpu_mark(NODE)
    placed: list[PlacedRequest] = []
    for samples in machines:
        ledger = Ledger([NODE])
        for at, outside in enumerate(samples):
            now = at * SAMPLE_MS
            step(
                ledger, HeartbeatReceived(name="m", usage=Usage(cpu_outside_milli=outside), yields=outside > mark), now
            )
            if at < HISTORY or at + LONGEST_MIN * 60_000 // SAMPLE_MS >= len(samples):
                continue
            minutes = math.exp(dice.uniform(math.log(SHORTEST_MIN), math.log(LONGEST_MIN)))
            ahead = max(round(minutes * 60_000 / SAMPLE_MS), 1)
            request = Request(id=f"r{at}", user="ada", ask=Amounts(1000), wait_ms=0, expects_ms=ahead * SAMPLE_MS)
            try:
                answer = step(ledger, LeaseAsked(request), now).answer
            except Refused:  # the machine lends nothing now
                continue
            step(ledger, LeaseReleased(request.id, "ada"), now)
            assert isinstance(answer, LeaseAnswer)
            assert answer.choice is not None
            kept = max(samples[at + 1 : at + 1 + ahead]) <= mark
            placed.append(_placed_request(ledger, answer.choice.confidence / 1000, kept, ahead * SAMPLE_MS, mark, now))
    return placed


def _placed_request(ledger: Ledger, promised: float, kept: bool, term_ms: int, mark: float, now: int) -> PlacedRequest:
    unrest = ledger.observations["m"].volatility
    assert unrest is not None
    trail = unrest.cpu
    watched = HALF_LIFE_MS / math.log(2) * (1 - decay(now - trail.since_ms)) / 3_600_000
    return PlacedRequest(promised, kept, watched, rises_above(trail, mark, now), term_ms / 3_600_000)


def _arrays(placed: list[PlacedRequest]) -> tuple[Values, Values]:
    return np.array([one.promised for one in placed]), np.array([float(one.kept) for one in placed])


def _bins(promised: Values, kept: Values) -> list[tuple[int, float, float]]:
    """By confidence: number, promised and observed probability."""
    found = []
    for low, high in itertools.pairwise(BINS):
        here = (promised >= low) & (promised < high)
        if here.any():
            found.append((int(here.sum()), float(promised[here].mean()), float(kept[here].mean())))
    return found


def _table(promised: Values, kept: Values) -> str:
    rows = [f"  {count:8,}  {ours:8.4f}  {seen:8.4f}" for count, ours, seen in _bins(promised, kept)]
    return "\n".join(["  requests  promised  not taken back", *rows])


def _print_fit(placed: list[PlacedRequest]) -> None:
    """Say which constants these machines would choose: the likeliest of a grid."""
    watched, risen, term = (
        np.array([getattr(one, name) for one in placed]) for name in ("watched_h", "risen", "term_h")
    )
    kept = np.array([one.kept for one in placed])
    best = (math.inf, 0.0, 0.0)
    for usual, hours in itertools.product(USUAL_GRID, HOURS_GRID):
        likely = ((watched + hours) / (watched + hours + term)) ** (risen + usual * hours)
        likely = np.clip(likely, 1e-9, 1 - 1e-9)
        best = min(best, (-float(np.where(kept, np.log(likely), np.log(1 - likely)).mean()), usual, hours))
    _, usual, hours = best
    shipped = f"shipped are {explanation.PRIOR_RETURNS_PER_HOUR:g} and {explanation.PRIOR_HOURS:g}"
    print(f"  chosen by {len(placed):,} requests: {usual:g} returns an hour, {hours:g} h; {shipped}", file=sys.stderr)


def _cost_us() -> float:
    """CPU time of one choice among three nodes with owners."""
    ledger = Ledger(replace(NODE, name=f"n{i}") for i in range(3))
    for i in range(3):
        step(ledger, HeartbeatReceived(name=f"n{i}", usage=Usage(cpu_outside_milli=50 * i)), 0)
    request = Request(id="r", user="ada", ask=Amounts(1000, 2**30))
    chosen = find_placement(ledger, request)
    assert chosen is not None
    rounds = []
    for _ in range(20):
        began = time.process_time()
        for _ in range(CHOICES // 20):
            choice_of(ledger, request, chosen, 2_000)
        rounds.append((time.process_time() - began) * 1e6 / (CHOICES // 20))
    return min(rounds)
