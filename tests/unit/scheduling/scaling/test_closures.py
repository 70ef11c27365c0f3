"""Scopes of closed offers: what each closes, and that no name means two things."""

from __future__ import annotations

import pytest

from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.workers import OfferClosure
from distributed_grid.scheduling.scaling.closures import OfferPlace, close_scope, closed_text, closure_of

SPOT_GPU = OfferPlace("aws", "g5/a/spot", "a", "spot", "gpu")
SPOT_CPU = OfferPlace("aws", "m5/a/spot", "a", "spot", "cpu")
PLAIN_GPU = OfferPlace("aws", "g5/b", "b", "on-demand", "gpu")


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
