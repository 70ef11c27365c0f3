"""Workers on EC2: an instance is one worker, made by one call with its tags, and found and ended by its tags.

- The worker's id is the client token, so the identical order never makes a second instance. Where EC2 knows the token
  with other parameters, or its instance as terminated, the instance is looked up by its tags; nothing is made.
- The parameters of RunInstances are the same whenever the identical order comes again, also in another process: they
  follow from the order, from the settings and from facts about the image and the subnets that do not change.
- An instance that shuts itself down is terminated, and its disks go with it.
- Only instances with both tags, the worker's and the grid's, are ever shown or ended.
- The price of an offer is the most that an hour can cost, since budgets count it. EC2's API has no on-demand prices:
  they are those of the settings. A spot instance never costs more than its maximum price, nor than on-demand.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from msgspec.structs import replace

from distributed_grid.adapters.clouds.aws_client import (
    DRY_RUN_SUCCEEDED,
    INSTANCE_TERMINATED,
    PARAMETER_MISMATCH,
    UNKNOWN_IDS,
    AwsClient,
    AwsCodeError,
)
from distributed_grid.adapters.clouds.boot_script import DOTTED_TAGS as TAGS
from distributed_grid.adapters.clouds.boot_script import boot_script
from distributed_grid.config.providers import AwsSettings, provider_settings
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import BadInput, GridError, Refused, Unreachable
from distributed_grid.ports import CloudProviderBase, InstanceState, WorkerInstance, WorkerOffer, WorkerOrder

SPOT, ON_DEMAND = "spot", "on-demand"
MIB = 1 << 20
QUOTA_SECONDS = 600.0
"""Time for which a quota is cached: people wait days for another one."""
_STANDARD = frozenset({"a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"})
_QUOTAS = {
    (ON_DEMAND, "standard"): "L-1216C47A",
    (ON_DEMAND, "g"): "L-DB2E81BA",
    (ON_DEMAND, "p"): "L-417A185B",
    (SPOT, "standard"): "L-34B43A08",
    (SPOT, "g"): "L-3819A6DF",
    (SPOT, "p"): "L-7212CCBC",
}


class AwsOfferCatalog:
    """Offers of one region that the settings choose: types by zone and market, with resources, prices and quotas.

    The resources of a type, its zones and the zone of a subnet are facts, read once.
    """

    def __init__(self, settings: AwsSettings, client: AwsClient, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._client = client
        self._clock = clock
        self._resources: dict[str, WorkerResources] = {}
        self._type_zones: dict[str, tuple[str, ...]] = {}
        self._subnets: dict[str, str] | None = None
        self._quotas: dict[str, tuple[float, float | None]] = {}

    def offers(self) -> Sequence[WorkerOffer]:
        """For each kind of worker its types, in order; of each spot first where that is enabled; of each its zones."""
        wanted = {name for kind in self._settings.instance_types for name in self._settings.types_of(kind)}
        if not wanted:
            raise BadInput("providers.aws.instance_types names no type, such as {cpu: c5.xlarge}")
        if missing := sorted(wanted - self._resources.keys()):
            types = self._client.call("describe_instance_types", InstanceTypes=missing)["InstanceTypes"]
            offered = self._client.pages(
                "describe_instance_type_offerings",
                "InstanceTypeOfferings",
                LocationType="availability-zone",
                Filters=[{"Name": "instance-type", "Values": missing}],
            )
            pairs = sorted((offering["InstanceType"], offering["Location"]) for offering in offered)
            for name in missing:
                self._type_zones[name] = tuple(zone for its_type, zone in pairs if its_type == name)
            for row in types:
                gpus = sum(int(gpu.get("Count", 0)) for gpu in row.get("GpuInfo", {}).get("Gpus", ()))
                vcpus, mib = int(row["VCpuInfo"]["DefaultVCpus"]), int(row["MemoryInfo"]["SizeInMiB"])
                self._resources[row["InstanceType"]] = WorkerResources(1000 * vcpus, mib * MIB, gpus)
            if unknown := wanted - self._resources.keys():
                raise Refused(f"{self._settings.region} has no instance type {', '.join(sorted(unknown))}")
        spot_prices = self._spot_prices() if self._settings.spot_instance_enabled else {}
        offers: dict[str, WorkerOffer] = {}
        for kind in self._settings.instance_types:
            for offer in self._offers_of(kind, spot_prices):
                # Two kinds may have the same type; an id stands for one of them.
                offer_id = offer.id if offer.id not in offers else f"{offer.id}/{kind}"
                offers.setdefault(offer_id, replace(offer, id=offer_id))
        return list(offers.values())

    def subnet_in(self, zone: str) -> str:
        """The subnet of the settings in a zone, the first one named; empty where the settings name none at all."""
        subnets = self._zones_of_subnets()
        if not subnets:
            return ""
        for subnet, its_zone in subnets.items():
            if its_zone == zone:
                return subnet
        raise Refused(f"none of providers.aws.subnet_ids is in {zone}")

    def _offers_of(self, kind: str, spot_prices: dict[tuple[str, str], float]) -> Iterator[WorkerOffer]:
        markets = (SPOT, ON_DEMAND) if self._settings.spot_instance_enabled else (ON_DEMAND,)
        for instance_type in self._settings.types_of(kind):
            for market in markets:
                prices, limits = self._settings.price_per_hour, self._settings.spot_max_price
                known = [prices.get(instance_type, prices.get(kind))]
                if market == SPOT:
                    known.append(limits.get(instance_type, limits.get(kind)))
                price = min((price for price in known if price is not None), default=None)
                # Zones: those named, those of the subnets, or all that have the type.
                subnet_zones = self._settings.zones or dict.fromkeys(self._zones_of_subnets().values())
                for zone in subnet_zones or self._type_zones[instance_type]:
                    current = spot_prices.get((instance_type, zone)) if market == SPOT else None
                    yield WorkerOffer(
                        id=f"{instance_type}/{zone}/{market}",
                        worker_type=kind,
                        resources=self._resources[instance_type],
                        price_micro=None if price is None else round(price * 1_000_000),
                        zone=zone,
                        market=market,
                        unavailable=self._unavailable(kind, instance_type, zone, market, current),
                    )

    def _unavailable(self, kind: str, instance_type: str, zone: str, market: str, current: float | None) -> str:
        """Why an offer cannot be had at all; empty where it may be tried."""
        if self._settings.image_id is None:
            return "providers.aws.image_id is not set"
        if zone not in self._type_zones[instance_type]:
            return f"{instance_type} is not offered in {zone}"
        if (subnets := self._zones_of_subnets()) and zone not in subnets.values():
            return f"none of providers.aws.subnet_ids is in {zone}"
        limit = spot_limit(self._settings, kind, instance_type)
        if current is not None and limit is not None and current > limit:
            return f"the spot price is ${current:g} an hour, and providers.aws.spot_max_price is ${limit:g}"
        needed = self._resources[instance_type].cpu_milli // 1000
        quota = self._quota(market, instance_type)
        if quota is not None and quota < needed:
            return f"the account's quota of {market} vCPUs for this family is {quota:g}, and it has {needed}"
        return ""

    def _zones_of_subnets(self) -> dict[str, str]:
        """The zone of each subnet of the settings, in their order."""
        if self._subnets is None:
            named = self._settings.subnet_ids or ((self._settings.subnet_id,) if self._settings.subnet_id else ())
            zones: dict[str, str] = {}
            if named:
                answer = self._client.call("describe_subnets", SubnetIds=list(named))
                zones = {subnet["SubnetId"]: subnet["AvailabilityZone"] for subnet in answer["Subnets"]}
            self._subnets = {subnet: zones[subnet] for subnet in named if subnet in zones}
        return self._subnets

    def _spot_prices(self) -> dict[tuple[str, str], float]:
        """The known current spot prices by type and zone."""
        try:
            answer = self._client.call(
                "describe_spot_price_history",
                InstanceTypes=sorted(self._resources),
                ProductDescriptions=["Linux/UNIX"],
                StartTime=int(self._clock()),
            )
        except GridError:  # they only leave out offers that EC2 would refuse
            return {}
        latest: dict[tuple[str, str], tuple[object, float]] = {}
        for row in answer.get("SpotPriceHistory", ()):
            key = (row["InstanceType"], row["AvailabilityZone"])
            if key not in latest or latest[key][0] < row["Timestamp"]:
                latest[key] = (row["Timestamp"], float(row["SpotPrice"]))
        return {key: price for key, (_, price) in latest.items()}

    def _quota(self, market: str, instance_type: str) -> float | None:
        """The vCPUs that the account may have of a family in a market; None: not known."""
        prefix = re.match(r"[a-z]+", instance_type)
        family = prefix.group() if prefix else ""
        if family in _STANDARD:
            family = "standard"
        elif family in ("gr", "vt"):
            family = "g"
        code = _QUOTAS.get((market, family))
        if code is None:
            return None
        now = self._clock()
        read_at, quota = self._quotas.get(code, (float("-inf"), None))
        if not 0 <= now - read_at < QUOTA_SECONDS:  # also where the clock was ahead when it was read
            try:
                quota = self._client.quota(code)
            except GridError:  # nobody answers there: asking for each would only take longer
                self._quotas = dict.fromkeys(_QUOTAS.values(), (now, None))
                return None
            self._quotas[code] = (now, quota)
        return quota


def spot_limit(settings: AwsSettings, kind: str, instance_type: str) -> float | None:
    """The maximum price of a spot instance, by its type or by its kind; None: up to the on-demand price."""
    return settings.spot_max_price.get(instance_type, settings.spot_max_price.get(kind))


_CLIENT_TOKEN = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NOT_GONE = ["pending", "running", "shutting-down", "stopping", "stopped"]
_STATES: Mapping[str, InstanceState] = {
    "pending": "starting",
    "running": "running",
    "terminated": "gone",
}
_LEAST_ALIVE_FIRST = ("gone", "stopping", "starting", "running")

MAX_USER_DATA_BYTES = 16_384
SSM_PARAMETER = "resolve:ssm:"
"""Prefix of an image id that EC2 itself resolves when it runs an instance."""


class AWSCloudProvider(CloudProviderBase):
    """Rents EC2 instances, with the settings of `providers.aws` or a mapping of its keys."""

    name = "aws"
    notice_source: ClassVar[str] = "aws"

    def __init__(self, settings: AwsSettings | Mapping[str, Any], *, clock: Callable[[], float] = time.time) -> None:
        self._settings = provider_settings(self.name, AwsSettings, settings)
        self._clock = clock
        self._client = AwsClient(self._settings)
        self._catalog = AwsOfferCatalog(self._settings, self._client, clock)
        self._launch = LaunchParameters(self._settings, self._client, self._catalog)

    def create(self, order: WorkerOrder) -> WorkerInstance:
        """Run the instance; one that EC2 knows by this token is returned as it is now, ended or not."""
        if not _CLIENT_TOKEN.fullmatch(order.worker_id):
            raise Refused(f"{order.worker_id!r} cannot be a client token of EC2")
        try:
            answer = self._client.call(
                "run_instances",
                offer=order.offer,
                raised_codes=(PARAMETER_MISMATCH, INSTANCE_TERMINATED),
                ClientToken=order.worker_id,
                **self._launch.of(order),
            )
        except AwsCodeError as error:  # EC2 knows the token: the instance is looked up by its tags
            instances = self._find(order.worker_id, order.grid_id)
            for instance in instances:
                TAGS.check_order(_tags_of(instance), order, f"an instance for {order.worker_id}")
            if instances:
                return max(map(self._view, instances), key=_liveliness)
            if error.code == INSTANCE_TERMINATED:
                return WorkerInstance(order.worker_id, order.grid_id, "", "gone")
            raise Unreachable(f"AWS knows an instance for {order.worker_id} that it does not show yet") from error
        machine = self._view(answer["Instances"][0])
        if machine.state in ("starting", "running"):
            return machine
        return self.describe(order.worker_id, order.grid_id) or machine

    def list(self, grid_id: str) -> Sequence[WorkerInstance]:
        """The instances of this grid, and spot requests that have none yet; those that run come last."""
        filters = [_filter(TAGS.grid, grid_id), {"Name": "tag-key", "Values": [TAGS.worker]}]
        instances = self._instances([*filters, {"Name": "instance-state-name", "Values": _NOT_GONE}])
        views = [*map(self._view, instances), *self._open_requests(filters)]
        ours = [view for view in views if view.worker_id and view.grid_id == grid_id and view.state != "gone"]
        return sorted(ours, key=_liveliness)

    def describe(self, worker_id: str, grid_id: str) -> WorkerInstance | None:
        """The instance; EC2 remembers one for about an hour after its end."""
        views = [self._view(instance) for instance in self._find(worker_id, grid_id)]
        if all(view.state == "gone" for view in views):
            requests = self._open_requests(_filters(worker_id, grid_id))
            views += [view for view in requests if (view.worker_id, view.grid_id) == (worker_id, grid_id)]
        return max(views, key=_liveliness, default=None)

    def terminate(self, worker_id: str, grid_id: str) -> None:
        """Cancel its spot request, then terminate the instance; all of them, where several carry its tags."""
        alive = [instance for instance in self._find(worker_id, grid_id) if instance["State"]["Name"] != "terminated"]
        failure: GridError | None = None
        try:
            ids = {instance["SpotInstanceRequestId"] for instance in alive if instance.get("SpotInstanceRequestId")}
            try:
                for request in self._spot_requests(_filters(worker_id, grid_id), "open", "active"):
                    if TAGS.match(_tags_of(request), worker_id, grid_id):
                        ids.add(request["SpotInstanceRequestId"])
            except Refused:
                if self._settings.spot_instance_enabled:
                    raise  # without spot instances nobody needs this permission
            for request_id in sorted(ids):
                self._end("cancel_spot_instance_requests", SpotInstanceRequestIds=[request_id])
        except GridError as raised:  # the request is tried again; the instance is ended all the same
            failure = raised
        for instance in alive:
            self._end("terminate_instances", InstanceIds=[instance["InstanceId"]])
        if failure is not None:
            raise failure

    def offers(self) -> Sequence[WorkerOffer]:
        return self._catalog.offers()

    def check(self) -> Sequence[str]:
        """Credentials, image, subnets and groups are there, and running an instance would be allowed (DryRun)."""
        lines = [f"credentials: from {self._client.credentials_source()}", f"region: {self._settings.region}"]
        self._launch.disks()
        lines.append(f"image: {self._launch.image_id()}")
        if groups := list(self._settings.security_group_ids):
            self._client.call("describe_security_groups", GroupIds=groups)
            lines.append(f"security groups: {', '.join(groups)}")
        offers = self.offers()
        unavailable = sum(1 for offer in offers if offer.unavailable)
        lines.append(f"offers: {len(offers)}, of which {unavailable} cannot be had")
        first_offers = {offer.market: offer for offer in reversed(offers)}
        for offer in first_offers.values():
            parameters = self._launch.of(WorkerOrder("worker-check", "check", offer, offer.resources))
            try:
                codes = [DRY_RUN_SUCCEEDED]
                self._client.call("run_instances", offer=offer, raised_codes=codes, DryRun=True, **parameters)
            except AwsCodeError:
                lines.append(f"permission: {offer.market} instances may be run (DryRun of {offer.id})")
            else:
                raise Unreachable("AWS run instances: it has answered a DryRun as if it were none")
        return lines

    def _find(self, worker_id: str, grid_id: str) -> Sequence[dict[str, Any]]:
        """Instances with both tags. Filters take * and ? for any text, so the tags are compared again."""
        instances = self._instances(_filters(worker_id, grid_id))
        return [instance for instance in instances if TAGS.match(_tags_of(instance), worker_id, grid_id)]

    def _instances(self, filters: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        pages = self._client.pages("describe_instances", "Reservations", Filters=filters)
        return [instance for reservation in pages for instance in reservation["Instances"]]

    def _open_requests(self, filters: Sequence[dict[str, Any]]) -> Sequence[WorkerInstance]:
        """Spot requests that may still become instances."""
        if not self._settings.spot_instance_enabled:
            return []
        views = []
        for request in self._spot_requests(filters, "open"):
            if not request.get("InstanceId"):
                tags, status = _tags_of(request), request.get("Status", {}).get("Message", "")
                age = max(0.0, self._clock() - request["CreateTime"].timestamp()) if "CreateTime" in request else 0.0
                name = request["SpotInstanceRequestId"]
                views.append(TAGS.instance(tags, name, "starting", age_seconds=age, detail=status[:300]))
        return views

    def _spot_requests(self, filters: Sequence[dict[str, Any]], *states: str) -> Iterator[dict[str, Any]]:
        filters = [*filters, {"Name": "state", "Values": list(states)}]
        return self._client.pages("describe_spot_instance_requests", "SpotInstanceRequests", Filters=filters)

    def _end(self, operation: str, **parameters: Any) -> None:
        """End something that may be unknown to EC2: because it is gone, or because it is too new."""
        try:
            self._client.call(operation, raised_codes=UNKNOWN_IDS, **parameters)
        except AwsCodeError:
            return

    def _view(self, instance: Mapping[str, Any]) -> WorkerInstance:
        tags, state = _tags_of(instance), _STATES.get(instance["State"]["Name"], "stopping")
        reason = instance.get("StateReason", {}).get("Message", "") if state in ("stopping", "gone") else ""
        age = max(0.0, self._clock() - instance["LaunchTime"].timestamp())
        return TAGS.instance(
            tags, instance["InstanceId"], state, age_seconds=age, detail=" ".join(reason.split())[:300]
        )


def _liveliness(instance: WorkerInstance) -> int:
    return _LEAST_ALIVE_FIRST.index(instance.state)


def _filter(tag: str, value: str) -> dict[str, Any]:
    return {"Name": f"tag:{tag}", "Values": [value]}


def _filters(worker_id: str, grid_id: str) -> Sequence[dict[str, Any]]:
    return [_filter(TAGS.worker, worker_id), _filter(TAGS.grid, grid_id)]


def _tags_of(resource: Mapping[str, Any]) -> Mapping[str, str]:
    return {tag["Key"]: tag["Value"] for tag in resource.get("Tags", ())}


class LaunchParameters:
    """Parameters of RunInstances; the disks of the image are read once."""

    def __init__(self, settings: AwsSettings, client: AwsClient, catalog: AwsOfferCatalog) -> None:
        self._settings = settings
        self._client = client
        self._catalog = catalog
        self._disks: Sequence[dict[str, Any]] | None = None

    def of(self, order: WorkerOrder) -> dict[str, Any]:
        """Everything but the client token. Refused where a setting is missing or the script is too long."""
        settings, offer = self._settings, order.offer
        image = self.image_id()
        script = boot_script(order)
        if len(script.encode()) > MAX_USER_DATA_BYTES:
            raise Refused(f"the boot script has more than the {MAX_USER_DATA_BYTES} bytes that EC2 takes")
        tags = [{"Key": key, "Value": value} for key, value in {**TAGS.of(order), "Name": order.worker_id}.items()]
        kinds = ["instance", "volume", *(["spot-instances-request"] if offer.market == SPOT else [])]
        instance_type = offer.id.partition("/")[0]
        parameters: dict[str, Any] = {
            "MinCount": 1,
            "MaxCount": 1,
            "ImageId": image,
            "InstanceType": instance_type,
            "UserData": script,
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {
                "HttpEndpoint": "enabled",
                "HttpTokens": "required",
                "HttpPutResponseHopLimit": 1,
                "InstanceMetadataTags": "disabled",
            },
            "TagSpecifications": [{"ResourceType": kind, "Tags": tags} for kind in kinds],
        }
        subnet, groups = self._catalog.subnet_in(offer.zone), list(settings.security_group_ids)
        if offer.zone and not subnet:
            parameters["Placement"] = {"AvailabilityZone": offer.zone}
        if settings.associate_public_ip is None:
            parameters |= ({"SubnetId": subnet} if subnet else {}) | ({"SecurityGroupIds": groups} if groups else {})
        else:
            interface: dict[str, Any] = {
                "DeviceIndex": 0,
                "AssociatePublicIpAddress": settings.associate_public_ip,
                "DeleteOnTermination": True,
            }
            interface |= ({"SubnetId": subnet} if subnet else {}) | ({"Groups": groups} if groups else {})
            parameters["NetworkInterfaces"] = [interface]
        if disks := self.disks():
            parameters["BlockDeviceMappings"] = disks
        if settings.key_name:
            parameters["KeyName"] = settings.key_name
        if settings.instance_profile:
            parameters["IamInstanceProfile"] = {"Name": settings.instance_profile}
        if offer.market == SPOT:
            options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
            if (limit := spot_limit(settings, offer.worker_type, instance_type)) is not None:
                options["MaxPrice"] = f"{limit:.6f}"
            parameters["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
        return parameters

    def image_id(self) -> str:
        if self._settings.image_id is None:
            raise Refused("providers.aws.image_id is not set: name an image that has Python 3.11 or newer")
        return self._settings.image_id

    def disks(self) -> Sequence[dict[str, Any]]:
        """The disks of the image, each to be deleted with its instance, whatever the image says."""
        image = self.image_id()
        if self._disks is None and image.startswith(SSM_PARAMETER):
            self._disks = []
        if self._disks is None:
            images = self._client.call("describe_images", ImageIds=[image])["Images"]
            if not images:
                raise Refused(f"there is no image {image} in {self._settings.region}; see providers.aws.image_id")
            disks = []
            for mapping in images[0].get("BlockDeviceMappings", ()):
                if "Ebs" in mapping:
                    size = int(mapping["Ebs"].get("VolumeSize", 1))
                    if mapping["DeviceName"] == images[0].get("RootDeviceName"):
                        size = max(size, self._settings.disk_gb or 0)
                    disk = {"DeleteOnTermination": True, "VolumeSize": size}
                    disks.append({"DeviceName": mapping["DeviceName"], "Ebs": disk})
            self._disks = disks
        return self._disks
