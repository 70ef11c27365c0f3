"""Reclaim of memory that blocks hold on an owner's machine."""

from __future__ import annotations

import pytest

from distributed_grid.agent.lent_memory import address_towards, bytes_to_reclaim, own_address
from distributed_grid.wire import OwnerRules

GB = 1024**3
RULES = OwnerRules(
    cpu_busy_max_milli=300,
    memory_used_max_milli=500,
    memory_min_bytes=2 * GB,
    gpu_busy_max_milli=200,
    gpu_memory_min_bytes=GB,
)


@pytest.mark.parametrize(
    ("used", "outside", "wanted"),
    [
        (8, 1, 0),  # lent to the brim, and the owner is idle
        (8, 4, 0),  # the owner uses more, but there is room
        (9, 2, 0.8),  # less is free than has to be: so much goes that it is again, and a little more
        (9, 6, 4),  # the owner alone is above the mark: everything above it goes
        (6, 6, 1),
    ],
)
def test_an_owner_gets_what_is_short_and_all_above_the_mark_once_it_is_reached(used, outside, wanted):
    assert bytes_to_reclaim(RULES, total=10 * GB, used=used * GB, outside=outside * GB) == round(wanted * GB)


def test_a_machine_listens_where_the_cluster_knows_it_and_nowhere_else():
    assert own_address(["192.0.2.1", "127.0.0.1"]) == "127.0.0.1"
    assert own_address(["local"]) == "127.0.0.1"
    with pytest.raises(OSError, match="none of the addresses"):
        own_address(["192.0.2.1", "no-such-host.invalid", ""])


def test_the_address_towards_another_machine_is_found_without_asking_it():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no-such-host.invalid") == ""
