"""The promises of `CloudProviderBase` under faults, as tests on a stand-in of its cloud: subclass `StandInContract`.

class TestMyProvider(StandInContract):
    def make_cloud(self, clock): ...

The clock of the cloud runs on, and can be set forward: nothing waits for what takes long.
"""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest
from msgspec.structs import replace

from distributed_grid.errors import BadInput, GridError, NoCapacity, Refused, Throttled, Unreachable
from distributed_grid.ports import CloudProviderBase, WorkerOffer, WorkerOrder
from distributed_grid.scheduling.scaling.worker_availability import OfferPlace
from tests.support.clouds.stand_in import CloudStandIn, Machine
from tests.support.provider_contract import ALIVE, TOKEN, ProviderContract


class SettableClock:
    """The time of this machine, and as much later as it was set forward."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self._ahead

    def forward(self, seconds: float) -> None:
        self._ahead += seconds


class StandInContract(ProviderContract):
    """What every provider keeps, also where its cloud does not answer, lies for a while or has no room.

    `late` is after how many seconds a machine is listed, and gone, in a cloud that takes its time.
    """

    late: ClassVar = (0.2, 0.2)
    cloud: CloudStandIn

    @abstractmethod
    def make_cloud(self, clock: SettableClock) -> CloudStandIn:
        """A cloud of this test's own."""

    @pytest.fixture
    def clock(self) -> SettableClock:
        return SettableClock()

    @pytest.fixture(params=[False, True], ids=["at-once", "late"])
    def provider(self, request: pytest.FixtureRequest, clock: SettableClock) -> Iterator[CloudProviderBase]:
        self.cloud = cloud = self.make_cloud(clock)
        if request.param:
            cloud.visible_after, cloud.stops_in = self.late
        yield cloud.provider()
        cloud.close()

    def create_unheard(self, provider: CloudProviderBase, order: WorkerOrder) -> None:
        self.script(create="lose_after")
        with pytest.raises(Unreachable):
            provider.create(order)
        assert self.machines_of(order)

    def script(self, **faults: str) -> None:
        self.cloud.faults.waiting = {method: [fault] for method, fault in faults.items()}

    def machines_of(self, order: WorkerOrder) -> list[Machine]:
        """The machines of an order that cost money, as the cloud knows them."""
        now = self.cloud.clock()
        ours = [
            one for one in self.cloud.machines() if (one.worker_id, one.grid_id) == (order.worker_id, order.grid_id)
        ]
        return [one for one in ours if one.ended_at is None or one.ended_at > now]

    def have_ended(self, provider: CloudProviderBase, order: WorkerOrder, clock: SettableClock) -> None:
        """End the machine of an order, however often that has to be said."""
        clock.forward(self.cloud.visible_after)
        provider.terminate(order.worker_id, order.grid_id)
        clock.forward(self.cloud.stops_in + 1)
        assert not self.machines_of(order)

    # ------------------------------------------------------------------ creating

    def test_a_creation_that_was_lost_before_its_effect_made_nothing_and_is_made_again(
        self, provider: CloudProviderBase, grid_id: str
    ) -> None:
        order = self.order(provider, grid_id)
        self.script(create="lose_before")
        with pytest.raises(Unreachable):
            provider.create(order)
        assert not self.machines_of(order)
        assert provider.create(order).state in ALIVE
        assert len(self.machines_of(order)) == 1

    def test_after_a_lost_answer_another_process_gets_the_same_machine(
        self, provider: CloudProviderBase, grid_id: str
    ) -> None:
        order = self.order(provider, grid_id)
        self.create_unheard(provider, order)
        (machine,) = self.machines_of(order)
        assert self.cloud.provider().create(order).instance == machine.instance
        assert len(self.machines_of(order)) == 1

    def test_throttling_has_no_effect_and_is_no_lack_of_capacity(
        self, provider: CloudProviderBase, grid_id: str
    ) -> None:
        order = self.order(provider, grid_id)
        self.script(create="throttle")
        with pytest.raises(Throttled):
            provider.create(order)
        assert not self.machines_of(order)

    @pytest.mark.parametrize("fault", ["no_capacity", "quota"])
    def test_a_lack_of_capacity_made_nothing_and_names_a_scope_that_the_offer_is_in(
        self, provider: CloudProviderBase, grid_id: str, fault: str
    ) -> None:
        order = self.order(provider, grid_id)
        self.script(create=fault)
        with pytest.raises(NoCapacity) as failure:
            provider.create(order)
        assert not self.machines_of(order)
        offer, scope = order.offer, failure.value.scope
        place = OfferPlace(provider.name, offer.id, offer.zone, offer.market, offer.worker_type)
        assert not scope or place.scope_like(scope) == scope

    def test_another_offer_can_be_had_at_once_where_one_has_no_capacity(
        self, provider: CloudProviderBase, grid_id: str
    ) -> None:
        offers = [one for one in provider.offers() if not one.unavailable]
        first = self.order(provider, grid_id)
        self.script(create="no_capacity")
        with pytest.raises(NoCapacity):
            provider.create(first)
        other = replace(self.order(provider, grid_id), offer=offers[-1])
        assert provider.create(other).state in ALIVE

    def test_a_missing_permission_is_refused_for_good_and_made_nothing(
        self, provider: CloudProviderBase, grid_id: str
    ) -> None:
        order = self.order(provider, grid_id)
        self.script(create="refuse")
        with pytest.raises(Refused) as failure:
            provider.create(order)
        assert not failure.value.retryable
        assert not self.machines_of(order)
        assert TOKEN not in str(failure.value)

    @pytest.mark.parametrize("method", ["create", "list", "describe", "terminate"])
    def test_an_error_of_the_cloud_itself_says_nothing_about_what_was_done(
        self, provider: CloudProviderBase, grid_id: str, clock: SettableClock, method: str
    ) -> None:
        order = self.order(provider, grid_id)
        if method != "create":
            provider.create(order)
            clock.forward(self.cloud.visible_after)
        self.script(**{method: "fail"})
        with pytest.raises((Unreachable, RuntimeError)):
            self.call(provider, method, order)

    def call(self, provider: CloudProviderBase, method: str, order: WorkerOrder) -> None:
        calls: dict[str, Callable[[], object]] = {
            "create": lambda: provider.create(order),
            "list": lambda: provider.list(order.grid_id),
            "describe": lambda: provider.describe(order.worker_id, order.grid_id),
            "terminate": lambda: provider.terminate(order.worker_id, order.grid_id),
        }
        calls[method]()

    @pytest.mark.parametrize("method", ["list", "describe"])
    @pytest.mark.parametrize("fault", ["lose_before", "throttle", "refuse"])
    def test_what_cannot_be_looked_up_is_an_error_and_never_an_absence(
        self, provider: CloudProviderBase, grid_id: str, clock: SettableClock, method: str, fault: str
    ) -> None:
        order = self.order(provider, grid_id)
        provider.create(order)
        clock.forward(self.cloud.visible_after)
        self.script(**{method: fault})
        with pytest.raises(GridError):
            self.call(provider, method, order)

    def test_a_machine_that_is_not_shown_yet_is_not_made_twice(
        self, provider: CloudProviderBase, grid_id: str, clock: SettableClock
    ) -> None:
        self.cloud.visible_after = 40.0
        order = self.order(provider, grid_id)
        created = provider.create(order)
        clock.forward(10)
        assert self.cloud.provider().create(order).instance == created.instance
        clock.forward(31)
        assert self.listed(provider, order).instance == created.instance
        assert len(self.machines_of(order)) == 1

    # ------------------------------------------------------------------ ending

    def test_a_termination_that_was_lost_before_its_effect_ended_nothing(
        self, provider: CloudProviderBase, grid_id: str, clock: SettableClock
    ) -> None:
        order = self.order(provider, grid_id)
        provider.create(order)
        clock.forward(self.cloud.visible_after)
        self.script(terminate="lose_before")
        with pytest.raises(Unreachable):
            provider.terminate(order.worker_id, grid_id)
        assert self.machines_of(order)
        self.have_ended(provider, order, clock)

    def test_a_termination_whose_answer_was_lost_is_made_again_and_is_no_error(
        self, provider: CloudProviderBase, grid_id: str, clock: SettableClock
    ) -> None:
        order = self.order(provider, grid_id)
        provider.create(order)
        clock.forward(self.cloud.visible_after)
        self.script(terminate="lose_after")
        with pytest.raises(Unreachable):
            provider.terminate(order.worker_id, grid_id)
        self.have_ended(provider, order, clock)
        assert self.is_gone(provider, order)

    @pytest.mark.parametrize("fault", ["throttle", "refuse"])
    def test_a_termination_that_is_not_taken_on_is_an_error(
        self, provider: CloudProviderBase, grid_id: str, clock: SettableClock, fault: str
    ) -> None:
        order = self.order(provider, grid_id)
        provider.create(order)
        clock.forward(self.cloud.visible_after)
        self.script(terminate=fault)
        with pytest.raises(GridError):
            provider.terminate(order.worker_id, grid_id)
        assert self.machines_of(order)
        self.have_ended(provider, order, clock)

    def test_what_takes_long_to_end_is_there_until_it_has(
        self, provider: CloudProviderBase, grid_id: str, clock: SettableClock
    ) -> None:
        order = self.order(provider, grid_id)
        provider.create(order)
        clock.forward(self.cloud.visible_after + 1)
        self.cloud.stops_in = 60.0
        provider.terminate(order.worker_id, grid_id)
        found = provider.describe(order.worker_id, grid_id)
        assert found is not None
        assert found.state == "stopping"
        assert [one.state for one in provider.list(grid_id)] == ["stopping"]
        provider.terminate(order.worker_id, grid_id)
        clock.forward(61)
        assert self.is_gone(provider, order)
        assert not provider.list(grid_id)
        assert not self.machines_of(order)

    def test_an_order_whose_machine_was_ended_never_makes_another(
        self, provider: CloudProviderBase, grid_id: str, clock: SettableClock
    ) -> None:
        order = self.order(provider, grid_id)
        provider.create(order)
        self.have_ended(provider, order, clock)
        with contextlib.suppress(Refused, Unreachable):
            provider.create(order)
        assert not self.machines_of(order)

    def test_what_the_cloud_takes_away_is_seen_to_end(
        self, provider: CloudProviderBase, grid_id: str, clock: SettableClock
    ) -> None:
        order = self.order(provider, grid_id)
        created = provider.create(order)
        clock.forward(self.cloud.visible_after + 1)
        self.cloud.take_away(created.instance)
        found = provider.describe(order.worker_id, grid_id)
        assert found is None or found.state in ("stopping", "gone")
        self.have_ended(provider, order, clock)

    def test_a_machine_with_an_end_of_its_own_says_so_and_ends_without_anybody(
        self, provider: CloudProviderBase, grid_id: str, clock: SettableClock
    ) -> None:
        order = self.order(provider, grid_id)
        life = order.offer.lifetime_seconds
        provider.create(order)
        clock.forward(self.cloud.visible_after + 1)
        seen = self.listed(provider, order)
        if not life:
            assert seen.ends_in_seconds is None, "machines of this cloud have no end of their own"
            return
        assert seen.ends_in_seconds == pytest.approx(life, abs=60)
        clock.forward(life + 60)
        assert not self.machines_of(order)
        assert not provider.list(grid_id)

    # ------------------------------------------------------------------ whose it is

    def test_foreign_machines_are_neither_listed_nor_ended(self, provider: CloudProviderBase, grid_id: str) -> None:
        foreign = self.cloud.add_foreign()
        order = self.order(provider, grid_id)
        provider.create(order)
        assert [one.worker_id for one in [self.listed(provider, order)]] == [order.worker_id]
        for name in (foreign, "", "*", f"{order.worker_id}*"):
            for grid in (grid_id, "", "*"):
                with contextlib.suppress(BadInput, Refused):  # of a name that no machine of it can have
                    provider.terminate(name, grid)
        assert [one.ended_at for one in self.cloud.machines() if one.instance == foreign] == [None]
        assert self.machines_of(order)

    def test_tags_that_differ_by_one_character_are_others(
        self, provider: CloudProviderBase, grid_id: str, clock: SettableClock
    ) -> None:
        order = self.order(provider, grid_id)
        provider.create(order)
        clock.forward(self.cloud.visible_after + 1)
        for worker_id, grid in (
            (order.worker_id[:-1], grid_id),
            (f"{order.worker_id}0", grid_id),
            (order.worker_id, grid_id[:-1]),
            (order.worker_id, f"{grid_id}0"),
        ):
            assert provider.describe(worker_id, grid) is None
            provider.terminate(worker_id, grid)
        assert not provider.list(grid_id[:-1])
        assert not provider.list(f"{grid_id}0")
        assert self.listed(provider, order).state in ALIVE

    # ------------------------------------------------------------------ what there is

    def test_a_check_says_what_works_and_starts_nothing(self, provider: CloudProviderBase) -> None:
        before = len(self.cloud.machines())
        assert all(provider.check())
        assert len(self.cloud.machines()) == before

    def test_the_ids_of_offers_name_one_place_each(self, provider: CloudProviderBase) -> None:
        offers = provider.offers()
        places = {(one.worker_type, one.zone, one.market, _size(one)) for one in offers}
        assert len(places) == len(offers) == len({one.id for one in offers})


class QuotaContract(StandInContract):
    """The same, of a cloud whose quotas its provider can read."""

    @abstractmethod
    def deny_by_quota(self, cloud: CloudStandIn) -> None:
        """Have a quota of the cloud be zero."""

    def test_a_quota_of_zero_is_said_with_the_offer_and_an_unknown_one_is_tried(
        self, provider: CloudProviderBase, grid_id: str
    ) -> None:
        assert any(not one.unavailable for one in provider.offers())
        self.deny_by_quota(self.cloud)
        offers = self.cloud.provider().offers()
        denied = [one for one in offers if one.unavailable]
        assert denied
        assert all("quota" in one.unavailable for one in denied)


class TwinContract(StandInContract):
    """The same, of a cloud in which there can be two machines of one name."""

    @abstractmethod
    def add_twin(self, cloud: CloudStandIn, order: WorkerOrder) -> None:
        """Have a second machine with the tags of an order."""

    def test_two_machines_of_one_name_are_both_listed_and_both_ended(
        self, provider: CloudProviderBase, grid_id: str, clock: SettableClock
    ) -> None:
        order = self.order(provider, grid_id)
        provider.create(order)
        self.add_twin(self.cloud, order)
        clock.forward(self.cloud.visible_after + 1)
        assert [one.worker_id for one in provider.list(grid_id)] == [order.worker_id] * 2
        self.have_ended(provider, order, clock)


def _size(offer: WorkerOffer) -> str:
    return repr(offer.resources) + offer.id.partition("/")[0]
