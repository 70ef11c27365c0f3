"""The promises of `CloudProviderBase`, as tests: subclass `ProviderContract` and say how to get a provider.

@pytest.fixture
def provider() -> CloudProviderBase: ...

class TestMyProvider(ProviderContract):
    def create_unheard(self, provider, order): ...

What a provider shows late is waited for. Every test has machines of its own, and ends them.
"""

from __future__ import annotations

import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import pytest
from msgspec.structs import replace

from distributed_grid.domain.workers import WorkerResources
from distributed_grid.errors import Refused
from distributed_grid.ports import CloudProviderBase, WorkerInstance, WorkerOrder
from tests.support.shell import wait_until

TOKEN = "a-token-that-nobody-may-see"
ALIVE = ("starting", "running")


class ProviderContract(ABC):
    """What every provider keeps."""

    resources: ClassVar = WorkerResources(cpu_milli=100, memory_bytes=64 << 20)
    seconds: ClassVar[float] = 20.0

    @abstractmethod
    def create_unheard(self, provider: CloudProviderBase, order: WorkerOrder) -> None:
        """Have the order carried out, and its answer lost."""

    @pytest.fixture
    def grid_id(self, provider: CloudProviderBase) -> Iterator[str]:
        """A grid of this test's own; its machines are ended with the test."""
        name = f"grid-{uuid.uuid4().hex[:8]}"
        yield name
        for one in provider.list(name):
            provider.terminate(one.worker_id, name)

    def order(self, provider: CloudProviderBase, grid_id: str) -> WorkerOrder:
        offer = provider.offers()[0]
        worker_id = f"worker-{uuid.uuid4().hex[:8]}"
        return WorkerOrder(worker_id, grid_id, offer, self.resources, {"GRID_JOIN_TOKEN": TOKEN})

    def listed(self, provider: CloudProviderBase, order: WorkerOrder) -> WorkerInstance:
        """The machine of an order, once it is in the list; there is one of that name at most."""

        def find() -> WorkerInstance | None:
            found = [one for one in provider.list(order.grid_id) if one.worker_id == order.worker_id]
            assert len(found) <= 1
            return found[0] if found else None

        instance: WorkerInstance = wait_until(find, self.seconds)
        return instance

    def is_gone(self, provider: CloudProviderBase, order: WorkerOrder) -> bool:
        found = provider.describe(order.worker_id, order.grid_id)
        return found is None or found.state == "gone"

    def test_offers_say_what_can_be_started_and_change_nothing(self, provider: CloudProviderBase, grid_id: str) -> None:
        offers = provider.offers()
        assert offers
        assert len({offer.id for offer in offers}) == len(offers)
        assert all(offer.resources.cpu_milli > 0 and offer.resources.memory_bytes > 0 for offer in offers)
        assert all(offer.price_micro is None or offer.price_micro >= 0 for offer in offers)
        assert provider.offers() == offers
        assert not provider.list(grid_id)

    def test_what_is_created_is_described_and_listed_with_its_tags(
        self, provider: CloudProviderBase, grid_id: str
    ) -> None:
        order = self.order(provider, grid_id)
        created = provider.create(order)
        assert (created.worker_id, created.grid_id) == (order.worker_id, grid_id)
        assert created.instance
        assert created.state in ALIVE
        described = wait_until(lambda: provider.describe(order.worker_id, grid_id), self.seconds)
        for seen in (described, self.listed(provider, order)):
            assert (seen.worker_id, seen.grid_id, seen.instance) == (order.worker_id, grid_id, created.instance)
            assert seen.state in ALIVE
            assert 0 <= seen.age_seconds < 3600

    def test_the_identical_order_again_returns_the_same_machine(
        self, provider: CloudProviderBase, grid_id: str
    ) -> None:
        order = self.order(provider, grid_id)
        first, second = provider.create(order), provider.create(order)
        assert second.instance == first.instance
        assert self.listed(provider, order).instance == first.instance

    def test_an_order_whose_answer_was_lost_is_repeated_without_a_second_machine(
        self, provider: CloudProviderBase, grid_id: str
    ) -> None:
        order = self.order(provider, grid_id)
        self.create_unheard(provider, order)
        created = provider.create(order)
        assert created.state in ALIVE
        assert self.listed(provider, order).instance == created.instance

    def test_the_identical_order_at_the_same_time_makes_one_machine(
        self, provider: CloudProviderBase, grid_id: str
    ) -> None:
        order = self.order(provider, grid_id)
        created: list[WorkerInstance] = []
        threads = [threading.Thread(target=lambda: created.append(provider.create(order))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(created) == 3
        assert len({one.instance for one in created}) == 1

    def test_another_order_under_the_same_name_is_refused(self, provider: CloudProviderBase, grid_id: str) -> None:
        order = self.order(provider, grid_id)
        created = provider.create(order)
        self.listed(provider, order)
        other = replace(order, resources=WorkerResources(cpu_milli=200, memory_bytes=80 << 20))
        with pytest.raises(Refused, match=order.worker_id):
            provider.create(other)
        assert self.listed(provider, order).instance == created.instance

    def test_another_grid_neither_sees_nor_ends_it(self, provider: CloudProviderBase, grid_id: str) -> None:
        order = self.order(provider, grid_id)
        provider.create(order)
        self.listed(provider, order)
        assert not provider.list(f"{grid_id}-other")
        assert provider.describe(order.worker_id, f"{grid_id}-other") is None
        provider.terminate(order.worker_id, f"{grid_id}-other")
        assert self.listed(provider, order).state in ALIVE

    def test_what_is_terminated_is_gone_for_good(self, provider: CloudProviderBase, grid_id: str) -> None:
        order = self.order(provider, grid_id)
        provider.create(order)
        self.listed(provider, order)
        provider.terminate(order.worker_id, grid_id)
        wait_until(lambda: self.is_gone(provider, order), self.seconds)
        wait_until(lambda: not provider.list(grid_id), self.seconds)
        provider.terminate(order.worker_id, grid_id)

    def test_what_never_was_is_not_known_and_may_be_terminated(self, provider: CloudProviderBase, grid_id: str) -> None:
        assert provider.describe("worker-never", grid_id) is None
        provider.terminate("worker-never", grid_id)

    def test_the_token_is_shown_nowhere(self, provider: CloudProviderBase, grid_id: str) -> None:
        order = self.order(provider, grid_id)
        created = provider.create(order)
        seen = [order, created, self.listed(provider, order), provider.describe(order.worker_id, grid_id)]
        assert TOKEN not in repr(seen)
