"""Workers on virtual machines of Google's Compute Engine.

- The name of a machine is the id of its worker. Whose it is, and by which order it was made, is in its labels, which
  are part of the call that creates it; nothing without both labels of a grid is shown as its worker or deleted.
- The key of a creation is derived from the worker's id: Google ignores a second request with it, also when the machine
  of the first one is gone.
- Google deletes every machine by itself `max_run_hours` after it began to run (docs/adr/0038).
- A machine has no identity of its own at Google unless `service_account` gives it one: whoever runs on it could use it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distributed_grid.adapters.clouds.gcp_api import ApiAnswer, ComputeApi, Deadline
from distributed_grid.adapters.clouds.gcp_errors import ApiFailure, call_error, one_line, operation_error
from distributed_grid.adapters.clouds.gcp_instances import (
    GRID_LABEL,
    LABEL_VALUE,
    NAME,
    ORDER_LABEL,
    WORKER_LABEL,
    image_path,
    instance_body,
    is_ours,
    label,
    needed_permissions,
    request_id,
    timestamp,
    unreachable_scopes,
    worker_instance,
    zone_of,
)
from distributed_grid.adapters.clouds.gcp_offers import (
    SPOT,
    STANDARD,
    MachineShape,
    limits_of,
    make_offer,
    ordered_machine,
    region_of,
    resources_of,
    shapes_of,
)
from distributed_grid.config.providers import GcpSettings, provider_settings
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import BadInput, Conflict, GridError, Refused, Unreachable
from distributed_grid.ports import CloudProviderBase, WorkerInstance, WorkerOffer, WorkerOrder

CALL_SECONDS = 50.0
"""How long one method may take; less than `workers.call_seconds`."""
FIRST_POLL_SECONDS, MAX_POLL_SECONDS = 0.25, 2.0
SETTLED_SECONDS = 120.0
"""A machine that is not there so long after Google had made it, by Google's clock, was deleted since."""
MAX_RUN_SECONDS = 120 * 24 * 3600
MAX_HINTS = 10_000
MIN_SECRET_LENGTH = 8


class GCPCloudProvider(CloudProviderBase):
    """Starts and deletes virtual machines, with the settings of `providers.gcp` or a mapping of its keys."""

    name = "gcp"
    notice_source = "gcp"

    def __init__(self, settings: GcpSettings | Mapping[str, Any], *, timeout_seconds: float = CALL_SECONDS) -> None:
        self._settings = _checked(settings)
        self._timeout_seconds = timeout_seconds
        self._api = ComputeApi(self._settings)
        self._lock = threading.Lock()
        self._zones: dict[str, str] = {}
        """Where machines were seen last: looked there first, nothing is concluded from it."""
        self._machine_types: dict[tuple[str, str], Mapping[str, Any]] = {}
        """Descriptions of machine types, which do not change."""

    def create(self, order: WorkerOrder) -> WorkerInstance:
        """Insert the machine and wait until Google has made it; one that is there is compared with the order."""
        why, deadline = f"create {order.worker_id}", self._deadline()
        try:
            return self._create(order, why, deadline)
        except GridError as failure:
            failure.args = (_without_secrets(str(failure), order), *failure.args[1:])
            raise

    def list(self, grid_id: str) -> Sequence[WorkerInstance]:
        """The machines of this grid in all zones of the project, also in those that the config names no more."""
        if not LABEL_VALUE.fullmatch(grid_id):
            return []
        found = self._labelled({GRID_LABEL: grid_id}, "list", self._deadline())
        return [worker_instance(one, at) for one, at in found if is_ours(one, label(one, WORKER_LABEL), grid_id)]

    def describe(self, worker_id: str, grid_id: str) -> WorkerInstance | None:
        """The machine; None once it is deleted. One that was only stopped is `stopping`: its disk is still paid for."""
        found = self._find(worker_id, grid_id, f"describe {worker_id}", self._deadline())
        return None if found is None else worker_instance(*found)

    def terminate(self, worker_id: str, grid_id: str) -> None:
        """Have the machine deleted, with its disk. No key goes with it: Google would repeat a failure."""
        why, deadline = f"terminate {worker_id}", self._deadline()
        found = self._find(worker_id, grid_id, why, deadline)
        if found is None:
            return
        path = f"/zones/{zone_of(found[0])}/instances/{found[0]['name']}"
        try:
            self._api.call("DELETE", path, deadline, why=why)
        except ApiFailure as failure:
            if failure.status != 404:
                raise call_error(failure, why) from None

    def offers(self) -> Sequence[WorkerOffer]:
        """Each kind of worker on each market, spot first, of each machine type, in each zone; in the config's order."""
        why, deadline, settings = "offers", self._deadline(), self._settings
        if not settings.machine_types:
            raise BadInput("providers.gcp.machine_types names no machine type, such as {cpu: e2-standard-4}")
        markets = [SPOT, STANDARD] if settings.preemptible_enabled else [STANDARD]
        limits = {region: self._limits(region, why, deadline) for region in dict.fromkeys(map(region_of, self._where))}
        found: list[WorkerOffer] = []
        for kind, shapes in shapes_of(settings).items():
            for market in markets:
                for written in shapes:
                    for zone in self._where:
                        resources = self._resources(written.shape, zone, why, deadline)
                        if resources is not None:
                            place = (kind, market, zone)
                            found.append(make_offer(settings, written, place, resources, limits[region_of(zone)]))
        if not found:
            types = ", ".join(one.written for shapes in shapes_of(settings).values() for one in shapes)
            raise BadInput(f"no machine type of providers.gcp.machine_types ({types}) is in {', '.join(self._where)}")
        return found

    def check(self) -> Sequence[str]:
        """Credentials, permissions, image and machine types, each by a call that changes nothing."""
        why, deadline, settings = "check", self._deadline(), self._settings
        lines = [self._api.source_of_credentials()]
        needed = needed_permissions(settings)
        try:
            granted = set(self._api.granted(needed, deadline, why=why))
        except ApiFailure as failure:
            lines.append(f"which permissions there are cannot be asked: {failure.message}")
        else:
            if missing := [one for one in needed if one not in granted]:
                raise Refused(f"project {settings.project}: the credentials lack the permissions {', '.join(missing)}")
            lines.append(f"project {settings.project}: all {len(needed)} permissions that are needed")
        image = image_path(settings.image)
        if not self._has_image(image, why, deadline):
            raise Refused(f"providers.gcp.image: there is no image {image}, or the credentials may not read it")
        lines.append(f"image {image}")
        offers = self.offers()
        cannot = [f"{one.id}: {one.unavailable}" for one in offers if one.unavailable]
        lines.append(f"{len(offers) - len(cannot)} offers in {', '.join(self._where)}")
        return [*lines, *cannot]

    # ------------------------------------------------------------------ creating

    def _create(self, order: WorkerOrder, why: str, deadline: Deadline) -> WorkerInstance:
        _, _, zone = ordered_machine(order.offer)
        if not NAME.fullmatch(order.worker_id) or not LABEL_VALUE.fullmatch(order.grid_id):
            raise Refused(f"{order.worker_id} of {order.grid_id}: Google takes only names of a-z, 0-9 and -, up to 63")
        path = f"/zones/{zone}/instances"
        key, body = {"requestId": request_id(order.worker_id)}, instance_body(self._settings, order)
        operation: Mapping[str, Any] = {}
        try:
            operation = self._api.call("POST", path, deadline, why=why, query=key, body=body).body
        except ApiFailure as failure:
            if failure.status != 409:
                raise call_error(failure, why, order.offer, is_one_region=self._is_one_region) from None
        failed = self._finished(operation, zone, why, deadline) if operation else None
        found = self._get(f"{path}/{order.worker_id}", why, deadline)
        if found is None:
            if failed is not None:
                raise operation_error(failed, why, order.offer, is_one_region=self._is_one_region)
            return self._unseen(order, zone, why, deadline, operation)
        if not is_ours(found.body, order.worker_id, order.grid_id):
            raise Conflict(f"there is a machine {order.worker_id} in {zone} that is not this grid's")
        if label(found.body, ORDER_LABEL) != order.digest:
            raise Conflict(f"there is a machine {order.worker_id} in {zone} that was ordered otherwise")
        self._remember(order.worker_id, zone)
        return worker_instance(found.body, found.at)

    def _finished(self, operation: Mapping[str, Any], zone: str, why: str, deadline: Deadline) -> ApiFailure | None:
        """Wait until an operation has ended; why it failed, None where it did not."""
        pause = FIRST_POLL_SECONDS
        while operation.get("status") != "DONE":
            deadline.pause(pause, f"{why}: Google is still at it")
            pause = min(2 * pause, MAX_POLL_SECONDS)
            found = self._get(f"/zones/{zone}/operations/{operation.get('name')}", why, deadline)
            if found is None:
                raise Unreachable(f"{why}: Google does not know its operation {operation.get('name')}")
            operation = found.body
        return ApiFailure.of_operation(operation)

    def _unseen(
        self, order: WorkerOrder, zone: str, why: str, deadline: Deadline, operation: Mapping[str, Any]
    ) -> WorkerInstance:
        """A machine that Google has made and does not show: not yet, or, if that was long ago, no more."""
        known = self._get(f"/zones/{zone}/operations/{operation.get('name')}", why, deadline) if operation else None
        if known is None:
            raise Unreachable(f"{why}: Google says that it is there, and does not show it")
        instance = str(known.body.get("targetId") or order.worker_id)
        since = known.at - timestamp(known.body.get("endTime"), known.at)
        self._remember(order.worker_id, zone)
        if since > SETTLED_SECONDS:
            return WorkerInstance(order.worker_id, order.grid_id, instance, "gone", since)
        return WorkerInstance(order.worker_id, order.grid_id, instance, "starting", max(0.0, since))

    # ------------------------------------------------------------------ finding

    def _find(
        self, worker_id: str, grid_id: str, why: str, deadline: Deadline
    ) -> tuple[Mapping[str, Any], float] | None:
        """A machine of this grid, and when it was seen: by its name where it was seen last and in the zones of the
        config, by its labels in all others. Nothing is concluded while a zone cannot be asked."""
        if not NAME.fullmatch(worker_id) or not LABEL_VALUE.fullmatch(grid_id):
            return None
        with self._lock:
            hint = self._zones.get(worker_id)
        for zone in dict.fromkeys([*([hint] if hint else []), *self._where]):
            found = self._get(f"/zones/{zone}/instances/{worker_id}", why, deadline)
            if found is not None and is_ours(found.body, worker_id, grid_id):
                self._remember(worker_id, zone)
                return found.body, found.at
        for one, at in self._labelled({WORKER_LABEL: worker_id, GRID_LABEL: grid_id}, why, deadline):
            if is_ours(one, worker_id, grid_id):
                self._remember(worker_id, zone_of(one))
                return one, at
        with self._lock:
            self._zones.pop(worker_id, None)
        return None

    def _labelled(
        self, labels: Mapping[str, str], why: str, deadline: Deadline
    ) -> Iterator[tuple[Mapping[str, Any], float]]:
        """The machines with these labels in all zones. A list that lacks a zone would say that machines are gone which
        are not: it is refused."""
        words = " AND ".join(f'(labels.{name} = "{value}")' for name, value in labels.items())
        query = {"filter": words, "maxResults": "500", "returnPartialSuccess": "true"}
        try:
            for page in self._api.pages("/aggregated/instances", deadline, why=why, query=query):
                scopes = page.body.get("items") or {}
                if missing := [*(page.body.get("unreachables") or ()), *unreachable_scopes(scopes)]:
                    raise Unreachable(f"{why}: Google's list lacks {one_line(', '.join(map(str, missing)))}")
                for scope in scopes.values():
                    for one in scope.get("instances") or ():
                        if all(label(one, name) == value for name, value in labels.items()):
                            yield one, page.at
        except ApiFailure as failure:
            raise call_error(failure, why) from None

    def _remember(self, worker_id: str, zone: str) -> None:
        with self._lock:
            if len(self._zones) >= MAX_HINTS:
                self._zones.clear()
            self._zones[worker_id] = zone

    def _get(self, path: str, why: str, deadline: Deadline) -> ApiAnswer | None:
        try:
            return self._api.get(path, deadline, why=why)
        except ApiFailure as failure:
            raise call_error(failure, why) from None

    # ------------------------------------------------------------------ offering

    @property
    def _where(self) -> tuple[str, ...]:
        return self._settings.zone_names

    @property
    def _is_one_region(self) -> bool:
        return len({region_of(zone) for zone in self._where}) <= 1

    def _deadline(self) -> Deadline:
        return Deadline(self._timeout_seconds)

    def _resources(self, shape: MachineShape, zone: str, why: str, deadline: Deadline) -> WorkerResources | None:
        """What a machine has; None where the zone does not have its type."""
        key = (shape.machine_type, zone)
        known = self._machine_types.get(key)
        if known is None:
            found = self._get(f"/zones/{zone}/machineTypes/{shape.machine_type}", why, deadline)
            if found is None:
                return None
            known = self._machine_types[key] = found.body
        return resources_of(known, shape)

    def _limits(self, region: str, why: str, deadline: Deadline) -> Mapping[str, float]:
        """The limits of a region and of the project; what may not be read is not known, and is no limit."""
        found: dict[str, float] = {}
        for path in ("", f"/regions/{region}"):
            try:
                answer = self._get(path, why, deadline)
            except Refused:
                continue
            found |= limits_of((answer.body if answer is not None else {}).get("quotas") or ())
        return found

    def _has_image(self, path: str, why: str, deadline: Deadline) -> bool:
        """Whether there is such an image, or such a family of them; it may be another project's."""
        other = path.removeprefix("projects/") if path.startswith("projects/") else ""
        project, _, rest = other.partition("/")
        try:
            return self._api.get(f"/{rest or path}", deadline, why=why, project=project) is not None
        except ApiFailure as failure:
            raise call_error(failure, why) from None


def _checked(settings: GcpSettings | Mapping[str, Any]) -> GcpSettings:
    """The settings, read as those of a config where they are a mapping."""
    found = provider_settings(GCPCloudProvider.name, GcpSettings, settings)
    if not found.zone_names:
        raise BadInput("providers.gcp: the key 'zone' (or 'zones') is missing")
    if found.max_run_seconds > MAX_RUN_SECONDS:
        raise BadInput(f"providers.gcp.max_run_hours: Google takes at most {MAX_RUN_SECONDS // 3600}")
    return found


def _without_secrets(text: str, order: WorkerOrder) -> str:
    """A message without anything that is only for the agent, whatever it was that Google quoted."""
    for value in order.environ.values():
        if len(value) >= MIN_SECRET_LENGTH:
            text = text.replace(value, "***")
    return text
