"""Availability of workers: offers in a closed scope, and room on the control plane's own machine."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.states import WorkerState
from distributed_grid.domain.workers import OfferClosure, WorkerResources
from distributed_grid.scheduling.scaling.worker_availability import (
    OfferPlace,
    close_scope,
    closed_text,
    closure_of,
    has_room,
    own_machine,
    with_host,
)
from tests.support.builders import GB, a_ledger, a_node, a_request, caps
from tests.support.scaling import ScalingScenario, a_type, rules

SPOT_GPU = OfferPlace("aws", "g5/a/spot", "a", "spot", "gpu")
SPOT_CPU = OfferPlace("aws", "m5/a/spot", "a", "spot", "cpu")
PLAIN_GPU = OfferPlace("aws", "g5/b", "b", "on-demand", "gpu")
HERE = replace(a_type(cores=2, memory_gb=2, price=0), on_this_machine=True)


@pytest.mark.parametrize(
    ("scope", "closed"),
    [
        ("offer:g5/a/spot", {SPOT_GPU}),
        ("zone:a", {SPOT_GPU, SPOT_CPU}),
        ("market:spot", {SPOT_GPU, SPOT_CPU}),
        ("kind:gpu", {SPOT_GPU, PLAIN_GPU}),
        ("market:spot kind:gpu", {SPOT_GPU}),
        ("zone:a market:spot kind:cpu", {SPOT_CPU}),
        ("provider:aws", {SPOT_GPU, SPOT_CPU, PLAIN_GPU}),
        ("zone:spot", set()),
        ("market:a", set()),
    ],
)
def test_a_scope_closes_the_offers_that_all_of_its_words_are_true_of(scope: str, closed: set[OfferPlace]) -> None:
    ledger = Ledger([OfferClosure("aws", scope, 5_000, "no capacity")])
    assert {place for place in (SPOT_GPU, SPOT_CPU, PLAIN_GPU) if closure_of(ledger, place)} == closed


def test_a_closure_of_another_provider_closes_nothing() -> None:
    assert closure_of(Ledger([OfferClosure("gcp", "zone:a", 5_000)]), SPOT_GPU) is None


@pytest.mark.parametrize(
    ("text", "scope"),
    [
        ("", "offer:g5/a/spot"),
        ("kind:gpu market:spot", "market:spot kind:gpu"),
        ("zone:a", "zone:a"),
        ("zone:b", "offer:g5/a/spot"),
        ("a", "offer:g5/a/spot"),
        ("what else: 1", "offer:g5/a/spot"),
        ("kind:gpu kind:gpu", "offer:g5/a/spot"),
    ],
)
def test_a_scope_that_the_offer_is_not_in_closes_that_offer_alone(text: str, scope: str) -> None:
    assert SPOT_GPU.scope_like(text) == scope


def test_the_longest_closure_counts_and_a_shorter_one_does_not_replace_it() -> None:
    aside = OfferClosure("aws", "offer:g5/a/spot", 3_600_000, "it never joined")
    ledger = Ledger([aside, OfferClosure("aws", "zone:a", 180_000, "no capacity")])
    assert closed_text(closure_of(ledger, SPOT_GPU), 600_500) == "it never joined; not tried for 3000 s"
    assert close_scope(ledger, "aws", "offer:g5/a/spot", 200_000, "no capacity") == aside
    assert close_scope(ledger, "aws", "zone:a", 200_000, "again").why == "again"


def test_the_own_machine_is_a_measured_local_node_that_shares() -> None:
    far, here = a_node("far", hold_s=60), a_node("here")
    assert own_machine(a_ledger(far, here)) == "here"
    assert own_machine(a_ledger(far)) == ""
    assert own_machine(a_ledger(replace(here, simulated=True))) == ""
    assert own_machine(a_ledger(a_node("here", caps=caps(can_share=False)))) == ""


def test_a_worker_gets_no_more_than_its_host_lends() -> None:
    ledger = a_ledger(a_node("here", cores=2, memory_gb=1))
    found = with_host(ledger, replace(HERE, resources=WorkerResources(4000, 8 * GB)))
    assert (found.host, found.resources) == ("here", WorkerResources(2000, GB))
    assert found.warning == "2 cores instead of 4 and 1.0 GB of memory instead of 8.0 GB: here lends no more"
    assert with_host(ledger, replace(HERE, on_this_machine=False)).host == ""


def test_there_is_room_while_the_host_has_what_the_worker_needs() -> None:
    scenario = ScalingScenario(a_node("here", cores=4))
    assert has_room(scenario.ledger, HERE)
    scenario.ask(a_request("most", cores=3))
    assert not has_room(scenario.ledger, HERE)
    assert has_room(scenario.ledger, replace(HERE, on_this_machine=False))


def test_scaling_starts_nothing_on_a_machine_that_is_full() -> None:
    scenario = ScalingScenario(a_node("here", cores=4), scaling=rules(HERE))
    scenario.ask(a_request("most", cores=3))
    scenario.ask(a_request("waits", cores=2))
    for _ in range(5):
        assert scenario.evaluate(seconds=10).action == "none"
    assert not scenario.ledger.workers


def test_scaling_starts_as_many_as_the_machine_has_room_for() -> None:
    nodes = a_node("here", cores=4, caps=caps(cores=4)), a_node("far", cores=1, hold_s=60)
    scenario = ScalingScenario(*nodes, scaling=rules(HERE))
    for number in range(6):  # the machine itself is not for them
        scenario.ask(a_request(f"r{number}", cores=1, anti_affinity=("here",)))
    assert scenario.evaluate().action == "scale_up"
    assert len(scenario.in_state(WorkerState.WANTED)) == 2
    lent = sum(lease.claim.cpu_milli for lease in scenario.ledger.leases_of("here") if lease.claim is not None)
    assert lent == 4000
