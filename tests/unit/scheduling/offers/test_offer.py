"""Lent part of a measured node; the owner's part stays with the owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distributed_grid.domain.nodes import Node, NodeObservation, Usage
from distributed_grid.domain.resources import NOTHING
from distributed_grid.domain.statistics import Idleness, IdleTendency
from distributed_grid.scheduling.offers.offer import BACKGROUND_BUSY_MILLI, lendable_now, next_offer
from tests.support.builders import GB, NOW, a_node, a_usage, caps, thresholds

BUSY = a_usage(cpu_outside=1, memory_outside_gb=16, gpus={0: (1, 24)})


def test_without_thresholds_a_node_lends_all_it_may_however_busy_it_is():
    node = a_node(cores=4, memory_gb=16, gpus=1, caps=caps(cores=3))
    assert lendable_now(node, replace(BUSY, memory_outside_bytes=0)) == (node.lendable, ())


def test_without_thresholds_a_node_lends_no_memory_that_is_in_use():
    node = a_node(cores=4, memory_gb=16, gpus=1)
    lends, why = lendable_now(node, BUSY)
    assert (lends.cpu_milli, lends.memory_bytes, len(lends.gpus)) == (4000, 0, 1)
    assert why == ("all of its memory is in use",)


@pytest.mark.parametrize(
    ("declared_gb", "room_gb", "lent_gb"),
    [
        (16, 10, 9.5),  # a twentieth is kept
        (64, 40, 39),  # or 1 GB
        (4, 10, 4),  # what is declared is all there
        (4000, 10, 9.5),  # a declaration makes no memory
        (16, 0, 0),
    ],
)
@pytest.mark.parametrize("limits", [None, thresholds(memory_used_max=1)])
def test_a_measured_node_never_lends_more_memory_than_is_available_less_a_reserve(
    declared_gb, room_gb, lent_gb, limits
):
    usage = replace(a_usage(), memory_room_bytes=room_gb * GB)
    lends, _ = lendable_now(a_node(memory_gb=declared_gb, thresholds=limits), usage)
    assert lends.memory_bytes == pytest.approx(lent_gb * GB, abs=1)


def test_a_simulated_node_lends_what_is_declared_less_its_background():
    node = replace(a_node(cores=16, memory_gb=30), simulated=True)
    usage = replace(a_usage(cpu_outside=0.25, memory_outside_gb=23), memory_room_bytes=GB)
    lends, why = lendable_now(node, usage)
    assert (lends.cpu_milli, lends.memory_bytes, why) == (12_000, 7 * GB, ())


def test_a_node_that_does_not_share_lends_nothing_and_says_so():
    assert lendable_now(a_node(caps=caps(can_share=False)), Usage()) == (NOTHING, ("does not share",))


@pytest.mark.parametrize(
    ("usage", "cpu_milli", "keeps"),
    [
        (a_usage(), 4000, ()),
        (a_usage(cpu_outside=0.25), 3000, ()),
        (a_usage(cpu_outside=0.7), 1200, ()),
        (a_usage(cpu_outside=0.701), 0, ("its owner uses 70.1 % of the CPU (limit 70 %)",)),
    ],
)
def test_cpu_is_lent_up_to_how_busy_the_owner_may_be(usage, cpu_milli, keeps):
    lends, why = lendable_now(a_node(cores=4, thresholds=thresholds(cpu_busy_max=0.7)), usage)
    assert (lends.cpu_milli, why) == (cpu_milli, keeps)


def test_too_little_cpu_is_not_lent_at_all():
    lends, why = lendable_now(a_node(cores=4, thresholds=thresholds(cores_min=2)), a_usage(cpu_outside=0.6))
    assert (lends.cpu_milli, why) == (0, ("1.6 cores free, at least 2 cores needed to lend any",))


@pytest.mark.parametrize(
    ("used_gb", "lent_gb", "keeps"),
    [
        (0, 16, ()),
        (8, 8, ()),
        (11.2, 4.8, ()),
        (12, 0, ("its owner uses 75 % of the memory (limit 70 %)",)),
        (99, 0, ("its owner uses 618.7 % of the memory (limit 70 %)",)),
    ],
)
def test_memory_is_lent_up_to_how_much_the_owner_may_use(used_gb, lent_gb, keeps):
    lends, why = lendable_now(a_node(memory_gb=16, thresholds=thresholds()), a_usage(memory_outside_gb=used_gb))
    assert lends.memory_bytes == pytest.approx(lent_gb * GB, abs=1)
    assert why == keeps


def test_too_little_memory_is_not_lent_at_all():
    node = a_node(memory_gb=16, thresholds=thresholds(memory_used_max=1, memory_gb_min=2))
    lends, why = lendable_now(node, a_usage(memory_outside_gb=14.5))
    assert (lends.memory_bytes, why) == (0, ("1.5 GB free, at least 2.0 GB needed to lend any",))


@pytest.mark.parametrize(
    ("seen", "indexes", "keeps"),
    [
        ({}, [0, 1], ()),
        ({0: (0.5, 22)}, [0, 1], ()),
        ({0: (0.51, 0)}, [1], ("its owner uses 51 % of GPU 0 (limit 50 %)",)),
        ({1: (0, 23)}, [0], ("GPU 1: 1.0 GB free, 2.0 GB needed",)),
        (
            {0: (0.9, 0), 1: (0.9, 0)},
            [],
            ("its owner uses 90 % of GPU 0 (limit 50 %)", "its owner uses 90 % of GPU 1 (limit 50 %)"),
        ),
    ],
)
def test_a_gpu_is_lent_while_its_owner_leaves_it_idle(seen, indexes, keeps):
    lends, why = lendable_now(a_node(gpus=2, thresholds=thresholds()), a_usage(gpus=seen))
    assert ([device.index for device in lends.gpus], why) == (indexes, keeps)


def test_caps_hold_beneath_thresholds():
    node = a_node(cores=8, memory_gb=32, gpus=2, caps=caps(cores=2, memory_gb=4, gpus=1), thresholds=thresholds())
    lends, why = lendable_now(node, a_usage(cpu_outside=0.1, memory_outside_gb=1))
    assert (lends, why) == (node.lendable, ())


@given(
    st.floats(0, 1),
    st.floats(0, 40),
    st.dictionaries(st.integers(0, 2), st.tuples(st.floats(0, 1), st.floats(0, 30)), max_size=3),
)
def test_whatever_is_measured_a_node_lends_within_its_limits(cpu, memory_gb, seen):
    node = a_node(cores=8, memory_gb=32, gpus=2, caps=caps(cores=6), thresholds=thresholds())
    lends, _ = lendable_now(node, a_usage(cpu_outside=cpu, memory_outside_gb=memory_gb, gpus=seen))
    assert 0 <= lends.cpu_milli <= 6000
    assert 0 <= lends.memory_bytes <= 32 * GB
    assert set(lends.gpus) <= set(node.capacity.gpus)


def an_idleness(*, lent: bool) -> Idleness:
    leaning = IdleTendency(lent, 0)
    return Idleness(leaning, leaning, ((0, leaning), (1, leaning)))


def free_cpu_milli(cores: int, usage: Usage) -> int:
    busy = usage.cpu_outside_milli
    return cores * (1000 if busy <= BACKGROUND_BUSY_MILLI else max(1000 - busy, 0))


@pytest.mark.parametrize(("outside", "cpu_milli"), [(0.0, 2000), (0.012, 2000), (0.05, 2000), (0.06, 1880)])
def test_a_machine_on_which_next_to_nothing_runs_lends_its_last_core(outside, cpu_milli):
    node = a_node(cores=2, memory_gb=8, thresholds=thresholds())
    assert lendable_now(node, a_usage(cpu_outside=outside))[0].cpu_milli == cpu_milli


@given(st.floats(0, 1.2), st.floats(0, 40), st.booleans())
def test_offer_never_exceeds_the_free_amount_of_the_last_measurement(cpu, memory_gb, lent):
    node = a_node(cores=8, memory_gb=32, gpus=2, thresholds=thresholds())
    usage = a_usage(cpu_outside=cpu, memory_outside_gb=memory_gb)
    lends, _ = lendable_now(node, usage, an_idleness(lent=lent))
    assert 0 <= lends.cpu_milli <= free_cpu_milli(8, usage)
    assert 0 <= lends.memory_bytes <= max(32 * GB - usage.memory_outside_bytes, 0)
    assert lent or lends == NOTHING


def test_resource_idle_for_too_short_is_kept_with_that_reason():
    node = a_node(cores=4, gpus=1, thresholds=thresholds(dwell_s=900))
    _, why = lendable_now(node, a_usage(cpu_outside=0.1, memory_outside_gb=4), an_idleness(lent=False))
    assert why == (
        "its owner uses 10 % of the CPU, but not idle for 15 min yet",
        "its owner uses 25 % of the memory, but not idle for 15 min yet",
        "its owner uses 0 % of GPU 0, but not idle for 15 min yet",
    )


def heard(node: Node, usage: Usage, *, after_s: float = 0) -> NodeObservation:
    return NodeObservation(
        node=node.name, at_ms=NOW + round(1000 * after_s), usage=usage, idleness=an_idleness(lent=True)
    )


NODE = a_node(cores=10, memory_gb=100, thresholds=thresholds(memory_used_max=1))
HALF = next_offer(NODE, heard(NODE, a_usage(cpu_outside=0.5)), None)


@pytest.mark.parametrize(
    ("cpu_outside", "cpu_milli"),
    [
        (0.5, None),
        (0.401, None),
        (0.4, 6000),
        (0.501, 4990),
        (0.9, 1000),
    ],
)
def test_an_offer_shrinks_at_once_and_grows_when_it_is_worth_telling(cpu_outside, cpu_milli):
    offer = next_offer(NODE, heard(NODE, a_usage(cpu_outside=cpu_outside), after_s=2), HALF)
    assert (None if offer is None else offer.lends.cpu_milli) == cpu_milli
    assert offer is None or offer.generation == 2


def test_an_offer_that_grows_old_tells_small_changes_too():
    seen = heard(NODE, a_usage(cpu_outside=0.45), after_s=60)
    offer = next_offer(NODE, seen, HALF)
    assert offer is not None
    assert (offer.lends.cpu_milli, offer.generation) == (5500, 2)


def test_a_reason_alone_that_reads_differently_makes_no_new_offer():
    keeps = an_idleness(lent=False)
    first = next_offer(NODE, replace(heard(NODE, a_usage(cpu_outside=0.8)), idleness=keeps), None)
    second = replace(heard(NODE, a_usage(cpu_outside=0.85), after_s=2), idleness=keeps)
    assert next_offer(NODE, second, first) is None


def test_a_node_heard_without_a_measurement_offers_nothing_new():
    assert next_offer(NODE, NodeObservation(node=NODE.name, at_ms=NOW), None) is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_an_offer_that_stands_never_exceeds_what_is_free(loads):
    offer = None
    for beat, load in enumerate(loads):
        usage = a_usage(cpu_outside=load, memory_outside_gb=100 * load)
        offer = next_offer(NODE, heard(NODE, usage, after_s=2 * beat), offer) or offer
        assert offer is not None
        assert offer.lends.cpu_milli <= free_cpu_milli(10, usage)
        assert offer.lends.memory_bytes <= 100 * GB - usage.memory_outside_bytes


@pytest.mark.parametrize(
    ("outside", "cores", "memory_gb"), [(0.0, 8, 80), (0.5, 3, 30), (0.65, 1.5, 15), (0.8, 0, 0), (0.95, 0, 0)]
)
def test_only_the_free_share_above_the_excess_threshold_is_lent(outside, cores, memory_gb):
    limits = replace(thresholds(cpu_busy_max=1, memory_used_max=1, cores_min=0, memory_gb_min=0), excess_milli=200)
    node = a_node(cores=10, memory_gb=100, gpus=1, thresholds=limits)
    lends, keeps = lendable_now(node, a_usage(cpu_outside=outside, memory_outside_gb=100 * outside))
    assert (lends.cpu_milli, lends.memory_bytes) == (1000 * cores, memory_gb * GB)
    assert len(lends.gpus) == 1
    assert len(keeps) == (0 if cores else 2)


def test_amount_kept_by_the_excess_threshold_has_its_reason():
    limits = replace(thresholds(cpu_busy_max=1, memory_used_max=1), excess_milli=200)
    node = a_node(cores=10, memory_gb=100, thresholds=limits)
    _, keeps = lendable_now(node, a_usage(cpu_outside=0.85, memory_outside_gb=85))
    assert keeps == ("CPU 15 % free, keeps 20 %", "memory 15 % free, keeps 20 %")


UNKNOWN = Usage(cpu_measured=False, gpus_measured=False)


def test_a_node_whose_use_is_not_measured_yet_lends_nothing():
    node = a_node(gpus=1, thresholds=thresholds())
    offer = next_offer(node, NodeObservation(node="gpu1", at_ms=NOW, usage=UNKNOWN), None)
    assert offer is not None
    assert (offer.lends, offer.withheld) == (NOTHING, ("its owner's use is not measured yet",))


def test_a_gpu_that_is_not_measured_yet_is_not_lent():
    node = a_node(cores=4, gpus=1, thresholds=thresholds())
    lends, why = lendable_now(node, replace(a_usage(), gpus_measured=False))
    assert (lends.cpu_milli, lends.gpus, why) == (4000, (), ("GPU 0 is not measured yet",))


def test_without_thresholds_nothing_has_to_be_measured_first():
    node = a_node(gpus=1)
    assert lendable_now(node, UNKNOWN) == (node.lendable, ())
