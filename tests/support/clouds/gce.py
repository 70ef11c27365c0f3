"""Stand-in of Google's Compute Engine: its REST calls on a port of this machine, with its real rules and with faults.

- A `requestId` stands for one operation: the same again brings that operation back, whatever else is asked for, and
  also when its machine is gone or never came. Names are unique in a zone; an operation may fail long after the call.
- What is deleted goes on for `stops_in` seconds. `maxRunDuration` counts from when it runs; a machine that is stopped
  has no end any more, and its disk is paid for.
- With `boots`, a machine is the startup script, run by a process of its own.

Faults besides the common ones: `die_before` and `die_after` call `on_die`, `unauthorized` is a 401, `busy` a 503
without an effect, `garbage` an answer that is no JSON.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from distributed_grid.adapters.clouds.gcp import GCPCloudProvider
from tests.support.clouds.booted_machines import BootedMachines
from tests.support.clouds.gce_web import Answer, GceWebServer, failure
from tests.support.clouds.stand_in import FaultScript, Machine

PROJECT_ID, ZONES = "test-project", ("us-central1-a", "us-central1-b")
TYPES: dict[str, dict[str, Any]] = {
    "e2-standard-2": {"guestCpus": 2, "memoryMb": 8192},
    "n2-standard-4": {"guestCpus": 4, "memoryMb": 16384},
    "n1-standard-4": {"guestCpus": 4, "memoryMb": 15360},
    "g2-standard-4": {
        "guestCpus": 4,
        "memoryMb": 16384,
        "accelerators": [{"guestAcceleratorType": "nvidia-l4", "guestAcceleratorCount": 1}],
    },
}
FAMILY_IMAGE = re.compile(r"/projects/[^/]+/global/images/(family/)?debian-12$")


class GceStandIn:
    """A cloud for tests, as `CloudStandIn` describes it. `stockouts` has machine types, zones, or `TYPE/ZONE`; `quotas`
    the limits of the region and `all_quotas` those of the project, by Google's name."""

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        *,
        visible_after: float = 0.0,
        stops_in: float = 0.0,
        operation_seconds: float = 0.0,
        boots: Path | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.clock = clock
        self.visible_after, self.stops_in, self.operation_seconds = visible_after, stops_in, operation_seconds
        self.faults = FaultScript()
        self.stockouts: set[str] = set()
        self.quotas: dict[str, float] = {}
        self.all_quotas: dict[str, float] = {}
        self.permissions: set[str] | None = None
        self.page_size = 500
        self.unreachable_zones: list[str] = []
        self.bodies: list[Mapping[str, Any]] = []
        self.on_die: Callable[[], None] = lambda: None
        self._booted = BootedMachines(boots) if boots is not None else None
        self._settings = dict(settings or {})
        self._lock = threading.RLock()
        self._instances: list[dict[str, Any]] = []
        self._operations: dict[str, dict[str, Any]] = {}
        self._by_request: dict[str, dict[str, Any]] = {}
        self._refusals: list[str] = []
        self._number = 10**18
        self.web = GceWebServer(self.answer, lambda: self.clock())
        self.url = self.web.url

    # ------------------------------------------------------------------ the console

    def settings(self) -> dict[str, Any]:
        """A section `providers.gcp` for this cloud."""
        return {
            "project": PROJECT_ID,
            "zones": list(ZONES),
            "machine_types": {"cpu": "e2-standard-2"},
            "preemptible_enabled": True,
            "price_per_hour": {"cpu": 0.1, "cpu:spot": 0.03},
            "endpoint_url": self.url,
            "anonymous": True,
            **self._settings,
        }

    def provider(self) -> GCPCloudProvider:
        return GCPCloudProvider({key: value for key, value in self.settings().items() if value is not None})

    def machines(self) -> list[Machine]:
        with self._lock:
            self._advance()
            return [_machine(one) for one in self._instances]

    def existing(self) -> dict[str, Machine]:
        """The machines that are not deleted, by worker."""
        with self._lock:
            self._advance()
            return {_machine(one).worker_id: _machine(one) for one in self._alive()}

    def add_foreign(self) -> str:
        return self.add({"name": f"web-{uuid.uuid4().hex[:6]}", "labels": {"team": "web"}})

    def add(self, body: Mapping[str, Any], zone: str = ZONES[0]) -> str:
        """Have a machine there that nobody asked for; its id."""
        with self._lock:
            return str(self._insert(zone, dict(body))["id"])

    def take_away(self, instance: str) -> None:
        """Take a spot machine back, which deletes it at once; another one is switched off."""
        with self._lock:
            for one in self._alive():
                if one["id"] == instance and one["scheduling"].get("provisioningModel") == "SPOT":
                    one["_deleted_at"] = self.clock()
                elif one["id"] == instance:
                    self._switch_off(one)
            self._advance()

    def preempt(self, instance: str) -> None:
        """Begin to take a machine back: it is stopping, and gone when `stops_in` is over."""
        with self._lock:
            for one in self._alive():
                if one["id"] == instance:
                    self._delete(one)

    def disks(self) -> list[str]:
        """The workers whose machines are off and whose disks are still paid for."""
        return [one["name"] for one in self._alive() if one["_off_at"] is not None]

    def refuse_with(self, message: str) -> None:
        """Answer the next creation with this message."""
        self._refusals.append(message)

    def forget_requests(self) -> None:
        """Know no key of a request any more, as after an hour."""
        self._by_request.clear()

    def forget(self) -> None:
        """Know nothing of what was."""
        self.forget_requests()
        self._instances = self._alive()

    def close(self) -> None:
        self.web.close()
        if self._booted is not None:
            self._booted.close()

    # ------------------------------------------------------------------ its rules

    def _alive(self) -> list[dict[str, Any]]:
        return [one for one in self._instances if one["_ended"] is None]

    def _advance(self) -> None:
        """Do what time has done since."""
        now = self.clock()
        for one in self._alive():
            if one["status"] == "STAGING" and now >= one["_runs_at"]:
                one["status"] = "RUNNING"
            if self._booted is not None and one["status"] == "RUNNING" and self._booted.is_off(one["id"]):
                self._booted.end(one["id"])
                self._switch_off(one)
            ends = [at for at in (one["_deleted_at"], _planned_end(one)) if at is not None and at <= now]
            if ends:
                one["_ended"] = min(ends)
                if self._booted is not None:
                    self._booted.end(one["id"])

    def _insert(self, zone: str, body: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        now = self.clock()
        one = {
            "scheduling": {},
            **body,
            "kind": "compute#instance",
            "id": str(self._number),
            "zone": f"{self.url}/compute/v1/projects/{PROJECT_ID}/zones/{zone}",
            "creationTimestamp": _stamp(now),
            "status": "STAGING",
            "_made_at": now,
            "_runs_at": now + self.operation_seconds,
            "_deleted_at": None,
            "_ended": None,
            "_off_at": None,
        }
        items = {item["key"]: item["value"] for item in body.get("metadata", {}).get("items", ())}
        if self._booted is not None and "startup-script" in items:
            self._booted.boot(str(one["id"]), items["startup-script"])
        self._instances.append(one)
        return one

    def _switch_off(self, one: dict[str, Any]) -> None:
        """Stop a machine: it costs nothing more but its disk, and Google forgets when it was to end."""
        one["status"], one["_off_at"] = "TERMINATED", self.clock()

    def _delete(self, one: dict[str, Any]) -> None:
        if one["_deleted_at"] is None:
            one["status"], one["_deleted_at"] = "STOPPING", self.clock() + self.stops_in
        self._advance()

    def _operation(self, kind: str, zone: str, target: str, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        now = self.clock()
        name = f"operation-{len(self._operations) + 1}-{uuid.uuid4().hex[:8]}"
        made = {"operationType": kind, "name": name, "zone": zone, "targetId": target, "_end": now}
        made |= {"_end": now + self.operation_seconds, "_error": error, "insertTime": _stamp(now), "id": str(len(name))}
        self._operations[name] = made
        return made

    def operation_view(self, one: Mapping[str, Any]) -> dict[str, Any]:
        """An operation as Google shows it now."""
        view = {key: value for key, value in one.items() if not key.startswith("_")} | {"kind": "compute#operation"}
        if self.clock() < one["_end"]:
            return view | {"status": "RUNNING", "progress": 0}
        view |= {"status": "DONE", "progress": 100, "endTime": _stamp(one["_end"])}
        if one["_error"]:
            view |= {"error": {"errors": [one["_error"]]}, "httpErrorStatusCode": 503, "httpErrorMessage": "FAILED"}
        return view

    def _view(self, one: Mapping[str, Any]) -> dict[str, Any]:
        view = {key: value for key, value in one.items() if not key.startswith("_")}
        end = _planned_end(one)
        return view | ({"resourceStatus": {"scheduling": {"terminationTimestamp": _stamp(end)}}} if end else {})

    def _is_visible(self, one: Mapping[str, Any]) -> bool:
        return one["_ended"] is None and self.clock() - one["_made_at"] >= self.visible_after

    # ------------------------------------------------------------------ its calls

    def answer(self, method: str, path: str, query: Mapping[str, str], body: Any, reason: str) -> Answer:
        """The answer to a call; None as its status where the connection is cut instead."""
        words = reason.removeprefix("distributed-grid ").split()
        what, about = (words[0] if words else "", words[1] if len(words) > 1 else "")
        is_effect = method in ("POST", "DELETE") or what in ("list", "describe", "offers")
        is_check = "testIamPermissions" in path
        fault = self.faults.next(what, about) if is_effect and not is_check and "pageToken" not in query else ""
        if fault == "die_before":
            self.on_die()
        if (early := _refusal(fault, what)) is not None:
            return early
        with self._lock:
            self._advance()
            result = self._route(method, path, query, body, fault)
        if fault == "die_after":
            self.on_die()
        return (0, None) if fault in ("lose_after", "die_after") else result

    def _route(self, method: str, path: str, query: Mapping[str, str], body: Any, fault: str) -> Answer:
        if path.endswith(":testIamPermissions"):
            asked = body["permissions"]
            return 200, {"permissions": [one for one in asked if self.permissions is None or one in self.permissions]}
        if FAMILY_IMAGE.search(path):
            return 200, {"kind": "compute#image", "name": "debian-12", "status": "READY"}
        inside = path.removeprefix(f"/compute/v1/projects/{PROJECT_ID}")
        if inside == "":
            return 200, {"name": PROJECT_ID, "quotas": _quotas(self.all_quotas)}
        if inside == "/aggregated/instances":
            return self._aggregated(query)
        match inside.strip("/").split("/"):
            case ["regions", name]:
                return 200, {"name": name, "quotas": _quotas(self.quotas)}
            case ["zones", zone, "machineTypes", name] if zone in ZONES and name in TYPES:
                return 200, {"name": name, "zone": zone, **TYPES[name]}
            case ["zones", zone, "operations", name] if name in self._operations:
                return 200, self.operation_view(self._operations[name])
            case ["zones", zone, "instances"] if method == "POST" and zone in ZONES:
                return self._on_insert(zone, query.get("requestId", ""), body, fault)
            case ["zones", zone, "instances", name]:
                found = [one for one in self._alive() if one["name"] == name and one["zone"].endswith(f"/{zone}")]
                found = [one for one in found if self._is_visible(one)]
                if found and method == "DELETE":
                    self._delete(found[0])
                    return 200, self.operation_view(self._operation("delete", zone, found[0]["id"]))
                if found:
                    return 200, self._view(found[0])
        return failure(404, "notFound", f"The resource '{path}' was not found")

    def _on_insert(self, zone: str, request: str, body: dict[str, Any], fault: str) -> Answer:
        if uuid.UUID(request).int == 0:
            return failure(400, "invalid", "Invalid value for field 'requestId'")
        if self._refusals:
            return failure(400, "invalid", self._refusals.pop())
        if request in self._by_request:
            return 200, self.operation_view(self._by_request[request])
        if any(one["name"] == body["name"] and one["zone"].endswith(zone) for one in self._alive()):
            return failure(409, "alreadyExists", f"The resource '{body['name']}' already exists")
        self.bodies.append(body)
        error = self._shortage(zone, body["machineType"].rpartition("/")[2], fault)
        made = {"id": str(self._number)} if error else self._insert(zone, body)
        operation = self._by_request[request] = self._operation("insert", zone, made["id"], error)
        return 200, self.operation_view(operation)

    def _shortage(self, zone: str, name: str, fault: str) -> Mapping[str, Any] | None:
        """Why such a machine cannot be had now, as an error of the operation."""
        if self.stockouts & {zone, name, f"{name}/{zone}"} or fault.startswith("no_capacity"):
            words = f"The zone 'projects/{PROJECT_ID}/zones/{zone}' does not have enough resources available"
            return {"code": "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "message": words}
        has = sum(TYPES.get(one["machineType"].rpartition("/")[2], {}).get("guestCpus", 0) for one in self._cores())
        limit = self.quotas.get("CPUS", float("inf"))
        if fault == "quota" or has + TYPES[name]["guestCpus"] > limit:
            words = f"Quota 'CPUS' exceeded.  Limit: {limit} in region us-central1."
            return {"code": "QUOTA_EXCEEDED", "message": words}
        return None

    def _cores(self) -> list[dict[str, Any]]:
        return [one for one in self._alive() if "machineType" in one and one["status"] != "TERMINATED"]

    def _aggregated(self, query: Mapping[str, str]) -> Answer:
        wanted = dict(re.findall(r'\(labels\.([a-z0-9_-]+) = "([^"]*)"\)', query.get("filter", "")))
        shown = [one for one in self._instances if self._is_visible(one)]
        shown = [one for one in shown if _machine(one).zone not in self.unreachable_zones]
        shown = [one for one in shown if wanted.items() <= one.get("labels", {}).items()]
        start, size = int(query.get("pageToken", "0")), min(int(query.get("maxResults", "500")), self.page_size)
        items: dict[str, Any] = {f"zones/{zone}": {"warning": {"code": "NO_RESULTS_ON_PAGE"}} for zone in ZONES}
        for one in shown[start : start + size]:
            scope = items[f"zones/{one['zone'].rpartition('/')[2]}"]
            scope.pop("warning", None)
            scope.setdefault("instances", []).append(self._view(one))
        body: dict[str, Any] = {"kind": "compute#instanceAggregatedList", "items": items}
        if self.unreachable_zones:
            body["unreachables"] = [f"projects/1/zones/{zone}" for zone in self.unreachable_zones]
        return 200, body | ({"nextPageToken": str(start + size)} if start + size < len(shown) else {})


def _refusal(fault: str, what: str) -> Answer | None:
    """The answer to a call that has no effect; None where it is carried out."""
    verb = {"create": "create", "terminate": "delete", "list": "list"}.get(what, "get")
    match fault:
        case "lose_before" | "die_before":
            return 0, None
        case "throttle":
            return failure(403, "rateLimitExceeded", "Quota exceeded for quota group 'default'")
        case "refuse":
            return failure(403, "forbidden", f"Required 'compute.instances.{verb}' permission for 'projects/x'")
        case "unauthorized":
            return failure(401, "authError", "Request had invalid authentication credentials")
        case "fail" | "busy":
            return failure(503, "backendError", "The service is currently unavailable")
        case "garbage":
            return 200, None
    return None


def _planned_end(one: Mapping[str, Any]) -> float | None:
    """When Google deletes a machine by itself; one that is stopped has no end."""
    seconds = one["scheduling"].get("maxRunDuration", {}).get("seconds")
    return None if seconds is None or one["status"] == "TERMINATED" else float(one["_runs_at"]) + float(seconds)


def _machine(one: Mapping[str, Any]) -> Machine:
    labels = one.get("labels", {})
    worker, grid = labels.get("distributed-grid-worker", ""), labels.get("distributed-grid-grid", "")
    market = "spot" if one["scheduling"].get("provisioningModel") == "SPOT" else "standard"
    zone = one["zone"].rpartition("/")[2]
    ends = [at for at in (one["_off_at"], one["_ended"]) if at is not None]
    return Machine(worker, grid, one["id"], one["_made_at"], min(ends, default=None), market, zone)


def _quotas(limits: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"metric": metric, "limit": limit, "usage": 0.0} for metric, limit in limits.items()]


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
