"""Deliveries: the files of an ended job are on their way until they are reported there."""

# mypy: disable-error-code="union-attr"
# A None where a thing should be fails the test by itself.

from __future__ import annotations

import pytest

from distributed_grid.domain.deliveries import DeliveredFiles, Delivery, DeliveryEnd, FetchOrder
from distributed_grid.domain.events import (
    FilesDelayed,
    FilesDelivered,
    FilesFetched,
    FilesUndeliverable,
    JobCancelled,
    JobSubmitted,
)
from distributed_grid.errors import Conflict
from distributed_grid.reactor.dispatch import StepResult
from distributed_grid.reactor.effects import delivery_effects
from tests.support.builders import Scenario, a_command, a_node, a_request, an_exit

ORDER = FetchOrder(("out/**",), "/data/ana/work")
FILES = DeliveredFiles(directory="/data/ana/work", files=2, bytes=10, beside=(("a", "a.from-job"),))


def submitted(order: FetchOrder | None = ORDER) -> Scenario:
    scenario = Scenario(a_node("n1", cores=4, memory_gb=16))
    scenario.handle(JobSubmitted(id="job", command=a_command(), request=a_request("j1", cores=1), fetch=order))
    return scenario


def ended(order: FetchOrder | None = ORDER) -> Scenario:
    scenario = submitted(order)
    scenario.start("j1")
    scenario.end("j1", an_exit())
    return scenario


def delivery_in(stepped: StepResult) -> Delivery:
    (delivery,) = (row for row in stepped.changes if isinstance(row, Delivery))
    return delivery


def test_a_delivery_begins_with_the_end_of_its_job() -> None:
    scenario = submitted()
    assert delivery_effects(scenario.ledger) == []
    scenario.start("j1")
    scenario.end("j1", an_exit())
    (effect,) = delivery_effects(scenario.ledger)
    delivery = effect.delivery
    assert (delivery.job, delivery.job_id, delivery.node, delivery.order) == ("j1", "job", "n1", ORDER)
    assert "j1" not in scenario.ledger.jobs


def test_a_job_without_wanted_files_has_no_delivery() -> None:
    assert delivery_effects(ended(None).ledger) == []


def test_a_cancelled_job_in_the_queue_has_a_delivery_that_names_no_node() -> None:
    scenario = submitted(None)
    scenario.handle(JobSubmitted(id="next", command=a_command(), request=a_request("j2", cores=4), fetch=ORDER))
    scenario.handle(JobCancelled("j2", "ana"))
    assert scenario.ledger.deliveries["j2"].node == ""


def test_delivered_files_end_the_delivery_once() -> None:
    scenario = ended()
    stepped = scenario.handle(FilesDelivered("j1", FILES))
    assert (delivery_in(stepped).end, delivery_in(stepped).delivered) == (DeliveryEnd.DELIVERED, FILES)
    assert [record.type for record in stepped.records] == ["files-delivered"]
    assert delivery_effects(scenario.ledger) == []
    again = scenario.handle(FilesDelivered("j1", FILES))
    assert (again.changes, again.records) == ([], [])


def test_a_delay_is_noted_once_per_reason_and_the_delivery_stays_pending() -> None:
    scenario = ended()
    assert delivery_in(scenario.handle(FilesDelayed("j1", "n1 is not connected"))).problem == "n1 is not connected"
    assert scenario.handle(FilesDelayed("j1", "n1 is not connected")).changes == []
    assert len(delivery_effects(scenario.ledger)) == 1
    assert delivery_in(scenario.handle(FilesDelivered("j1", FILES))).problem == ""


def test_files_that_cannot_be_had_any_more_end_the_delivery_with_the_reason() -> None:
    scenario = ended()
    stepped = scenario.handle(FilesUndeliverable("j1", "its directory is gone"))
    assert (delivery_in(stepped).end, delivery_in(stepped).problem) == (DeliveryEnd.FAILED, "its directory is gone")
    assert [record.type for record in stepped.records] == ["files-not-delivered"]


def test_a_fetch_by_hand_is_recorded_and_does_not_end_an_ordered_delivery() -> None:
    fetched = FilesFetched(job="j1", job_id="job", user="ana", node="n1", patterns=("**",), delivered=FILES)
    assert delivery_in(ended(None).handle(fetched)).end is DeliveryEnd.DELIVERED
    scenario = ended()
    assert scenario.handle(fetched).changes == []
    assert len(delivery_effects(scenario.ledger)) == 1


def test_the_same_request_with_other_files_is_refused() -> None:
    scenario = submitted()
    with pytest.raises(Conflict):
        scenario.handle(
            JobSubmitted(id="job", command=a_command(), request=a_request("j1", cores=1), fetch=FetchOrder(("**",)))
        )


def test_the_ledger_is_rebuilt_from_its_rows_with_the_deliveries() -> None:
    scenario = ended()
    scenario.ledger.check()
    assert [row for row in scenario.ledger.rows() if isinstance(row, Delivery)] == [scenario.ledger.deliveries["j1"]]
