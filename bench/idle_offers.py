"""Offers on a day of 1,052 real machines: how often they flip, and how much is lent, beside a plain threshold.

Every sample goes as a heartbeat through the reactor, as in the control plane; the plain rule is the same code with
no dwell and no margin. A flip is a change between an offer of CPU that something can be placed on, and none: a pause is
none. Also counted is the change between an offer, open or paused, and none: what people see appear and disappear.
Capacity lent is what was really idle, (1 - usage), while an offer was open; what is paused is not lent. What is placed
on an offer meets the use that comes next: a lent sample counts as above the mark by the next one if that is.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from bench.sizes import Unavailable, sized
from bench.table import Line
from bench.traces import TRACES
from distributed_grid.domain.events import HeartbeatReceived
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Node, OfferThresholds, Usage
from distributed_grid.domain.resources import Capacity
from distributed_grid.reactor import step

SAMPLE_MS, BEAT_MS = 300_000, 2_000
BURST_MILLI, BURST_MS = 900, 10_000
MARK_MILLI = 300
DEFAULT = OfferThresholds(
    cpu_busy_max_milli=MARK_MILLI,
    cpu_min_milli=1000,
    memory_used_max_milli=500,
    memory_min_bytes=2**31,
    gpu_busy_max_milli=200,
    gpu_memory_min_bytes=2**30,
)
PLAIN = replace(DEFAULT, margin_milli=0, dwell_ms=0)
DWELLS_MIN, MARGINS_MILLI = (10, 15, 20, 30), (0, 50, 100)
FEWER, FEWER_OPEN, LEAST_LENT, MOST_OVER_NEXT = 10, 2, 90, 0.5
"""Times fewer flips of offers, and of open ones; %; times those of plain that are above the mark by the next sample."""
SPARE = 2
MACHINES, SAMPLES = sized((None, None), smoke=(8, 24))
"""Of the trace; None: all."""
"""Tuning asks for so many times fewer flips than the bar: other machines and other days will be different."""
Trace = list[list[int]]


@dataclass(slots=True)
class Lent:
    """What came of a day: flips of the offer, idle capacity lent, and when it was lent above the mark or paused."""

    flips: int = 0
    open_flips: int = 0
    over_next: int = 0
    paused: int = 0
    idle: int = 0
    idle_below_mark: int = 0
    samples: int = 0
    lent_samples: int = 0
    over_mark: int = 0
    offers: int = 0

    def add(self, lends: bool, paused: bool, flipped: bool, offered: bool, outside_milli: int) -> None:
        self.samples += 1
        self.flips += flipped
        self.paused += paused
        self.offers += offered
        self.lent_samples += lends
        if lends:
            self.idle += 1000 - outside_milli
            if outside_milli > MARK_MILLI:
                self.over_mark += 1
            else:
                self.idle_below_mark += 1000 - outside_milli


def measure() -> list[Line]:
    """Plain and ours on the machines that were not tuned on, on all of them, and at the distance of heartbeats."""
    found = sorted(TRACES.glob("planetlab/*.csv.gz"))
    if not found:
        raise Unavailable(f"no machines' load at {TRACES / 'planetlab'}; see GRID_TRACES")
    machines = [samples[:SAMPLES] for samples in _machines(found[0])[:MACHINES]]
    _tune(machines[0::2])
    held_out = machines[1::2]
    lines = _compared(f"{len(held_out)} machines not tuned on", replay(held_out, PLAIN), replay(held_out, DEFAULT))
    lines += _compared(f"all {len(machines):,} machines", replay(machines, PLAIN), replay(machines, DEFAULT))
    return lines + _at_heartbeats(machines[::50])


def _at_heartbeats(machines: Trace) -> list[Line]:
    """The same rule every 2 s, on made bursts. A plain threshold lends every gap between them there, also those of
    machines that are busy on the whole; so what is lent is also compared with the idle five minutes."""
    bursts, per_sample = _bursts(machines), SAMPLE_MS // BEAT_MS
    means = [[mean for mean in samples for _ in range(per_sample)] for samples in machines]
    plain, ours = (replay(bursts, limits, BEAT_MS) for limits in (PLAIN, DEFAULT))
    whole, whole_plain = replay(bursts, DEFAULT, BEAT_MS, means), replay(machines, PLAIN)
    lent = 100 * whole.idle_below_mark / (whole_plain.idle * per_sample)
    new = 100 * ours.offers / ours.samples
    return [
        *_compared(f"{len(machines)} machines, made bursts, 2 s", plain, ours),
        Line("  idle capacity lent, of plain's on 5-minute means", lent, LEAST_LENT, "%"),
        Line("  heartbeats with a new offer", new, 50, "%", lower_is_better=True),
    ]


def replay(machines: Trace, limits: OfferThresholds, apart_ms: int = SAMPLE_MS, judged_by: Trace | None = None) -> Lent:
    """Let every sample be heard, and watch the offers; `judged_by` is what counts as used, if not the samples."""
    lent = Lent()
    for samples, used in zip(machines, judged_by or machines, strict=True):
        node = Node(name="m", capacity=Capacity(16_000, 2**36), thresholds=limits, offer_ms=2 * apart_ms + 300_000)
        ledger = Ledger([node])
        stands: bool | None = None
        lent_before: bool | None = None
        for i, outside_milli in enumerate(samples):
            before = ledger.offers.get("m")
            step(ledger, HeartbeatReceived(name="m", usage=Usage(cpu_outside_milli=outside_milli)), i * apart_ms)
            offer, was = ledger.offers["m"], stands
            lends, paused = offer.lends.cpu_milli > 0, "cpu" in offer.paused
            stands = lends or paused
            lent.add(lends, paused, was is not None and was != stands, offer is not before, used[i])
            lent.open_flips += lent_before is not None and lent_before != lends
            lent.over_next += bool(lent_before) and used[i] > MARK_MILLI
            lent_before = lends
    return lent


def _compared(where: str, plain: Lent, ours: Lent) -> list[Line]:
    """Ours against the plain rule, which never lends above the mark, and neither may ours."""
    return [
        Line(f"flips, plain over ours, {where}", plain.open_flips / max(ours.open_flips, 1), FEWER_OPEN, "×"),
        Line("  the same, not counting pauses", plain.flips / max(ours.flips, 1), FEWER, "×"),
        Line(
            "  idle capacity lent at or below the mark, of plain's",
            100 * ours.idle_below_mark / plain.idle,
            LEAST_LENT,
            "%",
        ),
        Line(
            "  lent samples above the mark by the next one, of plain's",
            ours.over_next / max(plain.over_next, 1),
            MOST_OVER_NEXT,
            "×",
            True,
        ),
        Line("  time lent above the mark, of all", 100 * ours.over_mark / ours.samples, 0, "%", True),
        Line("  time paused, of all", 100 * ours.paused / ours.samples, 0, "%", True),
    ]


def _tune(machines: Trace) -> None:
    """Say which dwell and margin these machines would choose: flips few enough, then the least time paused."""
    plain = replay(machines, PLAIN)
    choices: list[tuple[float, int, int]] = []
    for dwell_min, margin_milli in itertools.product(DWELLS_MIN, MARGINS_MILLI):
        ours = replay(machines, replace(DEFAULT, dwell_ms=60_000 * dwell_min, margin_milli=margin_milli))
        fewer, lent = plain.flips / max(ours.flips, 1), 100 * ours.idle_below_mark / plain.idle
        above = 100 * ours.paused / ours.samples
        print(
            f"  dwell {dwell_min} min, margin {margin_milli / 10:g} %: {fewer:.1f} × fewer flips, "
            f"{plain.open_flips / max(ours.open_flips, 1):.1f} × with pauses counted, "
            f"{lent:.1f} % lent below the mark, paused for {above:.1f} % of the time",
            file=sys.stderr,
        )
        if fewer >= SPARE * FEWER and lent >= LEAST_LENT:
            choices.append((above, dwell_min, margin_milli))
    if not choices:
        print("  no dwell and margin would do", file=sys.stderr)
        return
    _, dwell_min, margin_milli = min(choices)
    shipped = f"shipped are {DEFAULT.dwell_ms // 60_000} min and {DEFAULT.margin_milli / 10:g} %"
    print(f"  chosen by {len(machines)} machines: {dwell_min} min, {margin_milli / 10:g} %; {shipped}", file=sys.stderr)


def _machines(file: Path) -> Trace:
    with gzip.open(file, "rt") as text:
        rows = csv.reader(text)
        next(rows)
        return [[round(10 * float(value)) for value in row[1:]] for row in rows]


def _bursts(machines: Trace) -> Trace:
    """The same load as heartbeats would see it, made up: idle but for bursts at 90 % that last 10 s on average."""
    dice = random.Random(1)
    found = []
    for samples in machines:
        beats, busy = [], False
        for mean in samples:
            height = max(BURST_MILLI, mean)
            for _ in range(SAMPLE_MS // BEAT_MS):
                if dice.random() < BEAT_MS / BURST_MS:
                    busy = dice.random() < mean / height
                beats.append(height if busy else 0)
        found.append(beats)
    return found
