"""The stand-ins of clouds that a campaign runs on, by the name of their provider."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from distributed_grid.domain.workers import WorkerResources
from distributed_grid.ports import WorkerInstance, WorkerOffer
from tests.clouds.world import StandInFactory
from tests.support.clouds.ec2 import Ec2StandIn
from tests.support.clouds.gce import GceStandIn
from tests.support.clouds.scripted import GIB, ScriptedCloud
from tests.support.clouds.slurm_commands import SETTINGS as SLURM_SETTINGS
from tests.support.clouds.slurm_commands import SlurmCommands
from tests.support.clouds.stand_in import CloudStandIn

SMALL, GPU = WorkerResources(2000, 4 * GIB), WorkerResources(4000, 16 * GIB, 1)
OFFERS = (
    WorkerOffer("cpu-spot-zero", "cpu", SMALL, 10_000, "a", "spot", unavailable="the quota is 0"),
    WorkerOffer("cpu-spot-a", "cpu", SMALL, 60_000, "a", "spot"),
    WorkerOffer("cpu-spot-b", "cpu", SMALL, 70_000, "b", "spot", lifetime_seconds=1800),
    WorkerOffer("cpu-a", "cpu", SMALL, 100_000, "a", "on-demand"),
    WorkerOffer("cpu-b", "cpu", SMALL, 120_000, "b", "on-demand", lifetime_seconds=5400),
    WorkerOffer("gpu-a", "gpu", GPU, 900_000, "a", "on-demand", lifetime_seconds=7200),
    WorkerOffer("gpu-b", "gpu", GPU, 950_000, "b", "on-demand"),
)


class FlakyLists:
    """Lists that lack a machine now and then; not twice in a row, unless nothing is `promised`."""

    def __init__(self, random: Random, promised: bool) -> None:
        self._random = random
        self._promised = promised
        self._did_omit = False

    def omit(self, found: Sequence[WorkerInstance]) -> Sequence[WorkerInstance]:
        self._did_omit = not (self._did_omit and self._promised) and self._random.random() < 0.4
        kept = list(found)
        if self._did_omit and kept:
            kept.pop(self._random.randrange(len(kept)))
        return kept


def scripted(clock: Callable[[], float], random: Random, promised: bool) -> CloudStandIn:
    """The scripted cloud in one of its ways, with its offers in some order."""
    offers = list(OFFERS)
    random.shuffle(offers)
    cloud = ScriptedCloud(clock, forgets=random.random() < 0.3, blind=random.random() < 0.5, offers=offers)
    if random.random() < 0.5:
        flaky = FlakyLists(random, promised)
        cloud.omit = lambda found: flaky.omit(found) if cloud.faults.waiting else found
    return cloud


def aws(clock: Callable[[], float], random: Random, promised: bool) -> CloudStandIn:
    """EC2, with or without spot; one quota is zero, the others are not known."""
    settings: dict[str, Any] = {"spot_instance_enabled": random.random() < 0.7}
    cloud = Ec2StandIn(clock, settings=settings)
    if random.random() < 0.5:
        cloud.quotas["L-3819A6DF"] = 0.0
    return cloud


def gcp(clock: Callable[[], float], random: Random, promised: bool) -> CloudStandIn:
    """Compute Engine, with or without spot; each machine has an end of its own."""
    settings = {
        "machine_types": {"cpu": "e2-standard-2", "gpu": "g2-standard-4"},
        "price_per_hour": {"cpu": 0.1, "cpu:spot": 0.06, "gpu": 0.9, "gpu:spot": 0.4},
        "preemptible_enabled": random.random() < 0.7,
        "max_run_hours": random.choice([0.5, 2, 24]),
    }
    return GceStandIn(clock, settings=settings)


def slurm(clock: Callable[[], float], random: Random, promised: bool) -> CloudStandIn:
    """A Slurm cluster whose queue is short, long, or very long."""
    longest = random.choice([0.0, 60.0, 1200.0, 30_000.0])
    settings = {**SLURM_SETTINGS, "time_limit": random.choice(["0:30:00", "2:00:00", "8:00:00"])}
    return SlurmCommands(clock, queue_seconds=lambda: random.uniform(0, longest), settings=settings)


STAND_INS: dict[str, StandInFactory] = {"scripted": scripted, "aws": aws, "gcp": gcp, "slurm": slurm}
