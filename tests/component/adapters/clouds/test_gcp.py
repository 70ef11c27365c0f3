"""Machines of Compute Engine, on a stand-in of its calls that Google's own library can talk to, too."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.auth.credentials import AnonymousCredentials
from msgspec.structs import replace

from distributed_grid.adapters.clouds.boot_script import DASHED_TAGS
from distributed_grid.adapters.clouds.gcp import MAX_RUN_SECONDS, PERMISSIONS, GCPCloudProvider, needed_permissions
from distributed_grid.config.providers import GcpSettings
from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import BadInput, Conflict, GridError, NoCapacity, Refused, Throttled, Unreachable
from distributed_grid.orchestration.cloud_provider_manager import GCPCloudProvider as ProviderOfTheGuides
from distributed_grid.ports import WorkerOrder
from tests.support.clouds.gce import PROJECT_ID, ZONES, GceStandIn
from tests.support.clouds.gce_credentials import EMAIL, write_service_account
from tests.support.project import PROJECT
from tests.support.provider_contract import TOKEN

GRID_ID = "grid-1"
SMALL = WorkerResources(cpu_milli=1000, memory_bytes=1 << 30)


class Cloud(GceStandIn):
    """A cloud whose time stands still until it is moved."""

    def __init__(self, **options: Any) -> None:
        self.now = 1_800_000_000.0
        super().__init__(lambda: self.now, **options)

    def provider_with(self, **keys: Any) -> GCPCloudProvider:
        written = {key: value for key, value in {**self.settings(), **keys}.items() if value is not None}
        return GCPCloudProvider(written, timeout_seconds=3)

    def order(self, offer: int = 0, **keys: Any) -> WorkerOrder:
        found = self.provider_with(**keys).offers()[offer]
        return WorkerOrder(f"worker-{uuid.uuid4().hex[:8]}", GRID_ID, found, SMALL, {"GRID_JOIN_TOKEN": TOKEN})


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    made = Cloud()
    yield made
    made.close()


def inserted(cloud: Cloud, order: WorkerOrder, **keys: Any) -> dict[str, Any]:
    """The body that an order is inserted with."""
    cloud.provider_with(**keys).create(order)
    return dict(cloud.bodies[-1])


# ---------------------------------------------------------------------- what is sent


@pytest.fixture(scope="module")
def google_compute() -> Any:
    """Google's own library; it takes longer to load than all other test files together."""
    return importlib.import_module("google.cloud.compute_v1")


def test_google_knows_every_field_of_what_is_inserted(cloud: Cloud, google_compute: Any) -> None:
    keys: dict[str, Any] = {
        "machine_types": {"gpu": "n1-standard-4-nvidia-tesla-t4"},
        "tags": ["grid"],
        "service_account": EMAIL,
    }
    more = {"disk_gb": 50, "disk_type": "pd-balanced", "subnetwork": "regions/us-central1/subnetworks/lab"}
    body = inserted(cloud, cloud.order(**keys), **keys, **more)
    known = google_compute.Instance.from_json(json.dumps(body), ignore_unknown_fields=False)
    assert known.scheduling.provisioning_model == "SPOT"
    assert known.scheduling.instance_termination_action == "DELETE"
    assert known.scheduling.on_host_maintenance == "TERMINATE"
    assert known.scheduling.automatic_restart is False
    assert known.scheduling.max_run_duration.seconds == 24 * 3600
    assert known.disks[0].auto_delete
    assert known.disks[0].initialize_params.disk_size_gb == 50
    assert known.guest_accelerators[0].accelerator_count == 1
    assert [item.key for item in known.metadata.items] == ["startup-script"]
    assert dict(known.labels) == dict(known.disks[0].initialize_params.labels)


def test_the_library_of_google_reads_what_the_stand_in_answers(cloud: Cloud, google_compute: Any) -> None:
    order = cloud.order()
    made = cloud.provider().create(order)
    options: Any = {"client_options": {"api_endpoint": cloud.url}, "credentials": AnonymousCredentials()}
    machines = google_compute.InstancesClient(**options)
    one = machines.get(project=PROJECT_ID, zone=ZONES[0], instance=order.worker_id)
    assert (str(one.id), one.status, one.labels[DASHED_TAGS.worker]) == (made.instance, "RUNNING", order.worker_id)
    listed = [one.name for _, scope in machines.aggregated_list(project=PROJECT_ID) for one in scope.instances]
    assert listed == [order.worker_id]
    types = google_compute.MachineTypesClient(**options)
    assert types.get(project=PROJECT_ID, zone=ZONES[0], machine_type="g2-standard-4").guest_cpus == 4
    deleted = machines.delete_unary(project=PROJECT_ID, zone=ZONES[0], instance=order.worker_id)
    operations = google_compute.ZoneOperationsClient(**options)
    ended = operations.get(project=PROJECT_ID, zone=ZONES[0], operation=deleted.name)
    assert ended.status == google_compute.Operation.Status.DONE
    assert cloud.provider().describe(order.worker_id, GRID_ID) is None


def test_a_standard_machine_without_gpus_ends_by_itself_too_and_has_no_identity(cloud: Cloud) -> None:
    body = inserted(cloud, cloud.order(offer=2))
    assert body["scheduling"] == {
        "provisioningModel": "STANDARD",
        "instanceTerminationAction": "DELETE",
        "automaticRestart": False,
        "maxRunDuration": {"seconds": "86400"},
    }
    assert body["serviceAccounts"] == []
    assert TOKEN in body["metadata"]["items"][0]["value"]


def test_the_identical_order_is_the_identical_call_whatever_the_config_says_by_then(cloud: Cloud) -> None:
    order = cloud.order()
    cloud.faults.waiting["create"] = ["lose_after"]
    with pytest.raises(Unreachable):
        cloud.provider().create(order)
    changed = cloud.provider_with(machine_types={"cpu": "n2-standard-4"}, zones=["us-central1-b"], max_run_hours=1)
    made = changed.create(order)
    assert made.state == "running"
    assert made.ends_in_seconds == 86_400
    assert len(cloud.machines()) == len(cloud.bodies) == 1
    assert cloud.bodies[0]["scheduling"]["maxRunDuration"] == {"seconds": "86400"}


KEYS: dict[str, tuple[Any, Any]] = {
    "machine_types": ({"cpu": "e2-standard-2"}, {"cpu": "n2-standard-4"}),
    "accelerators": ({}, {"cpu": "nvidia-l4:2"}),
    "zone": (None, ZONES[1]),
    "zones": ([ZONES[0]], [ZONES[1]]),
    "preemptible_enabled": (True, False),
    "max_run_hours": (1, 2),
    "image": (None, "my-image"),
    "disk_gb": (None, 100),
    "disk_type": (None, "pd-ssd"),
    "network": (None, "lab"),
    "subnetwork": (None, "regions/us-central1/subnetworks/lab"),
    "external_ip": (True, False),
    "tags": ([], ["grid"]),
    "service_account": (None, EMAIL),
    "price_per_hour": ({}, {"cpu": 1}),
}
ELSEWHERE = {"project", "credentials_file", "anonymous", "endpoint_url"}
"""Keys that other tests of this file show: whom is called, and as whom."""


def test_every_key_of_the_settings_is_shown_to_do_something() -> None:
    assert {key.spellings[0] for key in GcpSettings.key_table.keys} == KEYS.keys() | ELSEWHERE


@pytest.mark.parametrize("key", list(KEYS))
def test_a_key_changes_what_is_offered_or_inserted(cloud: Cloud, key: str) -> None:
    def seen(value: Any) -> Any:
        order = replace(cloud.order(**{key: value}), worker_id="worker-1")
        cloud.provider_with(**{key: value}).create(order)
        cloud.provider().terminate("worker-1", GRID_ID)
        cloud.forget()
        return order.offer, cloud.bodies.pop()

    one, other = KEYS[key]
    assert seen(one) != seen(other)


# ---------------------------------------------------------------------- creating


def test_a_key_that_was_used_never_makes_a_second_machine_also_when_the_first_is_gone(cloud: Cloud) -> None:
    order, provider = cloud.order(), cloud.provider()
    provider.create(order)
    provider.terminate(order.worker_id, GRID_ID)
    cloud.now += 3600
    assert cloud.provider().create(order).state == "gone"
    assert not cloud.existing()


def test_a_machine_that_google_does_not_show_yet_is_starting(cloud: Cloud) -> None:
    cloud.visible_after = 30
    order, provider = cloud.order(), cloud.provider()
    made = provider.create(order)
    assert made.state == "starting"
    assert provider.describe(order.worker_id, GRID_ID) is None
    assert provider.list(GRID_ID) == []
    cloud.now += 30
    found = provider.describe(order.worker_id, GRID_ID)
    assert found is not None
    assert (found.instance, found.state, found.age_seconds) == (made.instance, "running", 30)


def test_a_name_that_somebody_else_uses_is_a_conflict_and_is_not_touched(cloud: Cloud) -> None:
    order, provider = cloud.order(), cloud.provider()
    cloud.add({"name": order.worker_id, "labels": {DASHED_TAGS.worker: order.worker_id}})
    with pytest.raises(Conflict, match="not this grid's"):
        provider.create(order)
    provider.terminate(order.worker_id, GRID_ID)
    assert provider.describe(order.worker_id, GRID_ID) is None
    assert len(cloud.existing()) == 1


def test_a_machine_of_the_same_order_that_google_knows_under_another_key_is_ours(cloud: Cloud) -> None:
    order, provider = cloud.order(), cloud.provider()
    made = provider.create(order)
    cloud.forget_requests()  # as Google does after an hour
    assert provider.create(order) == made
    other = replace(order, resources=WorkerResources(2000, 1 << 30))
    with pytest.raises(Conflict, match="ordered otherwise"):
        provider.create(other)
    assert len(cloud.existing()) == 1


def test_a_creation_waits_for_its_operation_and_is_lost_where_that_takes_too_long(cloud: Cloud) -> None:
    cloud.operation_seconds = 60
    order = cloud.order()
    provider = GCPCloudProvider(cloud.settings(), timeout_seconds=0.5)
    with pytest.raises(Unreachable, match="still at it"):
        provider.create(order)
    cloud.now += 60
    assert provider.create(order).state == "running"
    assert len(cloud.machines()) == 1


@pytest.mark.parametrize("where", ["e2-standard-2", ZONES[0], f"e2-standard-2/{ZONES[0]}"])
def test_a_stockout_is_found_in_the_operation_and_leaves_nothing(cloud: Cloud, where: str) -> None:
    order, provider = cloud.order(), cloud.provider()
    cloud.stockouts = {where}
    for _ in range(2):  # the same again for the same key, also when there are machines by then
        with pytest.raises(NoCapacity, match="not have enough resources") as failed:
            provider.create(order)
        assert failed.value.scope == ""
        cloud.stockouts = set()
    assert not cloud.machines()
    assert provider.create(cloud.order()).state == "running"


def test_a_quota_closes_the_kind_on_its_market(cloud: Cloud) -> None:
    cloud.quotas = {"CPUS": 3}
    provider = cloud.provider()
    provider.create(cloud.order())
    with pytest.raises(NoCapacity, match="Quota 'CPUS' exceeded") as failed:
        provider.create(cloud.order())
    assert failed.value.scope == "market:spot kind:cpu"
    assert len(cloud.existing()) == 1


FAULTS: dict[str, type[GridError]] = {
    "lose_before": Unreachable,
    "lose_after": Unreachable,
    "throttle": Throttled,
    "refuse": Refused,
    "unauthorized": Refused,
    "fail": Unreachable,
    "garbage": Unreachable,
}
CALLS: dict[str, Callable[[GCPCloudProvider, WorkerOrder], Any]] = {
    "create": lambda provider, order: provider.create(order),
    "list": lambda provider, order: provider.list(GRID_ID),
    "describe": lambda provider, order: provider.describe(order.worker_id, GRID_ID),
    "terminate": lambda provider, order: provider.terminate(order.worker_id, GRID_ID),
}


@pytest.mark.parametrize("method", list(CALLS))
@pytest.mark.parametrize("fault", list(FAULTS))
def test_what_goes_wrong_with_a_call_has_its_own_error_and_no_secret_in_it(
    cloud: Cloud, method: str, fault: str
) -> None:
    order, provider = cloud.order(), cloud.provider_with()
    if method != "create":
        provider.create(order)
    cloud.faults.waiting[method] = [fault]
    with pytest.raises(GridError) as failed:
        CALLS[method](provider, order)
    assert type(failed.value) is FAULTS[fault]
    assert TOKEN not in repr(failed.value) + str(failed.value)
    has_effect = {"create": ["lose_after"], "terminate": [one for one in FAULTS if one != "lose_after"]}
    assert bool(cloud.existing()) is (fault in has_effect.get(method, FAULTS))


def test_a_message_of_google_that_quotes_the_boot_script_is_shown_without_the_token(cloud: Cloud) -> None:
    order = cloud.order()
    cloud.refuse_with(f"Invalid value for field 'resource.metadata': 'export X={TOKEN}'")
    with pytest.raises(Refused, match=r"export X=\*\*\*") as failed:
        cloud.provider().create(order)
    assert TOKEN not in repr(failed.value)


@pytest.mark.parametrize("name", ["Worker-1", "1worker", "worker_1", "worker-", "w" * 64, "../other", "a?b", ""])
def test_a_name_that_google_does_not_take_is_refused_before_the_call(cloud: Cloud, name: str) -> None:
    order = replace(cloud.order(), worker_id=name)
    cloud.faults.calls.clear()
    with pytest.raises(Refused):
        cloud.provider().create(order)
    assert cloud.provider().describe(name, GRID_ID) is None
    cloud.provider().terminate(name, GRID_ID)
    assert cloud.faults.calls == []


# ---------------------------------------------------------------------- finding and ending


def test_a_machine_in_a_zone_that_the_config_names_no_more_is_listed_and_ended(cloud: Cloud) -> None:
    order = cloud.order(zones=[ZONES[1]])
    cloud.provider_with(zones=[ZONES[1]]).create(order)
    later = cloud.provider_with(zones=[ZONES[0]])
    assert [one.worker_id for one in later.list(GRID_ID)] == [order.worker_id]
    assert later.describe(order.worker_id, GRID_ID) is not None
    later.terminate(order.worker_id, GRID_ID)
    assert not cloud.existing()


def test_a_copy_of_a_machine_with_its_labels_is_not_ours_and_is_never_deleted(cloud: Cloud) -> None:
    order, provider = cloud.order(), cloud.provider()
    made = provider.create(order)
    copy = cloud.add({"name": f"{order.worker_id}-copy", "labels": cloud.bodies[0]["labels"]})
    assert [one.instance for one in provider.list(GRID_ID)] == [made.instance]
    for _ in range(2):
        cloud.provider().terminate(order.worker_id, GRID_ID)
    assert provider.describe(order.worker_id, GRID_ID) is None
    assert [one.instance for one in cloud.machines() if one.ended_at is None] == [copy]


def test_a_machine_is_ended_also_while_another_zone_cannot_be_listed(cloud: Cloud) -> None:
    order = cloud.order()
    cloud.provider().create(order)
    cloud.unreachable_zones = ["europe-west1-b"]
    cloud.provider().terminate(order.worker_id, GRID_ID)
    assert not cloud.existing()
    with pytest.raises(Unreachable, match="lacks projects/1/zones/europe-west1-b"):
        cloud.provider().describe(order.worker_id, GRID_ID)


def test_a_list_that_lacks_a_zone_is_no_list(cloud: Cloud) -> None:
    cloud.provider().create(cloud.order())
    cloud.unreachable_zones = ["us-central1-b"]
    with pytest.raises(Unreachable, match="lacks projects/1/zones/us-central1-b"):
        cloud.provider().list(GRID_ID)


def test_a_list_has_all_its_pages_and_nothing_of_others(cloud: Cloud) -> None:
    cloud.page_size = 2
    orders = [cloud.order() for _ in range(5)]
    for order in orders:
        cloud.provider().create(order)
    cloud.add_foreign()
    cloud.add({"name": "half-ours", "labels": {DASHED_TAGS.grid: GRID_ID}})
    cloud.add({"name": "other", "labels": {DASHED_TAGS.grid: "grid-2", DASHED_TAGS.worker: "other"}})
    assert {one.worker_id for one in cloud.provider().list(GRID_ID)} == {order.worker_id for order in orders}
    for name in ("half-ours", "other"):
        cloud.provider().terminate(name, GRID_ID)
    assert len(cloud.machines()) == len([one for one in cloud.machines() if one.ended_at is None]) == 8


def test_a_machine_that_was_only_stopped_is_ending_and_is_deleted(cloud: Cloud) -> None:
    order, provider = cloud.order(offer=2), cloud.provider()
    cloud.take_away(provider.create(order).instance)
    cloud.now += 48 * 3600
    (found,) = provider.list(GRID_ID)
    assert (found.state, found.detail, found.ends_in_seconds) == ("stopping", "it is TERMINATED", None)
    assert cloud.disks() == [order.worker_id]
    provider.terminate(order.worker_id, GRID_ID)
    assert not cloud.existing()
    assert not cloud.disks()


def test_the_end_of_a_machine_is_counted_on_the_clock_of_google_and_kept_by_it(cloud: Cloud) -> None:
    order, provider = cloud.order(max_run_hours=2), cloud.provider_with(max_run_hours=2)
    assert order.offer.lifetime_seconds == 7200
    assert provider.create(order).ends_in_seconds == 7200
    cloud.now += 7000
    found = provider.describe(order.worker_id, GRID_ID)
    assert found is not None
    assert (found.age_seconds, found.ends_in_seconds) == (7000, 200)
    cloud.now += 200
    assert provider.describe(order.worker_id, GRID_ID) is None
    assert not cloud.existing()


def test_a_spot_machine_that_is_taken_back_is_gone(cloud: Cloud) -> None:
    cloud.stops_in = 30
    order, provider = cloud.order(), cloud.provider()
    cloud.preempt(provider.create(order).instance)
    found = provider.describe(order.worker_id, GRID_ID)
    assert found is not None
    assert found.state == "stopping"
    cloud.now += 30
    assert provider.describe(order.worker_id, GRID_ID) is None


def test_a_deletion_that_failed_is_made_again_in_earnest(cloud: Cloud) -> None:
    order, provider = cloud.order(), cloud.provider()
    provider.create(order)
    cloud.faults.waiting["terminate"] = ["fail", "refuse", "lose_before", "lose_after"]
    for _ in range(4):
        with pytest.raises(GridError):
            provider.terminate(order.worker_id, GRID_ID)
    provider.terminate(order.worker_id, GRID_ID)
    assert not cloud.existing()


# ---------------------------------------------------------------------- offers and the check


def test_offers_are_kinds_then_spot_first_then_types_then_zones(cloud: Cloud) -> None:
    types = {"cpu": ["n2-standard-4", "e2-standard-2"], "gpu": "g2-standard-4"}
    names = [one.id for one in cloud.provider_with(machine_types=types).offers()]
    assert names[:5] == [
        "cpu/n2-standard-4/spot/us-central1-a",
        "cpu/n2-standard-4/spot/us-central1-b",
        "cpu/e2-standard-2/spot/us-central1-a",
        "cpu/e2-standard-2/spot/us-central1-b",
        "cpu/n2-standard-4/standard/us-central1-a",
    ]
    gpus = [one for one in cloud.provider_with(machine_types=types).offers() if one.worker_type == "gpu"]
    assert {one.resources.gpu_count for one in gpus} == {1}
    assert not any("spot" in one.market for one in cloud.provider_with(preemptible_enabled=False).offers())


def test_a_quota_of_zero_is_skipped_and_one_that_may_not_be_read_is_tried(cloud: Cloud) -> None:
    cloud.quotas, cloud.all_quotas = {"CPUS": 0}, {"CPUS_ALL_REGIONS": 12}
    first, *_ = cloud.provider_with(preemptible_enabled=False).offers()
    assert first.unavailable == "the quota CPUS is 0"
    cloud.faults.waiting["offers"] = ["refuse", "refuse"]
    assert not any(one.unavailable for one in cloud.provider_with(preemptible_enabled=False).offers())


def test_a_type_that_no_zone_has_is_named(cloud: Cloud) -> None:
    with pytest.raises(BadInput, match="a9-mega-1"):
        cloud.provider_with(machine_types={"cpu": "a9-mega-1"}).offers()
    with pytest.raises(BadInput, match="names no machine type"):
        cloud.provider_with(machine_types={}).offers()


def test_the_check_says_what_works_and_raises_what_is_missing(cloud: Cloud) -> None:
    assert cloud.provider().check() == [
        "no credentials (anonymous: true)",
        f"project {PROJECT_ID}: all {len(PERMISSIONS) + 2} permissions that are needed",
        "image projects/debian-cloud/global/images/family/debian-12",
        "4 offers in us-central1-a, us-central1-b",
    ]
    cloud.permissions = set(PERMISSIONS) - {"compute.instances.delete"}
    shared = "projects/host/regions/us-central1/subnetworks/lab"
    with pytest.raises(Refused, match=r"lack the permissions compute\.instances\.delete$"):
        cloud.provider_with(subnetwork=shared).check()
    with pytest.raises(Refused, match=r"compute\.instances\.setTags, compute\.subnetworks\.use"):
        cloud.provider_with(tags=["grid"]).check()
    cloud.permissions = None
    with pytest.raises(Refused, match="there is no image global/images/typo"):
        cloud.provider_with(image="typo").check()
    assert not cloud.machines()


def test_every_permission_that_is_needed_is_in_the_guide() -> None:
    guide = (PROJECT / "docs/guide/clouds.md").read_text()
    keys = {"project": "my-project", "tags": ("grid",), "service_account": EMAIL}
    assert [one for one in needed_permissions(GcpSettings(**keys)) if one not in guide] == []  # type: ignore[arg-type]


# ---------------------------------------------------------------------- credentials and settings


def test_a_service_account_is_used_and_its_token_renewed_when_google_takes_it_back(
    cloud: Cloud, tmp_path: Path
) -> None:
    key = write_service_account(tmp_path / "key.json", f"{cloud.url}/token")
    provider = cloud.provider_with(anonymous=False, credentials_file=str(key))
    made = provider.create(cloud.order())
    first = cloud.web.bearer
    assert cloud.web.assertions[0]["iss"] == EMAIL
    cloud.web.bearer = "ya29.another"
    assert [one.instance for one in provider.list(GRID_ID)] == [made.instance]
    assert cloud.web.bearer not in (first, "ya29.another")
    assert provider.check()[0] == f"the file {key} of {EMAIL}"
    shown = repr(provider) + repr(vars(provider)) + repr(cloud.settings())
    assert cloud.web.bearer not in shown
    key.chmod(0o644)
    assert "chmod 600" in provider.check()[0]


@pytest.mark.parametrize(
    "content", ["not json secret-words", '{"type": "service_account", "private_key": "secret-words"}']
)
def test_a_file_that_is_no_credentials_is_named_and_not_quoted(cloud: Cloud, tmp_path: Path, content: str) -> None:
    file = tmp_path / "key.json"
    file.write_text(content)
    with pytest.raises(Refused) as failed:
        cloud.provider_with(anonymous=None, credentials_file=str(file)).list(GRID_ID)
    chain = [failed.value, failed.value.__cause__]
    assert not any("secret-words" in str(one) for one in chain)
    with pytest.raises(Refused, match=r"missing\.json"):
        cloud.provider_with(anonymous=None, credentials_file=str(tmp_path / "missing.json")).list(GRID_ID)


def test_a_token_that_google_refuses_is_refused_in_words(cloud: Cloud, tmp_path: Path) -> None:
    key = write_service_account(tmp_path / "key.json", f"{cloud.url}/token/of-nobody")
    with pytest.raises(Refused, match="does not accept the credentials: invalid_grant: Invalid JWT Signature"):
        cloud.provider_with(anonymous=None, credentials_file=str(key)).list(GRID_ID)


def test_credentials_are_never_sent_over_plain_http_to_another_machine() -> None:
    settings = {"project": "my-project", "zone": "us-central1-a", "endpoint_url": "http://example.com"}
    with pytest.raises(BadInput, match="not sent over http"):
        GCPCloudProvider(settings)
    GCPCloudProvider({**settings, "anonymous": True})
    GCPCloudProvider({**settings, "endpoint_url": "https://example.com"})


def test_a_cloud_that_does_not_answer_is_unreachable(cloud: Cloud) -> None:
    provider = cloud.provider_with(endpoint_url="http://127.0.0.1:9")
    with pytest.raises(Unreachable, match="no answer from Google: Connection refused"):
        provider.list(GRID_ID)


def test_settings_that_cannot_work_are_refused_when_the_provider_is_made() -> None:
    with pytest.raises(BadInput, match="'zone'"):
        GCPCloudProvider({"project": "my-project"})
    hours = MAX_RUN_SECONDS // 3600 + 1
    with pytest.raises(BadInput, match=f"at most {hours - 1}"):
        GCPCloudProvider({"project": "my-project", "zone": "us-central1-a", "max_run_hours": hours})
    assert ProviderOfTheGuides is GCPCloudProvider


WITHOUT_EXTRA = """
import sys
sys.modules["google.auth"] = None
from distributed_grid.orchestration.cloud_provider_manager import GCPCloudProvider
try:
    GCPCloudProvider({"project": "my-project", "zone": "us-central1-a"}).list("grid-1")
except Exception as failure:
    print(type(failure).__name__, failure)
"""
LOADED = """
import sys
import distributed_grid.server.workers.provider_registry, distributed_grid.cli.main
print([name for name in ("google.auth", "google.cloud.compute_v1", "requests") if name in sys.modules])
"""


def test_without_the_extra_one_line_says_how_to_install_it() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRA], capture_output=True, text=True, check=True)
    assert (
        done.stdout == "BadInput gcp needs the packages google-auth and requests: pip install 'distributed-grid[gcp]'\n"
    )


def test_nothing_of_google_is_loaded_before_the_first_call() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
