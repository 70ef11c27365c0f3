"""The most a node may lend: its capacity within its caps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.nodes import Caps
from distributed_grid.domain.resources import NOTHING
from distributed_grid.domain.states import NodeState
from tests.support.builders import GB, a_capacity, a_node, caps


def test_without_caps_a_node_may_lend_all_it_has():
    node = a_node(cores=4, memory_gb=16, gpus=2, custom={"fpga": 2})
    assert node.lendable == node.capacity


def test_a_node_that_does_not_share_may_lend_nothing():
    assert a_node(caps=caps(can_share=False)).lendable == NOTHING


def test_caps_cut_each_resource_by_itself():
    limits = caps(cores=3, memory_gb=8, gpus=1, custom={"fpga": 1, "laser": 0})
    node = a_node(cores=4, memory_gb=16, gpus=2, custom={"fpga": 2, "laser": 5, "lens": 7}, caps=limits)
    assert node.lendable == a_capacity(3, 8, 1, custom={"fpga": 1, "lens": 7})


def test_caps_above_what_a_node_has_add_nothing():
    assert a_node(cores=4, gpus=1, caps=caps(cores=64, memory_gb=512, gpus=8)).lendable == a_capacity(4, 16, 1)


@given(
    st.builds(
        Caps, st.booleans(), *(st.none() | st.integers(0, 2**40) for _ in range(2)), st.none() | st.integers(0, 4)
    )
)
def test_caps_never_make_a_node_larger(limits):
    node = a_node(cores=4, memory_gb=16, gpus=2, caps=limits)
    assert node.lendable.cpu_milli <= 4000
    assert node.lendable.memory_bytes <= 16 * GB
    assert set(node.lendable.gpus) <= set(node.capacity.gpus)


def test_a_node_is_over_only_when_it_has_left():
    assert [state for state in NodeState if a_node(state=state).is_over] == [NodeState.LEFT]
