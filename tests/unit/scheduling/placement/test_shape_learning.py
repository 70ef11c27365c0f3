"""What requests teach: the typical ones are counted in the ledger, and the index of losses follows its rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rows import decode_row, encode_row
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.scheduling.placement.fragmentation import FragmentationIndex
from distributed_grid.scheduling.placement.placement import place
from distributed_grid.scheduling.placement.shape_learning import losses_of, shape_of
from tests.support.builders import Scenario, a_node, a_request

SPARING = Strategy.FRAGMENTATION_AWARE


def a_grid_that_has_seen(*asks: float) -> Scenario:
    """Two nodes with two GPUs each, after requests for so many GPUs each came and went."""
    story = Scenario(a_node("one", gpus=2), a_node("two", gpus=2))
    for number, gpus in enumerate(asks):
        story.ask(a_request(f"t{number}", gpus=gpus))
        story.release(f"t{number}")
    return story


def test_only_requests_for_gpus_teach_something():
    story = a_grid_that_has_seen()
    story.ask(a_request("r1", cores=1))
    assert story.ledger.typical.counted == 0
    story.ask(a_request("r2", gpus=1))
    story.ask(a_request("r2", gpus=1))
    assert story.ledger.typical.counted == 1, "asking again is the same request"


def test_what_was_learned_is_stored_and_found_again():
    story = a_grid_that_has_seen(1, 1, 2, 0.5)
    typical = story.ledger.typical
    assert {shape.gpu_milli for shape, _ in typical.weights} == {500, 1000, 2000}
    again = Ledger(decode_row(row.kind, encode_row(row)) for row in story.ledger.rows(durable_only=True))
    assert again.typical == typical


def test_where_pairs_are_usual_a_single_one_goes_where_a_pair_is_broken_already():
    story = a_grid_that_has_seen(2, 2, 2)
    story.ask(a_request("r1", gpus=1, require=["two"]))
    assert place(story.ledger, a_request("r2", gpus=1, strategy=SPARING)).node == "two"


def test_a_part_goes_onto_the_device_where_it_leaves_the_least_useless():
    story = a_grid_that_has_seen(1, 1, 1, 0.5)
    story.ask(a_request("r1", gpus=0.5, require=["two"]))
    found = place(story.ledger, a_request("r2", gpus=0.5, strategy=SPARING))
    (used,) = story.ledger.leases["r1"].claim.gpus
    assert (found.node, found.claim.gpus[0].index) == ("two", used.index)


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0.25, 0.5, 1, 2]), st.integers(0, 3), st.booleans()), min_size=1, max_size=20
    )
)
def test_the_index_always_says_what_one_made_anew_would_say(steps):
    story = Scenario(*(a_node(f"n{i}", cores=8, gpus=i) for i in range(4)))
    for number, (gpus, cores, lets_go) in enumerate(steps):
        story.ask(a_request(f"r{number}", gpus=gpus, cores=cores or 1, strategy=SPARING))
        if lets_go:
            held = sorted(lease.id for lease in story.ledger.leases.values() if lease.holds)
            if held:
                story.release(held[number % len(held)])
        shape = shape_of(a_request(gpus=gpus, cores=cores or 1).ask)
        anew = FragmentationIndex(story.ledger.columns, story.ledger.typical).losses(shape)
        assert np.array_equal(losses_of(story.ledger).losses(shape), anew)
        story.ledger.check()
