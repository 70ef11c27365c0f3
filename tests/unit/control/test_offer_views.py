"""What is shown of offers: one row per kind of resource, and no more rows per node than the config allows."""

from __future__ import annotations

import pytest

from distributed_grid.control.views import Viewer
from tests.support.builders import a_ledger, a_node


@pytest.mark.parametrize(("most", "kinds"), [(5, ["cpu", "memory", "gpu", "fpga"]), (2, ["cpu", "memory"]), (0, [])])
def test_a_node_shows_no_more_offers_than_the_config_allows(most: int, kinds: list[str]) -> None:
    ledger = a_ledger(a_node("gpu1", gpus=1, custom={"fpga": 2}))
    assert [offer["resource_type"] for offer in Viewer(0, most).offers(ledger)] == kinds
