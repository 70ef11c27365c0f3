"""What EC2 is asked for when an order is carried out: the parameters of RunInstances.

They are the same whenever the identical order comes again, also in another process: they follow from the order, from
the settings and from facts about the image and the subnets that do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distributed_grid.adapters.clouds.aws_client import AwsClient
from distributed_grid.adapters.clouds.aws_offers import SPOT, AwsOfferCatalog, spot_limit
from distributed_grid.adapters.clouds.boot_script import boot_script
from distributed_grid.config.providers import AwsSettings
from distributed_grid.errors import Refused
from distributed_grid.ports import WorkerOffer, WorkerOrder

WORKER_TAG = "distributed-grid.worker"
GRID_TAG = "distributed-grid.grid"
ORDER_TAG = "distributed-grid.order"
MAX_USER_DATA_BYTES = 16_384
SSM_PARAMETER = "resolve:ssm:"
"""How the id of an image begins that EC2 itself looks up when it runs an instance."""


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
