"""Replays: figures of small traces that can be worked out by hand."""

from __future__ import annotations

import itertools
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from distributed_grid.domain.leases import Request
from distributed_grid.domain.nodes import Node
from distributed_grid.domain.resources import Amounts, Capacity, GpuDevice, Priority
from distributed_grid.domain.scheduling_policy import Quota, SchedulingPolicy, Strategy
from distributed_grid.errors import BadInput
from distributed_grid.replay.candidates import candidates
from distributed_grid.replay.replay import (
    BEGIN_MS,
    NOTICE_MS,
    STOP_MS,
    Presence,
    Replay,
    owner_presences,
    replay_candidates,
)
from distributed_grid.replay.replay_statistics import (
    COLOURS,
    PANEL,
    TOP,
    ReplayStatistics,
    StatisticsTable,
    chart,
    round_times,
)
from distributed_grid.replay.traces import PATIENT_MS, LoggedJob, Trace

GB = 1024**3
SVG = "{http://www.w3.org/2000/svg}"


def machine(name: str = "m1", cores: float = 4, **kwargs) -> Node:
    return Node(name=name, capacity=Capacity(round(1000 * cores), 64 * GB), **kwargs)


def job(at_s: float, run_s: float, cores: float = 4, *, uid: str = "", user: str = "ada", **kwargs) -> LoggedJob:
    wait_ms = kwargs.pop("wait_ms", PATIENT_MS)
    is_job, retries = kwargs.pop("is_job", True), kwargs.pop("retries", 0)
    request = Request(id=uid or f"j{at_s:g}", user=user, ask=Amounts(round(1000 * cores)), wait_ms=wait_ms, **kwargs)
    return LoggedJob(
        at_ms=round(1000 * at_s), request=request, run_ms=round(1000 * run_s), retries=retries, is_job=is_job
    )


def replayed(
    work: list[LoggedJob], nodes: list[Node] | None = None, policy: SchedulingPolicy | None = None, **kwargs
) -> StatisticsTable:
    return Replay(work, nodes or [machine()], policy or SchedulingPolicy(), **kwargs).run().table()


def test_two_jobs_that_do_not_fit_together_run_one_after_the_other() -> None:
    table = replayed([job(0, 100), job(10, 50)])
    assert (table.jobs, table.finished, table.refused, table.waiting) == (2, 2, 0, 0)
    assert table.mean_wait_s == pytest.approx(45)
    assert (table.median_wait_s, table.p95_wait_s) == pytest.approx((45, 85.5))
    assert table.bounded_slowdown == pytest.approx((1 + 140 / 50) / 2)
    assert table.makespan_s == 150
    assert table.cpu_utilisation == pytest.approx(1.0)
    assert table.gpu_utilisation is None
    assert table.jain == 1.0


def test_half_of_a_machine_is_half_of_its_use_and_short_jobs_do_not_count_as_shorter() -> None:
    table = replayed([job(0, 1, cores=2), job(99, 1, cores=2)])
    assert table.cpu_utilisation == pytest.approx(0.01)
    assert table.bounded_slowdown == 1.0


def test_impossible_request_is_refused_and_a_long_wait_gives_up() -> None:
    table = replayed([job(0, 100), job(1, 1, cores=5), job(2, 1, wait_ms=30_000)])
    assert (table.finished, table.refused, table.gave_up) == (1, 1, 1)


def test_a_request_beyond_its_quota_is_left_waiting_and_the_replay_ends() -> None:
    held = job(0, 10, uid="held", is_job=False, user="bob", duration_ms=0)
    quota = SchedulingPolicy(quotas=(Quota(name="ada", cpu_milli=1000),))
    table = replayed([held, job(1, 1)], [machine(cores=8)], quota)
    assert table.finished == 1
    assert table.waiting + table.refused == 1


def test_a_plain_lease_is_held_for_as_long_as_it_was() -> None:
    table = replayed([job(0, 60, uid="lease", is_job=False), job(10, 20)])
    assert (table.finished, table.makespan_s) == (2, 80)
    assert table.cpu_utilisation == pytest.approx(1.0)


def test_request_behind_a_plain_lease_waits_for_its_end() -> None:
    lease = job(0, 6_000, uid="lease", is_job=False)
    patient = replayed([lease, job(10, 20)])
    assert (patient.finished, patient.makespan_s) == (2, 6_020)
    impatient = replayed([lease, job(10, 20, wait_ms=3_600_000)])
    assert (impatient.finished, impatient.gave_up, impatient.waiting) == (1, 1, 0)


def test_request_beyond_its_quota_gives_up_and_owners_do_not_prolong_a_replay() -> None:
    quota = SchedulingPolicy(quotas=(Quota(name="bob", leases=0),))
    owners = [owner_presences(1, "m1", per_day=24, lasts_ms=3_600_000, begin_ms=BEGIN_MS)]
    table = replayed([job(0, 10, user="bob", wait_ms=86_400_000), job(1, 10, user="bob")], None, quota, owners=owners)
    assert (table.gave_up + table.refused, table.waiting) in ((1, 1), (2, 0))


def test_urgent_work_displaces_other_work_which_loses_what_it_did() -> None:
    table = replayed([job(0, 100, priority=Priority.LOW), job(50, 10, uid="now", priority=Priority.URGENT)])
    assert (table.finished, table.preemptions) == (2, 1)
    stopped = 50 + STOP_MS / 1000
    assert table.cpu_seconds_lost == pytest.approx(4 * stopped)
    assert table.makespan_s == pytest.approx(stopped + 10 + 100)


def test_a_plain_lease_that_is_displaced_is_a_run_cut_short() -> None:
    lease = job(0, 100, uid="lease", is_job=False, priority=Priority.LOW)
    table = replayed([lease, job(50, 10, uid="now", priority=Priority.URGENT)])
    assert (table.finished, table.gave_up, table.preemptions) == (1, 1, 1)


def test_checkpoints_keep_what_was_done_until_then() -> None:
    work = [job(0, 100, priority=Priority.LOW), job(50, 10, uid="now", priority=Priority.URGENT)]
    table = replayed(work, checkpoint_ms=20_000)
    stopped = 50 + STOP_MS / 1000
    assert table.cpu_seconds_lost == pytest.approx(4 * (stopped - 40))
    assert table.makespan_s == pytest.approx(stopped + 10 + 60)


def test_an_owner_who_comes_back_gets_the_machine_and_the_job_goes_elsewhere() -> None:
    there = Presence("m1", BEGIN_MS + 20_000, BEGIN_MS + 500_000)
    table = replayed([job(0, 100)], [machine("m1", rank=2000), machine("m2")], owners=[iter([there])])
    gone = 20 + NOTICE_MS / 1000
    assert (table.finished, table.preemptions) == (1, 1)
    assert table.cpu_seconds_lost == pytest.approx(4 * gone)
    assert table.makespan_s == pytest.approx(gone + 100)


def test_work_waits_for_an_owner_to_leave_when_there_is_no_other_machine() -> None:
    there = Presence("m1", BEGIN_MS + 20_000, BEGIN_MS + 500_000)
    assert replayed([job(0, 100)], owners=[iter([there])]).makespan_s == pytest.approx(600)


def test_owners_come_by_their_seed_about_as_often_as_was_said() -> None:
    day = 86_400_000

    def a_year(seed: int) -> list[Presence]:
        coming = owner_presences(seed, "m1", per_day=4, lasts_ms=3_600_000, begin_ms=0)
        return list(itertools.takewhile(lambda one: one.from_ms < 365 * day, coming))

    assert a_year(1) == a_year(1)
    assert a_year(1) != a_year(2)
    assert 1100 < len(a_year(1)) < 1400
    assert list(owner_presences(1, "m1", per_day=0, lasts_ms=1, begin_ms=0)) == []


def test_a_fast_node_is_done_sooner() -> None:
    assert replayed([job(0, 100)], [machine(speed_milli=2000)]).makespan_s == 50


def test_uneven_service_shows() -> None:
    work = [job(at, 10, uid=f"ada{at}") for at in range(20)] + [job(300, 10, user="bob", uid="bob")]
    assert 0.5 < replayed(work).jain < 0.9


def test_progress_is_scheduled() -> None:
    heard = []
    replayed([job(0, 1), job(1, 1)], progress=lambda done, of: heard.append((done, of)))
    assert heard == [(1, 2), (2, 2)]


def test_a_long_pause_between_jobs_makes_no_node_suspect() -> None:
    table = replayed([job(0, 10), job(5, 10), job(40_000_000, 10, uid="later")])
    assert (table.finished, table.waiting) == (3, 0)


def test_the_same_replay_gives_the_same_figures() -> None:
    work = [job(at, 3 * at % 17 + 1, cores=1 + at % 4, user=f"u{at % 3}") for at in range(1, 120)]
    nodes = [machine("m1"), machine("m2", cores=8)]
    assert replayed(work, nodes) == replayed(work, nodes)


# ------------------------------------------------------------------ what is compared

CONFIG = """
name: two
nodes:
  - {name: big, host: big.example, cpu_count: 16, memory_gb: 64, trust_declared: true}
  - {name: small, host: small.example, cpu_count: 2, memory_gb: 8}
"""


def a_trace(*work: LoggedJob, nodes: tuple[Node, ...] = (machine(),)) -> Trace:
    return Trace("a trace", work, nodes)


def nothing() -> Capacity:
    raise AssertionError("nobody asked for this machine")


def test_without_anything_to_compare_the_traces_own_nodes_are_used() -> None:
    (only,) = candidates(a_trace(job(0, 1)), None, (), nothing)
    assert ([node.name for node in only.nodes], only.policy) == (["m1"], SchedulingPolicy())


def test_a_config_brings_its_nodes_with_what_they_declare(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(CONFIG)
    (only,) = candidates(a_trace(job(0, 1)), str(path), (), nothing)
    assert only.name == "two.yaml"
    assert [(node.name, node.capacity.cpu_milli) for node in only.nodes] == [("big", 16_000), ("small", 2_000)]


def test_strategies_and_configs_are_compared_by_name(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(CONFIG)
    found = candidates(a_trace(job(0, 1)), None, ("best-fit", str(path)), nothing)
    assert [(one.name, one.policy.strategy) for one in found] == [
        ("best_fit", Strategy.BEST_FIT),
        ("two.yaml", Strategy.LOAD_BALANCED),
    ]
    assert found[0].nodes[0].name == "m1"


def test_a_named_strategy_is_used_for_requests_that_asked_for_another_too() -> None:
    trace = a_trace(job(0, 1, strategy=Strategy.SPREAD, prefer=("m1", "gone")))
    (found,) = candidates(trace, None, ("best_fit",), nothing)
    (work,) = found.work(trace.work)
    assert (work.request.strategy, work.request.prefer) == (Strategy.BEST_FIT, ("m1",))
    (as_it_is,) = candidates(trace, None, (), nothing)
    assert as_it_is.work(trace.work)[0].request.strategy is Strategy.SPREAD


@pytest.mark.parametrize(
    ("words", "nodes", "said"),
    [
        (("bestfit",), (machine(),), "no strategy 'bestfit'"),
        (("node_specific",), (machine(),), "node_specific says nothing"),
        ((), (), "a trace does not say which nodes there were: name some with --config"),
    ],
)
def test_unusable_candidates_are_refused(words: tuple[str, ...], nodes: tuple[Node, ...], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        candidates(a_trace(job(0, 1), nodes=nodes), None, words, nothing)


def test_a_config_that_does_not_say_what_a_node_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vague.yaml"
    path.write_text("name: vague\nnodes:\n  - {name: far, host: far.example}\n")
    with pytest.raises(BadInput, match="far does not say what it has: add cpu_count and memory_gb"):
        candidates(a_trace(job(0, 1)), str(path), (), nothing)


def test_a_local_node_that_does_not_say_has_what_this_machine_has(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    path.write_text("name: here\nnodes:\n  - {name: here, host: local}\n")
    (found,) = candidates(a_trace(job(0, 1)), str(path), (), lambda: Capacity(3000, GB))
    assert found.nodes[0].capacity.cpu_milli == 3000


def test_policies_are_replayed_one_after_the_other_over_the_same_owners() -> None:
    trace = a_trace(*(job(at * 600, 500, cores=1, uid=f"j{at}") for at in range(100)))
    policies = candidates(trace, None, ("best_fit", "spread"), nothing)
    found = list(replay_candidates(trace, policies, seed=3, owners_per_day=20))
    assert [name for name, _ in found] == ["best_fit", "spread"]
    assert all(figures.table().preemptions > 0 for _, figures in found)


# ------------------------------------------------------------------ the chart


def drawn(replays: list[tuple[str, ReplayStatistics]]) -> tuple[list[str], list[tuple[str, list[int]]]]:
    """The texts of a chart, and the colour and the heights of each of its lines."""
    svg = ET.fromstring(chart(replays))
    texts = [element.text or "" for element in svg.iter(f"{SVG}text")]
    lines = [
        (line.attrib["stroke"], [int(point.split(",")[1]) for point in line.attrib["points"].split()])
        for line in svg.iter(f"{SVG}polyline")
    ]
    return texts, lines


def test_the_chart_is_an_svg_with_a_line_for_each_policy_in_each_panel() -> None:
    work = [job(at, 30, cores=2, uid=f"j{at}") for at in range(50)]
    replays = [(name, Replay(work, [machine()], SchedulingPolicy()).run()) for name in ("best_fit", "<spread>")]
    texts, lines = drawn(replays)
    assert {"CPU in use", "waiting requests", "best_fit", "<spread>", "0%", "100%"} <= {*texts}
    assert [colour for colour, _ in lines] == [*COLOURS[:2], *COLOURS[:2]]
    assert min(lines[0][1]) == TOP
    assert min(lines[2][1]) < max(lines[2][1])
    assert chart(replays) == chart(replays)


def test_gpus_get_a_panel_of_their_own_and_nothing_at_all_can_be_drawn() -> None:
    node = Node(name="m1", capacity=Capacity(4000, GB))
    texts, lines = drawn([("none", ReplayStatistics([node.lendable]))])
    assert (len(lines), "GPU in use" in texts) == (2, False)
    assert {*lines[0][1]} == {TOP + PANEL}
    with_gpu = Node(name="m1", capacity=Capacity(4000, GB, (GpuDevice(0),)))
    texts, lines = drawn([("one", Replay([job(0, 1)], [with_gpu], SchedulingPolicy()).run())])
    assert (len(lines), "GPU in use" in texts) == (3, True)


def test_a_line_is_a_part_of_what_that_policy_has_and_not_of_what_another_one_has() -> None:
    work = [job(0, 100, cores=4)]
    replays = [
        (name, Replay(work, [machine(cores=cores)], SchedulingPolicy()).run()) for name, cores in (("s", 4), ("l", 8))
    ]
    _, lines = drawn(replays)
    small, large = (min(heights) for _, heights in lines[:2])
    assert (small, large) == (TOP, TOP + PANEL // 2)


def test_a_column_shows_the_mean_of_its_time() -> None:
    figures = Replay([job(0, 50, cores=4), job(100, 100, cores=4)], [machine()], SchedulingPolicy()).run()
    _, lines = drawn([("one", figures)])
    columns = len(lines[0][1])
    assert [lines[0][1][round(part * columns)] for part in (0.1, 0.4, 0.75)] == [TOP, TOP + PANEL, TOP]


@pytest.mark.parametrize(
    ("span", "times"),
    [(28.1, [0, 5, 10, 15, 20, 25]), (2, [0, 0.5, 1, 1.5, 2]), (100, [0, 20, 40, 60, 80, 100]), (0.001, [0, 0.001])],
)
def test_times_are_told_in_round_numbers(span: float, times: list[float]) -> None:
    assert round_times(span) == times
