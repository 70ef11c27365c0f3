"""Offers of Compute Engine: what a machine type has, what it costs, and which limits of the project forbid it.

An offer's id has everything that a machine is made from, so that an order is the same again whatever the config says by
then: `cpu/n2-standard-4/spot/us-central1-a`, `gpu/n1-standard-4+nvidia-tesla-t4:1/standard/us-central1-b`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from distributed_grid.config.providers import GcpSettings
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import BadInput, Refused
from distributed_grid.ports import WorkerOffer

SPOT, STANDARD = "spot", "standard"
MIB = 1024**2
SHARED_CPUS = ("e2", "n1", "f1", "g1")
"""Families whose cores are counted together, as CPUS; others have a limit of their own, such as N2_CPUS."""
SHORT_RUN_SECONDS = 7 * 24 * 3600
"""A machine with GPUs that is deleted within this may use the limits for preemptible ones, too, whatever its market."""
_NAME = r"[a-z0-9](?:[a-z0-9-]{0,62})"
_ACCELERATOR = re.compile(rf"(?P<type>{_NAME})(?::(?P<count>[1-9][0-9]?))?")
_WITH_ACCELERATOR = re.compile(r"(?P<machine>[a-z0-9-]+?)-(?P<accelerator>nvidia-[a-z0-9-]+)")
_OFFER = re.compile(
    rf"(?P<kind>[^/]+)/(?P<machine>{_NAME})(?:\+(?P<accelerator>{_NAME}):(?P<count>[0-9]+))?"
    rf"/(?P<market>{SPOT}|{STANDARD})/(?P<zone>{_NAME})"
)


class MachineShape(Struct, frozen=True):
    """A machine type, and the accelerators that are attached to it."""

    machine_type: str
    accelerator: str = ""
    accelerators: int = 0

    def __str__(self) -> str:
        return self.machine_type + (f"+{self.accelerator}:{self.accelerators}" if self.accelerators else "")


class WantedShape(Struct, frozen=True):
    """A machine type as the config has it, and what it means."""

    written: str
    shape: MachineShape


def shapes_of(settings: GcpSettings) -> dict[str, list[WantedShape]]:
    """What the config wants for each kind of worker."""
    found: dict[str, list[WantedShape]] = {}
    for kind, written in settings.machine_types.items():
        names = [written] if isinstance(written, str) else written
        found[kind] = [WantedShape(name, _shape(name, settings.accelerators.get(kind, ""))) for name in names]
    return found


def _shape(written: str, accelerator: str) -> MachineShape:
    """The machine type, with the accelerator that the config names beside it or at the end of its name."""
    name = written
    if not accelerator and (both := _WITH_ACCELERATOR.fullmatch(written)):
        name, accelerator = both["machine"], both["accelerator"]
    if not accelerator:
        return MachineShape(name)
    parts = _ACCELERATOR.fullmatch(accelerator)
    if parts is None:
        raise BadInput(f"providers.gcp.accelerators: {accelerator!r} is not TYPE or TYPE:COUNT")
    return MachineShape(name, parts["type"], int(parts["count"] or 1))


def make_offer(
    settings: GcpSettings,
    wanted: WantedShape,
    place: tuple[str, str, str],
    resources: WorkerResources,
    limits: Mapping[str, float],
) -> WorkerOffer:
    """The offer of a machine, with its price, its lifetime, and the limit that forbids it; `place` is the kind of
    worker, the market and the zone."""
    kind, market, zone = place
    return WorkerOffer(
        f"{kind}/{wanted.shape}/{market}/{zone}",
        kind,
        resources,
        price_micro(settings, kind, wanted.written, market),
        zone,
        market,
        unavailable=_forbidding_limit(settings, wanted.shape, market, resources.gpu_count, limits),
        lifetime_seconds=settings.max_run_seconds,
    )


def ordered_machine(offer: WorkerOffer) -> tuple[MachineShape, str, str]:
    """The shape, market and zone that an offer stands for."""
    parts = _OFFER.fullmatch(offer.id)
    if parts is None:
        raise Refused(f"{offer.id!r} is no offer of gcp")
    shape = MachineShape(parts["machine"], parts["accelerator"] or "", int(parts["count"] or 0))
    return shape, parts["market"], parts["zone"]


def resources_of(machine_type: Mapping[str, Any], shape: MachineShape) -> WorkerResources:
    """What a machine of this type has, by Google's description of it; some types have accelerators of their own."""
    own = [one for one in machine_type.get("accelerators") or () if isinstance(one, dict)]
    gpus = shape.accelerators + sum(int(one.get("guestAcceleratorCount") or 0) for one in own)
    cores, megabytes = int(machine_type.get("guestCpus") or 0), int(machine_type.get("memoryMb") or 0)
    return WorkerResources(1000 * cores, MIB * megabytes, gpus)


def price_micro(settings: GcpSettings, kind: str, machine_type: str, market: str) -> int | None:
    """What an hour costs, by the config: of the type, else of the kind; None where it does not say.

    A spot machine never costs more than a standard one, so that price is counted where there is none for spot.
    """
    prices = settings.price_per_hour
    spot = (f"{machine_type}:{SPOT}", f"{kind}:{SPOT}") if market == SPOT else ()
    for key in (*spot, machine_type, kind):
        if key in prices:
            return round(1_000_000 * prices[key])
    return None


def region_of(zone: str) -> str:
    return zone.rpartition("-")[0]


def limits_of(quotas: Sequence[Any]) -> dict[str, float]:
    """The limits of a region or project, by Google's name of what they count."""
    found = {}
    for one in quotas:
        if isinstance(one, dict) and isinstance(limit := one.get("limit"), int | float):
            found[str(one.get("metric"))] = float(limit)
    return found


def _forbidding_limit(
    settings: GcpSettings, shape: MachineShape, market: str, gpus: int, limits: Mapping[str, float]
) -> str:
    """Which limit of zero forbids such a machine; empty where none does. What is not known forbids nothing."""
    families = [_cpu_metrics(shape.machine_type, market), ["CPUS_ALL_REGIONS"]]
    if gpus:
        families.append(["GPUS_ALL_REGIONS"])
    if shape.accelerators:
        families.append(_gpu_metrics(shape.accelerator, market, settings.max_run_seconds))
    for metrics in families:
        if all(limits.get(metric) == 0 for metric in metrics):
            return f"the quota {metrics[0]} is 0"
    return ""


def _cpu_metrics(machine_type: str, market: str) -> list[str]:
    """The limits that the cores may count against, any of which is enough."""
    family = machine_type.partition("-")[0]
    own = "CPUS" if family in SHARED_CPUS else f"{family.upper()}_CPUS"
    return [own, "PREEMPTIBLE_CPUS"] if market == SPOT else [own]


def _gpu_metrics(accelerator: str, market: str, lifetime_seconds: float) -> list[str]:
    name = accelerator.removeprefix("nvidia-").removeprefix("tesla-").replace("-", "_").upper()
    own = f"NVIDIA_{name}_GPUS"
    is_short = market == SPOT or 0 < lifetime_seconds <= SHORT_RUN_SECONDS
    return [own, f"PREEMPTIBLE_{own}"] if is_short else [own]
