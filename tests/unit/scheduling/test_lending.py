"""What a node lends out of what was measured; the owner's part stays with the owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.nodes import Usage
from distributed_grid.domain.resources import NOTHING
from distributed_grid.scheduling.lending import lending
from distributed_grid.testing.builders import GB, a_node, a_usage, caps, thresholds

BUSY = a_usage(cpu_outside=1, memory_outside_gb=16, gpus={0: (1, 24)})


def test_without_thresholds_a_node_lends_all_it_may_however_busy_it_is():
    node = a_node(cores=4, memory_gb=16, gpus=1, caps=caps(cores=3))
    assert lending(node, BUSY) == (node.lendable, ())


def test_a_node_that_does_not_share_lends_nothing_and_says_so():
    assert lending(a_node(caps=caps(can_share=False)), Usage()) == (NOTHING, ("does not share",))


@pytest.mark.parametrize(
    ("usage", "cpu_milli", "keeps"),
    [
        (a_usage(), 4000, ()),
        (a_usage(cpu_outside=0.25), 3000, ()),
        (a_usage(cpu_outside=0.7), 1200, ()),
        (a_usage(cpu_outside=0.701), 0, ("CPU 70.1 % busy, may be 70 %",)),
    ],
)
def test_cpu_is_lent_up_to_how_busy_the_owner_may_be(usage, cpu_milli, keeps):
    lends, why = lending(a_node(cores=4, thresholds=thresholds(cpu_busy_max=0.7)), usage)
    assert (lends.cpu_milli, why) == (cpu_milli, keeps)


def test_too_little_cpu_is_not_lent_at_all():
    lends, why = lending(a_node(cores=4, thresholds=thresholds(cores_min=2)), a_usage(cpu_outside=0.6))
    assert (lends.cpu_milli, why) == (0, ("1.6 cores free, at least 2 cores needed to lend any",))


@pytest.mark.parametrize(
    ("used_gb", "lent_gb", "keeps"),
    [
        (0, 16, ()),
        (8, 8, ()),
        (11.2, 4.8, ()),
        (12, 0, ("memory 75 % used, may be 70 %",)),
        (99, 0, ("memory 618.7 % used, may be 70 %",)),
    ],
)
def test_memory_is_lent_up_to_how_much_the_owner_may_use(used_gb, lent_gb, keeps):
    lends, why = lending(a_node(memory_gb=16, thresholds=thresholds()), a_usage(memory_outside_gb=used_gb))
    assert lends.memory_bytes == pytest.approx(lent_gb * GB, abs=1)
    assert why == keeps


def test_too_little_memory_is_not_lent_at_all():
    node = a_node(memory_gb=16, thresholds=thresholds(memory_used_max=1, memory_gb_min=2))
    lends, why = lending(node, a_usage(memory_outside_gb=14.5))
    assert (lends.memory_bytes, why) == (0, ("1.5 GB free, at least 2.0 GB needed to lend any",))


@pytest.mark.parametrize(
    ("seen", "indexes", "keeps"),
    [
        ({}, [0, 1], ()),
        ({0: (0.5, 22)}, [0, 1], ()),
        ({0: (0.51, 0)}, [1], ("GPU 0 51 % busy, may be 50 %",)),
        ({1: (0, 23)}, [0], ("GPU 1: 1.0 GB free, 2.0 GB needed",)),
        ({0: (0.9, 0), 1: (0.9, 0)}, [], ("GPU 0 90 % busy, may be 50 %", "GPU 1 90 % busy, may be 50 %")),
    ],
)
def test_a_gpu_is_lent_while_its_owner_leaves_it_idle(seen, indexes, keeps):
    lends, why = lending(a_node(gpus=2, thresholds=thresholds()), a_usage(gpus=seen))
    assert ([device.index for device in lends.gpus], why) == (indexes, keeps)


def test_caps_hold_beneath_thresholds():
    node = a_node(cores=8, memory_gb=32, gpus=2, caps=caps(cores=2, memory_gb=4, gpus=1), thresholds=thresholds())
    lends, why = lending(node, a_usage(cpu_outside=0.1, memory_outside_gb=1))
    assert (lends, why) == (node.lendable, ())


@given(
    st.floats(0, 1),
    st.floats(0, 40),
    st.dictionaries(st.integers(0, 2), st.tuples(st.floats(0, 1), st.floats(0, 30)), max_size=3),
)
def test_whatever_is_measured_a_node_lends_within_its_limits(cpu, memory_gb, seen):
    node = a_node(cores=8, memory_gb=32, gpus=2, caps=caps(cores=6), thresholds=thresholds())
    lends, _ = lending(node, a_usage(cpu_outside=cpu, memory_outside_gb=memory_gb, gpus=seen))
    assert 0 <= lends.cpu_milli <= 6000
    assert 0 <= lends.memory_bytes <= 32 * GB
    assert set(lends.gpus) <= set(node.capacity.gpus)
