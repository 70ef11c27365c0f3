"""Every provider keeps the promises of `CloudProviderBase`, whatever its cloud hides: see test_web_providers.py for EC2
and Compute Engine, tests/component/adapters/clouds for containers and Slurm on a real engine and a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from distributed_grid.errors import Unreachable
from distributed_grid.ports import CloudProviderBase, WorkerOrder
from tests.support.clouds.scripted import ScriptedCloud
from tests.support.clouds.slurm_commands import SlurmCommands
from tests.support.clouds.stand_in import CloudStandIn
from tests.support.provider_contract import ProviderContract
from tests.support.scripted_provider import CloudFile, ScriptedProvider
from tests.support.stand_in_contract import QuotaContract, SettableClock, StandInContract


class TestScriptedProvider(ProviderContract):
    @pytest.fixture(params=[{}, {"visible_after": 0.2, "stops_in": 0.2}], ids=["at-once", "late"])
    def provider(self, request: pytest.FixtureRequest, tmp_path: Path) -> CloudProviderBase:
        self.console = CloudFile(tmp_path / "cloud.json")
        return ScriptedProvider({"state_file": str(self.console.path), **request.param})

    def create_unheard(self, provider: CloudProviderBase, order: WorkerOrder) -> None:
        self.console.script(create=["lose_after"])
        with pytest.raises(Unreachable):
            provider.create(order)
        assert order.worker_id in self.console.existing()


class TestScriptedCloud(QuotaContract):
    def make_cloud(self, clock: SettableClock) -> CloudStandIn:
        return ScriptedCloud(clock)

    def deny_by_quota(self, cloud: CloudStandIn) -> None:
        assert isinstance(cloud, ScriptedCloud)
        cloud.offers = [replace(one, unavailable="the quota is 0") for one in cloud.offers]


class TestSlurmProvider(StandInContract):
    """Slurm has no key of an order: one that takes effect late may be a second pilot, which ends by itself."""

    late = (0.0, 0.2)

    def make_cloud(self, clock: SettableClock) -> CloudStandIn:
        return SlurmCommands(clock)


class TestSlurmQueue(TestSlurmProvider):
    def make_cloud(self, clock: SettableClock) -> CloudStandIn:
        return SlurmCommands(clock, queue_seconds=lambda: 0.3)
