"""Machines of Compute Engine: the body of the call that inserts one, and the worker that Google's description shows."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Literal

from distributed_grid.adapters.clouds.boot_script import boot_script
from distributed_grid.adapters.clouds.gcp_errors import one_line
from distributed_grid.adapters.clouds.gcp_offers import SPOT, ordered_machine
from distributed_grid.config.providers import GcpSettings
from distributed_grid.ports import WorkerInstance, WorkerOrder

WORKER_LABEL, GRID_LABEL, ORDER_LABEL = "distributed-grid-worker", "distributed-grid-grid", "distributed-grid-order"
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
    """What the credentials need in the project for machines as these settings have them."""
    needed = list(PERMISSIONS)
    if not (settings.subnetwork or "").startswith("projects/"):  # those of another project are granted there
        needed.append("compute.subnetworks.use")
        needed += ["compute.subnetworks.useExternalIp"] if settings.external_ip else []
    needed += ["compute.instances.setTags"] if settings.tags else []
    needed += ["compute.instances.setServiceAccount"] if settings.service_account else []
    return sorted(needed)


def request_id(worker_id: str) -> str:
    """The key of a creation: the same whenever it is asked for again, and no other worker's."""
    return str(uuid.uuid5(REQUEST_NAMESPACE, worker_id))


def instance_body(settings: GcpSettings, order: WorkerOrder) -> dict[str, Any]:
    """What is inserted. The machine is deleted by Google when it is preempted and at the end of its lifetime."""
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
    body: dict[str, Any] = {
        "name": order.worker_id,
        "machineType": f"zones/{zone}/machineTypes/{shape.machine_type}",
        "labels": labels_of(order),
        "metadata": {"items": [{"key": "startup-script", "value": boot_script(order)}]},
        "disks": [_boot_disk(settings, order, zone)],
        "networkInterfaces": [_interface(settings)],
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


def _boot_disk(settings: GcpSettings, order: WorkerOrder, zone: str) -> dict[str, Any]:
    disk: dict[str, Any] = {"sourceImage": image_path(settings.image), "labels": labels_of(order)}
    if settings.disk_gb:
        disk["diskSizeGb"] = str(settings.disk_gb)
    if settings.disk_type:
        disk["diskType"] = f"zones/{zone}/diskTypes/{settings.disk_type}"
    return {"boot": True, "autoDelete": True, "initializeParams": disk}


def _interface(settings: GcpSettings) -> dict[str, Any]:
    where = {"subnetwork": settings.subnetwork} if settings.subnetwork else {}
    if settings.network or not where:
        network = settings.network or DEFAULT_NETWORK
        where["network"] = network if "/" in network else f"global/networks/{network}"
    outside = [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}] if settings.external_ip else []
    return {**where, "accessConfigs": outside}


def image_path(image: str | None) -> str:
    """The path of an image in a project: `my-image` is one of the config's own."""
    if image is None:
        return DEFAULT_IMAGE
    path = image.partition("/compute/v1/")[2] or image
    return path if "/" in path else f"global/images/{path}"


def labels_of(order: WorkerOrder) -> dict[str, str]:
    return {WORKER_LABEL: order.worker_id, GRID_LABEL: order.grid_id, ORDER_LABEL: order.digest}


def label(found: Mapping[str, Any], name: str) -> str:
    labels = found.get("labels")
    return str(labels.get(name) or "") if isinstance(labels, dict) else ""


def is_ours(found: Mapping[str, Any], worker_id: str, grid_id: str) -> bool:
    """Whether a machine is that worker of that grid: a copy that somebody made of one has its labels, not its name."""
    if not worker_id or found.get("name") != worker_id:
        return False
    return label(found, WORKER_LABEL) == worker_id and label(found, GRID_LABEL) == grid_id


def zone_of(found: Mapping[str, Any]) -> str:
    return str(found.get("zone") or "").rpartition("/")[2]


def worker_instance(found: Mapping[str, Any], at: float) -> WorkerInstance:
    """The worker that Google's description shows, at a time of Google's clock."""
    made_at = timestamp(found.get("creationTimestamp"), at)
    status = str(found.get("status") or "")
    return WorkerInstance(
        label(found, WORKER_LABEL),
        label(found, GRID_LABEL),
        str(found.get("id") or found.get("name") or ""),
        _STATES.get(status, "stopping"),
        max(0.0, at - made_at),
        one_line(str(found.get("statusMessage") or "")) or (f"it is {status}" if status not in _STATES else ""),
        _ends_in(found, at, made_at),
    )


def _ends_in(found: Mapping[str, Any], at: float, made_at: float) -> float | None:
    """In how long Google deletes it by itself; where Google does not say yet, as if it had run since it was made."""
    known = _inside(found, "resourceStatus", "scheduling").get("terminationTimestamp")
    if known:
        return max(0.0, timestamp(known, at) - at)
    seconds = _inside(found, "scheduling", "maxRunDuration").get("seconds")
    if seconds is None or str(found.get("status")) in ("STOPPED", "TERMINATED", "SUSPENDED"):
        return None  # Google forgets the end of a machine that is stopped
    return max(0.0, made_at + float(seconds) - at)


def unreachable_scopes(scopes: Mapping[str, Any]) -> Iterator[str]:
    """The zones of a list over all zones that could not be read."""
    for name, scope in scopes.items():
        warning = scope.get("warning") if isinstance(scope, dict) else None
        if isinstance(warning, dict) and warning.get("code") == "UNREACHABLE":
            yield name


def timestamp(text: Any, instead: float) -> float:
    """Seconds since 1970 of Google's spelling of a time."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return instead


def _inside(found: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        inner = found.get(name)
        found = inner if isinstance(inner, dict) else {}
    return found
