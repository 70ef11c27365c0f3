"""Columns: the same truth as the rows, in a form a filter can eat."""

from __future__ import annotations

from distributed_grid.domain.events import HeartbeatReceived
from distributed_grid.domain.indexes.columns import FreeColumns
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.nodes import Usage
from distributed_grid.reactor import step
from tests.support.builders import GB, NOW, Scenario, a_ledger, a_node, a_request, caps


def column(ledger: Ledger, name: str, node: str = "gpu1") -> int:
    return int(getattr(ledger.columns, name)[ledger.columns.rows[node]])


def write(columns: FreeColumns, node: str, cpu: int) -> None:
    row = columns.row_of(node)  # first: growing makes new arrays
    columns.cpu[row] = cpu


def test_a_node_keeps_its_row_when_others_come():
    columns = FreeColumns()
    rows = [columns.row_of(f"n{number}") for number in range(50)]
    assert rows == list(range(50))
    assert [columns.row_of(f"n{number}") for number in range(50)] == rows
    assert len(columns.cpu) == len(columns.open) == 50


def test_what_was_written_survives_growing():
    columns = FreeColumns()
    for number in range(40):
        write(columns, f"n{number}", number)
    assert columns.cpu.tolist() == list(range(40))


def test_columns_are_equal_whatever_the_order_of_their_rows():
    one, other = FreeColumns(), FreeColumns()
    for name, amount in (("a", 1), ("b", 2)):
        write(one, name, amount)
    for name, amount in (("b", 2), ("a", 1)):
        write(other, name, amount)
    assert one.equals(other)
    other.memory[other.row_of("a")] = 5
    assert not one.equals(other)


def test_columns_over_other_nodes_are_not_equal():
    one, other = FreeColumns(), FreeColumns()
    one.row_of("a")
    other.row_of("b")
    assert not one.equals(other)


def test_columns_say_what_is_free_and_what_may_be_lent_at_most():
    scenario = Scenario(a_node("gpu1", cores=4, memory_gb=16, gpus=2, caps=caps(cores=3)))
    scenario.ask(a_request(cores=1, memory_gb=6, gpus=0.5))
    ledger = scenario.ledger
    assert column(ledger, "open") == 1
    assert (column(ledger, "cpu"), column(ledger, "lends_cpu")) == (2000, 3000)
    assert (column(ledger, "memory"), column(ledger, "lends_memory")) == (10 * GB, 16 * GB)
    assert (column(ledger, "gpu_whole"), column(ledger, "gpu_part"), column(ledger, "lends_gpus")) == (1, 1000, 2)
    ledger.check()


def test_a_node_without_an_offer_is_closed_and_has_nothing_free():
    ledger = Ledger([a_node("gpu1")])
    assert column(ledger, "open") == 0
    assert column(ledger, "cpu") == 0
    assert column(ledger, "lends_cpu") == 4000


def test_rank_has_a_column_of_its_own():
    ledger = a_ledger(a_node("low", cores=64, rank=1000), a_node("high", cores=1, rank=2000))
    assert (column(ledger, "rank", "high"), column(ledger, "rank", "low")) == (2000, 1000)


def test_a_node_that_lends_nothing_has_its_rank_and_no_slack():
    ledger = a_ledger(a_node("gpu1", caps=caps(can_share=False)))
    step(ledger, HeartbeatReceived(name="gpu1", usage=Usage()), NOW)
    assert (column(ledger, "rank"), column(ledger, "slack")) == (1000, 0)


def test_a_device_that_a_preemptor_and_its_victim_share_has_nothing_left():
    scenario = Scenario(a_node("gpu1", cores=4, gpus=1))
    scenario.submit(a_request("r1", gpus=1, priority="low"), starts=True)
    scenario.advance(5)
    scenario.submit(a_request("r2", gpus=0.5, priority="urgent"))
    assert scenario.lease_of("r2").awaits
    assert scenario.ledger.columns.devices[scenario.ledger.columns.rows["gpu1"]].tolist() == [0]
    scenario.ledger.check()
