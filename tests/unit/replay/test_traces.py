"""Traces: what each format means, and one clear line about whatever is wrong in it."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from distributed_grid.domain.events import (
    AttemptEnded,
    AttemptStarted,
    Event,
    LeaseAsked,
    LeaseReleased,
    NodeDeclared,
)
from distributed_grid.domain.leases import Request
from distributed_grid.domain.resources import Amounts, GpuDevice, Priority
from distributed_grid.domain.scheduling_policy import Strategy
from distributed_grid.errors import BadInput
from distributed_grid.reactor import Record
from distributed_grid.replay.traces import MB, PATIENT_MS, Trace, read_asks, read_trace
from tests.support.builders import GB, NOW, Scenario, a_node, a_request, a_submission, an_exit

SWF = """\
; Version: 2.2
; MaxProcs: 128
; Note: none
   11   100      5  28826    1  27758    -1    2  28800    -1  1 153  75 18180  3 -1 -1 -1

   12   90       5     60   16     50    -1   -1     -1    -1  1   7  -1     1  3 -1 -1 -1
   13   95       5     -1   -1     -1    -1   38   6900    -1  5 189  75 18288  5 -1 -1 -1
"""
PODS = """\
name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
pod-0,12000,16384,1,1000,,LS,Running,0,1200,10
pod-1,6000,1024,1,460,V100M16|V100M32,BE,Succeeded,5,65,5
pod-2,6000,1024,4,1000,,Burstable,Running,6,66,6
pod-3,6000,1024,0,0,,LS,Pending,7,66,
"""
NODES = """\
sn,cpu_milli,memory_mib,gpu,model
node-0,64000,262144,2,P100
node-1,96000,1024,0,
"""


def read(tmp_path: Path, text: str | bytes, name: str = "trace") -> Trace:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_trace(str(path))


# ------------------------------------------------------------------ SWF


def test_swf_is_jobs_in_the_order_they_came_on_as_many_cores_as_the_header_says(tmp_path: Path) -> None:
    trace = read(tmp_path, SWF)
    assert [node.capacity.cpu_milli for node in trace.nodes] == [128_000]
    second, first = trace.work
    assert (second.at_ms, first.at_ms) == (90_000, 100_000)
    assert first.request == Request(
        id="job11", user="user153", ask=Amounts(2000), wait_ms=PATIENT_MS, team="group75", expects_ms=28_800_000
    )
    assert (first.run_ms, second.run_ms) == (28_826_000, 60_000)
    assert (second.request.ask.cpu_milli, second.request.expects_ms, second.request.team) == (16_000, 0, "")
    assert trace.left_out == (("that never ran", 1),)


def test_without_a_header_the_widest_job_says_how_wide_the_machine_is(tmp_path: Path) -> None:
    trace = read(tmp_path, "\n".join(line for line in SWF.splitlines() if not line.startswith(";")))
    assert trace.nodes[0].capacity.cpu_milli == 16_000


def test_only_so_many_requests_are_taken(tmp_path: Path) -> None:
    trace = read(tmp_path, SWF)
    assert [one.request.id for one in trace.first(1).work] == ["job12"]
    assert trace.first(None) is trace


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("14 100 5", "line 8: 18 numbers make a job, here are 3"),
        ("14 100 5 60 1 1 -1 2 x -1 1 7 -1 1 3 -1 -1 -1", "line 8: 'x' is not a number"),
        ("14 -5 5 60 1 1 -1 2 9 -1 1 7 -1 1 3 -1 -1 -1", "line 8: no job was submitted then or is that large"),
        ("11 100 5 60 1 1 -1 2 9 -1 1 7 -1 1 3 -1 -1 -1", "job11 is there twice"),
    ],
)
def test_malformed_job_is_refused_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(BadInput) as wrong:
        read(tmp_path, SWF + line + "\n", "sp2.swf")
    assert str(wrong.value) in (f"sp2.swf, {said}", f"sp2.swf: {said}")


# ------------------------------------------------------------------ openb


def test_asks_of_pods_are_read_without_times_and_models() -> None:
    bare = ["name,cpu_milli,memory_mib,num_gpu,gpu_milli\n", "pod-0,1000,512,2,1000\n"]
    assert read_asks("bare", bare) == [Amounts(1000, 512 * MB, 2000)]
    assert [ask.gpu_models for ask in read_asks("pods", PODS.splitlines())] == [(), ("V100M16", "V100M32"), (), ()]


def test_pods_run_on_the_nodes_that_are_listed_beside_them(tmp_path: Path) -> None:
    (tmp_path / "openb_node_list.csv").write_text(NODES)
    trace = read(tmp_path, PODS, "openb_pod_list.csv")
    assert [(node.name, node.capacity.cpu_milli, node.capacity.gpus) for node in trace.nodes] == [
        ("node-0", 64_000, (GpuDevice(0, name="P100"), GpuDevice(1, name="P100"))),
        ("node-1", 96_000, ()),
    ]
    whole, part, several = trace.work
    assert whole.request.ask == Amounts(12_000, 16 * GB, 1000)
    assert part.request.ask == Amounts(6_000, GB, 460, gpu_models=("V100M16", "V100M32"))
    assert several.request.ask.gpu_milli == 4000
    assert [one.request.priority for one in trace.work] == [Priority.HIGH, Priority.LOW, Priority.MEDIUM]
    assert [(one.at_ms, one.run_ms) for one in trace.work] == [(0, 1_190_000), (5_000, 60_000), (6_000, 60_000)]
    assert trace.left_out == (("that never ran", 1),)


def test_pods_without_a_node_list_name_no_nodes(tmp_path: Path) -> None:
    assert read(tmp_path, PODS).nodes == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PODS.replace(",creation_time", ""), "line 1: the column creation_time is missing: without times it cannot"),
        (PODS.replace("cpu_milli", "cpu"), "line 1: the column cpu_milli is missing"),
        (PODS + "pod-9,much,1,0,0,,LS,Running,1,2,1\n", "line 6: 'much' is not a number"),
        (PODS + "pod-9,1,1,0,0\n", "line 6: 11 columns make a row"),
        (PODS + "pod-9,-5,1,0,0,,LS,Running,1,2,1\n", "line 6: -5 is out of range"),
        (PODS + "pod-9,0,0,0,0,,LS,Running,1,2,1\n", "line 6: nothing is asked for"),
    ],
)
def test_malformed_pod_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInput) as wrong:
        read(tmp_path, text, "pods.csv")
    assert str(wrong.value).startswith(f"pods.csv, {said}")


# ------------------------------------------------------------------ our own events


def as_lines(records: list[tuple[int, Record]]) -> str:
    """Records as `grid events --json` prints them."""

    def line(at_ms: int, record: Record) -> str:
        time = datetime.fromtimestamp(at_ms / 1000, UTC).isoformat()
        event = {"time": time, "type": record.type, "user": record.user or None, "subject": record.subject}
        data = json.loads(msgspec.json.encode(record.data))
        return json.dumps(event | {"job_id": data.get("job_id"), "node_id": record.node or None, "data": data})

    return "\n".join(line(at_ms, record) for at_ms, record in records) + "\n"


@pytest.fixture
def log() -> str:
    """A job that waited and ran for 40 seconds, a lease that was held for 60, one that never got anything."""
    scenario = Scenario()
    records: list[tuple[int, Record]] = []

    def handle(event):
        records.extend((scenario.now, record) for record in scenario.handle(event).records)

    handle(NodeDeclared(a_node("gpu1", cores=4, gpus=1, hold_s=20)))
    scenario.heartbeat("gpu1")
    request = replace(
        a_request("r1", cores=4, user="ada", priority="high", prefer=["gpu1"], wait_s=90),
        strategy=Strategy.BEST_FIT,
        expects_ms=50_000,
        team="green",
        labels=(("zone", "a"),),
        anti_affinity=("r9",),
        group="g",
    )
    scenario.handle(NodeDeclared(replace(a_node("gpu1", cores=4, gpus=1, hold_s=20), labels=(("zone", "a"),))))
    handle(LeaseAsked(a_request("r0", cores=1, user="bob", wait_s=0)))
    handle(a_submission(request, retries=2))
    handle(LeaseAsked(a_request("r2", cores=4, gpus=1, user="bob", wait_s=30)))
    for _ in range(10):
        records.extend((scenario.now, record) for record in scenario.advance(6).records)
    assert "r2" not in scenario.ledger.leases
    records.extend((scenario.now, record) for record in scenario.release("r0").records)
    if scenario.job("r1").attempt is None:
        records.extend((scenario.now, record) for record in scenario.heartbeat("gpu1").records)
    attempt = scenario.job("r1").attempt
    handle(AttemptStarted(uid="r1", number=1, fence=attempt.fence, pid=7))
    for _ in range(8):
        records.extend((scenario.now, record) for record in scenario.advance(5).records)
    handle(AttemptEnded(uid="r1", number=1, fence=attempt.fence, outcome=an_exit()))
    return as_lines(records)


def test_our_own_events_can_be_asked_for_again(tmp_path: Path, log: str) -> None:
    trace = read(tmp_path, log, "events.jsonl")
    lease, job = trace.work
    assert (lease.request, lease.is_job) == (a_request("r0", cores=1, user="bob", wait_s=0), False)
    assert lease.run_ms == 60_000
    assert (job.run_ms, job.retries, job.is_job) == (40_000, 2, True)
    assert job.request.ask == Amounts(4000)
    assert (job.request.user, job.request.priority, job.request.wait_ms) == ("ada", Priority.HIGH, 90_000)
    assert (job.request.strategy, job.request.expects_ms, job.request.team) == (Strategy.BEST_FIT, 50_000, "green")
    assert (job.request.labels, job.request.anti_affinity, job.request.group) == ((("zone", "a"),), ("r9",), "g")
    assert job.request.prefer == ("gpu1",)
    assert trace.left_out == (("that never ran", 1),)
    assert [(node.name, node.capacity.cpu_milli, len(node.capacity.gpus)) for node in trace.nodes] == [
        ("gpu1", 4000, 1)
    ]
    assert job.at_ms == NOW


def test_nodes_that_the_log_does_not_declare_have_what_was_lent_there_at_once(tmp_path: Path, log: str) -> None:
    undeclared = "\n".join(line for line in log.splitlines() if "node-declared" not in line)
    (node,) = read(tmp_path, undeclared).nodes
    assert (node.name, node.capacity.cpu_milli) == ("gpu1", 4000)


def log_of(*events: tuple[int, Event]) -> str:
    """The log of a grid of two nodes that were told of this."""
    scenario = Scenario()
    records: list[tuple[int, Record]] = []
    for name in ("gpu1", "gpu2"):
        scenario.handle(NodeDeclared(a_node(name, cores=4)))
    for later_s, event in events:
        scenario.advance(later_s)
        for name in ("gpu1", "gpu2"):
            scenario.heartbeat(name)
        records.extend((scenario.now, record) for record in scenario.handle(event).records)
    return as_lines(records)


def test_a_plain_lease_that_was_displaced_was_held_until_then(tmp_path: Path) -> None:
    low = replace(a_request("low", cores=4, priority="low"), require=("gpu1",))
    urgent = replace(a_request("now", cores=4, priority="urgent"), require=("gpu1",))
    log = log_of((0, LeaseAsked(low)), (30, LeaseAsked(urgent)), (10, LeaseReleased("now", "ada")))
    assert [(one.request.id, one.run_ms) for one in read(tmp_path, log).work] == [("low", 30_000), ("now", 10_000)]
    (node,) = read(tmp_path, log).nodes
    assert (node.name, node.capacity.cpu_milli) == ("gpu1", 4000)


def test_a_gang_is_one_request_on_all_of_its_nodes(tmp_path: Path) -> None:
    gang = replace(a_request("gang", cores=3), gang=2)
    log = log_of((0, LeaseAsked(gang)), (20, LeaseReleased("gang:2", "ada")))
    trace = read(tmp_path, log)
    (one,) = trace.work
    assert (one.request.gang, one.run_ms) == (2, 20_000)
    assert {node.name: node.capacity.cpu_milli for node in trace.nodes} == {"gpu1": 3000, "gpu2": 3000}


def test_job_running_at_the_end_of_the_log_ran_until_then(tmp_path: Path, log: str) -> None:
    cut = "\n".join(line for line in log.splitlines() if '"stopped"' not in line)
    _, job = read(tmp_path, cut).work
    assert job.run_ms == 40_000


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{nonsense", "not JSON"),
        ("{}", "not an event: it needs type, time and subject"),
        ('{"type": "requested", "time": "yesterday", "subject": "r"}', "not an event"),
        (
            '{"type": "requested", "time": "2026-01-01T00:00:00Z", "subject": "r", "data": {"cpu_milli": 5}}',
            "'priority' is missing",
        ),
        (
            '{"type": "requested", "time": "2026-01-01T00:00:00Z", "subject": "r", "data": "much"}',
            "'str' object has no",
        ),
        (
            '{"type": "requested", "time": "2026-01-01T00:00:00Z", "subject": "r", "data": {"job_id": "j"}}',
            "this request does not say how much it asked for",
        ),
        (
            json.dumps(
                {"type": "requested", "time": "2026-01-01T00:00Z", "subject": "r"}
                | {"data": {"cpu_milli": -5, "priority": "low", "wait_ms": 1}}
            ),
            "cpu_milli is out of range: -5",
        ),
    ],
)
def test_malformed_event_is_refused_with_its_line(tmp_path: Path, log: str, line: str, said: str) -> None:
    with pytest.raises(BadInput) as wrong:
        read(tmp_path, log + line + "\n", "events.jsonl")
    assert str(wrong.value).startswith(f"events.jsonl, line {log.count(chr(10)) + 1}: {said}")


# ------------------------------------------------------------------ files


def test_packed_traces_are_unpacked_whatever_their_names(tmp_path: Path) -> None:
    assert read(tmp_path, gzip.compress(SWF.encode()), "packed").work == read(tmp_path, SWF, "plain").work


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "trace is no trace: it is empty"),
        (b"hello\n", "trace is no trace: its first line is 'hello'"),
        (b"; only comments\n", "trace: nothing in it can be replayed"),
        (gzip.compress(SWF.encode())[:-20], "trace cannot be read"),
        (b"\xff\xfe\xff", "trace cannot be read"),
    ],
)
def test_file_in_an_unknown_format_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(BadInput) as wrong:
        read(tmp_path, content)
    assert str(wrong.value).startswith(said)


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_trace(str(tmp_path / "nowhere"))
    with pytest.raises(BadInput, match="Is a directory"):
        read_trace(str(tmp_path))
