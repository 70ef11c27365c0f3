"""Who lends to a node that needs more: by priority, by what is free, and by how hard a node works itself."""

from __future__ import annotations

from distributed_grid.domain.nodes import GpuUsage, Usage
from distributed_grid.scheduling.placement.placement import place
from tests.support.builders import GB, Scenario, a_node, a_request


def donor(story: Scenario, **asked) -> str:
    request = a_request("b1", target="master", anti_affinity=("master",), **asked)
    found = place(story.ledger, request)
    assert found is not None
    return found.node


def three(**fields) -> Scenario:
    return Scenario(a_node("master", cores=64), a_node("one", cores=8, **fields), a_node("two", cores=8))


def test_the_target_never_lends_to_itself():
    assert donor(three(), cores=1) == "one"


def test_the_node_of_the_highest_priority_lends_first():
    story = Scenario(a_node("master"), a_node("one", cores=8), a_node("two", cores=4, rank=2000))
    assert donor(story, cores=1) == "two"


def test_of_equal_priority_the_one_with_more_left_lends():
    story = three()
    story.ask(a_request("r1", cores=2, require=["one"]))
    assert donor(story, cores=1) == "two"


def test_of_equal_room_the_one_that_works_less_lends():
    story = three()
    story.hear("one", Usage(cpu_busy_milli=300))
    assert donor(story, cores=1) == "two"


def test_memory_and_gpus_count_as_work_too():
    story = three()
    story.hear("one", Usage(memory_bytes=4 * GB))
    assert donor(story, cores=1) == "two"
    story.hear("two", Usage(memory_bytes=4 * GB, gpus=(GpuUsage(0, 900),)))
    assert donor(story, cores=1) == "one"


def test_a_little_work_is_no_reason_against_much_room():
    story = three()
    story.ask(a_request("r1", cores=6, require=["two"]))
    story.hear("one", Usage(cpu_busy_milli=200))
    assert donor(story, cores=1) == "one"


def test_how_hard_a_node_works_counts_by_what_it_has_now():
    story = three()
    story.hear("one", Usage(memory_bytes=8 * GB))
    columns = story.ledger.columns
    assert columns.pressure[columns.rows["one"]] == 250
    story.ledger.check()
