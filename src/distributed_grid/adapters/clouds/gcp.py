"""Workers on virtual machines of Google's Compute Engine.

- The name of a machine is the id of its worker. Its labels (grid, worker, order) are part of the call that creates it;
  nothing without both labels of a grid is shown as its worker or deleted.
- The key of a creation is derived from the worker's id: Google ignores a second request with it, also when the machine
  of the first one is gone.
- Google deletes every machine by itself `max_run_hours` after it began to run (docs/adr/0038).
- A machine has no identity of its own at Google unless `service_account` gives it one: every job on it could use it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distributed_grid.adapters.clouds.gcp_api import (
    ApiAnswer,
    ApiFailure,
    ComputeApi,
    Deadline,
    call_error,
    one_line,
    operation_error,
)
from distributed_grid.adapters.clouds.gcp_machines import (
    LABEL_VALUE,
    NAME,
    SPOT,
    STANDARD,
    image_path,
    instance_body,
    is_ours,
    labels_of,
    limits_of,
    make_offer,
    needed_permissions,
    ordered_machine,
    region_of,
    request_id,
    resources_of,
    shapes_of,
    timestamp,
    unreachable_scopes,
    worker_instance,
    zone_of,
)
from distributed_grid.adapters.clouds.machine_tags import DASHED_TAGS as LABELS
from distributed_grid.config.providers import GcpSettings, provider_settings
from distributed_grid.errors import BadInput, GridError, Refused, Unreachable
from distributed_grid.ports import CloudProviderBase, WorkerInstance, WorkerOffer, WorkerOrder

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
        self._timeout_seconds = timeout_seconds
        self._api = ComputeApi(self._settings)
        self._lock = threading.Lock()
        self._zones: dict[str, str] = {}  # zones in which machines were seen last: only a hint where to look first
        self._machine_types: dict[tuple[str, str], Mapping[str, Any]] = {}  # by type and zone; they do not change

    def create(self, order: WorkerOrder) -> WorkerInstance:
        """Insert the machine and wait until Google has made it; one that is there is compared with the order."""
        why, deadline = f"create {order.worker_id}", self._deadline()
        try:
            return self._create(order, why, deadline)
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
        machines = self._labelled({LABELS.grid: grid_id}, "list", self._deadline())
        return [
            worker_instance(machine, at)
            for machine, at in machines
            if is_ours(machine, labels_of(machine).get(LABELS.worker, ""), grid_id)
        ]

    def describe(self, worker_id: str, grid_id: str) -> WorkerInstance | None:
        """The machine; None once it is deleted. One that was only stopped is `stopping`: its disk is still paid for."""
        seen = self._find(worker_id, grid_id, f"describe {worker_id}", self._deadline())
        return None if seen is None else worker_instance(*seen)

    def terminate(self, worker_id: str, grid_id: str) -> None:
        """Have the machine deleted, with its disk. No key goes with it: Google would repeat a failure."""
        why, deadline = f"terminate {worker_id}", self._deadline()
        seen = self._find(worker_id, grid_id, why, deadline)
        if seen is None:
            return
        path = f"/zones/{zone_of(seen[0])}/instances/{seen[0]['name']}"
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
        offers: list[WorkerOffer] = []
        for kind, shapes in shapes_of(settings).items():
            for market in markets:
                for wanted in shapes:
                    for zone in self._where:
                        key = (wanted.shape.machine_type, zone)
                        if key not in self._machine_types:
                            answer = self._get(f"/zones/{zone}/machineTypes/{key[0]}", why, deadline)
                            if answer is None:
                                continue  # the zone does not have this type
                            self._machine_types[key] = answer.body
                        resources = resources_of(self._machine_types[key], wanted.shape)
                        place = (kind, market, zone)
                        offers.append(make_offer(settings, wanted, place, resources, limits[region_of(zone)]))
        if not offers:
            types = ", ".join(wanted.written for shapes in shapes_of(settings).values() for wanted in shapes)
            raise BadInput(f"no machine type of providers.gcp.machine_types ({types}) is in {', '.join(self._where)}")
        return offers

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
            if missing := [permission for permission in needed if permission not in granted]:
                raise Refused(f"project {settings.project}: the credentials lack the permissions {', '.join(missing)}")
            lines.append(f"project {settings.project}: all {len(needed)} permissions that are needed")
        image = image_path(settings.image)  # an image or a family of images, maybe of another project
        other = image.removeprefix("projects/") if image.startswith("projects/") else ""
        project, _, rest = other.partition("/")
        if self._get(f"/{rest or image}", why, deadline, project=project) is None:
            raise Refused(f"providers.gcp.image: there is no image {image}, or the credentials may not read it")
        lines.append(f"image {image}")
        offers = self.offers()
        unavailable = [f"{offer.id}: {offer.unavailable}" for offer in offers if offer.unavailable]
        lines.append(f"{len(offers) - len(unavailable)} offers in {', '.join(self._where)}")
        return [*lines, *unavailable]

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
        failed = self._wait_for(operation, zone, why, deadline) if operation else None
        answer = self._get(f"{path}/{order.worker_id}", why, deadline)
        if answer is None:
            if failed is not None:
                raise operation_error(failed, why, order.offer, is_one_region=self._is_one_region)
            known = self._get(f"/zones/{zone}/operations/{operation.get('name')}", why, deadline) if operation else None
            if known is None:
                raise Unreachable(f"{why}: Google says that it is there, and does not show it")
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

    def _wait_for(self, operation: Mapping[str, Any], zone: str, why: str, deadline: Deadline) -> ApiFailure | None:
        """Wait until an operation has ended; its failure, None where it succeeded."""
        pause = FIRST_POLL_SECONDS
        while operation.get("status") != "DONE":
            deadline.pause(pause, f"{why}: Google is still at it")
            pause = min(2 * pause, MAX_POLL_SECONDS)
            answer = self._get(f"/zones/{zone}/operations/{operation.get('name')}", why, deadline)
            if answer is None:
                raise Unreachable(f"{why}: Google does not know its operation {operation.get('name')}")
            operation = answer.body
        return ApiFailure.of_operation(operation)

    def _find(
        self, worker_id: str, grid_id: str, why: str, deadline: Deadline
    ) -> tuple[Mapping[str, Any], float] | None:
        """A machine of this grid and the time of Google's answer: found by name where it was seen last and in the zones
        of the config, by labels in all others. While a zone does not answer, `Unreachable`."""
        if not NAME.fullmatch(worker_id) or not LABEL_VALUE.fullmatch(grid_id):
            return None
        with self._lock:
            hint = self._zones.get(worker_id)
        for zone in dict.fromkeys([*([hint] if hint else []), *self._where]):
            answer = self._get(f"/zones/{zone}/instances/{worker_id}", why, deadline)
            if answer is not None and is_ours(answer.body, worker_id, grid_id):
                self._remember(worker_id, zone)
                return answer.body, answer.at
        for machine, at in self._labelled({LABELS.worker: worker_id, LABELS.grid: grid_id}, why, deadline):
            if is_ours(machine, worker_id, grid_id):
                self._remember(worker_id, zone_of(machine))
                return machine, at
        with self._lock:
            self._zones.pop(worker_id, None)
        return None

    def _labelled(
        self, labels: Mapping[str, str], why: str, deadline: Deadline
    ) -> Iterator[tuple[Mapping[str, Any], float]]:
        """The machines with these labels in all zones. A list that lacks a zone is refused: its machines would seem
        gone."""
        terms = " AND ".join(f'(labels.{name} = "{value}")' for name, value in labels.items())
        query = {"filter": terms, "maxResults": "500", "returnPartialSuccess": "true"}
        try:
            for page in self._api.pages("/aggregated/instances", deadline, why=why, query=query):
                scopes = page.body.get("items") or {}
                if missing := [*(page.body.get("unreachables") or ()), *unreachable_scopes(scopes)]:
                    raise Unreachable(f"{why}: Google's list lacks {one_line(', '.join(map(str, missing)))}")
                for scope in scopes.values():
                    for machine in scope.get("instances") or ():
                        if labels.items() <= labels_of(machine).items():
                            yield machine, page.at
        except ApiFailure as failure:
            raise call_error(failure, why) from None

    def _remember(self, worker_id: str, zone: str) -> None:
        with self._lock:
            if len(self._zones) >= MAX_HINTS:
                self._zones.clear()
            self._zones[worker_id] = zone

    def _get(self, path: str, why: str, deadline: Deadline, *, project: str = "") -> ApiAnswer | None:
        try:
            return self._api.get(path, deadline, why=why, project=project)
        except ApiFailure as failure:
            raise call_error(failure, why) from None

    @property
    def _where(self) -> tuple[str, ...]:
        return self._settings.zone_names

    @property
    def _is_one_region(self) -> bool:
        return len({region_of(zone) for zone in self._where}) <= 1

    def _deadline(self) -> Deadline:
        return Deadline(self._timeout_seconds)

    def _limits(self, region: str, why: str, deadline: Deadline) -> Mapping[str, float]:
        """The limits of a region and of the project, as far as they may be read: an unknown one is no limit."""
        limits: dict[str, float] = {}
        for path in ("", f"/regions/{region}"):
            try:
                answer = self._get(path, why, deadline)
            except Refused:
                continue
            limits |= limits_of((answer.body if answer is not None else {}).get("quotas") or ())
        return limits
