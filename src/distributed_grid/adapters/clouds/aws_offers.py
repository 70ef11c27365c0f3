"""What EC2 can be asked for: instance types by zone and market, with resources, prices and quotas.

The price of an offer is what an hour can cost at most, since budgets count it. EC2's API has no on-demand prices: they
are those of the settings. A spot instance never costs more than its maximum price, nor than on-demand.
What a type has, where it is offered and in which zone a subnet is are facts, read once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from distributed_grid.adapters.clouds.aws_client import AwsClient
from distributed_grid.config.providers import AwsSettings
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import BadInput, GridError, Refused
from distributed_grid.ports import WorkerOffer

SPOT, ON_DEMAND = "spot", "on-demand"
MIB = 1 << 20
QUOTA_SECONDS = 600.0
"""How long a quota that was read is used: people wait days for another one."""
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
    """The offers of one region, as the settings choose them."""

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
        self._read_types()
        spot_prices = self._spot_prices() if self._settings.spot_instance_enabled else {}
        found: dict[str, WorkerOffer] = {}
        for kind in self._settings.instance_types:
            for offer in self._offers_of(kind, spot_prices):
                # Two kinds may have the same type; an id stands for one of them.
                offer_id = offer.id if offer.id not in found else f"{offer.id}/{kind}"
                found.setdefault(offer_id, replace(offer, id=offer_id))
        return list(found.values())

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
                price = self._max_price(kind, instance_type, market)
                for zone in self._zones(instance_type):
                    current = spot_prices.get((instance_type, zone)) if market == SPOT else None
                    yield WorkerOffer(
                        f"{instance_type}/{zone}/{market}",
                        kind,
                        self._resources[instance_type],
                        None if price is None else round(price * 1_000_000),
                        zone,
                        market,
                        unavailable=self._unavailable(kind, instance_type, zone, market, current),
                    )

    def _max_price(self, kind: str, instance_type: str, market: str) -> float | None:
        """What an hour costs at most: spot is capped by its maximum price, and without one by the on-demand price."""
        prices, limits = self._settings.price_per_hour, self._settings.spot_max_price
        known = [prices.get(instance_type, prices.get(kind))]
        if market == SPOT:
            known.append(limits.get(instance_type, limits.get(kind)))
        return min((price for price in known if price is not None), default=None)

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

    def _zones(self, instance_type: str) -> Sequence[str]:
        """The zones to try, in order: those named, those of the subnets, or all that have the type."""
        if self._settings.zones:
            return self._settings.zones
        if subnets := self._zones_of_subnets():
            return list(dict.fromkeys(subnets.values()))
        return self._type_zones[instance_type]

    def _zones_of_subnets(self) -> dict[str, str]:
        """The zone of each subnet of the settings, in their order."""
        if self._subnets is None:
            named = self._settings.subnet_ids or ((self._settings.subnet_id,) if self._settings.subnet_id else ())
            found: dict[str, str] = {}
            if named:
                answer = self._client.call("describe_subnets", SubnetIds=list(named))
                found = {one["SubnetId"]: one["AvailabilityZone"] for one in answer["Subnets"]}
            self._subnets = {subnet: found[subnet] for subnet in named if subnet in found}
        return self._subnets

    def _read_types(self) -> None:
        wanted = {one for kind in self._settings.instance_types for one in self._settings.types_of(kind)}
        if not wanted:
            raise BadInput("providers.aws.instance_types names no type, such as {cpu: c5.xlarge}")
        if not (missing := sorted(wanted - self._resources.keys())):
            return
        types = self._client.call("describe_instance_types", InstanceTypes=missing)["InstanceTypes"]
        offered = self._client.pages(
            "describe_instance_type_offerings",
            "InstanceTypeOfferings",
            LocationType="availability-zone",
            Filters=[{"Name": "instance-type", "Values": missing}],
        )
        pairs = sorted((one["InstanceType"], one["Location"]) for one in offered)
        for name in missing:
            self._type_zones[name] = tuple(zone for its_type, zone in pairs if its_type == name)
        for one in types:
            gpus = sum(int(gpu.get("Count", 0)) for gpu in one.get("GpuInfo", {}).get("Gpus", ()))
            vcpus, mib = int(one["VCpuInfo"]["DefaultVCpus"]), int(one["MemoryInfo"]["SizeInMiB"])
            self._resources[one["InstanceType"]] = WorkerResources(1000 * vcpus, mib * MIB, gpus)
        if unknown := wanted - self._resources.keys():
            raise Refused(f"{self._settings.region} has no instance type {', '.join(sorted(unknown))}")

    def _spot_prices(self) -> dict[tuple[str, str], float]:
        """The current spot price by type and zone; what is not known is left out."""
        try:
            answer = self._client.call(
                "describe_spot_price_history",
                InstanceTypes=sorted(self._resources),
                ProductDescriptions=["Linux/UNIX"],
                StartTime=int(self._clock()),
            )
        except GridError:  # only to leave out what would be refused anyway
            return {}
        latest: dict[tuple[str, str], tuple[object, float]] = {}
        for one in answer.get("SpotPriceHistory", ()):
            key = (one["InstanceType"], one["AvailabilityZone"])
            if key not in latest or latest[key][0] < one["Timestamp"]:
                latest[key] = (one["Timestamp"], float(one["SpotPrice"]))
        return {key: price for key, (_, price) in latest.items()}

    def _quota(self, market: str, instance_type: str) -> float | None:
        """The vCPUs that the account may have of a family in a market; None: not known."""
        code = _QUOTAS.get((market, _family(instance_type)))
        if code is None:
            return None
        now = self._clock()
        at, quota = self._quotas.get(code, (float("-inf"), None))
        if not 0 <= now - at < QUOTA_SECONDS:  # also where the clock was ahead when it was read
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


def _family(instance_type: str) -> str:
    """The family that a quota counts a type in."""
    found = re.match(r"[a-z]+", instance_type)
    letters = found.group() if found else ""
    if letters in _STANDARD:
        return "standard"
    return "g" if letters in ("g", "gr", "vt") else letters
