"""Every provider keeps the promises of `CloudProviderBase`, whatever its cloud hides; those of containers and
of Slurm do in tests/component/adapters/clouds, on a real engine and a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed_grid.errors import Unreachable
from distributed_grid.ports import CloudProviderBase, WorkerOrder
from tests.support.clouds.ec2 import Ec2StandIn
from tests.support.clouds.gce import GceStandIn
from tests.support.clouds.slurm_commands import SlurmCommands
from tests.support.provider_contract import ProviderContract
from tests.support.scripted_provider import CloudFile, ScriptedProvider


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


class TestAWSCloudProvider(ProviderContract):
    @pytest.fixture(params=[{}, {"visible_after": 0.2, "stops_in": 0.2}], ids=["at-once", "late"])
    def provider(self, request: pytest.FixtureRequest) -> Iterator[CloudProviderBase]:
        self.cloud = Ec2StandIn(**request.param)
        yield self.cloud.provider()
        self.cloud.close()

    def create_unheard(self, provider: CloudProviderBase, order: WorkerOrder) -> None:
        self.cloud.faults.waiting["create"] = ["lose_after"]
        with pytest.raises(Unreachable):
            provider.create(order)
        assert [one.worker_id for one in self.cloud.machines()] == [order.worker_id]


class TestGCPCloudProvider(ProviderContract):
    @pytest.fixture(
        params=[{}, {"visible_after": 0.2, "stops_in": 0.2, "operation_seconds": 0.1}], ids=["at-once", "late"]
    )
    def provider(self, request: pytest.FixtureRequest) -> Iterator[CloudProviderBase]:
        self.cloud = GceStandIn(**request.param)
        yield self.cloud.provider()
        self.cloud.close()

    def create_unheard(self, provider: CloudProviderBase, order: WorkerOrder) -> None:
        self.cloud.faults.waiting["create"] = ["lose_after"]
        with pytest.raises(Unreachable):
            provider.create(order)
        assert order.worker_id in self.cloud.existing()


class TestSlurmProvider(ProviderContract):
    @pytest.fixture(params=[{}, {"stops_in": 0.2, "queue_seconds": lambda: 0.3}], ids=["at-once", "late"])
    def provider(self, request: pytest.FixtureRequest) -> Iterator[CloudProviderBase]:
        self.cloud = SlurmCommands(**request.param)
        yield self.cloud.provider()
        self.cloud.close()

    def create_unheard(self, provider: CloudProviderBase, order: WorkerOrder) -> None:
        self.cloud.faults.waiting["create"] = ["lose_after"]
        with pytest.raises(Unreachable):
            provider.create(order)
        assert [one.worker_id for one in self.cloud.machines()] == [order.worker_id]
