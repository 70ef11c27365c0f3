"""The providers of EC2 and Compute Engine keep the promises of `CloudProviderBase`, over HTTP to stand-ins."""

from __future__ import annotations

import pytest

from distributed_grid.adapters.clouds.boot_script import DOTTED_TAGS
from distributed_grid.ports import WorkerOrder
from tests.support.clouds.ec2 import Ec2StandIn
from tests.support.clouds.gce import GceStandIn
from tests.support.clouds.stand_in import CloudStandIn
from tests.support.stand_in_contract import QuotaContract, SettableClock, TwinContract

pytestmark = pytest.mark.slow


class TestAWSCloudProvider(QuotaContract, TwinContract):
    def make_cloud(self, clock: SettableClock) -> CloudStandIn:
        return Ec2StandIn(clock)

    def deny_by_quota(self, cloud: CloudStandIn) -> None:
        assert isinstance(cloud, Ec2StandIn)
        cloud.quotas["L-34B43A08"] = 0.0

    def add_twin(self, cloud: CloudStandIn, order: WorkerOrder) -> None:
        assert isinstance(cloud, Ec2StandIn)
        cloud.add_foreign({DOTTED_TAGS.worker: order.worker_id, DOTTED_TAGS.grid: order.grid_id})


class TestGCPCloudProvider(QuotaContract):
    def make_cloud(self, clock: SettableClock) -> CloudStandIn:
        return GceStandIn(clock)

    def deny_by_quota(self, cloud: CloudStandIn) -> None:
        assert isinstance(cloud, GceStandIn)
        cloud.quotas["CPUS"] = 0.0


class TestGCPOperationsThatTakeAWhile(TestGCPCloudProvider):
    def make_cloud(self, clock: SettableClock) -> CloudStandIn:
        return GceStandIn(clock, operation_seconds=0.1)
