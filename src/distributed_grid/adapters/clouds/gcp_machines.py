"""Machines of Compute Engine: offers, the body of the call that inserts one, and Google's descriptions as workers.

The id of an offer has everything that a machine is made from, so that an order is the same again whatever the config
says by then: `cpu/n2-standard-4/spot/us-central1-a`, `gpu/n1-standard-4+nvidia-tesla-t4:1/standard/us-central1-b`.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from msgspec import Struct

from distributed_grid.adapters.clouds.boot_script import boot_script
from distributed_grid.adapters.clouds.gcp_api import one_line
from distributed_grid.adapters.clouds.machine_tags import DASHED_TAGS as LABELS
from distributed_grid.config.providers import GcpSettings
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import BadInput, Refused
from distributed_grid.ports import WorkerInstance, WorkerOffer, WorkerOrder

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
    """A machine type as the config spells it, and its meaning."""

    written: str
    shape: MachineShape


def shapes_of(settings: GcpSettings) -> dict[str, list[WantedShape]]:
    """Machine types of the config by kind of worker."""
    shapes: dict[str, list[WantedShape]] = {}
    for kind, written in settings.machine_types.items():
        names = [written] if isinstance(written, str) else written
        shapes[kind] = [WantedShape(name, _shape(name, settings.accelerators.get(kind, ""))) for name in names]
    return shapes


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
    """The offer of a machine; `place` is the kind of worker, the market and the zone."""
    kind, market, zone = place
    return WorkerOffer(
        id=f"{kind}/{wanted.shape}/{market}/{zone}",
        worker_type=kind,
        resources=resources,
        price_micro=price_micro(settings, kind, wanted.written, market),
        zone=zone,
        market=market,
        unavailable=_forbidding_limit(settings, wanted.shape, market, resources.gpu_count, limits),
        lifetime_seconds=settings.max_run_seconds,
    )


def ordered_machine(offer: WorkerOffer) -> tuple[MachineShape, str, str]:
    """Shape, market and zone of an offer."""
    parts = _OFFER.fullmatch(offer.id)
    if parts is None:
        raise Refused(f"{offer.id!r} is no offer of gcp")
    shape = MachineShape(parts["machine"], parts["accelerator"] or "", int(parts["count"] or 0))
    return shape, parts["market"], parts["zone"]


def resources_of(machine_type: Mapping[str, Any], shape: MachineShape) -> WorkerResources:
    """Resources of a machine by Google's description of its type; some types have accelerators of their own."""
    own = [accelerator for accelerator in machine_type.get("accelerators") or () if isinstance(accelerator, dict)]
    gpus = shape.accelerators + sum(int(accelerator.get("guestAcceleratorCount") or 0) for accelerator in own)
    cores, megabytes = int(machine_type.get("guestCpus") or 0), int(machine_type.get("memoryMb") or 0)
    return WorkerResources(1000 * cores, MIB * megabytes, gpus)


def price_micro(settings: GcpSettings, kind: str, machine_type: str, market: str) -> int | None:
    """Price of an hour by the config: of the type, else of the kind; None where there is none.

    A spot machine never costs more than a standard one: without a spot price the standard one counts.
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
    """The limits of a region or project by Google's metric."""
    limits = {}
    for quota in quotas:
        if isinstance(quota, dict) and isinstance(limit := quota.get("limit"), int | float):
            limits[str(quota.get("metric"))] = float(limit)
    return limits


def _forbidding_limit(
    settings: GcpSettings, shape: MachineShape, market: str, gpus: int, limits: Mapping[str, float]
) -> str:
    """The limit of zero that forbids such a machine; empty where none does. An unknown limit forbids nothing."""
    family = shape.machine_type.partition("-")[0]
    cpus = "CPUS" if family in SHARED_CPUS else f"{family.upper()}_CPUS"
    # Each list has the limits that one resource may count against: any of them suffices.
    choices = [[cpus, "PREEMPTIBLE_CPUS"] if market == SPOT else [cpus], ["CPUS_ALL_REGIONS"]]
    if gpus:
        choices.append(["GPUS_ALL_REGIONS"])
    if shape.accelerators:
        name = shape.accelerator.removeprefix("nvidia-").removeprefix("tesla-").replace("-", "_").upper()
        is_short = market == SPOT or 0 < settings.max_run_seconds <= SHORT_RUN_SECONDS
        choices.append([f"NVIDIA_{name}_GPUS", *([f"PREEMPTIBLE_NVIDIA_{name}_GPUS"] if is_short else [])])
    for metrics in choices:
        if all(limits.get(metric) == 0 for metric in metrics):
            return f"the quota {metrics[0]} is 0"
    return ""


DEFAULT_IMAGE = "projects/debian-cloud/global/images/family/debian-12"
DEFAULT_NETWORK = "global/networks/default"
CLOUD_PLATFORM = "https://www.googleapis.com/auth/cloud-platform"
REQUEST_NAMESPACE = uuid.UUID("5bc5b4ae-6b5c-4d4e-8d2f-7f0c4e0c6f5a")
NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"[-_a-z0-9]{1,63}")
_STATES: Mapping[str, Literal["starting", "running", "stopping"]] = {
    "PENDING": "starting",
    "PROVISIONING": "starting",
    "STAGING": "starting",
    "RUNNING": "running",
    "REPAIRING": "running",
}


PERMISSIONS = (
    "compute.disks.create",
    "compute.disks.setLabels",
    "compute.instances.create",
    "compute.instances.delete",
    "compute.instances.get",
    "compute.instances.list",
    "compute.instances.setLabels",
    "compute.instances.setMetadata",
    "compute.machineTypes.get",
    "compute.projects.get",
    "compute.regions.get",
    "compute.zoneOperations.get",
)


def needed_permissions(settings: GcpSettings) -> list[str]:
    """Permissions that machines with these settings need in the project."""
    needed = list(PERMISSIONS)
    if not (settings.subnetwork or "").startswith("projects/"):  # those of another project are granted there
        needed.append("compute.subnetworks.use")
        needed += ["compute.subnetworks.useExternalIp"] if settings.external_ip else []
    needed += ["compute.instances.setTags"] if settings.tags else []
    needed += ["compute.instances.setServiceAccount"] if settings.service_account else []
    return sorted(needed)


def request_id(worker_id: str) -> str:
    """The idempotency key of a creation: the same for each repetition, and no other worker's."""
    return str(uuid.uuid5(REQUEST_NAMESPACE, worker_id))


def instance_body(settings: GcpSettings, order: WorkerOrder) -> dict[str, Any]:
    """The body of an insertion. Google deletes the machine when it is preempted and at the end of its lifetime."""
    shape, market, zone = ordered_machine(order.offer)
    is_spot = market == SPOT
    scheduling: dict[str, Any] = {
        "provisioningModel": "SPOT" if is_spot else "STANDARD",
        "instanceTerminationAction": "DELETE",
        "automaticRestart": False,
        "maxRunDuration": {"seconds": str(round(order.offer.lifetime_seconds or settings.max_run_seconds))},
    }
    has_gpus = bool(shape.accelerators or order.offer.resources.gpu_count)
    if is_spot or has_gpus:
        scheduling["onHostMaintenance"] = "TERMINATE"  # such machines cannot be moved
    disk: dict[str, Any] = {"sourceImage": image_path(settings.image), "labels": LABELS.of(order)}
    if settings.disk_gb:
        disk["diskSizeGb"] = str(settings.disk_gb)
    if settings.disk_type:
        disk["diskType"] = f"zones/{zone}/diskTypes/{settings.disk_type}"
    where = {"subnetwork": settings.subnetwork} if settings.subnetwork else {}
    if settings.network or not where:
        network = settings.network or DEFAULT_NETWORK
        where["network"] = network if "/" in network else f"global/networks/{network}"
    outside = [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}] if settings.external_ip else []
    body: dict[str, Any] = {
        "name": order.worker_id,
        "machineType": f"zones/{zone}/machineTypes/{shape.machine_type}",
        "labels": LABELS.of(order),
        "metadata": {"items": [{"key": "startup-script", "value": boot_script(order)}]},
        "disks": [{"boot": True, "autoDelete": True, "initializeParams": disk}],
        "networkInterfaces": [{**where, "accessConfigs": outside}],
        "scheduling": scheduling,
        "serviceAccounts": [],
    }
    if settings.service_account:
        body["serviceAccounts"] = [{"email": settings.service_account, "scopes": [CLOUD_PLATFORM]}]
    if settings.tags:
        body["tags"] = {"items": list(settings.tags)}
    if shape.accelerators:
        accelerator = f"zones/{zone}/acceleratorTypes/{shape.accelerator}"
        body["guestAccelerators"] = [{"acceleratorType": accelerator, "acceleratorCount": shape.accelerators}]
    return body


def image_path(image: str | None) -> str:
    """The path of an image in a project: `my-image` is one of the config's own."""
    if image is None:
        return DEFAULT_IMAGE
    path = image.partition("/compute/v1/")[2] or image
    return path if "/" in path else f"global/images/{path}"


def labels_of(machine: Mapping[str, Any]) -> dict[str, str]:
    labels = machine.get("labels")
    return {name: str(value or "") for name, value in labels.items()} if isinstance(labels, dict) else {}


def is_ours(machine: Mapping[str, Any], worker_id: str, grid_id: str) -> bool:
    """True if a machine is that worker of that grid: a copy that somebody made of one has its labels, not its name."""
    return bool(worker_id) and machine.get("name") == worker_id and LABELS.match(labels_of(machine), worker_id, grid_id)


def zone_of(machine: Mapping[str, Any]) -> str:
    return str(machine.get("zone") or "").rpartition("/")[2]


def worker_instance(machine: Mapping[str, Any], at: float) -> WorkerInstance:
    """The worker in Google's description of a machine, read `at` a time of Google's clock."""
    labels, status = labels_of(machine), str(machine.get("status") or "")
    made_at = timestamp(machine.get("creationTimestamp"), at)
    ends_at = _inside(machine, "resourceStatus", "scheduling").get("terminationTimestamp")
    seconds = _inside(machine, "scheduling", "maxRunDuration").get("seconds")
    ends_in, detail = None, one_line(str(machine.get("statusMessage") or ""))
    if ends_at:
        ends_in = max(0.0, timestamp(ends_at, at) - at)
    elif seconds is not None and status not in ("STOPPED", "TERMINATED", "SUSPENDED"):  # Google forgets their end
        ends_in = max(0.0, made_at + float(seconds) - at)  # as if it had run since it was made
    return WorkerInstance(
        worker_id=labels.get(LABELS.worker, ""),
        grid_id=labels.get(LABELS.grid, ""),
        instance=str(machine.get("id") or machine.get("name") or ""),
        state=_STATES.get(status, "stopping"),
        age_seconds=max(0.0, at - made_at),
        detail=detail or (f"it is {status}" if status not in _STATES else ""),
        ends_in_seconds=ends_in,
    )


def unreachable_scopes(scopes: Mapping[str, Any]) -> Iterator[str]:
    """The zones of a list over all zones that could not be read."""
    for name, scope in scopes.items():
        warning = scope.get("warning") if isinstance(scope, dict) else None
        if isinstance(warning, dict) and warning.get("code") == "UNREACHABLE":
            yield name


def timestamp(text: Any, instead: float) -> float:
    """Seconds since 1970 of a time as Google spells it; `instead` for any other text."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return instead


def _inside(mapping: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        inner = mapping.get(name)
        mapping = inner if isinstance(inner, dict) else {}
    return mapping
