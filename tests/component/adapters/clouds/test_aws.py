"""The provider on EC2 against the stand-in: its offers, its requests, and its behaviour when EC2 answers otherwise."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from distributed_grid.adapters.clouds.aws import AWSCloudProvider
from distributed_grid.adapters.clouds.boot_script import DOTTED_TAGS
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import BadInput, Conflict, NoCapacity, Refused, Throttled, Unreachable
from distributed_grid.ports import WorkerOffer, WorkerOrder
from tests.support.clouds.ec2 import ACCESS_KEY, SECRET_KEY, Ec2StandIn

GRID = "grid-1"
TOKEN = "gridjoin1_a-token-that-nobody-may-see"


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


Make = Callable[..., Ec2StandIn]


@pytest.fixture
def make() -> Iterator[Make]:
    clouds: list[Ec2StandIn] = []

    def made(**settings: Any) -> Ec2StandIn:
        clouds.append(Ec2StandIn(Clock(), settings=settings))
        return clouds[-1]

    yield made
    for cloud in clouds:
        cloud.close()


@pytest.fixture
def cloud(make: Make) -> Ec2StandIn:
    return make()


def pass_time(cloud: Ec2StandIn, seconds: float) -> None:
    clock = cloud.clock
    assert isinstance(clock, Clock)
    clock.now += seconds


def order(provider: AWSCloudProvider, number: int = 1, **changes: Any) -> WorkerOrder:
    offer: WorkerOffer = changes.pop("offer", None) or provider.offers()[0]
    made = WorkerOrder(f"worker-{number}", GRID, offer, WorkerResources(1000, 1 << 30), {"GRID_JOIN_TOKEN": TOKEN})
    return replace(made, **changes)


def asked(cloud: Ec2StandIn, instance: str) -> dict[str, str]:
    """The parameters that an instance was made with."""
    return cloud.parameters(instance)


# ---------------------------------------------------------------------- offers


def test_offers_are_by_kind_type_market_and_zone_in_the_order_of_the_settings(make: Make) -> None:
    types = {"gpu": "g4dn.xlarge", "cpu": ["c5.xlarge", "t3.medium"]}
    cloud = make(instance_types=types, zones=["us-west-2b", "us-west-2a"], price_per_hour={"c5.xlarge": 0.17, "gpu": 1})
    offers = cloud.provider().offers()
    assert [one.id for one in offers[:4]] == [
        "g4dn.xlarge/us-west-2b/spot",
        "g4dn.xlarge/us-west-2a/spot",
        "g4dn.xlarge/us-west-2b/on-demand",
        "g4dn.xlarge/us-west-2a/on-demand",
    ]
    assert [one.id.split("/")[0] for one in offers[4:]] == ["c5.xlarge"] * 4 + ["t3.medium"] * 4
    assert offers[0].resources == WorkerResources(4000, 16 << 30, 1)
    assert (offers[4].resources.cpu_milli, offers[4].price_micro, offers[8].price_micro) == (4000, 170_000, None)


def test_without_zones_every_zone_that_has_the_type_is_offered(make: Make) -> None:
    cloud = make(zones=[], spot_instance_enabled=False, instance_types={"cpu": "t3.medium"})
    zones = [one.zone for one in cloud.provider().offers()]
    assert zones == sorted(zones)
    assert set(zones) >= {"us-west-2a", "us-west-2b", "us-west-2c"}


def test_one_type_for_two_kinds_is_two_offers(make: Make) -> None:
    cloud = make(
        zones=["us-west-2a"], spot_instance_enabled=False, instance_types={"cpu": "t3.medium", "memory": "t3.medium"}
    )
    provider = cloud.provider()
    assert [(one.id, one.worker_type) for one in provider.offers()] == [
        ("t3.medium/us-west-2a/on-demand", "cpu"),
        ("t3.medium/us-west-2a/on-demand/memory", "memory"),
    ]
    made = provider.create(order(provider, offer=provider.offers()[1]))
    assert asked(cloud, made.instance)["InstanceType"] == "t3.medium"


@pytest.mark.parametrize(
    ("prices", "limits", "spot", "on_demand"),
    [
        ({"cpu": 0.1}, {}, 100_000, 100_000),  # without a maximum, spot costs what on-demand costs at most
        ({"cpu": 0.1}, {"cpu": 0.04}, 40_000, 100_000),
        ({"cpu": 0.1}, {"cpu": 0.4}, 100_000, 100_000),
        ({}, {"t3.medium": 0.04}, 40_000, None),
        ({}, {}, None, None),
    ],
)
def test_the_price_of_an_offer_is_what_it_costs_at_most(
    make: Make, prices: dict[str, float], limits: dict[str, float], spot: int | None, on_demand: int | None
) -> None:
    cloud = make(
        price_per_hour=prices, spot_max_price=limits, instance_types={"cpu": "t3.medium"}, zones=["us-west-2a"]
    )
    assert [one.price_micro for one in cloud.provider().offers()] == [spot, on_demand]


def test_a_maximum_price_is_asked_for_only_where_it_is_set(make: Make) -> None:
    for limits, maximum in (({}, None), ({"cpu": 0.04}, "0.040000")):
        cloud = make(spot_max_price=limits)
        provider = cloud.provider()
        made = provider.create(order(provider))
        assert asked(cloud, made.instance).get("InstanceMarketOptions.SpotOptions.MaxPrice") == maximum


def test_a_spot_price_above_the_maximum_is_not_tried(make: Make) -> None:
    offers = make(spot_max_price={"cpu": 0.000001}).provider().offers()
    assert "and providers.aws.spot_max_price is $1e-06" in offers[0].unavailable
    assert not offers[2].unavailable


def test_a_quota_that_is_too_small_is_skipped_and_an_unknown_one_is_tried(cloud: Ec2StandIn) -> None:
    cloud.quotas = {"L-34B43A08": 0, "L-DB2E81BA": 3}
    offers = {one.id: one for one in cloud.provider().offers()}
    spot = offers["t3.medium/us-west-2a/spot"]
    assert spot.unavailable == "the account's quota of spot vCPUs for this family is 0, and it has 2"
    assert "is 3, and it has 4" in offers["g4dn.xlarge/us-west-2a/on-demand"].unavailable
    assert not offers["t3.medium/us-west-2a/on-demand"].unavailable
    assert not offers["g4dn.xlarge/us-west-2a/spot"].unavailable


def test_quotas_that_nobody_answers_for_are_asked_for_once_in_ten_minutes(cloud: Ec2StandIn) -> None:
    cloud.loses_quotas = True
    provider = cloud.provider()
    for _ in range(2):
        assert not any(one.unavailable for one in provider.offers())
    assert cloud.actions.count("GetServiceQuota") == 1
    pass_time(cloud, 601)
    cloud.loses_quotas, cloud.quotas = False, {"L-34B43A08": 0}
    assert provider.offers()[0].unavailable


def test_what_is_not_offered_in_a_zone_or_lacks_an_image_says_so(make: Make) -> None:
    offers = make(zones=["us-west-2a", "us-west-2z"]).provider().offers()
    assert [one.unavailable for one in offers[:2]] == ["", "t3.medium is not offered in us-west-2z"]
    cloud = make(zones=["us-west-2a", "us-west-2b"])
    cloud.settings["subnet_id"] = cloud.subnets()["us-west-2b"]
    offers = cloud.provider().offers()
    assert [one.unavailable for one in offers[:2]] == ["none of providers.aws.subnet_ids is in us-west-2a", ""]
    without = {one.unavailable for one in make(image_id=None).provider().offers()}
    assert without == {"providers.aws.image_id is not set"}
    with pytest.raises(Refused, match="zz9"):
        make(instance_types={"cpu": "zz9.huge"}).provider().offers()


# ---------------------------------------------------------------------- orders


def test_an_order_has_its_tags_in_the_call_and_ends_with_its_own_shutdown(cloud: Ec2StandIn) -> None:
    provider = cloud.provider()
    made = provider.create(order(provider))
    form = asked(cloud, made.instance)
    assert form["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert (form["MetadataOptions.HttpTokens"], form["MetadataOptions.HttpPutResponseHopLimit"]) == ("required", "1")
    assert form["MetadataOptions.InstanceMetadataTags"] == "disabled"
    assert form["Placement.AvailabilityZone"] == "us-west-2a"
    assert form["BlockDeviceMapping.1.Ebs.DeleteOnTermination"] == "true"
    assert (form["MinCount"], form["MaxCount"]) == ("1", "1")
    kinds = [form[f"TagSpecification.{number}.ResourceType"] for number in (1, 2, 3)]
    assert kinds == ["instance", "volume", "spot-instances-request"]
    assert form["InstanceMarketOptions.SpotOptions.SpotInstanceType"] == "one-time"
    assert form["InstanceMarketOptions.SpotOptions.InstanceInterruptionBehavior"] == "terminate"


def test_every_setting_is_in_the_call(make: Make) -> None:
    """Every setting of an instance under `providers.aws` reaches EC2."""
    cloud = make()
    subnets = cloud.subnets()
    cloud.settings |= {
        "zones": [],
        "subnet_ids": [subnets["us-west-2c"], subnets["us-west-2a"]],
        "associate_public_ip": False,
        "security_group_ids": cloud.security_groups(),
        "key_name": "my-key",
        "disk_gb": 100,
        "spot_instance_enabled": False,
    }
    cloud.add_key_pair("my-key")
    provider = cloud.provider()
    assert [one.zone for one in provider.offers()][:2] == ["us-west-2c", "us-west-2a"]
    form = asked(cloud, provider.create(order(provider)).instance)
    assert form["NetworkInterface.1.SubnetId"] == subnets["us-west-2c"]
    assert form["NetworkInterface.1.AssociatePublicIpAddress"] == "false"
    assert form["NetworkInterface.1.SecurityGroupId.1"] == cloud.security_groups()[0]
    assert (form["KeyName"], form["BlockDeviceMapping.1.Ebs.VolumeSize"]) == ("my-key", "100")
    assert "Placement.AvailabilityZone" not in form
    one = make(subnet_id="subnet-0123").provider()
    with pytest.raises(Refused, match="subnet_ids"):
        one.create(order(cloud.provider()))


def test_the_identical_order_of_another_process_is_identical_to_the_byte(cloud: Ec2StandIn) -> None:
    first, second = cloud.provider(), cloud.provider()
    made = first.create(order(first))
    assert second.create(order(second)).instance == made.instance
    assert len(cloud.machines()) == 1


def test_an_order_that_differs_in_its_script_alone_finds_its_instance(cloud: Ec2StandIn) -> None:
    """As after a control plane came back under another address."""
    provider = cloud.provider()
    made = provider.create(order(provider))
    again = provider.create(order(provider, environ={"GRID_JOIN_TOKEN": "gridjoin1_another"}))
    assert again.instance == made.instance
    with pytest.raises(Conflict, match="worker-1"):
        provider.create(order(provider, resources=WorkerResources(2000, 1 << 30)))
    assert len(cloud.machines()) == 1


def test_what_is_known_by_its_token_and_not_shown_yet_is_asked_for_again_later(cloud: Ec2StandIn) -> None:
    cloud.visible_after = 30
    provider = cloud.provider()
    made = provider.create(order(provider))
    other = order(provider, environ={"GRID_JOIN_TOKEN": "gridjoin1_another"})
    with pytest.raises(Unreachable, match="does not show yet"):
        provider.create(other)
    pass_time(cloud, 31)
    assert provider.create(other).instance == made.instance


def test_an_order_whose_instance_is_terminated_makes_no_other(cloud: Ec2StandIn) -> None:
    provider = cloud.provider()
    made = provider.create(order(provider))
    cloud.stops_in = 20
    provider.terminate("worker-1", GRID)
    assert provider.create(order(provider)).state == "stopping"
    pass_time(cloud, 21)
    again = provider.create(order(provider))
    assert (again.instance, again.state) == (made.instance, "gone")
    pass_time(cloud, 7200)  # EC2 shows it no more, and knows the token still
    assert provider.create(order(provider)).state == "gone"
    assert len(cloud.machines()) == 1


def test_no_capacity_is_of_one_type_zone_and_market_and_a_limit_of_a_market_and_kind(cloud: Ec2StandIn) -> None:
    provider = cloud.provider()
    cloud.full = {("t3.medium", "us-west-2a")}
    with pytest.raises(NoCapacity) as full:
        provider.create(order(provider))
    assert full.value.scope == ""
    cloud.faults.waiting["create"] = ["quota", "throttle", "refuse", "fail"]
    with pytest.raises(NoCapacity) as limit:
        provider.create(order(provider))
    assert limit.value.scope == "market:spot kind:cpu"
    with pytest.raises(Throttled):
        provider.create(order(provider))
    with pytest.raises(Refused, match="not allowed") as refused:
        provider.create(order(provider))
    assert "c2VjcmV0" not in str(refused.value)
    with pytest.raises(Unreachable):
        provider.create(order(provider))
    assert not cloud.machines()


def test_a_name_that_is_no_client_token_is_refused_before_anything_is_asked(cloud: Ec2StandIn) -> None:
    provider = cloud.provider()
    for name in ("", "a*", "x" * 65, "ü"):
        with pytest.raises(Refused, match="client token"):
            provider.create(replace(order(provider), worker_id=name))
    assert "RunInstances" not in cloud.actions


# ---------------------------------------------------------------------- ending


def test_the_spot_request_is_cancelled_before_the_instance_is_terminated(cloud: Ec2StandIn) -> None:
    provider = cloud.provider()
    provider.create(order(provider))
    provider.terminate("worker-1", GRID)
    ending = [one for one in cloud.actions if one in ("CancelSpotInstanceRequests", "TerminateInstances")]
    assert ending == ["CancelSpotInstanceRequests", "TerminateInstances"]


def test_a_spot_request_without_an_instance_is_shown_and_cancelled(cloud: Ec2StandIn) -> None:
    request = cloud.add_open_request("worker-1", GRID)
    foreign = cloud.add_open_request("worker-1", "grid-2")
    provider = cloud.provider()
    assert [(one.instance, one.state) for one in provider.list(GRID)] == [(request, "starting")]
    found = provider.describe("worker-1", GRID)
    assert found is not None
    assert found.instance == request
    provider.terminate("worker-1", GRID)
    assert not provider.list(GRID)
    assert [one.instance for one in provider.list("grid-2")] == [foreign]


def test_several_instances_with_the_tags_of_one_worker_are_all_shown_and_all_ended(cloud: Ec2StandIn) -> None:
    for _ in range(2):
        cloud.add_foreign({DOTTED_TAGS.worker: "worker-1", DOTTED_TAGS.grid: GRID})
    provider = cloud.provider()
    assert len(provider.list(GRID)) == 2
    provider.terminate("worker-1", GRID)
    assert all(one.ended_at is not None for one in cloud.machines())


def test_what_lacks_a_tag_or_has_another_is_neither_shown_nor_ended(cloud: Ec2StandIn) -> None:
    for tags in (
        {DOTTED_TAGS.worker: "worker-1"},
        {DOTTED_TAGS.grid: GRID},
        {DOTTED_TAGS.worker: "worker-1", DOTTED_TAGS.grid: "grid-11"},
        {DOTTED_TAGS.worker: "worker-10", DOTTED_TAGS.grid: GRID},
        {DOTTED_TAGS.worker: "Worker-1", DOTTED_TAGS.grid: GRID},
    ):
        cloud.add_foreign(tags)
    provider = cloud.provider()
    for worker_id in ("worker-1", "worker-*", "*", "worker-?", ""):
        provider.terminate(worker_id, GRID)
        assert provider.describe(worker_id, GRID) is None
    assert {one.worker_id for one in provider.list(GRID)} == {"worker-10", "Worker-1"}
    assert not provider.list("*")
    assert all(one.ended_at is None for one in cloud.machines())


def test_many_instances_are_listed_on_several_pages(cloud: Ec2StandIn) -> None:
    cloud.page_size = 5
    provider = cloud.provider()
    for number in range(12):
        provider.create(order(provider, number, offer=provider.offers()[2]))
    before = cloud.actions.count("DescribeInstances")
    assert len(provider.list(GRID)) == 12
    assert cloud.actions.count("DescribeInstances") == before + 3


def test_a_termination_that_fails_says_so_and_one_of_the_unknown_does_not(cloud: Ec2StandIn) -> None:
    provider = cloud.provider()
    provider.create(order(provider))
    cloud.faults.waiting["terminate"] = ["lose_before", "throttle", "refuse"]
    for kind in (Unreachable, Throttled, Refused):
        with pytest.raises(kind):
            provider.terminate("worker-1", GRID)
    assert cloud.machines()[0].ended_at is None
    provider.terminate("worker-1", GRID)
    assert cloud.machines()[0].ended_at is not None
    provider.terminate("worker-1", GRID)


def test_an_instance_that_ec2_takes_away_is_gone_with_its_reason_and_age(cloud: Ec2StandIn) -> None:
    provider = cloud.provider()
    made = provider.create(order(provider))
    pass_time(cloud, 100)
    (listed,) = provider.list(GRID)
    assert listed.age_seconds == pytest.approx(100, abs=1)
    cloud.take_away(made.instance)
    assert not provider.list(GRID)
    found = provider.describe("worker-1", GRID)
    assert found is not None
    assert found.state == "gone"


# ---------------------------------------------------------------------- check and credentials


def test_check_says_what_works_and_makes_nothing(make: Make) -> None:
    cloud = make()
    cloud.settings["security_group_ids"] = cloud.security_groups()
    lines = "\n".join(cloud.provider().check())
    assert "credentials: from providers.aws.credentials" in lines
    assert "permission: spot instances may be run" in lines
    assert "permission: on-demand instances may be run" in lines
    assert not cloud.machines()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"image_id": None}, "image_id is not set"),
        ({"image_id": "ami-00000000"}, "see providers.aws.image_id"),
        ({"subnet_id": "subnet-00000000"}, "see providers.aws.subnet_ids"),
        ({"security_group_ids": ["sg-00000000"]}, "see providers.aws.security_group_ids"),
        ({"instance_types": {}}, "instance_types names no type"),
    ],
)
def test_check_names_what_is_missing(make: Make, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises((Refused, BadInput), match=problem):
        make(**settings).provider().check()


def test_without_credentials_one_line_says_where_they_may_be(
    cloud: Ec2StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    settings = cloud.config()
    del settings["credentials"]
    with pytest.raises(Refused, match="no AWS credentials: set "):
        AWSCloudProvider(settings).check()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    assert AWSCloudProvider(settings).check()[0] == "credentials: from the environment"


def test_nothing_secret_is_in_logs_reprs_or_errors(cloud: Ec2StandIn, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    provider = cloud.provider()
    placed = order(provider)
    cloud.faults.waiting["create"] = ["refuse", "fail", "lose_after"]
    said = [repr(provider), repr(vars(provider)), repr(placed)]
    for _ in range(3):
        with pytest.raises((Refused, Unreachable)) as raised:
            provider.create(placed)
        said.append(f"{raised.value} {raised.value!r} {raised.value.__cause__}")
    provider.create(placed)
    provider.terminate("worker-1", GRID)
    text = caplog.text + "".join(said)
    for secret in (SECRET_KEY, ACCESS_KEY, TOKEN, "UserData"):
        assert secret not in text


def test_a_cloud_that_is_not_there_is_unreachable_and_asked_once(make: Make) -> None:
    cloud = make()
    provider = cloud.provider()
    placed = order(provider)
    cloud.faults.waiting["create"] = ["fail"]
    before = cloud.actions.count("RunInstances")
    with pytest.raises(Unreachable):
        provider.create(placed)
    assert cloud.actions.count("RunInstances") == before + 1
    away = AWSCloudProvider(cloud.config() | {"endpoint_url": "http://127.0.0.1:9"})
    with pytest.raises(Unreachable, match="no answer"):
        away.list(GRID)


def test_without_the_package_one_line_says_what_to_install(cloud: Ec2StandIn) -> None:
    program = (
        "import sys; sys.modules['boto3'] = None\n"
        "from distributed_grid.orchestration.cloud_provider_manager import AWSCloudProvider\n"
        "try: AWSCloudProvider({'region': 'us-west-2', 'instance_types': {'cpu': 't3.medium'}}).offers()\n"
        "except Exception as failure: print(type(failure).__name__, failure)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "BadInput aws needs the package boto3: pip install 'distributed-grid[aws]'"


def test_the_sdk_is_loaded_only_with_the_first_call() -> None:
    program = (
        "import sys, distributed_grid.server.workers.provider_registry\n"
        "from distributed_grid.orchestration.cloud_provider_manager import AWSCloudProvider\n"
        "AWSCloudProvider({'region': 'us-west-2'})\n"
        "print([name for name in sys.modules if name.startswith(('boto', 'urllib3'))])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
