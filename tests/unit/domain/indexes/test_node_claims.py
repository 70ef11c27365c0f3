"""Claims of one node, and the claim of an ask out of the rest."""

# mypy: disable-error-code="union-attr"
# A None where a thing should be fails the test by itself.

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.domain.indexes.node_claims import NodeClaims, shared_though_exclusive
from distributed_grid.domain.resources import NOTHING, Capacity, Claim, GpuDevice, GpuShare
from tests.support.builders import GB, a_capacity, an_ask

EXCLUSIVE_AND_SHARED = (GpuDevice(0, 24 * GB, exclusive=True), GpuDevice(1, 24 * GB))


def lend(lends: Capacity, *asks) -> tuple[NodeClaims, list[Claim | None]]:
    """Take one claim after the other."""
    held = NodeClaims()
    claims = []
    for ask in asks:
        claim = held.claim_for(ask, lends)
        if claim is not None:
            held.add(claim)
        claims.append(claim)
    return held, claims


@pytest.mark.parametrize(
    ("ask", "fits"),
    [
        (an_ask(cores=4), True),
        (an_ask(cores=4.001), False),
        (an_ask(memory_gb=16), True),
        (an_ask(memory_gb=16.1), False),
        (an_ask(gpus=2), True),
        (an_ask(gpus=3), False),
        (an_ask(gpus=1, gpu_memory_gb=24), True),
        (an_ask(gpus=1, gpu_memory_gb=25), False),
        (an_ask(gpus=0.5, gpu_memory_gb=24), True),
        (an_ask(gpus=0.5, gpu_memory_gb=25), False),
        (an_ask(custom={"fpga": 2}), True),
        (an_ask(custom={"fpga": 3}), False),
        (an_ask(custom={"laser": 1}), False),
        (an_ask(cores=4, memory_gb=16, gpus=2, custom={"fpga": 2}), True),
    ],
)
def test_an_ask_fits_up_to_what_is_lent(ask, fits):
    claim = NodeClaims().claim_for(ask, a_capacity(4, 16, 2, custom={"fpga": 2}))
    assert (claim is not None) == fits


def test_nothing_fits_where_nothing_is_lent():
    assert NodeClaims().claim_for(an_ask(cores=0.001), NOTHING) is None


def test_a_whole_gpu_takes_a_device_nobody_is_on():
    _, claims = lend(a_capacity(gpus=2), an_ask(gpus=0.1), an_ask(gpus=1), an_ask(gpus=1))
    assert [claim and claim.gpus[0].index for claim in claims] == [0, 1, None]


def test_a_whole_gpu_comes_with_all_its_memory():
    _, (claim,) = lend(a_capacity(gpus=1), an_ask(gpus=1, gpu_memory_gb=2))
    assert claim.gpus == (GpuShare(0, 1000, 24 * GB),)


def test_whole_gpus_take_the_smallest_devices_that_do_and_name_them_in_order():
    devices = (GpuDevice(0, 48 * GB), GpuDevice(1, 24 * GB), GpuDevice(2, 12 * GB))
    _, (claim,) = lend(a_capacity(gpus=devices), an_ask(gpus=2))
    assert [share.index for share in claim.gpus] == [1, 2]
    _, (claim,) = lend(a_capacity(gpus=devices), an_ask(gpus=1, gpu_memory_gb=13))
    assert [share.index for share in claim.gpus] == [1]


def test_parts_are_packed_onto_the_fullest_device_they_fit_on():
    _, claims = lend(a_capacity(gpus=2), an_ask(gpus=0.3), an_ask(gpus=0.3), an_ask(gpus=0.6), an_ask(gpus=0.4))
    assert [claim.gpus[0].index for claim in claims] == [0, 0, 1, 0]


def test_a_part_of_a_gpu_gets_that_part_of_its_memory_unless_it_says_otherwise():
    _, claims = lend(a_capacity(gpus=1), an_ask(gpus=0.25), an_ask(gpus=0.25, gpu_memory_gb=10))
    assert [claim.gpus[0].memory_bytes for claim in claims] == [6 * GB, 10 * GB]


def test_a_part_does_not_fit_where_the_memory_of_the_device_is_taken():
    _, claims = lend(a_capacity(gpus=1), an_ask(gpus=0.1, gpu_memory_gb=20), an_ask(gpus=0.1, gpu_memory_gb=5))
    assert claims[1] is None


def test_an_exclusive_device_is_only_lent_whole():
    lends = a_capacity(gpus=EXCLUSIVE_AND_SHARED)
    _, claims = lend(lends, an_ask(gpus=0.5), an_ask(gpus=0.6), an_ask(gpus=1), an_ask(gpus=0.1))
    assert [claim and claim.gpus[0].index for claim in claims] == [1, None, 0, 1]


def test_whole_free_counts_devices_nobody_is_on_and_part_free_the_largest_part():
    lends = a_capacity(gpus=EXCLUSIVE_AND_SHARED)
    held, _ = lend(lends, an_ask(gpus=0.4))
    assert (held.whole_free(lends), held.part_free(lends)) == (1, 600)
    assert (NodeClaims().whole_free(NOTHING), NodeClaims().part_free(NOTHING)) == (0, 0)


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (Claim(cpu_milli=2001), "2001 of 2000 millicores lent"),
        (Claim(memory_bytes=GB + 1), f"{GB + 1} of {GB} bytes lent"),
        (Claim(gpus=(GpuShare(7, 100),)), "GPU 7: 100 of 1000 lent"),
        (Claim(gpus=(GpuShare(0, 700), GpuShare(0, 400))), "GPU 0: 1100 of 1000 lent"),
        (Claim(gpus=(GpuShare(0, 100, 25 * GB),)), "GPU 0: 100 of 1000 lent"),
        (Claim(custom=(("fpga", 2),)), "2 of 1 fpga lent"),
        (Claim(custom=(("laser", 1),)), "1 of 0 laser lent"),
        (Claim(2000, GB, (GpuShare(0, 1000, 24 * GB),), (("fpga", 1),)), None),
    ],
)
def test_what_is_lent_beyond_a_limit_is_said_in_words(claim, words):
    assert NodeClaims([claim]).excess_over(a_capacity(2, 1, 1, custom={"fpga": 1})) == words


def test_a_part_of_an_exclusive_device_is_named():
    limit = a_capacity(gpus=EXCLUSIVE_AND_SHARED)
    part, whole = Claim(gpus=(GpuShare(0, 500),)), Claim(gpus=(GpuShare(0, 1000),))
    assert shared_though_exclusive([part], limit) == "GPU 0 lent in parts, though exclusive"
    assert shared_though_exclusive([whole, Claim(gpus=(GpuShare(1, 500),))], limit) is None


def test_books_are_equal_by_what_is_taken():
    assert NodeClaims([Claim(1), Claim(2)]) == NodeClaims([Claim(3)])
    assert NodeClaims() != NodeClaims([Claim(custom=(("fpga", 1),))])
    assert NodeClaims() != "a held"


capacities = st.builds(
    lambda cores, gpus, exclusive, fpgas: Capacity(
        cores,
        cores,
        tuple(GpuDevice(index, 1000, exclusive=index in exclusive) for index in range(gpus)),
        (("fpga", fpgas),) if fpgas else (),
    ),
    st.integers(0, 4000),
    st.integers(0, 3),
    st.sets(st.integers(0, 2)),
    st.integers(0, 2),
)
asks = st.builds(
    an_ask,
    cores=st.integers(0, 2),
    gpus=st.sampled_from([0, 0.001, 0.3, 0.5, 0.999, 1, 2]),
    custom=st.sampled_from([None, {"fpga": 1}]),
)


@given(capacities, st.lists(asks, max_size=12))
def test_whatever_is_asked_the_claims_stay_within_the_limit(lends, asked):
    held, claims = lend(lends, *asked)
    granted = [claim for claim in claims if claim is not None]
    assert held.excess_over(lends) is None
    assert shared_though_exclusive(granted, lends) is None
    for device in lends.gpus:
        shares = [share.milli for claim in granted for share in claim.gpus if share.index == device.index]
        assert sum(shares) <= 1000
        assert 1000 not in shares or shares == [1000]
        assert not device.exclusive or shares in ([], [1000])


@given(capacities, st.lists(asks, max_size=8), st.randoms(use_true_random=False))
def test_giving_everything_back_in_any_order_leaves_the_book_as_it_was(lends, asked, random):
    held, claims = lend(lends, *asked)
    granted = [claim for claim in claims if claim is not None]
    random.shuffle(granted)
    for claim in granted:
        held.remove(claim)
    assert held == NodeClaims()


@given(capacities, st.lists(asks, max_size=6), asks)
def test_a_claim_is_exactly_what_was_asked_for(lends, asked, ask):
    held, _ = lend(lends, *asked)
    claim = held.claim_for(ask, lends)
    if claim is not None:
        assert (claim.cpu_milli, claim.memory_bytes, claim.custom) == (ask.cpu_milli, ask.memory_bytes, ask.custom)
        assert sum(share.milli for share in claim.gpus) == ask.gpu_milli
