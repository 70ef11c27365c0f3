"""How long things are expected to take."""

from __future__ import annotations

from distributed_grid.domain.leases import Lease, Request
from distributed_grid.scheduling.queue.durations import LEAVING_MS, end_ms, expected_ms
from tests.support.builders import Scenario, a_node, a_request


def a_story_with_runs(*seconds: float) -> Scenario:
    """Ada's jobs took so long."""
    story = Scenario(a_node("n1", cores=8))
    for number, length in enumerate(seconds):
        story.submit(a_request(f"j{number}"), starts=True)
        story.later(length)
        story.end(f"j{number}")
    return story


def expected_s(story: Scenario, request: Request, *, job: str = "job-x") -> float:
    return expected_ms(story.ledger, Lease(request.id, request, story.now, job=job)) / 1000


def test_a_guess_is_the_mean_of_the_last_two_runs():
    assert expected_s(a_story_with_runs(1000, 10, 30), a_request("x")) == 20


def test_one_run_is_no_guess():
    assert expected_s(a_story_with_runs(10), a_request("x")) == 0


def test_only_jobs_are_guessed():
    assert expected_s(a_story_with_runs(10, 30), a_request("x"), job="") == 0


def test_a_guess_shortens_a_term_and_never_lengthens_it():
    story = a_story_with_runs(10, 30)
    assert expected_s(story, a_request("x", duration_s=100)) == 20
    assert expected_s(story, a_request("x", duration_s=5)) == 5


def test_what_was_said_counts_more_than_a_guess():
    story = a_story_with_runs(10, 30)
    assert expected_s(story, a_request("x", expects_ms=70_000)) == 70
    assert expected_s(story, a_request("x", expects_ms=70_000, duration_s=40)) == 40


def test_what_outlives_its_word_is_expected_to_take_twice_as_long_and_so_on():
    story = Scenario(a_node("n1", cores=8))
    start = story.now
    story.ask(a_request("r1", expects_ms=60_000))
    ends = []
    for _ in range(4):
        story.later(50)
        ends.append((end_ms(story.ledger, story.ledger.leases["r1"], story.now) - start) // 1000)
    assert ends == [60, 120, 240, 240]


def test_what_is_due_is_expected_to_be_over_any_moment():
    story = Scenario(a_node("n1", cores=8))
    story.ask(a_request("r1", expects_ms=60_000))
    story.later(60)
    assert end_ms(story.ledger, story.ledger.leases["r1"], story.now) == story.now + 1


def test_what_outlives_its_word_is_over_by_its_term():
    story = Scenario(a_node("n1", cores=8))
    story.ask(a_request("r1", expects_ms=60_000, duration_s=100))
    ends_at = story.ledger.leases["r1"].ends_at_ms
    story.later(80)
    assert end_ms(story.ledger, story.ledger.leases["r1"], story.now) == ends_at


def test_without_guesses_a_broken_word_says_nothing():
    story = Scenario(a_node("n1", cores=8))
    story.ask(a_request("r1", expects_ms=60_000))
    story.later(50)
    assert end_ms(story.ledger, story.ledger.leases["r1"], story.now, guess=False) == story.now + 10_000
    story.later(30)
    assert end_ms(story.ledger, story.ledger.leases["r1"], story.now, guess=False) == 0


def test_who_was_told_to_go_is_soon_gone():
    story = Scenario(a_node("n1", cores=8))
    story.submit(a_request("r1"), starts=True)
    story.cancel("r1")
    assert end_ms(story.ledger, story.lease_of("r1"), story.now) == story.now + LEAVING_MS
