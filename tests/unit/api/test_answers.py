"""Answers about nodes, offers, leases and jobs."""

from __future__ import annotations

import json

import msgspec
import pytest
from msgspec.structs import replace

from distributed_grid.api.answers.common import Viewer
from distributed_grid.api.answers.jobs import DeliveryRow, JobRow
from distributed_grid.api.answers.leases import AllocationRow
from distributed_grid.api.answers.nodes import NodeRow, OfferRow, UnusedBorrowing
from distributed_grid.api.framing import MAX_FRAME_BYTES
from distributed_grid.domain.deliveries import FetchOrder
from distributed_grid.domain.events import NodeDrained
from distributed_grid.domain.jobs import Command, Ending, Outcome
from distributed_grid.domain.ledger import Ledger
from distributed_grid.domain.rebalancing import PressureWatch, RebalanceState
from tests.support.builders import NOW, Scenario, a_ledger, a_node, a_request, a_submission, a_usage, caps, thresholds


def shown(ledger: Ledger, name: str = "gpu1", now: int = NOW) -> NodeRow:
    return NodeRow.of(ledger, ledger.nodes[name], now)


def test_a_node_shows_what_is_left_and_how_it_ranks() -> None:
    node = a_node("gpu1", cores=4, memory_gb=16, gpus=2, rank=2500, caps=caps(cores=3))
    labels = {"labels": (("disk", "ssd"),), "tags": ("fast",)}
    scenario = Scenario(replace(node, speed_milli=1500, cost_milli=250, **labels))
    scenario.ask(a_request("r1", cores=1, memory_gb=4, gpus=0.5))
    row = shown(scenario.ledger)
    assert row.open
    assert (row.cpu_free, row.memory_free_gb, row.gpus_free) == (2, 12, 1.5)
    assert (row.cpu_lent, row.leases) == (1, 1)
    assert (row.priority, row.speed, row.cost_per_hour) == (2.5, 1.5, 0.25)
    assert (row.labels, row.tags, row.keeps) == ({"disk": "ssd"}, ["fast"], [])


def test_a_node_that_keeps_something_says_why() -> None:
    assert shown(a_ledger(a_node("gpu1", caps=caps(can_share=False)))).keeps == ["does not share"]
    scenario = Scenario(a_node("gpu1", cores=2, memory_gb=1))
    scenario.ask(a_request("all", cores=2, memory_gb=1))
    assert shown(scenario.ledger).keeps == ["everything it lends is lent"]
    busy = a_ledger(a_node("gpu1", thresholds=thresholds(cpu_busy_max=0.3), hold_s=60))
    scenario = Scenario(ledger=busy)
    scenario.advance(0)
    scenario.heartbeat("gpu1", a_usage(cpu_outside=0.9))
    for _ in range(400):
        scenario.now += 2_000
        scenario.heartbeat("gpu1", a_usage(cpu_outside=0.9))
    row = shown(scenario.ledger, now=scenario.now)
    assert row.keeps
    assert row.cpu_free == 0


def test_a_node_that_is_not_open_has_nothing_free() -> None:
    scenario = Scenario(replace(a_node("gpu1", hold_s=60), wanted=True))
    scenario.handle(NodeDrained("gpu1"))
    row = shown(scenario.ledger)
    assert (row.open, row.cpu_free, row.memory_free_gb) == (False, 0, 0)
    assert (row.state, row.stopped, row.keeps) == ("draining", False, ["draining"])
    scenario = Scenario(a_node("gpu1", hold_s=60))
    scenario.advance(20, heard=False)
    row = shown(scenario.ledger, now=scenario.now)
    assert (row.open, row.keeps) == (False, ["not heard from for 20 s"])


@pytest.mark.parametrize(("wanted", "stopped"), [(False, True), (True, False)])
def test_a_node_whose_agent_nobody_wants_is_stopped_and_one_that_is_started_is_joining(
    wanted: bool, stopped: bool
) -> None:
    row = shown(Ledger([replace(a_node("gpu1", hold_s=60), wanted=wanted)]))
    reason = "stopped; type: grid cluster start gpu1" if stopped else "not heard from yet"
    assert (row.state, row.stopped, row.keeps) == ("joining", stopped, [reason])


def test_a_node_shows_what_was_borrowed_for_it_and_went_back_unused() -> None:
    watch = PressureWatch(unused_amount=4 * 1024**3, unused_ms=600_000)
    row = shown(a_ledger(a_node("gpu1"), rows=[RebalanceState(node="gpu1", memory=watch)]))
    assert row.unused_borrowing == [UnusedBorrowing("memory", 4.0, 600.0)]
    assert shown(a_ledger(a_node("gpu1"))).unused_borrowing == []


def test_a_node_of_this_machine_is_stopped_once_nothing_of_it_is_lent() -> None:
    scenario = Scenario(a_node("gpu1"))
    scenario.ask(a_request("r1", cores=1))
    scenario.handle(NodeDrained("gpu1", reclaims=False))
    assert shown(scenario.ledger).stopped is False
    scenario.release("r1")
    row = shown(scenario.ledger)
    assert (row.stopped, row.keeps) == (True, ["stopped; type: grid cluster start gpu1"])


@pytest.mark.parametrize(("most", "kinds"), [(5, ["cpu", "memory", "gpu", "fpga"]), (2, ["cpu", "memory"]), (0, [])])
def test_a_node_shows_no_more_offers_than_the_config_allows(most: int, kinds: list[str]) -> None:
    ledger = a_ledger(a_node("gpu1", gpus=1, custom={"fpga": 2}))
    assert [offer.resource_type for offer in OfferRow.of_node(Viewer(0, most), ledger, "gpu1")] == kinds


def test_a_list_of_jobs_with_the_longest_commands_can_be_sent() -> None:
    scenario = Scenario(a_node("gpu1", cores=4))
    words = ("x" * 131_000,) * 14
    for number in range(60):
        submitted = a_submission(a_request(f"j{number}", cores=1))
        scenario.handle(replace(submitted, command=replace(submitted.command, argv=("echo", *words))))
    jobs = [JobRow.listed(Viewer(0), job) for job in scenario.ledger.jobs.values()]
    assert len(msgspec.json.encode(jobs)) < MAX_FRAME_BYTES
    assert all(job.command.startswith("echo xxx") and job.command.endswith("…") for job in jobs)
    whole = JobRow.of(Viewer(0), next(iter(scenario.ledger.jobs.values())))
    assert len(whole.command) > 14 * 131_000
    scenario.handle(a_submission(a_request("short", cores=1)))
    job = scenario.ledger.jobs["short"]
    assert JobRow.listed(Viewer(0), job) == JobRow.of(Viewer(0), job)


def test_secrets_in_the_command_of_a_job_are_masked_in_every_view() -> None:
    scenario = Scenario(a_node("gpu1", cores=4))
    secret = "ghp_" + "x7" * 15
    argv = ("sh", "-c", "PGPASSWORD=geheim psql work", "x" * 950, secret)
    submitted = a_submission(a_request("j", cores=1))
    scenario.handle(replace(submitted, command=replace(submitted.command, argv=argv)))
    job = scenario.ledger.jobs["j"]
    assert job.command.argv == argv  # it runs as it was given
    for row in (JobRow.of(Viewer(0), job), JobRow.listed(Viewer(0), job)):
        assert row.command.startswith("sh -c 'PGPASSWORD=*** psql work' xxx")
        assert "geheim" not in row.command
        assert "ghp_" not in row.command


def test_secrets_in_the_payload_of_a_task_are_masked() -> None:
    scenario = Scenario(a_node("gpu1", cores=4))
    submitted = a_submission(a_request("j", cores=1))
    payload = '{"type":"query","password":"geheim"}'
    scenario.handle(replace(submitted, command=replace(submitted.command, argv=("true",), payload=payload)))
    job = scenario.ledger.jobs["j"]
    shown = JobRow.of(Viewer(0), replace(job, command=replace(job.command, argv=()))).command
    assert shown == 'task {"type":"query","password":"***"}'


def test_reader_sees_of_anothers_job_no_text_that_it_or_its_owner_wrote() -> None:
    scenario = Scenario(a_node("gpu1"))
    secret = "xyzzy"
    command = Command(("run", secret), ((secret, secret),), f"/home/{secret}", payload=secret)
    scenario.handle(a_submission(a_request("r1", user="ann"), command=command))
    (job,) = scenario.ledger.jobs.values()
    texts = {"detached_reason": secret, "checkpoint_problem": secret, "result": json.dumps(secret)}
    outcome = Outcome(Ending.EXITED, exit_code=1, detail=secret)
    attempts = tuple(replace(attempt, outcome=outcome) for attempt in job.attempts)
    job = replace(job, outcome=outcome, attempts=attempts, fetch=FetchOrder((secret,), secret), **texts)
    (lease,) = scenario.ledger.leases.values()
    lease = replace(lease, detail=secret)
    for reader, is_shown in ((None, True), ("ann", True), ("bob", False)):
        viewer = Viewer(0).for_reader(reader)
        rows = (
            JobRow.of(viewer, job),
            JobRow.listed(viewer, job),
            DeliveryRow.of(viewer, job, None),
            AllocationRow.of(viewer, lease, job),
        )
        for row in rows:
            assert (secret.encode() in msgspec.json.encode(row)) is is_shown, row
