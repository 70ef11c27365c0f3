"""Stand-in of EC2: moto's, with the rules of the real one before it, on a clock that is handed to it, with faults.

moto knows parameters, filters, types, images and the form of answers. What it leaves out is done here: client tokens,
instances that are not shown yet or still shutting down, spot requests, capacity, throttling, lost answers and quotas.
With a folder to boot in, an instance really boots: its user-data runs as a process of this machine.
"""

from __future__ import annotations

import base64
import itertools
import json
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from distributed_grid.adapters.clouds.aws import AWSCloudProvider
from distributed_grid.adapters.clouds.boot_script import DOTTED_TAGS
from tests.support.clouds.booted_machines import BootedMachines
from tests.support.clouds.ec2_query import (
    REGION,
    XML,
    Answer,
    Form,
    ask_moto,
    error_answer,
    filter_values,
    forget_account,
    instance_tags,
    request_item,
    result_answer,
    time_text,
    values_prefix,
)
from tests.support.clouds.stand_in import FaultScript, Machine

ACCESS_KEY, SECRET_KEY = "AKIASTANDIN000000000", "a-secret-access-key-that-nobody-may-see"
REMEMBERED_SECONDS = 3600.0
"""For how long EC2 shows what is terminated."""
_ACCOUNTS = itertools.count(1)
_STATES = {"pending": "0", "running": "16", "shutting-down": "32", "terminated": "48"}
_ERRORS = {
    "throttle": (503, "RequestLimitExceeded", "Request limit exceeded."),
    "no_capacity": (500, "InsufficientInstanceCapacity", "We currently do not have sufficient capacity there."),
    "quota": (400, "VcpuLimitExceeded", "You have requested more vCPU capacity than your current vCPU limit allows."),
    "refuse": (403, "UnauthorizedOperation", "You are not authorized. Encoded authorization failure message: c2VjcmV0"),
    "fail": (500, "InternalError", "An internal error has occurred."),
}


@dataclass
class _Instance:
    """An instance, with the order it was made by."""

    machine: Machine
    parameters: str = ""
    answer: bytes = b""
    request: str = ""
    request_state: str = ""
    terminated_at_moto: bool = False


class Ec2StandIn:
    """EC2 in one region of an account of its own. `full` has the (type, zone) pairs without capacity, `quotas` the
    limits that are known, by code; `actions` the calls that were made. The faults `kill_before` and `kill_after` call
    `kill` before or after the effect, and answer nothing."""

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        *,
        visible_after: float = 0.0,
        stops_in: float = 0.0,
        boot_folder: Path | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`settings` are keys of `providers.aws` that differ; with a `boot_folder` instances really boot, in there."""
        self.clock = clock
        self.visible_after = visible_after
        self.stops_in = stops_in
        self.settings = dict(settings or {})
        self.faults = FaultScript()
        self.full: set[tuple[str, str]] = set()
        self.quotas: dict[str, float] = {}
        self.loses_quotas = False
        self.actions: list[str] = []
        self.page_size = 1000
        self.kill: Callable[[], object] = lambda: None
        self._account = f"{next(_ACCOUNTS):012d}"
        self._instances: dict[str, _Instance] = {}
        self._open_requests: dict[str, Form] = {}
        self._lock = threading.RLock()
        self._booted = BootedMachines(boot_folder) if boot_folder is not None else None
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        made = self._forward({"Action": "RegisterImage", "Name": "image", "RootDeviceName": "/dev/sda1"})[1]
        self.image_id = ET.fromstring(made).findtext(f"{XML}imageId") or ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def config(self) -> dict[str, Any]:
        """The section `providers.aws` of a config that uses this cloud."""
        found: dict[str, Any] = {
            "region": REGION,
            "zones": [f"{REGION}a", f"{REGION}b"],
            "instance_types": {"cpu": "t3.medium", "gpu": "g4dn.xlarge"},
            "price_per_hour": {"cpu": 0.1, "gpu": 0.9},
            "spot_instance_enabled": True,
            "image_id": self.image_id,
            "endpoint_url": self.url,
            "credentials": {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY},
        }
        return found | self.settings

    def provider(self) -> AWSCloudProvider:
        """A new adapter that talks to this cloud, as a new process would make it."""
        return AWSCloudProvider(self.config(), clock=self.clock)

    def machines(self) -> list[Machine]:
        """Every instance there ever was, foreign ones included."""
        with self._lock:
            self._settle()
            return [one.machine for one in self._instances.values()]

    def add_foreign(self, tags: Mapping[str, str] | None = None) -> str:
        """Have an instance there that is not of any grid, with these tags; its id."""
        form = {"Action": "RunInstances", "ImageId": self.image_id, "InstanceType": "t3.micro", "MinCount": "1"}
        named = tags or {"Name": "somebody else's"}
        form |= {"MaxCount": "1", "TagSpecification.1.ResourceType": "instance"}
        for number, (key, value) in enumerate(named.items(), 1):
            form |= {f"TagSpecification.1.Tag.{number}.Key": key, f"TagSpecification.1.Tag.{number}.Value": value}
        with self._lock:
            made = self._run(form)
        assert isinstance(made, _Instance)
        return made.machine.instance

    def add_open_request(self, worker_id: str, grid_id: str) -> str:
        """Have a spot request there that has no instance yet; its id."""
        name = f"sir-{len(self._open_requests):08d}"
        self._open_requests[name] = {"state": "open", DOTTED_TAGS.worker: worker_id, DOTTED_TAGS.grid: grid_id}
        return name

    def take_away(self, instance: str) -> None:
        """End an instance as EC2 does with a spot one, or as it ends itself by its power-off."""
        with self._lock:
            one, now = self._instances[instance], self.clock()
            if one.machine.ended_at is None or one.machine.ended_at > now:
                self._end(one, now)

    def parameters(self, instance: str) -> Form:
        """The parameters that an instance was made with."""
        return dict(parse_qsl(self._instances[instance].parameters))

    def user_data(self, instance: str) -> str:
        """The user-data that an instance was made with."""
        return base64.b64decode(self.parameters(instance)["UserData"]).decode()

    def subnets(self) -> dict[str, str]:
        """A subnet of each zone."""
        found = ET.fromstring(self._forward({"Action": "DescribeSubnets"})[1])
        items = found.iterfind(f"{XML}subnetSet/{XML}item")
        return {one.findtext(f"{XML}availabilityZone", ""): one.findtext(f"{XML}subnetId", "") for one in items}

    def security_groups(self) -> list[str]:
        found = ET.fromstring(self._forward({"Action": "DescribeSecurityGroups"})[1])
        return [one.text or "" for one in found.iterfind(f"{XML}securityGroupInfo/{XML}item/{XML}groupId")]

    def add_key_pair(self, name: str) -> None:
        self._forward({"Action": "CreateKeyPair", "KeyName": name})

    def close(self) -> None:
        """End the stand-in and everything that it started."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if self._booted is not None:
            self._booted.close()
        forget_account(self._account)

    # ------------------------------------------------------------------ calls

    def answer(self, form: Form) -> Answer | None:
        """The answer to a call; None: it is lost."""
        method, about = self._method(form)
        fault, _, scope = (self.faults.next(method, about) if method else "").partition(":")
        with self._lock:
            self.actions.append(form["Action"])
            if fault == "kill_before":
                self.kill()
            if fault in ("lose_before", "kill_before"):
                return None
            if fault == "no_capacity" and scope == "market":
                return error_answer(400, "MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
            if fault in _ERRORS and (method == "create" or fault not in ("no_capacity", "quota")):
                return error_answer(*_ERRORS[fault])
            self._settle()
            act = getattr(self, f"_{form['Action']}", self._forward)
            found: Answer = act(form)
            if fault == "kill_after":
                self.kill()
            return None if fault in ("lose_after", "kill_after") else found

    def _method(self, form: Form) -> tuple[str, str]:
        """The method of the port that a call is the heart of, and the worker it is about."""
        action = form["Action"]
        if action == "RunInstances" and form.get("DryRun") != "true":
            return "create", form.get("ClientToken", "")
        if action == "TerminateInstances":
            one = self._instances.get(form.get("InstanceId.1", ""))
            return "terminate", one.machine.worker_id if one else ""
        if action == "DescribeInstances":
            worker = filter_values(form).get(f"tag:{DOTTED_TAGS.worker}", "")
            return ("describe", worker) if worker else ("list", "")
        return ("offers", "") if action == "DescribeInstanceTypes" else ("", "")

    def quota(self, code: str) -> Answer | None:
        """What Service Quotas says about a limit; None: nothing."""
        self.actions.append("GetServiceQuota")
        if self.loses_quotas:
            return None
        if code not in self.quotas:
            return 400, json.dumps({"__type": "NoSuchResourceException", "Message": "no such quota"}).encode()
        return 200, json.dumps({"Quota": {"QuotaCode": code, "Value": self.quotas[code]}}).encode()

    def _RunInstances(self, form: Form) -> Answer:
        if form.get("DryRun") == "true":
            return self._forward(form)
        token, zone = form["ClientToken"], form.get("Placement.AvailabilityZone", "")
        ours = {name: value for name, value in form.items() if name != "Version"}
        parameters = urlencode(sorted(ours.items()))
        for one in self._instances.values():
            if (
                one.machine.worker_id != token
                or self.parameters(one.machine.instance).get("Placement.AvailabilityZone", "") != zone
            ):
                continue  # EC2 compares tokens within a zone
            if one.parameters != parameters:
                return error_answer(400, "IdempotentParameterMismatch", "Arguments on this request are inconsistent.")
            if self._state(one) == "terminated":
                return error_answer(400, "IdempotentInstanceTerminated", "The instance of this token was terminated.")
            return 200, self._shown(one.answer, everything=True)
        if (form["InstanceType"], zone) in self.full:
            return error_answer(*_ERRORS["no_capacity"])
        made = self._run(form)
        if isinstance(made, tuple):
            return made
        made.parameters = parameters
        return 200, self._shown(made.answer, everything=True)

    def _run(self, form: Form) -> _Instance | Answer:
        """Make an instance at moto; what moto answers instead, where it does not."""
        status, body = self._forward(form)
        if status != 200:
            return status, body
        item = ET.fromstring(body).find(f"{XML}instancesSet/{XML}item")
        assert item is not None
        tags = instance_tags(form)
        market = "spot" if form.get("InstanceMarketOptions.MarketType") == "spot" else "on-demand"
        name = item.findtext(f"{XML}instanceId") or ""
        zone = item.findtext(f"{XML}placement/{XML}availabilityZone") or ""
        machine = Machine(
            tags.get(DOTTED_TAGS.worker, ""), tags.get(DOTTED_TAGS.grid, ""), name, self.clock(), None, market, zone
        )
        made = self._instances[name] = _Instance(machine, answer=body)
        if market == "spot":
            made.request, made.request_state = f"sir-{name[2:]}", "active"
        if self._booted is not None and machine.worker_id:
            self._booted.boot(name, base64.b64decode(form["UserData"]).decode())
        return made

    def _DescribeInstances(self, form: Form) -> Answer:
        form = form | {"MaxResults": str(min(int(form["MaxResults"]), self.page_size))}
        status, body = self._forward(form)
        return status, self._shown(body) if status == 200 else body

    def _TerminateInstances(self, form: Form) -> Answer:
        name = form["InstanceId.1"]
        one = self._instances.get(name)
        if one is None or not self._is_visible(one):
            return error_answer(400, "InvalidInstanceID.NotFound", f"The instance ID '{name}' does not exist")
        if one.machine.ended_at is None:
            self._end(one, self.clock() + self.stops_in)
        item = f"<item><instanceId>{name}</instanceId></item>"
        return result_answer("TerminateInstances", f"<instancesSet>{item}</instancesSet>")

    def _DescribeSpotInstanceRequests(self, form: Form) -> Answer:
        wanted, items = filter_values(form), []
        states = {value for name, value in form.items() if name.startswith(values_prefix(form, "state"))}
        requests = {name: dict(found) for name, found in self._open_requests.items()}
        for one in self._instances.values():
            if one.request and self._is_visible(one):
                tags = {DOTTED_TAGS.worker: one.machine.worker_id, DOTTED_TAGS.grid: one.machine.grid_id}
                requests[one.request] = {"state": one.request_state, "instance": one.machine.instance, **tags}
        for name, found in requests.items():
            asked = {key[4:]: value for key, value in wanted.items() if key.startswith("tag:")}
            if found["state"] in states and all(found.get(key) == value for key, value in asked.items()):
                items.append(request_item(name, found))
        return result_answer(
            "DescribeSpotInstanceRequests", f"<spotInstanceRequestSet>{''.join(items)}</spotInstanceRequestSet>"
        )

    def _CancelSpotInstanceRequests(self, form: Form) -> Answer:
        name = form["SpotInstanceRequestId.1"]
        if name in self._open_requests:
            self._open_requests[name]["state"] = "cancelled"
        for one in self._instances.values():
            if one.request == name:
                one.request_state = "cancelled"
        return result_answer("CancelSpotInstanceRequests", "<spotInstanceRequestSet/>")

    # ------------------------------------------------------------------ rules

    def _end(self, one: _Instance, at: float) -> None:
        one.machine = replace(one.machine, ended_at=at)
        one.request_state = "closed" if one.request else ""
        if self._booted is not None:
            self._booted.end(one.machine.instance)

    def _settle(self) -> None:
        """Let moto know what has ended by now; an instance that shut itself down is terminated."""
        now = self.clock()
        for one in self._instances.values():
            if one.machine.ended_at is None and self._booted is not None and self._booted.is_off(one.machine.instance):
                self._end(one, now)
            if one.machine.ended_at is not None and one.machine.ended_at <= now and not one.terminated_at_moto:
                one.terminated_at_moto = True
                self._forward({"Action": "TerminateInstances", "InstanceId.1": one.machine.instance})

    def _state(self, one: _Instance) -> str:
        if one.machine.ended_at is None:
            return "running"
        return "terminated" if one.machine.ended_at <= self.clock() else "shutting-down"

    def _is_visible(self, one: _Instance) -> bool:
        now, ended_at = self.clock(), one.machine.ended_at
        is_forgotten = ended_at is not None and now - ended_at > REMEMBERED_SECONDS
        return now - one.machine.made_at >= self.visible_after and not is_forgotten

    def _shown(self, body: bytes, *, everything: bool = False) -> bytes:
        """An answer of moto with what EC2 would show of its instances."""
        root = ET.fromstring(body)
        for parent in [*root.iter(f"{XML}instancesSet")]:
            for item in [*parent]:
                one = self._instances.get(item.findtext(f"{XML}instanceId") or "")
                if one is None or not (everything or self._is_visible(one)):
                    parent.remove(item)
                    continue
                state = item.find(f"{XML}instanceState")
                assert state is not None
                for child in [*state]:
                    state.remove(child)
                ET.SubElement(state, f"{XML}code").text = _STATES[self._state(one)]
                ET.SubElement(state, f"{XML}name").text = self._state(one)
                launched = item.find(f"{XML}launchTime")
                assert launched is not None
                launched.text = time_text(one.machine.made_at)
                if one.request:
                    ET.SubElement(item, f"{XML}spotInstanceRequestId").text = one.request
        return ET.tostring(root)

    def _forward(self, form: Form) -> Answer:
        return ask_moto(form, self._account)


def _handler(cloud: Ec2StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if "ServiceQuotas" in (self.headers.get("X-Amz-Target") or ""):
                found: Answer | None = cloud.quota(json.loads(body)["QuotaCode"])
            else:
                found = cloud.answer(dict(parse_qsl(body.decode(), keep_blank_values=True)))
            if found is None:
                self.close_connection = True
                return
            status, text = found
            head = f"HTTP/1.1 {status} X\r\nContent-Type: text/xml\r\nContent-Length: {len(text)}\r\n\r\n"
            self.wfile.write(head.encode() + text)

        def log_message(self, *words: Any) -> None:
            pass

    return Handler
