"""Workers on EC2: an instance is one worker, made by one call with its tags, and found and ended by its tags.

- The worker's id is the client token, so the identical order never makes a second instance. Where EC2 knows the token
  with other parameters, or its instance as terminated, the instance is looked up by its tags; nothing is made.
- The parameters of RunInstances are the same whenever the identical order comes again, also in another process: they
  follow from the order, from the settings and from facts about the image and the subnets that do not change.
- An instance that shuts itself down is terminated, and its disks go with it.
- Only what carries both tags, the worker's and the grid's, is ever shown or ended.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from distributed_grid.adapters.clouds.aws_client import (
    DRY_RUN_SUCCEEDED,
    INSTANCE_TERMINATED,
    PARAMETER_MISMATCH,
    UNKNOWN_IDS,
    AwsClient,
    AwsCodeError,
)
from distributed_grid.adapters.clouds.aws_offers import SPOT, AwsOfferCatalog, spot_limit
from distributed_grid.adapters.clouds.boot_script import boot_script
from distributed_grid.config.providers import AwsSettings, provider_settings
from distributed_grid.errors import Conflict, GridError, Refused, Unreachable
from distributed_grid.ports import CloudProviderBase, WorkerInstance, WorkerOffer, WorkerOrder

_CLIENT_TOKEN = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NOT_GONE = ["pending", "running", "shutting-down", "stopping", "stopped"]
_STATES: Mapping[str, Literal["starting", "running", "stopping", "gone"]] = {
    "pending": "starting",
    "running": "running",
    "terminated": "gone",
}
_LEAST_ALIVE_FIRST = ("gone", "stopping", "starting", "running")

Tags = Mapping[str, str]
WORKER_TAG = "distributed-grid.worker"
GRID_TAG = "distributed-grid.grid"
ORDER_TAG = "distributed-grid.order"
MAX_USER_DATA_BYTES = 16_384
SSM_PARAMETER = "resolve:ssm:"
"""How the id of an image begins that EC2 itself looks up when it runs an instance."""


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
        except AwsCodeError as told:
            return self._look_up(order, told.code)
        made = self._view(answer["Instances"][0])
        if made.state in ("starting", "running"):
            return made
        return self.describe(order.worker_id, order.grid_id) or made

    def list(self, grid_id: str) -> Sequence[WorkerInstance]:
        """The instances of this grid, and spot requests that have none yet; those that run come last."""
        filters = [_filter(GRID_TAG, grid_id), {"Name": "tag-key", "Values": [WORKER_TAG]}]
        found = self._instances([*filters, {"Name": "instance-state-name", "Values": _NOT_GONE}])
        views = [*(self._view(one) for one in found), *self._open_requests(filters)]
        ours = [one for one in views if one.worker_id and one.grid_id == grid_id and one.state != "gone"]
        return sorted(ours, key=_liveliness)

    def describe(self, worker_id: str, grid_id: str) -> WorkerInstance | None:
        """The instance; EC2 remembers one for about an hour after its end."""
        views = [self._view(one) for one in self._find(worker_id, grid_id)]
        if all(one.state == "gone" for one in views):
            requests = self._open_requests(_filters(worker_id, grid_id))
            views += [one for one in requests if (one.worker_id, one.grid_id) == (worker_id, grid_id)]
        return max(views, key=_liveliness, default=None)

    def terminate(self, worker_id: str, grid_id: str) -> None:
        """Cancel its spot request, then terminate the instance; all of them, where several carry its tags."""
        found = self._find(worker_id, grid_id)
        failure: GridError | None = None
        try:
            self._cancel_requests(worker_id, grid_id, found)
        except GridError as raised:  # the request is tried again; the instance is ended all the same
            failure = raised
        for one in found:
            if one["State"]["Name"] != "terminated":
                self._end("terminate_instances", InstanceIds=[one["InstanceId"]])
        if failure is not None:
            raise failure

    def offers(self) -> Sequence[WorkerOffer]:
        """What the settings choose, by kind, type, market and zone."""
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
        lines.append(f"offers: {len(offers)}, of which {sum(1 for one in offers if one.unavailable)} cannot be had")
        firsts = {one.market: one for one in reversed(offers)}
        return [*lines, *(self._dry_run(one) for one in firsts.values())]

    def _dry_run(self, offer: WorkerOffer) -> str:
        """Run an instance with DryRun, which only says whether that would be allowed."""
        parameters = self._launch.of(WorkerOrder("worker-check", "check", offer, offer.resources))
        try:
            self._client.call("run_instances", offer=offer, raised_codes=[DRY_RUN_SUCCEEDED], DryRun=True, **parameters)
        except AwsCodeError:
            return f"permission: {offer.market} instances may be run (DryRun of {offer.id})"
        raise Unreachable("AWS run instances: it has answered a DryRun as if it were none")

    def _look_up(self, order: WorkerOrder, code: str) -> WorkerInstance:
        """The instance that EC2 knows the token of, found by its tags."""
        found = self._find(order.worker_id, order.grid_id)
        if any(_tags_of(one).get(ORDER_TAG) != order.digest for one in found):
            raise Conflict(f"there is an instance for {order.worker_id} that was ordered otherwise")
        if found:
            return max((self._view(one) for one in found), key=_liveliness)
        if code == INSTANCE_TERMINATED:
            return WorkerInstance(order.worker_id, order.grid_id, "", "gone")
        raise Unreachable(f"AWS knows an instance for {order.worker_id} that it does not show yet")

    def _find(self, worker_id: str, grid_id: str) -> Sequence[dict[str, Any]]:
        """The instances with both tags; filters take * and ? for any text, so the tags are compared once more."""
        found = self._instances(_filters(worker_id, grid_id))
        return [one for one in found if _is_ours(_tags_of(one), worker_id, grid_id)]

    def _instances(self, filters: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        pages = self._client.pages("describe_instances", "Reservations", Filters=filters)
        return [instance for reservation in pages for instance in reservation["Instances"]]

    def _open_requests(self, filters: Sequence[dict[str, Any]]) -> Sequence[WorkerInstance]:
        """Spot requests that may still become instances."""
        if not self._settings.spot_instance_enabled:
            return []
        states = {"Name": "state", "Values": ["open"]}
        found = self._client.pages(
            "describe_spot_instance_requests", "SpotInstanceRequests", Filters=[*filters, states]
        )
        return [self._request_view(one) for one in found if not one.get("InstanceId")]

    def _cancel_requests(self, worker_id: str, grid_id: str, instances: Sequence[dict[str, Any]]) -> None:
        alive = [one for one in instances if one["State"]["Name"] != "terminated"]
        ids = {one["SpotInstanceRequestId"] for one in alive if one.get("SpotInstanceRequestId")}
        filters = [*_filters(worker_id, grid_id), {"Name": "state", "Values": ["open", "active"]}]
        try:
            for one in self._client.pages("describe_spot_instance_requests", "SpotInstanceRequests", Filters=filters):
                if _is_ours(_tags_of(one), worker_id, grid_id):
                    ids.add(one["SpotInstanceRequestId"])
        except Refused:
            if self._settings.spot_instance_enabled:
                raise  # without spot instances nobody needs this permission
        for request in sorted(ids):
            self._end("cancel_spot_instance_requests", SpotInstanceRequestIds=[request])

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
        worker_id, grid_id = tags.get(WORKER_TAG, ""), tags.get(GRID_TAG, "")
        return WorkerInstance(worker_id, grid_id, instance["InstanceId"], state, age, " ".join(reason.split())[:300])

    def _request_view(self, request: Mapping[str, Any]) -> WorkerInstance:
        tags, status = _tags_of(request), request.get("Status", {}).get("Message", "")
        age = max(0.0, self._clock() - request["CreateTime"].timestamp()) if "CreateTime" in request else 0.0
        worker_id, grid_id = tags.get(WORKER_TAG, ""), tags.get(GRID_TAG, "")
        return WorkerInstance(worker_id, grid_id, request["SpotInstanceRequestId"], "starting", age, status[:300])


def _liveliness(instance: WorkerInstance) -> int:
    return _LEAST_ALIVE_FIRST.index(instance.state)


def _filter(tag: str, value: str) -> dict[str, Any]:
    return {"Name": f"tag:{tag}", "Values": [value]}


def _filters(worker_id: str, grid_id: str) -> Sequence[dict[str, Any]]:
    return [_filter(WORKER_TAG, worker_id), _filter(GRID_TAG, grid_id)]


def _tags_of(resource: Mapping[str, Any]) -> Tags:
    return {tag["Key"]: tag["Value"] for tag in resource.get("Tags", ())}


def _is_ours(tags: Tags, worker_id: str, grid_id: str) -> bool:
    return tags.get(WORKER_TAG) == worker_id and tags.get(GRID_TAG) == grid_id


class LaunchParameters:
    """Makes the parameters of RunInstances; of what it has read it keeps the disks of the image."""

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
        tags = [{"Key": key, "Value": value} for key, value in _tags(order).items()]
        kinds = ["instance", "volume", *(["spot-instances-request"] if offer.market == SPOT else [])]
        instance_type = offer.id.partition("/")[0]
        found: dict[str, Any] = {
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
            **self._network(offer),
        }
        if disks := self.disks():
            found["BlockDeviceMappings"] = disks
        if settings.key_name:
            found["KeyName"] = settings.key_name
        if settings.instance_profile:
            found["IamInstanceProfile"] = {"Name": settings.instance_profile}
        if offer.market == SPOT:
            options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
            if (limit := spot_limit(settings, offer.worker_type, instance_type)) is not None:
                options["MaxPrice"] = f"{limit:.6f}"
            found["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
        return found

    def image_id(self) -> str:
        """The image of the settings; Refused where they name none."""
        if self._settings.image_id is None:
            raise Refused("providers.aws.image_id is not set: name an image that has Python 3.11 or newer")
        return self._settings.image_id

    def disks(self) -> Sequence[dict[str, Any]]:
        """The disks of the image, each to be deleted with its instance, whatever the image says."""
        image = self.image_id()
        if self._disks is None:
            self._disks = [] if image.startswith(SSM_PARAMETER) else self._read_disks(image)
        return self._disks

    def _read_disks(self, image: str) -> Sequence[dict[str, Any]]:
        images = self._client.call("describe_images", ImageIds=[image])["Images"]
        if not images:
            raise Refused(f"there is no image {image} in {self._settings.region}; see providers.aws.image_id")
        disks = []
        for mapping in images[0].get("BlockDeviceMappings", ()):
            if "Ebs" not in mapping:
                continue
            size = int(mapping["Ebs"].get("VolumeSize", 1))
            if mapping["DeviceName"] == images[0].get("RootDeviceName"):
                size = max(size, self._settings.disk_gb or 0)
            disk = {"DeleteOnTermination": True, "VolumeSize": size}
            disks.append({"DeviceName": mapping["DeviceName"], "Ebs": disk})
        return disks

    def _network(self, offer: WorkerOffer) -> dict[str, Any]:
        subnet, groups = self._catalog.subnet_in(offer.zone), list(self._settings.security_group_ids)
        placed = {"Placement": {"AvailabilityZone": offer.zone}} if offer.zone and not subnet else {}
        if self._settings.associate_public_ip is None:
            named = {"SubnetId": subnet} if subnet else {}
            return {**placed, **named, **({"SecurityGroupIds": groups} if groups else {})}
        interface: dict[str, Any] = {
            "DeviceIndex": 0,
            "AssociatePublicIpAddress": self._settings.associate_public_ip,
            "DeleteOnTermination": True,
        }
        interface |= ({"SubnetId": subnet} if subnet else {}) | ({"Groups": groups} if groups else {})
        return {**placed, "NetworkInterfaces": [interface]}


def _tags(order: WorkerOrder) -> dict[str, str]:
    return {
        WORKER_TAG: order.worker_id,
        GRID_TAG: order.grid_id,
        ORDER_TAG: order.digest,
        "Name": order.worker_id,
    }
