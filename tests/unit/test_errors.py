"""The class of an error says whose fault it is and what to do."""

import pickle

import pytest

from distributed_grid import errors
from distributed_grid.errors import Ambiguous, BadInput, GridError, NotFound, Refused, TimedOut, Unreachable

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GridError)]


def test_exit_codes_are_the_documented_ones() -> None:
    assert {kind.__name__: kind.exit_code for kind in ALL if kind.exit_code != 1} == {
        BadInput.__name__: 2,
        Unreachable.__name__: 3,
        TimedOut.__name__: 124,
    }


def test_only_what_may_pass_is_worth_a_retry() -> None:
    assert {kind.__name__ for kind in ALL if kind.retryable} == {
        "Unreachable",
        "StoreFailed",
        "NoCapacity",
        "Throttled",
    }


def test_a_refusal_carries_its_reasons_and_candidates() -> None:
    assert NotFound("no job j9", ["gpu1: none"]).reasons == ("gpu1: none",)
    both = Ambiguous("j fits two", candidates=["j1", "j2"])
    assert (both.candidates, both.reasons, str(both)) == (("j1", "j2"), (), "j fits two")
    assert isinstance(both, Refused)


@pytest.mark.parametrize("kind", ALL)
def test_an_error_survives_being_sent_to_another_process(kind: type[GridError]) -> None:
    error = kind("why")
    error.__dict__.update(vars(Refused("", ["a"])) if issubclass(kind, Refused) else {})
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (kind, "why", vars(error))
