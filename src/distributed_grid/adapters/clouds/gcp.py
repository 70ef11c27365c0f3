"""Workers on virtual machines of Google's Compute Engine.

- The name of a machine is the id of its worker. Its labels (grid, worker, order) are part of the call that creates it;
  nothing without both labels of a grid is shown as its worker or deleted.
- The key of a creation is derived from the worker's id: Google ignores a second request with it, also when the machine
  of the first one is gone.
- Google deletes every machine by itself `max_run_hours` after it began to run (docs/adr/0038).
- A machine has no identity of its own at Google unless `service_account` gives it one: every job on it could use it.
- The id of an offer names everything that a machine is made from, so that an order is the same again after a change of
  the config: `cpu/n2-standard-4/spot/us-central1-a`, `gpu/n1-standard-4+nvidia-tesla-t4:1/standard/us-central1-b`.
"""

from __future__ import annotations

import contextlib
import re
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct

from distributed_grid.adapters.clouds.boot_script import DASHED_TAGS as LABELS
from distributed_grid.adapters.clouds.boot_script import boot_script
from distributed_grid.adapters.clouds.gcp_api import (
    ApiAnswer,
    ApiFailure,
    ComputeApi,
    Deadline,
    call_error,
    one_line,
    operation_error,
)
from distributed_grid.config.providers import GcpSettings, provider_settings
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import BadInput, GridError, Refused, Unreachable
from distributed_grid.ports import CloudProviderBase, InstanceState, WorkerInstance, WorkerOffer, WorkerOrder

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
        shapes[kind] = []
        for name in [written] if isinstance(written, str) else written:
            machine, accelerator = name, settings.accelerators.get(kind, "")
            if not accelerator and (both := _WITH_ACCELERATOR.fullmatch(name)):  # at the end of the name
                machine, accelerator = both["machine"], both["accelerator"]
            shape = MachineShape(machine)
            if accelerator:
                parts = _ACCELERATOR.fullmatch(accelerator)
                if parts is None:
                    raise BadInput(f"providers.gcp.accelerators: {accelerator!r} is not TYPE or TYPE:COUNT")
                shape = MachineShape(machine, parts["type"], int(parts["count"] or 1))
            shapes[kind].append(WantedShape(name, shape))
    return shapes


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
_STATES: Mapping[str, InstanceState] = {
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


def worker_instance(machine: Mapping[str, Any], read_at: float) -> WorkerInstance:
    """The worker in Google's description of a machine, read `at` a time of Google's clock."""
    labels, status = labels_of(machine), str(machine.get("status") or "")
    made_at = timestamp(machine.get("creationTimestamp"), read_at)
    ends_at = _inside(machine, "resourceStatus", "scheduling").get("terminationTimestamp")
    seconds = _inside(machine, "scheduling", "maxRunDuration").get("seconds")
    ends_in, detail = None, one_line(str(machine.get("statusMessage") or ""))
    if ends_at:
        ends_in = max(0.0, timestamp(ends_at, read_at) - read_at)
    elif seconds is not None and status not in ("STOPPED", "TERMINATED", "SUSPENDED"):  # Google forgets their end
        ends_in = max(0.0, made_at + float(seconds) - read_at)  # as if it had run since it was made
    return LABELS.instance(
        labels,
        str(machine.get("id") or machine.get("name") or ""),
        _STATES.get(status, "stopping"),
        age_seconds=max(0.0, read_at - made_at),
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


CALL_SECONDS = 50.0
"""Time limit of one method; less than `workers.call_seconds`."""
FIRST_POLL_SECONDS, MAX_POLL_SECONDS = 0.25, 2.0
SETTLED_SECONDS = 120.0
"""A machine that is missing this long after Google made it, by Google's clock, was deleted since."""
MAX_RUN_SECONDS = 120 * 24 * 3600
MAX_HINTS = 10_000
MIN_SECRET_LENGTH = 8


class GCPCloudProvider(CloudProviderBase):
    """Starts and deletes virtual machines, with the settings of `providers.gcp` or a mapping of its keys."""

    name = "gcp"
    notice_source = "gcp"

    def __init__(self, settings: GcpSettings | Mapping[str, Any], *, timeout_seconds: float = CALL_SECONDS) -> None:
        self._settings = provider_settings(self.name, GcpSettings, settings)
        if not self._settings.zone_names:
            raise BadInput("providers.gcp: the key 'zone' (or 'zones') is missing")
        if self._settings.max_run_seconds > MAX_RUN_SECONDS:
            raise BadInput(f"providers.gcp.max_run_hours: Google takes at most {MAX_RUN_SECONDS // 3600}")
        self._where = self._settings.zone_names
        self._is_one_region = len({region_of(zone) for zone in self._where}) <= 1
        self._timeout_seconds = timeout_seconds
        self._api = ComputeApi(self._settings)
        self._lock = threading.Lock()
        self._zones: dict[str, str] = {}  # zones in which machines were seen last: only a hint where to look first
        self._machine_types: dict[tuple[str, str], Mapping[str, Any]] = {}  # by type and zone; they do not change

    def create(self, order: WorkerOrder) -> WorkerInstance:
        """Insert the machine and wait until Google has made it; one that is there is compared with the order."""
        action, deadline = f"create {order.worker_id}", Deadline(self._timeout_seconds)
        try:
            _, _, zone = ordered_machine(order.offer)
            if not NAME.fullmatch(order.worker_id) or not LABEL_VALUE.fullmatch(order.grid_id):
                raise Refused(
                    f"{order.worker_id} of {order.grid_id}: Google takes only names of a-z, 0-9 and -, up to 63"
                )
            path = f"/zones/{zone}/instances"
            key, body = {"requestId": request_id(order.worker_id)}, instance_body(self._settings, order)
            operation: Mapping[str, Any] = {}
            try:
                operation = self._api.call("POST", path, deadline, action=action, query=key, body=body).body
            except ApiFailure as failure:
                if failure.status != 409:
                    raise call_error(failure, action, order.offer, is_one_region=self._is_one_region) from None
            failed: ApiFailure | None = None
            if operation:
                pause = FIRST_POLL_SECONDS
                while operation.get("status") != "DONE":
                    deadline.pause(pause, f"{action}: Google is still at it")
                    pause = min(2 * pause, MAX_POLL_SECONDS)
                    polled = self._get(f"/zones/{zone}/operations/{operation.get('name')}", action, deadline)
                    if polled is None:
                        raise Unreachable(f"{action}: Google does not know its operation {operation.get('name')}")
                    operation = polled.body
                failed = ApiFailure.of_operation(operation)
            answer = self._get(f"{path}/{order.worker_id}", action, deadline)
            if answer is None:
                if failed is not None:
                    raise operation_error(failed, action, order.offer, is_one_region=self._is_one_region)
                known = (
                    self._get(f"/zones/{zone}/operations/{operation.get('name')}", action, deadline)
                    if operation
                    else None
                )
                if known is None:
                    raise Unreachable(f"{action}: Google says that it is there, and does not show it")
                # Google has made the machine and does not show it: not yet, or, if that was long ago, no more.
                instance = str(known.body.get("targetId") or order.worker_id)
                since = known.at - timestamp(known.body.get("endTime"), known.at)
                self._remember(order.worker_id, zone)
                if since > SETTLED_SECONDS:
                    return WorkerInstance(order.worker_id, order.grid_id, instance, "gone", since)
                return WorkerInstance(order.worker_id, order.grid_id, instance, "starting", max(0.0, since))
            LABELS.check_order(labels_of(answer.body), order, f"a machine {order.worker_id} in {zone}")
            self._remember(order.worker_id, zone)
            return worker_instance(answer.body, answer.at)
        except GridError as failure:
            text = str(failure)  # Google may quote the boot script
            for value in order.environ.values():
                if len(value) >= MIN_SECRET_LENGTH:
                    text = text.replace(value, "***")
            failure.args = (text, *failure.args[1:])
            raise

    def list(self, grid_id: str) -> Sequence[WorkerInstance]:
        """The machines of this grid in all zones of the project, also in those that the config names no more."""
        if not LABEL_VALUE.fullmatch(grid_id):
            return []
        machines = self._labelled({LABELS.grid: grid_id}, "list", Deadline(self._timeout_seconds))
        return [
            worker_instance(machine, time)
            for machine, time in machines
            if is_ours(machine, labels_of(machine).get(LABELS.worker, ""), grid_id)
        ]

    def describe(self, worker_id: str, grid_id: str) -> WorkerInstance | None:
        """The machine; None once it is deleted. One that was only stopped is `stopping`: its disk is still paid for."""
        seen = self._find(worker_id, grid_id, f"describe {worker_id}", Deadline(self._timeout_seconds))
        return None if seen is None else worker_instance(*seen)

    def terminate(self, worker_id: str, grid_id: str) -> None:
        """Have the machine deleted, with its disk. No key goes with it: Google would repeat a failure."""
        action, deadline = f"terminate {worker_id}", Deadline(self._timeout_seconds)
        seen = self._find(worker_id, grid_id, action, deadline)
        if seen is None:
            return
        path = f"/zones/{zone_of(seen[0])}/instances/{seen[0]['name']}"
        try:
            self._api.call("DELETE", path, deadline, action=action)
        except ApiFailure as failure:
            if failure.status != 404:
                raise call_error(failure, action) from None

    def offers(self) -> Sequence[WorkerOffer]:
        """Each kind of worker on each market, spot first, of each machine type, in each zone; in the config's order."""
        action, deadline, settings = "offers", Deadline(self._timeout_seconds), self._settings
        if not settings.machine_types:
            raise BadInput("providers.gcp.machine_types names no machine type, such as {cpu: e2-standard-4}")
        markets = [SPOT, STANDARD] if settings.preemptible_enabled else [STANDARD]
        limits: dict[str, dict[str, float]] = {}
        for region in dict.fromkeys(map(region_of, self._where)):
            known = limits.setdefault(region, {})
            for path in ("", f"/regions/{region}"):
                with contextlib.suppress(Refused):  # an unknown limit is no limit
                    answer = self._get(path, action, deadline)
                    known |= limits_of((answer.body if answer is not None else {}).get("quotas") or ())
        offers: list[WorkerOffer] = []
        for kind, shapes in shapes_of(settings).items():
            for market in markets:
                for wanted in shapes:
                    for zone in self._where:
                        key = (wanted.shape.machine_type, zone)
                        if key not in self._machine_types:
                            described = self._get(f"/zones/{zone}/machineTypes/{key[0]}", action, deadline)
                            if described is None:
                                continue  # the zone does not have this type
                            self._machine_types[key] = described.body
                        resources = resources_of(self._machine_types[key], wanted.shape)
                        place = (kind, market, zone)
                        offers.append(make_offer(settings, wanted, place, resources, limits[region_of(zone)]))
        if not offers:
            types = ", ".join(wanted.written for shapes in shapes_of(settings).values() for wanted in shapes)
            raise BadInput(f"no machine type of providers.gcp.machine_types ({types}) is in {', '.join(self._where)}")
        return offers

    def check(self) -> Sequence[str]:
        """Credentials, permissions, image and machine types, each by a call that changes nothing."""
        action, deadline, settings = "check", Deadline(self._timeout_seconds), self._settings
        lines = [self._api.source_of_credentials()]
        needed = needed_permissions(settings)
        try:
            granted = set(self._api.granted(needed, deadline, action=action))
        except ApiFailure as failure:
            lines.append(f"which permissions there are cannot be asked: {failure.message}")
        else:
            if missing := [permission for permission in needed if permission not in granted]:
                raise Refused(f"project {settings.project}: the credentials lack the permissions {', '.join(missing)}")
            lines.append(f"project {settings.project}: all {len(needed)} permissions that are needed")
        image = image_path(settings.image)  # an image or a family of images, maybe of another project
        other = image.removeprefix("projects/") if image.startswith("projects/") else ""
        project, _, rest = other.partition("/")
        if self._get(f"/{rest or image}", action, deadline, project=project) is None:
            raise Refused(f"providers.gcp.image: there is no image {image}, or the credentials may not read it")
        lines.append(f"image {image}")
        offers = self.offers()
        unavailable = [f"{offer.id}: {offer.unavailable}" for offer in offers if offer.unavailable]
        lines.append(f"{len(offers) - len(unavailable)} offers in {', '.join(self._where)}")
        return [*lines, *unavailable]

    def _find(
        self, worker_id: str, grid_id: str, action: str, deadline: Deadline
    ) -> tuple[Mapping[str, Any], float] | None:
        """A machine of this grid and the time of Google's answer: found by name where it was seen last and in the zones
        of the config, by labels in all others. While a zone does not answer, `Unreachable`."""
        if not NAME.fullmatch(worker_id) or not LABEL_VALUE.fullmatch(grid_id):
            return None
        with self._lock:
            hint = self._zones.get(worker_id)
        for zone in dict.fromkeys([*([hint] if hint else []), *self._where]):
            answer = self._get(f"/zones/{zone}/instances/{worker_id}", action, deadline)
            if answer is not None and is_ours(answer.body, worker_id, grid_id):
                self._remember(worker_id, zone)
                return answer.body, answer.at
        for machine, time in self._labelled({LABELS.worker: worker_id, LABELS.grid: grid_id}, action, deadline):
            if is_ours(machine, worker_id, grid_id):
                self._remember(worker_id, zone_of(machine))
                return machine, time
        with self._lock:
            self._zones.pop(worker_id, None)
        return None

    def _labelled(
        self, labels: Mapping[str, str], action: str, deadline: Deadline
    ) -> Iterator[tuple[Mapping[str, Any], float]]:
        """The machines with these labels in all zones. A list that lacks a zone is refused: its machines would seem
        gone."""
        terms = " AND ".join(f'(labels.{name} = "{value}")' for name, value in labels.items())
        query = {"filter": terms, "maxResults": "500", "returnPartialSuccess": "true"}
        try:
            for page in self._api.pages("/aggregated/instances", deadline, action=action, query=query):
                scopes = page.body.get("items") or {}
                if missing := [*(page.body.get("unreachables") or ()), *unreachable_scopes(scopes)]:
                    raise Unreachable(f"{action}: Google's list lacks {one_line(', '.join(map(str, missing)))}")
                for scope in scopes.values():
                    for machine in scope.get("instances") or ():
                        if labels.items() <= labels_of(machine).items():
                            yield machine, page.at
        except ApiFailure as failure:
            raise call_error(failure, action) from None

    def _remember(self, worker_id: str, zone: str) -> None:
        with self._lock:
            if len(self._zones) >= MAX_HINTS:
                self._zones.clear()
            self._zones[worker_id] = zone

    def _get(self, path: str, action: str, deadline: Deadline, *, project: str = "") -> ApiAnswer | None:
        try:
            return self._api.get(path, deadline, action=action, project=project)
        except ApiFailure as failure:
            raise call_error(failure, action) from None
